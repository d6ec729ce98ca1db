"""No comparison that the tests use takes NaN for equal to NaN, unless it says so."""

import ast
from pathlib import Path

import chex
import jax.numpy as jnp
import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
NANS = [np.nan, [1.0, np.nan], jnp.array([jnp.nan, 1], jnp.bfloat16), np.array([1 + 1j * np.nan])]


@pytest.mark.parametrize("number", NANS, ids=["number", "list", "bfloat16", "complex"])
@pytest.mark.parametrize("name", ["assert_allclose", "assert_array_equal"])
def test_nan_equals_nan_only_on_demand(name, number):
    compare = getattr(np.testing, name)
    with pytest.raises(
        AssertionError, match="desired: got NaN, expected numbers, or equal_nan=True"
    ):
        compare(number, number)
    compare(number, number, equal_nan=True)
    with pytest.raises(AssertionError):
        compare(np.ones(np.shape(number)), number, equal_nan=True)


def test_nan_is_not_the_expected_number():
    for compare in (np.testing.assert_allclose, np.testing.assert_array_equal):
        with pytest.raises(AssertionError, match="nan"):
            compare([np.nan, 1.0], [1.0, 1.0])
    assert np.nan != pytest.approx(np.nan)


@pytest.mark.parametrize("compare", [chex.assert_trees_all_equal, chex.assert_trees_all_close])
def test_trees_of_chex(compare):
    with pytest.raises(AssertionError, match="got NaN, expected numbers"):
        compare({"a": np.array([np.nan])}, {"a": np.array([np.nan])})


def test_nothing_else_of_numpy_is_used():
    """numpy's other assertions equal NaN to NaN too, and have no guard."""
    guarded = {"assert_allclose", "assert_array_equal"}
    for path in sorted(TESTS.rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        names |= {node.id for node in nodes if isinstance(node, ast.Name)}
        of_numpy = {
            name for name in names if hasattr(np.testing, name) and name.startswith("assert_")
        }
        assert of_numpy <= guarded, path
        imported = [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
        assert "numpy.testing" not in imported, path  # a name bound before the guard is put there
