"""A batch of packed rollouts: the arrays that every loss and every advantage estimator reads."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from sharding import ParallelMesh, Segments, ShardAxes

_PER_SEGMENT = ("rewards", "sample_ids", "group_ids", "rollout_ids")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RolloutBatch:
    """Rollouts packed into `[R, T]` rows, a pytree; index t of a per-token array speaks of `targets[t]`.

    Positions lie in the physical order of the mesh's context layout; `positions` carries the logical ones. Optional
    arrays are None where a run has none, and then nothing of them exists in the compiled program. Micro-batches carry
    one more leading dimension, `[K, R, T]` and `[K, R, S]`.

    Args:
      tokens: `i32[R, T]`.
      targets: `i32[R, T]`, the token that follows `tokens[t]` in its sequence; anything at a sequence's last position.
      segment_ids: `i32[R, T]`, 0 is padding, 1..S the sequences of that row.
      positions: `i32[R, T]`, the place of `tokens[t]` in its sequence, from 0.
      loss_mask: `f32[R, T]`, 1 where `targets[t]` is a response token to train on.
      sample_ids: `i32[R, S]`, the number of each sequence in the step, -1 where the row has no such segment.
      group_ids: `i32[R, S]`, equal for the samples of one prompt; -1 like sample_ids.
      rollout_ids: `i32[R, S]`, equal for the samples that one rollout was cut into; -1 like sample_ids.
      advantages: `f32[R, T]`.
      old_log_probs: `f32[R, T]`, under the policy at the start of the step.
      ref_log_probs: `f32[R, T]`, under the reference policy.
      rollout_log_probs: `f32[R, T]`, as the sampler reported them.
      values: `f32[R, T]`, the critic's.
      returns: `f32[R, T]`, the critic's targets.
      rewards: `f32[R, S]`, one a sequence.

    Example:
      >>> import jax.numpy as jnp
      >>> ids = jnp.array([[1, 1, 1, 0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, ids * 1.0, *[jnp.array([[0]])] * 3)
      >>> batch.num_segments, batch.advantages is None
      (1, True)
    """

    tokens: Int[Array, "R T"]
    targets: Int[Array, "R T"]
    segment_ids: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    loss_mask: Float[Array, "R T"]
    sample_ids: Int[Array, "R S"]
    group_ids: Int[Array, "R S"]
    rollout_ids: Int[Array, "R S"]
    advantages: Float[Array, "R T"] | None = None
    old_log_probs: Float[Array, "R T"] | None = None
    ref_log_probs: Float[Array, "R T"] | None = None
    rollout_log_probs: Float[Array, "R T"] | None = None
    values: Float[Array, "R T"] | None = None
    returns: Float[Array, "R T"] | None = None
    rewards: Float[Array, "R S"] | None = None

    @property
    def num_segments(self) -> int:
        """S, the most sequences that a row may hold."""
        return self.sample_ids.shape[-1]

    def segments(self, axes: ShardAxes | None = None) -> Segments:
        """The sequences of the rows, for per-shard code."""
        return Segments(self.segment_ids, self.num_segments, ShardAxes() if axes is None else axes)

    def specs(self, parallel: ParallelMesh) -> RolloutBatch:
        """The PartitionSpec of each array, None where the array is None: rows over data, positions over context."""

        def spec(name: str, x: Any) -> P | None:
            leading = (None,) * (x.ndim - 2) if x is not None else ()
            per_segment = name in _PER_SEGMENT
            return None if x is None else P(*leading, *(parallel.rows_spec if per_segment else parallel.tokens_spec))

        names = [f.name for f in dataclasses.fields(self)]
        return RolloutBatch(**{name: spec(name, getattr(self, name)) for name in names})  # type: ignore[arg-type]
