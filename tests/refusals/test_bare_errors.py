"""Things that no argument expects, given to each argument of each public function: no error is
Python's or JAX's own.

Some of them are values that a function takes: a call that passes is not judged here.
`test_public_surface` says, by the kind of an argument, what must not pass.
"""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_surface import BATCH, arguments_of, surface

SURFACE = surface()
STRANGE = {
    "None": None,
    "a text": "x",
    "bytes": b"x",
    "True": True,
    "NaN": float("nan"),
    "a number below 0": -1,
    "half": 0.5,
    "complex": 1j,
    "an object": object(),
    "a class": int,
    "an empty list": [],
    "an empty dictionary": {},
    "a list of texts": ["x"],
    "a ragged list": [[1], [2, 3]],
    "an array of no dimension": np.array(0.5),
    "an integer of numpy's arrays": np.array(1),
    "a number of numpy": np.float32(0.5),
    "a scalar of jax": jnp.float32(0.5),
    "an integer of jax": jnp.int32(1),
    "an array of no size": jnp.zeros((0,)),
    "an array of texts": np.array(["x"]),
    "an array of objects": np.array([None, "x"], dtype=object),
    "a PRNG key": jax.random.key(0),
    "PRNG keys": jax.random.split(jax.random.key(0), 4).reshape(2, 2),
}


ONE = ("an integer of numpy's arrays", "an integer of jax")
# calls that are no mistake of the argument: how the error comes, by function, or "" for all, and
# argument
LEFT = {
    **dict.fromkeys(
        [
            ("compute_log_probs", "apply"),
            ("StepTerm.of", "fn"),
            ("assert_packing_invariant", "hidden_fn"),
        ],
        (
            ("a class",),
            (
                "the class int is a function of the user's, and the error is what it raises when it"
                " is called"
            ),
        ),
    ),
    ("", "row_length"): (
        ONE,
        "rows of 1 are legal; the error says which sequence does not fit them",
    ),
}


def bare(function, given):
    """The error of a call that names no argument of the function; None where the call passes or
    names one.
    """
    try:
        function(**given)
    except Exception as error:
        lines = str(error)
        what, got, rest = lines.partition(": got ")
        named = got and ", expected" in rest and re.search(rf"\b({'|'.join(given)})\b", what)
        if named and type(error) in (TypeError, ValueError):
            return None
        return f"{type(error).__name__}: {lines[:160]!r}"
    return None


@pytest.mark.every(2)
@pytest.mark.parametrize("name", SURFACE)
def test_no_error_is_bare(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a text is a path too
    function = SURFACE[name]
    good = arguments_of(name, SURFACE[name])
    found = []
    for argument in good:
        left, _ = LEFT.get((name, argument), LEFT.get(("", argument), ((), "")))
        for how, strange in STRANGE.items():
            if how in left:
                continue
            error = bare(function, {**good, argument: strange})
            found += [f"{argument}, {how}: {error}"] * (error is not None)
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("name", ["segment_ids", "sample_ids"])
@pytest.mark.parametrize("how", STRANGE)
def test_a_layout_is_read_from_arrays(name, how):
    """A key of `jax.random` has no dimension: "tuple index out of range"."""
    with pytest.raises((TypeError, ValueError), match=rf"^batch\.{name}: got .+, expected "):
        dataclasses.replace(BATCH, **{name: STRANGE[how]}).check_layout(None)
