"""Checks of the arguments that hold something for each token, and of statistics that a caller
gives back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import (
    as_token_ids,
    check,
    check_array,
    check_choice,
    check_count,
    check_number,
    check_type,
    needed,
)
from jaxppo.head.call import Asked, Tokens
from jaxppo.head.head import Entropy, LogitStat, TokenStats

# the statistics that have a dimension K
_OF_IDS = ("ids", "id_log_probs", "top_ids", "top_log_probs")


def as_token_arrays(
    source: str,
    shape: tuple[int, ...],
    targets: Any,
    nucleus_ids: Any,
    ids: Any,
    where: Any,
    temperature: Any,
) -> tuple[Tokens, Any]:
    """The last five arguments, checked against the [R, T] of `source`: ids in i32, the
    temperature in f32.
    """
    if targets is not None:
        check_array("targets", targets)
        check(
            "targets",
            f"shape {targets.shape}",
            targets.shape == shape,
            f"{shape}, the [R, T] of {source}",
        )
        targets = as_token_ids(targets)
    temperature = as_temperature(temperature, shape)
    if where is not None:
        check_array("where", where)
        check(
            "where",
            f"shape {where.shape}",
            where.shape == shape,
            f"{shape}, the [R, T] of {source}",
        )
        if where.dtype != bool:
            temperature = _nan_where_no_mask(temperature, where)
        where = where.astype(bool)
    nucleus_ids = as_id_sets("nucleus_ids", nucleus_ids, shape)
    ids = as_id_sets("ids", ids, shape)
    return Tokens(targets, nucleus_ids, ids, temperature), where


def _nan_where_no_mask(temperature: Any, where: Any) -> Any:
    """The temperature, NaN where a mask of numbers is neither 0 nor 1: the results there are
    then NaN.
    """
    if temperature is None:
        temperature = jnp.float32(1)
    is_no_mask = (where != 0) & (where != 1)
    return jnp.where(is_no_mask, jnp.nan, jnp.broadcast_to(temperature, where.shape))


def as_asked(entropy: Any, logit_stats: Any, top_k: Any) -> Asked:
    check_choice("entropy", entropy, Entropy)
    check_count("top_k", top_k)
    return Asked(entropy, as_logit_stats(logit_stats), top_k)


def as_adapter_ids(what: str, lora: Any, adapter_ids: Any, rows: int) -> Int[Array, " R"] | None:
    """The adapter of each row, as i32; None if all rows share one adapter, or there is none."""
    if lora is None or lora.a.ndim == 2:
        check(
            "adapter_ids",
            "an array",
            adapter_ids is None,
            f"None without several adapters in {what}, [A, H, r]",
        )
        return None
    check(
        "adapter_ids",
        None,
        adapter_ids is not None,
        f"i32[R] for the {lora.a.shape[0]} adapters of {what}",
    )
    check_array("adapter_ids", adapter_ids)
    check(
        "adapter_ids",
        f"shape {adapter_ids.shape}",
        adapter_ids.shape == (rows,),
        f"{(rows,)}, one per row",
    )
    return as_token_ids(adapter_ids)


def as_temperature(
    temperature: Any, shape: tuple[int, ...]
) -> Float[Array, ""] | Float[Array, "R T"] | None:
    """The temperature in f32, without a gradient; NaN where it is not a finite number above 0.

    None stands for 1.
    """
    if not isinstance(temperature, (np.ndarray, jax.Array)):
        check_number("temperature", temperature, above=0)
    else:
        check_array("temperature", temperature)
    if isinstance(temperature, (int, float, np.number)) and temperature == 1:
        return None
    temperature = jnp.asarray(temperature, jnp.float32)
    good = temperature.shape in ((), shape)
    check("temperature", f"shape {temperature.shape}", good, f"a scalar or {shape}, one per token")
    sound = (temperature > 0) & jnp.isfinite(temperature)
    return jax.lax.stop_gradient(jnp.where(sound, temperature, jnp.nan))


def as_id_sets(what: str, ids: Any, shape: tuple[int, ...]) -> Any:
    """Sets of ids, K at each position, as `i32[R, T, K]`; None stays None."""
    if ids is None:
        return None
    check_array(what, ids)
    good = ids.ndim == 3 and ids.shape[:2] == shape and ids.shape[2] > 0
    check(what, f"shape {ids.shape}", good, f"[R, T, K] with [R, T] = {shape}")
    return as_token_ids(ids)


def as_logit_stats(logit_stats: Any) -> tuple[LogitStat, ...]:
    """The names, each once and in one order."""
    names = get_args(LogitStat)
    several = isinstance(logit_stats, Collection) and not isinstance(
        logit_stats, (str, jax.Array, np.ndarray)
    )
    good = several and all(isinstance(x, str) and x in names for x in logit_stats)
    check("logit_stats", repr(logit_stats), good, f"some of {names}, in a tuple, list or set")
    return tuple(name for name in names if name in logit_stats)


def check_stats(stats: TokenStats, shape: tuple[int, ...], *read: str, how: str = "") -> None:
    """Raises unless these are statistics of a batch of shape `[R, T]` or `[K, R, T]`, in the dtypes
    of `arrays.KINDS`.

    The fields `read` must not be None, nor log-probs; `how` tells in the error how to get them.
    """
    check_type("stats", stats, isinstance(stats, TokenStats), "TokenStats")
    for name in read:
        needed(f"stats.{name}", getattr(stats, name), f"f32[R, T]: {how}")
    for field in dataclasses.fields(stats):
        array = getattr(stats, field.name)
        if field.name == "entropy_mode" or (array is None and field.name != "log_probs"):
            continue
        check_array(f"stats.{field.name}", array)
        ndim = len(shape)
        expected = f"the batch's, {shape}"
        if field.name in _OF_IDS:
            ndim += 1
            expected += " and K"
        good = array.shape[: len(shape)] == shape and array.ndim == ndim
        check(f"stats.{field.name}", f"shape {array.shape}", good, expected)
