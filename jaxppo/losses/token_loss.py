"""From statistics or hidden states to a loss: the code that policy and supervised losses share.

A `TokenLoss` defines the loss of one token. A batch goes through these steps:

1. `Step.of`: the weight of each token, over the whole step, and the rules that the batch breaks;
2. `TokenLoss.constants`: the constants of differentiation that the loss reads, such as importance weights;
3. `TokenLoss.per_token`: the loss of each token, and the sum over tokens and devices;
4. `TokenLoss.terms`: the metrics.

From hidden states, step 3 runs inside the head if the loss of a token depends on that token alone: one pass.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from jaxppo._arrays import PER_SEGMENT, Aggregation, masked
from jaxppo._traced import put_arrays, take_arrays
from jaxppo.aggregation import Normalizer, step_normalizer, token_weights, weighted_sum
from jaxppo.batch import RolloutBatch
from jaxppo.broken_rules import Broken, count_broken
from jaxppo.head.types import Entropy, HeadCall, Inputs, LogitStat, Prepared
from jaxppo.head.vjp import reduce_tokens, stats_of_tokens
from jaxppo.metrics import Metric, Metrics, Terms, reduce_metrics
from jaxppo.off_policy import OffPolicyConfig
from jaxppo.reads import LOG_PROBS, at_most_zero
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes, note, shard_call

Constants = tuple[Any, Any]  # the result of `TokenLoss.constants`, and the call's other arrays
Numbers = Mapping[str, Array]  # the traced numbers of a loss, and others of its call, by name
Reads = Mapping[str, Array | None]  # by the names of `reads` and `rules`; None for what is absent


class TokenLoss(abc.ABC):
    """The loss of a token: a frozen dataclass of hyperparameters, which may be traced.

    It reads `stats` of a model, a pytree of `[R, T]` arrays: a head's `TokenStats`, a critic's values, or a divergence.
    """

    aggregation: Aggregation
    aggregation_norm: float | None

    @property
    @abc.abstractmethod
    def token_local(self) -> bool:
        """Whether a token's loss depends only on the batch and on its own log-prob and entropy."""

    @property
    def entropy(self) -> Entropy:
        """The entropy mode that the head must use."""
        return "metric"

    @property
    def logit_stats(self) -> tuple[LogitStat, ...]:
        """The statistics of `log_probs_from_hidden(..., logit_stats=)` that the loss reads."""
        return ()

    @property
    def off_policy(self) -> OffPolicyConfig | None:
        """The correction whose mean weight is in the normalizer."""
        return None

    def constants(self, stats: Any, step: Step) -> Any:
        """Per-shard: a pytree of `[R, T]` constants; `stats` are None, and not needed, if the loss is token-local."""
        return None

    @abc.abstractmethod
    def per_token(
        self, stats: Any, batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> Float[Array, "R T"]:
        """Per-shard: the loss of each token before weighting, finite where the mask is 0."""

    @abc.abstractmethod
    def terms(self, stats: Any, step: Step, constants: Constants) -> Terms:
        """Per-shard: the terms that `reduce_metrics` turns into metrics, by name; anything where the mask is 0."""

    def left_out(self, stats: Any, batch: RolloutBatch) -> Bool[Array, "R T"] | None:
        """The loss tokens that the loss leaves out; None for none. `stats` are None before they are computed."""
        return None

    @abc.abstractmethod
    def reads(self, stats: Any, batch: RolloutBatch, given: Any, segments: Segments) -> Reads:
        """Per-shard: the arrays that the loss reads. A rule of each is that of its name; see `reads.PER_TOKEN`.

        Arrays that only metrics read are not among them, nor the sequences, the loss mask and its weights.

        Args:
          stats: None before they are computed.
          batch: as the caller gave it.
          given: the call's other arrays.
          segments: of the rows.
        """


class OfHead(NamedTuple):
    """What a head reads beside its features and parameters, and the sizes that its ids must fit."""

    reads: Reads
    vocab_size: int | None
    adapters: int

    @classmethod
    def of(cls, call: HeadCall, inputs: Inputs) -> OfHead:
        names = ("targets", "nucleus_ids", "adapter_ids", "temperature")
        adapters = 0 if inputs.adapter_ids is None else inputs.lora_a.shape[-3]
        return cls({name: getattr(inputs, name) for name in names}, call.vocab_size, adapters)


@dataclasses.dataclass(frozen=True)
class Step:
    """Per-shard: a batch as a part of its optimiser step.

    Args:
      batch: constants, with an f32 loss mask, 0 where the loss leaves a token out, and the sampler's log-probs at most
        0.
      segments: of its rows.
      normalizer: of the whole step.
      weights: `f32[R, T]`, the weight of each token's loss; NaN where a rule is broken anywhere.
      broken: how often each rule is broken on all devices together.
      left_out: `bool[R, T]`, the tokens of the loss mask that have no loss; None where the loss leaves none out.
      capped: `bool[R, T]`, the tokens whose sampler's log-prob was above 0; None without the sampler's.
    """

    batch: RolloutBatch
    segments: Segments
    normalizer: Normalizer
    weights: Float[Array, "R T"]
    broken: Broken
    left_out: Bool[Array, "R T"] | None
    capped: Bool[Array, "R T"] | None

    @classmethod
    def of(
        cls,
        axes: ShardAxes,
        loss: TokenLoss,
        stats: Any,
        batch: RolloutBatch,
        normalizer: Normalizer | None,
        given: Any,
        numbers: Numbers,
        head: OfHead | None = None,
        known: Normalizer | None = None,
    ) -> Step:
        """Weighs tokens and checks rules, with the statistics and the step's normalizer if there are any.

        `given` are the other arrays of the call, `numbers` those that the loss and its factor depend on, and `known` is
        the normalizer of an earlier `Step` of the same batch.
        """
        batch = lax.stop_gradient(batch)  # everything that a loss reads from it is a constant
        batch = dataclasses.replace(batch, loss_mask=batch.loss_mask.astype(jnp.float32))
        segments = batch.segments(axes)
        weighs = known or step_normalizer(batch, segments, normalizer, loss.aggregation, loss.off_policy)
        reads = loss.reads(stats, batch, given, segments)
        broken = _broken_rules(batch, segments, loss.aggregation, normalizer, reads, numbers, head)
        capped = None
        if (sampled := batch.rollout_log_probs) is not None:
            capped, sampled = sampled > 0, at_most_zero(sampled)
            batch = dataclasses.replace(batch, rollout_log_probs=sampled)
        weights = token_weights(batch.loss_mask, segments, weighs, loss.aggregation_norm)
        if batch.loss_weights is not None:
            weights *= masked(batch.loss_weights, batch.loss_mask)
        left_out = loss.left_out(stats, batch)
        if left_out is not None:  # the denominators still count all tokens
            weights, mask = (jnp.where(left_out, 0, x) for x in (weights, batch.loss_mask))
            batch = dataclasses.replace(batch, loss_mask=mask)
        step = cls(batch, segments, weighs, weights, broken, left_out, capped)
        # NaN in the weights makes gradients NaN too; a factor of the summed losses would cost one more
        # multiplication of the kernel's gradient
        return dataclasses.replace(step, weights=weights * jnp.where(step.is_broken, jnp.nan, 1))

    @property
    def is_broken(self) -> Bool[Array, ""]:
        """Whether a rule is broken on any device."""
        return self.broken.any


def _broken_rules(
    batch: RolloutBatch,
    segments: Segments,
    aggregation: Aggregation,
    normalizer: Normalizer | None,
    reads: Reads,
    numbers: Numbers,
    head: OfHead | None,
) -> Broken:
    names = ("segment_ids", "positions", "loss_mask", "sample_ids", "parents", "loss_weights")
    head = head or OfHead({}, None, 0)
    arrays = {name: getattr(batch, name) for name in names} | {**head.reads, **reads}
    if aggregation == "rollout_mean":
        arrays["rollout_ids"] = batch.rollouts
    if normalizer is not None:
        own = [normalizer.tokens, normalizer.sequences, normalizer.weight_mean, normalizer.denominators]
        arrays["normalizer"] = normalizer.counts
        arrays["denominators"] = jnp.concatenate([x.reshape(-1) for x in own if x is not None])
    arrays, numbers = lax.stop_gradient((arrays, numbers))
    return count_broken(
        arrays,
        numbers,
        segments,
        real_last_targets=batch.real_last_targets,
        vocab_size=head.vocab_size,
        adapters=head.adapters,
    )


def loss_of_stats(
    name: str,
    loss: TokenLoss,
    stats: Any,
    batch: RolloutBatch,
    parallel: ParallelMesh | ShardAxes | None,
    normalizer: Normalizer | None,
    token_constants: Any = None,
    numbers: Mapping[str, float | Array] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss and its metrics from statistics, on any mesh.

    `token_constants` are arrays `[R, T, ...]` that the loss reads beside its batch, such as a teacher's log-probs.
    `numbers` are those of the call that are not in the loss, such as its coefficient; only rules read them.
    """
    check_normalizer(normalizer)
    static, traced = take_arrays(loss)
    args = {
        "stats": stats,
        "batch": batch,
        "normalizer": normalizer,
        "token_constants": token_constants,
        "config": traced | {name: jnp.asarray(x, jnp.float32) for name, x in (numbers or {}).items()},
    }

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [p.tokens_spec, *batch_specs(p, batch, normalizer, token_constants), P()], P()

    found: tuple[Float[Array, ""], Metrics] = shard_call(name, _of_stats, parallel, args, specs, static)
    return found


def check_normalizer(normalizer: Normalizer | None) -> None:
    if normalizer is not None and not isinstance(normalizer, Normalizer):
        raise TypeError(f"normalizer: got {type(normalizer).__name__}, expected Normalizer or None")


def batch_specs(p: ParallelMesh, batch: RolloutBatch, normalizer: Normalizer | None, token_constants: Any) -> list[Any]:
    of_normalizer = None if normalizer is None else normalizer.specs(p)
    return [batch.specs(p), of_normalizer, None if token_constants is None else p.tokens_spec]


def _of_stats(
    axes: ShardAxes,
    static: TokenLoss,
    stats: Any,
    batch: RolloutBatch,
    normalizer: Normalizer | None,
    token_constants: Any,
    traced: dict[str, Array],
) -> tuple[Float[Array, ""], Metrics]:
    loss = put_arrays(static, lax.stop_gradient(traced))
    return finish(Step.of(axes, loss, stats, batch, normalizer, token_constants, traced), loss, stats, token_constants)


def finish(
    step: Step, loss: TokenLoss, stats: Any, token_constants: Any, total: Float[Array, ""] | None = None
) -> tuple[Float[Array, ""], Metrics]:
    """Steps 2 to 4. Step 3 is left out where one pass has computed the `total` already."""
    axes, mask = step.segments.axes, step.batch.loss_mask
    constants = lax.stop_gradient((loss.constants(stats, step), token_constants))
    if total is None:
        losses = finite_or_nan(loss.per_token(stats, step.batch, constants, step.segments))
        total = weighted_sum(axes, losses, step.weights, mask)
    broken = step.broken.and_loss(total)
    total += jnp.where(broken.any, jnp.nan, 0)  # also if no token has a weight
    terms = loss.terms(lax.stop_gradient(stats), step, constants)
    if step.left_out is not None:
        terms["impossible_tokens"] = (step.left_out, jnp.ones_like(mask), "sum")
    of_loss = Metric(lax.stop_gradient(total), jnp.float32(1), "sum")
    return total, reduce_metrics(axes, terms) | {"loss": of_loss, "broken_rules": broken.metric()}


def finite_or_nan(losses: Float[Array, "R T"]) -> Float[Array, "R T"]:
    """The losses of tokens, with NaN, in the gradient too, for those that are not finite."""
    return losses * jnp.where(jnp.isfinite(losses), 1, jnp.nan)


def loss_of_hidden(
    name: str,
    loss: TokenLoss,
    head: Prepared,
    batch: RolloutBatch,
    parallel: ParallelMesh | ShardAxes | None,
    normalizer: Normalizer | None,
    token_constants: Any,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss and its metrics from hidden states, on any mesh, in one pass where that fits."""
    check_normalizer(normalizer)
    static, traced = take_arrays(loss)
    args = {
        "head": head.inputs,
        "batch": batch,
        "normalizer": normalizer,
        "token_constants": token_constants,
        "config": traced,
    }

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [head.specs, *batch_specs(p, batch, normalizer, token_constants), P()], P()

    call = (static, head.call)
    found: tuple[Float[Array, ""], Metrics] = shard_call(name, _of_hidden, parallel, args, specs, call)
    return found


def _of_hidden(
    axes: ShardAxes,
    call: tuple[TokenLoss, HeadCall],
    inputs: Inputs,
    batch: RolloutBatch,
    normalizer: Normalizer | None,
    token_constants: Any,
    traced: dict[str, Array],
) -> tuple[Float[Array, ""], Metrics]:
    static, head = call
    traced = lax.stop_gradient(traced)
    loss, of_head = put_arrays(static, traced), OfHead.of(head, inputs)
    if not loss.token_local:
        with note("two passes: the loss of a token depends on others"):
            stats = stats_of_tokens(head, inputs)
        step = Step.of(axes, loss, stats, batch, normalizer, token_constants, traced, of_head)
        return finish(step, loss, stats, token_constants)
    step = Step.of(axes, loss, None, batch, normalizer, token_constants, traced, of_head)
    total, stats = reduce_tokens(head, inputs, OfTokens(static), *known_before(step, loss, token_constants, traced))
    # again, to check the log-probs too
    step = Step.of(axes, loss, stats, batch, normalizer, token_constants, traced, of_head, step.normalizer)
    return finish(step, loss, stats, token_constants, total)


def known_before(step: Step, loss: TokenLoss, token_constants: Any, traced: Numbers) -> tuple[Any, Any]:
    """The inputs of `OfTokens` beside the statistics: arrays by token, and arrays that every token reads whole."""
    constants = lax.stop_gradient((loss.constants(None, step), token_constants))
    by_segment = {name: getattr(step.batch, name) for name in PER_SEGMENT}
    tokens = dataclasses.replace(step.batch, **dict.fromkeys(PER_SEGMENT))  # type: ignore[arg-type]
    return (tokens, step.weights, constants), (by_segment, traced)


@dataclasses.dataclass(frozen=True)
class OfTokens:
    """The weighted losses of some tokens, in the form that `reduce_tokens` takes."""

    loss: TokenLoss

    def __call__(self, stats: Any, per_token: Any, shared: Any) -> jax.Array:
        stats, (batch, weights, constants) = jax.tree.map(lambda x: x[None], (stats, per_token))
        by_segment, traced = shared
        loss = put_arrays(self.loss, traced)
        batch = dataclasses.replace(batch, **by_segment)
        left_out = loss.left_out(stats, batch)
        if left_out is not None:
            batch = dataclasses.replace(batch, loss_mask=jnp.where(left_out, 0, batch.loss_mask))
        segments = Segments(batch.segment_ids, batch.num_segments)
        losses = finite_or_nan(loss.per_token(stats, batch, constants, segments))
        losses = jnp.where(batch.loss_mask > 0, losses, 0) * weights
        log_probs = loss.reads(stats, batch, constants[1], segments).get("log_probs")
        if log_probs is None:
            return losses[0]
        # the step's rules were checked without these log-probs; make the gradient NaN too, which a clip would stop
        broken = (batch.loss_mask > 0) & LOG_PROBS.bad(log_probs, jnp)
        return (losses + jnp.where(broken, jnp.nan, 0) * jnp.where(broken, stats.log_probs, 0))[0]
