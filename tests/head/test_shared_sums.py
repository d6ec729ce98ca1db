"""A bf16 gradient is summed over devices in f32, and each device rounds its share: its bits, and the bytes sent.

XLA for CPUs gathers bf16 as f32; on TPUs it is 2 bytes a number, in test_aot.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import DEVICES, tiles_of
from jax.sharding import PartitionSpec as P

from jaxppo import Head, log_probs_from_hidden
from jaxppo.head import plan
from jaxppo.head.gradient_sums import as_primal, sum_in_blocks
from sharding.audit import audit
from sharding.mesh import make_parallel_mesh
from sharding.testing import assert_trees_close

PARALLEL = make_parallel_mesh("dp=2,cp=2,tp=2")
OVER = ("dp", "cp")

CASES = {  # shape, the dimension of blocks, over which axes: bytes a number of (operation, axes)
    "all share": ((8, 512), 0, OVER, {("reduce-scatter", OVER): 4, ("all-gather", OVER): 4}),
    "all share the other dimension": ((512, 8), 1, OVER, {("reduce-scatter", OVER): 4, ("all-gather", OVER): 4}),
    "one axis shares": (
        (8, 256),
        0,
        OVER,
        {("reduce-scatter", ("cp",)): 4, ("all-reduce", ("dp",)): 4 / 2, ("all-gather", ("cp",)): 4},
    ),
    "none shares less than 128": ((512, 96), 0, OVER, {("all-reduce", OVER): 4}),
    "a vector": ((512,), 0, OVER, {("all-reduce", OVER): 4}),
    "all devices of the mesh are too many": (
        (8, 1024),
        0,
        ("dp", "cp", "tp"),
        {("reduce-scatter", ("dp", "cp")): 4, ("all-reduce", ("tp",)): 4 / 4, ("all-gather", ("dp", "cp")): 4},
    ),
}


def summed(fn, primal, over=OVER):
    return jax.jit(jax.shard_map(lambda x: fn(x[0], primal), mesh=PARALLEL.mesh, in_specs=P(over), out_specs=P()))


def integers(shape, count=4):
    """Numbers whose f32 sums over devices are exact, while sums in bf16 or of rounded numbers are not."""
    return np.random.default_rng(0).integers(-4000, 4000, (count, *shape)).astype(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_bits_and_bytes(case):
    shape, blocks, over, expected = CASES[case]
    x, primal = integers(shape, 2 ** len(over)), jnp.zeros(shape, jnp.bfloat16)
    fn = summed(lambda x, primal: as_primal(x, primal, shared=True, blocks=blocks), primal, over)
    found = np.asarray(fn(x).astype(jnp.float32))
    np.testing.assert_array_equal(found, x.sum(axis=0).astype(jnp.bfloat16).astype(np.float32))
    moved = {(c.op, c.axes): c.bytes for c in audit(fn, x, mesh=PARALLEL.mesh).collectives}
    assert moved == {key: size * np.prod(shape) for key, size in expected.items()}


@pytest.mark.parametrize("dim", [0, 1])
def test_blocks_of_a_sum(dim):
    """Blocks of one dimension, of which the last overlaps the one before; devices share the other dimension."""
    shape = (300, 512) if dim == 0 else (512, 300)
    x, primal = integers(shape), jnp.zeros(shape, jnp.bfloat16)

    def blocks(x, primal):
        return sum_in_blocks(
            lambda start, size: jax.lax.dynamic_slice_in_dim(x, start, size, dim), primal, dim, 128, shared=True
        )

    found = np.asarray(summed(blocks, primal)(x).astype(jnp.float32))
    np.testing.assert_array_equal(found, x.sum(axis=0).astype(jnp.bfloat16).astype(np.float32))


def test_a_f32_gradient_is_one_sum():
    x, primal = integers((8, 512)), jnp.zeros((8, 512), jnp.float32)
    fn = summed(lambda x, primal: as_primal(x, primal, shared=True), primal)
    np.testing.assert_array_equal(fn(x), x.sum(axis=0))
    assert [c.op for c in audit(fn, x, mesh=PARALLEL.mesh).collectives] == ["all-reduce"]


@pytest.mark.every(5)
@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("frozen", [False, True])  # tokens outermost, and the vocabulary
def test_a_head(layout, frozen, monkeypatch):
    """The same gradients, to a rounding, as of sums that no device shares, and a scatter for each.

    Terms are added in another order, so that a number between two of bf16 may be rounded to either: 2^-7 apart at most.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (2, 128, 512), jnp.bfloat16)
    kernel = (jax.random.normal(keys[1], (512, 1024)) / 22).astype(jnp.bfloat16)
    kernel = kernel if layout == "hv" else kernel.T
    targets = jax.random.randint(keys[2], hidden.shape[:2], 0, 1024)

    def loss(hidden, kernel):
        head = Head(kernel, layout=layout)
        found = log_probs_from_hidden(hidden, head, targets, parallel=parallel, entropy="bonus")
        return (found.log_probs * jnp.arange(128.0)[None] + found.entropy).sum()

    gradients = jax.grad(loss, 0 if frozen else (0, 1))
    with tiles_of("wide"):
        shared = jax.jit(gradients)(hidden, kernel)
        found = {(c.op, c.axes) for c in audit(gradients, hidden, kernel, mesh=parallel.mesh).collectives}
        monkeypatch.setitem(plan.PROFILES, "wide", dataclasses.replace(DEVICES["wide"], shared_sums=False))
        jax.clear_caches()
        whole = jax.jit(gradients)(hidden, kernel)
    expected = {("reduce-scatter", ("tp",))} | (set() if frozen else {("reduce-scatter", ("dp", "cp"))})
    assert {(op, axes) for op, axes in found if op == "reduce-scatter"} == expected
    assert_trees_close(shared, whole, rtol=2**-7, atol=1e-6)
