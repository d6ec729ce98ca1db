"""Policy losses with the signature of Tunix's, from hidden states; its configs and its training
batches as ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp

from jaxppo.base.arrays import Aggregation, check_count, check_number
from jaxppo.base.kl import KL, Estimator
from jaxppo.base.metrics import Metric, Metrics
from jaxppo.batch.extras import Extra
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.arguments import check_options
from jaxppo.head.call import HeadOptions
from jaxppo.integrations.tunix_models import check_unread, head_of, hidden_of_example
from jaxppo.integrations.tunix_sampler import (
    asked_for,
    check_options_of,
    check_weights,
    left_to_loss,
    with_options,
    with_sampler_log_probs,
)
from jaxppo.losses.doors import policy_loss_from_hidden
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy_losses import GSPO, PPO, PolicyLoss
from jaxppo.sharding import ParallelMesh
from jaxppo.step.aggregation import Normalizer

_AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "sequence-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    # its norm is the number of sequences
    "sequence-mean-token-sum-norm": "sequence_mean_token_sum",
    # and here the length of the completions
    "sequence-mean-token-scale": "sequence_mean_token_sum_norm",
}
_ESTIMATORS: dict[str, Estimator] = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
# options of newer branches that change their loss or its metrics
_UNREAD = [
    "overlong_loss_masking",
    "truncated_importance_sampling_type",
    "sampler_is_length_buckets",
]
# fields of Tunix's TrainExamples and payloads that `batch_of` and the loss read, or that change no
# loss; a sampler's verdict `overlong` changes one under an option that is refused
_FIELDS = {
    *(
        "prompt_ids",
        "prompt_mask",
        "completion_ids",
        "completion_mask",
        "advantages",
        "old_per_token_logps",
    ),
    *(
        "ref_per_token_logps",
        "segment_ids",
        "segment_positions",
        "num_segments",
        "sampler_is_weights",
    ),
    *(
        "is_update_step",
        "policy_version",
        "returns",
        "old_values",
        "rollout_per_token_logps",
        "overlong",
    ),
    *("metadata", "routed_experts", "sampler_agreement_applied", "completion_attention_mask"),
}
# bounds of Tunix's own head, on the tokens or the positions of a row at a time: ours follows the
# loss mask and memory=
OF_THEIR_HEAD = ("compute_logps_chunk_size", "max_logp_positions_per_packed_row")

# the metrics that Tunix's learners log, by our names; its agentic learner stops where one is
# missing
_THEIR_NAMES = {
    "kl": "kl",
    "kl_loss": "kl",
    "pg_clipfrac": "clip_fraction",
    "pg_clipfrac_lower": "clip_fraction_lower",
    "is_ratio/mean": "ratio_mean",
    "is_ratio/min": "ratio_min",
    "is_ratio/max": "ratio_max",
}
_OF_CORRECTIONS = {
    "sampler_is/frac_clipped_at_threshold": "tis_clipfrac",
    "sampler_rs/rejected_fraction": "rejected_fraction",
}
# NaN in Tunix's logs
_NOT_COMPUTED = ("log_ratio/abs_mean", "pg_loss/unclipped_mean", "pg_loss/clipped_mean")

MeshOrMaker = ParallelMesh | Callable[[], ParallelMesh | None] | None


def loss_fn(
    config: PolicyLossConfig | None = None,
    parallel: MeshOrMaker = None,
    *,
    lora_scale: float | None = None,
    num_segments: int | None = None,
    **options: Unpack[HeadOptions],
) -> Callable[..., Any]:
    """A policy loss for `with_loss_fn` of a Tunix trainer: `policy_loss_from_hidden` with the
    signature of Tunix's.

    It is called as `loss(model, train_example, algo_config, pad_id, eos_id)`. Batches may be padded
    or packed; the model may have adapters and a frozen head. Without old log-probs the ratio is 1,
    as in Tunix's own loss.

    The result can be pickled, so that an orchestrator can send it to a trainer in another process,
    where jaxppo must be installed too.

    Args:
      config: the loss; None takes it from the `algo_config` of the call, see `config_of`.
      parallel: the mesh of the model, or a function of no arguments that makes it, called when the
        loss is traced: a mesh cannot be pickled.
      lora_scale: alpha / rank of an adapter of the head; see `Head.of`.
      num_segments: the most sequences in a packed row; by default as many as it has tokens, which
        takes memory where rows are long.
      **options: of the head, see `HeadOptions`.

    Returns:
      A function that returns Tunix's `LossOutput`, or `(loss, metrics)` for a Tunix without one. It
      raises TypeError for arguments and fields of the batch that it does not read, and ValueError
      for options of the `algo_config` that it does not apply.

    Raises:
      TypeError, ValueError: a wrong config, mesh or option.

    Example:
      >>> import pickle
      >>> loss = loss_fn(PolicyLossConfig(PPO(clip_high=0.28)), parallel=None)
      >>> pickle.loads(pickle.dumps(loss)).config.loss
      PPO(clip_low=0.2, clip_high=0.28, dual_clip=None)

    Tunix, https://github.com/google/tunix: tunix/experimental/train/peft_trainer_v2.py
    """
    if config is not None and not isinstance(config, PolicyLossConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected PolicyLossConfig or None")
    if not (parallel is None or isinstance(parallel, ParallelMesh) or callable(parallel)):
        expected = "ParallelMesh, a function that makes one, None"
        raise TypeError(f"parallel: got {type(parallel).__name__}, expected {expected}")
    check_head_options(lora_scale, options)
    if num_segments is not None:
        check_count("num_segments", num_segments, least=1)
    return _Loss(config, parallel, lora_scale, num_segments, options)


def check_head_options(lora_scale: float | None, options: HeadOptions) -> None:
    """Raises for a wrong option when it is given, not when the first step is traced."""
    check_options(options)
    if lora_scale is not None:
        check_number("lora_scale", lora_scale)


@dataclasses.dataclass(frozen=True, eq=False)
class _Loss:
    """The loss of `loss_fn`, with its arguments.

    It is a class, since a function within another cannot be pickled.
    """

    config: PolicyLossConfig | None
    parallel: MeshOrMaker
    lora_scale: float | None
    num_segments: int | None
    options: HeadOptions

    def __call__(
        self,
        model: Any,
        train_example: Any,
        algo_config: Any,
        pad_id: int,
        eos_id: int,
        **more: Any,
    ) -> Any:
        check_unread(
            "the loss", {name: value for name, value in more.items() if name not in OF_THEIR_HEAD}
        )
        x = train_example
        parallel = self.parallel() if callable(self.parallel) else self.parallel
        if parallel is not None and not isinstance(parallel, ParallelMesh):
            raise TypeError(
                f"parallel: got {type(parallel).__name__} from the function, expected ParallelMesh"
                " or None"
            )
        batch = batch_of(x, pad_id, parallel=parallel, num_segments=self.num_segments)
        asked = left_to_loss(algo_config, x)
        config = self._config_for(x, algo_config, asked)
        batch = with_sampler_log_probs(batch, config, algo_config, asked)
        normalizer = Normalizer.of(config, batch, parallel=parallel)
        hidden = hidden_of_example(
            model,
            x.prompt_ids,
            x.completion_ids,
            pad_id,
            segment_ids=getattr(x, "segment_ids", None),
            segment_positions=getattr(x, "segment_positions", None),
            routed_experts=getattr(x, "routed_experts", None),
            token_mask=token_mask_of(x),
        )
        loss, metrics = policy_loss_from_hidden(
            hidden,
            head_of(model, lora_scale=self.lora_scale),
            batch,
            config,
            parallel=parallel,
            normalizer=normalizer,
            temperature=getattr(algo_config, "temperature", 1.0) or 1.0,
            **self.options,
        )
        return _output(loss, metrics | _of_batch(x, weighs=not asked), normalizer)

    def _config_for(self, x: Any, algo_config: Any, asked: dict[str, Any]) -> PolicyLossConfig:
        """The loss of this batch, whose learner left the corrections `asked` to the loss."""
        if self.config is None:
            config = with_options(
                _base_config(algo_config, x.completion_ids.shape[1]), algo_config, asked
            )
        else:
            config = agreed(self.config, algo_config)
            check_options_of(config, algo_config, asked)
        check_weights(config, x)
        if x.old_per_token_logps is None and config.ratio_to == "old":
            return dataclasses.replace(config, ratio_to="current")
        return config


def config_of(algo_config: Any, completion_length: int | None = None) -> PolicyLossConfig:
    """The policy loss of a Tunix `GRPOConfig`, or of one that derives from it (DAPO, Dr. GRPO).

    Args:
      algo_config: has epsilon, epsilon_high, epsilon_c, beta, kl_loss_mode, kl_clamp_value,
        loss_algo, loss_agg_mode.
      completion_length: C, the denominator of "sequence-mean-token-scale".

    Returns:
      The config. Its entropy is a metric, as in Tunix. `sampler_is`, `sampler_rs` and
      `force_on_policy_ratio` become a ratio of 1 and an `off_policy` over the sampler; a learner
      that has applied them says so in its batch, and the loss leaves them out.

    Raises:
      ValueError: a value without an equivalent here, or a PPOConfig: pass its loss to `register` as
        a config.

    Example:
      >>> from types import SimpleNamespace
      >>> grpo = SimpleNamespace(epsilon=0.2, epsilon_high=0.28, beta=0.0, loss_algo="grpo", loss_agg_mode="token-mean")
      >>> config_of(grpo).loss
      PPO(clip_low=0.2, clip_high=0.28, dual_clip=None)
    """
    return with_options(
        _base_config(algo_config, completion_length), algo_config, asked_for(algo_config)
    )


def _base_config(algo_config: Any, completion_length: int | None) -> PolicyLossConfig:
    """`config_of` without the options that correct for the sampler."""
    _check_options(algo_config)
    algorithm = getattr(algo_config, "loss_algo", None)
    if algorithm not in ("grpo", "gspo-token"):
        raise ValueError(
            f"algo_config: got {type(algo_config).__name__} with loss_algo={algorithm!r}, expected"
            " 'grpo' or 'gspo-token'; for another loss pass a config"
        )
    aggregation = _known("loss_agg_mode", algo_config.loss_agg_mode, _AGGREGATIONS)
    norm = None
    if aggregation == "sequence_mean_token_sum_norm" and completion_length:
        norm = float(completion_length)
    low = algo_config.epsilon
    high = getattr(algo_config, "epsilon_high", None)
    if high is None:
        high = low
    dual = getattr(algo_config, "epsilon_c", None)
    loss: PolicyLoss
    if algorithm == "grpo":
        loss = PPO(low, high, dual)
    else:
        loss = GSPO(low, high, dual, "token")
    return PolicyLossConfig(
        loss, kl=_kl(algo_config), aggregation=aggregation, aggregation_norm=norm
    )


def _known(name: str, value: Any, table: dict[str, Any]) -> Any:
    if value not in table:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(table)}")
    return table[value]


def _kl(algo_config: Any) -> KL | None:
    if not algo_config.beta:
        return None
    mode = algo_config.kl_loss_mode
    estimator = _known("kl_loss_mode", mode, _ESTIMATORS)
    clamp = getattr(algo_config, "kl_clamp_value", None)
    if clamp is None:
        return KL(algo_config.beta, estimator)
    if mode != "low_var_kl" or float(clamp) != 10.0:
        raise ValueError(
            f"kl_clamp_value: got {clamp} with {mode!r}, expected None, or 10 with 'low_var_kl'"
        )
    return KL(algo_config.beta, "low_var_kl")


def _check_options(algo_config: Any) -> None:
    for name in _UNREAD:
        value = getattr(algo_config, name, None)
        if value is not None and value is not False:
            raise ValueError(
                f"{name}: got {value} in {type(algo_config).__name__}, expected None or False: the"
                " losses of jaxppo.integrations.tunix do not read it;"
                " PolicyLossConfig(off_policy=...) drops and weighs sequences"
            )


def agreed(config: PolicyLossConfig, algo_config: Any) -> PolicyLossConfig:
    """The config, if the learner computes what the config needs, has the same penalty and asks
    for nothing else.
    """
    _check_options(algo_config)
    beta = getattr(algo_config, "beta", None)
    coef = 0.0 if config.kl is None else config.kl.coef
    if beta is None or not hasattr(algo_config, "loss_algo") or not isinstance(coef, (int, float)):
        return config
    if beta != coef:
        raise ValueError(
            f"beta: got {beta} in {type(algo_config).__name__}, expected {coef}, the coefficient of"
            " config.kl; with beta=0 Tunix computes no reference log-probs"
        )
    return config


def batch_of(
    train_example: Any,
    pad_id: int,
    *,
    parallel: ParallelMesh | None = None,
    num_segments: int | None = None,
) -> RolloutBatch:
    """Converts a Tunix `TrainExample`, padded or packed, to a batch; traceable.

    Args:
      train_example: prompt_ids `[B, P]`, completion_ids and completion_mask `[B, C]`, advantages
        `[B]` or `[B, C]`, old_per_token_logps, ref_per_token_logps and the sampler's
        rollout_per_token_logps `[B, C]` or None; packed, segment_ids and segment_positions
        `[B, C]`, and empty prompts. routed_experts `[B, P + C, layers, k]` become the extra of that
        name. sampler_is_weights `[B, C]` multiply the advantages. completion_attention_mask
        `[B, C]`, with prompt_mask, says which ids are tokens; without it these are the ids other
        than `pad_id`.
      pad_id: of the tokenizer.
      parallel: the mesh.
      num_segments: S of a packed batch; by default its own num_segments, or C.

    Returns:
      `[B, P + C]`.

    Raises:
      TypeError: a batch without completions, a field that jaxppo does not read.
    """
    x = train_example
    if getattr(x, "completion_ids", None) is None:
        raise TypeError(
            f"train_example: got {type(x).__name__} without completion_ids, expected Tunix's"
            " TrainExample, or a payload with prompts and completions apart"
        )
    arrays = _arrays(x)
    mask = jnp.asarray(x.completion_mask, jnp.float32)
    segments = getattr(x, "segment_ids", None)
    token_mask = token_mask_of(x)
    if token_mask is None and segments is None:
        token_mask = _upto_padding(x, mask, pad_id)
    if token_mask is not None:
        return RolloutBatch.from_padded(
            x.prompt_ids,
            x.completion_ids,
            mask,
            attention_mask=token_mask,
            parallel=parallel,
            **arrays,
        )
    return RolloutBatch.from_token_aligned(
        jnp.asarray(x.completion_ids, jnp.int32),
        jnp.asarray(segments, jnp.int32),
        jnp.asarray(x.segment_positions, jnp.int32),
        mask,
        num_segments=num_segments or getattr(x, "num_segments", None) or x.completion_ids.shape[1],
        parallel=parallel,
        **arrays,
    )


def _arrays(x: Any) -> dict[str, Any]:
    """The optional arrays of a batch, by our names; raises for fields of the example that are
    not read.
    """
    slots = [name for cls in type(x).__mro__ for name in getattr(cls, "__slots__", ())]
    names = {*getattr(x, "__dict__", ()), *slots}
    fields = {name: getattr(x, name) for name in names if hasattr(x, name)}
    check_unread(
        "a TrainExample", {name: value for name, value in fields.items() if name not in _FIELDS}
    )
    values = {
        "advantages": _weighed_advantages(x),
        "rollout_log_probs": fields.get("rollout_per_token_logps"),
        "old_log_probs": x.old_per_token_logps,
        "ref_log_probs": x.ref_per_token_logps,
    }
    arrays: dict[str, Any] = {
        name: jnp.asarray(value) for name, value in values.items() if value is not None
    }
    experts = fields.get("routed_experts")
    if experts is not None:
        arrays["extras"] = {
            "routed_experts": Extra(jnp.asarray(experts, jnp.int32), at="input", fill=-1)
        }
    return arrays


def _upto_padding(x: Any, mask: jax.Array, pad_id: int) -> jax.Array:
    """`i32[B, P + C]`, 1 for tokens: from the first id to the last that is not the padding's, or
    trains.

    A sampled padding id between is a token too: as in Tunix, the next token is predicted at its
    position.
    """
    real = jnp.concatenate(
        [x.prompt_ids != pad_id, (x.completion_ids != pad_id) | (mask > 0)], axis=1
    )
    real = real.astype(jnp.int32)
    return jax.lax.cummax(real, 1) * jax.lax.cummax(real, 1, reverse=True)


def token_mask_of(train_example: Any) -> jax.Array | None:
    """`bool[B, P + C]`, which ids are tokens, if the batch says so itself: then an id like the
    padding's may be one.
    """
    of_completions = getattr(train_example, "completion_attention_mask", None)
    if of_completions is None:
        return None
    if getattr(train_example, "segment_ids", None) is not None:
        expected = "None in a packed batch, whose segment_ids say which ids are tokens"
        raise ValueError(
            f"completion_attention_mask: got a mask beside segment_ids, expected {expected}"
        )
    masks = [jnp.asarray(mask, bool) for mask in (train_example.prompt_mask, of_completions)]
    return jnp.concatenate(masks, axis=1)


def _weighed_advantages(x: Any) -> Any:
    """The advantages, times the weights of Tunix's own correction, which multiply the policy
    loss and no penalty.
    """
    weights = getattr(x, "sampler_is_weights", None)
    if weights is None:
        return x.advantages
    return _by_token(x.advantages) * weights


def _by_token(advantages: Any) -> jax.Array:
    """`f32[B, C]`, or `[B, 1]` of advantages that have one value for each completion."""
    advantages = jnp.asarray(advantages, jnp.float32)
    if advantages.ndim == 2:
        return advantages
    return advantages[:, None]


def _of_batch(x: Any, weighs: bool) -> Metrics:
    """Metrics of Tunix's that say something of the batch alone; with `weighs` those of the
    learner's weights too.
    """
    mask = jnp.asarray(x.completion_mask, jnp.float32)
    advantages = jnp.broadcast_to(_by_token(x.advantages), mask.shape)
    sizes = jnp.abs(advantages)
    metrics: Metrics = {
        "advantage/abs_mean": _mean(sizes, mask),
        "advantage/max": _extreme(advantages, mask, "max"),
        "advantage/min": _extreme(advantages, mask, "min"),
        "advantage/nonzero_frac": _mean((sizes > 1e-8).astype(jnp.float32), mask),
    }
    if not weighs:
        return metrics
    weights = getattr(x, "sampler_is_weights", None)
    if weights is None:
        weights = jnp.ones_like(mask)
    weights = jnp.asarray(weights, jnp.float32)
    metrics["sampler_is/weight_mean"] = _mean(weights, mask)
    metrics["sampler_is/weight_min"] = _extreme(weights, mask, "min")
    return metrics


def _mean(x: jax.Array, mask: jax.Array) -> Metric:
    return Metric(jnp.where(mask > 0, x, 0).sum(), mask.sum())


def _extreme(x: jax.Array, mask: jax.Array, reduce: Literal["min", "max"]) -> Metric:
    if reduce == "min":
        extreme = jnp.min(jnp.where(mask > 0, x, jnp.inf))
    else:
        extreme = jnp.max(jnp.where(mask > 0, x, -jnp.inf))
    return Metric(extreme, mask.sum(), reduce)


def _output(loss: jax.Array, metrics: Metrics, normalizer: Normalizer) -> Any:
    """What Tunix expects of a policy loss: the loss, and metrics with the names that its learners
    log.

    With a `LossOutput` a mean is its sum and its count. Tunix differentiates the sum of a
    micro-batch, adds gradients and counts of a step, and divides once.
    """
    from tunix.sft import utils

    nothing = Metric(jnp.float32(0), jnp.float32(1))
    unknown = Metric(jnp.float32(jnp.nan), jnp.float32(1))
    theirs = {name: metrics.get(own, nothing) for name, own in _THEIR_NAMES.items()}
    theirs |= {name: metrics[own] for name, own in _OF_CORRECTIONS.items() if own in metrics}
    aux = metrics | theirs | dict.fromkeys(_NOT_COMPUTED, unknown)
    if not hasattr(utils, "LossOutput"):
        return loss, {name: metric.value for name, metric in aux.items()}
    counts = {"token_mean": normalizer.tokens, "token_sum": jnp.float32(1)}
    count = counts.get(normalizer.aggregation, normalizer.sequences)

    def reported(metric: Any) -> Any:
        if isinstance(metric, Metric) and metric.reduce == "mean":
            return utils.WeightedMetric(metric.total, metric.count)
        return metric.value

    whole = utils.WeightedMetric(loss * count, count)
    aux_metrics = {name: reported(metric) for name, metric in aux.items()}
    return utils.LossOutput(primary_loss=whole, aux_metrics=aux_metrics)
