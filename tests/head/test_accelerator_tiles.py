"""The tiles that accelerators use, made small for CPUs: chunks of tokens times a device's part
of the vocabulary.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import OPTIONS, check_head, head_arrays, tiles_of
from hidden_loss_cases import ADAPTERS, BATCH, HIDDEN, KERNEL, T, bonus_and_kl, make_batch, step

from jaxppo import Head, PolicyLossConfig, RolloutBatch, policy_loss_from_hidden, policy_losses
from jaxppo.head import sums
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.audit.program import hang_risks, notes
from sharding.testing import assert_trees_close

MESHES = {"mixed": "dp=2,cp=2,tp=2", "tensor": "tp=8", "fsdp": "fsdp=4,tp=2"}
# a bias gradient sums 64 terms in another order than the blocks do
TOLERANCES = {"rtol": 5e-6, "atol": 1e-5}


pytestmark = pytest.mark.usefixtures("nothing_is_read_that_was_not_written")


def mesh_of(name):
    return name and make_parallel_mesh(MESHES[name])


SOME = ("plain", "softcap", "vh", "where", "keep, where", "padding", "lora", "temperatures")


@pytest.mark.every(21)
@pytest.mark.parametrize(
    "name", [n if n in SOME else pytest.param(n, marks=pytest.mark.nightly) for n in OPTIONS]
)
def test_two_passes(name):
    of_arrays, options = OPTIONS[name]
    meshes = [None, mesh_of("mixed")]
    check_head(
        meshes,
        head_arrays(1026, **of_arrays),
        entropy="bonus",
        **TOLERANCES,
        **{**options, "device": "wide"},
    )


@pytest.mark.parametrize("layout", ["hv", "vh"])
def test_two_passes_where_each_device_has_a_window_of_the_columns(layout):
    check_head(
        [mesh_of("mixed")],
        head_arrays(1003, layout=layout),
        entropy="bonus",
        layout=layout,
        device="wide",
    )


WAYS = {
    "all tokens": ({"follow_mask": False}, "wide", "one pass, 8 tokens x 1003 columns"),
    "the tokens that count": ({}, "wide", "one pass, 8 tokens x 1003 columns"),
    "sums in the parameter's dtype": (
        {"gradient_sum_dtype": "parameter"},
        "wide",
        "one pass, 8 tokens x 1003 columns",
    ),
    "a GPU": ({}, "like a GPU", "one pass, 8 tokens x 1003 columns"),
    "groups": ({}, "groups", "one pass, 4 tokens x 1003 columns, groups of 48 tokens"),
    "groups of all": (
        {"follow_mask": False},
        "groups",
        "one pass, 4 tokens x 1003 columns, groups of 48 tokens",
    ),
}


@functools.cache
def on_one_cpu():
    return jax.jit(lambda h, k: step(None, h, k, config=bonus_and_kl()))(HIDDEN, KERNEL)


@pytest.mark.every(4)
@pytest.mark.parametrize(
    "mesh",
    [None, "mixed", *(pytest.param(m, marks=pytest.mark.nightly) for m in ("tensor", "fsdp"))],
)
@pytest.mark.parametrize("way", WAYS)
def test_one_pass(mesh, way):
    options, device, note = WAYS[way]
    config = bonus_and_kl()
    parallel = mesh_of(mesh)

    def run(h, k):
        return step(parallel, h, k, config=config, **{"memory": None, **options})

    program = jax.jit(run)
    with tiles_of(device):
        got = program(HIDDEN, KERNEL)
        traced = program.trace(HIDDEN, KERNEL).jaxpr
    assert hang_risks(traced) == []
    if mesh is None:
        assert note in notes(traced)
    assert_trees_close(got, on_one_cpu(), rtol=2e-5, atol=3e-6)


ONE_PASS = r"one pass, \d+ tokens x \d+ columns(, groups of \d+ tokens)?"


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2", "cp=8", "tp=8"])
@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("device", ["wide", "groups"])
def test_one_pass_beside_float64(device, layout, mesh):
    check_beside_float64(device, layout, mesh, 64, {}, ONE_PASS)


# 600 tokens: the last chunk of each walk has padding
PADDED = {
    "wide": ({"follow_mask": False}, r"one pass, \d+ tokens x 1024 columns"),
    "groups": (
        {"follow_mask": False},
        r"one pass, \d+ tokens x 1024 columns, groups of \d+ tokens",
    ),
    "small": ({"memory": 2**21}, r"gradients, \d+ tokens x \d+ columns"),
}


@pytest.mark.parametrize("device", PADDED)
def test_padded_tiles_beside_float64(device):
    check_beside_float64(device, "hv", None, 75, *PADDED[device])


@pytest.mark.parametrize("T", [12, 77, 301])
@pytest.mark.parametrize("device", ["wide", "groups", "like a GPU", "small"])
def test_any_number_of_tokens_beside_float64(device, T):
    """A chunk that does not divide what is padded for it would count tokens twice: gradients off
    by 40 to 100%.
    """
    check_beside_float64(device, "hv", None, T, {}, ONE_PASS)


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2", "cp=4,tp=2", "tp=8", "fsdp=4,tp=2"])
@pytest.mark.parametrize("layout", ["hv", "vh"])
def test_bf16_beside_float64(layout, mesh, monkeypatch):
    monkeypatch.setattr(sums, "UNIT", 16)  # shares are small enough for rings
    check_beside_float64("wide", layout, mesh, 64, {"follow_mask": False}, ONE_PASS, "bfloat16")


def check_beside_float64(device, layout, mesh, T, options, tiles, dtype="float32"):
    """REINFORCE with an entropy bonus, whose gradient is written out in numpy; with rings
    wherever there is a mesh.
    """
    rng = np.random.default_rng(0)
    R, H, V, coef = 8, 512, 1024, 0.1
    hidden = rng.normal(size=(R, T, H))
    kernel = rng.normal(size=(H, V)) / 22
    targets = rng.integers(0, V, (R, T))
    advantages = rng.normal(size=(R, T))
    mask = rng.random((R, T)) < 0.6
    mask[:, -1] = False
    hidden = hidden.astype(jnp.dtype(dtype))
    kernel = kernel.astype(jnp.dtype(dtype))
    ids = np.ones((R, T), np.int32)
    batch = RolloutBatch(
        ids,
        targets.astype(np.int32),
        ids,
        np.tile(np.arange(T, dtype=np.int32), (R, 1)),
        mask.astype(np.float32),
        np.arange(R, dtype=np.int32)[:, None],
        advantages=advantages.astype(np.float32),
    )
    config = PolicyLossConfig(policy_losses.Reinforce(), entropy_coef=coef, ratio_to="current")
    parallel = mesh and make_parallel_mesh(mesh)

    def loss(hidden, kernel):
        return policy_loss_from_hidden(
            hidden, Head(kernel, layout=layout), batch, config, parallel=parallel, **options
        )[0]

    given = (hidden, kernel if layout == "hv" else kernel.T)
    gradients = jax.jit(jax.grad(loss, (0, 1)))
    with tiles_of(device):
        of_tiles = notes(gradients.trace(*given).jaxpr)
        found = gradients(*given)
    assert any(re.fullmatch(tiles, note) for note in of_tiles), of_tiles
    h = hidden.astype(np.float64).reshape(-1, H)
    k = kernel.astype(np.float64)
    z = h @ k
    log_p = (
        z
        - z.max(1, keepdims=True)
        - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True))
    )
    p = np.exp(log_p)
    counts = mask.astype(np.float64).reshape(-1, 1)
    dz = -batch.advantages.reshape(-1, 1) * (np.eye(V)[targets.reshape(-1)] - p)
    dz = (dz + coef * p * (log_p - (p * log_p).sum(1, keepdims=True))) * counts / counts.sum()
    dkernel = h.T @ dz
    expected = (dz @ k.T).reshape(R, T, H), dkernel if layout == "hv" else dkernel.T
    if dtype == "float32":
        return assert_trees_close(found, expected, rtol=2e-5, atol=3e-6)
    # gradients of logits and of arrays are rounded to 8 bits
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            np.asarray(x, np.float64), y, rtol=2**-7, atol=2**-9 * np.abs(y).max()
        )


def test_work_follows_the_tokens_that_count():
    batch = make_batch((BATCH.loss_mask * 0).at[0].set(1))
    with tiles_of("wide"):
        found = audit(lambda h, k, b: step(None, h, k, b, memory=None), HIDDEN, KERNEL, batch)
    assert found.flops.low == 0
    assert found.flops.high == pytest.approx(3 * 2 * 512 * 16 * 1003)
    assert T == 64


def test_products_behind_the_loop_are_of_the_chunks_that_count():
    """What the loop did not write is NaN, and must not reach a product."""

    def mask_of(count):
        return (jnp.arange(512) < count).astype(jnp.float32).reshape(BATCH.loss_mask.shape)

    def on(device):
        with tiles_of(device):
            program = jax.jit(
                lambda mask: step(None, HIDDEN, KERNEL, make_batch(mask), memory=None)
            )
            return program.lower(mask_of(0)).compile()

    by_device = {device: on(device) for device in ("wide", "groups", "like a GPU", "small")}
    for count in (0, 1, 16, 17, 128, 129, 300, 512):
        *found, expected = (program(mask_of(count)) for program in by_device.values())
        for got in found:
            assert_trees_close(got, expected, rtol=2e-5, atol=3e-6, context=f"{count} tokens")


def with_adapters(parallel, layout, **options):
    """The gradients of the kernel and its adapters."""
    kernel = KERNEL if layout == "hv" else KERNEL.T

    @jax.jit
    def run(kernel, lora):
        config = bonus_and_kl()
        return step(parallel, HIDDEN, kernel, config=config, lora=lora, layout=layout, **options)

    return run(kernel, ADAPTERS)


@functools.cache
def with_adapters_on_one_cpu(layout):
    return with_adapters(None, layout)


@pytest.mark.every(3)
@pytest.mark.parametrize("mesh", [None, "mixed"])
@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("way", ["all tokens", "the tokens that count", "groups"])
def test_one_pass_with_adapters(way, layout, mesh):
    options, device, _ = WAYS[way]
    with tiles_of(device):
        got = with_adapters(mesh_of(mesh), layout, **{"memory": None, **options})
    expected = with_adapters_on_one_cpu(layout)
    assert_trees_close(got, expected, rtol=2e-5, atol=3e-6)


@pytest.mark.every(2)
@pytest.mark.parametrize("device", ["small", "wide"])
def test_a_kernel_that_varies_before_a_scan_is_summed_once_a_step(device):
    """In a caller's own `shard_map`: each device adds up its micro-batches' gradients, and
    devices are summed once.
    """
    mesh = make_parallel_mesh("dp=2,cp=2,tp=2")
    config = bonus_and_kl()
    kernel = KERNEL[:, :1000]
    batch = dataclasses.replace(BATCH, targets=jnp.minimum(BATCH.targets, 999))

    def local(hidden, kernel, batch):
        kernel = jax.lax.pcast(kernel, ("dp", "cp"), to="varying")

        def add(total, _):
            def loss(k):
                return policy_loss_from_hidden(hidden, k, batch, config, parallel=mesh.axes)[0]

            return total + jax.grad(loss)(kernel), None

        return jax.lax.psum(
            jax.lax.scan(add, jnp.zeros_like(kernel), None, length=3)[0], ("dp", "cp")
        )

    specs = (mesh.hidden_spec, mesh.kernel_spec(), batch.specs(mesh))
    step = jax.jit(
        jax.shard_map(local, mesh=mesh.mesh, in_specs=specs, out_specs=mesh.kernel_spec())
    )

    def put(x, spec):
        return jax.device_put(x, mesh.sharding(spec))

    arrays = jax.tree.map(put, (HIDDEN, kernel, batch), specs)
    with tiles_of(device):
        found = audit(step, *arrays)
        got = step(*arrays)
    of_kernel = [
        c for c in found.collectives if c.bytes >= 4 * 16 * 100 and set(c.axes) & {"dp", "cp"}
    ]
    assert [c.in_loop for c in of_kernel] == [False]
    alone = jax.grad(lambda k: policy_loss_from_hidden(HIDDEN, k, batch, config)[0])
    assert_trees_close(got, 3 * jax.jit(alone)(kernel), rtol=2e-5, atol=1e-5)


@functools.cache
def gradients_of_one_row(device, mesh):
    """A compiled function of hidden states, a kernel and a batch, which are one row."""
    parallel = mesh and make_parallel_mesh(mesh)

    def loss(hidden, kernel, batch):
        config = PolicyLossConfig()
        return policy_loss_from_hidden(hidden, kernel, batch, config, parallel=parallel)[0]

    gradients = jax.jit(jax.grad(loss, (0, 1)))

    def run(*arrays):
        with tiles_of(device):
            return gradients(*arrays)

    return run


@pytest.mark.parametrize("count", [1, 90, 130])
def test_gradients_of_rows_behind_the_last_written_chunk(count):
    """Chunks are 8 tokens, and quarters of them 120: rows that nothing has written are beside
    rows that count.
    """
    N, H, V = 480, 16, 256
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, N, H))
    kernel = jax.random.normal(keys[1], (H, V))
    ids = jax.random.randint(keys[2], (1, N), 0, V)
    ones = jnp.ones((1, N))
    mask = (jnp.arange(N) % (N // count) == 0)[None].astype(jnp.float32)
    batch = RolloutBatch(
        ids, ids, ids * 0 + 1, jnp.arange(N)[None], mask, ids[:, :1] * 0, advantages=ones
    )
    batch = dataclasses.replace(batch, old_log_probs=-5 * ones, real_last_targets=True)
    expected = gradients_of_one_row("cpu", None)(hidden, kernel, batch)
    found = gradients_of_one_row("wide", "tp=8")(hidden, kernel, batch)
    assert_trees_close(found, expected, **TOLERANCES)
