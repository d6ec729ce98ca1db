"""From statistics or hidden states to a loss: the one implementation, of a sum of losses and of one
alone.

`step_of` gives each token its weight, and checks rules; `finish` computes a loss and its metrics.
From hidden states, `_OfTokens` runs inside the head if the loss of a token depends on that token
alone: one pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import PER_SEGMENT, check, check_type, masked
from jaxppo.base.metrics import Metric, Metrics, reduce_metrics
from jaxppo.base.pytree import PyTree
from jaxppo.base.traced import put_arrays, take_arrays
from jaxppo.batch.broken_rules import Broken, count_broken, count_broken_tokens
from jaxppo.batch.reads import LOG_PROBS, at_most_zero
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.call import HeadCall, Inputs
from jaxppo.head.gradient import reduce_tokens
from jaxppo.head.head import TokenStats
from jaxppo.head.kept import stats_with_kept_logits
from jaxppo.losses.hooks import (
    check_tokens,
    constants_of,
    loss_of_tokens,
    metrics_of,
    name_of,
    reads_of,
)
from jaxppo.losses.parts import ALONE, Part
from jaxppo.losses.token_loss import Reads, WeighedBatch, masked_batch
from jaxppo.policy.unusable import not_finite
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes, note, shard_call, vary
from jaxppo.step.aggregation import Normalizer, Parallel, step_normalizer, token_weights

LossAndMetrics = tuple[Float[Array, ""], Metrics]
Normalizers = Normalizer | Mapping[str, Normalizer] | None
Numbers = Mapping[str, Array]  # the traced numbers of a loss, and others of its call, by name
HeadInputs = tuple[HeadCall, Inputs] | None  # None where statistics are given


class Static(NamedTuple):
    """The static part of a call."""

    names: tuple[str, ...]  # of the parts
    parts: tuple[Part, ...]  # without their arrays
    head: HeadCall | None  # None where statistics are given


def call_parts(
    name: str,
    parts: Mapping[str, Part],
    arrays: Mapping[str, PyTree],
    specs: Callable[[ParallelMesh], tuple[PyTree, PyTree]],
    batch: RolloutBatch,
    parallel: Parallel,
    normalizer: Normalizers,
    *,
    head: HeadCall | None = None,
    numbers: Mapping[str, float | Array] | None = None,
    fn: Callable[..., Any] | None = None,
) -> Any:
    """Calls `fn`, or `_loss_of_parts`, on each device, with `arrays` by name: statistics, or a
    head's inputs.

    `specs` are those of the arrays and of the result; `numbers`, such as a coefficient, are read by
    rules only.
    """
    static = []
    traced = []
    for which, part in parts.items():
        loss, part_numbers = take_arrays(part.token_loss, part.token_loss.coefficients)
        if which != ALONE:
            part_numbers["part.coef"] = jnp.asarray(part.coef, jnp.float32)
        static.append(dataclasses.replace(part, loss=loss, coef=1.0))
        traced.append(part_numbers)
    for number, x in (numbers or {}).items():
        traced[0][number] = jnp.asarray(x, jnp.float32)
    normalizers = _of_each_part(normalizer, parts)
    args = {**arrays, "batch": batch, "normalizer": normalizers, "config": traced}

    def all_specs(p: ParallelMesh) -> tuple[list[PyTree], PyTree]:
        array_specs, result_specs = specs(p)
        normalizer_specs = [None if x is None else x.specs(p) for x in normalizers]
        return [array_specs, batch.specs(p), normalizer_specs, P()], result_specs

    return shard_call(
        name,
        fn or _loss_of_parts,
        parallel,
        args,
        all_specs,
        Static(tuple(parts), tuple(static), head),
    )


def _of_each_part(normalizer: Normalizers, parts: Mapping[str, Part]) -> list[Normalizer | None]:
    """The normalizer of each part; raises unless there is one of each, or none."""
    if normalizer is None:
        return [None] * len(parts)
    expected = "Normalizers by the names of parts, or None"
    by_name = normalizer
    if ALONE in parts:
        expected = "Normalizer or None"
        by_name = {ALONE: normalizer}  # type: ignore[dict-item]
    good = isinstance(by_name, Mapping) and all(isinstance(x, Normalizer) for x in by_name.values())
    check_type("normalizer", normalizer, good, expected)
    assert isinstance(by_name, Mapping)
    good = by_name.keys() == parts.keys()
    check("normalizer", f"those of {sorted(by_name)}", good, f"one of each part, {sorted(parts)}")
    return [by_name[name] for name in parts]


def _loss_of_parts(
    axes: ShardAxes,
    static: Static,
    arrays: PyTree,
    batch: RolloutBatch,
    normalizers: Sequence[Normalizer | None],
    numbers: Sequence[Numbers],
) -> LossAndMetrics:
    """Per-shard: the loss and its metrics, from hidden states in one pass where that fits."""
    numbers = lax.stop_gradient(numbers)
    stats = arrays
    inputs: HeadInputs = None
    one_pass = False
    if static.head is not None:
        inputs = (static.head, arrays)
        one_pass = all(part.token_loss.token_local for part in static.parts)
        stats = None
        if not one_pass:
            with note("two passes: the loss of a token depends on others"):
                stats = stats_with_kept_logits(axes, static.head, arrays)
    weighed_batches = [
        weighed_batch(axes, part, normalizer, own, batch, stats, inputs)
        for part, normalizer, own in zip(static.parts, normalizers, numbers, strict=True)
    ]
    total = None
    if inputs is not None and one_pass:
        total, stats = _one_pass(inputs, static.parts, weighed_batches, numbers)
        weighed_batches = [_with_stats(weighed, stats) for weighed in weighed_batches]
    if static.names == (ALONE,):
        return finish(weighed_batches[0], stats, total)
    results = [finish(weighed, stats) for weighed in weighed_batches]
    return _added(static.names, results, total, numbers)


def _one_pass(
    inputs: tuple[HeadCall, Inputs],
    parts: tuple[Part, ...],
    weighed_batches: Sequence[WeighedBatch],
    numbers: Sequence[Numbers],
) -> tuple[Float[Array, ""], TokenStats]:
    """The weighted sum of all losses of tokens, and the statistics, in one pass of the head."""
    call, arrays = inputs
    known = [
        _known_before(weighed, own) for weighed, own in zip(weighed_batches, numbers, strict=True)
    ]
    by_token = [tokens for tokens, _ in known]
    shared = [whole for _, whole in known]
    return reduce_tokens(call, arrays, _OfTokens(parts), by_token, shared)


def _added(
    names: Sequence[str],
    results: Sequence[LossAndMetrics],
    total: Float[Array, ""] | None,
    numbers: Sequence[Numbers],
) -> LossAndMetrics:
    """The sum of the parts' losses, `total` where one pass has computed it already, and the
    metrics of all parts.
    """
    if total is None:
        total = jnp.float32(0)
        for own, (loss, _) in zip(numbers, results, strict=True):
            total += own["part.coef"] * loss
    metrics: Metrics = {}
    for name, (loss, part_metrics) in zip(names, results, strict=True):
        # also if all weights or coefficients are 0
        total += jnp.where(jnp.isfinite(loss), 0, jnp.nan)
        metrics |= {f"{name}/{what}": x for what, x in part_metrics.items()}
    return total, metrics | {"loss": Metric(lax.stop_gradient(total), jnp.float32(1), "sum")}


def weighed_batch(
    axes: ShardAxes,
    part: Part,
    normalizer: Normalizer | None,
    numbers: Numbers,
    batch: RolloutBatch,
    stats: PyTree,
    inputs: HeadInputs = None,
) -> WeighedBatch:
    """Per-shard: weighs tokens and checks rules, with the statistics and the step's normalizer if
    there are any.

    `numbers` are those that the loss and its factor depend on. `stats` are None before the one pass
    of a head.
    """
    loss = put_arrays(part.token_loss, numbers)
    batch = part.own_batch(
        lax.stop_gradient(batch)
    )  # everything that a loss reads from it is a constant
    names = loss.asks.extras
    if names is not None:
        extras = {name: batch.extras[name] for name in (*names, *part.extras)}
        batch = dataclasses.replace(batch, extras=extras)
    loss = part.with_numbers(loss, batch)
    segments = batch.segments(axes)
    options = loss.aggregation, loss.off_policy, loss.out_of_denominators
    denominators = step_normalizer(batch, segments, normalizer, *options)
    reads = reads_of(loss, stats, batch, segments)
    rule_reads = dict(reads)
    if loss.aggregation == "rollout_mean":
        rule_reads["rollout_ids"] = batch.rollouts
        if batch.rollout_ids is None:
            rule_reads["twice"] = jnp.isnan(denominators.denominators)
    broken = _broken_rules(
        batch, segments, normalizer, rule_reads, {**numbers, **part.numbers_in(loss)}, inputs
    )
    capped = None
    if batch.rollout_log_probs is not None:
        capped = batch.rollout_log_probs > 0
        batch = dataclasses.replace(batch, rollout_log_probs=at_most_zero(batch.rollout_log_probs))
    weights = token_weights(batch.loss_mask, segments, denominators, loss.aggregation_norm)
    if batch.loss_weights is not None:
        weights *= masked(batch.loss_weights, batch.loss_mask)
    known = frozenset(name for name, x in reads.items() if x is not None)
    weighed = WeighedBatch(
        loss, batch, batch, segments, denominators, weights, broken, known, None, None, capped
    )
    return _without_left_out(weighed, stats)


def _with_stats(weighed: WeighedBatch, stats: PyTree) -> WeighedBatch:
    """The batch after one pass, which has given statistics: their rules are checked too, and
    tokens left out by them.
    """
    reads = reads_of(weighed.loss, stats, weighed.whole_batch, weighed.segments)
    new = {name for name, x in reads.items() if x is not None} - weighed.known
    if new:
        arrays = lax.stop_gradient({**reads, "loss_mask": weighed.whole_batch.loss_mask})
        broken = weighed.broken + count_broken_tokens(arrays, new, weighed.segments)
        weighed = dataclasses.replace(weighed, broken=broken)
    return _without_left_out(weighed, stats)


def _without_left_out(weighed: WeighedBatch, stats: PyTree) -> WeighedBatch:
    """The batch without the tokens that the loss leaves out, and with weights of NaN where a rule
    is broken.
    """
    loss = weighed.loss
    mask = weighed.whole_batch.loss_mask
    weights = weighed.weights
    left_out = loss.left_out(stats, weighed.whole_batch)
    if left_out is not None:  # the normalizer knows whether the denominators count them
        check_tokens(f"{name_of(loss)}.left_out", left_out, mask.shape)
        weights = jnp.where(left_out, 0, weights)
        mask = jnp.where(left_out, 0, mask)
    unusable = loss.unusable_tokens(stats, weighed.whole_batch)
    if unusable is not None:
        check_tokens(f"{name_of(loss)}.unusable_tokens", unusable, mask.shape)
    # NaN in the weights makes gradients NaN too; a factor of the summed losses would cost one more
    # multiplication of the kernel's gradient
    batch = masked_batch(weighed.whole_batch, mask)
    weights = weights * jnp.where(weighed.broken.any, jnp.nan, 1)
    return dataclasses.replace(
        weighed, batch=batch, weights=weights, left_out=left_out, unusable=unusable
    )


def _broken_rules(
    batch: RolloutBatch,
    segments: Segments,
    normalizer: Normalizer | None,
    reads: Reads,
    numbers: Numbers,
    inputs: HeadInputs,
) -> Broken:
    names = ("segment_ids", "positions", "loss_mask", "sample_ids", "parents", "loss_weights")
    arrays = {name: getattr(batch, name) for name in names}
    vocab_size = None
    adapters = 0
    if inputs is not None:
        call, head_arrays = inputs
        vocab_size = call.vocab_size
        tokens = head_arrays.tokens
        arrays |= {
            "targets": tokens.targets,
            "nucleus_ids": tokens.nucleus_ids,
            "temperature": tokens.temperature,
        }
        arrays["adapter_ids"] = head_arrays.adapter_ids
        if head_arrays.adapter_ids is not None:
            adapters = head_arrays.lora_a.shape[-3]
    arrays |= reads
    counted = batch.loss_mask
    if normalizer is not None:
        counted = jnp.where(not_finite(batch, normalizer.out_of_denominators), 0, counted)
        sums = [
            normalizer.tokens,
            normalizer.sequences,
            normalizer.weight_mean,
            normalizer.denominators,
        ]
        arrays["normalizer"] = normalizer.counts
        arrays["denominators"] = jnp.concatenate([x.reshape(-1) for x in sums if x is not None])
    arrays, numbers = lax.stop_gradient((arrays, numbers))
    return count_broken(
        arrays,
        numbers,
        segments,
        real_last_targets=batch.real_last_targets,
        vocab_size=vocab_size,
        adapters=adapters,
        counted=counted,
    )


def finish(
    weighed: WeighedBatch, stats: PyTree, total: Float[Array, ""] | None = None
) -> LossAndMetrics:
    """Per-shard: the loss, `total` where one pass has computed it already, and its metrics."""
    loss = weighed.loss
    axes = weighed.segments.axes
    mask = weighed.batch.loss_mask
    constants = lax.stop_gradient(constants_of(loss, stats, weighed))
    seen = loss.seen(stats, mask)
    if total is None:
        losses = loss_of_tokens(loss, seen, weighed.batch, constants, weighed.segments)
        weighted = (jnp.where(mask > 0, losses, 0) * weighed.weights).sum()
        total = axes.psum(vary(weighted, axes.tokens), axes.tokens)
    broken = weighed.broken.metric(total)
    # also if no token has a weight
    total += jnp.where(weighed.broken.any | ~jnp.isfinite(total), jnp.nan, 0)
    terms = metrics_of(loss, lax.stop_gradient(seen), weighed, constants)
    if weighed.unusable is not None:
        terms["unusable_tokens"] = (weighed.unusable, jnp.ones_like(mask), "sum")
    of_loss = Metric(lax.stop_gradient(total), jnp.float32(1), "sum")
    return total, reduce_metrics(axes, terms) | {"loss": of_loss, "broken_rules": broken}


def _known_before(weighed: WeighedBatch, numbers: Numbers) -> tuple[PyTree, PyTree]:
    """The inputs of `_OfTokens` beside the statistics: arrays by token, and arrays that every
    token reads whole.
    """
    constants = lax.stop_gradient(constants_of(weighed.loss, None, weighed))
    weights = weighed.weights * numbers.get("part.coef", 1)
    by_segment = {name: getattr(weighed.batch, name) for name in PER_SEGMENT}
    tokens = dataclasses.replace(weighed.batch, **dict.fromkeys(PER_SEGMENT))  # type: ignore[arg-type]
    return (tokens, weights, constants), (by_segment, numbers)


@dataclasses.dataclass(frozen=True)
class _OfTokens:
    """The weighted losses of some tokens, summed over the parts, in the form that
    `reduce_tokens` takes.
    """

    parts: tuple[Part, ...]

    def __call__(self, stats: TokenStats, per_token: PyTree, shared: PyTree) -> jax.Array:
        stats, per_token = jax.tree.map(lambda x: x[None], (stats, per_token))  # one row
        losses = []
        for part, tokens, whole in zip(self.parts, per_token, shared, strict=True):
            losses.append(self._of_part(part, stats, tokens, whole)[0])
        return functools.reduce(jnp.add, losses)

    def _of_part(
        self, part: Part, stats: TokenStats, per_token: PyTree, shared: PyTree
    ) -> jax.Array:
        """f32[1, C], the weighted losses of one part."""
        batch, weights, constants = per_token
        by_segment, numbers = shared
        batch = dataclasses.replace(batch, **by_segment)
        loss = part.with_numbers(put_arrays(part.token_loss, numbers), batch)
        left_out = loss.left_out(stats, batch)
        if left_out is not None:
            batch = masked_batch(batch, jnp.where(left_out, 0, batch.loss_mask))
        segments = Segments(batch.segment_ids, batch.num_segments)
        losses = loss_of_tokens(loss, loss.seen(stats, batch.loss_mask), batch, constants, segments)
        losses = jnp.where(batch.loss_mask > 0, losses, 0) * weights
        log_probs = loss.reads(stats, batch, segments).get("log_probs")
        if log_probs is None:
            return losses
        # the step's rules were checked without them; make the gradient NaN too, which a clip would
        # stop
        broken = (batch.loss_mask > 0) & LOG_PROBS.bad(log_probs, jnp)
        return losses + jnp.where(broken, jnp.nan, 0) * jnp.where(broken, stats.log_probs, 0)
