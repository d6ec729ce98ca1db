"""The head on hidden states of SmolLM2-135M, where it sampled: log-probs, entropies and
gradients beside float64.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from oracle.head import logit_gradient, token_stats

from jaxppo import Head, log_probs_from_hidden
from sharding import make_parallel_mesh

RECORDED = Path(__file__).parents[1] / "golden" / "smollm2.npz"
FAR = -16.0  # a log-prob below it
ROWS = 4
MESHES = [None, "dp=2,cp=2,tp=2", pytest.param("dp=1,tp=8", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def real():
    """What was recorded, with hidden states `[N, H]` and the kernel `[H, V]` in bfloat16."""
    with np.load(RECORDED) as found:
        real = {name: found[name] for name in found.files}
    for name in ("hidden", "kernel"):
        real[name] = real[name].view(ml_dtypes.bfloat16)
    return real


def logits_of(real):
    return np.float64(real["hidden"]) @ np.float64(real["kernel"])


def stats_of(real, targets, mesh, dtype):
    """Log-probs and entropies `[N]`, weights of a sum of both, and that sum's gradients."""
    rng = np.random.default_rng(0)
    shape = (ROWS, len(targets) // ROWS)
    weights = rng.normal(size=(2, *shape)).astype(np.float32)
    parallel = mesh and make_parallel_mesh(mesh)

    @jax.jit
    def run(hidden, kernel, targets):
        def total(hidden, kernel):
            stats = log_probs_from_hidden(
                hidden, Head(kernel), targets, parallel=parallel, entropy="bonus"
            )
            return (stats.log_probs * weights[0] + stats.entropy * weights[1]).sum(), stats

        return jax.grad(total, argnums=(0, 1), has_aux=True)(hidden, kernel)

    hidden = jnp.asarray(real["hidden"], dtype).reshape(*shape, -1)
    gradients, stats = run(
        hidden, jnp.asarray(real["kernel"], dtype), jnp.asarray(targets, jnp.int32).reshape(shape)
    )
    found = [np.float64(x).reshape(-1) for x in (stats.log_probs, stats.entropy)]
    of_hidden, of_kernel = (np.float64(x) for x in gradients)
    return found, weights.reshape(2, -1), (of_hidden.reshape(len(targets), -1), of_kernel)


def test_the_record_has_the_log_probs_of_the_whole_vocabulary(real):
    """The last column stands for the 48641 that are not stored, so that log z is the true one."""
    z = logits_of(real)
    stats = token_stats(z, real["targets"])
    np.testing.assert_allclose(stats.log_probs, real["log_probs"], rtol=0, atol=1e-6)
    # as one column the others have less of it
    assert (stats.entropy <= real["entropy"] + 1e-6).all()
    assert z.max() > 40
    assert np.sqrt(np.mean(np.float64(real["hidden"]) ** 2)) > 1.5


def test_how_many_tokens_are_far(real):
    """The mass is that of the whole vocabulary; the columns that are stored have a part of it."""
    log_probs = logits_of(real)
    log_probs -= token_stats(log_probs, real["targets"]).log_z[:, None]
    stored = np.where(log_probs < FAR, np.exp(log_probs), 0)[:, :-1].sum(axis=-1)
    assert (stored <= real["far_mass"] * (1 + 1e-5)).all()
    assert real["far_mass"].mean() == pytest.approx(3.3e-4, abs=5e-6)  # see docs/numbers.md


def root_mean_square(x):
    return np.sqrt(np.mean(x * x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("which", ["own", "far"])
def test_log_probs_entropies_and_gradients(real, which, mesh, dtype):
    """Those of the sampled tokens, and those of the unlikeliest token of each position, whose
    log-probs are below -25.

    The error is that of f32 sums of 579 products, and of numbers of up to 48: 3e-6 on average, 4e-6
    for unlikely ones, and 2e-5 at most, with room for other orders of the sums. Products of bf16
    are exact in f32, so bf16 rounds the gradients alone.
    """
    z = logits_of(real)
    targets = real["targets"]
    if which == "far":
        targets = z.argmin(axis=-1)
    want = token_stats(z, targets)
    assert which == "own" or want.log_probs.max() < -25
    (log_probs, entropy), weights, gradients = stats_of(real, targets, mesh, dtype)
    for got, expected in ((log_probs, want.log_probs), (entropy, want.entropy)):
        error = np.abs(got - expected)
        assert error.mean() < 6e-6
        assert error.max() < 5e-5
    of_logits = logit_gradient(z, targets, by_log_prob=weights[0], by_entropy=weights[1])
    hidden = np.float64(real["hidden"])
    kernel = np.float64(real["kernel"])
    bound = 1e-5 if dtype == "float32" else 2**-8
    for got, expected in zip(gradients, (of_logits @ kernel.T, hidden.T @ of_logits), strict=True):
        assert root_mean_square(got - expected) < bound * root_mean_square(expected)
