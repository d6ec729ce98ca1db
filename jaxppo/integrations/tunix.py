"""Tunix (google-tunix 0.1.7, and its main branch of September 2026): policy losses and forward
passes without logits.

docs/frameworks.md says how it plugs in. What uses no logits stays Tunix's (advantages, rewards, the
value loss of PPO), and so do the losses of its supervised and DPO trainers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jaxppo.base.arrays import check, check_flag
from jaxppo.head.call import HeadOptions
from jaxppo.integrations.tunix_loss import OF_THEIR_HEAD, MeshOrMaker, check_head_options
from jaxppo.integrations.tunix_loss import batch_of as batch_of
from jaxppo.integrations.tunix_loss import config_of as config_of
from jaxppo.integrations.tunix_loss import loss_fn as loss_fn
from jaxppo.integrations.tunix_models import check_unread
from jaxppo.integrations.tunix_models import head_of as head_of
from jaxppo.integrations.tunix_models import hidden_states as hidden_states
from jaxppo.integrations.tunix_models import log_probs as log_probs
from jaxppo.integrations.tunix_sampler import check_served
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.sharding import ParallelMesh


def register(
    config: PolicyLossConfig | None = None,
    parallel: MeshOrMaker = None,
    *,
    name: str = "jaxppo",
    agentic: bool = False,
    lora_scale: float | None = None,
    num_segments: int | None = None,
    **options: Unpack[HeadOptions],
) -> str:
    """Puts a policy loss into Tunix's registry; a learner takes it with
    `GRPOConfig(policy_loss_fn=name)`.

    Tunix's learner still decides which log-probs are computed before the loss. For reference
    log-probs it needs a `GRPOConfig(beta=...)` other than 0. For old log-probs the plain learner
    needs `num_iterations` above 1; the agentic one hands over the sampler's in their place, unless
    its `use_rollout_logps` is False.

    Args:
      config, parallel, lora_scale, num_segments, **options: see `loss_fn`.
      name: the loss's name in the registry; an existing name is replaced, "grpo" and "ppo" too.
      agentic: whether the learner is that of `tunix.rl.agentic`, whose batches have the sampler's
        log-probs. Those of the plain `GRPOLearner` of Tunix 0.1.7 have none.

    Returns:
      The name.

    Raises:
      ModuleNotFoundError: Tunix is not installed.
      TypeError, ValueError: a wrong config or option; a config that reads what no batch of that
        learner has.
    """
    check_flag("agentic", agentic)
    check("name", repr(name), isinstance(name, str) and name != "", "a text")
    from tunix.rl import function_registry

    loss = loss_fn(config, parallel, lora_scale=lora_scale, num_segments=num_segments, **options)
    if config is not None:
        check_served(config, agentic)
    function_registry.register_policy_loss_fn(name)(loss)
    return name


def rl_cluster(*, lora_scale: float | None = None, **options: Unpack[HeadOptions]) -> Any:
    """Tunix's `RLCluster` as a class whose reference, old and actor passes compute log-probs
    without logits.

    Everything else is Tunix's, and the actor's pass too where models are offloaded to the CPU. The
    old log-probs are at the sampler's temperature, like the loss; Tunix's vanilla rollout computes
    them at 1.

    Args:
      lora_scale: alpha / rank of an adapter of the head; see `Head.of`.
      **options: of the head, see `HeadOptions`.

    Returns:
      A subclass of `tunix.rl.rl_cluster.RLCluster`. `parallel_of(role)` is the mesh of a role, by
      default what `ParallelMesh` makes of Tunix's mesh; override it in a subclass for another.

    Raises:
      ModuleNotFoundError: Tunix is not installed.
    """
    check_head_options(lora_scale, options)
    from tunix.rl import rl_cluster as theirs

    return _without_logits(theirs, lora_scale, options)


def _without_logits(theirs: Any, lora_scale: float | None, options: HeadOptions) -> Any:
    """See `rl_cluster`; `theirs` is the module tunix.rl.rl_cluster."""

    passed = partial(_passed, theirs.Mode.TRAIN, {"lora_scale": lora_scale, **options})
    base: Any = theirs.RLCluster

    class RLCluster(base):  # type: ignore[misc]
        """Tunix's cluster, without logits in its forward passes."""

        def parallel_of(self, role: Any) -> ParallelMesh | None:
            mesh = self.r2m[role]
            if mesh.empty or mesh.size == 1:
                return None
            return ParallelMesh(mesh)

        @property
        def inference_worker(self) -> Any:
            worker = super().inference_worker

            def get(
                prompts: Any,
                completions: Any,
                pad_id: int,
                eos_id: int,
                temperature: float = 1.0,
                **packed: Any,
            ) -> jax.Array:
                model = worker.get_model("reference")
                packed |= {"pad_id": pad_id, "temperature": temperature}
                return passed(self, theirs.Role.REFERENCE, model, (prompts, completions), **packed)

            return _Instead(worker, get_ref_per_token_logps=get)

        @property
        def rollout(self) -> Any:
            rollout = super().rollout

            def get(prompt_tokens: Any, completion_tokens: Any, **packed: Any) -> jax.Array:
                packed = {"pad_id": rollout.pad_id()} | packed
                return passed(
                    self,
                    theirs.Role.ROLLOUT,
                    rollout.model(),
                    (prompt_tokens, completion_tokens),
                    **packed,
                )

            return _Instead(rollout, get_per_token_logps=get)

        def get_actor_per_token_logps(
            self,
            prompt_tokens: Any,
            completion_tokens: Any,
            pad_id: int,
            eos_id: int,
            micro_batch_size: int | None = None,
            temperature: float | None = None,
            **packed: Any,
        ) -> jax.Array:
            # the weights at the start of the step, which only Tunix holds
            anchor = self._anchor_policy_state
            if anchor is None or self.cluster_config.offload_to_cpu:
                return super().get_actor_per_token_logps(
                    prompt_tokens,
                    completion_tokens,
                    pad_id,
                    eos_id,
                    micro_batch_size,
                    temperature,
                    **packed,
                )
            model = _with_weights(self.actor_trainer.model, anchor)
            tokens = (prompt_tokens, completion_tokens)
            packed |= {"pad_id": pad_id, "temperature": temperature}
            return passed(self, theirs.Role.ACTOR, model, tokens, micro_batch_size, **packed)

    return RLCluster


def _with_weights(model: Any, weights: Any) -> Any:
    """The model with these weights, placed as its own are."""
    from flax import nnx

    graph, own = nnx.split(model)
    placed = jax.tree.map(lambda weight, x: jax.device_put(weight, x.sharding), weights, own)
    return nnx.merge(graph, placed)


def _passed(
    mode: Any,
    options: Mapping[str, Any],
    cluster: Any,
    role: Any,
    model: Any,
    tokens: tuple[Any, Any],
    rows: int | None = None,
    *,
    pad_id: int,
    temperature: float | None = None,
    **more: Any,
) -> jax.Array:
    """The log-probs of prompts and completions, some rows at a time; by default at the sampler's
    temperature.
    """
    names = ("segment_ids", "segment_positions", "routed_experts", "token_mask")
    arrays = {name: more.pop(name, None) for name in names}
    check_unread(
        "a pass for log-probs", {name: x for name, x in more.items() if name not in OF_THEIR_HEAD}
    )
    if temperature is None:
        temperature = cluster.get_rollout_config(mode=mode).temperature
    count = len(tokens[0])
    rows = rows or count
    call: Any = {
        "pad_id": pad_id,
        "temperature": temperature,
        "parallel": cluster.parallel_of(role),
        **options,
    }

    def of_rows(first: int) -> jax.Array:
        (prompts, completions), some = jax.tree.map(
            lambda x: x[first : first + rows], (tokens, arrays)
        )
        return log_probs(model, prompts, completions, **some, **call)

    return jnp.concatenate([of_rows(first) for first in range(0, count, rows)])


class _Instead:
    """An object with some of its methods replaced."""

    def __init__(self, of: Any, **methods: Any) -> None:
        self._of = of
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)
