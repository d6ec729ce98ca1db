"""Turns the arrays of training frameworks into the rows of a batch, on the host or under jit.

Each device that shares a row computes the whole row, and then keeps the positions that the context layout gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
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
    check,
    check_array,
    check_count,
    check_fits,
    check_ids,
)
from jaxppo.batch.extras import PREFIX, Extra, Places, as_extras, check_fill, in_kind
from jaxppo.batch.host import as_numbers
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


class RowArrays(TypedDict, total=False):
    """The optional arrays of the constructors: `[R, T]` per token, `[R, S]` per sequence.

    `from_padded` takes them as `[B, C]`, aligned to tokens, and `[B]`: advantages and loss_weights in either shape.
    """

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
_MAY_BE_NONE = ("prompt_mask", "attention_mask", "cu_seqlens_padded")
_INPUTS = {"prompt_ids", "completion_ids", "completion_mask", "cu_seqlens", *_MAY_BE_NONE}

# an argument, `bool[R]` where it is wrong, what a wrong row has got, and what is expected
Wrong = Iterable[tuple[str, Any, Callable[[int], str], str]]


def padded_rows(
    padded: Mapping[str, Any], arrays: RowArrays, pad_id: int | None, parallel: ParallelMesh | None
) -> dict[str, Array]:
    """See `RolloutBatch.from_padded`."""
    given, places = all_arrays(padded, arrays)
    (B, C), (_, P) = _shape("completion_ids", given["completion_ids"]), _shape("prompt_ids", given["prompt_ids"])
    shapes: dict[str, tuple[tuple[int, ...], ...]] = dict.fromkeys(given, ((B, C),))
    shapes |= {"prompt_ids": ((B, P),), "prompt_mask": ((B, P),), "attention_mask": ((B, P + C),)}
    shapes |= {"advantages": ((B, C), (B,)), "loss_weights": ((B, C), (B,)), **dict.fromkeys(PER_SEGMENT, ((B,),))}
    shapes |= {what: ((B, P + C if at == "input" else C),) for what, at, _ in places}
    for what, x in given.items():
        check_row_array(what, x, shapes[what])
    if pad_id is not None and (isinstance(pad_id, bool) or not isinstance(pad_id, (int, np.integer))):
        raise TypeError(f"pad_id: got {pad_id!r}, expected an integer")
    masks = ("completion_mask", "prompt_mask", "attention_mask")
    check_on_host(lambda x: _wrong_padded(np, x, pad_id), given, ("prompt_ids", "completion_ids", *masks))
    return of_whole_rows("RolloutBatch.from_padded", _padded, P + C, given, (pad_id, places), parallel)


def _wrong_padded(xp: Any, x: Mapping[str, Any], pad_id: int | None) -> Wrong:
    """What may be wrong with padded arrays; the same on the host and on devices."""
    yield from _misplaced(x, pad_id)
    for name in ("prompt_mask", "attention_mask"):
        if name in x:
            yield from wrong_values(name, x[name])
    trains, real = _trains(xp, x), _real_tokens(xp, x)
    first = real & (xp.cumsum(real, axis=1) == 1)
    where = "0 on padding, and at a token with none before it, since nothing predicts that one"
    yield from wrong_masks("completion_mask", trains, real & ~first, where, before=x["prompt_ids"].shape[1])


def _misplaced(x: Mapping[str, Any], pad_id: int | None) -> Wrong:
    """Completions that begin with padding, and prompts whose padding counts as tokens, although a token trains."""
    if pad_id is None or "attention_mask" in x:
        return
    prompt, completion, trains = x["prompt_ids"], x["completion_ids"], x["completion_mask"].astype(np.float32) != 0
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
    read = {name: given[name] for name in names if name in given}
    if all(not isinstance(x, jax.core.Tracer) and getattr(x, "is_fully_addressable", True) for x in read.values()):
        on_host = {name: np.asarray(x) for name, x in read.items()}
        for name, bad, got, expected in wrong({**given, **on_host}):
            if bad.any():
                raise ValueError(f"{name}: got {got(int(np.argmax(bad)))}, expected {expected}")


def wrong_values(name: str, mask: Any) -> Wrong:
    """Rows of a mask with something else than 0 and 1."""
    mask = mask.astype(np.float32)
    bad = (mask != 0) & (mask != 1)
    yield name, bad.any(axis=1), lambda row: f"{mask[row][bad[row]][0]} in row {row}", "0 and 1"


def wrong_masks(name: str, mask: Any, inside: Any, expected: str, before: int = 0) -> Wrong:
    """Rows of a loss mask that has another value than 0 and 1, or a 1 outside of the tokens that may train.

    Every constructor asks this of its mask. `before` positions stand before those that the argument has.
    """
    yield from wrong_values(name, mask)
    lost = (mask.astype(np.float32) != 0) & ~inside
    yield name, lost.any(axis=1), lambda row: f"1 at {int(np.argmax(lost[row])) - before} of row {row}", expected


def marked(mask: Array, wrong: Wrong) -> Array:
    """The loss mask, NaN in the rows that are wrong: NaN breaks a rule, whatever reads the mask."""
    broken = jnp.stack([bad for _, bad, _, _ in wrong]).any(axis=0)
    return jnp.where(broken[:, None], jnp.nan, mask)


def _wrong_rows(xp: Any, x: Mapping[str, Any]) -> Wrong:
    """What may be wrong with packed rows; the same on the host and on devices."""
    ids = x["segment_ids"]
    yield from wrong_masks("loss_mask", x["loss_mask"], ids > 0, "0 where segment_ids is 0: sequences are 1, 2, ...")
    before = xp.pad(ids[:, :-1], ((0, 0), (1, 0)))
    back = (ids > 0) & (ids != before) & (ids <= _most_so_far(xp, before))
    expected = "each sequence to be contiguous, and those of a row in rising order"
    yield "segment_ids", back.any(axis=1), lambda row: f"{ids[row][back[row]][0]} again in row {row}", expected


def _most_so_far(xp: Any, x: Any) -> Any:
    return np.maximum.accumulate(x, axis=1) if xp is np else lax.cummax(x, axis=1)


def placed_rows(
    rows: Mapping[str, AnyArray], arrays: RowArrays, num_segments: int | None, parallel: ParallelMesh | None
) -> dict[str, Array]:
    """See `RolloutBatch.from_token_aligned`; if the rows hold targets, see `from_target_aligned`."""
    name = "RolloutBatch.from_target_aligned" if "targets" in rows else "RolloutBatch.from_token_aligned"
    given, places = all_arrays(rows, arrays)
    (R, T), ids = _shape("tokens", given["tokens"]), given["segment_ids"]
    if num_segments is None:
        if isinstance(ids, jax.core.Tracer):
            raise ValueError("num_segments: got None under jit, expected S, the most sequences that a row may hold")
        num_segments = max(1, int(np.max(np.asarray(ids))))
    check_count("num_segments", num_segments, least=1)
    on_host = np.zeros(1, int) if isinstance(ids, jax.Array) else ids  # losses check the range of ids on devices
    check("segment_ids", on_host.min(), on_host.min() >= 0, "0 for padding, and 1, 2, ... for the sequences of a row")
    most = int(on_host.max())
    check("num_segments", num_segments, most <= num_segments, f"at least {most}, the largest of segment_ids")
    for what, x in given.items():
        check_row_array(what, x, ((R, num_segments if what in PER_SEGMENT else T),))
    check_on_host(lambda x: _wrong_rows(np, x), given, ("segment_ids", "loss_mask"))
    return of_whole_rows(name, _placed, T, given, (num_segments, places), parallel)


def _placed(
    axes: ShardAxes, length: int, num_segments: int, places: Places, arrays: dict[str, Array]
) -> dict[str, Array]:
    wrong = _wrong_rows(jnp, arrays)
    made = aligned_rows(axes, length, num_segments, places, arrays)
    return made | {"loss_mask": marked(made["loss_mask"], wrong)}


def all_arrays(own: Mapping[str, Any], arrays: RowArrays) -> tuple[dict[str, Any], Places]:
    """The arrays of a constructor that exist, extras by their long names among them, and where the extras stand."""
    for name in arrays:
        if name not in RowArrays.__annotations__:
            raise TypeError(f"{name}: got an unknown array, expected one of {', '.join(RowArrays.__annotations__)}")
    extras = as_extras(arrays.get("extras"))
    given = {name: x for name, x in own.items() if x is not None or name not in _MAY_BE_NONE}
    given |= {name: x for name, x in arrays.items() if x is not None and name != "extras"}
    given |= {PREFIX + name: x.values for name, x in extras.items()}
    for name, x in given.items():
        _check_dtype(name, x)
    for name, x in extras.items():
        check_fill(f"{PREFIX}{name}.fill", x.fill, x.values.dtype)
    return given, tuple((PREFIX + name, x.at, x.fill) for name, x in extras.items())


def _check_dtype(name: str, x: Any) -> None:
    if not hasattr(x, "dtype"):  # to JAX a list is a tree of scalars
        raise TypeError(f"{name}: got {'None' if x is None else type(x).__name__}, expected an array")
    whole = name in INTEGERS or name.endswith("_ids") or name.startswith("cu_seqlens")
    whole = whole and not name.startswith(PREFIX)
    kinds = (jnp.integer,) if whole else (jnp.integer, jnp.floating, jnp.bool_)
    if not any(jnp.issubdtype(x.dtype, kind) for kind in kinds):
        raise TypeError(f"{name}: got {x.dtype}, expected {'integers' if whole else 'numbers'}")
    if whole and name not in IDS:
        check_fits(name, x)
    if isinstance(x, np.ndarray) and name.startswith((PREFIX, "rewards")):  # others may hold anything without loss
        as_numbers(name, x)


def layout_of(parallel: ParallelMesh | None) -> tuple[str, int]:
    """The context layout of a batch for this mesh, and the number of its context shards."""
    check_parallel(parallel, "ParallelMesh or None")
    return (parallel.context_layout, parallel.context_size) if parallel else ("contiguous", 1)


def _shape(name: str, x: Any) -> tuple[int, int]:
    good = np.ndim(x) == 2 and 0 not in np.shape(x)
    check(name, f"shape {np.shape(x)}", good, "two dimensions, each at least 1")
    return np.shape(x)


def check_row_array(name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    is_extra = name.startswith(PREFIX)
    good = (np.shape(x)[:2] if is_extra else np.shape(x)) in shapes
    check(name, f"shape {np.shape(x)}", good, " or ".join(map(str, shapes)) + " and more" * is_extra)
    if name in IDS:
        check_ids(name, x)
    if name in LOG_PROBS:
        check_array(name, x)


def of_whole_rows(
    name: str,
    fn: Callable[..., dict[str, Array]],
    length: int,
    given: dict[str, Array],
    options: tuple[Hashable, ...],
    parallel: ParallelMesh | None,
) -> dict[str, Array]:
    """Runs the per-shard `fn(axes, length, *options, arrays)`, whose results are in the mesh's layout, on whole rows.

    `name` is the public function's, for errors, and `options` are static.
    """
    layout, shards = layout_of(parallel)
    check_row_length(length, layout, shards, "row length")
    good = shards == 1 or segment_multiple(layout, shards) == 1 or "cu_seqlens" in given
    expected = "another: its rows are packed for it, by RolloutBatch.from_samples or from_cu_seqlens"
    check("parallel", f"context layout {layout!r} in {name}", good, expected)
    made = {"tokens", "targets", "segment_ids", "positions", "loss_mask", "sample_ids", *given} - _INPUTS

    def specs(p: ParallelMesh) -> tuple[list[PartitionSpec], dict[str, PartitionSpec]]:
        of_made = {what: p.rows_spec if what in PER_SEGMENT else p.tokens_spec for what in made}
        return [p.rows_spec] * len(given), of_made

    return shard_call(name, _with_names, parallel, given, specs, (fn, length, options, tuple(given)))


def _with_names(axes: ShardAxes, static: tuple[Any, ...], *given: Array) -> dict[str, Array]:
    fn, length, options, names = static
    return fn(axes, length, *options, dict(zip(names, given, strict=True)))


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


def _padded(
    axes: ShardAxes, length: int, pad_id: int | None, places: Places, arrays: dict[str, Array]
) -> dict[str, Array]:
    wrong = [*_wrong_padded(jnp, arrays, pad_id)]
    trains, real = _trains(jnp, arrays), _real_tokens(jnp, arrays)
    prompt, completion = (arrays.pop(name) for name in ("prompt_ids", "completion_ids"))
    arrays = {what: x for what, x in arrays.items() if what not in _INPUTS}
    P, stay = prompt.shape[1], [what for what, at, _ in places if at == "input"]

    def at_completion(x: Array) -> Array:
        x = x if x.ndim > 1 else jnp.broadcast_to(x[:, None], completion.shape)
        return jnp.pad(x, ((0, 0), (P, 0), *((0, 0),) * (x.ndim - 2)))

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

    there = real.astype(jnp.int32)
    inside = (lax.cummax(there, axis=1) > 0) & (lax.cummax(there, axis=1, reverse=True) > 0)
    rows |= {
        "tokens": tokens,
        "targets": taken(tokens, after, predicts),
        "segment_ids": inside.astype(jnp.int32),
        "positions": jnp.where(inside, jnp.cumsum(real, axis=1) - 1, 0),
        "loss_mask": marked(rows["loss_mask"], wrong),
    }
    return as_batch(axes, length, 1, rows)


def _trains(xp: Any, x: Mapping[str, Any]) -> Any:
    """f32[B, P + C], the loss mask at tokens."""
    return xp.pad(x["completion_mask"].astype(xp.float32), ((0, 0), (x["prompt_ids"].shape[1], 0)))


def _real_tokens(xp: Any, x: Mapping[str, Any]) -> Any:
    """bool[B, P + C], where tokens are."""
    if "attention_mask" in x:
        return x["attention_mask"].astype(xp.float32) > 0
    prompt, completion = x["prompt_ids"], x["completion_mask"].astype(xp.float32) != 0
    upto_last = xp.flip(_most_so_far(xp, xp.flip(completion, axis=1).astype(xp.int32)), axis=1) > 0
    in_prompt = x.get("prompt_mask", xp.ones(prompt.shape)).astype(xp.float32) > 0
    return xp.concatenate([in_prompt, upto_last], axis=1)
