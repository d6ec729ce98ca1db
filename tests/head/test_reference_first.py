"""Sums of exponentials relative to the target's logit, which is known before the product; bf16 operands alone."""

import dataclasses
import functools
import math

import head_cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import DEVICES, F32, check_head, head_arrays, tiles_of
from jax.experimental import topologies
from jax.sharding import Mesh

from jaxppo import Head, PolicyLossConfig, RolloutBatch, log_probs_from_hidden, policy_loss_from_hidden
from jaxppo.head import call as calls
from jaxppo.head import reductions
from jaxppo.sharding import ParallelMesh, make_parallel_mesh
from jaxppo.sharding.testing import assert_trees_close
from sharding.audit import audit
from sharding.audit.program import hang_risks, notes

T, H, V = 64, 128, 1024
TARGET, LIKELIEST = 300, 700
COLUMNS = {"layout": "hv"}
CASES = {
    "plain": ({}, {}),
    "a mask": ({"with_where": True}, {}),
    "adapters and temperatures": ({"lora": True, "temperatures": True}, {}),
    "far from the target": ({"scale": 10.0}, {}),
    "padding": ({"last": 1000}, {"vocab_size": 1000}),
    "a soft-cap": ({}, {"softcap": 2.0}),
    "a nucleus": ({"nucleus": 5}, {}),  # this one takes the maximum
    "several chunks": ({}, {"device": "wide"}),
    "several chunks, far from the target": ({"scale": 10.0}, {"device": "wide"}),
    "several chunks, far from the target, a mask": ({"scale": 10.0, "with_where": True}, {"device": "wide"}),
    "a kernel [H, V]": ({}, COLUMNS),
    "columns of adapters, a mask": ({"lora": True, "with_where": True}, COLUMNS),
}
MESHES = [None, "dp=2,cp=2,tp=2", "tp=8", "fsdp=4,tp=2"]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    of_arrays, options = CASES[name]
    options = {"entropy": "bonus", "device": "eighths", "layout": "vh", **options}
    arrays = head_arrays(1032, layout=options["layout"], dtype="bfloat16", **of_arrays)
    meshes = [mesh and make_parallel_mesh(mesh) for mesh in (MESHES if name in ("plain", "a mask") else MESHES[:2])]
    check_head(meshes, arrays, rtol=2**-8, atol=2**-7, **options)


@pytest.mark.parametrize("form", [{}, {"with_where": True}, {"lora": True, "last": 1000}], ids=str)
@pytest.mark.parametrize("columns", [2**20, 600, 400])  # of a block
def test_references_of_columns(form, columns, monkeypatch):
    """A kernel [H, V] gives 128 features of a block of columns at a time; the last of three blocks overlaps another."""
    monkeypatch.setattr(head_cases, "H", 256)
    monkeypatch.setitem(calls.PROFILES, "eighths", dataclasses.replace(DEVICES["eighths"], tile=1024 * columns))
    arrays = head_arrays(1033, dtype="bfloat16", scale=1 / 16, **form)
    meshes = [None, make_parallel_mesh("dp=2,cp=2,tp=2"), make_parallel_mesh("fsdp=8")]
    options = {"vocab_size": form["last"]} if "last" in form else {}
    check_head(meshes, arrays, rtol=2**-8, atol=2**-7, entropy="bonus", device="eighths", **options)


def of_gaps(gaps, dtype="bfloat16"):
    """Hidden states `[1, T, H]` and a kernel `[V, H]`: one logit is above the target's by the given gap."""
    hidden = np.zeros((1, T, H), np.float32)
    hidden[0, :, 0], hidden[0, :, 1] = 1, gaps
    kernel = np.zeros((V, H), np.float32)
    kernel[:, 0] = np.linspace(-2, 0, V)
    kernel[TARGET, 0], kernel[LIKELIEST, 1] = 0.5, 1
    return jnp.asarray(hidden, dtype), jnp.asarray(kernel, dtype)


@functools.partial(jax.jit, static_argnames=("parallel", "logit_stats", "deterministic"))
def stats_of(hidden, kernel, **options):
    targets = jnp.full(hidden.shape[:2], TARGET)
    return log_probs_from_hidden(hidden, Head(kernel, layout="vh"), targets, entropy="metric", **options)


def expected(hidden, kernel):
    """log-prob, entropy, log z and mean logit in f64."""
    z = np.asarray(hidden, np.float64)[0] @ np.asarray(kernel, np.float64).T
    m = z.max(1, keepdims=True)
    log_z = m + np.log(np.exp(z - m).sum(1, keepdims=True))
    log_p = z - log_z
    return log_p[:, TARGET], -(np.exp(log_p) * log_p).sum(1), log_z[:, 0], z.mean(1)


GAPS = [0, 4, 8, 12, 15, 16, 17, 24, 40, 80, 88, 96, 200, 1000, 10000, -50]


@pytest.mark.parametrize("mesh", [None, "tp=8"])
def test_any_gap(mesh):
    """Without the second product gaps of 96 and more give inf and NaN, and 80 costs an entropy 2e-5."""
    hidden, kernel = of_gaps(np.resize(GAPS, T))
    with tiles_of("eighths"):
        options = {"logit_stats": ("log_z", "mean_logit", "accuracy")}
        got = stats_of(hidden, kernel, parallel=mesh and make_parallel_mesh(mesh), **options)
    log_probs, entropy, log_z, mean_logit = expected(hidden, kernel)
    np.testing.assert_allclose(got.log_probs[0], log_probs, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(got.entropy[0], entropy, rtol=1e-6, atol=4e-6)
    np.testing.assert_allclose(got.log_z[0], log_z, rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(got.mean_logit[0], mean_logit, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got.accuracy[0], np.resize([gap <= 0 for gap in GAPS], T))
    assert (got.log_probs <= 0).all()


def test_no_token_changes_the_bits_of_another():
    near, far = (of_gaps(np.where(np.arange(T) == 5, gap, 3.0)) for gap in (3.0, 500.0))
    with tiles_of("eighths"):
        a, b = (stats_of(*x) for x in (near, far))
    others = np.arange(T) != 5
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x[0, others], y[0, others])


def test_which_tokens_are_computed_again(monkeypatch):
    """Those whose maximum is more than 16 above the target's logit. All are found; no bit of the others changes."""
    gaps = np.resize([3.0, 14.0, 18.0, 200.0], T)
    arrays = of_gaps(gaps)
    with tiles_of("eighths"):
        found = stats_of(*arrays)
        monkeypatch.setattr(reductions, "FARTHEST", math.inf)
        jax.clear_caches()
        without = stats_of(*arrays)
    jax.clear_caches()
    near, far = gaps < 16, gaps > 100
    np.testing.assert_array_equal(found.entropy[0, near], without.entropy[0, near])
    assert (found.entropy[0, gaps == 18] != without.entropy[0, gaps == 18]).any()
    assert np.isfinite(found.entropy).all()
    assert not np.isfinite(without.entropy[0, far]).any()


def step(hidden, kernel, parallel=None, layout="vh", **options):
    ids, ones, zero = jnp.full((1, T), TARGET), jnp.ones((1, T)), jnp.zeros((1, 1), jnp.int32)
    batch = RolloutBatch(ids, ids, ids // TARGET, jnp.arange(T)[None], ones, zero, advantages=ones, old_log_probs=-ones)
    head = Head(kernel if layout == "vh" else kernel.T, layout=layout)
    config = PolicyLossConfig(entropy_coef=0.01)
    return policy_loss_from_hidden(hidden, head, batch, config, parallel=parallel, **options)[0]


def program(dtype="bfloat16", device="eighths", **options):
    with tiles_of(device):
        gradient = jax.grad(lambda *args: step(*args, **options), (0, 1))
        return jax.make_jaxpr(gradient)(*of_gaps(np.zeros(T), dtype))


def test_who_keeps_the_maximum():
    """f32 operands keep it for their accuracy; so do calls with deterministic=True, and sums that read logits twice."""
    again = "rarely: sums of tokens far from their maximum"
    assert again in notes(program())
    assert again not in notes(program("float32"))
    assert again not in notes(program(deterministic=True))
    assert again not in notes(program(nucleus_ids=jnp.zeros((1, T, 2), jnp.int32)))
    assert again in notes(program(layout="hv"))


def test_no_collective_depends_on_a_gap():
    assert hang_risks(program(parallel=make_parallel_mesh("cp=4,tp=2"))) == []


def test_one_pass_is_two():
    arrays = of_gaps(np.resize(GAPS, T))
    with tiles_of("eighths"):
        one, two = (
            jax.jit(jax.value_and_grad(lambda *args, m=memory: step(*args, memory=m), (0, 1)))(*arrays)
            for memory in (2**30, 2**19)
        )
    assert_trees_close(one, two, rtol=2**-7, atol=F32["atol"])


GEMMA = 262208, 2560  # the columns and features of Gemma 3 4B's head


@pytest.mark.parametrize(
    ("device", "cut", "masked", "options"),
    [
        ("TPU v6 lite", "2048 tokens x 65552 columns", False, {}),
        ("TPU v6e", "2048 tokens x 65552 columns", False, {}),
        ("TPU v5", "1024 tokens x 65552 columns", False, {}),
        ("TPU v6 lite", "1024 tokens x 65552 columns", True, {}),
        ("TPU v6 lite", "512 tokens x 65552 columns", False, {"logit_stats": ("accuracy",)}),
        ("TPU v6 lite", "2048 tokens x 65552 columns", False, {"logit_stats": ("log_z",), "memory": 2**30}),
        ("TPU v6 lite", "256 tokens x 65552 columns", False, {"memory": 2**26 + 2**22}),
        ("TPU v6 lite", "1024 tokens x 2304 columns", False, {"memory": 2**25}),
    ],
)
def test_all_columns_where_the_sums_are_a_part_of_the_product(device, cut, masked, options):
    """Tokens become fewer before columns do: with a maximum, which is read from memory, or a small `memory`."""
    hidden = jax.ShapeDtypeStruct((1, 8192, GEMMA[1]), jnp.bfloat16)
    kernel = jax.ShapeDtypeStruct((GEMMA[0] // 4, GEMMA[1]), jnp.bfloat16)

    def forward(hidden, kernel):
        where = hidden[..., 0] > 0 if masked else None
        targets = jnp.zeros(hidden.shape[:2], jnp.int32)
        return log_probs_from_hidden(hidden, Head(kernel, layout="vh"), targets, where=where, **options)

    with tiles_of(device):
        found = notes(jax.make_jaxpr(forward)(hidden, kernel))
    assert f"forward, {cut}" in found


def test_tiles_of_any_number_of_tokens_are_equal():
    """10000 tokens are 3 groups of 2 chunks, or 5 tiles of the forward and 2 of the gradients."""
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 10000, 4096), (4096, 37984))]
    ids, ones = jnp.ones((1, 10000), jnp.int32), jnp.ones((1, 10000))

    def one_pass(hidden, kernel):
        batch = RolloutBatch(*[ids] * 4, ones, ids[:, :1], advantages=ones, old_log_probs=-ones)
        return policy_loss_from_hidden(hidden, kernel, batch, PolicyLossConfig())[0]

    def two_passes(hidden, kernel):
        return log_probs_from_hidden(hidden, kernel, ids).log_probs.sum()

    expected = {
        one_pass: ["one pass, 1792 tokens x 37984 columns, products of 3584 tokens"],
        two_passes: ["forward, 2048 tokens x 37984 columns", "gradients, 5120 tokens x 2944 columns"],
    }
    with tiles_of("TPU v6 lite"):
        for loss, tiles in expected.items():
            found = notes(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*shapes))
            assert [note for note in found if "tokens x" in note] == tiles


@pytest.mark.parametrize("accuracy", [False, True])
def test_no_block_of_a_tied_kernel_is_copied(accuracy):
    """Blocks of columns would be, for every tile of tokens: 8.4 of 13 ms on a v6e, and a block's bytes beside them."""
    devices = topologies.get_topology_desc("v6e:4x4", platform="tpu").devices
    parallel = ParallelMesh(Mesh(np.array(devices).reshape(4, 4), ("cp", "tp")))

    def forward(hidden, kernel, targets):
        options = {"entropy": "metric", "logit_stats": ("accuracy",) if accuracy else ()}
        return log_probs_from_hidden(hidden, Head(kernel, layout="vh"), targets, parallel=parallel, **options)

    def described(dtype, spec, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.sharding(spec))

    hidden = described(jnp.bfloat16, parallel.hidden_spec, 1, 4 * 8192, GEMMA[1])
    kernel = described(jnp.bfloat16, parallel.kernel_spec("vh"), *GEMMA)
    found = audit(forward, hidden, kernel, described(jnp.int32, parallel.tokens_spec, 1, 4 * 8192))
    assert found.time.copies < 0.4
    assert found.time.compute < (9 if accuracy else 4.5)
    assert found.temp_bytes < (0.15 if accuracy else 0.03) * 2**30
