"""The first block of the one pass: more tokens than the others, their logits in the memory of the kernel's gradient."""

import jax
import jax.numpy as jnp
import pytest

from jaxppo import PPO, Head, PolicyLossConfig, RolloutBatch, metrics, policy_loss_from_hidden
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.program import collectives, hang_risks, notes
from sharding.testing import assert_mesh_invariant, assert_trees_close

R, T, H, V = 4, 512, 256, 1003


def budget(columns=V, kept=0, summed=0):
    """For blocks of 144 tokens over so many columns of the vocabulary, see `one_pass_of`."""
    block = min(columns, 512)
    return 5 * 4 * H * block + 4 * H * summed + 144 * ((4 + kept) * columns + 2 * 4 * block + 3 * 4 * H)


BUDGET = budget()
KEYS = jax.random.split(jax.random.key(0), 8)
HIDDEN = jax.random.normal(KEYS[0], (R, T, H))
KERNEL = jax.random.normal(KEYS[1], (H, V)) / H**0.5
CONFIG = PolicyLossConfig(PPO(clip_high=0.28), entropy_coef=0.01)


def batch_of(mask):
    ids, one = jnp.ones((R, T), jnp.int32), jnp.zeros((R, 1), jnp.int32)
    targets = jax.random.randint(KEYS[2], (R, T), 0, V - 2)
    old = 0.3 * jax.random.normal(KEYS[3], (R, T)) - jnp.log(V)
    advantages = jax.random.normal(KEYS[4], (R, T))
    return RolloutBatch(ids, targets, ids, ids, mask.astype(jnp.float32), one, advantages=advantages, old_log_probs=old)


MASKS = {
    "all": jnp.ones((R, T)),
    "most": jax.random.bernoulli(KEYS[5], 0.9, (R, T)),
    "too few": jnp.zeros((R, T)).at[:, ::12].set(1),
    "as many as the block": jnp.zeros((R, T)).at[0, :224].set(1),
    # of 2 x 2 devices, two have more than a first block of them, one has few, and one none
    "uneven": jnp.ones((R, T)).at[2:].set(0).at[2, :9].set(1),
    "none": jnp.zeros((R, T)),
}


def step(parallel, hidden, kernel, batch, budget=BUDGET, nucleus_ids=None, **of_head):
    def loss(hidden, kernel):
        options = {"temperature": 0.8, "nucleus_ids": nucleus_ids, "parallel": parallel, "one_pass_bytes": budget}
        return policy_loss_from_hidden(hidden, Head(kernel, **of_head), batch, CONFIG, **options)

    (value, found), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, kernel)
    return value, metrics.values(found), gradients


@pytest.mark.parametrize("mask", MASKS)
def test_it_is_two_passes(mask):
    batch = batch_of(MASKS[mask])
    one, two = (jax.jit(lambda h, k, b=b: step(None, h, k, batch, b)) for b in (BUDGET, 0))
    notes = audit(one, HIDDEN, KERNEL).notes
    assert notes == ("one pass, 144 tokens a block", "one pass, a first block of 224 tokens")
    assert_trees_close(one(HIDDEN, KERNEL), two(HIDDEN, KERNEL), rtol=1e-5, atol=2e-6)


OPTIONS = {
    "plain": {},
    "vh": {"layout": "vh"},
    "all of them": {
        "layout": "vh",
        "bias": jax.random.normal(KEYS[6], (V,)),
        "softcap": 3.0,
        "vocab_size": V - 2,
        "nucleus_ids": jax.random.randint(KEYS[7], (R, T, 5), -1, V),
    },
}


@pytest.mark.parametrize("mask", ["most", "uneven"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mesh", ["dp=2,cp=2,tp=2", "dp=1,cp=1,tp=8"])
def test_on_meshes(mesh, mask, options):
    batch, head = batch_of(MASKS[mask]), OPTIONS[options]
    kernel = KERNEL.T if "layout" in head else KERNEL
    columns = -(-V // make_parallel_mesh(mesh).tensor_size)
    # the kernel is on every device, since they do not divide V, and its gradient a sum over them
    bytes_ = budget(columns, kept="nucleus_ids" in head, summed=V)
    run = lambda p, h, k: step(p, h, k, batch, bytes_, **head)  # noqa: E731
    parallel = make_parallel_mesh(mesh, explicit=mesh.startswith("dp=2"))
    jaxpr = jax.make_jaxpr(lambda h, k: run(parallel, h, k))(HIDDEN, kernel)
    assert any("first block" in note for note in notes(jaxpr))
    assert hang_risks(jaxpr) == []
    # as many turns on all devices, of the first block's loop and of the others'
    assert collectives(jaxpr).count(("pmax", ("cp", "dp"))) == (2 if parallel.context_size > 1 else 0)
    assert_mesh_invariant(run, HIDDEN, kernel, meshes=[parallel], rtol=2e-5, atol=3e-6)


def test_a_frozen_head_has_no_memory_to_lend():
    batch = batch_of(MASKS["most"])

    def loss(hidden):
        return policy_loss_from_hidden(hidden, KERNEL, batch, CONFIG, temperature=0.8, one_pass_bytes=BUDGET)[0]

    assert audit(jax.grad(loss), HIDDEN).notes == ("one pass, 144 tokens a block",)
    assert_trees_close(
        jax.jit(jax.grad(loss))(HIDDEN), jax.jit(step, static_argnums=0)(None, HIDDEN, KERNEL, batch)[2][0]
    )
