"""Logits rounded to bf16 as samplers do: float64 numpy with ml_dtypes' rounding, on products
that are exact in f32.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxppo import Head, log_probs_from_hidden
from sharding import make_parallel_mesh

N, H, V, SCALE, SOFTCAP = 64, 16, 512, 0.01, 20.0
RNG = np.random.default_rng(0)
HIDDEN = RNG.integers(-20, 21, (1, N, H)).astype(np.float32)
KERNEL = RNG.integers(-20, 21, (H, V)).astype(np.float32)
TARGETS = RNG.integers(0, V, (1, N), np.int32)
C = RNG.normal(size=(1, N))


def softmaxes(rounded):
    x = HIDDEN[0].astype(np.float64) @ KERNEL
    x = x.astype(ml_dtypes.bfloat16).astype(np.float64) if rounded else x
    capped = np.tanh(SCALE * x / SOFTCAP)
    z = SOFTCAP * capped
    log_p = (
        z
        - np.log(np.exp(z - z.max(1, keepdims=True)).sum(1, keepdims=True))
        - z.max(1, keepdims=True)
    )
    return log_p, SCALE * (1 - capped**2)


def expected():
    log_p, slope = softmaxes(rounded=True)
    one_hot = np.eye(V)[TARGETS[0]]
    dx = C[0][:, None] * (one_hot - np.exp(log_p)) * slope
    return (
        log_p[np.arange(N), TARGETS[0]],
        dx @ KERNEL.T.astype(float),
        HIDDEN[0].T.astype(float) @ dx,
    )


@pytest.mark.parametrize("mesh", [None, "dp=1,cp=4,tp=2"])
def test_value_and_gradients(mesh):
    parallel = mesh and make_parallel_mesh(mesh)

    def loss(hidden, kernel):
        head = Head(kernel, logits_dtype="bfloat16", softcap=SOFTCAP, scale=SCALE)
        log_probs = log_probs_from_hidden(
            hidden, head, jnp.asarray(TARGETS), parallel=parallel
        ).log_probs
        return (log_probs * C.astype(np.float32)).sum(), log_probs

    gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, log_probs), (dhidden, dkernel) = gradients(HIDDEN, KERNEL)
    values = expected()
    for got, want in zip((log_probs[0], dhidden[0], dkernel), values, strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5 * np.abs(want).max())
    unrounded = softmaxes(rounded=False)[0][np.arange(N), TARGETS[0]]
    assert np.abs(unrounded - values[0]).max() > 1e-3  # rounding makes a difference


@pytest.mark.parametrize(
    "dtype", ["bfloat16", jnp.bfloat16, np.dtype("bfloat16"), jnp.ones(1, "bfloat16").dtype]
)
def test_a_dtype_as_jnp_takes_it(dtype):
    """All ways to name a dtype give one program, of which the dtype is a static argument."""
    head = Head(KERNEL, logits_dtype=dtype)
    assert head.logits_dtype == "bfloat16"
    assert jax.tree.structure(head) == jax.tree.structure(Head(KERNEL, logits_dtype="bfloat16"))
    assert Head.of(KERNEL, layout="hv", logits_dtype=dtype).logits_dtype == "bfloat16"
    plain = Head(KERNEL)
    assert Head.of(plain, logits_dtype=jnp.float32) is plain  # f32 is the default


def products(**options):
    """The jaxpr of a loss's gradients."""

    def loss(hidden):
        return log_probs_from_hidden(
            hidden, KERNEL, jnp.asarray(TARGETS), **options
        ).log_probs.sum()

    return str(jax.make_jaxpr(jax.grad(loss))(HIDDEN))


@pytest.mark.parametrize("name", ["default", "high", "highest"])
def test_a_precision_as_jnp_takes_it(name):
    said = products(precision=name)
    assert f"precision=Precision.{name.upper()}" in said.replace("(", "").split("dot_general", 1)[1]
    assert products(precision=jax.lax.Precision[name.upper()]) == said


def test_aliases_and_dtypes_of_sums():
    assert products(precision="float32") == products(precision="highest") == products()
    assert products(precision="tensorfloat32") == products(precision="high")
    assert products(gradient_sum_dtype=jnp.float32) == products()


def test_what_is_refused():
    with pytest.raises(ValueError, match="logits_dtype: got 'float16'"):
        Head(jnp.ones((4, 8)), logits_dtype="float16")
