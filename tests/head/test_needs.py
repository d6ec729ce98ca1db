"""One traced function, different gradients in turns: each backward reads what its own forward
left.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_head import plain_logits, reference_divergence, reference_from_hidden
from tables import sampled

from jaxppo import (
    Head,
    LoRA,
    PolicyLossConfig,
    RolloutBatch,
    log_probs_from_hidden,
    log_probs_from_logits,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.losses.distillation import divergence_from_hidden
from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close

R, T, H, V = 8, 32, 128, 512  # logits of H tokens wait in the memory of the kernel's gradient
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)


ARRAYS = {
    "hidden": normal(R, T, H),
    "kernel": normal(H, V),
    "bias": normal(V),
    "a": normal(H, 4),
    "b": normal(4, V),
}
TEACHER = normal(R, T, H), normal(H, V)
IDS = jnp.asarray(RNG.integers(0, V, (R, T)), jnp.int32)
ONE = jnp.zeros((R, 1), jnp.int32)
ONES = jnp.ones((R, T))
NEAR = jnp.full((R, T), -np.log(V))
BATCH = RolloutBatch(
    IDS,
    IDS,
    ONES.astype(int),
    IDS,
    ONES,
    ONE,
    ONE,
    ONE,
    advantages=normal(R, T),
    old_log_probs=NEAR,
)
ASKED = [
    tuple(ARRAYS),
    ("hidden",),
    ("kernel", "bias"),
    ("hidden", "a", "b"),
    ("b",),
    ("hidden", "kernel"),
]


def head_of(arrays):
    return Head(arrays["kernel"], bias=arrays["bias"], lora=LoRA(arrays["a"], arrays["b"], 0.5))


def logits_of(arrays):
    return plain_logits(arrays["hidden"], head_of(arrays))


def plain_divergence(arrays):
    return reference_divergence((arrays["hidden"], head_of(arrays)), TEACHER).sum()


def plain_log_probs(arrays):
    return reference_from_hidden(arrays["hidden"], head_of(arrays), IDS).log_probs.sum()


CONFIG = PolicyLossConfig()
CALLS = {  # from hidden states, and from logits
    "two passes": (
        lambda x, **options: log_probs_from_hidden(
            x["hidden"], head_of(x), IDS, **options
        ).log_probs.sum(),
        plain_log_probs,
    ),
    "one pass": (
        lambda x, **options: policy_loss_from_hidden(
            x["hidden"], head_of(x), BATCH, CONFIG, **options
        )[0],
        lambda x: policy_loss(log_probs_from_logits(logits_of(x), IDS), BATCH, CONFIG)[0],
    ),
    "two heads": (
        lambda x, **options: divergence_from_hidden(
            x["hidden"], head_of(x), *TEACHER, **options
        ).sum(),
        plain_divergence,
    ),
}


MESHES = (None, "dp=2,cp=2,tp=2", "fsdp=4,tp=2")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "mesh"), sampled(itertools.product(CALLS, MESHES), lambda i, _: i % 4 == 0)
)
def test_forwards_first_and_then_backwards(name, mesh):
    """A function under jit is traced once: what its gradients are asked for must not be
    remembered between calls.
    """
    call, plain = CALLS[name]
    parallel = mesh and make_parallel_mesh(mesh)
    traced = jax.jit(lambda x: call(x, parallel=parallel))
    backwards = []
    for names in ASKED:
        given = {n: ARRAYS[n] for n in names}
        value, backward = jax.vjp(lambda wanted: traced({**ARRAYS, **wanted}), given)
        backwards.append(backward)
    expected_value, expected = jax.value_and_grad(plain)(ARRAYS)
    assert_trees_close(value, expected_value, rtol=1e-5)
    for names, backward in zip(ASKED, backwards, strict=True):
        (got,) = backward(jnp.ones(()))
        assert_trees_close(
            got, {n: expected[n] for n in names}, rtol=2e-5, atol=2e-6, context=str(names)
        )
