"""What the methods of a `TokenLoss` give, checked where a program is traced: the error names the
method.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NoReturn, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import (
    KINDS,
    LOG_PROBS,
    Aggregation,
    check,
    check_array,
    check_choice,
    check_number,
    check_type,
)
from jaxppo.base.metrics import Composite, CompositeTerm, Metric, Reduce, Terms
from jaxppo.base.pytree import PyTree
from jaxppo.base.traced import is_mark
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.policy_tokens import OfConfig
from jaxppo.losses.token_loss import OF_EVERY_LOSS, Asks, TokenLoss, WeighedBatch
from jaxppo.policy.off_policy import OffPolicyConfig
from jaxppo.sharding import Segments

Shape = tuple[int, ...]
NORM = "sequence_mean_token_sum_norm"
TERM = (
    f"(values, weights, how) with arrays [R, T] and how one of {get_args(Reduce)}, which is reduced"
    " for you"
)


def name_of(loss: TokenLoss[Any]) -> str:
    """The class of a loss as the caller knows it."""
    if isinstance(loss, OfConfig):
        return type(loss.config.loss).__name__
    return type(loss).__name__


def check_attributes(loss: TokenLoss[Any]) -> None:
    """Raises where the attributes of a loss are of another type, or name another aggregation."""
    what = name_of(loss)
    check_choice(f"{what}.aggregation", loss.aggregation, Aggregation)
    norm = loss.aggregation_norm
    if loss.aggregation != NORM:
        got = f"{norm} with aggregation={loss.aggregation!r}"
        check(f"{what}.aggregation_norm", got, norm is None, f"None, or aggregation={NORM!r}")
    elif not is_mark(norm):
        check_number(f"{what}.aggregation_norm", norm, above=0)
    off_policy = loss.off_policy
    good = off_policy is None or isinstance(off_policy, OffPolicyConfig)
    check_type(f"{what}.off_policy", off_policy, good, "OffPolicyConfig or None")
    names = loss.out_of_denominators
    good = isinstance(names, tuple) and all(name in LOG_PROBS for name in names)
    check(f"{what}.out_of_denominators", repr(names), good, f"a tuple with some of {LOG_PROBS}")
    check_type(
        f"{what}.token_local", loss.token_local, isinstance(loss.token_local, bool), "True or False"
    )
    check_type(f"{what}.asks", loss.asks, isinstance(loss.asks, Asks), "losses.token_loss.Asks")


def constants_of(loss: TokenLoss[Any], stats: PyTree, weighed: WeighedBatch) -> PyTree:
    """The loss's constants.

    Those of a token-local loss of a head must not need `stats`: one pass has none yet.
    """
    what = f"{name_of(loss)}.constants"
    local = loss.token_local and loss.of_head
    try:
        constants = loss.constants(None if local else stats, weighed)
    except AttributeError as error:
        if not local or "NoneType" not in str(error):
            raise
        expected = (
            "token_local=False for constants that depend on the log-probs: they are not known"
            " before the head's pass"
        )
        raise TypeError(f"{what}: got a need for stats, expected {expected}") from error
    if local:
        for path, x in jax.tree.leaves_with_path(constants):
            where = f"{what}{jax.tree_util.keystr(path)}"
            shape = jnp.shape(x)
            of_batch = weighed.batch.loss_mask.shape
            check(
                where,
                f"shape {shape}",
                shape[:2] == of_batch,
                f"{of_batch} and more, since the loss is token-local",
            )
    return constants


def terms_of(
    loss: TokenLoss[Any], stats: PyTree, batch: RolloutBatch, constants: PyTree, segments: Segments
) -> dict[str, Float[Array, "R T"]]:
    """The terms of each token's loss. A token-local loss of a head cannot reduce over sequences."""
    if loss.token_local and loss.of_head:
        segments = _OfOneToken(
            segments.segment_ids, segments.num_segments, segments.axes, name_of(loss)
        )
    terms = loss.terms(stats, batch, constants, segments)
    what = f"{name_of(loss)}.terms"
    check_mapping(what, terms, "the terms of each token's loss by name")
    check(what, "no term", bool(terms), "at least one")
    for name, x in terms.items():
        check_tokens(f"{what}[{name!r}]", x, batch.loss_mask.shape)
        check_array(f"{what}[{name!r}]", x, kind=KINDS["x"])
    return dict(terms)


def loss_of_tokens(
    loss: TokenLoss[Any], stats: PyTree, batch: RolloutBatch, constants: PyTree, segments: Segments
) -> Float[Array, "R T"]:
    """Per-shard: the loss of each token before weighting, NaN, in the gradient too, where it is
    not finite.
    """
    losses = functools.reduce(jnp.add, terms_of(loss, stats, batch, constants, segments).values())
    return losses * jnp.where(jnp.isfinite(losses), 1, jnp.nan)


def metrics_of(
    loss: TokenLoss[Any], stats: PyTree, weighed: WeighedBatch, constants: PyTree
) -> Terms:
    """The loss's metrics, before they are reduced."""
    metrics = loss.metrics(stats, weighed, constants)
    what = f"{name_of(loss)}.metrics"
    shape = weighed.batch.loss_mask.shape
    check_mapping(what, metrics, f"by name {TERM}")
    taken = sorted(OF_EVERY_LOSS.intersection(metrics))
    check(what, taken, not taken, "other names: every loss reports these")
    for name, term in metrics.items():
        for part, x in (term.parts if isinstance(term, CompositeTerm) else {"": term}).items():
            where = f"{what}[{name!r}]{part and f'.parts[{part!r}]'}"
            of_three = isinstance(x, tuple) and len(x) == 3
            got = type(x).__name__ if isinstance(x, Metric | Composite) else "another term"
            check(where, got, of_three, TERM)
            check_tokens(f"{where}[0]", x[0], shape)
            check_tokens(f"{where}[1]", x[1], shape)
            check_choice(f"{where}[2]", x[2], Reduce)
    return dict(metrics)


def flags_of(
    what: str, found: Mapping[str, Bool[Array, "R T"]], shape: Shape
) -> dict[str, Bool[Array, "R T"]]:
    """What `reasons` gives."""
    check_mapping(what, found, "bool[R, T] by name")
    for name, x in found.items():
        check_tokens(f"{what}[{name!r}]", x, shape)
    return dict(found)


def reads_of(
    loss: TokenLoss[Any], stats: PyTree, batch: RolloutBatch, segments: Segments
) -> dict[str, Array | None]:
    """The arrays that the loss reads, by the names of their rules."""
    arrays = loss.reads(stats, batch, segments)
    what = f"{name_of(loss)}.reads"
    shape = batch.loss_mask.shape
    check_mapping(what, arrays, "arrays by the names of their rules")
    for name, x in arrays.items():
        where = f"{what}[{name!r}]"
        if x is None:
            # one of the statistics of the head's pass
            is_to_come = stats is None and not hasattr(batch, name)
            check(
                where,
                x,
                is_to_come,
                f"an array: {name_of(loss)} reads it, and the batch or the statistics lack it",
            )
            continue
        check_type(where, x, hasattr(x, "dtype") and hasattr(x, "shape"), "an array [R, T, ...]")
        # those of samples, [R, S], have rules of their own
        good = x.shape[:2] == shape or x.shape == batch.sample_ids.shape
        check(where, f"shape {x.shape}", good, f"{shape} and more, the batch's")
    return dict(arrays)


def check_mapping(what: str, found: object, expected: str) -> None:
    """Raises TypeError unless this is a mapping."""
    if not isinstance(found, Mapping):
        got = type(found).__name__
        if isinstance(found, jax.Array):
            got = "an array"
        raise TypeError(f"{what}: got {got}, expected {expected}")


def check_tokens(what: str, x: Any, shape: Shape) -> None:
    """Raises unless x is an array with one entry for each token."""
    check_type(what, x, hasattr(x, "dtype") and hasattr(x, "shape"), "an array [R, T]")
    check(what, f"shape {x.shape}", x.shape == shape, f"{shape}, one for each token")


@dataclasses.dataclass(frozen=True)
class _OfOneToken(Segments):
    """The segments of a token-local loss, which may be computed without the other tokens of a
    sequence.
    """

    loss: str = ""

    def sum(self, x: object) -> NoReturn:
        self._refuse("sum")

    def mean(self, x: object, mask: object) -> NoReturn:
        self._refuse("mean")

    def max(self, x: object, mask: object) -> NoReturn:
        self._refuse("max")

    def spread(self, y: object) -> NoReturn:
        self._refuse("spread")

    def _refuse(self, name: str) -> NoReturn:
        got = f"True with segments.{name} in its loss of a token"
        expected = "token_local=False, or in `constants` what depends on the batch alone"
        raise ValueError(f"{self.loss}.token_local: got {got}, expected {expected}")
