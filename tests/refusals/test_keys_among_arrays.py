"""Keys of `jax.random` where floats are expected: refused by name. A model with dropout holds some.

"Cannot interpret 'key<fry>' as a data type" was all that was said, without the name of a parameter.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxppo import (
    SFT,
    Head,
    Normalizer,
    RolloutBatch,
    Sample,
    accumulate_gradients,
    advantages,
    compute_log_probs,
    log_probs_from_hidden,
    loss_from_stats,
)
from jaxppo.sharding.testing import assert_trees_close

SAMPLES = [Sample([1, 2, 3], 1), Sample([3, 2, 1, 4], 2)]
BATCHES = RolloutBatch.from_samples(SAMPLES, row_length=4, micro_batches=2, rows=1)
KEY = jax.random.key(0)


class Dropping(nnx.Module):
    """A model that holds random state beside its parameters."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(8, 4, rngs=rngs)
        self.head = nnx.Linear(4, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def stats_of(model, batch):
    return log_probs_from_hidden(model.embed(batch.tokens), Head.of(model.head), batch.targets)


def loss_of(model, part):
    batch, normalizer = part
    return loss_from_stats(stats_of(model, batch), batch, SFT(), normalizer=normalizer)


PARTS = BATCHES, Normalizer.of(SFT(), BATCHES)


def test_random_state_among_parameters():
    advice = (
        r"expected floats, which learn; keys, .* such as nnx\.split\(model, nnx\.Param, \.\.\.\)"
    )
    model = Dropping(nnx.Rngs(0))
    with pytest.raises(
        TypeError, match=rf"params\.dropout\.rngs\.count\.value: got dtype uint32, {advice}"
    ):
        accumulate_gradients(loss_of, PARTS)(model)
    with pytest.raises(TypeError, match=rf"params\['key'\]: got dtype key<fry>, {advice}"):
        accumulate_gradients(loss_of, PARTS)({"key": KEY, "x": jnp.ones(3)})


def test_what_the_advice_says():
    """The parameters alone learn; the rest of the model goes to the loss as it is."""
    model = Dropping(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params, part):
        return loss_of(nnx.merge(graph, params, rest), part)

    (loss, _), gradients = jax.jit(accumulate_gradients(loss_fn, PARTS))(params)
    assert jax.tree.structure(gradients) == jax.tree.structure(params)
    whole = RolloutBatch.from_samples(SAMPLES, row_length=4)

    def at_once(params):
        return loss_from_stats(stats_of(nnx.merge(graph, params, rest), whole), whole, SFT())[0]

    expected, of_all = jax.jit(jax.value_and_grad(at_once))(params)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_trees_close(gradients, of_all, rtol=1e-5, atol=1e-5)


def test_a_pass_without_gradients_takes_them():
    run = jax.jit(partial(compute_log_probs, stats_of, micro_batches=BATCHES))
    stats = run(Dropping(nnx.Rngs(0)))
    assert np.isfinite(stats.log_probs).all()


KEYS = jax.random.split(KEY, (2, 1, 4))
HIDDEN = np.ones((1, 4, 4), np.float32)
KERNEL = np.ones((4, 8), np.float32)
TARGETS = BATCHES.targets[0]


def key_as_loss(w, x):
    return KEY, {}


REFUSED = {
    "rewards": partial(advantages.grpo, KEYS, KEYS),
    "x": partial(advantages.spread, KEYS, BATCHES),
    "hidden": partial(log_probs_from_hidden, KEYS, KERNEL, TARGETS),
    r"head\.kernel": partial(log_probs_from_hidden, HIDDEN, KEY, TARGETS),
    "temperature": partial(log_probs_from_hidden, HIDDEN, KERNEL, TARGETS, temperature=KEY),
    r"micro_batches\.tokens": partial(Normalizer.of, SFT(), RolloutBatch(*[KEYS] * 6)),
    "loss_fn": partial(accumulate_gradients(key_as_loss, np.ones(2)), np.ones(2, np.float32)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_keys_elsewhere(name):
    with pytest.raises(TypeError, match=rf"^{name}: got dtype key<fry>, expected "):
        REFUSED[name]()


def test_trees_with_keys_are_compared():
    """`assert_mesh_invariant` may return a state with keys."""
    assert_trees_close({"key": KEY}, {"key": jax.random.key(0)})
    with pytest.raises(AssertionError, match=r"at \['key'\]: 1 of 2 differ"):
        assert_trees_close({"key": KEY}, {"key": jax.random.key(1)})
