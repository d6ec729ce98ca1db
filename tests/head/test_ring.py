"""Sums of gradients that go around a ring of devices: their bits, and the bytes that each device sends."""

import dataclasses
import functools

import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import DEVICES, tiles_of
from jax.sharding import PartitionSpec as P

from jaxppo import (
    Head,
    PolicyLossConfig,
    RolloutBatch,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from jaxppo.head import plan
from jaxppo.head.gradient_sums import as_primal, sum_in_blocks
from jaxppo.head.ring import ring_size
from jaxppo.head.slices import submatrix
from sharding.audit import audit
from sharding.mesh import make_parallel_mesh
from sharding.testing import assert_trees_close

PARALLEL = make_parallel_mesh("dp=2,cp=2,tp=2")
OVER = ("dp", "cp")


def integers(shape, count):
    """Numbers whose f32 sums over devices are exact, while sums in bf16 or of rounded numbers are not."""
    return np.random.default_rng(0).integers(-4000, 4000, (count, *shape)).astype(np.float32)


def summed(x, primal, dim, size, over=OVER, out=None, **options):
    """The sum over devices of `x[device]`."""

    def per_shard(x, primal):
        return sum_in_blocks(
            functools.partial(submatrix, x[0], dim), primal, dim, size, frozenset(over), rings=True, **options
        )

    specs = (P(over), out or P())
    return jax.jit(jax.shard_map(per_shard, mesh=PARALLEL.mesh, in_specs=specs, out_specs=specs[1])), x, primal


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("size", [1000, 128, 70])  # one block; several, of which the last overlaps; halves of 35
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("by_rows", [False, True])  # halves of shares, which here have more columns than rows
def test_bits(by_rows, dim, size, dtype):
    shape = (300, 512) if dim == 0 else (512, 300)
    x, primal = integers(shape, 4), jnp.zeros(shape, dtype)
    fn, *args = summed(x, primal, dim, size, by_rows=by_rows)
    found = np.asarray(fn(*args).astype(jnp.float32))
    np.testing.assert_array_equal(found, x.sum(axis=0).astype(dtype).astype(np.float32))
    assert {c.op for c in audit(fn, *args, mesh=PARALLEL.mesh).collectives} == {"collective-permute"}


@pytest.mark.parametrize("scatter", [False, True])
def test_rings_of_rings(scatter):
    """Eight devices: two rings of four, and in each place two devices."""
    over = ("dp", "cp", "tp")
    x, primal = integers((300, 1024), 8), jnp.zeros((300, 1024), jnp.bfloat16)
    more = {"out": P(None, over), "scatter": over} if scatter else {}
    fn, *args = summed(x, primal, 0, 128, over=over, **more)
    found = np.asarray(fn(*args).astype(jnp.float32))
    np.testing.assert_array_equal(found, x.sum(axis=0).astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize("dim", [0, 1])
def test_shares_of_a_sharded_primal(dim):
    """FSDP: each device keeps its share of the features, and nothing is gathered."""
    shape = (300, 512) if dim == 0 else (512, 300)
    x, primal = integers(shape, 4), jnp.zeros(shape, jnp.bfloat16)
    out = P(None, OVER) if dim == 0 else P(OVER)
    fn, *args = summed(x, primal, dim, 128, out=out, scatter=OVER)
    found = np.asarray(fn(*args).astype(jnp.float32))
    np.testing.assert_array_equal(found, x.sum(axis=0).astype(jnp.bfloat16).astype(np.float32))


def test_a_rounded_sum():
    """ "parameter": terms are rounded before they are added, in bf16."""
    x, primal = integers((300, 512), 4), jnp.zeros((300, 512), jnp.bfloat16)
    fn, *args = summed(x, primal, 0, 128, sum_dtype="parameter")
    sent = {str(eqn) for eqn in str(fn.trace(*args).jaxpr).splitlines() if "ppermute" in eqn}
    assert sent
    assert all(":bf16[" in eqn for eqn in sent)


SIZES = {  # length, most, devices a ring: size
    "one block": ((4096, 5000, [4]), 4096),
    "ten blocks, of which the last overlaps a little": ((37984, 4096, [4]), 3840),
    "rings of rings": ((37984, 4096, [4, 4]), 3840),
    "two blocks that overlap, since one has no equal shares": ((300, 1000, [4]), 192),
    "too short": ((60, 1000, [4]), 0),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_of_blocks(case):
    (length, most, devices), expected = SIZES[case]
    assert ring_size(length, most, [(n, 0) for n in devices]) == expected


@pytest.mark.parametrize("over", [("dp", "cp"), ("cp", "dp"), ("cp",)])
def test_axes_in_any_order(over):
    shape = (300, 512)
    x, primal = integers(shape, PARALLEL.mesh.shape["dp"] ** len(over)), jnp.zeros(shape, jnp.bfloat16)
    fn, *args = summed(x, primal, 0, 128, over=over)
    found = np.asarray(fn(*args).astype(jnp.float32))
    np.testing.assert_array_equal(found, x.sum(axis=0).astype(jnp.bfloat16).astype(np.float32))


@pytest.mark.parametrize(("width", "op"), [(128, "collective-permute"), (100, "all-reduce")])
def test_too_few_rows_for_shares(width, op):
    """Shares are of the features then; where these have no equal ones either, one collective sums."""
    x, primal = integers((40, width), 4), jnp.zeros((40, width), jnp.bfloat16)
    fn, *args = summed(x, primal, 0, 40)
    np.testing.assert_array_equal(
        np.asarray(fn(*args).astype(jnp.float32)), x.sum(axis=0).astype(jnp.bfloat16).astype(np.float32)
    )
    assert {c.op for c in audit(fn, *args, mesh=PARALLEL.mesh).collectives} == {op}


def test_a_vector_is_one_sum():
    x = integers((512,), 4)
    fn = jax.jit(
        jax.shard_map(
            lambda x: as_primal(x[0], jnp.zeros(512, jnp.bfloat16)), mesh=PARALLEL.mesh, in_specs=P(OVER), out_specs=P()
        )
    )
    np.testing.assert_array_equal(
        np.asarray(fn(x).astype(jnp.float32)), x.sum(axis=0).astype(jnp.bfloat16).astype(np.float32)
    )
    assert [c.op for c in audit(fn, x, mesh=PARALLEL.mesh).collectives] == ["all-reduce"]


@pytest.mark.every(5)
@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "fsdp=4,tp=2", "dp=2,fsdp=2,tp=2", "fsdp=8"])
@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("way", ["frozen", "two passes", "one pass", "one pass, a mask"])
def test_a_head(layout, way, mesh, monkeypatch):
    """The same gradients, to a rounding, as of sums that do not go around.

    Terms are added in another order, so that a number between two of bf16 may be rounded to either: 2^-7 apart at most.
    """
    parallel = make_parallel_mesh(mesh)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (8, 128, 512), jnp.bfloat16)
    kernel = (jax.random.normal(keys[1], (512, 1024)) / 22).astype(jnp.bfloat16)
    kernel = kernel if layout == "hv" else kernel.T
    targets = jax.random.randint(keys[2], hidden.shape[:2], 0, 1024)
    weights = jnp.tile(jnp.arange(128.0)[None] % 3, (8, 1))
    batch = RolloutBatch(*[targets] * 4, weights, targets, advantages=weights - 1, old_log_probs=-6 - weights)

    def loss(hidden, kernel):
        head = Head(kernel, layout=layout)
        if "one pass" in way:
            config = PolicyLossConfig(entropy_coef=0.1)
            options = {"parallel": parallel, "follow_mask": "mask" in way}
            return policy_loss_from_hidden(hidden, head, batch, config, **options)[0]
        found = log_probs_from_hidden(hidden, head, batch.targets, parallel=parallel, entropy="bonus")
        return (found.log_probs * jnp.arange(128.0)[None] + found.entropy).sum()

    gradients = jax.grad(loss, 0 if way == "frozen" else (0, 1))
    with tiles_of("wide"):
        around = jax.jit(gradients)(hidden, kernel)
        found = {c.op for c in audit(gradients, hidden, kernel, mesh=parallel.mesh).collectives}
        monkeypatch.setitem(plan.PROFILES, "wide", dataclasses.replace(DEVICES["wide"], rings=False))
        jax.clear_caches()
        at_once = jax.jit(gradients)(hidden, kernel)
        without = {c.op for c in audit(gradients, hidden, kernel, mesh=parallel.mesh).collectives}
    summed = way != "frozen" or parallel.tensor_size > 1  # frozen, dhidden alone, over the tensor axis
    assert ("collective-permute" in found - without) == summed
    assert "reduce-scatter" not in found
    assert_trees_close(around, at_once, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "fsdp=4,tp=2", "cp=8"])
@pytest.mark.parametrize("form", [{}, {"layout": "vh"}, {"with_where": True}, {"lora": True}], ids=str)
def test_gradients_beside_float64(mesh, form, monkeypatch):
    """With features enough for each device to have a share."""
    monkeypatch.setattr(head_cases, "H", 512)
    arrays = head_cases.head_arrays(1024, scale=1 / 22, **form)
    options = {"layout": form["layout"]} if "layout" in form else {}
    parallel = make_parallel_mesh(mesh)
    head_cases.check_head([parallel], arrays, device="wide", entropy="bonus", **options)


@pytest.mark.parametrize("memory", [None, 600_000])  # one pass, two
def test_second_derivatives_are_refused(memory):
    """By name, as where no sum goes around."""
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    hidden, kernel = jnp.ones((2, 64, 512), jnp.bfloat16), jnp.ones((512, 1024), jnp.bfloat16)
    targets = jnp.zeros((2, 64), jnp.int32)
    weights = jnp.ones((2, 64))
    batch = RolloutBatch(*[targets] * 4, weights, targets, advantages=weights, old_log_probs=-6 * weights)

    def loss(hidden):
        return policy_loss_from_hidden(hidden, kernel, batch, PolicyLossConfig(), parallel=parallel, memory=memory)[0]

    with tiles_of("wide"), pytest.raises(NotImplementedError, match="second derivatives of a loss from hidden states"):
        jax.make_jaxpr(jax.jacfwd(lambda x: jax.grad(loss)(x).astype(jnp.float32).sum()))(hidden)
