"""From statistics or hidden states to a loss: the one implementation, of a sum of losses and of one alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import PER_SEGMENT
from jaxppo.base.metrics import Metric, Metrics, reduce_metrics
from jaxppo.base.traced import put_arrays, take_arrays
from jaxppo.batch.reads import LOG_PROBS
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.call import HeadCall, Inputs, Prepared
from jaxppo.head.gradient import reduce_tokens, stats_of_tokens
from jaxppo.losses.parts import Part
from jaxppo.losses.step import Numbers, OfHead, step_of
from jaxppo.losses.token_loss import Step, TokenLoss
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes, note, shard_call
from jaxppo.step.aggregation import Normalizer, weighted_sum

ALONE = ""  # the name of a loss that is not a part of a sum
Found = tuple[Float[Array, ""], Metrics]
Normalizers = Normalizer | Mapping[str, Normalizer] | None
Static = tuple[tuple[str, ...], tuple[Part, ...]]  # the names of the parts, and the parts without arrays


def loss_of_stats(
    name: str,
    parts: Mapping[str, Part] | TokenLoss[Any],
    stats: Any,
    batch: RolloutBatch,
    parallel: ParallelMesh | ShardAxes | None,
    normalizer: Normalizers,
    numbers: Mapping[str, float | Array] | None = None,
) -> Found:
    """The loss and its metrics from statistics, on any mesh.

    `numbers` are those of the call that are not in the loss, such as its coefficient; only rules read them.
    """
    static, normalizers, traced = split_parts(parts, normalizer)
    traced[0] |= {name: jnp.asarray(x, jnp.float32) for name, x in (numbers or {}).items()}
    args = {"stats": stats, "batch": batch, "normalizer": normalizers, "config": traced}

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [p.tokens_spec, batch.specs(p), normalizer_specs(p, normalizers), P()], P()

    found: Found = shard_call(name, _of_stats, parallel, args, specs, static)
    return found


def loss_of_hidden(
    name: str,
    parts: Mapping[str, Part],
    head: Prepared,
    batch: RolloutBatch,
    parallel: ParallelMesh | ShardAxes | None,
    normalizer: Normalizers,
) -> Found:
    """The loss and its metrics from hidden states, on any mesh, in one pass where that fits."""
    static, normalizers, traced = split_parts(parts, normalizer)
    args = {"head": head.inputs, "batch": batch, "normalizer": normalizers, "config": traced}

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [head.specs, batch.specs(p), normalizer_specs(p, normalizers), P()], P()

    found: Found = shard_call(name, _of_hidden, parallel, args, specs, (static, head.call))
    return found


def split_parts(
    parts: Mapping[str, Part] | TokenLoss[Any], normalizer: Normalizers
) -> tuple[Static, list[Normalizer | None], list[dict[str, Array]]]:
    """The static part of a call, and for each of its losses the normalizer and the traced numbers."""
    parts = parts if isinstance(parts, Mapping) else {ALONE: Part(parts)}
    static, numbers = [], []
    for name, part in parts.items():
        loss, traced = take_arrays(part.of_tokens.traceable())
        if name != ALONE:
            traced |= {"part.coef": jnp.asarray(part.coef, jnp.float32)}
        static.append(Part(loss, 1.0, part.mask, part.weights, part.equals))
        numbers.append(traced)
    return (tuple(parts), tuple(static)), _normalizers(parts, normalizer), numbers


def _normalizers(parts: Mapping[str, Part], given: Normalizers) -> list[Normalizer | None]:
    if ALONE in parts:
        if given is not None and not isinstance(given, Normalizer):
            raise TypeError(f"normalizer: got {type(given).__name__}, expected Normalizer or None")
        return [given]
    if given is None:
        return [None] * len(parts)
    if not isinstance(given, Mapping) or not all(isinstance(x, Normalizer) for x in given.values()):
        raise TypeError(f"normalizer: got {type(given).__name__}, expected Normalizers by the names of parts, or None")
    if given.keys() != parts.keys():
        raise ValueError(f"normalizer: got those of {sorted(given)}, expected one of each part, {sorted(parts)}")
    return [given[name] for name in parts]


def normalizer_specs(p: ParallelMesh, normalizers: Sequence[Normalizer | None]) -> list[Normalizer | None]:
    return [None if x is None else x.specs(p) for x in normalizers]


def _of_stats(
    axes: ShardAxes,
    static: Static,
    stats: Any,
    batch: RolloutBatch,
    normalizers: list[Normalizer | None],
    numbers: list[dict[str, Array]],
) -> Found:
    names, parts = static
    numbers = lax.stop_gradient(numbers)
    found = []
    for part, normalizer, its in zip(parts, normalizers, numbers, strict=True):
        loss = put_arrays(part.of_tokens, its)
        found.append(finish(step_of(axes, loss, stats, part.of(batch), normalizer, its), loss, stats))
    return _sum(names, found, numbers)


def _of_hidden(
    axes: ShardAxes,
    call: tuple[Static, HeadCall],
    inputs: Inputs,
    batch: RolloutBatch,
    normalizers: list[Normalizer | None],
    numbers: list[dict[str, Array]],
) -> Found:
    (names, parts), head = call
    numbers = lax.stop_gradient(numbers)
    static, of_head = [part.of_tokens for part in parts], OfHead.of(head, inputs)
    losses, batches = list(map(put_arrays, static, numbers)), [part.of(batch) for part in parts]

    def steps_of(stats: Any, known: Sequence[Normalizer | None]) -> list[Step]:
        return [
            step_of(axes, loss, stats, b, normalizer, its, of_head, its_own)
            for loss, b, normalizer, its, its_own in zip(losses, batches, normalizers, numbers, known, strict=True)
        ]

    unknown: list[Normalizer | None] = [None] * len(parts)
    if not all(loss.token_local for loss in losses):
        with note("two passes: the loss of a token depends on others"):
            stats = stats_of_tokens(head, inputs)
        steps = steps_of(stats, unknown)
        return _sum(names, [finish(step, loss, stats) for step, loss in zip(steps, losses, strict=True)], numbers)
    before = steps_of(None, unknown)
    given = [_known_before(*x) for x in zip(before, losses, numbers, strict=True)]
    fn, shared = _OfTokens(tuple(static)), [its for _, its in given]
    total, stats = reduce_tokens(head, inputs, fn, [by_token for by_token, _ in given], shared)
    steps = steps_of(stats, [step.normalizer for step in before])  # again, to check the log-probs too
    if names == (ALONE,):
        return finish(steps[0], losses[0], stats, total)
    return _sum(names, [finish(step, loss, stats) for step, loss in zip(steps, losses, strict=True)], numbers, total)


def _sum(
    names: tuple[str, ...], found: list[Found], numbers: list[dict[str, Array]], total: Float[Array, ""] | None = None
) -> Found:
    """The sum of the losses, `total` where one pass has computed it, and the metrics of all; a loss alone as it is."""
    if names == (ALONE,):
        return found[0]
    if total is None:
        total = sum((its["part.coef"] * x for its, (x, _) in zip(numbers, found, strict=True)), jnp.float32(0))
    for value, _ in found:  # also if all weights or coefficients are 0
        total += jnp.where(jnp.isfinite(value), 0, jnp.nan)
    metrics: Metrics = {f"{n}/{what}": x for n, (_, its) in zip(names, found, strict=True) for what, x in its.items()}
    return total, metrics | {"loss": Metric(lax.stop_gradient(total), jnp.float32(1), "sum")}


def finish(step: Step, loss: TokenLoss[Any], stats: Any, total: Float[Array, ""] | None = None) -> Found:
    """Steps 2 to 4 of `losses.token_loss`. Step 3 is left out where one pass has computed the `total` already."""
    axes, mask = step.segments.axes, step.batch.loss_mask
    constants, seen = lax.stop_gradient(loss.constants(stats, step)), loss.seen(stats, mask)
    if total is None:
        losses = loss.per_token(seen, step.batch, constants, step.segments)
        total = weighted_sum(axes, losses, step.weights, mask)
    broken = step.broken.and_loss(total)
    total += jnp.where(broken.any, jnp.nan, 0)  # also if no token has a weight
    terms = loss.metrics(lax.stop_gradient(seen), step, constants)
    if step.left_out is not None:
        terms["impossible_tokens"] = (step.left_out, jnp.ones_like(mask), "sum")
    of_loss = Metric(lax.stop_gradient(total), jnp.float32(1), "sum")
    return total, reduce_metrics(axes, terms) | {"loss": of_loss, "broken_rules": broken.metric()}


def _known_before(step: Step, loss: TokenLoss[Any], numbers: Numbers) -> tuple[Any, Any]:
    """The inputs of `_OfTokens` beside the statistics: arrays by token, and arrays that every token reads whole."""
    constants, weights = lax.stop_gradient(loss.constants(None, step)), step.weights
    if "part.coef" in numbers:
        weights = weights * numbers["part.coef"]
    by_segment = {name: getattr(step.batch, name) for name in PER_SEGMENT}
    tokens = dataclasses.replace(step.batch, **dict.fromkeys(PER_SEGMENT))  # type: ignore[arg-type]
    return (tokens, weights, constants), (by_segment, numbers)


@dataclasses.dataclass(frozen=True)
class _OfTokens:
    """The weighted losses of some tokens, summed over the parts, in the form that `reduce_tokens` takes."""

    losses: tuple[TokenLoss[Any], ...]

    def __call__(self, stats: Any, per_token: Any, shared: Any) -> jax.Array:
        found = [self._of(loss, stats, *of) for loss, *of in zip(self.losses, per_token, shared, strict=True)]
        return functools.reduce(jnp.add, found)

    def _of(self, static: TokenLoss[Any], stats: Any, per_token: Any, shared: Any) -> jax.Array:
        stats, (batch, weights, constants) = jax.tree.map(lambda x: x[None], (stats, per_token))
        by_segment, traced = shared
        loss = put_arrays(static, traced)
        batch = dataclasses.replace(batch, **by_segment)
        left_out = loss.left_out(stats, batch)
        if left_out is not None:
            batch = dataclasses.replace(batch, loss_mask=jnp.where(left_out, 0, batch.loss_mask))
        segments = Segments(batch.segment_ids, batch.num_segments)
        losses = loss.per_token(loss.seen(stats, batch.loss_mask), batch, constants, segments)
        losses = jnp.where(batch.loss_mask > 0, losses, 0) * weights
        log_probs = loss.reads(stats, batch, segments).get("log_probs")
        if log_probs is None:
            return losses[0]
        # the step's rules were checked without these log-probs; make the gradient NaN too, which a clip would stop
        broken = (batch.loss_mask > 0) & LOG_PROBS.bad(log_probs, jnp)
        return (losses + jnp.where(broken, jnp.nan, 0) * jnp.where(broken, stats.log_probs, 0))[0]
