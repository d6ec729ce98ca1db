"""deterministic=True: a token's log-prob and entropy have the same bits whatever else is in the batch."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxppo import (
    PPO,
    Head,
    PolicyLossConfig,
    RolloutBatch,
    finalize_metrics,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from sharding import make_parallel_mesh

H, V = 48, 1500
DTYPES = ["float32", "bfloat16"]


def arrays(dtype, tokens, seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    hidden = jax.random.normal(keys[0], (tokens, H)).astype(dtype)
    kernel = (jax.random.normal(keys[1], (H, V)) / H**0.5).astype(dtype)
    return hidden, kernel, jax.random.randint(keys[2], (tokens,), 0, V)


@partial(jax.jit, static_argnums=4)
def run(hidden, kernel, targets, where, parallel):
    options = {"temperature": 0.7, "entropy": "metric", "where": where, "parallel": parallel}
    return log_probs_from_hidden(hidden, Head(kernel, softcap=5.0), targets, deterministic=True, **options)


def stats(hidden, kernel, targets, where=None, parallel=None):
    """Log-probs and entropy of tokens `[R, T]`."""
    found = run(hidden, kernel, targets, where, parallel)
    return np.asarray(found.log_probs), np.asarray(found.entropy)


@pytest.fixture(scope="module", params=DTYPES)
def alone(request):
    """600 tokens in one row, and what they are."""
    hidden, kernel, targets = arrays(request.param, 600)
    return hidden, kernel, targets, [x[0] for x in stats(hidden[None], kernel, targets[None])]


@settings(max_examples=8)
@given(data=st.data())
def check_any_batch(alone, data):
    hidden, kernel, targets, expected = alone
    shape = data.draw(st.sampled_from([(1, 24), (3, 8), (2, 300), (4, 200), (1, 257)]))
    count = shape[0] * shape[1]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    chosen = rng.integers(0, 600, count)
    where = rng.random(shape) < data.draw(st.sampled_from([0.1, 0.5, 1.0])) if data.draw(st.booleans()) else None
    got = stats(hidden[chosen].reshape(*shape, H), kernel, targets[chosen].reshape(shape), where)
    kept = np.ones(count, bool) if where is None else where.reshape(-1)
    for found, truth in zip(got, expected, strict=True):
        np.testing.assert_array_equal(found.reshape(-1)[kept], truth[chosen][kept])


def test_in_any_batch(alone):
    """Any tokens in any places beside any others, few or many, with any mask."""
    check_any_batch(alone)


@pytest.mark.parametrize("mesh", ["dp=8", "cp=8", "dp=2,cp=4", "fsdp=4,cp=2"])
def test_on_any_mesh_of_the_same_tensor_axis(alone, mesh):
    """A whole kernel on each device: data and context axes do not show."""
    hidden, kernel, targets, expected = alone
    parallel = make_parallel_mesh(mesh)
    order = np.random.default_rng(1).permutation(600)[:512]
    got = stats(hidden[order].reshape(8, 64, H), kernel, targets[order].reshape(8, 64), None, parallel)
    for found, truth in zip(got, expected, strict=True):
        np.testing.assert_array_equal(found.reshape(-1), truth[order])


SOME = [
    (None, 2**30, "float32"),
    (None, 2**20, "bfloat16"),
    ("dp=4,cp=2", 2**30, "bfloat16"),
    ("dp=2,cp=2,tp=2", 2**20, "float32"),
]
MESHES, MEMORIES = (None, "dp=4,cp=2", "dp=2,cp=2,tp=2"), (2**30, 2**20)


@pytest.mark.parametrize(
    ("mesh", "memory", "dtype"),
    [
        case if case in SOME else pytest.param(*case, marks=pytest.mark.nightly)
        for case in itertools.product(MESHES, MEMORIES, DTYPES)
    ],
)
def test_the_ratio_to_an_old_pass_of_the_same_policy_is_1(mesh, memory, dtype):
    """With memory for one pass and without, and the old pass had other neighbours: no mask, other rows."""
    parallel = mesh and make_parallel_mesh(mesh)
    hidden, kernel, targets = arrays(dtype, 640)
    hidden, targets = hidden.reshape(4, 160, H), targets.reshape(4, 160)
    options = {"parallel": parallel, "deterministic": True, "memory": memory}
    old = jax.jit(lambda h, k: log_probs_from_hidden(h, k, targets[::-1], **options).log_probs)(hidden[::-1], kernel)
    ids = jnp.ones((4, 160), jnp.int32)
    mask = (jax.random.uniform(jax.random.key(3), (4, 160)) < 0.7).astype(jnp.float32).at[:, -1].set(0)
    positions = jnp.broadcast_to(jnp.arange(160), (4, 160))
    batch = RolloutBatch(
        ids, targets, ids, positions, mask, jnp.arange(4)[:, None], advantages=mask, old_log_probs=old[::-1]
    )
    config = PolicyLossConfig(PPO())
    loss = lambda h, k, b: policy_loss_from_hidden(h, k, b, config, **options)  # noqa: E731
    found = finalize_metrics(jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, kernel, batch)[0][1])
    assert (found["ratio_max"], found["ratio_min"]) == (1, 1)
