"""KL estimators: their formulas, their gradients, and both at log-ratios where exp overflows."""

from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo.base.kl import Estimator, adaptive_kl_coef, kl_divergence

KL_NAMES = get_args(Estimator)

FORMULAS = {
    "k1": lambda d: d,
    "abs": np.abs,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: np.exp(-d) - 1 + d,
    "low_var_kl": lambda d: np.clip(np.exp(-d) - 1 + d, -10, 10),
}
D = np.array([-2.5, -0.3, -1e-4, 1e-4, 0.2, 3.0])
SLOPES = {
    "k1": np.ones_like,
    "abs": np.sign,
    "k2": lambda d: d,
    "k3": lambda d: 1 - np.exp(-d),
    "low_var_kl": lambda d: np.where(np.exp(-d) - 1 + d > 10, 0, 1 - np.exp(-d)),
}


@jax.jit
def of_every_estimator(x, ref):
    """(values, gradients) by the name of the estimator and whether an importance weight is given:
    one program for all tests.
    """
    old = x - 0.5
    found = {}
    for estimator in KL_NAMES:
        for weigh in (False, True):

            def fn(x, estimator=estimator, weigh=weigh):
                weight = jnp.exp(x - old) if weigh else None
                return kl_divergence(x, ref, estimator, weight)

            values, pullback = jax.vjp(fn, x)
            found[estimator, weigh] = values, pullback(jnp.ones_like(values))[0]
    return found


def value_and_grad(estimator, d, weigh=False):
    """Values and gradients at these log-ratios, at most as many as `D` has, and the log-ratios as
    f32 has them.
    """
    # so that both are log-probs
    below = np.abs(np.random.default_rng(0).normal(size=len(d))) + np.maximum(d, 0)
    ref, x = np.zeros((2, len(D)), np.float32)
    ref[: len(d)] = -below
    x[: len(d)] = ref[: len(d)] + np.float32(d)
    values, gradients = of_every_estimator(x, ref)[estimator, weigh]
    log_ratios = np.float64(x - ref)
    return tuple(np.asarray(array)[: len(d)] for array in (values, gradients, log_ratios))


@pytest.mark.every(3)
@pytest.mark.parametrize("estimator", KL_NAMES)
def test_values_and_gradients(estimator):
    name = estimator.removesuffix("+")
    value, gradient, d = value_and_grad(estimator, D)
    np.testing.assert_allclose(value, FORMULAS[name](d), rtol=1e-5, atol=1e-7)
    slope = SLOPES["k2"](d) if estimator.endswith("+") else SLOPES[name](d)
    np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-6)


@pytest.mark.every(3)
@pytest.mark.parametrize("estimator", KL_NAMES)
def test_importance_weight(estimator):
    """d/dx of w k(x), w = exp(x - old): w (k + k'); with "+" the value is w k and the gradient w
    d, w constant.
    """
    name = estimator.removesuffix("+")
    value, gradient, d = value_and_grad(estimator, D[1:5], weigh=True)
    w = np.exp(0.5)
    k = FORMULAS[name](d)
    np.testing.assert_allclose(value, w * k, rtol=1e-4, atol=1e-6)
    slope = w * d if estimator.endswith("+") else w * (k + SLOPES[name](d))
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("estimator", KL_NAMES)
def test_any_log_ratio_is_finite(estimator, weigh):
    """exp(100) overflows f32: unclamped k3 has value inf and gradient -inf at a log-ratio of
    -100.
    """
    value, gradient, _ = value_and_grad(estimator, np.array([-100.0, 100.0, -1e4, 1e4]), weigh)
    assert np.all(np.isfinite(value))
    assert np.all(np.isfinite(gradient))


def test_k3_pulls_back_from_any_distance():
    _, gradient, _ = value_and_grad("k3", np.array([-100.0, 100.0]))
    assert gradient[0] < -1e8  # far below the reference: raise the log-prob
    assert gradient[1] == 1  # far above: lower it


def test_adaptive_coefficient():
    np.testing.assert_allclose(
        adaptive_kl_coef(0.2, jnp.float32(30.0), 3.0, samples=500, horizon=1000), 0.2 * 1.1
    )
    np.testing.assert_allclose(
        adaptive_kl_coef(0.2, jnp.float32(2.7), 3.0, samples=500, horizon=1000), 0.2 * 0.95
    )
    with pytest.raises(ValueError, match="target: got 0, expected a finite number above 0"):
        adaptive_kl_coef(0.2, jnp.float32(1.0), 0, samples=1)


def test_unknown_names_list_the_known():
    with pytest.raises(
        ValueError, match=r"estimator: got 'k4', expected one of 'k1', 'abs', .*, 'k1\+'"
    ):
        kl_divergence(jnp.zeros(1), jnp.zeros(1), "k4")
