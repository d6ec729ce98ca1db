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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from jaxppo._arrays import PER_SEGMENT, Aggregation, masked
from jaxppo._traced import put_arrays, take_arrays
from jaxppo.aggregation import Normalizer, step_normalizer, token_weights, weighted_sum
from jaxppo.batch import RolloutBatch
from jaxppo.head.call import HeadCall, Inputs, Prepared
from jaxppo.head.gradient import reduce_tokens, stats_of_tokens
from jaxppo.head.head import Entropy, LogitStat
from jaxppo.metrics import Composite, Metric, Metrics, Terms, reduce_metrics
from jaxppo.off_policy import OffPolicyConfig
from jaxppo.rules import as_bits, broken_log_probs, count_broken
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes, note, shard_call, vary

Constants = tuple[Any, Any]  # the result of `TokenLoss.constants`, and the call's other arrays


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
    def ruled(self, stats: Any, batch: RolloutBatch) -> Mapping[str, Array | None]:
        """The arrays that the rules should check, by the rules' names; `stats` are None before they are computed."""


@dataclasses.dataclass(frozen=True)
class Step:
    """Per-shard: a batch as a part of its optimiser step.

    Args:
      batch: constants, with an f32 loss mask, 0 where the loss leaves a token out.
      segments: of its rows.
      normalizer: of the whole step.
      weights: `f32[R, T]`, the weight of each token's loss; NaN where a rule is broken anywhere.
      broken: `f32[rules]`, how often each rule is broken on all devices together.
      left_out: `bool[R, T]`, the tokens of the loss mask that have no loss; None where the loss leaves none out.
    """

    batch: RolloutBatch
    segments: Segments
    normalizer: Normalizer
    weights: Float[Array, "R T"]
    broken: Float[Array, " rules"]
    left_out: Bool[Array, "R T"] | None

    @classmethod
    def of(
        cls,
        axes: ShardAxes,
        loss: TokenLoss,
        stats: Any,
        batch: RolloutBatch,
        normalizer: Normalizer | None,
    ) -> Step:
        """Weighs tokens and checks rules, with the statistics and the step's normalizer if there are any."""
        batch = lax.stop_gradient(batch)  # everything that a loss reads from it is a constant
        batch = dataclasses.replace(batch, loss_mask=batch.loss_mask.astype(jnp.float32))
        segments = batch.segments(axes)
        given = {} if normalizer is None else {"normalizer": normalizer.counts}
        normalizer = step_normalizer(batch, segments, normalizer, loss.aggregation, loss.off_policy)
        weights = token_weights(batch.loss_mask, segments, normalizer, loss.aggregation_norm)
        if batch.loss_weights is not None:
            weights *= masked(batch.loss_weights, batch.loss_mask)
        broken = _broken_rules(batch, segments, normalizer.aggregation, {**given, **loss.ruled(stats, batch)})
        left_out = loss.left_out(stats, batch)
        if left_out is not None:  # the denominators still count all tokens
            weights, mask = (jnp.where(left_out, 0, x) for x in (weights, batch.loss_mask))
            batch = dataclasses.replace(batch, loss_mask=mask)
        step = cls(batch, segments, normalizer, weights, broken, left_out)
        # NaN in the weights makes gradients NaN too; a factor of the summed losses would cost one more
        # multiplication of the kernel's gradient
        return dataclasses.replace(step, weights=weights * jnp.where(step.is_broken, jnp.nan, 1))

    @property
    def is_broken(self) -> Bool[Array, ""]:
        """Whether a rule is broken on any device."""
        return self.broken.sum() > 0


def _broken_rules(
    batch: RolloutBatch, segments: Segments, aggregation: Aggregation, ruled: Mapping[str, Array | None]
) -> Float[Array, " rules"]:
    structure = ("segment_ids", "positions", "loss_mask", "sample_ids", "parents")
    arrays = {name: getattr(batch, name) for name in structure} | dict(ruled)
    if batch.loss_weights is not None:
        arrays["loss_weights"] = batch.loss_weights
    if aggregation == "rollout_mean":
        arrays["rollout_ids"] = batch.rollouts
    counts = count_broken(lax.stop_gradient(arrays), segments, batch.real_last_targets)
    return segments.axes.psum(vary(counts, segments.axes.tokens), segments.axes.tokens)


def loss_of_stats(
    name: str,
    loss: TokenLoss,
    stats: Any,
    batch: RolloutBatch,
    parallel: ParallelMesh | ShardAxes | None,
    normalizer: Normalizer | None,
    token_constants: Any = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss and its metrics from statistics, on any mesh.

    `token_constants` are arrays `[R, T, ...]` that the loss reads beside its batch, such as a teacher's log-probs.
    """
    check_normalizer(normalizer)
    static, traced = take_arrays(loss)
    args = {
        "stats": stats,
        "batch": batch,
        "normalizer": normalizer,
        "token_constants": token_constants,
        "config": traced,
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
    traced: list[Array],
) -> tuple[Float[Array, ""], Metrics]:
    loss = put_arrays(static, lax.stop_gradient(traced))
    return finish(Step.of(axes, loss, stats, batch, normalizer), loss, stats, token_constants)


def finish(
    step: Step, loss: TokenLoss, stats: Any, token_constants: Any, total: Float[Array, ""] | None = None
) -> tuple[Float[Array, ""], Metrics]:
    """Steps 2 to 4. Step 3 is left out where one pass has computed the `total` already."""
    axes, mask = step.segments.axes, step.batch.loss_mask
    constants = lax.stop_gradient((loss.constants(stats, step), token_constants))
    if total is None:
        losses = loss.per_token(stats, step.batch, constants, step.segments)
        total = weighted_sum(axes, losses, step.weights, mask)
    total += jnp.where(step.is_broken, jnp.nan, 0)  # also if no token has a weight
    terms = loss.terms(lax.stop_gradient(stats), step, constants)
    if step.left_out is not None:
        terms["impossible_tokens"] = (step.left_out, jnp.ones_like(mask), "sum")
    one = jnp.float32(1)
    of_rules = Composite({"counts": Metric(step.broken, one, "sum")}, as_bits)
    of_loss = Metric(lax.stop_gradient(total), one, "sum")
    return total, reduce_metrics(axes, terms) | {"loss": of_loss, "broken_rules": of_rules}


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
    traced: list[Array],
) -> tuple[Float[Array, ""], Metrics]:
    static, head = call
    traced = lax.stop_gradient(traced)
    loss = put_arrays(static, traced)
    if not loss.token_local:
        with note("two passes: the loss of a token depends on others"):
            stats = stats_of_tokens(head, inputs)
        return finish(Step.of(axes, loss, stats, batch, normalizer), loss, stats, token_constants)
    step = Step.of(axes, loss, None, batch, normalizer)
    total, stats = reduce_tokens(head, inputs, OfTokens(static), *known_before(step, loss, token_constants, traced))
    step = Step.of(axes, loss, stats, batch, step.normalizer)  # again, to check the log-probs too
    return finish(step, loss, stats, token_constants, total)


def known_before(step: Step, loss: TokenLoss, token_constants: Any, traced: list[Array]) -> tuple[Any, Any]:
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
        losses = loss.per_token(stats, batch, constants, Segments(batch.segment_ids, batch.num_segments))
        # the step's rules were checked without these log-probs; make the gradient NaN too, which a clip would stop
        broken = broken_log_probs(stats.log_probs, batch.loss_mask)
        losses = jnp.where(batch.loss_mask > 0, losses, 0) * weights
        return (losses + jnp.where(broken, jnp.nan, 0) * jnp.where(broken, stats.log_probs, 0))[0]
