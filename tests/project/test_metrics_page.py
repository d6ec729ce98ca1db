"""The page on metrics: its table of what takes one micro-batch and what takes the stack,
function by function.
"""

import functools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxppo
from jaxppo import (
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    accumulate_gradients,
    advantages,
    losses,
    mismatch,
)
from jaxppo.losses.covariance import covariance_mask
from jaxppo.policy_losses import ClipCov
from jaxppo.step import entropy, masks, staleness

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text()
CONFIG = PolicyLossConfig()
KERNEL = jnp.full((4, 16), 0.1)
IN_GROUPS = ("grpo", "dr_grpo", "rloo", "gpg", "pass_at_k", "maxrl", "pass_rates")


def sample(i):
    n = 2 + i % 2
    log_probs = {f"{who}_log_probs": [-1.0] * n for who in ("old", "rollout", "ref")}
    values = {name: [0.1] * n for name in ("values", "returns", "advantages")}
    ids = {"reward": i % 3, "group_id": i // 4, "policy_versions": 3}
    return Sample([1, 2, *range(3, 3 + n)], 2, **log_probs, **values, **ids)


@functools.cache
def packed(**sizes):
    batch = RolloutBatch.from_samples([sample(i) for i in range(8)], row_length=10, **sizes)
    return jax.tree.map(jnp.asarray, batch)


@functools.cache
def whole_step():
    return Normalizer.of(CONFIG, packed(micro_batches=2))


def hidden(batch):
    return jnp.ones((*batch.tokens.shape, 4))


def stats(batch):
    return TokenStats(jnp.where(batch.loss_mask > 0, -1.0, 0.0), jnp.ones(batch.tokens.shape))


def with_squares(batch):
    return TokenStats(stats(batch).log_probs, sum_p2=jnp.full(batch.tokens.shape, 0.5))


def in_group(name):
    return lambda batch, _: getattr(advantages, name)(batch.rewards, **batch.groups)


def score(kernel, batch):
    return jaxppo.log_probs_from_hidden(hidden(batch), kernel, batch.targets)


CALLS = {name: in_group(name) for name in IN_GROUPS} | {
    "Normalizer.of": lambda batch, _: Normalizer.of(CONFIG, batch),
    "opo": lambda batch, _: advantages.opo(batch.rewards, batch.group_ids, batch.rewards),
    "gdpo": lambda batch, _: advantages.gdpo([batch.rewards], batch.group_ids, batch),
    "standardize": lambda batch, _: advantages.standardize(batch.rewards, batch.sample_ids),
    "reinforce_plus_plus": lambda batch, _: advantages.reinforce_plus_plus(batch.values, batch),
    "reinforce_plus_plus_baseline": lambda batch, _: advantages.reinforce_plus_plus_baseline(
        batch.rewards, batch.group_ids, batch
    ),
    "optimal_token_baseline": lambda batch, _: advantages.optimal_token_baseline(
        batch.returns, with_squares(batch), batch.group_ids, batch
    ),
    "whiten": lambda batch, _: advantages.whiten(batch.values, batch.loss_mask),
    "explained_variance": lambda batch, _: advantages.explained_variance(
        batch.values, batch.returns, batch.loss_mask
    ),
    "losses.covariance.covariance_mask": lambda batch, _: covariance_mask(
        stats(batch), batch, PolicyLossConfig(ClipCov()), jax.random.key(0)
    ),
    "step.masks.second_moment_mask": lambda batch, _: masks.second_moment_mask(batch),
    "step.masks.top_entropy_mask": lambda batch, _: masks.top_entropy_mask(
        stats(batch).entropy, batch
    ),
    "policy_loss": lambda batch, whole: jaxppo.policy_loss(
        stats(batch), batch, CONFIG, normalizer=whole
    ),
    "policy_loss_from_hidden": lambda batch, whole: jaxppo.policy_loss_from_hidden(
        hidden(batch), KERNEL, batch, CONFIG, normalizer=whole
    ),
    "loss_from_stats": lambda batch, whole: jaxppo.loss_from_stats(
        stats(batch), batch, CONFIG, normalizer=whole
    ),
    "loss_from_hidden": lambda batch, whole: jaxppo.loss_from_hidden(
        hidden(batch), KERNEL, batch, CONFIG, normalizer=whole
    ),
    "log_probs_from_hidden": lambda batch, _: score(KERNEL, batch),
    "log_probs_from_logits": lambda batch, _: jaxppo.log_probs_from_logits(
        hidden(batch) @ KERNEL, batch.targets
    ),
    "losses.explain_tokens": lambda batch, whole: losses.explain_tokens(
        stats(batch), batch, CONFIG, normalizer=whole
    ),
    "mismatch.mismatch_metrics": lambda batch, _: mismatch.mismatch_metrics(batch),
    "mismatch.packing_metrics": lambda batch, _: mismatch.packing_metrics(batch),
    "step.entropy.entropy_metrics": lambda batch, _: entropy.entropy_metrics(stats(batch), batch),
    "step.staleness.staleness_metrics": lambda batch, _: staleness.staleness_metrics(batch, 4),
    "step.staleness.staleness_weights": lambda batch, _: staleness.staleness_weights(
        batch, 4, limit=2
    ),
    "compute_log_probs": lambda batch, _: jaxppo.compute_log_probs(score, KERNEL, batch),
    "step.staleness.proximal_log_probs": lambda batch, _: staleness.proximal_log_probs(
        batch.old_log_probs, batch.rollout_log_probs, batch.policy_versions, 4
    ),
    "accepted_samples": lambda batch, _: advantages.accepted_samples(
        batch, OffPolicyConfig(veto=1e-4)
    ),
    "spread": lambda batch, _: advantages.spread(batch.rewards, batch),
    "token_rewards": lambda batch, _: advantages.token_rewards(batch.rewards, batch),
    "discounted_returns": lambda batch, _: advantages.discounted_returns(batch.values, batch),
    "gae": lambda batch, _: advantages.gae(batch.values, batch.values, batch),
    "last_values": lambda batch, _: advantages.last_values(batch.values, batch, batch.rewards > 0),
    "remax": lambda batch, _: advantages.remax(batch.rewards, batch.rewards, batch.sample_ids),
}
ROWS = dict(
    re.findall(r"^\| (the stack|one micro-batch|either)[^|]*\| (.*) \|$", PAGE, re.MULTILINE)
)
TAKES = {name: takes for takes, names in ROWS.items() for name in re.findall(r"`([\w.]+)`", names)}
TAKES.pop("advantages")  # "of `advantages`:"


def test_every_name_of_the_table_is_called():
    assert {*TAKES} == {*CALLS}


@pytest.mark.parametrize("name", CALLS)
def test_what_a_function_takes(name):
    """A batch that is a whole step, the stack, and one micro-batch inside of
    `accumulate_gradients`.

    Traced alone: what a function takes is a question of shapes.
    """
    call = CALLS[name]
    takes = TAKES[name]
    jax.eval_shape(call, packed(), None)
    stack = packed(micro_batches=2)
    whole = whole_step()
    if takes == "one micro-batch":
        with pytest.raises(ValueError, match=r"expected \[R, T"):
            jax.eval_shape(call, stack, whole)
    else:
        jax.eval_shape(call, stack, whole)

    def loss_fn(x, part):
        call(*part)
        return x * 1.0, {}

    step = accumulate_gradients(loss_fn, (stack, whole))
    if takes == "the stack":
        with pytest.raises(
            ValueError,
            match="got one micro-batch inside accumulate_gradients, expected the whole step",
        ):
            jax.eval_shape(step, jnp.ones(()))
    else:
        jax.eval_shape(step, jnp.ones(()))


def test_the_page_merges_means_of_uneven_micro_batches():
    """The log-probs of the page: 2 of 4 are below -2.5, where the shares of the parts, 1/3 and
    1, have the mean 2/3.
    """
    old = [np.array([-1.0, -2.0, -3.0]), np.array([-5.0])]
    together = np.concatenate(old)
    found = {
        "unlikely": (together < -2.5).mean(),
        "log_prob_abs_diff": np.abs(together + 1.0).mean(),
    }
    found["pass_rate"] = np.mean([1.0, 0.0])
    assert f"{ {name: float(x) for name, x in found.items()} }" in PAGE
    assert np.mean([(x < -2.5).mean() for x in old]) == pytest.approx(2 / 3)
