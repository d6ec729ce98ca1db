"""Where two systems first differ: their recorded numbers of the same tokens, compared exactly,
stage by stage.

Stages are in the order in which a system computes: what differs first is the cause, what differs
behind it may be its effect. NaN differs from everything.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxppo.base.arrays import check

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Stage:
    """What a file may hold."""

    words: str
    advice: str
    """What to do if it is the first that differs."""
    inner: int | None = None
    """The dimensions behind those of tokens; None if it is not of tokens."""


_ADVICE = {
    "tokens": (
        "The files are not of the same tokens, so nothing behind them can be compared: record them"
        " again"
    ),
    "hidden": (
        "Below the head: a product or a sum whose order depends on the batch, attention over the"
        " same keys in another order, other positions, another dtype, or weights of another"
        " version. Record the output of each layer as `hidden`, one file a layer, to find the first"
    ),
    "kernel": (
        "The heads hold other weights: an older version, another dtype, or other padding columns"
    ),
    "bias": "The heads hold another bias",
    "logits": (
        "The heads compute otherwise: products rounded to another dtype (`Head(logits_dtype=)`), a"
        " soft-cap, a scale, an adapter, or sums in another order (`deterministic=True`)"
    ),
    "temperature": "Log-probs are at another temperature: give the sampler's as `temperature=`",
    "support": (
        "Log-probs are over other ids, by top-k, top-p or padding columns: give the sampler's ids"
        " as `nucleus_ids=`, and say with `vocab_size=` where padding begins"
    ),
    "log_probs": (
        "Nothing else that was recorded differs: the softmax is summed in another order "
        "(`deterministic=True`), or the cause is in a stage that was not recorded"
    ),
    "stop_ids": (
        "All numbers agree, but one system ends a response where the other goes on: give both the"
        " same ids"
    ),
}
STAGES: Mapping[str, Stage] = {
    "tokens": Stage("tokens", _ADVICE["tokens"], 0),
    "hidden": Stage("hidden states", _ADVICE["hidden"], 1),
    "kernel": Stage("head, kernel", _ADVICE["kernel"]),
    "bias": Stage("head, bias", _ADVICE["bias"]),
    "logits": Stage("head, logits", _ADVICE["logits"], 1),
    "temperature": Stage("temperature", _ADVICE["temperature"], 0),
    "support": Stage("support", _ADVICE["support"], 1),
    "log_probs": Stage("log-probs", _ADVICE["log_probs"], 0),
    "stop_ids": Stage("stop ids", _ADVICE["stop_ids"]),
}
_INTEGERS = ("tokens", "stop_ids")


@dataclasses.dataclass(frozen=True)
class Difference:
    """How a stage differs between the files."""

    count: int
    """How many tokens, numbers or ids differ."""
    of: int
    first: Shape
    """The index of the first number that differs; the id itself of stop ids."""
    trainer: float
    sampler: float
    largest: float
    """The largest |trainer - sampler|."""
    dtypes: tuple[str, str]


@dataclasses.dataclass(frozen=True)
class Parity:
    """The stages of two files: `differences` holds None for a stage that is the same in both."""

    differences: dict[str, Difference | None]
    alone: dict[str, str]
    """Stages that only one of the two files holds, and which one."""
    first: str | None
    """The first stage that differs."""

    def __str__(self) -> str:
        lines = [f"{stage.words:15}{self._line(name)}" for name, stage in STAGES.items()]
        if self.first is None:
            summary = "no difference in what both files hold"
        else:
            summary = f"first difference: {STAGES[self.first].words}. {STAGES[self.first].advice}."
        return "\n".join([*lines, "", summary])

    def _line(self, name: str) -> str:
        if name in self.alone:
            return f"not compared: the {self.alone[name]}'s file alone holds it"
        if name not in self.differences:
            return "not recorded"
        difference = self.differences[name]
        if difference is None:
            return "the same"
        place = ", ".join(map(str, difference.first))
        if name == "stop_ids":
            whose = "trainer" if difference.trainer else "sampler"
            return (
                f"{difference.count} of {difference.of} ids differ, first {place}, which the {whose}"
                " alone has"
            )
        unit = "tokens"
        if STAGES[name].inner is None or not difference.first:
            unit = "numbers"
        dtypes = ""
        if difference.dtypes[0] != difference.dtypes[1]:
            dtypes = f", in {difference.dtypes[0]} and {difference.dtypes[1]}"
        values = f"{difference.trainer:.9g} and {difference.sampler:.9g}{dtypes}"
        return (
            f"{difference.count} of {difference.of} {unit} differ, first [{place}]: {values};"
            f" {difference.largest:.3g} apart at most"
        )


def compare_stages(trainer: Mapping[str, Any], sampler: Mapping[str, Any]) -> Parity:
    """The first stage that differs, and how much each does.

    Both map names of `STAGES` to arrays. `tokens` and `log_probs` are `[R, T]` or `[N]`. `hidden`,
    `logits` and `support` have one more dimension. `temperature` is a scalar, or one number for
    each token. `support` is ids, -1 for none, or a mask of the vocabulary; ids are compared as
    sets, as `stop_ids` are. The trainer's `where` are the tokens that count. Raises a ValueError
    that names what does not fit.
    """
    shape: Shape | None = None
    for role, arrays in (("trainer", trainer), ("sampler", sampler)):
        _check_names(role, arrays)
        shape = _shape_of_tokens(role, arrays, shape)
    both = [name for name in STAGES if name in trainer and name in sampler]
    check("files", "no stage that both hold", bool(both), f"some of {', '.join(STAGES)} in both")
    where = np.asarray(trainer.get("where", True)) > 0
    if shape is not None:
        check(
            "trainer: where",
            f"shape {where.shape}",
            where.shape in ((), shape),
            f"that of tokens, {shape}",
        )
        where = np.broadcast_to(where, shape)
        check("trainer: where", "no token that counts", bool(where.any()), "1 at least")
    differences = {name: _difference(name, trainer[name], sampler[name], where) for name in both}
    alone = {name: "trainer" for name in STAGES if name in trainer and name not in sampler}
    alone |= {name: "sampler" for name in STAGES if name in sampler and name not in trainer}
    first = next((name for name, found in differences.items() if found is not None), None)
    return Parity(differences, alone, first)


def _check_names(role: str, arrays: Mapping[str, Any]) -> None:
    """Raises for a name that no stage has, and for numbers where ids belong."""
    allowed = [*STAGES]
    if role == "trainer":
        allowed.append("where")
    strange = [name for name in arrays if name not in allowed]
    check(role, ", ".join(strange), not strange, f"none but {', '.join(allowed)}")
    for name in _INTEGERS:
        if name in arrays:
            dtype = arrays[name].dtype
            check(f"{role}: {name}", f"dtype {dtype}", dtype.kind in "iu", "integers")


def _shape_of_tokens(role: str, arrays: Mapping[str, Any], shape: Shape | None) -> Shape | None:
    """`[R, T]` or `[N]`: that of the first array of tokens, which all others must have."""
    for name, stage in STAGES.items():
        if name not in arrays or stage.inner is None:
            continue
        dims = arrays[name].shape
        if name == "temperature" and dims == ():
            continue
        tokens = dims[: len(dims) - stage.inner]
        expected = "[R, T] or [N]" + ", and one more dimension" * stage.inner
        check(f"{role}: {name}", f"shape {dims}", len(dims) - stage.inner in (1, 2), expected)
        shape = shape or tokens
        check(
            f"{role}: {name}",
            f"shape {dims}",
            tokens == shape,
            f"{shape}, as the first array of tokens has",
        )
    return shape


def _difference(name: str, trainer: Any, sampler: Any, where: np.ndarray) -> Difference | None:
    dtypes = str(trainer.dtype), str(sampler.dtype)
    if name == "stop_ids":
        return _of_sets(trainer, sampler, dtypes)
    if name == "support":
        trainer, sampler = _alike(trainer, sampler)
    if name == "temperature" and (trainer.ndim or sampler.ndim):
        trainer = np.broadcast_to(trainer, where.shape)
        sampler = np.broadcast_to(sampler, where.shape)
    same_shape = sampler.shape == trainer.shape
    check(
        f"sampler: {name}", f"shape {sampler.shape}", same_shape, f"the trainer's, {trainer.shape}"
    )
    trainer = _numbers(trainer)
    sampler = _numbers(sampler)
    unequal = trainer != sampler
    if STAGES[name].inner is None or trainer.ndim == 0:
        count = int(unequal.sum())
        of = unequal.size
    else:
        counts = where.reshape(*where.shape, *(1,) * (unequal.ndim - where.ndim))
        unequal &= counts
        count = int(unequal.reshape(*where.shape, -1).any(axis=-1).sum())
        of = int(where.sum())
    if not count:
        return None
    first = tuple(int(i) for i in np.argwhere(unequal)[0])
    with np.errstate(invalid="ignore"):
        largest = float(np.abs(trainer[unequal] - sampler[unequal]).max())
    return Difference(
        count, of, first, float(trainer[first]), float(sampler[first]), largest, dtypes
    )


def _of_sets(trainer: Any, sampler: Any, dtypes: tuple[str, str]) -> Difference | None:
    union = np.union1d(trainer, sampler)
    has = np.isin(union, trainer)
    differs = has != np.isin(union, sampler)
    if not differs.any():
        return None
    i = int(np.argmax(differs))
    return Difference(
        int(differs.sum()),
        len(union),
        (int(union[i]),),
        float(has[i]),
        float(not has[i]),
        1.0,
        dtypes,
    )


def _alike(trainer: Any, sampler: Any) -> tuple[Any, Any]:
    """Two supports of one shape: masks as they are, ids in order and -1 behind them."""
    kinds = trainer.dtype.kind + sampler.dtype.kind
    good = kinds == "bb" or set(kinds) <= set("iu")
    check(
        "support",
        f"{trainer.dtype} beside {sampler.dtype}",
        good,
        "ids in both files, or bool in both",
    )
    if kinds == "bb":
        return trainer, sampler
    width = max(trainer.shape[-1], sampler.shape[-1])
    return _as_sets(trainer, width), _as_sets(sampler, width)


def _as_sets(ids: Any, width: int) -> Any:
    """Ids `[..., K]` from the highest down, each once, with -1 in the places left over of
    `width`.
    """
    ordered = -np.sort(-ids.astype(np.int64), axis=-1)
    again = ordered[..., 1:] == ordered[..., :-1]
    ordered[..., 1:][again] = -1
    ordered = -np.sort(-ordered, axis=-1)
    return np.pad(
        ordered, [(0, 0)] * (ids.ndim - 1) + [(0, width - ids.shape[-1])], constant_values=-1
    )


def _numbers(x: Any) -> Any:
    """x in a dtype of numpy that holds its values and their differences."""
    if x.dtype.kind in "iu":
        return np.asarray(x, np.int64)
    if x.dtype == np.float64:
        return np.asarray(x)
    return np.asarray(x, np.float32)
