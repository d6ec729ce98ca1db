"""A bf16 gradient is summed over devices in f32, each rounding its share of the sum: bits, and bytes that move.

XLA for CPUs gathers bf16 as f32; on TPUs it is 2 bytes a number, in test_aot.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxppo.head.varying import as_primal, sum_in_blocks
from sharding.audit import audit
from sharding.mesh import make_parallel_mesh

PARALLEL = make_parallel_mesh("dp=2,cp=4")
ALL = P(("dp", "cp"))

CASES = {  # shape, the dimension of blocks: bytes a number of (operation, axes)
    "all share": ((8, 1024), 0, {("reduce-scatter", ("dp", "cp")): 4, ("all-gather", ("dp", "cp")): 4}),
    "all share the other dimension": (
        (1024, 8),
        1,
        {("reduce-scatter", ("dp", "cp")): 4, ("all-gather", ("dp", "cp")): 4},
    ),
    "one axis shares": (
        (8, 512),
        0,
        {("reduce-scatter", ("cp",)): 4, ("all-reduce", ("dp",)): 4 / 4, ("all-gather", ("cp",)): 4},
    ),
    "none shares less than 128": ((1024, 96), 0, {("all-reduce", ("dp", "cp")): 4}),
    "a vector": ((1024,), 0, {("all-reduce", ("dp", "cp")): 4}),
}


def summed(fn, primal):
    return jax.jit(jax.shard_map(lambda x: fn(x[0], primal), mesh=PARALLEL.mesh, in_specs=ALL, out_specs=P()))


def integers(shape):
    """Of every device: sums of f32 are exact, and those of bf16, or of what was rounded, are not."""
    return np.random.default_rng(0).integers(-4000, 4000, (8, *shape)).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_bits_and_bytes(case):
    shape, blocks, expected = CASES[case]
    x, primal = integers(shape), jnp.zeros(shape, jnp.bfloat16)
    fn = summed(lambda x, primal: as_primal(x, primal, blocks=blocks), primal)
    found = np.asarray(fn(x).astype(jnp.float32))
    np.testing.assert_array_equal(found, x.sum(axis=0).astype(jnp.bfloat16).astype(np.float32))
    moved = {(c.op, c.axes): c.bytes for c in audit(fn, x, mesh=PARALLEL.mesh).collectives}
    assert moved == {key: size * np.prod(shape) for key, size in expected.items()}


@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_of_a_sum(dim):
    """Blocks of one dimension, the last overlapping the one before, devices sharing the other."""
    shape = (300, 1024) if dim == 0 else (1024, 300)
    x, primal = integers(shape), jnp.zeros(shape, jnp.bfloat16)

    def blocks(x, primal):
        return sum_in_blocks(lambda start, size: jax.lax.dynamic_slice_in_dim(x, start, size, dim), primal, dim, 128)

    found = np.asarray(summed(blocks, primal)(x).astype(jnp.float32))
    np.testing.assert_array_equal(found, x.sum(axis=0).astype(jnp.bfloat16).astype(np.float32))


def test_a_f32_gradient_is_one_sum():
    x, primal = integers((8, 1024)), jnp.zeros((8, 1024), jnp.float32)
    fn = summed(as_primal, primal)
    np.testing.assert_array_equal(fn(x), x.sum(axis=0))
    assert [c.op for c in audit(fn, x, mesh=PARALLEL.mesh).collectives] == ["all-reduce"]
