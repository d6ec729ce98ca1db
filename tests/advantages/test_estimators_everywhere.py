"""Estimators and value, SFT and distillation losses in one program, on Explicit meshes and in a
user's shard_map.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from hard_rows import R, T, hard_batch
from jax.sharding import PartitionSpec as P

from jaxppo import (
    SFT,
    OffPolicyConfig,
    RolloutBatch,
    TokenStats,
    Value,
    advantages,
    compute_log_probs,
    finalize_metrics,
    log_probs_from_hidden,
    loss_from_stats,
)
from jaxppo.losses.distillation import distillation_loss
from jaxppo.mismatch import mismatch_metrics
from jaxppo.policy.off_policy import Rejection, correction
from sharding import make_parallel_mesh, shard_call
from sharding.audit.program import collectives, hang_risks
from sharding.testing import assert_trees_close

V, H = 64, 8
BATCH, X = hard_batch()
KEYS = jax.random.split(jax.random.key(0), 2)
HIDDEN = jnp.where(BATCH.loss_mask[..., None] > 0, jax.random.normal(KEYS[0], (R, T, H)), jnp.nan)
KERNEL = jax.random.normal(KEYS[1], (H, V))
ARRAYS = (BATCH, X, HIDDEN, KERNEL)
OFF_POLICY = OffPolicyConfig(
    weights="geometric", rejections=(Rejection("seq_max_k3", high=1.0),), veto=0.1, opsm_delta=0
)


def corrected(parallel, batch: RolloutBatch, x):
    def per_shard(axes, batch, x):
        policies = {"current": x, "old": batch.old_log_probs, "rollout": batch.rollout_log_probs}
        return correction(
            policies, batch.advantages, batch.loss_mask, batch.segments(axes), OFF_POLICY
        )[0]

    args = {"batch": batch, "x": x}
    return shard_call(
        "corrected",
        per_shard,
        parallel,
        args,
        lambda p: ([batch.specs(p), p.tokens_spec], p.tokens_spec),
    )


def everything(parallel, b, x, hidden, kernel):
    """(per-token arrays, per-sample arrays, the rest) of all functions that take a mesh."""
    on = {"parallel": parallel}
    mask = b.loss_mask
    kl = {"kl": b.values, "kl_coef": 0.1}
    rewards = advantages.token_rewards(b.rewards, b, **kl, **on)

    def score(kernel, b):
        return log_probs_from_hidden(hidden, kernel, b.targets, where=b.loss_mask > 0, **on)

    def distilled(hidden, kernel):
        return distillation_loss(hidden, kernel, 2 * hidden, kernel, b, **on)[0]

    tokens = {
        "gae": advantages.gae(rewards, b.values, b, gamma=0.9, lam=0.8, value_lam=1.0, **on),
        "gae by length": advantages.gae(rewards, b.values, b, length_alpha=0.3, **on),
        "gdpo": advantages.gdpo([b.rewards, b.rewards**2], b.group_ids, b, **on),
        "gdpo over samples": advantages.gdpo(
            [b.rewards, -b.rewards], b.group_ids, b, whitened="samples", **on
        ),
        "optimal": advantages.optimal_token_baseline(
            b.values,
            TokenStats(-jnp.abs(x) - 0.1, sum_p2=jnp.exp(-0.1 - jnp.abs(x))),
            b.group_ids,
            b,
            **on,
        ),
        "reinforce_plus_plus": advantages.reinforce_plus_plus(x, b, **on),
        "baseline": advantages.reinforce_plus_plus_baseline(b.rewards, b.group_ids, b, **kl, **on),
        "distillation": advantages.on_policy_distillation(
            b.advantages, x, -jnp.abs(b.values), mask
        ),
        "weighted distillation": advantages.importance_weighted_distillation(
            x, -jnp.abs(b.values), b, **on
        ),
        "log_probs": compute_log_probs(score, kernel, b).log_probs,
        "correction": corrected(parallel, b, x),
        "dvalues": jax.grad(lambda x: loss_from_stats(x, b, Value(), **on)[0])(x),
    }
    samples = {
        name: getattr(advantages, name)(b.rewards, b.group_ids, **on)
        for name in ("grpo", "rloo", "gpg", "pass_at_k")
    }
    samples["of the others"] = advantages.rloo(b.rewards, b.group_ids, scale_by_std=True, **on)
    samples["maxrl"] = advantages.maxrl(jnp.abs(b.rewards), b.group_ids, **on)
    samples["standardize"] = advantages.standardize(
        b.rewards, b.group_ids, std="group", leave_one_out=True, **on
    )
    samples["opo"] = advantages.opo(b.rewards, b.group_ids, jnp.abs(b.rewards), **on)
    samples["remax"] = advantages.remax(b.rewards, 0.5 * b.rewards, b.sample_ids)
    rest = {
        "sft": loss_from_stats(TokenStats(x), b, SFT(), **on)[0],
        "mismatch": finalize_metrics(mismatch_metrics(b, **on)),
        "explained": advantages.explained_variance(b.values, x, mask, **on),
        "distilled": distilled(hidden, kernel),
        "dkernel": jax.grad(distilled, 1)(hidden, kernel),
    }
    return tokens, samples, rest


EXPECTED = jax.jit(lambda *a: everything(None, *a))


@pytest.mark.nightly
def test_explicit_mesh():
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", explicit=True)
    specs = (
        BATCH.specs(parallel),
        parallel.tokens_spec,
        parallel.hidden_spec,
        parallel.kernel_spec(),
    )

    def is_spec(s):
        return isinstance(s, P)

    placed = jax.tree.map(
        lambda s, x: jax.device_put(x, parallel.sharding(s)), specs, ARRAYS, is_leaf=is_spec
    )
    got = jax.jit(lambda *a: everything(parallel, *a))(*placed)
    assert_trees_close(got, EXPECTED(*ARRAYS), atol=3e-6)


@pytest.mark.nightly
def test_inside_a_users_shard_map():
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")
    tokens = parallel.tokens_spec
    rows = parallel.rows_spec
    in_specs = (BATCH.specs(parallel), tokens, parallel.hidden_spec, parallel.kernel_spec())
    _, _, rest = jax.eval_shape(lambda *a: everything(None, *a), *ARRAYS)
    rest_specs = {**jax.tree.map(lambda _: P(), rest), "dkernel": parallel.kernel_spec()}
    inside = jax.shard_map(
        lambda *a: everything(parallel.axes, *a),
        mesh=parallel.mesh,
        in_specs=in_specs,
        out_specs=(tokens, rows, rest_specs),
    )
    assert_trees_close(jax.jit(inside)(*ARRAYS), EXPECTED(*ARRAYS), atol=3e-6)


@pytest.mark.every(2)
@pytest.mark.parametrize("mesh", ["dp=2,cp=4,tp=1", "dp=1,cp=4,tp=2"])
def test_no_device_can_be_left_waiting(mesh):
    parallel = make_parallel_mesh(mesh, context_layout="zigzag")
    batch = dataclasses.replace(BATCH, context_layout="zigzag", context_shards=4)
    program = jax.make_jaxpr(lambda *a: everything(parallel, *a))(batch, *ARRAYS[1:])
    assert collectives(program)
    assert hang_risks(program) == []


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2"])
def test_vmap(mesh):
    rewards = jnp.stack([BATCH.rewards, -BATCH.rewards])
    parallel = mesh and make_parallel_mesh(mesh)
    got = jax.vmap(lambda r: advantages.grpo(r, BATCH.group_ids, parallel=parallel))(rewards)
    expected = advantages.grpo(BATCH.rewards, BATCH.group_ids)
    assert_trees_close(got, jnp.stack([expected, -expected]), atol=1e-6)
