"""Heads where numbers are at an edge: soft-caps that saturate, masked columns, float16, against
float64 numpy.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import check_head, head_arrays
from oracle import head as oracle
from oracle.head import OracleHead
from programs import float16_compiles

from jaxppo import (
    PPO,
    SFT,
    Head,
    LoRA,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_hidden,
    loss_from_stats,
    policy_loss_from_hidden,
)
from jaxppo.head.profiles import profile_of
from jaxppo.losses.distillation import divergence_from_hidden
from sharding import make_parallel_mesh
from sharding.audit.program import notes as notes_in
from sharding.testing import assert_trees_close

R, T, H, V = 2, 32, 8, 40
MEMORIES = (2**30, 2**18)  # one pass, two passes


def notes_of(fn, *args):
    """The notes that an audit would show; they are in the traced program, so nothing is
    compiled.
    """
    return notes_in(jax.make_jaxpr(fn)(*args))


def batch_of(rows=R, length=T, seed=1):
    """A batch with one sample a row. All its tokens but the first have loss."""
    rng = np.random.default_rng(seed)
    samples = [
        Sample(
            rng.integers(0, V, length),
            response_start=1,
            advantages=rng.normal(size=length - 1),
            old_log_probs=old,
        )
        for old in -rng.exponential(size=(rows, length - 1)) - 1
    ]
    return RolloutBatch.from_samples(samples, row_length=length, rows=rows)


# The soft-cap


def assert_near(got, expected, size):
    assert (np.abs(np.asarray(got) - expected) < 1e-4 * size).all(), np.max(
        np.abs(got - expected) / size
    )


@pytest.mark.every(3)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("at", [1, 4, 8, 12, 16, 20])
def test_the_gradient_of_a_soft_cap_that_saturates(at, memory):
    """Computed as 1 - tanh(x)^2 in f32, it was 10% off at |x| = 8, and 0 from 10 on."""
    rng = np.random.default_rng(at)
    hidden = rng.uniform(0.97, 1, (1, T, 1))
    kernel = 3 * at * rng.choice([-1, 1], (1, V)) * rng.uniform(0.97, 1, (1, V))
    hidden, kernel = (jnp.asarray(x, jnp.float32) for x in (hidden, kernel))
    batch = batch_of(1)

    def loss(h, k):
        return loss_from_hidden(h, Head(k, softcap=3.0), batch, SFT(), memory=memory)[0]

    got = jax.jit(jax.grad(loss, (0, 1)))(hidden, kernel)
    here = np.asarray(batch.loss_mask[0]) > 0
    exact = OracleHead(np.asarray(kernel), softcap=3.0)
    rows = np.asarray(hidden[0])[here]
    targets = np.asarray(batch.targets[0])[here]
    dz = oracle.logit_gradient(oracle.logits(rows, exact), targets, by_log_prob=-1 / here.sum())
    dh, of_head = oracle.head_gradient(rows, exact, dz)
    assert np.abs(dh).min() > 0
    # by the largest terms of each sum, of either sign
    terms = np.abs(oracle.head_gradient(rows, exact, np.abs(dz))[1].kernel), np.abs(dh).max()
    assert_near(np.asarray(got[0])[0, here], dh, terms[1])
    assert_near(got[1], of_head.kernel, terms[0])


# Masked columns: a bias of -inf

SMOOTH = {"label_smoothing": 0.2, "z_loss": 1e-2}


def masked_case(share=0.3):
    """Hidden states, a kernel, a bias with -inf in columns that no token is of, and a batch."""
    rng = np.random.default_rng(2)
    bias = np.where(rng.random(V) < share, -np.inf, rng.normal(size=V))
    bias[[0, V - 1]] = -np.inf
    bias[5] = 0.5
    batch = batch_of(8, 8)
    finite = np.flatnonzero(np.isfinite(bias))
    targets = jnp.asarray(finite[np.asarray(batch.targets) % len(finite)], jnp.int32)
    batch = RolloutBatch(
        batch.tokens,
        targets,
        batch.segment_ids,
        batch.positions,
        batch.loss_mask,
        batch.sample_ids,
        advantages=batch.advantages,
        old_log_probs=batch.old_log_probs,
    )
    arrays = rng.normal(size=(8, 8, H)), rng.normal(size=(H, V)), bias
    return *(jnp.asarray(x, jnp.float32) for x in arrays), batch


def smoothed_truth(hidden, kernel, bias, batch, softcap=None):
    """The loss of label smoothing and a z-loss, and its gradients by hidden states, kernel and
    bias.
    """
    here = np.asarray(batch.loss_mask) > 0
    rows = np.asarray(hidden)[here]
    targets = np.asarray(batch.targets)[here]
    head = OracleHead(np.asarray(kernel), np.asarray(bias), softcap=softcap)
    z = oracle.logits(rows, head)
    stats = oracle.token_stats(z, targets)
    s = SMOOTH["label_smoothing"]
    weight = 1 / here.sum()
    each = (
        -(1 - s) * stats.log_probs
        + s * (stats.log_z - stats.mean_logit)
        + SMOOTH["z_loss"] * stats.log_z**2
    )
    dz = oracle.logit_gradient(
        z,
        targets,
        by_log_prob=-(1 - s) * weight,
        by_log_z=(s + 2 * SMOOTH["z_loss"] * stats.log_z) * weight,
        by_mean_logit=-s * weight,
    )
    dh, of_head = oracle.head_gradient(rows, head, dz)
    dhidden = np.zeros(hidden.shape)
    dhidden[here] = dh
    return each.sum() * weight, (dhidden, of_head.kernel, of_head.bias)


def from_logits(hidden, head, batch, parallel=None, memory=None, **options):
    logits = (
        jnp.einsum("rth,hv->rtv", hidden, head.kernel, precision="highest") + head.bias[None, None]
    )
    asked = {
        "logit_stats": ("log_z", "mean_logit"),
        "entropy": "metric",
        "where": batch.loss_mask > 0,
    }
    stats = log_probs_from_logits(logits, batch.targets, parallel=parallel, **asked)
    return loss_from_stats(stats, batch, SFT(**options), parallel=parallel)


def from_hidden(hidden, head, batch, parallel=None, memory=None, **options):
    return loss_from_hidden(hidden, head, batch, SFT(**options), parallel=parallel, memory=memory)


@pytest.mark.every(4)
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2", "fsdp=2,tp=4"])
@pytest.mark.parametrize("path", ["one pass", "two passes", "logits"])
def test_label_smoothing_beside_masked_columns(path, mesh):
    """The mean is over finite logits.

    Divided by the number of all columns, the loss was 0.2 * 0.3 of the mean off.
    """
    hidden, kernel, bias, batch = masked_case()
    parallel = mesh and make_parallel_mesh(mesh)
    loss = from_logits if path == "logits" else from_hidden
    options = {"memory": 2**15 if path == "two passes" else 2**30, "parallel": parallel, **SMOOTH}

    def call(h, k, b):
        return loss(h, Head(k, b), batch, **options)[0]

    value, gradients = jax.jit(jax.value_and_grad(call, (0, 1, 2)))(hidden, kernel, bias)
    expected, of_expected = smoothed_truth(hidden, kernel, bias, batch)
    np.testing.assert_allclose(value, expected, rtol=2e-6)
    assert_trees_close(gradients, of_expected, rtol=2e-6, atol=2e-6)
    gone = ~np.isfinite(np.asarray(bias))
    assert not np.asarray(gradients[1])[:, gone].any()
    assert not np.asarray(gradients[2])[gone].any()


@pytest.mark.parametrize("path", ["hidden", "logits"])
def test_the_mean_logit_of_each_token_is_over_its_finite_columns(path):
    hidden, kernel, bias, batch = masked_case()
    where = batch.loss_mask > 0
    if path == "hidden":
        found = log_probs_from_hidden(
            hidden, Head(kernel, bias), batch.targets, logit_stats=("mean_logit",), where=where
        )
    else:
        logits = jnp.einsum("rth,hv->rtv", hidden, kernel, precision="highest") + bias[None, None]
        found = log_probs_from_logits(
            logits, batch.targets, logit_stats=("mean_logit",), where=where
        )
    here = np.asarray(where)
    z = np.asarray(hidden, np.float64)[here] @ np.asarray(kernel, np.float64)[:, np.isfinite(bias)]
    z = z + np.asarray(bias, np.float64)[np.isfinite(bias)]
    np.testing.assert_allclose(np.asarray(found.mean_logit)[here], z.mean(-1), rtol=2e-6, atol=2e-6)


def test_masked_columns_under_logits_rounded_to_bf16():
    """The rounding computed -inf - -inf, which made every log-prob NaN."""
    hidden, kernel, bias, batch = masked_case()
    head = Head(kernel, bias, logits_dtype="bfloat16")
    keep = np.isfinite(bias)
    narrow = Head(kernel[:, keep], bias[keep], logits_dtype="bfloat16")
    places = jnp.asarray(np.cumsum(keep) - 1, jnp.int32)

    @jax.jit
    def call(head, targets):
        def total(head):
            where = batch.loss_mask > 0
            found = log_probs_from_hidden(hidden, head, targets, where=where).log_probs
            return found.sum(), found

        return jax.grad(total, has_aux=True)(head)

    gradient, found = call(head, batch.targets)
    expected, of_narrow = call(narrow, places[batch.targets])
    np.testing.assert_allclose(found, of_narrow, rtol=1e-6)
    np.testing.assert_allclose(gradient.kernel[:, keep], expected.kernel, rtol=1e-5, atol=1e-5)
    assert not np.asarray(gradient.bias)[~keep].any()


# float16

FIELDS = ("hidden", "kernel", "bias", "lora_a", "lora_b")
SCALE = 65536.0


def half_case(names):
    if not float16_compiles():
        pytest.skip("XLA compiles no float16 for this processor")
    rng = np.random.default_rng(3)
    shapes = {
        "hidden": (8, 8, H),
        "kernel": (H, V),
        "bias": (V,),
        "lora_a": (H, 2),
        "lora_b": (2, V),
    }
    lora = any(name.startswith("lora") for name in names)
    arrays = {
        k: rng.normal(size=shape) for k, shape in shapes.items() if lora or not k.startswith("lora")
    }
    return {
        k: jnp.asarray(x, jnp.float16 if k in names else jnp.float32) for k, x in arrays.items()
    }


def head_of(arrays):
    lora = LoRA(arrays["lora_a"], arrays["lora_b"], 0.5) if "lora_a" in arrays else None
    return Head(arrays["kernel"], arrays["bias"], lora)


def half_loss(batch, arrays, parallel=None, memory=2**30, scale=1.0, norm=2.0**15):
    """Each token has the weight 1 / (8 norm), by default 1 / 262144, which float16 holds with
    few digits.
    """
    config = PolicyLossConfig(
        PPO(), aggregation="sequence_mean_token_sum_norm", aggregation_norm=norm
    )
    loss = policy_loss_from_hidden(
        arrays["hidden"], head_of(arrays), batch, config, parallel=parallel, memory=memory
    )[0]
    return scale * loss


def half_truth(batch, arrays, scale):
    """The gradients of `half_loss` in closed form: no ratio is clipped, so a token's is
    -advantage * ratio.
    """
    here = np.asarray(batch.loss_mask) > 0

    def get(name):
        return None if name not in arrays else np.asarray(arrays[name], np.float64)

    head = OracleHead(get("kernel"), get("bias"), get("lora_a"), get("lora_b"), lora_scale=0.5)
    rows = get("hidden")[here]
    targets = np.asarray(batch.targets)[here]
    z = oracle.logits(rows, head)
    log_probs = oracle.token_stats(z, targets).log_probs
    ratio = np.exp(log_probs - np.asarray(batch.old_log_probs)[here])
    assert np.abs(ratio - 1).max() < 0.19
    g = -ratio * np.asarray(batch.advantages)[here] * scale / 8 / 2**15
    dh, of_head = oracle.head_gradient(rows, head, oracle.logit_gradient(z, targets, by_log_prob=g))
    hidden = np.zeros(arrays["hidden"].shape)
    hidden[here] = dh
    found = {
        "hidden": hidden,
        "kernel": of_head.kernel,
        "bias": of_head.bias,
        "lora_a": of_head.a,
        "lora_b": of_head.b,
    }
    return {name: found[name] for name in arrays}


def on_policy(batch, arrays):
    """The batch with old log-probs near the policy's own."""
    found = log_probs_from_hidden(arrays["hidden"], head_of(arrays), batch.targets).log_probs
    noise = np.random.default_rng(4).uniform(-0.15, 0.15, found.shape)
    old = jnp.where(batch.loss_mask > 0, jnp.minimum(found + noise, -1e-3), 0).astype(jnp.float32)
    return RolloutBatch(
        batch.tokens,
        batch.targets,
        batch.segment_ids,
        batch.positions,
        batch.loss_mask,
        batch.sample_ids,
        advantages=batch.advantages,
        old_log_probs=old,
    )


HALVES = [*((name,) for name in FIELDS), ("hidden", "kernel"), FIELDS]


@pytest.mark.every(5)
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("names", HALVES, ids="+".join)
def test_gradients_under_a_loss_scale_where_anything_is_float16(names, mesh):
    """One pass once rounded them before the scale, and dhidden was 4.6% off.

    Now float16 rounds three times at most.
    """
    arrays = half_case(names)
    batch = on_policy(batch_of(8, 8), arrays)
    parallel = mesh and make_parallel_mesh(mesh)
    got = jax.jit(jax.grad(lambda a: half_loss(batch, a, parallel, scale=SCALE)))(arrays)
    expected = half_truth(batch, arrays, SCALE)
    for name, truth in expected.items():
        error = np.linalg.norm(np.asarray(got[name], np.float64) - truth) / np.linalg.norm(truth)
        assert error < 3 * 2**-11, (name, error)


@pytest.mark.every(3)
@pytest.mark.parametrize("names", [names for names in HALVES if names != ("bias",)], ids="+".join)
def test_the_audit_says_that_float16_takes_two_passes(names):
    arrays = half_case(names)
    batch = batch_of(8, 8)
    gradient = jax.grad(lambda a: half_loss(batch, a))
    notes = notes_of(gradient, arrays)
    assert "two passes: float16" in notes
    assert not any(line.startswith("one pass") for line in notes)
    wide = {k: x.astype(jnp.float32) for k, x in arrays.items()}
    assert any(line.startswith("one pass, ") for line in notes_of(gradient, wide))


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize(("norm", "lost"), [(2.0**40, 0), (2.0**-25, np.inf)])
def test_a_float16_bias_takes_one_pass(norm, lost, mesh):
    """The head adds it in f32, so its gradient is rounded once, behind the loss scale; before
    it, it would be lost.
    """
    arrays = half_case(("bias",))
    batch = on_policy(batch_of(8, 8), arrays)
    parallel = mesh and make_parallel_mesh(mesh)
    wide = {k: x.astype(jnp.float32) for k, x in arrays.items()}

    def gradient(arrays, scale):
        return jax.grad(lambda a: half_loss(batch, a, parallel, scale=scale, norm=norm))(arrays)

    program = jax.jit(gradient)
    notes = notes_of(program, arrays, norm)
    assert any(line.startswith("one pass, ") for line in notes)
    assert not any(line.startswith("two passes") for line in notes)
    half, exact, unscaled = (
        program(given, scale)["bias"]
        for given, scale in ((arrays, norm), (wide, norm), (wide, 1.0))
    )
    assert half.dtype == jnp.float16
    assert np.isfinite(half).all()
    np.testing.assert_array_equal(half, exact.astype(jnp.float16))
    assert (np.abs(unscaled.astype(jnp.float16)) == lost).mean() > 0.9


@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_a_temperature_where_tokens_fill_a_chunk(options):
    """What fills it had the temperature 0, and the gradient of every parameter was NaN: 56
    tokens in chunks of 5.
    """
    arrays = head_arrays(1000, temperatures=True)
    arrays = {name: x[:, :7] if x.shape[:2] == (8, 8) else x for name, x in arrays.items()}
    check_head([None], arrays, device="five", **options)


def test_memory_without_room_for_a_tile_of_fixed_size():
    hidden = jnp.ones((1, 300, 8))
    kernel = jnp.ones((8, 1024))
    targets = jnp.zeros((1, 300), jnp.int32)
    with pytest.raises(
        ValueError,
        match=r"memory: got 100000 bytes, expected at least 131072 for this head and batch",
    ):
        log_probs_from_hidden(hidden, kernel, targets, deterministic=True, memory=100_000)


def test_memory_without_room_for_a_tile_of_two_heads():
    """They are compared by all columns, where one head is read in eighths."""
    states = jnp.ones((1, 300, 8)), jnp.ones((8, 1024))
    with pytest.raises(ValueError, match=r"memory: got 1000000 bytes, expected at least 2097152"):
        divergence_from_hidden(*states, *states, deterministic=True, memory=1_000_000)


def test_memory_that_tokens_in_order_would_fill():
    """They take 2 MiB: chunks get half of the memory then, where they were of 8 tokens."""
    hidden = jnp.ones((1, 2048, 256))
    kernel = jnp.ones((256, 1024))
    targets = jnp.zeros((1, 2048), jnp.int32)

    def log_probs(hidden, where):
        return log_probs_from_hidden(hidden, kernel, targets, where=where, memory=2**21).log_probs

    assert notes_of(log_probs, hidden, targets == 0) == ("forward, 64 tokens x 1024 columns",)


@pytest.mark.parametrize(
    ("kind", "like"),
    [
        ("NVIDIA GH200 480GB", "a card that nobody listed"),
        ("NVIDIA H200", "H200"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v99", "TPU"),
        ("cpu", "cpu"),
    ],
)
def test_the_profile_of_a_kind_of_device(kind, like):
    """The kind of a GH200 has the word H200 in it, and less memory."""
    assert profile_of(kind) == profile_of(like)


# Numbers that are scalar arrays


@pytest.mark.parametrize("scalar", [jnp.float32, np.float32, np.array], ids=["jax", "numpy", "0-d"])
def test_scalar_arrays_are_numbers(scalar):
    """A jax scalar as scale= gave "Non-hashable static arguments", without a name."""
    rng = np.random.default_rng(0)
    hidden, kernel = (
        jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((R, T, H), (H, V))
    )
    a, b = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((H, 2), (2, V)))
    targets = jnp.zeros((R, T), jnp.int32)

    def log_probs(scale, softcap, lora_scale):
        head = Head(kernel, lora=LoRA(a, b, scale=lora_scale), scale=scale, softcap=softcap)
        return log_probs_from_hidden(hidden, head, targets).log_probs

    found = log_probs(scalar(0.5), scalar(3.0), scalar(2.0))
    np.testing.assert_array_equal(found, log_probs(0.5, 3.0, 2.0))
    assert float(jnp.abs(found - log_probs(0.25, 3.0, 2.0)).max()) > 0.1


@pytest.mark.parametrize("name", ["scale", "softcap", "lora.scale"])
def test_traced_numbers_are_refused_by_name(name):
    def head(value):
        lora = LoRA(
            jnp.ones((H, 2)), jnp.ones((2, V)), scale=value if name == "lora.scale" else 1.0
        )
        return Head(jnp.ones((H, V)), lora=lora, **({} if name == "lora.scale" else {name: value}))

    with pytest.raises(TypeError, match=f"^{name}: got a traced array, expected a number"):
        jax.jit(head)(2.0)


def test_what_the_refusal_of_second_derivatives_sends_to_works():
    """Reverse over reverse: forward over reverse of a custom rule is refused by JAX."""
    targets = jnp.zeros((1, 3), jnp.int32)
    z = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 5)), jnp.float32)

    def slope(z):
        return jax.grad(lambda z: log_probs_from_logits(z, targets).log_probs.sum())(z)[0, 0, 1]

    # d^2 log p_0 / dz_1 dz_j = p_1 (p_j - [j = 1])
    p = np.exp(np.asarray(z[0, 0], np.float64)) / np.exp(np.asarray(z[0, 0], np.float64)).sum()
    np.testing.assert_allclose(
        jax.grad(slope)(z)[0, 0], p[1] * (p - np.eye(5)[1]), rtol=1e-5, atol=1e-7
    )

    def from_hidden(h):
        return log_probs_from_hidden(h, z[0].T, targets).log_probs.sum()

    with pytest.raises(NotImplementedError, match="has them in reverse mode"):
        jax.grad(lambda h: jax.grad(from_hidden)(h).sum())(jnp.ones((1, 3, 5)))


@jax.jit
def of_three_tokens(where):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(1, 3, 4)).astype(np.float32)
    kernel = rng.normal(size=(4, 5)).astype(np.float32)
    targets = np.array([[1, 2, 3]], np.int32)
    return log_probs_from_hidden(hidden, kernel, targets, where=where, entropy="metric")


@pytest.mark.parametrize("entry", [0.3, math.nan, 7])
def test_a_mask_of_where_that_is_neither_0_nor_1(entry):
    """Its token was computed, as if the entry were 1."""
    odd = of_three_tokens(np.array([[0, 1, entry]], np.float32))
    sound = of_three_tokens(np.array([[False, True, False]]))
    for name in ("log_probs", "entropy"):
        expected = np.asarray(getattr(sound, name))
        found = np.asarray(getattr(odd, name))
        assert expected[0, 1] != 0
        np.testing.assert_allclose(found[0, :2], expected[0, :2], rtol=1e-6)
        assert np.isnan(found[0, 2])
