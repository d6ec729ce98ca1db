"""Two passes whose first keeps its products: values and gradients against float64, the program,
and when they do.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_flops import compiled_flops
from head_cases import (
    BF16,
    OPTIONS,
    H,
    R,
    T,
    call_head,
    check_head,
    head_arrays,
    reference_program,
    tiles_of,
    with_gradients,
)
from hidden_loss_cases import BATCH, HIDDEN, KERNEL, step
from programs import float16_compiles

from jaxppo import (
    GSPO,
    Head,
    PolicyLossConfig,
    RolloutBatch,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.audit.program import hang_risks, notes
from sharding.testing import assert_trees_close, factorings

KEPT = {"memory": 2**30}  # which `log_probs_from_hidden` does not keep anything without
MIXED = "dp=2,cp=2,tp=2"
# a bias gradient sums 64 terms in another order than the reference
TOLERANCES = {"rtol": 5e-6, "atol": 1e-5}


pytestmark = pytest.mark.usefixtures("nothing_is_read_that_was_not_written")


def meshes(*names, **options):
    return [name and make_parallel_mesh(name, **options) for name in names]


SOME = (None, MIXED, "tp=8", "cp=8", "fsdp=4,tp=2")


@pytest.mark.parametrize(
    "mesh",
    [
        m if m in SOME else pytest.param(m, marks=pytest.mark.nightly)
        for m in (*SOME, *factorings(8))
    ],
)
def test_every_factoring(mesh):
    """Chunks of 8 tokens, of which those that count are first; rows without loss hold NaN."""
    arrays = head_arrays(97, with_where=True)
    check_head(meshes(mesh), arrays, entropy="bonus", device="wide", **TOLERANCES, **KEPT)


@pytest.mark.every(10)
@pytest.mark.parametrize(("name", "device"), list(itertools.product(OPTIONS, ("wide", "five"))))
def test_options(name, device):
    of_arrays, options = OPTIONS[name]
    options = {**options, "device": device, **KEPT}
    check_head(
        meshes(None, MIXED),
        head_arrays(1026, **of_arrays),
        entropy="bonus",
        **TOLERANCES,
        **options,
    )


def test_everything_at_once():
    arrays = head_arrays(
        1000, layout="vh", with_where=True, nucleus=7, last=990, lora=True, temperatures=True
    )
    options = {
        "layout": "vh",
        "softcap": 40.0,
        "vocab_size": 990,
        "logit_stats": ("log_z", "accuracy"),
        "top_k": 2,
    }
    found = meshes("tp=8", "fsdp=2,cp=2,tp=2", explicit=True) + meshes(
        MIXED, sequence_parallel=True
    )
    check_head(found, arrays, entropy="bonus", device="wide", **TOLERANCES, **options, **KEPT)


@pytest.mark.parametrize("device", ["five", "like a GPU"])
def test_bf16(device):
    arrays = head_arrays(1026, dtype="bfloat16", with_where=True)
    check_head(meshes(None, MIXED), arrays, entropy="bonus", device=device, **BF16, **KEPT)


def test_rounded_logits():
    """Kept products are not rounded: they are the numbers that would be computed again."""
    arrays = head_arrays(1026, bias=False)

    def gradient(**options):
        def loss(hidden, kernel):
            head = Head(kernel, logits_dtype="bfloat16", softcap=20.0)
            stats = log_probs_from_hidden(
                hidden, head, arrays["targets"], entropy="bonus", **options
            )
            return ((stats.log_probs * arrays["g"]) + (stats.entropy * arrays["e"])).sum()

        return jax.jit(jax.value_and_grad(loss, (0, 1)))(arrays["hidden"], arrays["kernel"])

    assert_trees_close(gradient(**KEPT), gradient(), **TOLERANCES)


@pytest.mark.parametrize("entropy", ["none", "metric"])
def test_entropy_without_gradient(entropy):
    check_head(meshes(MIXED), head_arrays(97), entropy=entropy, device="wide", **TOLERANCES, **KEPT)


@pytest.mark.parametrize("wrt", [("hidden",), ("kernel",), ("hidden", "bias")])
def test_some_of_the_gradients(wrt):
    check_head(
        meshes(MIXED), head_arrays(97), wrt, entropy="bonus", device="wide", **TOLERANCES, **KEPT
    )


@pytest.mark.parametrize("mesh", [None, MIXED])
def test_nothing_in_a_row_without_cotangent_matters(mesh):
    """A mask of cotangents alone, which the order of tokens does not follow."""
    parallel = meshes(mesh)[0]
    arrays = head_arrays(97)

    def call(parallel, arrays, **options):
        return jax.tree.map(lambda x: x.at[2].set(0), call_head(parallel, arrays, **options))

    run = jax.jit(
        lambda a: with_gradients(call, parallel, a, entropy="bonus", device="wide", **KEPT)
    )
    spoiled = {
        **arrays,
        "hidden": arrays["hidden"].at[2].set(jnp.nan),
        "targets": arrays["targets"].at[2].set(-100),
    }
    assert_trees_close(run(spoiled), run(arrays), 0, 0)


def test_no_token_counts():
    arrays = head_arrays(97)
    arrays |= {"where": jnp.zeros((R, T), bool), "hidden": jnp.full_like(arrays["hidden"], jnp.nan)}
    mesh = meshes(MIXED)[0]
    found = jax.jit(
        lambda a: with_gradients(call_head, mesh, a, entropy="bonus", device="wide", **KEPT)
    )(arrays)
    for leaf in jax.tree.leaves(found):
        np.testing.assert_array_equal(leaf, 0)


def loss_of(arrays, **options):
    def loss(wanted):
        stats = call_head(None, {**arrays, **wanted}, entropy="bonus", device="wide", **options)
        return (stats.log_probs * arrays["g"]).sum() + (stats.entropy * arrays["e"]).sum()

    return loss


def test_under_remat_scan_and_vmap():
    arrays = head_arrays(97, with_where=True, bias=False)
    given = {n: arrays[n] for n in ("hidden", "kernel")}
    expected = jax.jit(jax.grad(loss_of(arrays)))(given)
    kept = loss_of(arrays, **KEPT)

    def repeated(given):
        return jax.lax.scan(lambda total, _: (total + kept(given), None), 0.0, None, length=3)[0]

    def by_row(given):
        rows = {k: x[:, None] for k, x in arrays.items() if k != "kernel"}

        def one(row):
            return loss_of({**row, "kernel": given["kernel"]}, **KEPT)({})

        return jax.vmap(one)({**rows, "hidden": given["hidden"][:, None]}).sum()

    assert_trees_close(jax.jit(jax.grad(jax.checkpoint(kept)))(given), expected, **TOLERANCES)
    assert_trees_close(jax.jit(jax.grad(by_row))(given), expected, **TOLERANCES)
    three = jax.tree.map(lambda x: 3 * x, expected)
    assert_trees_close(jax.jit(jax.grad(repeated))(given), three, rtol=5e-6, atol=3e-5)


def test_a_second_derivative_is_refused():
    arrays = head_arrays(97)
    given = {n: arrays[n] for n in ("hidden", "kernel")}
    gradient = jax.grad(loss_of(arrays, **KEPT))
    for attempt in (
        lambda: jax.jvp(gradient, (given,), (given,)),
        lambda: jax.hessian(loss_of(arrays, **KEPT))(given),
    ):
        with pytest.raises(NotImplementedError, match="second derivatives"):
            attempt()


def test_float16_is_scaled_before_it_is_rounded():
    """Gradients of 1e-6 have few digits in float16; those of a scaled loss have all, since
    cotangents come first.
    """
    if not float16_compiles():
        pytest.skip("XLA compiles no float16 for this processor")
    arrays = head_arrays(97, dtype="float16", bias=False)
    given = {n: arrays[n] for n in ("hidden", "kernel")}

    def gradient(scale, **options):
        return jax.jit(jax.grad(lambda x: scale * 2e-5 * loss_of(arrays, **options)(x)))(given)

    scaled = gradient(2.0**15, **KEPT)
    again = gradient(2.0**15)
    reference = reference_program(call_head, ("hidden", "kernel"), (("entropy", "bonus"),))
    exact = reference(arrays)[1]
    for name in given:
        truth = np.asarray(exact[name], np.float64) * 2e-5 * 2**15
        for found in (scaled, again):
            error = np.linalg.norm(np.asarray(found[name], np.float64) - truth) / np.linalg.norm(
                truth
            )
            assert error < 3 * 2**-11


# The program


def test_three_products_instead_of_four():
    """A kernel that is frozen has no product of its own, and log-probs alone keep nothing."""
    arrays = {
        name: x
        for name, x in head_arrays(1024).items()
        if name in ("hidden", "kernel", "targets", "g", "e")
    }
    product = 2 * R * T * H * 1024

    @functools.cache
    def program(wrt, **options):
        return audit(jax.grad(loss_of(arrays, **options)), {n: arrays[n] for n in wrt})

    for wrt, kept, again in (
        (("hidden", "kernel"), 3, 4),
        (("hidden",), 2, 3),
        (("kernel",), 2, 3),
    ):
        for options, count in ((KEPT, kept), ({}, again)):
            found = program(wrt, **options)
            assert found.flops.low == found.flops.high == pytest.approx(count * product, rel=0.01)
            assert compiled_flops(found.text) == pytest.approx(count * product, rel=0.01)
    assert program(("hidden", "kernel"), **KEPT).notes == ("kept logits, 64 tokens x 1024 columns",)
    alone = audit(lambda a: loss_of(a, **KEPT)({}), arrays)
    assert alone.flops.high == product
    assert "f32[64,1024]" in program(("hidden",), **KEPT).text
    assert "f32[64,1024]" not in alone.text


def test_the_work_follows_a_mask():
    arrays = head_arrays(1024, with_where=True, bias=False)
    found = audit(jax.grad(loss_of(arrays, **KEPT)), {n: arrays[n] for n in ("hidden", "kernel")})
    assert found.flops.low == 0
    assert found.flops.high == pytest.approx(3 * 2 * R * T * H * 1024)


@pytest.mark.parametrize("mesh", [MIXED, "tp=8", "fsdp=4,tp=2", "cp=8"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_device_is_left_waiting(mesh, sequence_parallel):
    parallel = make_parallel_mesh(mesh, sequence_parallel=sequence_parallel)
    arrays = head_arrays(1024, with_where=True)
    run = functools.partial(
        with_gradients, call_head, parallel, entropy="bonus", device="wide", **KEPT
    )
    assert hang_risks(jax.make_jaxpr(run)(arrays)) == []


def test_losses_of_whole_sequences_keep_logits_by_default():
    """`log_probs_from_hidden` does not: what it keeps lives until its caller's backward, and
    calls may be many.
    """
    kept = "kept logits, 512 tokens x 1003 columns"

    def of_loss(hidden, kernel):
        return step(None, hidden, kernel, config=PolicyLossConfig(GSPO()), memory=None)

    found = notes(jax.make_jaxpr(of_loss)(HIDDEN, KERNEL))
    assert found == ("two passes: the loss of a token depends on others", kept)

    def notes_with(**options):
        def total(hidden, kernel):
            return log_probs_from_hidden(hidden, kernel, BATCH.targets, **options).log_probs.sum()

        return notes(jax.make_jaxpr(jax.grad(total, (0, 1)))(HIDDEN, KERNEL))

    assert [note.split(",")[0] for note in notes_with()] == ["forward", "gradients"]
    assert [note.split(",")[0] for note in notes_with(memory=2**20)] == ["forward", "gradients"]
    assert notes_with(memory=2**25) == (kept,)
    assert not any("kept" in note for note in notes_with(memory=2**25, deterministic=True))


def test_on_an_accelerator_an_eighth_of_its_memory_decides():
    gspo = PolicyLossConfig(GSPO())
    shape = jax.ShapeDtypeStruct

    def notes_of(tokens):
        ids, one = (shape((1, n), jnp.int32) for n in (tokens, 1))
        x = shape((1, tokens), jnp.float32)
        batch = RolloutBatch(ids, ids, ids, ids, x, one, one, one, advantages=x, old_log_probs=x)

        def loss(hidden, kernel, batch):
            return policy_loss_from_hidden(hidden, kernel, batch, gspo)[0]

        arguments = shape((1, tokens, 512), jnp.bfloat16), shape((512, 2**17), jnp.bfloat16), batch
        with tiles_of("TPU v6 lite"):
            return notes(jax.make_jaxpr(jax.grad(loss, (0, 1)))(*arguments))

    # f32 logits and bf16 gradients take 3 and 6 of 4 GiB
    for tokens, is_kept in ((4096, True), (8192, False)):
        assert any(text.startswith("kept logits") for text in notes_of(tokens)) == is_kept


@pytest.mark.parametrize(
    ("tokens", "features", "columns", "mib"),
    [(512, 1024, 8192, 48), (128, 256, 32768, 56), (1000, 64, 4096, 40)],
)
@pytest.mark.parametrize("with_where", [False, True])
def test_it_stays_within_its_bytes(tokens, features, columns, mib, with_where):
    shape = jax.ShapeDtypeStruct
    hidden = shape((1, tokens, features), jnp.float32)
    kernel = shape((features, columns), jnp.float32)
    per_token = [shape((1, tokens), dtype) for dtype in (jnp.int32, jnp.float32, bool)]

    def loss(hidden, kernel, targets, weights, where):
        options = {"where": where} if with_where else {}
        stats = log_probs_from_hidden(
            hidden, kernel, targets, entropy="bonus", memory=mib * 2**20, **options
        )
        return ((stats.log_probs + stats.entropy) * weights).sum()

    found = audit(jax.grad(loss, (0, 1)), hidden, kernel, *per_token)
    assert found.notes[0].startswith("kept logits")
    assert found.temp_bytes <= mib * 2**20
