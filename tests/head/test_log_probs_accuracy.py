"""Log-probs, entropies and gradients within 2e-6 * max(1, |value|) of float64 in numpy, however
hard the logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import tiles_of
from oracle.head import logit_gradient, token_stats

from jaxppo import Head, log_probs_from_hidden, log_probs_from_logits
from sharding import make_parallel_mesh

R, T, V = 4, 8, 1000
MESHES = [None, "dp=2,cp=2,tp=2", "tp=8"]


def softmax_in_f64(z, y, nucleus=None):
    """The log-prob of y, renormalised over `nucleus` and y if there is one, and the entropy,
    from logits `[..., V]`.
    """
    found = token_stats(flat(z), y.reshape(-1), nucleus if nucleus is None else flat(nucleus))
    return found.log_probs.reshape(y.shape), found.entropy.reshape(y.shape)


def ids_of(nucleus):
    """The ids of a dense mask, -1 padded."""
    return jnp.asarray(np.where(nucleus, np.arange(nucleus.shape[-1]), -1), jnp.int32)


def gradients_in_f64(z, y, g, e, nucleus=None):
    """d (sum g log_prob + e entropy) / d z, by the formula; the finite differences below check
    the formula too.
    """
    weights = {"by_log_prob": g.reshape(-1), "by_entropy": e.reshape(-1)}
    nucleus = None if nucleus is None else flat(nucleus)
    return logit_gradient(flat(z), y.reshape(-1), **weights, nucleus=nucleus).reshape(z.shape)


def flat(x):
    return x.reshape(-1, x.shape[-1])


def assert_accurate(got, expected):
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    error = np.abs(got - expected) / np.maximum(1, np.abs(expected))
    assert np.isfinite(got).all()
    assert error.max() <= 2e-6, (
        error.max(),
        got.flat[error.argmax()],
        expected.flat[error.argmax()],
    )


def hard_logits():
    """By name: logits f32 `[R, T, V]`, and targets with a finite log-prob."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, V, (R, T))
    noise = rng.normal(size=(R, T, V))
    one_hot = y[..., None] == np.arange(V)
    sparse = np.where((rng.random((R, T, V)) < 0.9) & ~one_hot, -np.inf, 5 * noise)
    spike = np.where(np.arange(V) == 17, 0, -1e30)
    cases = {
        "normal": 3 * noise,
        "1e4": 1e4 + noise,
        "-1e4": -1e4 + 3 * noise,
        "+-1e4": np.where(noise > 0, 1e4, -1e4) + noise,
        "far apart": 1e4 * noise,
        "all equal": np.full((R, T, V), 7.5),
        "all equal and large": np.full((R, T, V), -1e4),
        "one-hot of the target": np.where(one_hot, 60.0, 0),
        "one-hot of another": np.where(np.arange(V) == (y[..., None] + 1) % V, 60.0, 0),
        "certain": np.where(one_hot, 0.0, -np.inf),
        "a spike": np.where(one_hot, -3.0, spike),
        "90% -inf": sparse,
        "only the last shard": np.where((np.arange(V) < 900) & ~one_hot, -np.inf, noise),
        "small differences": 1e-3 * noise,
    }
    return {name: (z.astype(np.float32), y) for name, z in cases.items()}


HARD = hard_logits()


@pytest.fixture(
    scope="module",
    params=[(mesh, dtype) for mesh in MESHES for dtype in ("float32", "bfloat16")],
    ids=str,
)
def of_logits(request):
    """One compiled program for all of the hard logits: stats and gradients."""
    mesh, dtype = request.param
    parallel = mesh and make_parallel_mesh(mesh)

    @jax.jit
    def run(logits, targets, g, e):
        def loss(logits):
            stats = log_probs_from_logits(logits, targets, parallel=parallel, entropy="bonus")
            return (stats.log_probs * g + stats.entropy * e).sum(), stats

        gradient, stats = jax.grad(loss, has_aux=True)(logits)
        return stats, gradient

    return run, dtype


@pytest.mark.every(11)
@pytest.mark.parametrize("name", HARD)
def test_hard_logits(of_logits, name):
    rng = np.random.default_rng(1)
    run, dtype = of_logits
    z, y = HARD[name]
    z = np.asarray(jnp.asarray(z, dtype), np.float32)  # the same numbers for both
    g, e = rng.normal(size=(2, R, T)).astype(np.float32)
    stats, gradient = run(jnp.asarray(z, dtype), jnp.asarray(y, jnp.int32), g, e)
    log_probs, entropy = softmax_in_f64(z, y)
    assert_accurate(stats.log_probs, log_probs)
    assert_accurate(stats.entropy, entropy)
    expected = gradients_in_f64(z, y, g, e)
    rounding = 2**-8 * np.abs(expected) if dtype == "bfloat16" else 0
    assert (
        np.abs(np.asarray(gradient, np.float64) - expected)
        <= 2e-6 * np.maximum(1, np.abs(expected)) + rounding
    ).all()


@pytest.mark.parametrize("mesh", MESHES)
def test_a_nucleus_of_hard_logits(mesh):
    rng = np.random.default_rng(1)
    parallel = mesh and make_parallel_mesh(mesh)
    run = jax.jit(
        lambda z, y, ids: log_probs_from_logits(
            z, y, parallel=parallel, entropy="metric", nucleus_ids=ids
        )
    )
    for name in ("normal", "+-1e4", "90% -inf", "all equal", "far apart"):
        z, y = HARD[name]
        nucleus = rng.random((R, T, V)) < 0.05
        stats = run(z, jnp.asarray(y, jnp.int32), ids_of(nucleus))
        log_probs, entropy = softmax_in_f64(z, y, nucleus)
        assert_accurate(stats.log_probs, log_probs)
        assert_accurate(stats.entropy, entropy)


def test_gradients_against_finite_differences():
    """In float64, of the values that the hidden path and the logits path must have, along random
    directions.
    """
    rng = np.random.default_rng(1)
    H = 6
    hidden = rng.normal(size=(R, T, H))
    kernel = rng.normal(size=(H, 97))
    y = rng.integers(0, 97, (R, T))
    nucleus = rng.random((R, T, 97)) < 0.3
    g, e = rng.normal(size=(2, R, T))
    cap, temperature = 3.0, 0.7
    hidden, kernel, g, e = (x.astype(np.float32) for x in (hidden, kernel, g, e))

    def in_f64(hidden, kernel):
        z = hidden @ kernel
        log_probs, entropy = softmax_in_f64(cap * np.tanh(z / cap) / temperature, y)
        return (g * log_probs + e * entropy).sum()

    def loss(hidden, kernel):
        head = Head(kernel, softcap=cap)
        stats = log_probs_from_hidden(
            hidden, head, jnp.asarray(y), temperature=temperature, entropy="bonus"
        )
        return (stats.log_probs * g + stats.entropy * e).sum()

    gradients = jax.jit(jax.grad(loss, (0, 1)))(hidden, kernel)
    wide = hidden.astype(np.float64), kernel.astype(np.float64)
    for which in (0, 1):
        for _ in range(5):
            direction = rng.normal(size=wide[which].shape)
            step = 1e-5
            moved = [
                [x + s * direction if i == which else x for i, x in enumerate(wide)]
                for s in (step, -step)
            ]
            ends = [in_f64(*arrays) for arrays in moved]
            slope = (ends[0] - ends[1]) / (2 * step)
            got = (np.asarray(gradients[which], np.float64) * direction).sum()
            assert abs(got - slope) <= 2e-6 * np.abs(gradients[which] * direction).sum()

    z = rng.normal(size=(R, T, 97)).astype(np.float32)
    expected = gradients_in_f64(z, y, g, e, nucleus)
    direction = rng.normal(size=z.shape)
    ends = [softmax_in_f64(z + s * 1e-5 * direction, y, nucleus) for s in (1, -1)]
    slope = sum((w * (a - b)).sum() for w, a, b in zip((g, e), *ends, strict=True)) / 2e-5
    assert abs((expected * direction).sum() - slope) <= 1e-7 * np.abs(expected * direction).sum()

    def of_logits(z):
        stats = log_probs_from_logits(
            z, jnp.asarray(y), nucleus_ids=ids_of(nucleus), entropy="bonus"
        )
        return (stats.log_probs * g + stats.entropy * e).sum()

    np.testing.assert_allclose(jax.jit(jax.grad(of_logits))(z), expected, rtol=0, atol=2e-6)


# From hidden states: products that f32 holds exactly, so that the logits are those of float64


@pytest.fixture(
    scope="module",
    params=[(mesh, dtype) for mesh in MESHES[:2] for dtype in ("float32", "bfloat16")],
    ids=str,
)
def of_hidden(request):
    mesh, dtype = request.param
    parallel = mesh and make_parallel_mesh(mesh)

    @jax.jit
    def run(hidden, kernel, targets):
        options = {"entropy": "metric", "parallel": parallel}
        return log_probs_from_hidden(hidden, kernel, targets, **options)

    with tiles_of("small"):
        yield run, dtype


@pytest.mark.every(7)
@pytest.mark.parametrize("scale", [0, 2.0**-6, 1, 4, 64, 2.0**10])
def test_from_hidden_states(of_hidden, scale):
    """Logits up to 1e5 in blocks of the vocabulary, merged."""
    rng = np.random.default_rng(1)
    run, dtype = of_hidden
    hidden = rng.integers(-3, 4, (R, T, 8)).astype(np.float32)
    kernel = scale * rng.integers(-8, 9, (8, V)).astype(np.float32) / 8
    y = rng.integers(0, V, (R, T))
    stats = run(jnp.asarray(hidden, dtype), jnp.asarray(kernel, dtype), jnp.asarray(y, jnp.int32))
    log_probs, entropy = softmax_in_f64(hidden.astype(np.float64) @ kernel.astype(np.float64), y)
    assert_accurate(stats.log_probs, log_probs)
    assert_accurate(stats.entropy, entropy)


@pytest.mark.parametrize("name", ["90% -inf", "+-1e4", "one-hot of the target"])
def test_hard_logits_from_hidden_states(of_hidden, name):
    """One-hot hidden states pick rows of a kernel that holds the logits."""
    run, dtype = of_hidden
    z, y = HARD[name]
    # 0 * -inf is NaN, in any product
    z = np.maximum(np.asarray(jnp.asarray(z, dtype), np.float32), -1e30)
    hidden = np.eye(R * T).reshape(R, T, R * T)
    kernel = z.reshape(R * T, V)
    stats = run(jnp.asarray(hidden, dtype), jnp.asarray(kernel, dtype), jnp.asarray(y, jnp.int32))
    log_probs, entropy = softmax_in_f64(z, y)
    assert_accurate(stats.log_probs, log_probs)
    assert_accurate(stats.entropy, entropy)


def test_a_bias_of_minus_infinity():
    """It removes its columns, as a mask of the vocabulary does."""
    rng = np.random.default_rng(1)
    hidden = rng.integers(-3, 4, (R, T, 8)).astype(np.float32)
    kernel = rng.integers(-8, 9, (8, V)).astype(np.float32) / 8
    bias = np.where(rng.random(V) < 0.9, -np.inf, 0).astype(np.float32)
    y = rng.choice(np.flatnonzero(bias == 0), (R, T))
    for mesh in MESHES:
        parallel = mesh and make_parallel_mesh(mesh)

        @jax.jit
        def run(hidden, kernel, bias, parallel=parallel):
            def loss(*parameters):
                head = Head(parameters[1], bias=parameters[2])
                stats = log_probs_from_hidden(
                    parameters[0], head, jnp.asarray(y), parallel=parallel, entropy="bonus"
                )
                return (stats.log_probs + stats.entropy).sum(), stats

            return jax.grad(loss, (0, 1, 2), has_aux=True)(hidden, kernel, bias)

        gradients, stats = run(hidden, kernel, bias)
        z = hidden.astype(np.float64) @ kernel + bias
        log_probs, entropy = softmax_in_f64(z, y)
        assert_accurate(stats.log_probs, log_probs)
        assert_accurate(stats.entropy, entropy)
        dz = gradients_in_f64(z, y, np.ones((R, T)), np.ones((R, T)))
        np.testing.assert_allclose(gradients[0], dz @ kernel.T, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(
            gradients[1], np.einsum("rth,rtv->hv", hidden, dz), rtol=2e-6, atol=1e-5
        )
        np.testing.assert_array_equal(gradients[2][bias < 0], 0)
