"""Helpers for all per-token code: the names of a batch's arrays, masked values, and checks of
arguments.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeGuard, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

REQUIRED = ("tokens", "targets", "segment_ids", "positions", "loss_mask", "sample_ids")
IDS = ("sample_ids", "group_ids", "rollout_ids")
PER_SEGMENT = ("rewards", *IDS, "parents")
LOG_PROBS = ("old_log_probs", "ref_log_probs", "rollout_log_probs")
PER_TOKEN_VALUES = (
    "advantages",
    *LOG_PROBS,
    "values",
    "returns",
    "policy_versions",
    "loss_weights",
)
OPTIONAL = ("group_ids", "rollout_ids", *PER_TOKEN_VALUES, "rewards", "parents")

Coefficient = float | Float[Array, ""]
Something = TypeVar("Something")
Arrays = TypeVar("Arrays", np.ndarray, jax.Array)  # on the host, or on a device
AnyArray = jax.Array | np.ndarray
MAX_F32 = float(np.finfo(np.float32).max)


def masked(x: Float[Array, "R T ..."], mask: Float[Array, "R T"]) -> Float[Array, "R T ..."]:
    """x in f32 where the mask is above 0, and 0 elsewhere, whatever x holds there."""
    further = (1,) * (x.ndim - mask.ndim)
    return jnp.where(mask.reshape(*mask.shape, *further) > 0, x.astype(jnp.float32), 0)


def as_token_ids(ids: Int[Array, "..."]) -> Int[Array, "..."]:
    """The ids as i32. Those that do not fit become negative, which is invalid."""
    if ids.dtype.itemsize > 4:
        fits = (ids >= -1) & (ids < 2**31)
        if isinstance(ids, np.ndarray):  # jnp.where would cut an i64 of numpy to i32 first
            ids = np.where(fits, ids, -2)
        else:
            ids = jnp.where(fits, ids, -2)
    return jnp.asarray(ids).astype(jnp.int32)


def spec_of(spec: P, x: Array) -> P:
    """The PartitionSpec of an array whose last two dimensions lie as `spec`; leading
    micro-batches are not sharded.
    """
    return P(*(None,) * (x.ndim - 2), *spec)


def is_number(x: object) -> TypeGuard[float]:
    """Whether x is a Python or numpy number that f32 can hold, and therefore known at trace
    time.
    """
    if isinstance(x, bool) or not isinstance(x, (int, float, np.integer, np.floating)):
        return False
    if isinstance(x, (int, np.integer)):
        return -MAX_F32 <= int(x) <= MAX_F32
    return -MAX_F32 <= float(x) <= MAX_F32  # an f16 would be compared in f16


def is_nan(x: object) -> bool:
    """Whether x is a Python or numpy NaN."""
    return isinstance(x, (float, np.floating)) and math.isnan(x)


def is_zero(coefficient: Any) -> bool:
    """Whether the coefficient is known to be 0 at trace time; a traced schedule and numbers of
    tokens are not.
    """
    if isinstance(coefficient, jax.core.Tracer) or np.ndim(coefficient) > 0:
        return False
    return isinstance(coefficient, (int, float, np.generic, AnyArray)) and float(coefficient) == 0


def check(what: str, got: object, good: bool, expected: str) -> None:
    if not good:
        raise ValueError(f"{what}: got {got}, expected {expected}")


def check_type(what: str, got: object, good: bool, expected: str) -> None:
    """`check` of the class of `got`, with a TypeError."""
    if not good:
        raise TypeError(f"{what}: got {type(got).__name__}, expected {expected}")


def needed(what: str, x: Something | None, expected: str = "f32[R, T]") -> Something:
    """x itself, such as an optional array of a batch that this call reads.

    Raises where it is None.
    """
    if x is None:
        raise ValueError(f"{what}: got None, expected {expected}")
    return x


def check_choice(what: str, value: object, choices: Any) -> None:
    """Raises unless the value is one of the values of a `Literal`."""
    names = get_args(choices)
    check(
        what,
        repr(value),
        isinstance(value, str) and value in names,
        f"one of {', '.join(map(repr, names))}",
    )


def check_choices(config: Any, **choices: Any) -> None:
    """`check_choice` for fields of a dataclass."""
    for name, values in choices.items():
        check_choice(name, getattr(config, name), values)


def dtype_name(x: Any) -> Any:
    """The name of a dtype in any form that jnp takes; x itself if it is no dtype, and
    `check_choice` refuses it.
    """
    # numpy takes an array for its dtype, and warns
    if x is None or isinstance(x, np.ndarray | jax.Array):
        return x
    try:
        return jnp.dtype(x).name
    except (TypeError, ValueError):
        return x


class _Bound(NamedTuple):
    words: str
    holds: Callable[[Any, Any], Any]  # of the number and the bound


_BOUNDS = {  # of a number; None is no bound
    "least": _Bound("of at least", operator.ge),
    "above": _Bound("above", operator.gt),
    "most": _Bound("of at most", operator.le),
    "below": _Bound("below", operator.lt),
}


def _is_numeric(x: AnyArray) -> bool:
    """Whether an array holds floats or integers."""
    return jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(x.dtype, jnp.integer)


def check_number(what: str, value: Any, **bounds: float | None) -> Any:
    """The number; raises unless it is finite and in its range.

    An array, traced or not, is NaN out of it, in f32.
    """
    limits = [(_BOUNDS[name], limit) for name, limit in bounds.items() if limit is not None]
    expected = "a finite number"
    if limits:
        expected += " " + " and ".join(f"{bound.words} {limit}" for bound, limit in limits)
    if not isinstance(value, jax.Array):
        inside = is_number(value) and all(bound.holds(value, limit) for bound, limit in limits)
        check(what, repr(value), inside, expected)
        return value
    x = check_scalar(what, value, expected)
    for bound, limit in limits:
        # breaks the rule of the loss that reads it
        x = jnp.where(bound.holds(x, limit), x, jnp.nan)
    return x


def check_scalar(what: str, value: Array, expected: str = "a number") -> Float[Array, ""]:
    """The number that an array is, in f32; raises unless it is one."""
    check(what, f"shape {value.shape}", value.ndim == 0, f"{expected}, or a scalar array")
    check(what, f"dtype {value.dtype}", _is_numeric(value), f"{expected}, or a scalar array")
    return value.astype(jnp.float32)


def plain_number(what: str, value: Any, **bounds: float | None) -> float:
    """The checked number as one of Python's; a traced one is refused, since the program of a
    call depends on it.
    """
    check(
        what,
        "a traced number",
        not isinstance(value, jax.core.Tracer),
        "a number that is known at trace time",
    )
    if isinstance(value, AnyArray) and value.ndim == 0 and _is_numeric(value):
        value = np.asarray(value).item()
    return check_number(what, value, **bounds)


def check_field(config: Any, name: str, **bounds: float | None) -> None:
    """Checks a number of a frozen dataclass, in its constructor.

    An array out of its range becomes NaN.
    """
    number = check_number(name, getattr(config, name), **bounds)
    object.__setattr__(config, name, number)


def as_number(what: str, value: Any, **bounds: float | None) -> Float[Array, ""]:
    """The checked number as an f32 array, NaN out of its range."""
    return jnp.asarray(check_number(what, value, **bounds), jnp.float32)


def check_count(what: str, value: Any, *, least: int = 0) -> None:
    """Raises unless the value is a whole number of at least `least`, known at trace time."""
    good = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    check(what, repr(value), good and value >= least, f"a whole number of at least {least}")


def check_flag(what: str, value: object) -> None:
    """Raises unless the value is True or False: any text, "no" included, would count as True."""
    check(what, repr(value), isinstance(value, (bool, np.bool_)), "True or False")


class ArrayKind(NamedTuple):
    """What an array may be."""

    dtypes: tuple[Any, ...]
    expected: str  # the dtypes in words
    narrowest: int = 1  # the fewest bytes of an entry
    most: float | None = None  # the largest value that has a meaning

    @property
    def in_short(self) -> str:
        return f"an array of {self.expected.partition(':')[0]}"

    def allows(self, dtype: Any) -> bool:
        # keys of jax.random are extended
        if dtype == np.dtype(object) or jnp.issubdtype(dtype, jax.dtypes.extended):
            return False
        wide_enough = jnp.dtype(dtype).itemsize >= self.narrowest
        return wide_enough and any(jnp.issubdtype(dtype, allowed) for allowed in self.dtypes)


MAX_LOG_PROB = 1e-3  # rounding may bring a log-prob of the trainer up to this
# and that of a sampler or a teacher, since bf16 logits and their log-sum-exp are rounded apart
MAX_SAMPLED = 0.125
_COMPUTED = ArrayKind(
    (jnp.floating,),
    "float32: ratios of rounded log-probs are wrong",
    narrowest=4,
    most=MAX_LOG_PROB,
)
_SAMPLED = ArrayKind((jnp.floating,), "floats", narrowest=2, most=MAX_SAMPLED)
_OF_MODELS = ArrayKind((jnp.floating,), "float32, bfloat16 or float16", narrowest=2)
_STATISTIC = ArrayKind((jnp.floating,), "float32, as a head computes it", narrowest=4)
_FLOATS = ArrayKind((jnp.floating,), "floats")
_NUMBERS = ArrayKind((jnp.floating, jnp.integer, jnp.bool_), "numbers")
_BOOLS = ArrayKind((jnp.bool_,), "bool")
_INTEGERS = ArrayKind((jnp.integer,), "integers")
# By the name of an argument or a field, which has one meaning everywhere: what it may be. Every
# check of an array reads this table, so that a function cannot take what another one refuses.
_NAMES = {
    _COMPUTED: "log_probs old_log_probs ref_log_probs trainer_log_probs id_log_probs top_log_probs",
    _SAMPLED: "rollout_log_probs teacher_log_probs",
    _STATISTIC: "entropy log_z mean_logit accuracy sum_p2",
    _FLOATS: """
        advantages values last_values returns rewards baselines scores loss_weights kl importance_ratio x weights
        temperature reverse_kl total_variation same_top rounding params loss_fn
    """,
    _NUMBERS: "loss_mask mask masks where selected lengths micro_batches extras",
    _INTEGERS: """
        tokens targets segment_ids positions policy_versions sample_ids group_ids rollout_ids parents ids top_ids
        nucleus_ids adapter_ids state_ids draft_ids d2t counts
    """,
    _BOOLS: "among truncated",
}
KINDS: Mapping[str, ArrayKind] = {
    name: kind for kind, names in _NAMES.items() for name in names.split()
}
INTEGERS = tuple(name for name in (*REQUIRED, *OPTIONAL) if KINDS[name] is _INTEGERS)


def kind_of(what: str) -> ArrayKind:
    """The kind of an argument such as "group_ids", "batch.loss_mask", "stats.log_probs" or
    "rewards[0]".
    """
    return KINDS[what.partition("[")[0].rpartition(".")[2]]


def check_array(
    what: str,
    x: Any,
    shape: tuple[int, ...] | None = None,
    whose: str = "",
    kind: ArrayKind | None = None,
) -> None:
    """Raises unless x is an array (a list is a tree of scalars) of its kind, and of this shape,
    `whose` it is.
    """
    if kind is None:
        kind = kind_of(what)
    if x is None:
        raise TypeError(f"{what}: got None, expected {kind.in_short}")
    check_type(what, x, is_array(x), kind.in_short)
    if not kind.allows(x.dtype):
        raise TypeError(f"{what}: got dtype {x.dtype}, expected {kind.expected}")
    if shape is not None and x.shape != shape:
        expected = f"{shape}"
        if whose:
            expected = f"{whose}, {shape}"
        raise ValueError(f"{what}: got shape {x.shape}, expected {expected}")


def is_array(x: Any) -> bool:
    """Whether x is an array, or as `jax.ShapeDtypeStruct` says of which shape and dtype one will
    be.
    """
    return hasattr(x, "dtype") and hasattr(x, "shape")


def check_floating(what: str, x: Any, rank: int, expected: str) -> None:
    """Raises unless x is an array of a model's dtype, of that rank, without a dimension of 0."""
    check_array(what, x, kind=_OF_MODELS)
    if x.ndim != rank or 0 in x.shape:
        raise ValueError(f"{what}: got shape {x.shape}, expected {expected}, each at least 1")


def check_alike(arrays: Mapping[str, Any]) -> None:
    """Raises unless all arrays are of their kinds and have the first one's shape."""
    first = next(iter(arrays))
    for what, x in arrays.items():
        check_array(what, x, getattr(arrays[first], "shape", None), f"that of {first}")


def sound(what: str, x: Array) -> Array:
    """x, NaN where it is above the most of its kind: a probability, which is no log-prob, gives
    no plausible number.
    """
    most = kind_of(what).most
    if most is None:
        return x
    return jnp.where(x <= most, x, jnp.nan)


def unless_mask(x: Any) -> Float[Array, "..."]:
    """0 where an entry of a mask is 0 or 1, and NaN elsewhere, to be added to what the mask
    selects.
    """
    x = jnp.asarray(x).astype(jnp.float32)
    return jnp.where((x == 0) | (x == 1), jnp.float32(0), jnp.nan)


def check_ids(what: str, x: Any) -> None:
    """Raises unless ids are integers, and on the host ones that fit i32: cut to i32, two ids
    could become equal.
    """
    check_array(what, x)
    check_fits(what, x, f"-1 to {2**31 - 1}; number the ids of a step")


def check_fits(what: str, x: Any, expected: str = f"integers of at most {2**31 - 1}") -> None:
    """Raises where an integer on the host does not fit i32: cut to i32, it would be another one."""
    if not isinstance(x, np.ndarray) or not x.size:
        return
    check(what, x.max(), x.max() < 2**31, expected)
    check(what, x.min(), x.min() >= -(2**31), expected)


Aggregation = Literal[
    "token_mean",
    "token_sum",
    "sequence_mean_token_sum",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum_norm",
    "rollout_mean",
]
MetricAggregation = Literal["token_mean", "loss"]
RatioTo = Literal["old", "rollout", "current"]
# two policies, written as their ratio
Compared = Literal["old/rollout", "current/rollout", "current/old"]


def check_aggregation(config: Any) -> None:
    """Raises where `aggregation` is unknown, lacks its `aggregation_norm`, or has one that it
    does not need.
    """
    check_choice("aggregation", config.aggregation, Aggregation)
    if config.aggregation == "sequence_mean_token_sum_norm":
        check_field(config, "aggregation_norm", above=0)
    else:
        got = f"{config.aggregation_norm} with aggregation={config.aggregation!r}"
        expected = "None, or aggregation='sequence_mean_token_sum_norm'"
        check("aggregation_norm", got, config.aggregation_norm is None, expected)
