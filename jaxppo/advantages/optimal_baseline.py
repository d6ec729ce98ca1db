"""The baseline of each token that minimises the variance of the policy's gradient."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxppo.advantages.by_group import Singletons, readable
from jaxppo.advantages.token_statistics import Parallel, on_rows, scan_rows
from jaxppo.base.arrays import Coefficient, as_number, check_choice, check_ids, masked
from jaxppo.base.by_id import ById
from jaxppo.base.stacked import check_whole_step, of_rows
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import FINITE, LOG_PROBS
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.head import TokenStats
from jaxppo.head.token_arguments import check_stats
from jaxppo.sharding import Segments, ShardAxes, vary

Place = Literal["position", "loss_token"]


def optimal_token_baseline(
    returns: Float[Array, "*K R T"],
    stats: TokenStats,
    group_ids: Int[Array, "*K R S"],
    batch: RolloutBatch,
    *,
    among: Bool[Array, "*K R S"] | None = None,
    rollout_ids: Int[Array, "*K R S"] | None = None,
    place: Place = "position",
    weights: Float[Array, "*K R T"] | None = None,
    singletons: Singletons = "reward",
    epsilon: Coefficient = 1e-8,
    parallel: Parallel = None,
) -> Float[Array, "*K R T"]:
    """The optimal token baseline: A_t = G_t - B_t, B_t = sum_g(G_t W_t) / (sum_g(W_t) + epsilon) at
    each place t.

    W_t is the squared norm of the gradient of a sample's log-probs up to t with respect to the
    logits: the sum of w_u^2 (1 - 2 p_u + sum p^2) over its loss tokens u up to t. Sums are over the
    samples of the group with a loss token at t. Each device holds them in two tables of
    `[tokens of the step / 2]`.

    Args:
      returns: `f32[R, T]`, G, see `discounted_returns`; anything where the mask is 0.
      stats: log-probs p of the tokens and `sum_p2`, `[R, T]`, before the step: `compute_log_probs`
        of `log_probs_from_hidden(..., logit_stats=("sum_p2",))`.
      group_ids, among: see `grpo`.
      rollout_ids: as in `grpo`, by default those of the batch; each rollout is one sample here,
        since places count from a rollout's first loss token.
      batch, parallel: see `spread`.
      place: how t counts: "position" counts all tokens from a sample's first loss token on;
        "loss_token" counts loss tokens alone, so tokens that tools wrote count no place (verl's
        form for tool-integrated reasoning).
      weights: w, `f32[R, T]`, importance weights over the sampler, or 1.
      singletons: the advantage at a place that no other sample reaches: its own return, "reward"
        (verl), or "zero".
      epsilon: added to the sum of W, at least 0.

    Returns:
      `f32`, the shape of the loss mask, 0 where the mask is 0, and in samples without a group.

    Raises:
      ValueError, TypeError: as `grpo`; statistics without `sum_p2`; one micro-batch of several; a
        rollout that was cut into several samples, for which all is NaN under `jit`.

    Example:
      >>> ids, one = jnp.array([[1, 2, 2]]), jnp.ones((1, 3))
      >>> batch = RolloutBatch(ids, ids, ids, jnp.array([[0, 0, 1]]), one, jnp.array([[0, 1]]))
      >>> stats = TokenStats(jnp.log(jnp.array([[0.5, 0.25, 0.5]])), sum_p2=jnp.array([[0.5, 0.5, 0.5]]))
      >>> returns = jnp.array([[3.0, 0.0, 0.0]])  # W is 0.5 and 1 at the first place
      >>> optimal_token_baseline(returns, stats, jnp.array([[7, 7]]), batch).round(2)
      Array([[ 2., -1.,  0.]], dtype=float32)

    2026, Optimal Token Baseline, https://arxiv.org/abs/2602.07078; verl alone ships it
    """
    check_choice("place", place, Place)
    check_choice("singletons", singletons, Singletons)
    batch = checked(batch, stacked=True)
    check_stats(
        stats, batch.loss_mask.shape, "sum_p2", how="log_probs_from_hidden(logit_stats=['sum_p2'])"
    )
    check_ids("group_ids", group_ids)
    if rollout_ids is None:
        rollout_ids = batch.rollout_ids
    name = "optimal_token_baseline"
    check_whole_step(name, batch)
    if rollout_ids is not None:
        _check_whole(rollout_ids)
    tokens = {
        "returns": returns,
        "stats.log_probs": stats.log_probs,
        "stats.sum_p2": stats.sum_p2,
        "weights": weights,
    }
    samples = {"group_ids": group_ids, "among": among, "rollout_ids": rollout_ids}
    numbers = {"epsilon": as_number("epsilon", epsilon, least=0)}
    optional = ["weights", "among", "rollout_ids"]
    static = (place, singletons)
    return on_rows(
        name,
        _per_shard,
        parallel,
        batch,
        tokens,
        samples,
        numbers,
        optional=optional,
        static=static,
    )


def _check_whole(rollout_ids: jax.Array) -> None:
    """Raises where this host sees that a rollout is several samples."""
    check_ids("rollout_ids", rollout_ids)
    if not readable(rollout_ids):
        return
    ids = np.asarray(rollout_ids)
    rollouts, counts = np.unique(ids[ids >= 0], return_counts=True)
    for rollout, count in zip(rollouts[counts > 1], counts[counts > 1], strict=True):
        got = f"{count} samples of rollout {rollout}"
        raise ValueError(
            f"rollout_ids: got {got}, expected one: places count from a rollout's first loss token"
        )


@of_rows
def _per_shard(
    axes: ShardAxes,
    static: tuple[Place, Singletons],
    returns: jax.Array,
    log_probs: jax.Array,
    sum_p2: jax.Array,
    weights: jax.Array | None,
    group_ids: jax.Array,
    among: jax.Array | None,
    rollout_ids: jax.Array | None,
    epsilon: jax.Array,
    batch: RolloutBatch,
) -> jax.Array:
    place, singletons = static
    segments = batch.segments(axes)
    by_id = ById.of(axes, group_ids)
    tokens = LossTokens.of(batch)
    counts = (tokens.mask > 0) & _spread_flags(segments, by_id.there)
    mask = counts.astype(jnp.float32)
    returns = masked(tokens.see(returns), mask)
    energy = _energy(tokens, log_probs, sum_p2, weights, mask)
    energy_so_far = scan_rows(axes, batch, jnp.ones_like(mask), jnp.where(counts, energy, 0))
    places = _places(place, axes, batch, segments, mask)
    members = mask
    if among is not None:
        members = jnp.where(_spread_flags(segments, among), mask, 0)

    lengths = jnp.maximum(segments.max(places.astype(jnp.float32), members) + 1, 0)
    shared, starts = _shared_places(by_id, lengths)
    inside = counts & (places < segments.spread(shared[by_id.own]))
    size = max(counts.size * axes.size(axes.tokens) // 2, 1)
    index = jnp.where(inside, segments.spread(starts[by_id.own]) + places, size)
    # Differences from the group's largest return, so that equal returns give exactly 0.
    largest = _largest(by_id, segments, returns, members)
    summands = ((returns - largest) * energy_so_far, energy_so_far)
    numerator, denominator = _place_sums(axes, summands, members > 0, index, inside, size)
    divisor = denominator + epsilon
    divisor = jnp.where(divisor == 0, 1, divisor)
    advantages = returns - largest * (denominator / divisor) - numerator / divisor

    alone = returns if singletons == "reward" else jnp.zeros_like(returns)
    advantages = jnp.where(inside, advantages, alone)
    if rollout_ids is not None:
        advantages = jnp.where(_has_cut_rollout(axes, rollout_ids), jnp.nan, advantages)
    return lax.stop_gradient(jnp.where(counts, advantages, 0) + tokens.unsound)


def _spread_flags(segments: Segments, flags: jax.Array) -> jax.Array:
    return segments.spread(flags.astype(jnp.int32)) > 0


def _energy(
    tokens: LossTokens,
    log_probs: jax.Array,
    sum_p2: jax.Array,
    weights: jax.Array | None,
    mask: jax.Array,
) -> jax.Array:
    """w^2 (1 - 2 p + sum p^2) of each token."""
    log_probs = masked(tokens.read(LOG_PROBS, log_probs), mask)
    sum_p2 = masked(tokens.read(FINITE, sum_p2), mask)
    # as (1 - p)^2 and what the other tokens add: no rounding makes it negative
    energy = jnp.expm1(log_probs) ** 2 + jnp.maximum(sum_p2 - jnp.exp(2 * log_probs), 0)
    if weights is not None:
        energy = energy * masked(weights, mask) ** 2
    return energy


def _largest(by_id: ById, segments: Segments, returns: jax.Array, members: jax.Array) -> jax.Array:
    """The largest return of the members of each token's group; 0 where there is none."""
    largest = by_id.max(by_id.gather(segments.max(returns, members)))
    largest = jnp.where(jnp.isneginf(largest), 0, largest)
    return segments.spread(largest[by_id.own])


def _place_sums(
    axes: ShardAxes,
    summands: tuple[jax.Array, ...],
    members: jax.Array,
    index: jax.Array,
    inside: jax.Array,
    size: int,
) -> tuple[jax.Array, ...]:
    """For each array of tokens its sums over the members at each token's place, anything outside
    the tables.
    """

    def table(x: jax.Array) -> jax.Array:
        zeros = vary(jnp.zeros(size, jnp.float32), axes.tokens)
        return zeros.at[index].add(jnp.where(members, x, 0), mode="drop")

    tables = axes.psum(tuple(table(x) for x in summands), axes.tokens)
    # positions with gaps may lead out of the tables: what is read there is NaN
    read = jnp.where(inside, index, 0)
    return tuple(x.at[read].get(mode="fill", fill_value=jnp.nan) for x in tables)


def _has_cut_rollout(axes: ShardAxes, rollout_ids: jax.Array) -> jax.Array:
    """Whether any rollout is several samples."""
    rollouts = ById.of(axes, rollout_ids)
    samples = rollouts.sum(rollouts.gather(rollouts.there.astype(jnp.float32)))
    return (samples > 1).any()


def _places(
    place: Place, axes: ShardAxes, batch: RolloutBatch, segments: Segments, mask: jax.Array
) -> jax.Array:
    """The place of each loss token in its sample; 0 where the mask is 0."""
    if place == "loss_token":
        places = scan_rows(axes, batch, jnp.ones_like(mask), mask) - 1
    else:
        positions = batch.positions.astype(jnp.float32)
        first = -segments.max(-positions, mask)
        first = jnp.where(jnp.isfinite(first), first, 0)
        places = positions - segments.spread(first)
    return jnp.where(mask > 0, places, 0).astype(jnp.int32)


def _shared_places(by_id: ById, lengths: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each group: how many places at least two of its samples reach, and where these places
    begin in the table.

    The number is the length of the group's second longest sample, so all are at most half of the
    tokens.
    """
    all_lengths = by_id.gather(lengths)
    longest = by_id.max(all_lengths)
    is_longest = all_lengths == longest[by_id.all]
    second = by_id.max(jnp.where(is_longest, 0, all_lengths))
    two_are_longest = by_id.sum(is_longest.astype(jnp.float32)) > 1
    shared = jnp.where(two_are_longest, longest, second)
    shared = jnp.maximum(shared, 0).astype(jnp.int32)
    starts = jnp.cumsum(shared, dtype=jnp.int32) - shared
    return shared, starts
