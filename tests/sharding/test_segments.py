"""Sums, means and extremes by sequence, on packed rows spread over any mesh and in any order of
positions.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharding import Segments, make_parallel_mesh, segment_sum, shard_call
from sharding.testing import assert_mesh_invariant, assert_trees_close, factorings

S = 3
IDS = np.zeros((8, 16), np.int32)
IDS[0, :5], IDS[0, 5:9], IDS[0, 9:14] = 1, 2, 3  # padding behind three sequences
IDS[1] = 1  # one sequence over every shard
IDS[2, 6:], IDS[3, :2] = 3, 2  # sequences 1 and 2 absent
IDS[4, ::2], IDS[4, 1::2] = 1, 2  # spread by some layout
RNG = np.random.default_rng(0)
X = RNG.normal(size=IDS.shape).astype(np.float32)
MASK = (RNG.random(IDS.shape) < 0.5) & (IDS > 0)
MASK[0, 5:9] = False  # a sequence that no mask selects


def by_hand(fn, empty, mask=IDS > 0):
    """`fn` of the masked values of each sequence, `empty` where there are none."""
    out = np.full((8, S), empty, np.float64)
    for r in range(8):
        for s in range(S):
            chosen = X[r].astype(np.float64)[(IDS[r] == s + 1) & mask[r]]
            out[r, s] = fn(chosen) if chosen.size else empty
    return out


def segments_call(fn):
    """fn(segments, x, mask) on a mesh, `[R, S]`."""

    def run(parallel, x, mask):
        def per_shard(axes, ids, x, mask):
            return fn(Segments(ids, S, axes), x, mask)

        def specs(p):
            return [p.tokens_spec] * 3, p.rows_spec

        args = {"ids": IDS, "x": x, "mask": mask}
        return shard_call("segments", per_shard, parallel, args, specs)

    return run


def test_segment_sum_on_any_mesh():
    def run(parallel, x):
        weights = jnp.arange(8.0 * S).reshape(8, S)

        def loss(x):
            return (segment_sum(x, jnp.asarray(IDS), S, parallel) * weights).sum()

        return segment_sum(x, jnp.asarray(IDS), S, parallel), jax.grad(loss)(x)

    found, gradient = assert_mesh_invariant(run, X)
    assert_trees_close(found, by_hand(np.sum, 0), atol=1e-6)
    weights = np.concatenate([np.zeros((8, 1)), np.arange(8.0 * S).reshape(8, S)], axis=1)
    np.testing.assert_array_equal(gradient, np.take_along_axis(weights, IDS, axis=1))


MESHES = ["dp=8", "cp=8", "dp=2,cp=2,tp=2"]


mean = segments_call(Segments.mean)
largest = segments_call(Segments.max)


def test_means_ignore_what_is_masked():
    mask = MASK.astype(np.float32)

    def run(parallel, x):
        def loss(x):
            found = mean(parallel, x, mask)
            return found.sum(), found

        gradient, found = jax.grad(loss, has_aux=True)(x)
        return found, gradient

    def of_both(parallel, *xs):
        return [run(parallel, x) for x in xs]

    clean, spoiled = assert_mesh_invariant(of_both, X, np.where(MASK, X, np.nan), meshes=MESHES)
    assert_trees_close(clean[0], by_hand(np.mean, 0, MASK), atol=1e-6)
    assert_trees_close(spoiled, clean, 0, 0)
    assert (np.asarray(clean[1])[~MASK] == 0).all()


def test_extremes():
    mask = MASK.astype(np.float32)
    given = (np.where(MASK, X, np.nan), mask)
    found = assert_mesh_invariant(largest, *given, meshes=MESHES)
    np.testing.assert_array_equal(found, by_hand(np.max, -np.inf, MASK).astype(np.float32))

    def of_a_row(x):
        return largest(None, x, mask)[1].sum()

    np.testing.assert_array_equal(jax.jit(jax.grad(of_a_row))(X), 0)


def test_spread_is_the_other_way():
    y = RNG.normal(size=(8, S)).astype(np.float32)

    def run(parallel, y):
        def per_shard(axes, ids, y):
            return Segments(ids, S, axes).spread(y)

        def specs(p):
            return [p.tokens_spec, p.rows_spec], p.tokens_spec

        args = {"ids": IDS, "y": y}
        return shard_call("spread", per_shard, parallel, args, specs)

    def with_gradient(parallel, y):
        def loss(y):
            found = run(parallel, y)
            return (found * X).sum(), found

        gradient, found = jax.grad(loss, has_aux=True)(y)
        return found, gradient

    found, gradient = assert_mesh_invariant(with_gradient, y, meshes=MESHES)
    np.testing.assert_array_equal(
        found, np.take_along_axis(np.pad(y, ((0, 0), (1, 0))), IDS, axis=1)
    )
    assert_trees_close(gradient, by_hand(np.sum, 0), atol=1e-6)


def test_the_order_of_positions_does_not_matter():
    order = RNG.permutation(16)
    permuted = segment_sum(X[:, order], jnp.asarray(IDS[:, order]), S)
    assert_trees_close(permuted, segment_sum(X, jnp.asarray(IDS), S), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bfloat16])
def test_the_dtype_stays(dtype):
    x = jnp.ones((8, 16), dtype)
    for parallel in (None, make_parallel_mesh("cp=8")):
        found = segment_sum(x, jnp.asarray(IDS), S, parallel)
        assert found.dtype == dtype
        np.testing.assert_array_equal(found[1].astype(int), [16, 0, 0])


def test_inside_a_users_shard_map():
    p = make_parallel_mesh("dp=2,cp=4")

    def fn(x, ids):
        return segment_sum(x, ids, S, p.axes)

    mapped = jax.shard_map(fn, mesh=p.mesh, in_specs=(p.tokens_spec,) * 2, out_specs=P("dp"))
    assert_trees_close(jax.jit(mapped)(X, IDS), by_hand(np.sum, 0), atol=1e-6)


def test_explicit_axes():
    meshes = [make_parallel_mesh(mesh, explicit=True) for mesh in MESHES]

    def sums(parallel, x):
        return segment_sum(x, jnp.asarray(IDS), S, parallel)

    assert_mesh_invariant(sums, X, meshes=meshes)


def test_shapes_that_differ():
    with pytest.raises(
        ValueError, match=r"segment_ids: got shape \(8, 16\), expected \[R, T\] like x, \(8, 8\)"
    ):
        segment_sum(jnp.asarray(X[:, :8]), jnp.asarray(IDS), S)
    with pytest.raises(ValueError, match="segment_ids: got shape"):
        segment_sum(jnp.ones(16), jnp.ones(16, jnp.int32), S)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", factorings(8))
def test_extremes_and_means_on_any_mesh(mesh):
    mask = MASK.astype(np.float32)
    for call in (mean, largest):
        assert_mesh_invariant(call, X, mask, meshes=[mesh])
