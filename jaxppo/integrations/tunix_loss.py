"""Policy losses with the signature of Tunix's, from hidden states; and Tunix's training batches as batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp

from jaxppo.base.metrics import Metric, Metrics
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.call import HeadOptions
from jaxppo.head.prepare import check_options
from jaxppo.integrations.tunix_config import agreed, config_of
from jaxppo.integrations.tunix_models import check_unread, head_of, hidden_of_example
from jaxppo.losses.policy import policy_loss_from_hidden
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.sharding import ParallelMesh
from jaxppo.step.aggregation import Normalizer

MeshOrMaker = ParallelMesh | Callable[[], ParallelMesh | None] | None

# fields of Tunix's TrainExamples and payloads that `batch_of` and the loss read, or that change no loss; a sampler's
# verdict `overlong` changes one under an option that is refused
_OF_EXAMPLES = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages", "old_per_token_logps"}
_OF_EXAMPLES |= {"ref_per_token_logps", "segment_ids", "segment_positions", "num_segments", "sampler_is_weights"}
_OF_EXAMPLES |= {"is_update_step", "policy_version", "returns", "old_values"}
_OF_EXAMPLES |= {"rollout_per_token_logps", "overlong", "metadata"}


def loss_fn(
    config: PolicyLossConfig | None = None,
    parallel: MeshOrMaker = None,
    *,
    lora_scale: float | None = None,
    num_segments: int | None = None,
    **options: Unpack[HeadOptions],
) -> Callable[..., Any]:
    """A policy loss for `with_loss_fn` of a Tunix trainer: `policy_loss_from_hidden` with the signature of Tunix's.

    It is called as `loss(model, train_example, algo_config, pad_id, eos_id)`. Batches may be padded or packed; the
    model may have adapters and a frozen head. Without old log-probs the ratio is 1, as in Tunix's own loss.

    The result can be pickled, so that an orchestrator can send it to a trainer in another process, where jaxppo must
    be installed too. Devices cannot be pickled: then `parallel` is a function that makes the mesh where the loss runs.

    Args:
      config: the loss; None takes it from the `algo_config` of the call, see `config_of`.
      parallel: the mesh of the model, or a function of no arguments that makes it, called when the loss is traced.
      lora_scale: alpha / rank of an adapter of the head; see `Head.of`.
      num_segments: the most sequences in a packed row; by default as many as it has tokens, which takes memory where
        rows are long.
      **options: of the head, see `HeadOptions`.

    Returns:
      The loss. It returns Tunix's `LossOutput`, or `(loss, metrics)` for a Tunix without one. It raises TypeError for
      arguments and fields of the batch that it does not read, and ValueError for options of the `algo_config` that it
      does not apply.

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
        raise TypeError(
            f"parallel: got {type(parallel).__name__}, expected ParallelMesh, a function that makes one, None"
        )
    check_options(options)
    return _Loss(config, parallel, lora_scale, num_segments, options)


@dataclasses.dataclass(frozen=True, eq=False)
class _Loss:
    """The loss of `loss_fn`, with its arguments. It is a class, since a function within another cannot be pickled."""

    config: PolicyLossConfig | None
    parallel: MeshOrMaker
    lora_scale: float | None
    num_segments: int | None
    options: HeadOptions

    def __call__(self, model: Any, train_example: Any, algo_config: Any, pad_id: int, eos_id: int, **more: Any) -> Any:
        more.pop("compute_logps_chunk_size", None)  # of Tunix's own log-probs; memory= bounds ours
        check_unread("the loss", more)
        x, parallel = train_example, self.parallel
        parallel = parallel if parallel is None or isinstance(parallel, ParallelMesh) else parallel()
        if parallel is not None and not isinstance(parallel, ParallelMesh):
            raise TypeError(f"parallel: got {type(parallel).__name__} from the function, expected ParallelMesh or None")
        batch = batch_of(x, pad_id, parallel=parallel, num_segments=self.num_segments)
        length = x.completion_ids.shape[1]
        config = config_of(algo_config, length) if self.config is None else agreed(self.config, algo_config)
        if getattr(x, "sampler_is_weights", None) is not None:
            raise NotImplementedError(
                "sampler_is_weights: got weights of Tunix's sampler correction, expected None (sampler_is=None)"
            )
        if batch.old_log_probs is None and config.ratio_to == "old":
            config = dataclasses.replace(config, ratio_to="current")
        normalizer = Normalizer.of(config, batch, parallel=parallel)
        packed = getattr(x, "segment_ids", None), getattr(x, "segment_positions", None)
        loss, metrics = policy_loss_from_hidden(
            hidden_of_example(model, x.prompt_ids, x.completion_ids, pad_id, *packed),
            head_of(model, lora_scale=self.lora_scale),
            batch,
            config,
            parallel=parallel,
            normalizer=normalizer,
            temperature=getattr(algo_config, "temperature", 1.0) or 1.0,
            **self.options,
        )
        return _output(loss, metrics, normalizer)


def batch_of(
    train_example: Any, pad_id: int, *, parallel: ParallelMesh | None = None, num_segments: int | None = None
) -> RolloutBatch:
    """Converts a Tunix `TrainExample`, padded or packed, to a batch; traceable.

    Args:
      train_example: prompt_ids `[B, P]`, completion_ids and completion_mask `[B, C]`, advantages `[B]` or `[B, C]`,
        old_per_token_logps, ref_per_token_logps and the sampler's rollout_per_token_logps `[B, C]` or None; packed,
        segment_ids and segment_positions `[B, C]`, and empty prompts.
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
            f"train_example: got {type(x).__name__} without completion_ids, expected Tunix's TrainExample, or a "
            "payload with prompts and completions apart"
        )
    slots = (name for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ()))
    fields = {name: getattr(x, name) for name in {*getattr(x, "__dict__", ()), *slots} if hasattr(x, name)}
    check_unread("a TrainExample", {name: value for name, value in fields.items() if name not in _OF_EXAMPLES})
    given = {
        "advantages": x.advantages,
        "old_log_probs": x.old_per_token_logps,
        "ref_log_probs": x.ref_per_token_logps,
        "rollout_log_probs": fields.get("rollout_per_token_logps"),
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


def _output(loss: jax.Array, metrics: Metrics, normalizer: Normalizer) -> Any:
    """What Tunix expects of a policy loss: the loss, and metrics with the names that its learners log.

    With a `LossOutput` a mean is its sum and its count. Tunix differentiates the sum of a micro-batch, adds gradients
    and counts of a step, and divides once.
    """
    from tunix.sft import utils

    nothing, one = Metric(jnp.float32(0), jnp.float32(1)), Metric(jnp.float32(1), jnp.float32(1))
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
