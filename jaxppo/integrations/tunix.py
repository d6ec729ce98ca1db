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
- Its supervised and DPO trainers have another loss (`with_loss_fn`), which this module does not touch.

This module looks at what Tunix defines, not at its version. If Tunix has a `LossOutput`, the loss is returned as a sum
and its denominator, which Tunix adds up over micro-batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jaxppo.base.arrays import Aggregation
from jaxppo.base.kl import KL, Estimator
from jaxppo.base.metrics import Metric, Metrics
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.call import HeadOptions
from jaxppo.head.prepare import check_options
from jaxppo.integrations.tunix_models import check_unread, hidden_of_example
from jaxppo.integrations.tunix_models import head_of as head_of
from jaxppo.integrations.tunix_models import hidden_states as hidden_states
from jaxppo.integrations.tunix_models import log_probs as log_probs
from jaxppo.losses.policy import policy_loss_from_hidden
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy_losses import GSPO, PPO, PolicyLoss
from jaxppo.sharding import ParallelMesh
from jaxppo.step.aggregation import Normalizer

_AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "sequence-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "sequence-mean-token-sum-norm": "sequence_mean_token_sum",  # its norm is the number of sequences
    "sequence-mean-token-scale": "sequence_mean_token_sum_norm",  # and here the length of the completions
}
_ESTIMATORS: dict[str, Estimator] = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}


def register(
    config: PolicyLossConfig | None = None,
    parallel: ParallelMesh | None = None,
    *,
    name: str = "jaxppo",
    lora_scale: float | None = None,
    num_segments: int | None = None,
    **options: Unpack[HeadOptions],
) -> str:
    """Puts a policy loss into Tunix's registry; a learner takes it with `GRPOConfig(policy_loss_fn=name)`.

    The loss takes the model's hidden states and its head to `policy_loss_from_hidden`. Batches may be padded or packed;
    the model may have adapters and a frozen head. Tunix's learner still decides which log-probs are computed before the
    loss. For reference log-probs it needs a `GRPOConfig(beta=...)` other than 0; for old log-probs it needs
    `num_iterations` above 1. Without old log-probs the ratio is 1, as in Tunix's own loss.

    Args:
      config: the loss; None takes it from the learner's own config, see `config_of`.
      parallel: the mesh of the actor.
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

    if config is not None and not isinstance(config, PolicyLossConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected PolicyLossConfig or None")
    check_options(options)

    def loss_fn(model: Any, train_example: Any, algo_config: Any, pad_id: int, eos_id: int, **more: Any) -> Any:
        more.pop("compute_logps_chunk_size", None)  # of Tunix's own log-probs; memory= bounds ours
        check_unread("the loss", more)
        batch = batch_of(train_example, pad_id, parallel=parallel, num_segments=num_segments)
        completion_length = train_example.completion_ids.shape[1]
        found = config_of(algo_config, completion_length) if config is None else _agreed(config, algo_config)
        found = _fitting(found, batch, getattr(train_example, "sampler_is_weights", None))
        hidden = _hidden(model, train_example, pad_id)
        normalizer = Normalizer.of(found, batch, parallel=parallel)
        loss, metrics = policy_loss_from_hidden(
            hidden,
            head_of(model, lora_scale=lora_scale),
            batch,
            found,
            parallel=parallel,
            normalizer=normalizer,
            temperature=getattr(algo_config, "temperature", 1.0) or 1.0,
            **options,
        )
        return _output(loss, metrics, normalizer)

    function_registry.register_policy_loss_fn(name)(loss_fn)
    return name


def config_of(algo_config: Any, completion_length: int | None = None) -> PolicyLossConfig:
    """The policy loss of a Tunix `GRPOConfig`, or of one that derives from it (DAPO, Dr. GRPO).

    Args:
      algo_config: its epsilon, epsilon_high, epsilon_c, beta, kl_loss_mode, kl_clamp_value, loss_algo and
        loss_agg_mode.
      completion_length: C, the denominator of "sequence-mean-token-scale".

    Returns:
      The config. Its entropy is a metric, as in Tunix.

    Raises:
      ValueError: a value without an equivalent here, or a PPOConfig: pass its loss to `register` as a config.

    Example:
      >>> from types import SimpleNamespace
      >>> grpo = SimpleNamespace(epsilon=0.2, epsilon_high=0.28, beta=0.0, loss_algo="grpo", loss_agg_mode="token-mean")
      >>> config_of(grpo).loss
      PPO(clip_low=0.2, clip_high=0.28, dual_clip=None)
    """
    algorithm = getattr(algo_config, "loss_algo", None)
    if algorithm not in ("grpo", "gspo-token"):
        raise ValueError(
            f"algo_config: got {type(algo_config).__name__} with loss_algo={algorithm!r}, expected 'grpo' or "
            "'gspo-token'; for another loss use register(config)"
        )
    mode = algo_config.loss_agg_mode
    if mode not in _AGGREGATIONS:
        raise ValueError(f"loss_agg_mode: got {mode!r}, expected one of {', '.join(_AGGREGATIONS)}")
    aggregation = _AGGREGATIONS[mode]
    norm = float(completion_length) if aggregation == "sequence_mean_token_sum_norm" and completion_length else None
    high = getattr(algo_config, "epsilon_high", None)
    bounds = (algo_config.epsilon, algo_config.epsilon if high is None else high)
    dual = getattr(algo_config, "epsilon_c", None)
    loss: PolicyLoss = PPO(*bounds, dual) if algorithm == "grpo" else GSPO(*bounds, dual, "token")
    return PolicyLossConfig(loss, kl=_kl(algo_config), aggregation=aggregation, aggregation_norm=norm)


def _kl(algo_config: Any) -> KL | None:
    beta = algo_config.beta
    if not beta:
        return None
    mode, clamp = algo_config.kl_loss_mode, getattr(algo_config, "kl_clamp_value", None)
    if mode not in _ESTIMATORS:
        raise ValueError(f"kl_loss_mode: got {mode!r}, expected one of {', '.join(_ESTIMATORS)}")
    if clamp is None:
        return KL(beta, _ESTIMATORS[mode])
    if (mode, float(clamp)) == ("low_var_kl", 10.0):
        return KL(beta, "low_var_kl")
    raise ValueError(f"kl_clamp_value: got {clamp} with {mode!r}, expected None, or 10 with 'low_var_kl'")


def _agreed(config: PolicyLossConfig, algo_config: Any) -> PolicyLossConfig:
    """The config, if the learner computes what the config needs and has the same penalty."""
    beta, mine = getattr(algo_config, "beta", None), 0.0 if config.kl is None else config.kl.coef
    if beta is not None and hasattr(algo_config, "loss_algo") and isinstance(mine, (int, float)) and beta != mine:
        raise ValueError(
            f"beta: got {beta} in {type(algo_config).__name__}, expected {mine}, the coefficient of config.kl; with "
            "beta=0 Tunix computes no reference log-probs"
        )
    return config


def _fitting(config: PolicyLossConfig, batch: RolloutBatch, weights: jax.Array | None) -> PolicyLossConfig:
    """The config for a batch as Tunix made it: without old log-probs the ratio is 1."""
    if weights is not None:
        raise NotImplementedError(
            "sampler_is_weights: got weights of Tunix's sampler correction, expected None (sampler_is=None)"
        )
    if batch.old_log_probs is None and config.ratio_to == "old":
        return dataclasses.replace(config, ratio_to="current")
    return config


def batch_of(
    train_example: Any, pad_id: int, *, parallel: ParallelMesh | None = None, num_segments: int | None = None
) -> RolloutBatch:
    """Converts a Tunix `TrainExample`, padded or packed, to a batch; traceable.

    Args:
      train_example: prompt_ids `[B, P]`, completion_ids and completion_mask `[B, C]`, advantages `[B]` or `[B, C]`,
        old_per_token_logps and ref_per_token_logps `[B, C]` or None; packed, segment_ids and segment_positions
        `[B, C]`, and empty prompts.
      pad_id: of the tokenizer.
      parallel: the mesh.
      num_segments: S of a packed batch; by default its own num_segments, or C.

    Returns:
      `[B, P + C]`.
    """
    x = train_example
    fields = vars(x) if hasattr(x, "__dict__") else {}
    check_unread("a TrainExample", {name: value for name, value in fields.items() if name not in _OF_EXAMPLES})
    given = {
        "advantages": x.advantages,
        "old_log_probs": x.old_per_token_logps,
        "ref_log_probs": x.ref_per_token_logps,
    }
    arrays: dict[str, Any] = {name: jnp.asarray(v) for name, v in given.items() if v is not None}
    mask = jnp.asarray(x.completion_mask, jnp.float32)
    segments = getattr(x, "segment_ids", None)
    if segments is None:
        found = jnp.concatenate([x.prompt_ids != pad_id, (x.completion_ids != pad_id) | (mask > 0)], axis=1)
        # a sampled padding id is a token too: as in Tunix, the next token is predicted at its position
        tokens = jax.lax.cummax(found.astype(jnp.int32), 1) * jax.lax.cummax(found.astype(jnp.int32), 1, reverse=True)
        return RolloutBatch.from_padded(
            x.prompt_ids, x.completion_ids, mask, attention_mask=tokens, parallel=parallel, **arrays
        )
    num_segments = num_segments or getattr(x, "num_segments", None) or segments.shape[1]
    tokens, ids, positions = (jnp.asarray(a, jnp.int32) for a in (x.completion_ids, segments, x.segment_positions))
    return RolloutBatch.from_token_aligned(
        tokens, ids, positions, mask, num_segments=num_segments, parallel=parallel, **arrays
    )


def _hidden(model: Any, x: Any, pad_id: int) -> jax.Array:
    packed = (getattr(x, "segment_ids", None), getattr(x, "segment_positions", None))
    return hidden_of_example(model, x.prompt_ids, x.completion_ids, pad_id, *packed)


def _output(loss: jax.Array, metrics: Metrics, normalizer: Normalizer) -> Any:
    """What Tunix expects of a policy loss: the loss, and metrics with the names that its learners log.

    With a `LossOutput` a mean is its sum and its count. Tunix differentiates the sum of a micro-batch, adds gradients
    and counts of a step, and divides once.
    """
    from tunix.sft import utils

    nothing = Metric(jnp.float32(0), jnp.float32(1))
    one = Metric(jnp.float32(1), jnp.float32(1))
    kl = metrics.get("kl", nothing)
    theirs = {"kl": kl, "kl_loss": kl, "pg_clipfrac": metrics.get("clip_fraction", nothing)}
    aux = metrics | theirs | {"sampler_is/weight_mean": one, "sampler_is/weight_min": one}
    if not hasattr(utils, "LossOutput"):
        return loss, {name: metric.value for name, metric in aux.items()}
    counts = {"token_mean": normalizer.tokens, "token_sum": jnp.float32(1)}
    count = counts.get(normalizer.aggregation, normalizer.sequences)

    def reported(metric: Any) -> Any:
        is_mean = isinstance(metric, Metric) and metric.reduce == "mean"
        return utils.WeightedMetric(metric.total, metric.count) if is_mean else metric.value

    whole = utils.WeightedMetric(loss * count, count)
    return utils.LossOutput(primary_loss=whole, aux_metrics={name: reported(metric) for name, metric in aux.items()})


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
# fields of Tunix's TrainExamples that `batch_of` and the loss read, or that change no loss
_OF_EXAMPLES = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_per_token_logps"}
_OF_EXAMPLES |= {"ref_per_token_logps", "segment_ids", "segment_positions", "num_segments", "sampler_is_weights"}
_OF_EXAMPLES |= {"is_update_step", "policy_version", "returns", "old_values"}


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
