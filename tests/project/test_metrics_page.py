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


def score(kernel, batch):
    return jaxppo.log_probs_from_hidden(hidden(batch), kernel, batch.targets)


def in_group(name):
    """A call of an estimator with the batch's rewards and groups."""

    def call(batch, whole):
        return getattr(advantages, name)(batch.rewards, **batch.groups)

    return call


def of_fields(fn, *names, **options):
    """A call of the function with these fields of the batch; "batch" is the batch itself."""

    def call(batch, whole):
        arguments = [batch if name == "batch" else getattr(batch, name) for name in names]
        return fn(*arguments, **options)

    return call


def of_stats(fn, *arguments):
    """A call with statistics, the batch and arguments."""

    def call(batch, whole):
        return fn(stats(batch), batch, *arguments)

    return call


def loss_of_stats(fn):
    """A loss of statistics with the normalizer of the whole step."""

    def call(batch, whole):
        return fn(stats(batch), batch, CONFIG, normalizer=whole)

    return call


def loss_of_hidden(fn):
    """A loss of hidden states with the normalizer of the whole step."""

    def call(batch, whole):
        return fn(hidden(batch), KERNEL, batch, CONFIG, normalizer=whole)

    return call


def gdpo(batch, whole):
    return advantages.gdpo([batch.rewards], batch.group_ids, batch)


def optimal_token_baseline(batch, whole):
    return advantages.optimal_token_baseline(
        batch.returns, with_squares(batch), batch.group_ids, batch
    )


def top_entropy_mask(batch, whole):
    return masks.top_entropy_mask(stats(batch).entropy, batch)


def log_probs_from_hidden(batch, whole):
    return score(KERNEL, batch)


def log_probs_from_logits(batch, whole):
    return jaxppo.log_probs_from_logits(hidden(batch) @ KERNEL, batch.targets)


def last_values(batch, whole):
    return advantages.last_values(batch.values, batch, batch.rewards > 0)


CLIP_COV = PolicyLossConfig(ClipCov())
STRICT = OffPolicyConfig(veto=1e-4)
REWARDS_OF_GROUPS = ("rewards", "group_ids", "batch")
CALLS = {name: in_group(name) for name in IN_GROUPS} | {
    "Normalizer.of": of_fields(functools.partial(Normalizer.of, CONFIG), "batch"),
    "opo": of_fields(advantages.opo, "rewards", "group_ids", "rewards"),
    "gdpo": gdpo,
    "standardize": of_fields(advantages.standardize, "rewards", "sample_ids"),
    "reinforce_plus_plus": of_fields(advantages.reinforce_plus_plus, "values", "batch"),
    "reinforce_plus_plus_baseline": of_fields(
        advantages.reinforce_plus_plus_baseline, *REWARDS_OF_GROUPS
    ),
    "optimal_token_baseline": optimal_token_baseline,
    "whiten": of_fields(advantages.whiten, "values", "loss_mask"),
    "explained_variance": of_fields(
        advantages.explained_variance, "values", "returns", "loss_mask"
    ),
    "losses.covariance.covariance_mask": of_stats(covariance_mask, CLIP_COV, jax.random.key(0)),
    "step.masks.second_moment_mask": of_fields(masks.second_moment_mask, "batch"),
    "step.masks.top_entropy_mask": top_entropy_mask,
    "policy_loss": loss_of_stats(jaxppo.policy_loss),
    "policy_loss_from_hidden": loss_of_hidden(jaxppo.policy_loss_from_hidden),
    "loss_from_stats": loss_of_stats(jaxppo.loss_from_stats),
    "loss_from_hidden": loss_of_hidden(jaxppo.loss_from_hidden),
    "log_probs_from_hidden": log_probs_from_hidden,
    "log_probs_from_logits": log_probs_from_logits,
    "losses.explain_tokens": loss_of_stats(losses.explain_tokens),
    "mismatch.mismatch_metrics": of_fields(mismatch.mismatch_metrics, "batch"),
    "mismatch.packing_metrics": of_fields(mismatch.packing_metrics, "batch"),
    "step.entropy.entropy_metrics": of_stats(entropy.entropy_metrics),
    "step.staleness.staleness_metrics": of_fields(staleness.staleness_metrics, "batch", version=4),
    "step.staleness.staleness_weights": of_fields(
        staleness.staleness_weights, "batch", version=4, limit=2
    ),
    "compute_log_probs": of_fields(
        functools.partial(jaxppo.compute_log_probs, score, KERNEL), "batch"
    ),
    "step.staleness.proximal_log_probs": of_fields(
        staleness.proximal_log_probs,
        "old_log_probs",
        "rollout_log_probs",
        "policy_versions",
        version=4,
    ),
    "accepted_samples": of_fields(advantages.accepted_samples, "batch", config=STRICT),
    "spread": of_fields(advantages.spread, "rewards", "batch"),
    "token_rewards": of_fields(advantages.token_rewards, "rewards", "batch"),
    "discounted_returns": of_fields(advantages.discounted_returns, "values", "batch"),
    "gae": of_fields(advantages.gae, "values", "values", "batch"),
    "last_values": last_values,
    "remax": of_fields(advantages.remax, "rewards", "rewards", "sample_ids"),
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
