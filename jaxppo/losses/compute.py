"""From statistics or hidden states to a loss: the one implementation, of a sum of losses and of one alone.

`step_of` gives each token its weight, and checks rules; `finish` computes a loss and its metrics. From hidden states,
`_OfTokens` runs inside the head if the loss of a token depends on that token alone: one pass.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import PER_SEGMENT, masked
from jaxppo.base.metrics import Metric, Metrics, reduce_metrics
from jaxppo.base.traced import put_arrays, take_arrays
from jaxppo.batch.broken_rules import Broken, count_broken
from jaxppo.batch.reads import LOG_PROBS, at_most_zero
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.call import HeadCall, Inputs
from jaxppo.head.gradient import reduce_tokens, stats_of_tokens
from jaxppo.losses.hooks import check_tokens, constants_of, loss_of_tokens, metrics_of, name_of, reads_of
from jaxppo.losses.parts import ALONE, Part, as_token_loss
from jaxppo.losses.token_loss import Reads, Step, masked_batch
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes, note, shard_call, vary
from jaxppo.step.aggregation import Normalizer, Parallel, step_normalizer, token_weights

Found = tuple[Float[Array, ""], Metrics]
Normalizers = Normalizer | Mapping[str, Normalizer] | None
Static = tuple[tuple[str, ...], tuple[Part, ...], HeadCall | None]  # the parts' names, and the parts without arrays
Numbers = Mapping[str, Array]  # the traced numbers of a loss, and others of its call, by name
OfHead = tuple[HeadCall, Inputs] | None  # None where statistics are given


def call_parts(
    name: str,
    parts: Mapping[str, Part],
    given: Mapping[str, Any],
    specs: Callable[[ParallelMesh], tuple[Any, Any]],
    batch: RolloutBatch,
    parallel: Parallel,
    normalizer: Normalizers,
    *,
    head: HeadCall | None = None,
    numbers: Mapping[str, float | Array] | None = None,
    fn: Callable[..., Any] | None = None,
) -> Any:
    """Calls `fn`, or `_of_parts`, on each device, with what is `given` by its name: statistics, or a head's inputs.

    `specs` are those of what is given and of the result; `numbers`, such as a coefficient, are read by rules only.
    """
    static, traced = [], []
    for which, part in parts.items():
        of_tokens = as_token_loss(part.loss)
        loss, its = take_arrays(of_tokens, of_tokens.coefficients)
        if which != ALONE:
            its |= {"part.coef": jnp.asarray(part.coef, jnp.float32)}
        static.append(dataclasses.replace(part, loss=loss, coef=1.0))
        traced.append(its)
    traced[0] |= {name: jnp.asarray(x, jnp.float32) for name, x in (numbers or {}).items()}
    alone = ALONE in parts
    by_name: Any = {ALONE: normalizer} if alone else normalizer
    if normalizer is not None:
        if not isinstance(by_name, Mapping) or not all(isinstance(x, Normalizer) for x in by_name.values()):
            expected = "Normalizer or None" if alone else "Normalizers by the names of parts, or None"
            raise TypeError(f"normalizer: got {type(normalizer).__name__}, expected {expected}")
        if by_name.keys() != parts.keys():
            raise ValueError(f"normalizer: got those of {sorted(by_name)}, expected one of each part, {sorted(parts)}")
    normalizers = [None if normalizer is None else by_name[which] for which in parts]
    args = {**given, "batch": batch, "normalizer": normalizers, "config": traced}

    def all_specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        own, result = specs(p)
        return [own, batch.specs(p), [None if x is None else x.specs(p) for x in normalizers], P()], result

    return shard_call(name, fn or _of_parts, parallel, args, all_specs, (tuple(parts), tuple(static), head))


def _of_parts(
    axes: ShardAxes, call: Static, given: Any, batch: RolloutBatch, normalizers: list[Any], numbers: list[Numbers]
) -> Found:
    """Per-shard: the loss and its metrics, from hidden states in one pass where that fits."""
    names, parts, head = call
    numbers = lax.stop_gradient(numbers)
    each, of_head = list(zip(parts, normalizers, numbers, strict=True)), None if head is None else (head, given)
    known: list[Normalizer | None] = [None] * len(parts)
    stats, total = given, None
    if head is not None and all(as_token_loss(part.loss).token_local for part in parts):
        before = [step_of(axes, *its, batch, None, of_head) for its in each]
        by_token, shared = zip(*map(_known_before, before, numbers), strict=True)
        total, stats = reduce_tokens(head, given, _OfTokens(parts), by_token, shared)
        known = [step.normalizer for step in before]
    elif head is not None:
        with note("two passes: the loss of a token depends on others"):
            stats = stats_of_tokens(axes, head, given)
    # after one pass for the second time, to check the log-probs too
    steps = [step_of(axes, *its, batch, stats, of_head, own) for its, own in zip(each, known, strict=True)]
    if names == (ALONE,):
        return finish(steps[0], stats, total)
    found = [finish(step, stats) for step in steps]
    if total is None:
        total = sum((its["part.coef"] * x for its, (x, _) in zip(numbers, found, strict=True)), jnp.float32(0))
    for value, _ in found:  # also if all weights or coefficients are 0
        total += jnp.where(jnp.isfinite(value), 0, jnp.nan)
    metrics: Metrics = {f"{n}/{what}": x for n, (_, its) in zip(names, found, strict=True) for what, x in its.items()}
    return total, metrics | {"loss": Metric(lax.stop_gradient(total), jnp.float32(1), "sum")}


def step_of(
    axes: ShardAxes,
    part: Part,
    normalizer: Normalizer | None,
    numbers: Numbers,
    batch: RolloutBatch,
    stats: Any,
    head: OfHead = None,
    known: Normalizer | None = None,
) -> Step:
    """Per-shard: weighs tokens and checks rules, with the statistics and the step's normalizer if there are any.

    `numbers` are those that the loss and its factor depend on, `known` is the normalizer of an earlier `Step`.
    """
    loss = put_arrays(as_token_loss(part.loss), numbers)
    batch = part.of(lax.stop_gradient(batch))  # everything that a loss reads from it is a constant
    names = loss.asks.extras
    extras = batch.extras if names is None else {name: batch.extras[name] for name in (*names, *part.extras)}
    batch = dataclasses.replace(batch, extras=extras)
    loss = part.with_numbers(loss, batch)
    segments = batch.segments(axes)
    weighs = known or step_normalizer(batch, segments, normalizer, loss.aggregation, loss.off_policy)
    reads = reads_of(loss, stats, batch, segments)
    if loss.aggregation == "rollout_mean":
        reads |= {"rollout_ids": batch.rollouts}
        if batch.rollout_ids is None:
            reads |= {"twice": jnp.isnan(weighs.denominators)}
    broken = _broken_rules(batch, segments, normalizer, reads, {**numbers, **part.numbers_in(loss)}, head)
    capped = None
    if (sampled := batch.rollout_log_probs) is not None:
        capped, sampled = sampled > 0, at_most_zero(sampled)
        batch = dataclasses.replace(batch, rollout_log_probs=sampled)
    weights = token_weights(batch.loss_mask, segments, weighs, loss.aggregation_norm)
    if batch.loss_weights is not None:
        weights *= masked(batch.loss_weights, batch.loss_mask)
    left_out, mask = loss.left_out(stats, batch), batch.loss_mask
    if left_out is not None:  # the denominators still count all tokens
        check_tokens(f"{name_of(loss)}.left_out", left_out, mask.shape)
        weights, mask = (jnp.where(left_out, 0, x) for x in (weights, mask))
    batch = masked_batch(batch, mask)
    # NaN in the weights makes gradients NaN too; a factor of the summed losses would cost one more
    # multiplication of the kernel's gradient
    weights = weights * jnp.where(broken.any, jnp.nan, 1)
    return Step(loss, batch, segments, weighs, weights, broken, left_out, capped)


def _broken_rules(
    batch: RolloutBatch, segments: Segments, normalizer: Normalizer | None, reads: Reads, numbers: Numbers, head: OfHead
) -> Broken:
    names = ("segment_ids", "positions", "loss_mask", "sample_ids", "parents", "loss_weights")
    arrays = {name: getattr(batch, name) for name in names}
    sizes: dict[str, int] = {}
    if head is not None:
        call, inputs = head
        of_head = inputs._asdict() | inputs.tokens._asdict()
        arrays |= {name: of_head[name] for name in ("targets", "nucleus_ids", "adapter_ids", "temperature")}
        adapters = 0 if inputs.adapter_ids is None else inputs.lora_a.shape[-3]
        sizes = {"vocab_size": call.vocab_size, "adapters": adapters}
    arrays |= reads
    if normalizer is not None:
        own = [normalizer.tokens, normalizer.sequences, normalizer.weight_mean, normalizer.denominators]
        arrays["normalizer"] = normalizer.counts
        arrays["denominators"] = jnp.concatenate([x.reshape(-1) for x in own if x is not None])
    arrays, numbers = lax.stop_gradient((arrays, numbers))
    return count_broken(arrays, numbers, segments, real_last_targets=batch.real_last_targets, **sizes)


def finish(step: Step, stats: Any, total: Float[Array, ""] | None = None) -> Found:
    """Per-shard: the loss, `total` where one pass has computed it already, and its metrics."""
    loss, axes, mask = step.loss, step.segments.axes, step.batch.loss_mask
    constants, seen = lax.stop_gradient(constants_of(loss, stats, step)), loss.seen(stats, mask)
    if total is None:
        losses = loss_of_tokens(loss, seen, step.batch, constants, step.segments)
        weighted = (jnp.where(mask > 0, losses, 0) * step.weights).sum()
        total = axes.psum(vary(weighted, axes.tokens), axes.tokens)
    broken = step.broken.metric(total)
    total += jnp.where(step.broken.any | ~jnp.isfinite(total), jnp.nan, 0)  # also if no token has a weight
    terms = metrics_of(loss, lax.stop_gradient(seen), step, constants)
    if step.left_out is not None:
        terms["impossible_tokens"] = (step.left_out, jnp.ones_like(mask), "sum")
    of_loss = Metric(lax.stop_gradient(total), jnp.float32(1), "sum")
    return total, reduce_metrics(axes, terms) | {"loss": of_loss, "broken_rules": broken}


def _known_before(step: Step, numbers: Numbers) -> tuple[Any, Any]:
    """The inputs of `_OfTokens` beside the statistics: arrays by token, and arrays that every token reads whole."""
    constants = lax.stop_gradient(constants_of(step.loss, None, step))
    weights = step.weights * numbers.get("part.coef", 1)
    by_segment = {name: getattr(step.batch, name) for name in PER_SEGMENT}
    tokens = dataclasses.replace(step.batch, **dict.fromkeys(PER_SEGMENT))  # type: ignore[arg-type]
    return (tokens, weights, constants), (by_segment, numbers)


@dataclasses.dataclass(frozen=True)
class _OfTokens:
    """The weighted losses of some tokens, summed over the parts, in the form that `reduce_tokens` takes."""

    parts: tuple[Part, ...]

    def __call__(self, stats: Any, per_token: Any, shared: Any) -> jax.Array:
        found = []
        stats, per_token = jax.tree.map(lambda x: x[None], (stats, per_token))  # one row
        for part, (batch, weights, constants), (by_segment, numbers) in zip(self.parts, per_token, shared, strict=True):
            batch = dataclasses.replace(batch, **by_segment)
            loss = part.with_numbers(put_arrays(as_token_loss(part.loss), numbers), batch)
            left_out = loss.left_out(stats, batch)
            if left_out is not None:
                batch = masked_batch(batch, jnp.where(left_out, 0, batch.loss_mask))
            segments = Segments(batch.segment_ids, batch.num_segments)
            losses = loss_of_tokens(loss, loss.seen(stats, batch.loss_mask), batch, constants, segments)
            losses = jnp.where(batch.loss_mask > 0, losses, 0) * weights
            log_probs = loss.reads(stats, batch, segments).get("log_probs")
            if log_probs is not None:
                # the step's rules were checked without them; make the gradient NaN too, which a clip would stop
                broken = (batch.loss_mask > 0) & LOG_PROBS.bad(log_probs, jnp)
                losses += jnp.where(broken, jnp.nan, 0) * jnp.where(broken, stats.log_probs, 0)
            found.append(losses[0])
        return functools.reduce(jnp.add, found)
