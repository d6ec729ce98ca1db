"""Sessions that are strict: JAX's checks of promotion, of NaN, of old keys, and its other modes, by
public function.

tests/conftest.py sets JAX so that no test meets an implicit promotion of dtypes or ranks, or a key
of integers. tests/support/public_calls.py has a call of every public function that computes; it
runs under other modes here too.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from conftest import EXCUSED
from public_calls import CALLS, DTYPES, given
from tables import sampled

import jaxppo
from jaxppo import advantages, losses, mismatch
from jaxppo.base import kl, metrics
from jaxppo.batch import nucleus
from jaxppo.contrib import draft
from jaxppo.losses import covariance, distillation, mtp, preference
from jaxppo.sharding.testing import assert_trees_close
from jaxppo.step import entropy, masks, staleness

MESH = "dp=2,cp=2,tp=2"
MODULES = (jaxppo, advantages, mismatch, kl, metrics, nucleus, entropy, masks, staleness)
MODULES += (losses, covariance, distillation, draft, mtp, preference)
ON_THE_HOST = {
    "advise",
    "check_top_k",
    "drop_equal_groups",
    "explain_broken_rules",
    "make_parallel_mesh",
    "pack_nucleus_ids",
}
ON_THE_HOST |= {
    "kto_reference_point",
    "micro_batches_of_pairs",
    "mismatched_samples",
    "samples_of_pairs",
}
# of jaxppo.sharding
OF_ROWS = {"pack", "redistribute", "scan_affine", "segment_sum", "shift_left", "unpack"}


def test_the_session_is_strict():
    one = jnp.ones((2, 2))
    with pytest.raises(
        jax.dtypes.TypePromotionError, match="no available implicit dtype promotion"
    ):
        one + jnp.ones((2, 2), jnp.bfloat16)
    with pytest.raises(ValueError, match="rank_promotion='raise'"):
        one + one[0]
    with pytest.raises(ValueError, match="Legacy uint32 key"):
        jax.random.normal(jnp.zeros(2, jnp.uint32))


def test_what_is_excused_is_there():
    for name, reason in EXCUSED.items():
        module, _, test = name.partition("::")
        assert (
            f"def {test or 'test_'}"
            in next(Path(__file__).parents[1].rglob(f"{module}.py")).read_text()
        )
        assert reason


def test_every_public_function_has_a_call():
    there = {
        f"RolloutBatch.from_{name}"
        for name in ("padded", "token_aligned", "target_aligned", "cu_seqlens")
    } | OF_ROWS
    for module in MODULES:
        there |= {name for name in module.__all__ if inspect.isfunction(getattr(module, name))}
    called = set(re.findall(r"[\w.]+", " ".join(CALLS).replace("advantages.", "")))
    assert there - called == ON_THE_HOST


BY_DAY = [("as made", MESH), ("narrow", None)]
# by day each call takes one of the cases, in turns
TURN = {name: BY_DAY[i % 2] for i, name in enumerate(CALLS)}


CASES = itertools.product(CALLS, DTYPES, (None, MESH))


def is_its_turn(i, case):
    name, *given = case
    return tuple(given) == TURN[name]


@pytest.mark.parametrize(("name", "dtypes", "mesh"), sampled(CASES, is_its_turn))
def test_of_promotion(name, dtypes, mesh):
    found = CALLS[name](given(mesh, dtypes))
    assert jax.tree.leaves(found)


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "debug_nans": functools.partial(jax.debug_nans, True),
    "disable_jit": jax.disable_jit,
    "enable_x64": functools.partial(jax.enable_x64, True),
}


# -0.0134 is -0.0289 and 0.0154, and the former a mean of terms near 1, of which f32 keeps 1.2e-7:
# it is off by 1.6e-7
CANCELS = {"policy_loss of sapo": 2e-5}


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "mode"), list(itertools.product(CALLS, MODES)))
def test_of_a_mode(name, mode):
    g = given(None, "as made")
    expected = CALLS[name](g)
    with MODES[mode]():
        assert_trees_close(CALLS[name](g), expected, rtol=CANCELS.get(name, 1e-5))
