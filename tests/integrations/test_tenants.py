"""The functions of docs/tenants.md: each row's loss beside formulas written by hand, and beside
SkyRL-tx's switch.
"""

import doctest
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "tenants.md"
KINDS = ("cross_entropy", "importance_sampling", "ppo", "cispo")


@pytest.fixture(scope="module")
def page():
    """The names that the page defines; its examples run as they are read."""
    test = doctest.DocTestParser().get_doctest(PAGE.read_text(), {}, "tenants", str(PAGE), 0)
    results = doctest.DocTestRunner().run(test, clear_globs=False)
    assert results.failed == 0
    return test.globs


def requests(rows=12, tokens=9):
    """Rows of all losses, with weights, bounds of their own, and garbage where there is no loss."""
    rng = np.random.default_rng(0)
    mask = np.where(
        rng.random((rows, tokens)) < 0.6, rng.uniform(0.5, 2, (rows, tokens)), 0
    ).astype(np.float32)
    mask[5] = 0
    log_probs, sampled = (-rng.uniform(0.1, 3, (rows, tokens)).astype(np.float32) for _ in range(2))
    advantages = rng.normal(size=(rows, tokens)).astype(np.float32)
    kinds = np.arange(rows, dtype=np.int32) % len(KINDS)
    low = rng.uniform(0.1, 1, rows).astype(np.float32)
    high = rng.uniform(1, 3, rows).astype(np.float32)
    advantages[kinds == 0], sampled[kinds == 0] = np.nan, np.nan  # cross-entropy reads neither
    return log_probs, mask, kinds, sampled, advantages, low, high


def by_hand(log_probs, mask, kinds, sampled, advantages, low, high):
    """The losses of tokens and the gradient by log-probs of the sum of rows' means, in float64."""
    losses, slopes = np.zeros((2, *mask.shape))
    for b, t in np.argwhere(mask > 0):
        x = log_probs[b, t]
        a = advantages[b, t]
        ratio = np.exp(np.float64(log_probs[b, t]) - sampled[b, t])
        clipped = np.clip(ratio, low[b], high[b])
        loss, slope = {
            "cross_entropy": (-x, -1),
            "importance_sampling": (-ratio * a, -ratio * a),
            "ppo": (-min(ratio * a, clipped * a), -ratio * a if ratio * a <= clipped * a else 0),
            "cispo": (-clipped * a * x, -clipped * a),
        }[KINDS[kinds[b]]]
        losses[b, t], slopes[b, t] = loss * mask[b, t], slope * mask[b, t]
    counts = np.maximum(mask.sum(-1, keepdims=True, dtype=np.float64), 1e-9)
    return losses, slopes / counts


def test_each_row_has_the_loss_of_its_client(page):
    log_probs, *arrays = requests()
    run = jax.jit(jax.value_and_grad(page["losses_of_rows"], has_aux=True))
    (total, each), slopes = run(log_probs, *arrays)
    losses, expected = by_hand(log_probs, *arrays)
    np.testing.assert_allclose(each, losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slopes, expected, rtol=1e-5, atol=1e-6)
    means = losses.sum(-1) / np.maximum(arrays[0].sum(-1), 1e-9)
    np.testing.assert_allclose(total, means.sum(), rtol=1e-5)


def test_other_clients_compile_nothing(page):
    run = jax.jit(page["losses_of_rows"])
    log_probs, mask, kinds, *others = requests()
    for shift in range(3):
        run(log_probs, mask, (kinds + shift) % 4, *jax.tree.map(np.nan_to_num, others))
    assert run._cache_size() == 1


def test_skyrl_txs_switch(page):
    """Their losses, chosen as `loss_for_lora` of skyrl/backends/jax.py chooses them."""
    theirs = pytest.importorskip("skyrl.tinker.loss_fns", reason="SkyRL is not installed")
    log_probs, *arrays = requests()

    def of_theirs(log_probs, mask, kinds, sampled, advantages, low, high):
        def one(kind, *row):
            return jax.lax.switch(
                kind, theirs.LOSS_FUNCTIONS, *row[:-2], theirs.LossFnConfig(*row[-2:])
            )

        each = jax.vmap(one)(kinds, log_probs, mask, sampled, advantages, low, high)
        return (each.sum(-1) / jnp.maximum(mask.sum(-1), 1e-9)).sum(), each

    # 0 times NaN of a branch that is not taken is NaN in their gradient
    arrays = [np.nan_to_num(x) for x in arrays]
    found, expected = (
        jax.jit(jax.value_and_grad(fn, has_aux=True))(log_probs, *arrays)
        for fn in (page["losses_of_rows"], of_theirs)
    )
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected)
