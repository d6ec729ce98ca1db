"""Per-token arrays of a batch beside the ones that it names: what a teacher, a sampler or a mask
of your own says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxppo.base.arrays import INTEGERS, as_token_ids, check, check_choice, check_type
from jaxppo.batch.host import as_numbers, finite_number, holds

At = Literal["predicting", "input"]
# the name, place and fill of each extra among a constructor's arrays
Places = tuple[tuple[str, "At", float], ...]
PREFIX = "extras."  # stands before an extra's name among the arrays of a constructor


@dataclasses.dataclass(frozen=True)
class Extra:
    """A per-token array, as a `Sample` or a constructor of `RolloutBatch` takes it for `extras`.

    The array itself may be given in place of `Extra(array)`.

    Args:
      values: one value, or an array of one shape, for each token: integers, floats or bools. In a
        sample, `[m, ...]` for its response tokens, or with at="input" `[n, ...]` for all its
        tokens. In a constructor, shaped as its other per-token arrays and more dimensions; with
        at="input" in `from_padded`, `[B, P + C, ...]`.
      at: which position of the batch holds the value of a token: the one that is "predicting" it,
        as for log-probs and advantages, or the one where it is the "input", as for the experts that
        a sampler's router chose.
      fill: what stands where there is no value, such as -1 for ids. With integers and a fill below
        0, a value that is all fill says that nothing is known of its token: a prefix that samples
        share takes what another one says.

    Raises:
      ValueError: an unknown place, a fill that is not a finite number. What takes the extra raises
        where its values or its fill would become other numbers in i32 or f32.

    Example:
      >>> from jaxppo.batch.extras import Extra
      >>> teacher_ids = Extra([[3, 4], [5, 6]], fill=-1)
      >>> batch = RolloutBatch.from_samples([Sample([1, 3, 5], 1, extras={"teacher_ids": teacher_ids})], row_length=4)
      >>> batch.extras["teacher_ids"].tolist()
      [[[3, 4], [5, 6], [-1, -1], [-1, -1]]]
    """

    values: Any
    at: At = "predicting"
    fill: float = 0

    def __post_init__(self) -> None:
        check_choice("at", self.at, At)
        object.__setattr__(self, "fill", finite_number("fill", self.fill, "a finite number"))


def as_extras(extras: Any) -> dict[str, Extra]:
    """Extras by name; a bare array becomes an `Extra`."""
    check_names(extras)
    return {name: x if isinstance(x, Extra) else Extra(x) for name, x in (extras or {}).items()}


def check_names(extras: Any) -> None:
    """Raises unless these are arrays by name, or None."""
    check_type("extras", extras, extras is None or isinstance(extras, Mapping), "arrays by name")
    for name in extras or {}:
        if not isinstance(name, str):
            raise TypeError(f"extras: got the name {name!r}, expected a string")


def in_kind(name: str, x: Any) -> Any:
    """An array of a batch in i32 or f32, by its name; an extra that holds no integers stays as
    it is.
    """
    is_extra = name.startswith(PREFIX)
    if name in INTEGERS or (is_extra and jnp.issubdtype(x.dtype, jnp.integer)):
        if x.dtype == jnp.int32:
            return x
        return as_token_ids(x)
    if is_extra or x.dtype == jnp.float32:
        return x
    return x.astype(jnp.float32)


def as_values(what: str, values: Any, length: int) -> np.ndarray:
    """The values of a sample's extra as an array: i32, f32, or a 16-bit float; none of them
    becomes another number.
    """
    array = as_numbers(what, values, "numbers, of one shape for each token")
    check(
        what,
        f"shape {array.shape}",
        array.shape[:1] == (length,),
        f"{length} and more, one for each token",
    )
    return array


def common_dtype(what: str, arrays: Sequence[np.ndarray]) -> np.dtype:
    """The dtype that holds the values of all samples; raises where f32 would round integers
    among floats.
    """
    dtypes = {x.dtype for x in arrays}
    if len(dtypes) == 1:
        return dtypes.pop()
    for x in arrays:
        if x.dtype.kind != "i":
            continue
        rounded = x != x.astype(np.float32)
        if rounded.any():
            far = x[rounded].reshape(-1)[0]
            raise ValueError(
                f"{what}: got {far} beside floats of another sample, expected integers in all"
                " samples"
            )
    return np.dtype(np.float32)


def without_value(values: np.ndarray, fill: float) -> np.ndarray:
    """bool[n], the tokens of which nothing is known: all that stands there is a fill below 0, of
    integers.
    """
    if fill >= 0 or values.dtype.kind != "i":
        return np.zeros(len(values), bool)
    return (values == fill).reshape(len(values), -1).all(axis=1)


def check_fill(what: str, fill: float, dtype: Any) -> None:
    """Raises where an array of this dtype would hold another number than the fill."""
    check(
        what,
        fill,
        holds(dtype, fill),
        f"a number that {np.dtype(dtype).name} holds, the dtype of the values",
    )


def check_name(what: str, name: Any) -> None:
    """Raises unless this may be the name of an extra."""
    check_type(what, name, isinstance(name, str), "the name of one of batch.extras")


def extra_of(batch: Any, name: str, expected: str) -> Any:
    """An extra of the batch by name; raises where it has none."""
    check(
        "batch.extras",
        sorted(batch.extras),
        name in batch.extras,
        f"{name!r} among them, {expected}",
    )
    return batch.extras[name]
