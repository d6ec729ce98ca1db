"""Tunix (google-tunix 0.1.7, and its main branch of August 2026): policy losses and forward passes without logits.

    from jaxppo.integrations import tunix as jaxppo_tunix

    name = jaxppo_tunix.register(PolicyLossConfig(...), ParallelMesh(mesh))      # the policy's pass
    cluster = jaxppo_tunix.rl_cluster()(actor=..., reference=..., ...)           # the reference and old passes
    GRPOLearner(cluster, GRPOConfig(policy_loss_fn=name), reward_fns=...).train(data)

How this module plugs into Tunix:

- Policy losses have a registry, and this module uses it.
- The reference, old and actor passes have no registry. They are methods of `RLCluster`, of its inference worker and of
  its rollout, and call a function of a module. `rl_cluster()` is a subclass of `RLCluster` that overrides them. Other
  code still gets Tunix's own classes.
- The advantages, the rewards and the value loss of PPO use no logits, so this module does not touch them.
- Its experimental trainers take a loss by `with_loss_fn`, and an `AlgorithmAdapter` brings one: `loss_fn()` makes it.
  It can be sent to a trainer in another process.
- Its supervised and DPO trainers have losses of their own, which this module does not touch.

This module looks at what Tunix defines, not at its version. If Tunix has a `LossOutput`, the loss is returned as a sum
and its denominator, which Tunix adds up over micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jaxppo.head.call import HeadOptions
from jaxppo.head.prepare import check_options
from jaxppo.integrations.tunix_config import config_of as config_of
from jaxppo.integrations.tunix_loss import MeshOrMaker
from jaxppo.integrations.tunix_loss import batch_of as batch_of
from jaxppo.integrations.tunix_loss import loss_fn as loss_fn
from jaxppo.integrations.tunix_models import check_unread
from jaxppo.integrations.tunix_models import head_of as head_of
from jaxppo.integrations.tunix_models import hidden_states as hidden_states
from jaxppo.integrations.tunix_models import log_probs as log_probs
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.sharding import ParallelMesh


def register(
    config: PolicyLossConfig | None = None,
    parallel: MeshOrMaker = None,
    *,
    name: str = "jaxppo",
    lora_scale: float | None = None,
    num_segments: int | None = None,
    **options: Unpack[HeadOptions],
) -> str:
    """Puts a policy loss into Tunix's registry; a learner takes it with `GRPOConfig(policy_loss_fn=name)`.

    The loss is that of `loss_fn`. Tunix's learner still decides which log-probs are computed before the
    loss. For reference log-probs it needs a `GRPOConfig(beta=...)` other than 0; for old log-probs it needs
    `num_iterations` above 1.

    Args:
      config: the loss; None takes it from the learner's own config, see `config_of`.
      parallel: the mesh of the actor, or a function that makes it, see `loss_fn`.
      name: the loss's name in the registry; an existing name is replaced, "grpo" and "ppo" too.
      lora_scale: alpha / rank of an adapter of the head; see `Head.of`.
      num_segments: the most sequences in a packed row; by default as many as it has tokens, which takes memory where
        rows are long.
      **options: of the head, see `HeadOptions`.

    Returns:
      The name.

    Raises:
      ModuleNotFoundError: Tunix is not installed.
      TypeError, ValueError: a wrong config or option.
    """
    from tunix.rl import function_registry

    loss = loss_fn(config, parallel, lora_scale=lora_scale, num_segments=num_segments, **options)
    function_registry.register_policy_loss_fn(name)(loss)
    return name


def rl_cluster(*, lora_scale: float | None = None, **options: Unpack[HeadOptions]) -> Any:
    """Tunix's `RLCluster` as a class whose reference, old and actor passes compute log-probs without logits.

    On Tunix's main branch the class is called `RLEngine`, and the old name is an alias.

    It overrides the `inference_worker` property, for `get_ref_per_token_logps`; the `rollout` property, for
    `get_per_token_logps`; and `get_actor_per_token_logps`, which stays Tunix's where models are offloaded to the CPU.
    Everything else is Tunix's. The old log-probs are at the sampler's temperature, like the loss; Tunix's vanilla
    rollout computes them at 1.

    Args:
      lora_scale: alpha / rank of an adapter of the head; see `Head.of`.
      **options: of the head, see `HeadOptions`.

    Returns:
      A subclass of `tunix.rl.rl_cluster.RLCluster`. `parallel_of(role)` is the mesh of a role, by default what
      `ParallelMesh` makes of Tunix's mesh; override it in a subclass for another.

    Raises:
      ModuleNotFoundError: Tunix is not installed.
    """
    from tunix.rl import rl_cluster as theirs

    check_options(options)
    passes = _Passes(theirs, lora_scale, options)

    class RLCluster(theirs.RLCluster):  # type: ignore[misc]
        """Tunix's cluster, without logits in its forward passes."""

        def parallel_of(self, role: Any) -> ParallelMesh | None:
            mesh = self.r2m[role]
            return None if mesh.empty or mesh.size == 1 else ParallelMesh(mesh)

        @property
        def inference_worker(self) -> Any:
            return passes.inference_worker(self, super().inference_worker)

        @property
        def rollout(self) -> Any:
            return passes.rollout(self, super().rollout)

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
            if self._anchor_policy_state is None or self.cluster_config.offload_to_cpu:
                return super().get_actor_per_token_logps(
                    prompt_tokens, completion_tokens, pad_id, eos_id, micro_batch_size, temperature, **packed
                )
            rows = micro_batch_size or len(prompt_tokens)
            return passes.actor(self, rows, temperature, pad_id, (prompt_tokens, completion_tokens), packed)

    return RLCluster


_READ_BY_PASSES = ("pad_id", "temperature", "segment_ids", "segment_positions")


@dataclasses.dataclass(frozen=True)
class _Passes:
    """The forward passes of a cluster of `rl_cluster`, which is the first argument of each.

    Args:
      tunix: the module tunix.rl.rl_cluster.
      lora_scale: alpha / rank of an adapter of the head.
      options: of the head.
    """

    tunix: Any
    lora_scale: float | None
    options: HeadOptions

    def inference_worker(self, cluster: Any, worker: Any) -> _Instead:
        """Tunix's inference worker, whose reference pass has no logits."""

        def get(
            prompts: Any, completions: Any, pad_id: int, eos_id: int, temperature: float = 1.0, **packed: Any
        ) -> jax.Array:
            given = {"pad_id": pad_id, "temperature": temperature, **packed}
            model = worker.get_model("reference")
            return self._log_probs(cluster, self.tunix.Role.REFERENCE, model, prompts, completions, **given)

        return _Instead(worker, get_ref_per_token_logps=get)

    def rollout(self, cluster: Any, rollout: Any) -> _Instead:
        """Tunix's rollout, whose pass for old log-probs has no logits."""

        def get(prompt_tokens: Any, completion_tokens: Any, **packed: Any) -> jax.Array:
            given = {"pad_id": rollout.pad_id(), "temperature": self._temperature(cluster), **packed}
            role, model = self.tunix.Role.ROLLOUT, rollout.model()
            return self._log_probs(cluster, role, model, prompt_tokens, completion_tokens, **given)

        return _Instead(rollout, get_per_token_logps=get)

    def actor(
        self,
        cluster: Any,
        rows: int,
        temperature: float | None,
        pad_id: int,
        tokens: tuple[Any, Any],
        packed: dict[str, Any],
    ) -> jax.Array:
        """The log-probs of prompts and completions under the weights at the start of the step, some rows at a time."""
        from flax import nnx

        _check_read(packed)
        anchor = cluster._anchor_policy_state  # the weights at the start of the step, which only Tunix holds
        graph, state = nnx.split(cluster.actor_trainer.model)
        model = nnx.merge(graph, jax.tree.map(lambda kept, x: jax.device_put(kept, x.sharding), anchor, state))
        temperature = self._temperature(cluster) if temperature is None else temperature

        def of_rows(first: int) -> jax.Array:
            args, kwargs = jax.tree.map(lambda x: x[first : first + rows], (tokens, packed))
            kwargs |= {"pad_id": pad_id, "temperature": temperature}
            return self._log_probs(cluster, self.tunix.Role.ACTOR, model, *args, **kwargs)

        return jnp.concatenate([of_rows(first) for first in range(0, len(tokens[0]), rows)])

    def _log_probs(self, cluster: Any, role: Any, model: Any, *args: Any, **kwargs: Any) -> jax.Array:
        _check_read(kwargs)
        kwargs = {name: kwargs[name] for name in _READ_BY_PASSES if name in kwargs}
        kwargs |= {"parallel": cluster.parallel_of(role), "lora_scale": self.lora_scale}
        return log_probs(model, *args, **kwargs, **self.options)

    def _temperature(self, cluster: Any) -> float:
        found: float = cluster.get_rollout_config(mode=self.tunix.Mode.TRAIN).temperature
        return found


def _check_read(given: dict[str, Any]) -> None:
    unread = {name: value for name, value in given.items() if name not in _READ_BY_PASSES}
    check_unread("a pass for log-probs", unread)


class _Instead:
    """An object with some of its methods replaced."""

    def __init__(self, of: Any, **methods: Callable[..., Any]) -> None:
        self._of = of
        self.__dict__.update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)
