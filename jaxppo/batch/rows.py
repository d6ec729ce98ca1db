"""Turns the arrays of training frameworks into the rows of a batch, on the host or under jit.

Each device that shares a row computes the whole row, and then keeps the positions that the context layout gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int, Shaped

from jaxppo.base.arrays import (
    IDS,
    INTEGERS,
    LOG_PROBS,
    PER_SEGMENT,
    AnyArray,
    check_array,
    check_count,
    check_fits,
    check_ids,
)
from jaxppo.batch.extras import PREFIX, Extra, Places, flat, in_kind
from jaxppo.sharding import (
    ParallelMesh,
    Segments,
    ShardAxes,
    check_parallel,
    check_row_length,
    held_positions,
    segment_multiple,
    shard_call,
)

Names = tuple[str, ...]  # the names of a constructor's arrays


class PaddedArrays(TypedDict, total=False):
    """The optional arrays of `RolloutBatch.from_padded`: `[B, C]`, aligned to tokens, or `[B]`."""

    advantages: Float[AnyArray, " B"] | Float[AnyArray, "B C"] | None
    old_log_probs: Float[AnyArray, "B C"] | None
    ref_log_probs: Float[AnyArray, "B C"] | None
    rollout_log_probs: Float[AnyArray, "B C"] | None
    values: Float[AnyArray, "B C"] | None
    returns: Float[AnyArray, "B C"] | None
    policy_versions: Int[AnyArray, "B C"] | None
    loss_weights: Float[AnyArray, "B C"] | Float[AnyArray, " B"] | None
    rewards: Float[AnyArray, " B"] | None
    group_ids: Int[AnyArray, " B"] | None
    extras: Mapping[str, Extra | Shaped[AnyArray, "B C ..."]]


class RowArrays(TypedDict, total=False):
    """The optional arrays of the constructors from rows: `[R, T]` per token, `[R, S]` per sequence."""

    advantages: Float[AnyArray, "R T"] | None
    old_log_probs: Float[AnyArray, "R T"] | None
    ref_log_probs: Float[AnyArray, "R T"] | None
    rollout_log_probs: Float[AnyArray, "R T"] | None
    values: Float[AnyArray, "R T"] | None
    returns: Float[AnyArray, "R T"] | None
    policy_versions: Int[AnyArray, "R T"] | None
    loss_weights: Float[AnyArray, "R T"] | None
    rewards: Float[AnyArray, "R S"] | None
    group_ids: Int[AnyArray, "R S"] | None
    rollout_ids: Int[AnyArray, "R S"] | None
    extras: Mapping[str, Extra | Shaped[AnyArray, "R T ..."]]


# what constructors take beside the arrays of a batch
_MASKS = ("prompt_mask", "attention_mask")  # may be None
_INPUTS = {"prompt_ids", "completion_ids", "completion_mask", *_MASKS, "cu_seqlens", "cu_seqlens_padded"}

Wrong = Iterator[tuple[str, Any, Callable[[int], str], str]]
"""An argument, `bool[R]` where it is wrong, what a wrong row has got, and what is expected."""


def padded_rows(
    padded: Mapping[str, Any], arrays: PaddedArrays, pad_id: int | None, parallel: ParallelMesh | None
) -> dict[str, Array]:
    """See `RolloutBatch.from_padded`."""
    more, places = known(arrays, PaddedArrays)
    given = {name: x for name, x in padded.items() if x is not None or name not in _MASKS} | more
    (B, C), (_, P) = _shape("completion_ids", given["completion_ids"]), _shape("prompt_ids", given["prompt_ids"])
    shapes: dict[str, tuple[tuple[int, ...], ...]] = dict.fromkeys(given, ((B, C),))
    shapes |= {"prompt_ids": ((B, P),), "prompt_mask": ((B, P),), "attention_mask": ((B, P + C),)}
    shapes |= {"advantages": ((B, C), (B,)), "loss_weights": ((B, C), (B,)), "rewards": ((B,),), "group_ids": ((B,),)}
    shapes |= {what: ((B, P + C if at == "input" else C),) for what, at, _ in places}
    for what, x in given.items():
        check_row_array(what, x, shapes[what])
    if pad_id is not None and (isinstance(pad_id, bool) or not isinstance(pad_id, (int, np.integer))):
        raise TypeError(f"pad_id: got {pad_id!r}, expected an integer")
    check_on_host(lambda x: _misplaced(x, pad_id), given, ("prompt_ids", "completion_ids", "completion_mask"))
    return of_whole_rows("RolloutBatch.from_padded", _padded, P + C, given, (pad_id, places), parallel)


def _misplaced(x: Mapping[str, Any], pad_id: int | None) -> Wrong:
    """Completions that begin with padding, and prompts whose padding counts as tokens, although a token trains."""
    if pad_id is None or "attention_mask" in x:
        return
    prompt, completion, trains = x["prompt_ids"], x["completion_ids"], x["completion_mask"] != 0
    yield (
        "completion_ids",
        (completion[:, 0] == pad_id) & ~trains[:, 0] & trains.any(axis=1),
        lambda row: f"{pad_id}, the pad_id, before the tokens of row {row}",
        "completions that are right-padded, or attention_mask= to say where tokens are",
    )
    if "prompt_mask" not in x:
        yield (
            "prompt_mask",
            ((prompt[:, 0] == pad_id) | (prompt[:, -1] == pad_id)) & trains.any(axis=1),
            lambda row: f"None, and {pad_id}, the pad_id, at an end of the prompt of row {row}",
            "prompt_mask= or attention_mask= to say where tokens are",
        )


def check_on_host(wrong: Callable[[dict[str, Any]], Wrong], given: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raises at the first row that is wrong, if these arrays are on the host; under jit the loss mask becomes NaN."""
    read = [given[name] for name in names if name in given]
    if all(not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True) for x in read):
        for name, bad, got, expected in wrong({**given, **{n: np.asarray(given[n]) for n in names if n in given}}):
            if bad.any():
                row = int(np.argmax(bad))
                raise ValueError(f"{name}: got {got(row)}, expected {expected}")


def placed_rows(
    rows: Mapping[str, AnyArray], arrays: RowArrays, num_segments: int | None, parallel: ParallelMesh | None
) -> dict[str, Array]:
    """See `RolloutBatch.from_token_aligned`; if the rows hold targets, see `from_target_aligned`."""
    name = "RolloutBatch.from_target_aligned" if "targets" in rows else "RolloutBatch.from_token_aligned"
    optional, places = known(arrays, RowArrays)
    given: dict[str, Any] = {**rows, **optional}
    (R, T), ids = _shape("tokens", rows["tokens"]), rows["segment_ids"]
    check_row_dtype("segment_ids", ids)
    if num_segments is None:
        if isinstance(ids, jax.core.Tracer):
            raise ValueError("num_segments: got None under jit, expected S, the most sequences that a row may hold")
        num_segments = max(1, int(np.max(np.asarray(ids))))
    check_count("num_segments", num_segments, least=1)
    most = 0 if isinstance(ids, jax.Array) else int(np.max(np.asarray(ids)))  # losses check ids on devices
    if most > num_segments:
        raise ValueError(f"num_segments: got {num_segments}, expected at least {most}, the largest of segment_ids")
    for what, x in given.items():
        check_row_array(what, x, ((R, num_segments if what in PER_SEGMENT else T),))
    return of_whole_rows(name, _aligned, T, given, (num_segments, places), parallel)


def known(arrays: Mapping[str, Any], names: type) -> tuple[dict[str, Any], Places]:
    """The optional arrays that exist, extras by their long names among them, and where the extras stand."""
    for name in arrays:
        if name not in names.__annotations__:
            raise TypeError(f"{name}: got an unknown array, expected one of {', '.join(names.__annotations__)}")
    extras, places = flat(arrays.get("extras"))
    return {name: x for name, x in arrays.items() if x is not None and name != "extras"} | extras, places


def _shape(name: str, x: Any) -> tuple[int, int]:
    check_row_dtype(name, x)
    if np.ndim(x) != 2 or 0 in np.shape(x):
        raise ValueError(f"{name}: got shape {np.shape(x)}, expected two dimensions, each at least 1")
    return np.shape(x)


def check_row_array(name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    check_row_dtype(name, x)
    is_extra = name.startswith(PREFIX)
    if (np.shape(x)[:2] if is_extra else np.shape(x)) not in shapes:
        more = " and more" if is_extra else ""
        raise ValueError(f"{name}: got shape {np.shape(x)}, expected {' or '.join(map(str, shapes))}{more}")
    if name in IDS:
        check_ids(name, x)
    if name in LOG_PROBS:
        check_array(name, x)


def check_row_dtype(name: str, x: Any) -> None:
    if not hasattr(x, "dtype"):  # to JAX a list is a tree of scalars
        raise TypeError(f"{name}: got {'None' if x is None else type(x).__name__}, expected an array")
    integer = jnp.issubdtype(x.dtype, jnp.integer)
    named = name in INTEGERS or name.endswith("_ids") or name.startswith("cu_seqlens")
    if named and not integer and not name.startswith(PREFIX):
        raise TypeError(f"{name}: got {x.dtype}, expected integers")
    if not (integer or x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.floating)):
        raise TypeError(f"{name}: got {x.dtype}, expected numbers")
    if named and name not in IDS and not name.startswith(PREFIX):
        check_fits(name, x)


def of_whole_rows(
    name: str,
    fn: Callable[..., dict[str, Array]],
    length: int,
    given: dict[str, Array],
    option: Hashable,
    parallel: ParallelMesh | None,
) -> dict[str, Array]:
    """Runs fn on the whole rows of each data shard and brings its results into the mesh's layout.

    Args:
      name: the public function's name, for errors.
      fn: a per-shard function, `fn(axes, (length, option, names), *arrays)`.
      length: T.
      given: arrays by name.
      option: the static argument of fn.
      parallel: the mesh.
    """
    check_parallel(parallel, "ParallelMesh or None")
    layout, shards = (parallel.context_layout, parallel.context_size) if parallel else ("contiguous", 1)
    check_row_length(length, layout, shards, "row length")
    if shards > 1 and segment_multiple(layout, shards) > 1 and "cu_seqlens" not in given:
        raise ValueError(
            f"parallel: got context layout {layout!r} in {name}, expected another: its rows are packed for it, by "
            "RolloutBatch.from_samples or from_cu_seqlens"
        )
    made = {"tokens", "targets", "segment_ids", "positions", "loss_mask", "sample_ids", *given} - _INPUTS

    def specs(p: ParallelMesh) -> tuple[list[PartitionSpec], dict[str, PartitionSpec]]:
        of_made = {what: p.rows_spec if what in PER_SEGMENT else p.tokens_spec for what in made}
        return [p.rows_spec] * len(given), of_made

    return shard_call(name, fn, parallel, given, specs, (length, option, tuple(given)))


def as_batch(axes: ShardAxes, length: int, num_segments: int, arrays: dict[str, Array]) -> dict[str, Array]:
    """Numbers the sequences of whole rows in logical order, and keeps this device's positions."""
    lengths = Segments(arrays["segment_ids"], num_segments).sum(jnp.ones_like(arrays["segment_ids"]))
    R = lengths.shape[0]
    rows = axes.index(axes.data) * R + jnp.arange(R, dtype=jnp.int32)
    numbers = rows[:, None] * num_segments + jnp.arange(num_segments, dtype=jnp.int32)[None]
    arrays = arrays | {"sample_ids": jnp.where(lengths > 0, numbers, -1)}
    arrays = {what: in_kind(what, x) for what, x in arrays.items()}
    if axes.size(axes.context) == 1:
        return arrays
    mine = held_positions(axes, length, lengths)
    return {what: x if what in PER_SEGMENT else taken(x, mine) for what, x in arrays.items()}


def taken(x: Array, places: Array, where: Array | None = None, fill: float = 0) -> Array:
    """`[R, n, ...]`, x at these places of each row, or the fill; `where` and `places` are `[R, n]`."""
    wide = (*places.shape, *(1,) * (x.ndim - 2))
    found = jnp.take_along_axis(x, places.reshape(wide), axis=1)
    return found if where is None else jnp.where(where.reshape(wide), found, jnp.full_like(found, fill))


def _aligned(axes: ShardAxes, static: tuple[int, tuple[int, Places], Names], *given: Array) -> dict[str, Array]:
    length, (num_segments, places), names = static
    return aligned_rows(axes, length, num_segments, places, dict(zip(names, given, strict=True)))


def aligned_rows(
    axes: ShardAxes, length: int, num_segments: int, places: Places, arrays: dict[str, Array]
) -> dict[str, Array]:
    """Per-shard: the batch of whole rows, whose arrays are aligned to tokens unless there are targets."""
    if "targets" not in arrays:
        segments = arrays["segment_ids"]
        follows = jnp.pad((segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0), ((0, 0), (0, 1)))
        after = jnp.roll(jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segments.shape), -1, axis=1)
        arrays = _at_predictors({**arrays, "targets": arrays["tokens"]}, places, after, follows)
    return as_batch(axes, length, num_segments, arrays)


def _at_predictors(arrays: dict[str, Array], places: Places, after: Array, follows: Array) -> dict[str, Array]:
    """The arrays with each value at the position that predicts its token: `after`, where `follows` is True."""
    fills = {what: fill for what, _, fill in places}
    stay = {"tokens", "segment_ids", "positions", *PER_SEGMENT, *(what for what, at, _ in places if at == "input")}
    return {w: x if w in stay else taken(x, after, follows, fills.get(w, 0)) for w, x in arrays.items()}


def _padded(axes: ShardAxes, static: tuple[int, tuple[int | None, Places], Names], *given: Array) -> dict[str, Array]:
    length, (pad_id, places), names = static
    arrays = dict(zip(names, given, strict=True))
    misplaced = [bad for _, bad, _, _ in _misplaced(arrays, pad_id)]
    prompt, completion, mask = (arrays.pop(name) for name in ("prompt_ids", "completion_ids", "completion_mask"))
    P, stay = prompt.shape[1], [what for what, at, _ in places if at == "input"]

    def at_completion(x: Array) -> Array:
        x = x if x.ndim > 1 else jnp.broadcast_to(x[:, None], completion.shape)
        return jnp.pad(x, ((0, 0), (P, 0), *((0, 0),) * (x.ndim - 2)))

    trains = at_completion(mask.astype(jnp.float32))
    real = _real_tokens(trains, arrays.pop("prompt_mask", None), arrays.pop("attention_mask", None), P)
    tokens = jnp.concatenate([prompt.astype(jnp.int32), completion.astype(jnp.int32)], axis=1)

    # the next token after each position, `length` where there is none
    following = lax.cummin(jnp.where(real, jnp.arange(length, dtype=jnp.int32)[None], length), axis=1, reverse=True)
    following = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    after, predicts = jnp.minimum(following, length - 1), real & (following < length)
    rows = {
        what: x[:, None] if what in PER_SEGMENT else x if what in stay else at_completion(x)
        for what, x in arrays.items()
    }
    rows = _at_predictors(rows | {"loss_mask": trains}, places, after, predicts & (following >= P))

    first = real & (jnp.cumsum(real, axis=1) == 1)
    wrong = jnp.stack([((trains != 0) & (first | ~real)).any(axis=1), *misplaced]).any(axis=0)[:, None]
    there = real.astype(jnp.int32)
    inside = (lax.cummax(there, axis=1) > 0) & (lax.cummax(there, axis=1, reverse=True) > 0)
    rows |= {
        "tokens": tokens,
        "targets": taken(tokens, after, predicts),
        "segment_ids": inside.astype(jnp.int32),
        "positions": jnp.where(inside, jnp.cumsum(real, axis=1) - 1, 0),
        "loss_mask": jnp.where(wrong & inside, jnp.nan, rows["loss_mask"]),  # NaN is a broken rule
    }
    return as_batch(axes, length, 1, rows)


def _real_tokens(trains: Array, prompt_mask: Array | None, attention_mask: Array | None, prompts: int) -> Array:
    """bool[B, P + C], where tokens are."""
    if attention_mask is not None:
        return attention_mask.astype(jnp.float32) > 0
    upto_last = lax.cummax((trains != 0).astype(jnp.int32), axis=1, reverse=True) > 0
    in_prompt = jnp.ones_like(trains[:, :prompts]) if prompt_mask is None else prompt_mask.astype(jnp.float32)
    return jnp.concatenate([in_prompt > 0, upto_last[:, prompts:]], axis=1)
