"""Sums of gradients over devices: their bits, the way that they go, and the gradients of heads beside float64."""

import dataclasses
from types import SimpleNamespace
from typing import Any

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
from jaxppo.head import call as calls
from jaxppo.head import ring
from jaxppo.head.ring import summed
from sharding.audit import audit
from sharding.mesh import make_parallel_mesh
from sharding.testing import assert_trees_close

PARALLEL = make_parallel_mesh("dp=2,cp=2,tp=2")
OVER = ("dp", "cp")


def integers(shape, count):
    """Numbers whose f32 sums over devices are exact, while sums in bf16 or of rounded numbers are not."""
    return np.random.default_rng(0).integers(-4000, 4000, (count, *shape)).astype(np.float32)


def sum_of(dim, dtype, over=OVER, out=None, fused=False, rings=4, **options):
    """The sum over devices of `x[device]`, made from terms along a dimension."""
    profile = dataclasses.replace(DEVICES["wide"], rings=rings)
    call, plan = SimpleNamespace(profile=profile), SimpleNamespace(fused=fused, ring_blocks=2)
    work: Any = SimpleNamespace(call=call, plan=plan, axes=frozenset(over))

    def per_shard(x):
        def term(start, size, first, width):
            part = jax.lax.dynamic_slice_in_dim(x[0], start, size, dim)
            return jax.lax.dynamic_slice_in_dim(part, first, width, 1 - dim)

        return summed(work, term, dim, x.shape[1 + dim], x.shape[2 - dim], frozenset(), dtype, **options)

    return jax.jit(jax.shard_map(per_shard, mesh=PARALLEL.mesh, in_specs=P(over), out_specs=out or P()))


def check(fn, x, dtype="bfloat16"):
    found = np.asarray(fn(x).astype(jnp.float32))
    np.testing.assert_array_equal(found, x.sum(axis=0).astype(dtype).astype(np.float32))


def ops(fn, x):
    return {c.op for c in audit(fn, x, mesh=PARALLEL.mesh).collectives}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("length", [1024, 5000, 4096])  # one block; two, of which shares overlap; two
@pytest.mark.parametrize("dim", [0, 1])
def test_bits(dim, length, dtype, monkeypatch):
    monkeypatch.setattr(ring, "LARGE", 2**17)
    x = integers((length, 40) if dim == 0 else (40, length), 4)
    fn = sum_of(dim, dtype)
    check(fn, x, dtype)
    found = {(c.op, c.in_loop) for c in audit(fn, x, mesh=PARALLEL.mesh).collectives}
    assert found == {("collective-permute", length > 1024)}


@pytest.mark.parametrize("dim", [0, 1])
def test_shares_with_a_longer_side(dim):
    """Halves of a share are cut along its longer side."""
    x = integers((1024, 700) if dim == 0 else (700, 1024), 4)
    fn = sum_of(dim, "bfloat16")
    check(fn, x)
    assert ops(fn, x) == {"collective-permute"}


@pytest.mark.parametrize("shape", [(1500, 40), (5000, 40), (1100, 700), (1024, 700)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_all_devices_end_with_the_same_bits(dim, fused, shape, monkeypatch):
    """Parts may overlap where shares do not divide the rows. They are summed in other orders: one of them is kept."""
    monkeypatch.setattr(ring, "LARGE", 2**17)
    x = np.random.default_rng(0).normal(size=(4, *(shape if dim == 0 else shape[::-1]))).astype(np.float32)
    found = sum_of(dim, "float32", fused=fused)(x)
    first, *others = (np.asarray(shard.data) for shard in found.addressable_shards)
    np.testing.assert_allclose(first, x.astype(np.float64).sum(axis=0), rtol=0, atol=2e-6)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("scatter", [False, True])
def test_more_devices_than_a_ring_takes(scatter, blocks, monkeypatch):
    """One collective for each block, more than two in a loop; the last block of 1000 overlaps the one before it."""
    over, x = ("dp", "cp", "tp"), integers((1000, 1000), 8)
    monkeypatch.setattr(ring, "AT_ONCE", 10**6 // blocks)
    fn = sum_of(1, "bfloat16", over, **({"scatter": over, "out": P(None, over)} if scatter else {}))
    check(fn, x)
    assert ops(fn, x) == {"reduce-scatter" if scatter else "all-reduce"}
    assert {c.in_loop for c in audit(fn, x, mesh=PARALLEL.mesh).collectives} == {blocks > 2}


@pytest.mark.parametrize("length", [2048, 3000, 8192])  # 8192 go around in two blocks
@pytest.mark.parametrize("dim", [0, 1])
def test_rings_of_eight(dim, length, monkeypatch):
    """On a chip whose rings pay for more devices than four; sums that are too long for them, and scatters, stay."""
    monkeypatch.setattr(ring, "LARGE", 2**18)
    over, x = ("dp", "cp", "tp"), integers((length, 48) if dim == 0 else (48, length), 8)
    fn = sum_of(dim, "bfloat16", over, rings=8)
    check(fn, x)
    assert ops(fn, x) == {"collective-permute"}
    shards = sum_of(dim, "bfloat16", over, P(over) if dim == 0 else P(None, over), rings=8, scatter=over)
    check(shards, x)
    assert ops(shards, x) == {"reduce-scatter"}
    monkeypatch.setattr(ring, "LONG", length * 48 - 1)
    fn = sum_of(dim, "bfloat16", over, rings=8)
    check(fn, x)
    assert ops(fn, x) == {"all-reduce"}


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("length", [512, 500])  # each device's share has two equal halves, or has not
def test_shares_of_a_sharded_primal(dim, length):
    """FSDP: each device keeps its share, and nothing is gathered."""
    x = integers((length, 30) if dim == 0 else (30, length), 4)
    out = P(OVER) if dim == 0 else P(None, OVER)
    fn = sum_of(dim, "bfloat16", out=out, scatter=OVER)
    check(fn, x)
    assert ops(fn, x) == ({"collective-permute"} if length == 512 else {"reduce-scatter"})


def test_a_rounded_sum():
    """ "parameter": terms are rounded before they are added, in bf16."""
    x = integers((2048, 30), 4)
    sent = {line for line in str(sum_of(0, "bfloat16", wide=False).trace(x).jaxpr).splitlines() if "ppermute" in line}
    assert sent
    assert all(":bf16[" in line for line in sent)


@pytest.mark.parametrize("over", [("dp", "cp"), ("cp", "dp"), ("cp",)])
def test_axes_in_any_order(over):
    check(sum_of(0, "bfloat16", over), integers((2048, 30), PARALLEL.mesh.shape["dp"] ** len(over)))


def test_too_few_rows_for_shares():
    x = integers((40, 100), 4)
    fn = sum_of(0, "bfloat16")
    check(fn, x)
    assert ops(fn, x) == {"all-reduce"}


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
    hidden = jax.random.normal(keys[0], (8, 1024, 512), jnp.bfloat16)
    kernel = (jax.random.normal(keys[1], (512, 4096)) / 22).astype(jnp.bfloat16)
    kernel = kernel if layout == "hv" else kernel.T
    targets = jax.random.randint(keys[2], hidden.shape[:2], 0, 4096)
    place = jnp.broadcast_to(jnp.arange(1024), targets.shape)
    mask, advantages = (place % 3 > 0).astype(jnp.float32), (place % 5 - 2).astype(jnp.float32)
    batch = RolloutBatch(
        targets,
        targets,
        jnp.ones_like(targets),
        place,
        mask,
        jnp.arange(8)[:, None],
        real_last_targets=True,
        advantages=advantages,
        old_log_probs=-8 - mask,
        context_shards=parallel.context_size,
    )

    def loss(hidden, kernel):
        head = Head(kernel, layout=layout)
        if "one pass" in way:
            config = PolicyLossConfig(entropy_coef=0.1)
            options = {"parallel": parallel, "follow_mask": "mask" in way}
            return policy_loss_from_hidden(hidden, head, batch, config, **options)[0]
        found = log_probs_from_hidden(hidden, head, batch.targets, parallel=parallel, entropy="bonus")
        return (found.log_probs * jnp.arange(1024.0)[None] + found.entropy).sum()

    gradients = jax.grad(loss, 0 if way == "frozen" else (0, 1))
    roomy = dataclasses.replace(DEVICES["wide"], tokens=512, tile=2**24, group=4096, columns=2048)
    with tiles_of("wide"):
        monkeypatch.setitem(calls.PROFILES, "wide", roomy)
        around = jax.jit(gradients)(hidden, kernel)
        found = {c.op for c in audit(gradients, hidden, kernel, mesh=parallel.mesh).collectives}
        monkeypatch.setitem(calls.PROFILES, "wide", dataclasses.replace(roomy, rings=1))
        jax.clear_caches()
        at_once = jax.jit(gradients)(hidden, kernel)
        without = {c.op for c in audit(gradients, hidden, kernel, mesh=parallel.mesh).collectives}
    # dhidden is summed over the tensor axis, dkernel over the others; eight devices are no ring
    rings = parallel.tensor_size > 1 or (way != "frozen" and parallel.data_size * parallel.context_size <= 4)
    assert ("collective-permute" in found - without) == rings
    assert all(jnp.isfinite(x).all() and x.any() for x in jax.tree.leaves(around))
    assert_trees_close(around, at_once, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "fsdp=4,tp=2", "cp=8"])
@pytest.mark.parametrize("form", [{}, {"layout": "vh"}, {"with_where": True}, {"lora": True}], ids=str)
def test_gradients_beside_float64(mesh, form, monkeypatch):
    """With columns and features enough for each device to have a share."""
    monkeypatch.setattr(head_cases, "H", 512)
    monkeypatch.setitem(calls.PROFILES, "wide", dataclasses.replace(DEVICES["wide"], columns=4096, rings=8))
    arrays = head_cases.head_arrays(4096, scale=1 / 22, **form)
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
