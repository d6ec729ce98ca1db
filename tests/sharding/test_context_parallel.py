"""Every loss on rows of which some shards hold only prompts or padding: one device's numbers,
and no device waits.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hard_rows import LAYOUTS, hard_batch, layouts_on
from policy_steps import AGGREGATIONS, loss_named, with_selected
from policy_steps import LOSSES as NAMES

from jaxppo import (
    KL,
    SFT,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    TokenStats,
    Value,
    advantages,
    finalize_metrics,
    log_probs_from_hidden,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.losses.covariance import covariance_mask
from jaxppo.losses.distillation import distillation_loss
from jaxppo.mismatch import mismatch_metrics
from sharding import ShardAxes, make_parallel_mesh, vary
from sharding.audit import audit
from sharding.audit.program import collectives, hang_risks
from sharding.testing import assert_trees_close, factorings

BATCH, LOG_PROBS = hard_batch()
STATS = TokenStats(LOG_PROBS, jnp.abs(LOG_PROBS))


def configs():
    """Each loss with some aggregation, each aggregation at least once, and each kind of
    off-policy correction.
    """
    penalties = {"kl": KL(0.1), "entropy_coef": 0.01}
    found = {}
    for i, loss in enumerate(NAMES):
        aggregation = AGGREGATIONS[i % len(AGGREGATIONS)]
        norm = {"aggregation_norm": 9.0} if aggregation == "sequence_mean_token_sum_norm" else {}
        found[f"{loss} {aggregation}"] = PolicyLossConfig(
            loss_named(loss), aggregation=aggregation, **norm, **penalties
        )
    for name, options in {
        "token": {"weights": "token", "high": 1.1, "batch_normalize": True},
        "sequence": {"weights": "sequence", "high": 1.3, "outside": "zero", "veto": 1e-3},
        "geometric": {
            "weights": "geometric",
            "opsm_delta": 0.1,
            "rejections": (Rejection("seq_mean_k1", 0.5, 2.0),),
        },
    }.items():
        found[f"off policy {name}"] = PolicyLossConfig(off_policy=OffPolicyConfig(**options))
    return found


CONFIGS = configs()


def run_policy_loss(config, parallel, stats, batch):
    selected = None
    if config.loss.selects is not None:
        selected = covariance_mask(stats, batch, config, jax.random.key(7), parallel)
    return policy_loss(stats, with_selected(batch, selected), config, parallel=parallel)


LOSSES = {name: functools.partial(run_policy_loss, config) for name, config in CONFIGS.items()} | {
    "sft": lambda parallel, stats, batch: loss_from_stats(stats, batch, SFT(), parallel=parallel),
    "value": lambda parallel, stats, batch: loss_from_stats(
        stats.log_probs, batch, Value(), parallel=parallel
    ),
}


def everything(parallel, stats, batch):
    """Each loss with its gradient and metrics, denominators, advantages: all in one program."""
    found = {}
    for name, loss in LOSSES.items():
        fn = functools.partial(loss, parallel, batch=batch)
        (value, terms), gradient = jax.value_and_grad(fn, has_aux=True)(stats)
        found[name] = value, gradient, finalize_metrics(terms)
    tokens = jnp.where(batch.loss_mask > 0, stats.log_probs, 0)
    found["gae"] = advantages.gae(
        tokens, batch.values, batch, gamma=0.99, lam=0.95, parallel=parallel
    )
    found["whiten"] = advantages.whiten(stats.log_probs, batch.loss_mask, parallel=parallel)
    found["grpo"] = advantages.grpo(batch.rewards, batch.group_ids, parallel=parallel)
    found["rollouts"] = Normalizer.of(
        SFT(aggregation="rollout_mean"), batch, parallel=parallel
    ).denominators
    found["mismatch"] = finalize_metrics(mismatch_metrics(batch, parallel=parallel))
    return found


@functools.cache
def on_one_device():
    return jax.jit(functools.partial(everything, None))(STATS, BATCH)


CASES = [("dp=2,cp=2,tp=2", "zigzag_per_segment")]
ALL = [(mesh, layout) for mesh in factorings(8) for layout in LAYOUTS]
# its sequences are padded to 8 positions, and need 16
ALL.remove(("dp=1,cp=8,tp=1", "zigzag_per_segment"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mesh", "layout"),
    CASES + [pytest.param(*case, marks=pytest.mark.nightly) for case in ALL if case not in CASES],
)
def test_every_loss_has_the_numbers_of_one_device(mesh, layout):
    ((_, parallel, to_physical, to_logical),) = layouts_on(mesh, [layout])
    got = jax.jit(functools.partial(everything, parallel))(to_physical(STATS), to_physical(BATCH))
    got = jax.tree.map(to_logical, got)
    assert_trees_close(got, on_one_device(), rtol=1e-5, atol=2e-6, context=f"{mesh} {layout}")


def from_hidden(name, parallel, hidden, kernel, batch):
    """The loss by way of log-probs, of masked positions only."""
    counted = batch.loss_mask > 0
    stats = log_probs_from_hidden(
        hidden, kernel, batch.targets, entropy="bonus", where=counted, parallel=parallel
    )
    return LOSSES[name](parallel, stats, batch)


def at_once(config, parallel, hidden, kernel, batch):
    return policy_loss_from_hidden(hidden, kernel, batch, config, parallel=parallel)


def distilled(parallel, hidden, kernel, batch):
    return distillation_loss(hidden, kernel, hidden * 2, kernel + 1, batch, parallel=parallel)


PROGRAMS = {name: functools.partial(from_hidden, name) for name in LOSSES}
PROGRAMS |= {
    f"{loss} at once": functools.partial(at_once, PolicyLossConfig(loss_named(loss)))
    for loss in ("ppo", "gspo")
}
PROGRAMS["distillation"] = distilled


@pytest.mark.every(3)
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_loss_can_leave_a_device_waiting(name):
    """Losses with their gradients; see test_mtp for that one."""
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout="zigzag")
    shapes = (
        jax.ShapeDtypeStruct((*BATCH.targets.shape, 8), jnp.float32),
        jax.ShapeDtypeStruct((8, 64), jnp.float32),
    )
    loss = functools.partial(PROGRAMS[name], parallel)
    batch = dataclasses.replace(BATCH, context_layout="zigzag", context_shards=2)
    program = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1), has_aux=True))(*shapes, batch)
    assert collectives(program)
    assert hang_risks(program) == []


def test_a_device_with_padding_only_adds_exactly_nothing():
    """The gradient of the head that each of 8 devices contributes, before any sum: 0 where there
    is no loss token.
    """
    parallel = make_parallel_mesh("dp=2,cp=4")
    rng = np.random.default_rng(0)
    hidden = np.where(
        BATCH.loss_mask[..., None] > 0, rng.normal(size=(*BATCH.targets.shape, 8)), np.nan
    )
    hidden = jnp.asarray(hidden, jnp.float32)
    kernel = jnp.asarray(rng.normal(size=(8, 64)), jnp.float32)
    config = PolicyLossConfig(kl=KL(0.1), entropy_coef=0.01)
    axes: ShardAxes = parallel.axes

    def contributions(kernel, hidden, batch):
        own = vary(kernel, axes.tokens)

        def loss(kernel):
            stats = log_probs_from_hidden(
                hidden,
                kernel,
                batch.targets,
                entropy="bonus",
                where=batch.loss_mask > 0,
                parallel=axes,
            )
            return policy_loss(stats, batch, config, parallel=axes)[0]

        return jax.grad(loss)(own)[None, None]

    spec = jax.P("dp", "cp")
    in_specs = (jax.P(), parallel.tokens_spec, BATCH.specs(parallel))
    inside = jax.shard_map(contributions, mesh=parallel.mesh, in_specs=in_specs, out_specs=spec)
    found = np.asarray(jax.jit(inside)(kernel, hidden, BATCH))
    # by data and context shard
    tokens = np.asarray(BATCH.loss_mask).reshape(2, 4, 4, 8).sum(axis=(1, 3))
    assert (tokens == 0).any()
    assert (tokens > 0).any()
    for place in np.ndindex(2, 4):
        if tokens[place] == 0:
            assert not found[place].any(), place
        else:
            assert np.abs(found[place]).max() > 1e-4, place

    def whole(kernel):
        stats = log_probs_from_hidden(
            hidden, kernel, BATCH.targets, entropy="bonus", where=BATCH.loss_mask > 0
        )
        return policy_loss(stats, BATCH, config)[0]

    np.testing.assert_allclose(
        found.sum(axis=(0, 1)), jax.jit(jax.grad(whole))(kernel), rtol=1e-4, atol=1e-6
    )


def test_what_is_none_has_no_collectives():
    """Without entropy and reference log-probs fewer bytes are sent.

    Values, which no policy loss reads, add none.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2")

    def sharded(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=parallel.sharding(spec))

    states = jnp.zeros((*BATCH.targets.shape, 8)), jnp.zeros((8, 64))
    states = [
        sharded(x, spec)
        for x, spec in zip(states, (parallel.hidden_spec, parallel.kernel_spec()), strict=True)
    ]

    def moved(entropy, batch, **options):
        def loss(hidden, kernel, batch):
            stats = log_probs_from_hidden(
                hidden, kernel, batch.targets, entropy=entropy, parallel=parallel
            )
            return policy_loss(stats, batch, PolicyLossConfig(**options), parallel=parallel)

        shapes = jax.tree.map(sharded, batch, batch.specs(parallel))
        found = audit(jax.grad(loss, (0, 1), has_aux=True), *states, shapes).collectives
        return sum(c.bytes for c in found if "tp" in c.axes), sum(
            c.bytes for c in found if "tp" not in c.axes
        )

    bare = dataclasses.replace(BATCH, ref_log_probs=None, values=None)
    none = moved("none", bare)
    metric = moved("metric", bare)
    assert none[0] < metric[0]  # the sum of the entropy over the vocabulary
    assert none[1] < metric[1]  # its metric
    assert moved("none", dataclasses.replace(BATCH, ref_log_probs=None)) == none
    with_reference = moved("none", BATCH, kl=KL(0.1))
    assert with_reference[0] == none[0]
    assert none[1] < with_reference[1]
