"""Sums of gradients over devices: their bits, the way that they go, and the gradients of heads
beside float64.
"""

import dataclasses
import functools

import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import DEVICES, tiles_of
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxppo import (
    Head,
    PolicyLossConfig,
    RolloutBatch,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from jaxppo.head import profiles
from jaxppo.head.sums import UNIT, scattered, stored, summed
from sharding.audit import audit
from sharding.mesh import make_parallel_mesh
from sharding.testing import assert_trees_close

PARALLEL = make_parallel_mesh("dp=2,cp=2,tp=2")
OVER = ("dp", "cp")
TOKENS = 256  # of a row
WHOLE = 2 * 4 * UNIT  # the columns of which each of four devices sums a share in two halves


def integers(shape, count):
    """Numbers whose f32 sums over devices are exact, while sums in bf16 or of rounded numbers
    are not.
    """
    return np.random.default_rng(0).integers(-4000, 4000, (count, *shape)).astype(np.float32)


def along(dim, length, width):
    return (length, width) if dim == 0 else (width, length)


def part_of(x, dim):
    """The term of a device whose own array is x."""

    return functools.partial(stored, x, dim)


def sum_of(dim, dtype, over=OVER, ring=4, pieces=4):
    """The sum over devices of `x[device]`, made from terms along a dimension."""

    def per_shard(x):
        return summed(part_of(x[0], dim), dim, x.shape[1 + dim], over, dtype, ring, pieces)

    return jax.jit(jax.shard_map(per_shard, mesh=PARALLEL.mesh, in_specs=P(over), out_specs=P()))


def shares_of(dim, dtype, over=OVER, ring=4):
    """The same sum, of which each device keeps a share."""

    def per_shard(x):
        return scattered(part_of(x[0], dim), dim, x.shape[1 + dim], over, (), dtype, ring)

    specs = P(over) if dim == 0 else P(None, over)
    return jax.jit(jax.shard_map(per_shard, mesh=PARALLEL.mesh, in_specs=P(over), out_specs=specs))


def check(fn, x, dtype="bfloat16"):
    found = np.asarray(fn(x).astype(jnp.float32))
    np.testing.assert_array_equal(found, x.sum(axis=0).astype(dtype).astype(np.float32))


def ops(fn, *args, mesh=PARALLEL.mesh):
    """The kinds of collectives of a compiled function."""
    return {c.op for c in audit(fn, *args, mesh=mesh).collectives}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rest", [0, 1, 600])
@pytest.mark.parametrize("dim", [0, 1])
def test_whole_shares_go_around_a_ring(dim, rest, dtype):
    """What they leave is summed by one collective."""
    x = integers(along(dim, 2 * WHOLE + rest, 40), 4)
    fn = sum_of(dim, dtype)
    check(fn, x, dtype)
    around = {"collective-permute", "all-gather"}
    assert ops(fn, x) - {"all-gather"} == around - {"all-gather"} | (
        {"all-reduce"} if rest else set()
    )


@pytest.mark.parametrize("length", [WHOLE, WHOLE + 600, 500])
@pytest.mark.parametrize("dim", [0, 1])
def test_all_devices_end_with_the_same_bits(dim, length):
    """Devices add the terms of a share in one order, that of the ring."""
    x = np.random.default_rng(0).normal(size=(4, *along(dim, length, 40))).astype(np.float32)
    found = sum_of(dim, "float32")(x)
    first, *others = (np.asarray(shard.data) for shard in found.addressable_shards)
    np.testing.assert_allclose(first, x.astype(np.float64).sum(axis=0), rtol=0, atol=2e-6)
    for other in others:
        np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("rest", [0, 300])
@pytest.mark.parametrize("dim", [0, 1])
def test_more_devices_than_a_ring_takes(dim, rest):
    """The wide ring sums whole shares, one collective what they leave."""
    over = ("dp", "cp", "tp")
    x = integers(along(dim, 2 * 8 * UNIT + rest, 30), 8)
    fn = sum_of(dim, "bfloat16", over)
    check(fn, x)
    found = ops(fn, x)
    assert "collective-permute" in found
    assert ("all-reduce" in found) == bool(rest)


@pytest.mark.parametrize("pieces", [1, 4])
def test_a_sum_without_a_ring(pieces):
    """Collectives sum it piece by piece."""
    over = ("dp", "cp", "tp")
    x = integers((1000, 1000), 8)
    fn = sum_of(1, "bfloat16", over, ring=0, pieces=pieces)
    check(fn, x)
    assert ops(fn, x) == {"all-reduce"}


def test_shares_without_a_ring():
    x = integers((512, 30), 4)
    fn = shares_of(0, "bfloat16", ring=0)
    check(fn, x)
    assert ops(fn, x) == {"reduce-scatter"}


@pytest.mark.parametrize("dim", [0, 1])
# each device's share has two equal halves, or has not
@pytest.mark.parametrize("length", [512, 500])
def test_shares_of_a_sharded_primal(dim, length):
    """FSDP: each device keeps its share, and nothing is gathered."""
    x = integers(along(dim, length, 30), 4)
    fn = shares_of(dim, "bfloat16")
    check(fn, x)
    assert ops(fn, x) == ({"collective-permute"} if length == 512 else {"reduce-scatter"})


@pytest.mark.parametrize("ring", [1, 8])
@pytest.mark.parametrize("devices", [2, 3, 5, 8])
def test_shares_of_any_number_of_devices(devices, ring):
    """Around the ring, or around the wide one, where of an even number one share goes one way
    alone.
    """
    mesh = Mesh(np.array(jax.devices()[:devices]), ("cp",))
    x = integers((devices * 6, 30), devices)

    def per_shard(x):
        return scattered(part_of(x[0], 0), 0, len(x[0]), ("cp",), (), "bfloat16", ring)

    fn = jax.jit(jax.shard_map(per_shard, mesh=mesh, in_specs=P("cp"), out_specs=P("cp")))
    check(fn, x)
    assert ops(fn, x, mesh=mesh) == {"collective-permute"}


@pytest.mark.parametrize("over", [("dp", "cp"), ("cp",)])
def test_some_of_the_axes(over):
    check(sum_of(0, "bfloat16", over), integers((2 * WHOLE, 30), 2 ** len(over)))


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

    Terms are added in another order, so that a number between two of bf16 may be rounded to either:
    2^-7 apart at most.
    """
    parallel = make_parallel_mesh(mesh)
    rng = np.random.default_rng(0)
    # features and columns enough for rings; a device has several chunks of 128 tokens
    hidden = jnp.asarray(rng.normal(size=(8, TOKENS, 512)), jnp.bfloat16)
    kernel = rng.normal(size=(512, 4096)) / 22
    kernel = jnp.asarray(kernel if layout == "hv" else kernel.T, jnp.bfloat16)
    targets = rng.integers(0, 4096, (8, TOKENS), dtype=np.int32)
    place = np.tile(np.arange(TOKENS, dtype=np.int32), (8, 1))
    mask = (place % 3 > 0).astype(np.float32)
    batch = RolloutBatch(
        targets,
        targets,
        np.ones_like(targets),
        place,
        mask,
        np.arange(8, dtype=np.int32)[:, None],
        real_last_targets=True,
        advantages=(place % 5 - 2).astype(np.float32),
        old_log_probs=-8 - mask,
        context_shards=parallel.context_size,
    )

    def loss(hidden, kernel):
        head = Head(kernel, layout=layout)
        if "one pass" in way:
            config = PolicyLossConfig(entropy_coef=0.1)
            options = {"parallel": parallel, "follow_mask": "mask" in way}
            return policy_loss_from_hidden(hidden, head, batch, config, **options)[0]
        found = log_probs_from_hidden(
            hidden, head, batch.targets, parallel=parallel, entropy="bonus"
        )
        return (found.log_probs * jnp.arange(TOKENS, dtype=jnp.float32)[None] + found.entropy).sum()

    wrt = 0 if way == "frozen" else (0, 1)

    def with_ring(ring):
        """The gradients, and the kinds of collectives of their program."""
        profile = dataclasses.replace(
            DEVICES["wide"], chunk_tokens=128, block_width=2048, ring=ring
        )
        monkeypatch.setitem(profiles.PROFILES, "wide", profile)
        gradients = jax.jit(jax.grad(loss, wrt))
        with tiles_of("wide"):
            found = ops(gradients, hidden, kernel, mesh=parallel.mesh)
            return gradients(hidden, kernel), found

    around, found = with_ring(4)
    at_once, without = with_ring(0)
    # dhidden is summed over the tensor axis, dkernel over the others
    rings = parallel.tensor_size > 1 or way != "frozen"
    assert ("collective-permute" in found - without) == rings
    for x in jax.tree.leaves(around):
        x = np.asarray(x, np.float32)
        assert np.isfinite(x).all()
        assert x.any()
    assert_trees_close(around, at_once, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "fsdp=4,tp=2", "cp=8"])
@pytest.mark.parametrize(
    "form", [{}, {"layout": "vh"}, {"with_where": True}, {"lora": True}], ids=str
)
def test_gradients_beside_float64(mesh, form, monkeypatch):
    """With columns and features enough for each device to have a share."""
    monkeypatch.setattr(head_cases, "H", 512)
    monkeypatch.setitem(
        profiles.PROFILES, "wide", dataclasses.replace(DEVICES["wide"], block_width=4096, ring=8)
    )
    arrays = head_cases.head_arrays(4096, scale=1 / 22, **form)
    options = {"layout": form["layout"]} if "layout" in form else {}
    parallel = make_parallel_mesh(mesh)
    head_cases.check_head([parallel], arrays, device="wide", entropy="bonus", **options)


@pytest.mark.parametrize("memory", [None, 2_500_000])  # one pass, two
def test_second_derivatives_are_refused(memory):
    """By name, as where no sum goes around."""
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    hidden = jnp.ones((2, 64, 512), jnp.bfloat16)
    kernel = jnp.ones((512, 1024), jnp.bfloat16)
    targets = jnp.zeros((2, 64), jnp.int32)
    weights = jnp.ones((2, 64))
    batch = RolloutBatch(
        *[targets] * 4, weights, targets, advantages=weights, old_log_probs=-6 * weights
    )

    def loss(hidden):
        return policy_loss_from_hidden(
            hidden, kernel, batch, PolicyLossConfig(), parallel=parallel, memory=memory
        )[0]

    with (
        tiles_of("wide"),
        pytest.raises(NotImplementedError, match="second derivatives of a loss from hidden states"),
    ):
        jax.make_jaxpr(jax.jacfwd(lambda x: jax.grad(loss)(x).astype(jnp.float32).sum()))(hidden)
