"""sft_loss and value_loss: the same on every mesh, blind to masked positions, and what their options mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_rows import MESHES, hard_batch

from jaxppo import RolloutBatch, sft_loss, value_loss
from jaxppo.aggregation import Normalizer
from jaxppo.log_probs.stats import TokenStats
from jaxppo.metrics import values
from sharding.testing import assert_mesh_invariant, assert_trees_close


def sft(parallel, x, batch, **options):
    return sft_loss(TokenStats(x), batch, parallel=parallel, **options)


def value(parallel, x, batch, **options):
    return value_loss(x, batch, parallel=parallel, **options)


def truth(fn, x, batch):
    """The f64 token_mean loss, by numpy."""
    mask = np.asarray(batch.loss_mask) > 0
    x, old, goal = (np.asarray(a, np.float64)[mask] for a in (x, batch.values, batch.returns))
    if fn is sft:
        return -x.mean()
    return 0.5 * np.maximum((x - goal) ** 2, (np.clip(x, old - 0.2, old + 0.2) - goal) ** 2).mean()


@pytest.mark.parametrize("fn", [sft, value])
def test_same_on_every_mesh_and_blind_to_nan_outside_the_mask(fn):
    batch, x = hard_batch()

    def run(parallel, x, batch):
        (loss, metrics), grad = jax.value_and_grad(lambda x: fn(parallel, x, batch), has_aux=True)(x)
        return loss, values(metrics), grad

    loss, metrics, grad = assert_mesh_invariant(run, x, batch, meshes=MESHES)
    np.testing.assert_allclose(loss, truth(fn, x, batch), rtol=1e-6)
    assert (np.asarray(grad)[np.asarray(batch.loss_mask) == 0] == 0).all()
    assert all(np.isfinite(v) for v in metrics.values())


@pytest.mark.parametrize("fn", [sft, value])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_micro_batches_add_up(fn, aggregation):
    # The mean of the micro-batches' own means is 10-40% off here: their token counts differ.
    batch, x = hard_batch()
    whole = fn(None, x, batch, aggregation=aggregation)[0]
    stack = lambda a: a.reshape(2, 4, *a.shape[1:])  # noqa: E731
    stacked = jax.tree.map(stack, batch)
    normalizers = Normalizer.from_batches(stacked, aggregation)
    part = lambda tree, k: jax.tree.map(lambda a: a[k], tree)  # noqa: E731
    parts = [
        fn(None, stack(x)[k], part(stacked, k), aggregation=aggregation, normalizer=part(normalizers, k))[0]
        for k in range(2)
    ]
    np.testing.assert_allclose(sum(parts), whole, rtol=1e-6)


def test_nothing_to_learn_from_is_zero():
    batch, x = hard_batch()
    batch = jax.tree.map(lambda a: a, batch)
    batch = type(batch)(**{**vars(batch), "loss_mask": jnp.zeros_like(batch.loss_mask)})
    for fn in (sft, value):
        loss, grad = jax.value_and_grad(lambda x, fn=fn: fn(None, x, batch)[0])(x)
        assert_trees_close((loss, grad), (jnp.float32(0), jnp.zeros_like(x)))


def test_value_conventions():
    one, ids = jnp.ones((1, 2)), jnp.ones((1, 2), int)
    sample = jnp.zeros((1, 1), int)
    # The first value moved by 0.5 towards its return: outside the clip, clipped is worse. The second away from it.
    batch = RolloutBatch(ids, ids, ids, ids, one, *[sample] * 3, values=0 * one, returns=jnp.array([[1.0, -1.0]]))
    now = jnp.array([[0.5, 0.5]])
    loss, worse = value_loss(now, batch, clip=0.2)
    double, outside = value_loss(now, batch, clip=0.2, factor=1.0, clip_fraction="outside")
    np.testing.assert_allclose([loss, double], [0.5 * (0.64 + 2.25) / 2, (0.64 + 2.25) / 2], rtol=1e-6)
    assert (float(worse["clip_fraction"].value), float(outside["clip_fraction"].value)) == (0.5, 1.0)
    plain, metrics = value_loss(now, batch, clip=None)
    np.testing.assert_allclose(plain, 0.5 * (0.25 + 2.25) / 2, rtol=1e-6)
    assert "clip_fraction" not in metrics


def test_bad_input():
    batch, x = hard_batch()
    with pytest.raises(ValueError, match=r"values: got shape \(4, 32\), expected the batch's \[R, T\], \(8, 32\)"):
        value_loss(x[:4], batch)
    with pytest.raises(ValueError, match=r"stats.log_probs: got shape"):
        sft(None, x[:, :3], batch)
    with pytest.raises(ValueError, match="aggregation: got 'mean', expected one of token_mean"):
        sft(None, x, batch, aggregation="mean")
    with pytest.raises(ValueError, match="aggregation_norm: got None"):
        sft(None, x, batch, aggregation="sequence_mean_token_sum_norm")
    with pytest.raises(ValueError, match="clip: got -1, expected a positive"):
        value_loss(x, batch, clip=-1)
    with pytest.raises(ValueError, match="clip_fraction: got 'all'"):
        value_loss(x, batch, clip_fraction="all")
    empty = type(batch)(**{**vars(batch), "returns": None})
    with pytest.raises(ValueError, match=r"batch.returns: got None, expected f32\[R, T\]"):
        value_loss(x, empty)
