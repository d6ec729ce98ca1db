"""What a public function reads of a batch, or of statistics, it reads as a loss does: by the kinds
of `batch.reads`.

Nothing here lists functions or arrays. A function is found by its signature; which arrays it reads,
by a trace of it.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval
from public_surface import S, arguments_of, surface

from jaxppo import RolloutBatch, TokenStats
from jaxppo.batch.reads import ENTROPIES, FINITE, FLAGS, LOG_PROBS, PER_TOKEN, SAMPLED, WEIGHTS

SURFACE = surface()
NAN = float("nan")
INF = float("inf")
NOT_FINITE = {"NaN": NAN, "infinity": INF}
OF_KIND = {  # by kind, values that break its rule
    LOG_PROBS: {**NOT_FINITE, "a probability": 0.5},
    SAMPLED: {**NOT_FINITE, "a probability": 0.5},
    FINITE: {**NOT_FINITE, "-infinity": -INF},
    ENTROPIES: {**NOT_FINITE, "a log-prob": -1.5},
    WEIGHTS: {**NOT_FINITE, "below 0": -1.0},
    FLAGS: {"NaN": NAN, "a half": 0.5},
}
WRONG = {name: OF_KIND[kind] for name, (kind, _) in PER_TOKEN.items()}
WRONG |= {
    "loss_mask": {"NaN": NAN, "a half": 0.5, "two": 2.0, "below 0": -1.0},
    "segment_ids": {"beyond S": S + 1, "below 0": -1},
    **dict.fromkeys(("sum_p2", "accuracy"), OF_KIND[FINITE]),
}
ANY_VALUE = {  # arrays without a rule that a device can check, and why
    **dict.fromkeys(("tokens", "targets"), "a head knows the vocabulary"),
    **dict.fromkeys(
        ("positions", "policy_versions"), "integers, which `validate` compares on the host"
    ),
    **dict.fromkeys(
        ("sample_ids", "group_ids", "rollout_ids", "parents"), "ids, which `validate` compares"
    ),
    "rewards": "NaN is no reward, and estimators take any number",
    **dict.fromkeys(
        ("top_log_probs", "top_ids", "ids", "id_log_probs"), "of K ids, see losses/test_poison"
    ),
}
PASSED_ON = {  # where the same entries meet a rule later
    **dict.fromkeys(
        ("draft_targets", "shift_targets"), "a batch is made of a batch, which a loss reads"
    ),
    "Normalizer.of": "the loss of each micro-batch reads the same masks",
    "write_tokens": "it writes what explain_tokens found, and the batch as it is",
}
EXCUSED = {
    ("explain_tokens", "entropy"): "of the loss that is explained it is only a metric",
    ("pack_nucleus_ids", "segment_ids"): "lists of the host, which `validate` checks",
    ("by_sample", "segment_ids"): "a sum over the sequences that there are",
    ("by_sample", "1 on padding"): "a sum over the sequences that there are",
}


def places(x):
    """The first loss token, or padding: the last position of a row."""
    mask = np.asarray(x)
    return tuple(np.argwhere(mask > 0)[0]), (0, mask.shape[1] - 1)


TAKES = [
    (name, argument)
    for name, function in SURFACE.items()
    for argument, x in arguments_of(name, function).items()
    if isinstance(x, RolloutBatch | TokenStats)
]


def test_all_functions_of_a_batch_are_here():
    """A public function that says in its signature that it takes a batch or statistics has a
    call with one.
    """
    for name, function in SURFACE.items():
        annotations = getattr(function, "__annotations__", {})
        says = {x for x, of in annotations.items() if of in ("RolloutBatch", "TokenStats")} - {
            "return"
        }
        assert says <= {argument for of, argument in TAKES if of == name}, name


def arrays_of(x):
    """The arrays in the fields of a batch or of statistics, by name."""
    return {f.name: a for f in dataclasses.fields(x) if hasattr(a := getattr(x, f.name), "dtype")}


def leaves(found):
    """All arrays of a result.

    The count of capped log-probs tells the two apart that are equal otherwise.
    """
    if isinstance(found, tuple) and isinstance(found[-1], dict):
        found = (
            *found[:-1],
            {name: x for name, x in found[-1].items() if "rollout_capped" not in name},
        )
    held = getattr(found, "arrays", found)  # of explained tokens
    return [x for x in jax.tree.leaves(held) if hasattr(x, "dtype")]


def is_loss(found):
    """Whether a result is that of a loss, whose rules tests/losses/test_poison checks."""
    return (
        isinstance(found, tuple)
        and isinstance(found[-1], dict)
        and any("broken_rules" in x for x in found[-1])
    )


def read_by(function, given, argument):
    """The names of the arrays that the result depends on; those that change it if the function
    runs on the host.
    """
    held = arrays_of(given[argument])

    def call(arrays):
        return leaves(
            function(**{**given, argument: dataclasses.replace(given[argument], **arrays)})
        )

    try:
        traced = jax.make_jaxpr(call)(held).jaxpr
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return [x for x in held if x in WRONG and changes(function, given, argument, x)]
    _, used = partial_eval.dce_jaxpr(traced, [True] * len(traced.outvars))
    return [name for name, is_used in zip(sorted(held), used, strict=True) if is_used]


def changes(function, given, argument, array):
    """Whether a call without loss, or with other numbers, gives something else."""
    other = {
        argument: dataclasses.replace(
            given[argument], **{array: 0 * getattr(given[argument], array)}
        )
    }
    try:
        found = leaves(function(**{**given, **other}))
    except (TypeError, ValueError):
        return True
    return any(
        (np.asarray(x) != y).any() for x, y in zip(leaves(function(**given)), found, strict=True)
    )


def outcome(function, given, argument, name, x):
    """None where the call names the array or gave NaN; else what happened."""
    changed = dataclasses.replace(given[argument], **{name: x})
    try:
        found = function(**{**given, argument: changed})
    except (TypeError, ValueError) as error:
        words = rf"\b({argument}|{name})\b"
        return (
            None
            if re.search(words, str(error)) and ": got " in str(error)
            else f"{type(error).__name__}: {error}"
        )
    if any(
        jnp.issubdtype(x.dtype, jnp.inexact) and not np.isfinite(x).all() for x in leaves(found)
    ):
        return None
    return f"passed: {str(found)[:80]}"


@pytest.mark.parametrize(("name", "argument"), TAKES)
def test_an_unsound_entry_is_no_plausible_number(name, argument):
    if name in PASSED_ON:
        return
    function = SURFACE[name]
    given = arguments_of(name, SURFACE[name])
    found = function(**given)
    if is_loss(found):
        return
    assert all(np.isfinite(x).all() for x in leaves(found) if jnp.issubdtype(x.dtype, jnp.inexact))
    at, padding = places(arguments_of("spread", SURFACE["spread"])["batch"].loss_mask)
    wrong = []
    for array in read_by(function, given, argument):
        if array in ANY_VALUE or (name, array) in EXCUSED:
            continue
        x = getattr(given[argument], array)
        spoilt = {how: x.at[at].set(value) for how, value in WRONG[array].items()}
        if array == "loss_mask":
            spoilt["1 on padding"] = x.at[padding].set(1)
        for how, bad in spoilt.items():
            if (name, how) in EXCUSED:
                continue
            found = outcome(function, given, argument, array, bad)
            wrong += [f"{array}, {how}: {found}"] * (found is not None)
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize(("name", "argument"), [x for x in TAKES if x[1] != "stats"])
def test_a_log_prob_of_a_sampler_above_0_counts_as_0(name, argument):
    function = SURFACE[name]
    given = arguments_of(name, SURFACE[name])
    if name in PASSED_ON or "rollout_log_probs" not in read_by(function, given, argument):
        return
    batch = given[argument]
    at, _ = places(batch.loss_mask)
    capped, zero = (
        leaves(function(**{**given, argument: dataclasses.replace(batch, rollout_log_probs=x)}))
        for x in (batch.rollout_log_probs.at[at].set(value) for value in (0.1, 0.0))
    )
    assert len(capped) > 0
    for one, other in zip(capped, zero, strict=True):
        np.testing.assert_array_equal(one, other)
        assert not np.isnan(one).any()
