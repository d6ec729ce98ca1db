"""Things that no argument expects, given to each argument of each public function: no error is Python's or JAX's own.

Some of them are values that a function takes: a call that passes is not judged here. `test_public_surface` says, by the
kind of an argument, what must not pass.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from public_surface import arguments_of, surface

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


OF_PROGRAMS = "any pytree, which JAX reads"
NO_LENGTH = "arrays of no dimension have no length"
OF_OBJECTS = "a name is compared with an array of objects"
LEFT = {  # calls whose errors are not the library's own, by function, or "" for all, and argument
    ("compute_log_probs", "params"): OF_PROGRAMS,
    ("compute_log_probs", "apply"): "the class int is called with a batch",
    ("Head.of", "layout"): OF_OBJECTS,
    ("Head.of", "dtype"): OF_OBJECTS,
    ("Sample.from_sglang", "truncated"): OF_OBJECTS,
    ("Sample.from_vllm", "truncated"): OF_OBJECTS,
    ("", "row_length"): "an array of 1, which no sequence fits: the error names sequences",
    ("RolloutBatch.from_samples", "micro_batches"): "an array of no dimension is a key of a dictionary",
    **dict.fromkeys((("check_top_k", "ids"), ("check_top_k", "log_probs")), "what numpy makes no array of"),
    **dict.fromkeys([("samples_of_pairs", x) for x in ("prompts", "chosen", "rejected", "margins")], NO_LENGTH),
    **dict.fromkeys([(of, "hidden") for of in ("draft_loss", "draft_metrics", "mtp_loss")], NO_LENGTH),
    **dict.fromkeys([(of, "normalizers") for of in ("draft_loss", "mtp_loss")], "the error says normalizer"),
    **dict.fromkeys([(of, "policy_head") for of in ("draft_loss", "draft_metrics")], "a gradient is stopped first"),
    ("on_policy_distillation", "coef"): "a jax scalar of integers, under strict promotion of dtypes",
    ("write_tokens", "path"): "a file, which 1 is too",
    **dict.fromkeys([("StepTerm.of", x) for x in ("fn", "sums")], "a program of the user's and what it reads"),
    ("assert_packing_invariant", "hidden_fn"): "the class int is called with a batch",
    **dict.fromkeys(
        [("", x) for x in ("head", "teacher_head", "policy_head", "rollout_head")],
        "PRNG keys of two dimensions: the error names the layout of a kernel",
    ),
}


def bare(function, given):
    """The error of a call that names no argument of the function; None where the call passes or names one."""
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


@pytest.mark.parametrize("name", SURFACE)
def test_no_error_is_bare(name):
    function, good = SURFACE[name], arguments_of(name, SURFACE[name])
    found = []
    for argument in good:
        if LEFT.keys() & {(name, argument), ("", argument)}:
            continue
        for how, strange in STRANGE.items():
            error = bare(function, {**good, argument: strange})
            found += [f"{argument}, {how}: {error}"] * (error is not None)
    assert not found, "\n" + "\n".join(found)
