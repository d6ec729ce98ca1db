"""What users do wrong inside their own shard_map or pmap: refused, and what is right there is
right.

"Without the check" names the number that a version without the check gave.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from misuse_steps import BATCH, HIDDEN, KERNEL, LOG_PROBS, R, T, V, loss_at

from jaxppo import (
    SFT,
    Head,
    Normalizer,
    PolicyLossConfig,
    ShardAxes,
    TokenStats,
    advantages,
    log_probs_from_hidden,
    loss_from_stats,
    make_parallel_mesh,
)
from jaxppo.losses.covariance import covariance_mask
from jaxppo.policy_losses import ClipCov

# The caller's own shard_map or pmap


MESH = make_parallel_mesh("dp=2,cp=2,tp=2")
SELECTING = PolicyLossConfig(ClipCov())


def in_shard_map(fn, batch=BATCH, out_specs=None, check_vma=True, x=LOG_PROBS):
    specs = (batch.specs(MESH), MESH.tokens_spec)
    run = jax.shard_map(
        fn,
        mesh=MESH.mesh,
        in_specs=specs,
        out_specs=P() if out_specs is None else out_specs,
        check_vma=check_vma,
    )
    return jax.jit(run)(batch, x)


def denominators(b, x):
    return loss_at(b, x)[0]


def sft(b, x):
    return loss_from_stats(TokenStats(x), b, SFT())[0]


def whitening(b, x):
    return advantages.whiten(x, b.loss_mask).sum()


def groups(b, x):
    return advantages.grpo(b.rewards, b.group_ids).sum()


def selection(b, x):
    return covariance_mask(TokenStats(x), b, SELECTING, jax.random.key(0)).sum()


def normalizer(b, x, loss):
    return Normalizer.of(loss, b).tokens


NEED_SUMS = {
    "denominators": denominators,
    "sft": sft,
    "whitening": whitening,
    "groups": groups,
    "selection": selection,
    "normalizer": functools.partial(normalizer, loss=SFT()),
    "rollouts": functools.partial(normalizer, loss=SFT(aggregation="rollout_mean")),
}


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("what", NEED_SUMS)
def test_sums_over_devices_that_the_library_does_not_know_of(what, check_vma):
    """Without the check: 0.147 for 0.251."""
    with pytest.raises(
        ValueError, match=r"parallel: got no role for mesh axis '\w+' inside a shard_map or pmap"
    ):
        in_shard_map(NEED_SUMS[what], check_vma=check_vma)


def test_pmap_is_noticed():
    def one_row(x):
        return np.asarray(x)[:, None]

    batch, x = jax.tree.map(one_row, (BATCH, LOG_PROBS))
    with pytest.raises(ValueError, match="parallel: got no role for mesh axis"):
        jax.pmap(denominators)(batch, x)


def test_what_is_legitimate_in_ones_own_shard_map():
    expected, _ = loss_at(BATCH)
    tokens = MESH.axes.tokens
    whole = Normalizer.of(SFT(), BATCH)

    def own_psum(b, x, normalizer):
        return jax.lax.psum(loss_at(b, x, normalizer=normalizer)[0], tokens)

    specs = (BATCH.specs(MESH), MESH.tokens_spec, whole.specs(MESH))
    run = jax.shard_map(own_psum, mesh=MESH.mesh, in_specs=specs, out_specs=P())
    np.testing.assert_allclose(jax.jit(run)(BATCH, LOG_PROBS, whole), expected, rtol=1e-6)

    def sum_of_tokens(b, x):
        total, _ = loss_at(b, x, PolicyLossConfig(aggregation="token_sum"))
        return jax.lax.psum(total, tokens) / whole.tokens

    def of_roles(b, x):
        return loss_at(b, x, parallel=MESH.axes)[0]

    for fn in (sum_of_tokens, of_roles):
        np.testing.assert_allclose(in_shard_map(fn), expected, rtol=1e-6)

    def replicated(b, x):
        return loss_at(b, x, parallel=ShardAxes(replicated=("dp", "cp", "tp")))[0]

    run = jax.shard_map(
        replicated, mesh=MESH.mesh, in_specs=(P(), P()), out_specs=P(), check_vma=False
    )
    np.testing.assert_allclose(jax.jit(run)(BATCH, LOG_PROBS), expected, rtol=1e-6)


# A kernel inside the caller's shard_map


def stats_in_shard_map(gather, **of_head):
    def inside(hidden, kernel, targets):
        head = Head(gather(kernel), **of_head)
        return log_probs_from_hidden(hidden, head, targets, parallel=MESH.axes).log_probs

    specs = (MESH.hidden_spec, MESH.kernel_spec(), MESH.tokens_spec)
    run = jax.shard_map(inside, mesh=MESH.mesh, in_specs=specs, out_specs=MESH.tokens_spec)
    return jax.jit(run)(HIDDEN, KERNEL, jnp.zeros((R, T), jnp.int32))


def test_a_kernel_gathered_over_the_tensor_axis():
    """Without the check: taken for a shard of twice the vocabulary, off by log 2."""
    expected = log_probs_from_hidden(HIDDEN, KERNEL, jnp.zeros((R, T), jnp.int32)).log_probs
    invariant = functools.partial(
        jax.lax.all_gather, axis_name="tp", axis=1, tiled=True, to="invarying"
    )

    def as_given(kernel):
        return kernel

    np.testing.assert_allclose(stats_in_shard_map(as_given), expected, atol=1e-5)
    np.testing.assert_allclose(stats_in_shard_map(invariant), expected, atol=1e-5)
    varying = functools.partial(jax.lax.all_gather, axis_name="tp", axis=1, tiled=True)
    with pytest.raises(
        ValueError, match=r"head.vocab_size: got 24 with 24 columns on each of 2 tensor shards"
    ):
        stats_in_shard_map(varying, vocab_size=V)
