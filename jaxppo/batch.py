"""A batch of packed rollouts: the arrays that every loss and every advantage estimator reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo._sharding import Packed, ParallelMesh, Segments, ShardAxes, pack
from jaxppo.validation import validate_batch

_PER_SEGMENT = ("rewards", "sample_ids", "group_ids", "rollout_ids")
_PER_TOKEN = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns")


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt and response, on the host.

    The response is `tokens[response_start:]`; every array of it is in order of its tokens, `[len(tokens) -
    response_start]`, and None where the run has none. Packing moves each value to the position that predicts its token.

    Args:
      tokens: `i32[n]`, the prompt and the response.
      response_start: the first response token, at least 1 since token 0 is predicted by nothing; n for an empty
        response. By default the first token with loss_mask 1.
      loss_mask: `[n]`, 1 for the tokens to train on. By default the whole response; 0 in it for what a tool wrote.
      reward: of the whole response.
      sample_id: its number in the step, by default its place among the samples; give it where several hosts pack.
      group_id: equal for the samples of one prompt, by default sample_id.
      rollout_id: equal for the samples that one rollout was cut into, by default sample_id.
      advantages: `f32[n - response_start]`; likewise the next ones.
      old_log_probs: under the policy at the start of the step.
      ref_log_probs: under the reference policy.
      rollout_log_probs: as the sampler reported them.
      values: the critic's.
      returns: the critic's targets.

    Raises:
      ValueError: neither response_start nor loss_mask, or arrays of another length than the response.

    Example:
      >>> Sample([5, 6, 7, 8], response_start=2, reward=1.0).mask.tolist()
      [0.0, 0.0, 1.0, 1.0]
    """

    tokens: Sequence[int] | Int[np.ndarray, "n"]
    response_start: int | None = None
    loss_mask: Sequence[float] | Float[np.ndarray, "n"] | None = None
    reward: float | None = None
    sample_id: int | None = None
    group_id: int | None = None
    rollout_id: int | None = None
    advantages: Sequence[float] | Float[np.ndarray, "m"] | None = None
    old_log_probs: Sequence[float] | Float[np.ndarray, "m"] | None = None
    ref_log_probs: Sequence[float] | Float[np.ndarray, "m"] | None = None
    rollout_log_probs: Sequence[float] | Float[np.ndarray, "m"] | None = None
    values: Sequence[float] | Float[np.ndarray, "m"] | None = None
    returns: Sequence[float] | Float[np.ndarray, "m"] | None = None

    def __post_init__(self) -> None:
        if np.ndim(self.tokens) != 1:
            raise ValueError(f"tokens: got shape {np.shape(self.tokens)}, expected [n]")
        length = len(self.tokens)
        if self.loss_mask is not None and np.shape(self.loss_mask) != (length,):
            raise ValueError(f"loss_mask: got shape {np.shape(self.loss_mask)}, expected {(length,)} like tokens")
        start = self.response_start
        if start is None:
            if self.loss_mask is None:
                raise ValueError("response_start, loss_mask: got None for both, expected one of them")
            start = int(np.argmax(self.mask > 0)) if self.mask.any() else length
            object.__setattr__(self, "response_start", start)
        if not min(1, length) <= start <= length:
            raise ValueError(f"response_start: got {start}, expected 1 to {length}, the number of tokens")
        if self.mask[:start].any():
            raise ValueError(f"loss_mask: got 1 at token {int(np.argmax(self.mask > 0))}, expected 0 before {start}")
        for name in _PER_TOKEN:
            value = getattr(self, name)
            if value is not None and np.shape(value) != (length - start,):
                raise ValueError(f"{name}: got shape {np.shape(value)}, expected {(length - start,)}, the response's")

    @property
    def mask(self) -> Float[np.ndarray, "n"]:
        """loss_mask of every token."""
        if self.loss_mask is not None:
            return np.asarray(self.loss_mask, np.float32)
        assert self.response_start is not None  # __post_init__ sees to it
        return (np.arange(len(self.tokens)) >= self.response_start).astype(np.float32)


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

    @classmethod
    def from_samples(
        cls, samples: Sequence[Sample], *, row_length: int, parallel: ParallelMesh | None = None, **options: Any
    ) -> RolloutBatch:
        """Samples packed into rows in the mesh's context layout, targets and masks included; numpy arrays.

        Args:
          samples: at least one; optional values are given by all of them or by none.
          row_length: T.
          parallel: the mesh, for its layout and data size.
          **options: of `sharding.pack`: rows, buckets, micro_batches, max_tokens, num_segments, agree. Rows are
            balanced over devices by the tokens that carry loss.

        Returns:
          The batch, `[R, T]`, or `[K, R, T]` with micro_batches or max_tokens.

        Raises:
          ValueError: what `sharding.pack` raises; a value that some samples lack.

        Example:
          >>> batch = RolloutBatch.from_samples([Sample([5, 6, 7], response_start=1, reward=2.0)], row_length=4)
          >>> batch.targets.tolist(), batch.loss_mask.tolist(), batch.rewards.tolist()
          ([[6, 7, 0, 0]], [[1.0, 1.0, 0.0, 0.0]], [[2.0]])
        """
        if not samples:
            raise ValueError("samples: got none, expected at least one")
        loads = [float(sample.mask.sum()) for sample in samples]
        packed = pack([s.tokens for s in samples], row_length=row_length, parallel=parallel, loads=loads, **options)
        ids = [i if sample.sample_id is None else sample.sample_id for i, sample in enumerate(samples)]
        numbers = {
            "sample_ids": ids,
            "group_ids": [i if s.group_id is None else s.group_id for i, s in zip(ids, samples, strict=True)],
            "rollout_ids": [i if s.rollout_id is None else s.rollout_id for i, s in zip(ids, samples, strict=True)],
        }
        rewards = _all_or_none(samples, "reward")
        arrays: dict[str, Any] = {name: _place_response(samples, name, packed) for name in _PER_TOKEN}
        arrays |= {
            "tokens": packed.place([s.tokens for s in samples], 0, np.int32),
            "targets": packed.place([_before(s.tokens) for s in samples], 0, np.int32),
            "segment_ids": packed.segment_ids,
            "positions": packed.positions,
            "loss_mask": packed.place([_before(s.mask) for s in samples], 0, np.float32),
            "rewards": None if rewards is None else packed.place_segments(rewards, 0, np.float32),
        }
        arrays |= {name: packed.place_segments(values, -1, np.int32) for name, values in numbers.items()}
        return cls(**arrays)

    def validate(self, vocab_size: int, parallel: ParallelMesh | None = None) -> None:
        """Checks on the host what shapes do not show; a batch from `from_samples` passes.

        Args:
          vocab_size: V.
          parallel: the mesh, for its context layout.

        Raises:
          ValueError: names the row and the logical position of a token or a trained target outside [0, V), a target
            that is not the next token, a loss mask other than 0 and 1 or on padding, a value that is not finite where
            there is loss, a segment that is not contiguous (or not padded, where the layout needs that), positions that
            do not count from 0; or the row and segment of an id or a reward that is missing.

        Example:
          >>> batch = RolloutBatch.from_samples([Sample([5, 6, 9], response_start=1)], row_length=4)
          >>> batch.validate(vocab_size=9)
          Traceback (most recent call last):
          ...
          ValueError: tokens: got 9 at row 0, position 2, expected 0 to 8
        """
        validate_batch(self, vocab_size, parallel)

    def specs(self, parallel: ParallelMesh) -> RolloutBatch:
        """The PartitionSpec of each array, None where the array is None: rows over data, positions over context."""

        def spec(name: str, x: Any) -> P | None:
            leading = (None,) * (x.ndim - 2) if x is not None else ()
            per_segment = name in _PER_SEGMENT
            return None if x is None else P(*leading, *(parallel.rows_spec if per_segment else parallel.tokens_spec))

        names = [f.name for f in dataclasses.fields(self)]
        return RolloutBatch(**{name: spec(name, getattr(self, name)) for name in names})  # type: ignore[arg-type]


def _before(per_token: Any) -> np.ndarray:
    """Each token's value at the position before it, and 0 at the last one."""
    array = np.asarray(per_token)
    return np.concatenate([array[1:], np.zeros_like(array[:1])])


def _all_or_none(samples: Sequence[Sample], name: str) -> list[Any] | None:
    values = [getattr(sample, name) for sample in samples]
    missing = [i for i, value in enumerate(values) if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        raise ValueError(f"{name}: got None in sample {missing[0]}, expected a value in all samples or in none")
    return values


def _place_response(samples: Sequence[Sample], name: str, packed: Packed) -> Float[np.ndarray, "*K R T"] | None:
    """Values of response tokens at the positions that predict them, 0 elsewhere."""
    responses = _all_or_none(samples, name)
    if responses is None:
        return None
    rows = []
    for sample, response in zip(samples, responses, strict=True):
        row = np.zeros(len(sample.tokens), np.float32)
        row[sample.response_start :] = response
        rows.append(_before(row))
    return packed.place(rows, 0, np.float32)
