"""Turns the arrays of training frameworks into the rows of a batch, on the host or under jit.

Each device that shares a row computes the whole row, and then keeps the positions that the context
layout gives it.
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
    REQUIRED,
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

    `from_padded` takes them as `[B, C]`, aligned to tokens, and `[B]`: advantages and loss_weights
    in either shape.
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
    inputs, places = all_arrays(padded, arrays)
    B, C = _shape("completion_ids", inputs["completion_ids"])
    _, P = _shape("prompt_ids", inputs["prompt_ids"])
    shapes: dict[str, tuple[tuple[int, ...], ...]] = dict.fromkeys(inputs, ((B, C),))
    shapes |= {"prompt_ids": ((B, P),), "prompt_mask": ((B, P),), "attention_mask": ((B, P + C),)}
    shapes |= dict.fromkeys(PER_SEGMENT, ((B,),))
    shapes |= dict.fromkeys(("advantages", "loss_weights"), ((B, C), (B,)))
    for what, at, _ in places:
        if at == "input":
            shapes[what] = ((B, P + C),)
    for what, x in inputs.items():
        check_row_array(what, x, shapes[what])
    if pad_id is not None and (
        isinstance(pad_id, bool) or not isinstance(pad_id, (int, np.integer))
    ):
        raise TypeError(f"pad_id: got {pad_id!r}, expected an integer")
    masks = ("completion_mask", "prompt_mask", "attention_mask")
    check_on_host(
        lambda x: _wrong_padded(np, x, pad_id), inputs, ("prompt_ids", "completion_ids", *masks)
    )
    return on_whole_rows(
        "RolloutBatch.from_padded", _padded, P + C, inputs, (pad_id, places), parallel
    )


def _wrong_padded(xp: Any, x: Mapping[str, Any], pad_id: int | None) -> Wrong:
    """What may be wrong with padded arrays; the same on the host and on devices."""
    yield from _misplaced(x, pad_id)
    for name in ("prompt_mask", "attention_mask"):
        if name in x:
            yield from wrong_values(name, x[name])
    trains = _trains(xp, x)
    real = _real_tokens(xp, x)
    first = real & (xp.cumsum(real, axis=1) == 1)
    where = "0 on padding, and at a token with none before it, since nothing predicts that one"
    yield from wrong_masks(
        "completion_mask", trains, real & ~first, where, before=x["prompt_ids"].shape[1]
    )


def _misplaced(x: Mapping[str, Any], pad_id: int | None) -> Wrong:
    """Completions that begin with padding, and prompts whose padding counts as tokens, although
    a token trains.
    """
    if pad_id is None or "attention_mask" in x:
        return
    prompt = x["prompt_ids"]
    completion = x["completion_ids"]
    trains = x["completion_mask"].astype(np.float32) != 0
    any_trains = trains.any(axis=1)
    yield (
        "completion_ids",
        (completion[:, 0] == pad_id) & ~trains[:, 0] & any_trains,
        lambda row: f"{pad_id}, the pad_id, before the tokens of row {row}",
        "completions that are right-padded, or attention_mask= to say where tokens are",
    )
    if "prompt_mask" not in x:
        has_padding = (prompt[:, 0] == pad_id) | (prompt[:, -1] == pad_id)
        yield (
            "prompt_mask",
            has_padding & any_trains,
            lambda row: f"None, and {pad_id}, the pad_id, at an end of the prompt of row {row}",
            "prompt_mask= or attention_mask= to say where tokens are",
        )


def check_on_host(
    wrong: Callable[[dict[str, Any]], Wrong], inputs: Mapping[str, Any], names: Iterable[str]
) -> None:
    """Raises at the first row that is wrong, if these arrays are on the host; under jit the loss
    mask becomes NaN.
    """
    arrays = {name: inputs[name] for name in names if name in inputs}
    for x in arrays.values():
        if isinstance(x, jax.core.Tracer) or not getattr(x, "is_fully_addressable", True):
            return
    on_host = {name: np.asarray(x) for name, x in arrays.items()}
    for name, bad, got, expected in wrong({**inputs, **on_host}):
        if bad.any():
            raise ValueError(f"{name}: got {got(int(np.argmax(bad)))}, expected {expected}")


def wrong_values(name: str, mask: Any) -> Wrong:
    """Rows of a mask with something else than 0 and 1."""
    mask = mask.astype(np.float32)
    bad = (mask != 0) & (mask != 1)
    yield name, bad.any(axis=1), lambda row: f"{mask[row][bad[row]][0]} in row {row}", "0 and 1"


def wrong_masks(name: str, mask: Any, inside: Any, expected: str, before: int = 0) -> Wrong:
    """Rows of a loss mask that has another value than 0 and 1, or a 1 outside of the tokens that
    may train.

    Every constructor asks this of its mask. `before` positions stand before those that the argument
    has.
    """
    yield from wrong_values(name, mask)
    lost = (mask.astype(np.float32) != 0) & ~inside
    yield (
        name,
        lost.any(axis=1),
        lambda row: f"1 at {int(np.argmax(lost[row])) - before} of row {row}",
        expected,
    )


def marked(mask: Array, wrong: Wrong) -> Array:
    """The loss mask, NaN in the rows that are wrong: NaN breaks a rule, whatever reads the mask."""
    broken = jnp.stack([bad for _, bad, *_ in wrong]).any(axis=0)
    return jnp.where(broken[:, None], jnp.nan, mask)


def _wrong_rows(xp: Any, x: Mapping[str, Any]) -> Wrong:
    """What may be wrong with packed rows; the same on the host and on devices."""
    ids = x["segment_ids"]
    yield from wrong_masks(
        "loss_mask", x["loss_mask"], ids > 0, "0 where segment_ids is 0: sequences are 1, 2, ..."
    )
    before = xp.pad(ids[:, :-1], ((0, 0), (1, 0)))
    is_start = (ids > 0) & (ids != before)
    back = is_start & (ids <= _most_so_far(xp, before))
    expected = "each sequence to be contiguous, and those of a row in rising order"
    yield (
        "segment_ids",
        back.any(axis=1),
        lambda row: f"{ids[row][back[row]][0]} again in row {row}",
        expected,
    )


def _most_so_far(xp: Any, x: Any) -> Any:
    if xp is np:
        return np.maximum.accumulate(x, axis=1)
    return lax.cummax(x, axis=1)


def placed_rows(
    rows: Mapping[str, AnyArray],
    arrays: RowArrays,
    num_segments: int | None,
    parallel: ParallelMesh | None,
) -> dict[str, Array]:
    """See `RolloutBatch.from_token_aligned`; if the rows hold targets, see
    `from_target_aligned`.
    """
    name = (
        "RolloutBatch.from_target_aligned"
        if "targets" in rows
        else "RolloutBatch.from_token_aligned"
    )
    inputs, places = all_arrays(rows, arrays)
    R, T = _shape("tokens", inputs["tokens"])
    ids = inputs["segment_ids"]
    if num_segments is None:
        if isinstance(ids, jax.core.Tracer):
            raise ValueError(
                "num_segments: got None under jit, expected S, the most sequences that a row may"
                " hold"
            )
        num_segments = max(1, int(np.max(np.asarray(ids))))
    check_count("num_segments", num_segments, least=1)
    num_segments = int(num_segments)  # i64 of numpy would make sample ids i64 with x64
    if not isinstance(ids, jax.Array):  # losses check the range of ids on devices
        least = ids.min()
        most = int(ids.max())
        check(
            "segment_ids",
            least,
            least >= 0,
            "0 for padding, and 1, 2, ... for the sequences of a row",
        )
        check(
            "num_segments",
            num_segments,
            most <= num_segments,
            f"at least {most}, the largest of segment_ids",
        )
    for what, x in inputs.items():
        columns = num_segments if what in PER_SEGMENT else T
        check_row_array(what, x, ((R, columns),))
    check_on_host(lambda x: _wrong_rows(np, x), inputs, ("segment_ids", "loss_mask"))
    return on_whole_rows(name, _placed, T, inputs, (num_segments, places), parallel)


def _placed(
    axes: ShardAxes, length: int, num_segments: int, places: Places, arrays: dict[str, Array]
) -> dict[str, Array]:
    wrong = _wrong_rows(jnp, arrays)
    rows = aligned_rows(axes, length, num_segments, places, arrays)
    return rows | {"loss_mask": marked(rows["loss_mask"], wrong)}


def all_arrays(own: Mapping[str, Any], arrays: RowArrays) -> tuple[dict[str, Any], Places]:
    """The arrays of a constructor that exist, extras by their long names among them, and where
    the extras stand.
    """
    for name in arrays:
        if name not in RowArrays.__annotations__:
            raise TypeError(
                f"{name}: got an unknown array, expected one of"
                f" {', '.join(RowArrays.__annotations__)}"
            )
    extras = as_extras(arrays.get("extras"))
    inputs = {name: x for name, x in own.items() if x is not None or name not in _MAY_BE_NONE}
    inputs |= {name: x for name, x in arrays.items() if x is not None and name != "extras"}
    inputs |= {PREFIX + name: extra.values for name, extra in extras.items()}
    for name, x in inputs.items():
        _check_dtype(name, x)
    for name, extra in extras.items():
        check_fill(f"{PREFIX}{name}.fill", extra.fill, extra.values.dtype)
    return inputs, tuple((PREFIX + name, extra.at, extra.fill) for name, extra in extras.items())


def _check_dtype(name: str, x: Any) -> None:
    if x is None:
        raise TypeError(f"{name}: got None, expected an array")
    if not hasattr(x, "dtype"):  # to JAX a list is a tree of scalars
        raise TypeError(f"{name}: got {type(x).__name__}, expected an array")
    of_integers = name in INTEGERS or name.endswith("_ids") or name.startswith("cu_seqlens")
    is_integer = jnp.issubdtype(x.dtype, jnp.integer)
    if of_integers and not name.startswith(PREFIX):
        if not is_integer:
            raise TypeError(f"{name}: got {x.dtype}, expected integers")
        if name not in IDS:
            check_fits(name, x)
    elif not (
        is_integer or jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.bool_)
    ):
        raise TypeError(f"{name}: got {x.dtype}, expected numbers")
    # others may hold anything without loss
    if isinstance(x, np.ndarray) and name.startswith((PREFIX, "rewards")):
        as_numbers(name, x)


def layout_of(parallel: ParallelMesh | None) -> tuple[str, int]:
    """The context layout of a batch for this mesh, and the number of its context shards."""
    check_parallel(parallel, "ParallelMesh or None")
    if not parallel:
        return "contiguous", 1
    return parallel.context_layout, parallel.context_size


def _shape(name: str, x: Any) -> tuple[int, int]:
    good = np.ndim(x) == 2 and 0 not in np.shape(x)
    check(name, f"shape {np.shape(x)}", good, "two dimensions, each at least 1")
    return np.shape(x)


def check_row_array(name: str, x: Any, shapes: tuple[tuple[int, ...], ...]) -> None:
    shape = np.shape(x)
    expected = " or ".join(map(str, shapes))
    if name.startswith(PREFIX):
        check(name, f"shape {shape}", shape[:2] in shapes, f"{expected} and more")
    else:
        check(name, f"shape {shape}", shape in shapes, expected)
    if name in IDS:
        check_ids(name, x)
    if name in LOG_PROBS:
        check_array(name, x)


def on_whole_rows(
    name: str,
    fn: Callable[..., dict[str, Array]],
    length: int,
    inputs: dict[str, Array],
    options: tuple[Hashable, ...],
    parallel: ParallelMesh | None,
) -> dict[str, Array]:
    """Runs the per-shard `fn(axes, length, *options, arrays)`, whose results are in the mesh's
    layout, on whole rows.

    `name` is the public function's, for errors, and `options` are static.
    """
    layout, shards = layout_of(parallel)
    check_row_length(length, layout, shards, "row length")
    good = shards == 1 or segment_multiple(layout, shards) == 1 or "cu_seqlens" in inputs
    expected = (
        "another: its rows are packed for it, by RolloutBatch.from_samples or from_cu_seqlens"
    )
    check("parallel", f"context layout {layout!r} in {name}", good, expected)
    outputs = {*REQUIRED, *inputs} - _INPUTS

    def specs(p: ParallelMesh) -> tuple[list[PartitionSpec], dict[str, PartitionSpec]]:
        output_specs = {
            what: p.rows_spec if what in PER_SEGMENT else p.tokens_spec for what in outputs
        }
        return [p.rows_spec] * len(inputs), output_specs

    return shard_call(
        name, _with_names, parallel, inputs, specs, (fn, length, options, tuple(inputs))
    )


def _with_names(axes: ShardAxes, static: tuple[Any, ...], *inputs: Array) -> dict[str, Array]:
    fn, length, options, names = static
    return fn(axes, length, *options, dict(zip(names, inputs, strict=True)))


def as_batch(
    axes: ShardAxes, length: int, num_segments: int, arrays: dict[str, Array]
) -> dict[str, Array]:
    """Numbers the sequences of whole rows in logical order, and keeps this device's positions."""
    segment_ids = arrays["segment_ids"]
    lengths = Segments(segment_ids, num_segments).sum(jnp.ones_like(segment_ids))
    R = lengths.shape[0]
    rows = axes.index(axes.data) * R + jnp.arange(R, dtype=jnp.int32)
    numbers = rows[:, None] * num_segments + jnp.arange(num_segments, dtype=jnp.int32)[None]
    rows_of_batch = {what: in_kind(what, x) for what, x in arrays.items()}
    rows_of_batch["sample_ids"] = jnp.where(lengths > 0, numbers, -1)
    if axes.size(axes.context) == 1:
        return rows_of_batch
    positions = held_positions(axes, length, lengths)
    for what, x in rows_of_batch.items():
        if what not in PER_SEGMENT:
            rows_of_batch[what] = taken(x, positions)
    return rows_of_batch


def taken(x: Array, places: Array, where: Array | None = None, fill: float = 0) -> Array:
    """`[R, n, ...]`, x at these places of each row, or the fill; `where` and `places` are
    `[R, n]`.
    """
    shape = (*places.shape, *(1,) * (x.ndim - 2))
    values = jnp.take_along_axis(x, places.reshape(shape), axis=1)
    if where is None:
        return values
    return jnp.where(where.reshape(shape), values, jnp.full_like(values, fill))


def aligned_rows(
    axes: ShardAxes, length: int, num_segments: int, places: Places, arrays: dict[str, Array]
) -> dict[str, Array]:
    """Per-shard: the batch of whole rows, whose arrays are aligned to tokens unless there are
    targets.
    """
    if "targets" not in arrays:
        segments = arrays["segment_ids"]
        same = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        follows = jnp.pad(same, ((0, 0), (0, 1)))
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), segments.shape)
        after = jnp.roll(positions, -1, axis=1)
        arrays = _at_predictors({**arrays, "targets": arrays["tokens"]}, places, after, follows)
    return as_batch(axes, length, num_segments, arrays)


def _at_predictors(
    arrays: dict[str, Array], places: Places, after: Array, follows: Array
) -> dict[str, Array]:
    """The arrays with each value at the position that predicts its token: `after`, where
    `follows` is True.
    """
    fills = {what: fill for what, _, fill in places}
    stay = {"tokens", "segment_ids", "positions", *PER_SEGMENT, *_at_input(places)}
    moved = dict(arrays)
    for what, x in arrays.items():
        if what not in stay:
            moved[what] = taken(x, after, follows, fills.get(what, 0))
    return moved


def _at_input(places: Places) -> list[str]:
    """The extras that stand where their token is the input."""
    return [what for what, at, _ in places if at == "input"]


def _padded(
    axes: ShardAxes, length: int, pad_id: int | None, places: Places, arrays: dict[str, Array]
) -> dict[str, Array]:
    wrong = [*_wrong_padded(jnp, arrays, pad_id)]
    trains = _trains(jnp, arrays)
    real = _real_tokens(jnp, arrays)
    prompt = arrays["prompt_ids"]
    completion = arrays["completion_ids"]
    P = prompt.shape[1]
    tokens = jnp.concatenate([prompt.astype(jnp.int32), completion.astype(jnp.int32)], axis=1)

    # the next token after each position, `length` where there is none
    positions = jnp.arange(length, dtype=jnp.int32)[None]
    following = lax.cummin(jnp.where(real, positions, length), axis=1, reverse=True)
    following = jnp.pad(following[:, 1:], ((0, 0), (0, 1)), constant_values=length)
    after = jnp.minimum(following, length - 1)
    predicts = real & (following < length)
    rows = {"loss_mask": trains}
    at_input = _at_input(places)
    for what, x in arrays.items():
        if what in PER_SEGMENT:
            rows[what] = x[:, None]
        elif what in at_input:
            rows[what] = x
        elif what not in _INPUTS:
            rows[what] = _behind_prompt(x, P, completion)
    rows = _at_predictors(rows, places, after, predicts & (following >= P))

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


def _behind_prompt(x: Array, prompt_length: int, completion: Array) -> Array:
    """`[B, P + C, ...]`, values of completions, or one for each completion, with 0 at the
    prompt.
    """
    if x.ndim == 1:
        x = jnp.broadcast_to(x[:, None], completion.shape)
    more = ((0, 0),) * (x.ndim - 2)
    return jnp.pad(x, ((0, 0), (prompt_length, 0), *more))


def _trains(xp: Any, x: Mapping[str, Any]) -> Any:
    """f32[B, P + C], the loss mask at tokens."""
    prompt_length = x["prompt_ids"].shape[1]
    return xp.pad(x["completion_mask"].astype(xp.float32), ((0, 0), (prompt_length, 0)))


def _real_tokens(xp: Any, x: Mapping[str, Any]) -> Any:
    """bool[B, P + C], where tokens are."""
    if "attention_mask" in x:
        return x["attention_mask"].astype(xp.float32) > 0
    trains = x["completion_mask"].astype(xp.float32) != 0
    from_the_end = xp.flip(trains, axis=1).astype(xp.int32)
    upto_last = xp.flip(_most_so_far(xp, from_the_end), axis=1) > 0
    prompt_mask = x.get("prompt_mask", xp.ones(x["prompt_ids"].shape))
    in_prompt = prompt_mask.astype(xp.float32) > 0
    return xp.concatenate([in_prompt, upto_last], axis=1)
