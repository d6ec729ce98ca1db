"""The conversion of everything that comes from the host: lists, arrays and numbers.

Nothing is rounded, cut or parsed.

numpy would make 7 of 7.9 where integers are asked for, 3 of 2**40 + 3 in i32, inf of 1e300 in f32,
and 1 of True.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.base.arrays import check, is_number

MAX_ID = 2**31 - 1
LEAST_ID = -(2**31)


def shown(x: object) -> str:
    """What errors show of x."""
    text = " ".join(repr(x).split())
    if len(text) <= 80:
        return text
    return f"{text[:77]}..."


def scalar(x: Any) -> Any:
    """The Python number in an array without dimensions, such as JAX's functions return; x itself
    if it is none.
    """
    dtype = getattr(x, "dtype", None)
    if dtype is None or isinstance(x, jax.core.Tracer) or np.shape(x) != ():
        return x
    for kind, to in ((jnp.bool_, bool), (jnp.integer, int), (jnp.floating, float)):
        if jnp.issubdtype(dtype, kind):
            return to(x)
    return x


def is_whole(x: object) -> TypeGuard[int]:
    """Whether x is an integer that Python or numpy made; True is none."""
    return isinstance(x, (int, np.integer)) and not isinstance(x, bool)


def as_array(what: str, x: Any, expected: str) -> np.ndarray:
    """x as numpy's array; raises where it is traced, or of unequal lengths."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"{what}: got a traced array, expected {expected}, outside of jit")
    try:
        return np.asarray(x)
    except ValueError:  # numpy refuses lists of unequal lengths
        raise ValueError(f"{what}: got {shown(x)}, expected {expected}") from None
    except Exception as error:  # of a class of someone else, whose conversion may raise anything
        raise TypeError(f"{what}: got {type(x).__name__} ({error}), expected {expected}") from None


def as_unmixed(what: str, x: Any, expected: str) -> np.ndarray:
    """`as_array`, which also raises where bools are among other numbers."""
    array = as_array(what, x, expected)
    if array.dtype.kind in "iuf" and _has_bools(x):
        raise TypeError(f"{what}: got a bool among {shown(x)}, expected {expected}")
    return array


def _has_bools(x: Any) -> bool:
    if not isinstance(x, (list, tuple)):
        return False
    types = set(map(type, x))
    if types & {bool, np.bool_}:
        return True
    nested = any(issubclass(cls, (list, tuple)) for cls in types)
    return nested and any(map(_has_bools, x))


def as_integers(
    what: str, x: Any, *, least: int = LEAST_ID, most: int = MAX_ID, rank: int = 1
) -> np.ndarray:
    """Integers of `least` to `most`, as i64; raises for all else. `what` stands in errors."""
    expected = "integers"
    dimensions = f"{rank} dimensions"
    if rank == 1:
        expected = "a list of integers"
        dimensions = "one dimension"
    integers = as_unmixed(what, x, expected)
    if integers.size and integers.dtype.kind not in "iu":
        raise TypeError(f"{what}: got {integers.dtype}, {shown(x)}, expected {expected}")
    check(what, f"shape {integers.shape}", integers.ndim == rank, f"{expected}, {dimensions}")
    check_within(what, integers, least, most)
    return integers.astype(np.int64)


def check_within(what: str, x: np.ndarray, least: int = LEAST_ID, most: int = MAX_ID) -> None:
    """Raises at the first of these integers that is not within the bounds, by default those of
    i32.
    """
    if x.size and not least <= x.min() <= x.max() <= most:
        far = x[(x < least) | (x > most)].reshape(-1)[0]
        raise ValueError(f"{what}: got {far}, expected integers of {least} to {most}")


def from_bytes(what: str, x: str | bytes) -> np.ndarray:
    """The int32 in bytes, or in their base64, as engines send them."""
    try:
        if isinstance(x, str):
            return np.frombuffer(base64.b64decode(x, validate=True), "<i4")
        return np.frombuffer(x, "<i4")
    except ValueError as error:
        raise ValueError(
            f"{what}: got {shown(x)} ({error}), expected base64 of int32, or its bytes"
        ) from None


def as_numbers(what: str, x: Any, expected: str = "numbers") -> np.ndarray:
    """Integers, floats or bools: i32, f32 or a 16-bit float.

    Raises where one of them would become another number.
    """
    numbers = as_unmixed(what, x, expected)
    kind = numbers.dtype.kind
    is_float = kind == "f" or numbers.dtype.name == "bfloat16"
    if numbers.size and not is_float and kind not in "iub":
        raise TypeError(f"{what}: got {not_numbers(numbers)}, {shown(x)}, expected {expected}")
    if kind in "iu":
        check_within(what, numbers)
        return numbers.astype(np.int32)
    if is_float and numbers.dtype.itemsize == 2:
        return numbers
    return in_f32(what, numbers)


def not_numbers(x: np.ndarray) -> str:
    """What errors call an array that does not hold numbers alone."""
    if None in list(np.ravel(x)):
        return "None among them"
    return str(x.dtype)


def in_f32(what: str, x: np.ndarray) -> np.ndarray:
    """x in f32; raises at a finite number that would be infinite there."""
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float32)
    if x.dtype.kind == "f":
        far = np.isinf(rounded) & np.isfinite(x)
        if far.any():
            raise ValueError(
                f"{what}: got {x[far].reshape(-1)[0]}, expected numbers that f32 holds"
            )
    return rounded


def holds(dtype: Any, number: float) -> bool:
    """Whether an array of this dtype can hold the number: as it is, or rounded if the dtype is a
    float's.
    """
    if jnp.issubdtype(dtype, jnp.floating):
        return bool(abs(number) <= float(jnp.finfo(dtype).max))
    if jnp.issubdtype(dtype, jnp.bool_):
        return number in (0, 1)
    return float(number).is_integer() and LEAST_ID <= number <= MAX_ID


def finite_number(what: str, x: Any, expected: str) -> float:
    """A finite number, from an array without dimensions too."""
    number = scalar(x)
    check(what, shown(x), is_number(number), expected)
    check(what, number, holds(jnp.float32, number), f"{expected} that f32 holds")
    return number


def as_list(what: str, x: Any, expected: str = "a list with one entry a sample") -> list[Any]:
    """The entries of a list, tuple or array; a text, or something that has none, is refused."""
    is_text = isinstance(x, (str, bytes))
    is_listed = isinstance(x, Sequence) or np.ndim(as_array(what, x, expected)) > 0
    if is_text or not is_listed:
        raise TypeError(f"{what}: got {type(x).__name__}, expected {expected}")
    return list(x)
