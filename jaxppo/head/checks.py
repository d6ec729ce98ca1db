"""Checks of the arguments that `log_probs_from_hidden` and `log_probs_from_logits` share, and of what they return."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import as_token_ids, check_array, check_choice, check_count, check_number, needed
from jaxppo.head.call import Asked
from jaxppo.head.head import Entropy, LogitStat, TokenStats
from jaxppo.sharding import ParallelMesh

_OF_IDS = ("ids", "id_log_probs", "top_ids", "top_log_probs")  # the statistics that have a dimension K
_NO_TARGET = -2  # a target that no vocabulary has


def check_targets(targets: Any, shape: tuple[int, ...], source: str) -> None:
    check_array("targets", targets)
    if targets.shape != shape:
        raise ValueError(f"targets: got shape {targets.shape}, expected {shape}, the [R, T] of {source}")


def with_nuclei(
    targets: Int[Array, "R T"], nucleus_ids: Int[Array, "R T K"] | None, vocab_size: int
) -> Int[Array, "R T"]:
    """The targets, without those that have an id of their nucleus outside the vocabulary: their log-probs are NaN."""
    if nucleus_ids is None:
        return targets
    exist = (nucleus_ids >= -1) & (nucleus_ids < vocab_size)
    return jnp.where(exist.all(axis=-1), targets, _NO_TARGET)


def as_id_sets(what: str, ids: Any, tokens: tuple[int, ...]) -> Int[Array, "R T K"]:
    """Sets of ids, K at each position, as i32."""
    check_array(what, ids)
    if ids.ndim != 3 or ids.shape[:2] != tokens or not ids.shape[2]:
        raise ValueError(f"{what}: got shape {ids.shape}, expected [R, T, K] with [R, T] = {tokens}")
    return as_token_ids(ids)


def as_asked(entropy: Any, logit_stats: Any, top_k: Any) -> Asked:
    """What is asked for of each token's distribution."""
    check_choice("entropy", entropy, Entropy)
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 0:
        raise ValueError(f"top_k: got {top_k!r}, expected a number of ids, or 0 for none")
    return Asked(entropy, as_logit_stats(logit_stats), top_k)


def as_logit_stats(logit_stats: Any) -> tuple[LogitStat, ...]:
    """The names, each once and in one order."""
    names = get_args(LogitStat)
    if isinstance(logit_stats, str) or not isinstance(logit_stats, Collection) or set(logit_stats) - set(names):
        raise ValueError(f"logit_stats: got {logit_stats!r}, expected some of {names}, in a tuple, list or set")
    return tuple(name for name in names if name in logit_stats)


def as_adapter_ids(what: str, lora: Any, adapter_ids: Any, rows: int) -> Int[Array, " R"] | None:
    """The adapter of each row, as i32; None if all rows share one adapter, or there is none."""
    stacked = lora is not None and lora.a.ndim == 3
    if not stacked and adapter_ids is None:
        return None
    if not stacked:
        raise ValueError(f"adapter_ids: got an array, expected None without several adapters in {what}, [A, H, r]")
    if adapter_ids is None:
        raise ValueError(f"adapter_ids: got None, expected i32[R] for the {lora.a.shape[0]} adapters of {what}")
    check_array("adapter_ids", adapter_ids)
    if adapter_ids.shape != (rows,):
        raise ValueError(f"adapter_ids: got shape {adapter_ids.shape}, expected {(rows,)}, one per row")
    return as_token_ids(adapter_ids)


def check_where(where: Any, shape: tuple[int, ...]) -> None:
    if where is None:
        return
    check_array("where", where)
    if where.shape != shape:
        raise ValueError(f"where: got shape {where.shape}, expected {shape}, the shape of targets")


def as_temperature(temperature: Any, shape: tuple[int, ...]) -> Float[Array, ""] | Float[Array, "R T"] | None:
    """The temperature in f32, without a gradient; NaN where it is not a finite number above 0. None stands for 1."""
    if not isinstance(temperature, (np.ndarray, jax.Array)):
        check_number("temperature", temperature, above=0)
    else:
        check_array("temperature", temperature)
    if isinstance(temperature, (int, float, np.number)) and temperature == 1:
        return None
    temperature = jnp.asarray(temperature, jnp.float32)
    if temperature.shape not in ((), shape):
        raise ValueError(f"temperature: got shape {temperature.shape}, expected a scalar or {shape}, one per token")
    sound = (temperature > 0) & jnp.isfinite(temperature)
    return jax.lax.stop_gradient(jnp.where(sound, temperature, jnp.nan))


def check_vocab_size(vocab_size: int | None, columns: int) -> int:
    if vocab_size is None:
        return columns
    check_count("vocab_size", vocab_size, least=1)
    if vocab_size > columns:
        raise ValueError(f"vocab_size: got {vocab_size}, expected 1 to {columns}, the columns there are")
    return vocab_size


def temperature_spec(parallel: ParallelMesh, temperature: jax.Array | None) -> P:
    """The spec of a temperature that `as_temperature` returned."""
    return parallel.tokens_spec if getattr(temperature, "ndim", 0) else P()


def check_stats(stats: TokenStats, shape: tuple[int, ...], *read: str, how: str = "") -> None:
    """Raises unless these are statistics of this shape, in the dtypes of `KINDS`, with those that the caller reads.

    Args:
      stats: the user's argument, unchecked.
      shape: `[R, T]` of the batch, or `[K, R, T]`.
      read: the fields that must not be None, beside `log_probs`.
      how: how to get them, for the error.
    """
    if not isinstance(stats, TokenStats):
        raise TypeError(f"stats: got {type(stats).__name__}, expected TokenStats")
    for name in read:
        needed(f"stats.{name}", getattr(stats, name), f"f32[R, T]: {how}")
    for field in dataclasses.fields(stats):
        x = getattr(stats, field.name)
        if field.name == "entropy_mode" or (x is None and field.name != "log_probs"):
            continue
        of_ids = field.name in _OF_IDS
        check_array(f"stats.{field.name}", x)
        if x.shape[: len(shape)] != shape or x.ndim != len(shape) + of_ids:
            expected = f"{shape} and K" if of_ids else f"{shape}"
            raise ValueError(f"stats.{field.name}: got shape {x.shape}, expected the batch's, {expected}")
