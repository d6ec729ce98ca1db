"""A batch of packed rollouts: the arrays that every loss and every advantage estimator reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Array, Float, Int, Num

from jaxppo.base.arrays import (
    INTEGERS,
    OPTIONAL,
    PER_SEGMENT,
    REQUIRED,
    check,
    check_array,
    check_fits,
    check_flag,
    spec_of,
)
from jaxppo.base.pytree import register
from jaxppo.batch.checks import check_entries
from jaxppo.batch.constructors import Constructors
from jaxppo.batch.extras import At, check_names
from jaxppo.batch.placing import placed
from jaxppo.batch.trees import Paths
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes, check_parallel, in_order, multihost

FLAGS = ("real_last_targets", "weighted_denominators")
_STATIC = ("context_layout", "context_shards", "micro_batches", "mtp_depths", *FLAGS)
# To type checkers, arrays that a batch may lack are there: a function that is given None says which
# one is missing.
_ABSENT: Any = None


class GroupIds(TypedDict):
    """What estimators that compare samples read of a batch, beside rewards: the arguments of
    these names.
    """

    group_ids: Int[Array, "R S"]
    rollout_ids: Int[Array, "R S"] | None


@register(static=_STATIC)
@dataclasses.dataclass(frozen=True)
class RolloutBatch(Constructors):
    """Rollouts packed into `[R, T]` rows, a pytree.

    Index t of a per-token array is about `targets[t]`.

    Positions lie in the physical order of the mesh's context layout; `positions` holds the logical
    ones. Optional arrays may be None, and then the compiled program does nothing for them. Stacked
    micro-batches have one more leading dimension, `[K, R, T]` and `[K, R, S]`. Pass batches to
    jitted functions as arguments: one that a function closes over is a constant, and each batch
    then compiles a program of its own.

    Args:
      tokens: `i32[R, T]`.
      targets: `i32[R, T]`, the token that follows `tokens[t]` in its sequence; anything at a
        sequence's last position.
      segment_ids: `i32[R, T]`, 0 is padding, 1..S the sequences of that row.
      positions: `i32[R, T]`, the place of `tokens[t]` in its sequence, from 0; a branch goes on
        from its prefix.
      loss_mask: `[R, T]`, 0 or 1 in any dtype, 1 where `targets[t]` is a response token to train
        on.
      sample_ids: `i32[R, S]`, the number of each sequence in the step, -1 where the row has no such
        segment.
      group_ids: `i32[R, S]`, equal for the samples of one prompt; -1 where sample_ids is -1.
      rollout_ids: `i32[R, S]`, the trajectory that each sample was cut from; -1 where sample_ids is
        -1. By default each sample is a trajectory of its own.
      advantages: `f32[R, T]`.
      old_log_probs: `f32[R, T]`, under the policy at the start of the step. These log-probs and the
        next are refused in 16 bits.
      ref_log_probs: `f32[R, T]`, under the reference policy.
      rollout_log_probs: `[R, T]`, of any float dtype, as the sampler reported them.
      values: `f32[R, T]`, the critic's.
      returns: `f32[R, T]`, the critic's targets.
      policy_versions: `i32[R, T]`, the version of the policy that drew `targets[t]`; see
        `jaxppo.step.staleness`.
      loss_weights: `f32[R, T]`, at least 0; they multiply a token's whole loss, penalties included.
      rewards: `f32[R, S]`, one for each sequence, NaN for none.
      parents: `i32[R, S]`, the segment that each segment continues, 0 for none; see
        `jaxppo.batch.trees`.
      extras: `[R, T, ...]` by name, arrays of your own, such as a teacher's ids, in any dtype, not
        differentiated; see `jaxppo.batch.extras.Extra`.
      context_layout: the layout of the rows; static, like all fields below.
      context_shards: the number of context shards that the rows were packed for.
      micro_batches: K, if the batch is a step of K micro-batches, or one of them.
      real_last_targets: the last position of a sequence has a real target, as in
        `from_target_aligned`.
      mtp_depths: the number of `mtp_loss` depths that the branches of shared prefixes were packed
        for.
      weighted_denominators: losses are divided by sums of `loss_weights` rather than by counts of
        loss tokens.

    Example:
      >>> import jax.numpy as jnp
      >>> ids = jnp.array([[1, 1, 1, 0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, ids * 1.0, jnp.array([[0]]))
      >>> batch.num_segments, batch.advantages is None
      (1, True)
    """

    tokens: Int[Array, "R T"]
    targets: Int[Array, "R T"]
    segment_ids: Int[Array, "R T"]
    positions: Int[Array, "R T"]
    loss_mask: Float[Array, "R T"]
    sample_ids: Int[Array, "R S"]
    group_ids: Int[Array, "R S"] = _ABSENT
    rollout_ids: Int[Array, "R S"] = _ABSENT
    advantages: Float[Array, "R T"] = _ABSENT
    old_log_probs: Float[Array, "R T"] = _ABSENT
    ref_log_probs: Float[Array, "R T"] = _ABSENT
    rollout_log_probs: Float[Array, "R T"] = _ABSENT
    values: Float[Array, "R T"] = _ABSENT
    returns: Float[Array, "R T"] = _ABSENT
    policy_versions: Int[Array, "R T"] = _ABSENT
    loss_weights: Float[Array, "R T"] = _ABSENT
    rewards: Float[Array, "R S"] = _ABSENT
    parents: Int[Array, "R S"] = _ABSENT
    extras: Mapping[str, Num[Array, "R T ..."]] = dataclasses.field(default_factory=dict)
    context_layout: str = "contiguous"
    context_shards: int = 1
    micro_batches: int | None = None
    real_last_targets: bool = False
    mtp_depths: int = 0
    weighted_denominators: bool = False

    @property
    def num_segments(self) -> int:
        """S, the most sequences that a row may hold."""
        return self.sample_ids.shape[-1]

    @property
    def rollouts(self) -> Int[Array, "R S"]:
        """The rollout of each sequence."""
        if self.rollout_ids is None:
            return self.sample_ids
        return self.rollout_ids

    @property
    def groups(self) -> GroupIds:
        """The `group_ids` and `rollout_ids` that estimators take:
        `advantages.grpo(batch.rewards, **batch.groups)`.

        With both, the parts of a rollout that was cut count once in their group.

        Example:
          >>> cut = [Sample([5, 6, 7], 1, reward=1.0, group_id=0, rollout_id=0) for _ in range(2)]
          >>> other = Sample([5, 6, 8], 1, reward=0.0, group_id=0, rollout_id=1)
          >>> batch = RolloutBatch.from_samples([*cut, other], row_length=9)
          >>> advantages.dr_grpo(batch.rewards, **batch.groups)
          Array([[ 0.5,  0.5, -0.5,  0. ]], dtype=float32)
        """
        return {"group_ids": self.group_ids, "rollout_ids": self.rollout_ids}

    @property
    def paths(self) -> Paths:
        """The tokens that each token attends to; see `jaxppo.batch.trees`."""
        return Paths.of(self.segment_ids, self.positions, self.parents)

    def segments(self, axes: ShardAxes | None = None) -> Segments:
        """The sequences of the rows, for per-shard code.

        Raises:
          ValueError: rows in a context layout other than the mesh's, or no rows.
        """
        if axes is None:
            axes = ShardAxes()
        self.check_layout(axes)
        return Segments(self.segment_ids, self.num_segments, axes)

    def check_layout(self, parallel: ParallelMesh | ShardAxes | None) -> None:
        """Raises ValueError where there are no rows, or their context layout is not the mesh's."""
        for name, expected in (("segment_ids", "[R, T]"), ("sample_ids", "[R, S]")):
            x = getattr(self, name)
            check_array(f"batch.{name}", x)
            check(f"batch.{name}", f"shape {x.shape}", x.ndim > 1, expected)
        shape = self.segment_ids.shape
        count = self.num_segments
        got = f"rows of shape {shape} with {count} segments"
        check("batch", got, 0 not in (*shape, count), "at least one row, position and segment")
        check_parallel(parallel)
        layout = "contiguous"
        shards = 1
        if parallel is not None:
            layout = parallel.context_layout
            shards = parallel.size(parallel.context)
        if self.context_layout == layout and self.context_shards == shards:
            return
        if in_order(self.context_layout, self.context_shards) and in_order(layout, shards):
            return
        advice = "give the batch's constructor and this call the same parallel="
        if shards == 1:
            advice = (
                "this call lacks parallel=, the mesh that the batch was packed for, or a mesh with"
                " its shards"
            )
        got = (
            f"rows packed for context layout {self.context_layout!r} over {self.context_shards}"
            " shards"
        )
        raise ValueError(
            f"batch: got {got}, expected {layout!r} over {shards}, as this call has them; {advice}"
        )

    def put(self, parallel: ParallelMesh) -> RolloutBatch:
        """The batch on the devices of a mesh: rows over data, positions over context.

        Where the mesh, for which the batch was made, spans several processes, each brings the rows
        of its own data shards, as `from_samples` packs them, and all must call this together.

        Returns:
          The same batch, of global `jax.Array`s.

        Raises:
          ValueError: another context layout, rows that the data shards do not divide, sizes that
            differ between processes.

        Example:
          >>> parallel = ParallelMesh(jax.make_mesh((jax.device_count(),), ("dp",)))
          >>> samples = [Sample([5, 6, 7], response_start=1)]
          >>> batch = RolloutBatch.from_samples(samples, row_length=4, parallel=parallel).put(parallel)
          >>> batch.tokens.sharding.mesh == parallel.mesh
          True
        """
        check_parallel(parallel, "ParallelMesh")
        with multihost.together(parallel):
            self.check_layout(parallel)
        if multihost.spans_processes(parallel):
            named = self._named() | {f"extras[{name!r}]": x for name, x in self.extras.items()}
            arrays = {name: np.asarray(x) for name, x in named.items()}
            multihost.check_equal(
                "batch", {name: (x.shape, x.dtype.name) for name, x in arrays.items()}
            )
            multihost.check_equal_rows("batch", arrays, parallel)
        return multihost.to_global(self, self.specs(parallel), parallel)

    def place(
        self, values: Mapping[int, Any], *, at: At = "predicting", fill: float = 0
    ) -> np.ndarray:
        """Arrays of samples that come after packing, such as a teacher's scores, at the places of
        their tokens.

        `dataclasses.replace(batch, ref_log_probs=batch.place(scores))` puts them into the batch,
        and `extras=batch.extras | {"teacher_ids": batch.place(ids, fill=-1)}` among the extras.

        Args:
          values: for each sample of the batch, by its sample id, the array that `Sample.extras`
            would have taken:
            `[m, ...]` for its response tokens, or with at="input" `[n, ...]` for all its tokens. m
            may be less than the response has: then the last m tokens get them.
          at: which position holds the value of a token, see `jaxppo.batch.extras.Extra`.
          fill: what stands where there is no value.

        Returns:
          `[R, T, ...]`, or `[K, R, T, ...]` for stacked micro-batches; i32, f32 or a 16-bit float;
          on the host.

        Raises:
          TypeError, ValueError: a batch under jit; a sample without an array, an array of another
            sample or one that is longer than its sample, uneven shapes.

        Example:
          >>> batch = RolloutBatch.from_samples([Sample([5, 6, 7], response_start=1, sample_id=8)], row_length=4)
          >>> batch.place({8: [0.5, 0.25]}).tolist(), batch.place({8: [1, 2, 3]}, at="input", fill=-1).tolist()
          ([[0.5, 0.25, 0.0, 0.0]], [[1, 2, 3, -1]])
        """
        return placed(self, values, at, fill)

    def validate(self, vocab_size: int | None = None, *, normalizer: Any = None) -> None:
        """Checks values on the host, beside shapes and dtypes. A batch from `from_samples` passes.

        Args:
          vocab_size: V; required, since no array of the batch shows it.
          normalizer: the `Normalizer` that will be used with the batch, to be checked too; None for
            none.

        Raises:
          TypeError: an array of another kind of dtype.
          ValueError: a shape that does not fit; a normalizer of another step; the first entry that
            breaks one of `rules.RULES`, with its row and logical position, or segment.

        Example:
          >>> batch = RolloutBatch.from_samples([Sample([5, 6, 9], response_start=1)], row_length=4)
          >>> batch.validate(vocab_size=9)
          Traceback (most recent call last):
          ...
          ValueError: targets: got 9 at row 0, position 1, expected 0 to 8 where loss_mask is 1
        """
        arrays = check_arrays(self, stacked=True, prefix="")
        counts = None
        if normalizer is not None:
            if not hasattr(normalizer, "check_step"):
                raise TypeError(
                    f"normalizer: got {type(normalizer).__name__}, expected Normalizer or None"
                )
            normalizer.check_step(self)
            counts = normalizer.counts
        check_entries(self, arrays, vocab_size, counts)

    def specs(self, parallel: ParallelMesh) -> RolloutBatch:
        """The PartitionSpec of each array: rows over data, positions over context.

        None where the array is None.
        """
        specs: dict[str, Any] = {}
        for name, x in self._named().items():
            rows = parallel.rows_spec if name in PER_SEGMENT else parallel.tokens_spec
            specs[name] = spec_of(rows, x)
        return dataclasses.replace(
            self, **specs, extras=dict.fromkeys(self.extras, specs["loss_mask"])
        )

    def _named(self) -> dict[str, Array]:
        """The arrays that exist, without the extras."""
        arrays = {name: getattr(self, name) for name in (*REQUIRED, *OPTIONAL)}
        return {name: x for name, x in arrays.items() if x is not None}


def check_arrays(
    batch: RolloutBatch, *, stacked: bool = False, prefix: str = "batch.", reader: str = ""
) -> dict[str, Array]:
    """The arrays of a batch without the extras; raises where it is none, or where a shape or dtype
    is wrong.

    With `stacked`, micro-batches may be stacked, `[K, R, T]`. The prefix stands before the names of
    arrays in errors; the reader is the function that reads the batch.
    """
    if not isinstance(batch, RolloutBatch):
        raise TypeError(f"{prefix.rstrip('.')}: got {type(batch).__name__}, expected RolloutBatch")
    for name in FLAGS:
        check_flag(prefix + name, getattr(batch, name))
    required = {name: getattr(batch, name) for name in REQUIRED}
    optional = {name: getattr(batch, name) for name in OPTIONAL}
    arrays = required | {name: x for name, x in optional.items() if x is not None}
    for name, x in arrays.items():
        check_array(prefix + name, x)
        if name in INTEGERS:
            check_fits(prefix + name, x)
    rows = arrays["loss_mask"].shape
    _check_rows(rows, stacked, prefix.rstrip(".") or "batch", reader)
    segments = (*rows[:-1], *(arrays["sample_ids"].shape[-1:] or ("S",)))
    for name, x in arrays.items():
        shape = rows
        like = "positions of loss_mask"
        if name in PER_SEGMENT:
            shape = segments
            like = "segments of sample_ids"
        check(
            prefix + name, f"shape {x.shape}", x.shape == shape, f"{shape}, as the rows and {like}"
        )
    check_names(batch.extras)
    for name, x in (batch.extras or {}).items():
        what = f"{prefix}extras[{name!r}]"
        check_array(what, x)
        check(
            what,
            f"shape {x.shape}",
            x.shape[: len(rows)] == rows,
            f"{rows} and more, as the positions of loss_mask",
        )
    return arrays


def _check_rows(shape: tuple[int, ...], stacked: bool, what: str, reader: str) -> None:
    """Raises unless this is the shape of a loss mask."""
    if stacked:
        good = len(shape) in (2, 3)
        expected = "[R, T], or [K, R, T]"
    else:
        good = len(shape) == 2
        expected = "[R, T], one micro-batch"
    if len(shape) == 3 and not stacked:
        if reader:
            expected += f" for {reader}"
        expected += ": accumulate_gradients gives a loss one after the other of a stack [K, R, T]"
    check(what, f"a loss mask of shape {shape}", good, expected)
