"""`assert_mesh_invariant`, `assert_trees_close` and `emulate_devices` fail when they should."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from token_sums import total

from sharding import shard_call
from sharding.testing import assert_mesh_invariant, assert_trees_close, emulate_devices, factorings

X = jnp.arange(64.0).reshape(8, 8)


def test_factorings():
    assert len(factorings(8)) == len(set(factorings(8))) == 10
    assert all(np.prod([int(part[3:]) for part in mesh.split(",")]) == 8 for mesh in factorings(8))


def test_what_depends_on_the_mesh_is_found():
    def forgets_context(axes, x):
        share = axes.psum(x.sum(), axes.data)
        return lax.pmax(share, axes.context) if axes.context else share

    def fn(parallel, x):
        return shard_call(
            "f", forgets_context, parallel, {"x": x}, lambda p: ([p.tokens_spec], P())
        )

    assert_mesh_invariant(fn, X, meshes=["dp=8", "dp=2,tp=4"])
    with pytest.raises(AssertionError, match=r"mesh dp=1,cp=2,tp=4 at the result: 1 of 1 differ"):
        assert_mesh_invariant(fn, X)
    assert assert_mesh_invariant(total, X) == X.sum()


def test_wrong_gradients_are_found():
    """Right values, and gradients that are too large by the size of an axis."""

    def twice(axes, x):
        x = x + (axes.size(axes.tensor) - 1) * (x - lax.stop_gradient(x))
        return axes.psum(x.sum(), axes.tokens)

    def fn(parallel, x):
        return shard_call("f", twice, parallel, {"x": x}, lambda p: ([p.tokens_spec], P()))

    assert_mesh_invariant(fn, X)
    with pytest.raises(
        AssertionError, match=r"mesh .*tp=\d+ at \[1\]: 64 of 64 differ, .* got \d.0, expected 1.0"
    ):
        assert_mesh_invariant(
            lambda parallel, x: jax.value_and_grad(lambda x: fn(parallel, x))(x), X
        )


@pytest.mark.parametrize(
    ("got", "expected", "message"),
    [
        ({"a": 1.0}, {"b": 1.0}, "here: got a tree"),
        (
            {"a": np.ones(2)},
            {"a": np.ones(3)},
            r"here at \['a'\]: got shape \(2,\), expected \(3,\)",
        ),
        ([np.array([1.0, np.nan])], [np.ones(2)], r"here at \[0\]: 1 of 2 differ, most at \(1,\)"),
        ([np.array([1.0, 2e-3])], [np.array([1.0, 0.0])], r"off by 0.002"),
        ([np.array([1, 2])], [np.array([1, 3])], "1 of 2 differ"),
        ([np.array([10_000])], [np.array([10_001])], "1 of 1 differ"),
        ([np.array([True, False])], [np.array([True, True])], "1 of 2 differ"),
        (
            [np.array([1.0, np.nan])],
            [np.array([1.0, np.nan])],
            r"here at \[0\]: got an expectation of NaN",
        ),
        (
            [np.array([np.inf])],
            [np.array([np.inf])],
            r"here at \[0\]: got an expectation without a finite number",
        ),
        (np.nan, np.nan, "here at the result: got an expectation of NaN"),
    ],
)
def test_trees_that_differ(got, expected, message):
    tree = jax.tree.map(np.asarray, (got, expected))
    with pytest.raises(AssertionError, match=message):
        assert_trees_close(*tree, atol=1e-3, rtol=1e-3, context="here")


def test_trees_that_agree():
    tree = {
        "a": np.array([1.0, -np.inf, np.inf]),
        "b": jnp.ones(3, jnp.bfloat16),
        "c": np.arange(3),
        "d": None,
    }
    assert_trees_close(tree, tree, 0, 0)
    assert_trees_close([np.array([1e6, 0.5])], [np.array([1e6, 0.0])], rtol=0, atol=1e-6)
    assert_trees_close([np.zeros((0, 3))], [np.zeros((0, 3))])


def test_nan_equals_nan_only_on_demand():
    got = [np.array([1.0, np.nan])]
    expected = [np.array([np.nan, np.nan])]
    assert_trees_close(expected, expected, equal_nan=True)
    with pytest.raises(AssertionError, match="1 of 2 differ"):
        assert_trees_close(got, expected, equal_nan=True)

    def broken(parallel, x):
        return x.sum() * jnp.nan

    assert_mesh_invariant(broken, X, meshes=["dp=8"], equal_nan=True)
    with pytest.raises(AssertionError, match="mesh dp=8 at the result: got an expectation of NaN"):
        assert_mesh_invariant(broken, X, meshes=["dp=8"])


def test_emulated_devices_are_checked():
    emulate_devices(8)
    with pytest.raises(RuntimeError, match="count: got 8 devices already in use, expected 4"):
        emulate_devices(4)
