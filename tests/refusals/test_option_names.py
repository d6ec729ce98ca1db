"""Options that users of TRL, Tunix and verl type first: the error says what to write.

And a stack given to a loss.
"""

import re

import jax.numpy as jnp
import pytest

from jaxppo import (
    KL,
    PPO,
    SFT,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    loss_from_hidden,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.contrib.draft import draft_loss, draft_metrics
from jaxppo.losses import Part, preference
from jaxppo.losses.mtp import mtp_loss
from jaxppo.mismatch import mismatch_metrics
from jaxppo.policy_losses import GSPO, Reinforce, by_name
from jaxppo.step.entropy import entropy_metrics

CALLS = [
    (lambda: PPO(epsilon=0.2), "epsilon: got 0.2 for PPO, expected clip_low=0.2, clip_high=0.2"),
    (lambda: PPO(epsilon_high=0.28), "epsilon_high: got 0.28 for PPO, expected clip_high=0.28"),
    (lambda: PPO(clip_ratio_c=3.0), "clip_ratio_c: got 3.0 for PPO, expected dual_clip=3.0"),
    (
        lambda: PPO(beta=0.04),
        (
            "beta: got 0.04 for PPO, expected it in the config of the loss:"
            " PolicyLossConfig(PPO(...), "
        ),
    ),
    (
        lambda: PPO(kl=0.04),
        (
            "kl: got 0.04 for PPO, expected it in the config of the loss:"
            " PolicyLossConfig(PPO(...), kl=KL"
        ),
    ),
    (lambda: PPO(size=1), "size: got 1 for PPO, expected one of clip_low, clip_high, dual_clip"),
    (
        lambda: GSPO(epsilon=3e-4),
        "epsilon: got 0.0003 for GSPO, expected clip_low=0.0003, clip_high=0.0003",
    ),
    (lambda: Reinforce(epsilon=0.2), "epsilon: got 0.2 for Reinforce, expected no options"),
    (
        lambda: by_name("ppo", epsilon=0.2),
        "epsilon: got it with 'ppo', expected clip_low=0.2, clip_high=0.2",
    ),
    (lambda: PolicyLossConfig(kl=0.04), "kl: got 0.04, expected KL(0.04) or None"),
    (
        lambda: PolicyLossConfig(beta=0.04),
        "beta: got 0.04 for PolicyLossConfig, expected it in kl=KL(coef=0.04)",
    ),
    (
        lambda: PolicyLossConfig(epsilon=0.2),
        "epsilon: got 0.2 for PolicyLossConfig, expected it in loss=PPO(clip_low=0.2, ",
    ),
    (
        lambda: PolicyLossConfig(loss_type="grpo"),
        "loss_type: got 'grpo' for PolicyLossConfig, expected loss=...",
    ),
    (
        lambda: PolicyLossConfig(loss_agg_mode="x"),
        "loss_agg_mode: got 'x' for PolicyLossConfig, expected aggregation=...",
    ),
    (
        lambda: PolicyLossConfig(veto=0.1),
        "veto: got 0.1 for PolicyLossConfig, expected it in off_policy=OffPolicyConfig(",
    ),
    (lambda: KL(beta=0.04), "beta: got 0.04 for KL, expected coef=0.04"),
    (lambda: KL(0.1, kl_type="k1"), "kl_type: got 'k1' for KL, expected estimator=..."),
    (
        lambda: OffPolicyConfig(tis_cap=2.0),
        "tis_cap: got 2.0 for OffPolicyConfig, expected high=2.0",
    ),
    (
        lambda: Rejection("token_k1", lower=0.5),
        "lower: got 0.5 for Rejection, expected one of statistic, low, high, comp",
    ),
    (lambda: preference.DPO(loss_type="ipo"), "loss_type: got 'ipo' for DPO, expected link=..."),
    (lambda: preference.DPO(rpo_alpha=1.0), "rpo_alpha: got 1.0 for DPO, expected nll_coef=1.0"),
    (lambda: preference.SimPO(gamma=1.0), "gamma: got 1.0 for SimPO, expected margin=1.0"),
    (lambda: Value(cliprange_value=0.2), "cliprange_value: got 0.2 for Value, expected clip=0.2"),
    (
        lambda: SFT(smoothing=0.1),
        "smoothing: got 0.1 for SFT, expected one of label_smoothing, z_loss, dft",
    ),
    (
        lambda: Part(SFT(), weight=2.0),
        "weight: got 2.0 for Part, expected one of loss, coef, mask, weights, equals",
    ),
]


@pytest.mark.parametrize(
    ("call", "message"), CALLS, ids=[message.split(",")[0] for _, message in CALLS]
)
def test_an_option_of_another_system(call, message):
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        call()


LOG_PROBS = {
    "old_log_probs": [-1.0, -1.0],
    "rollout_log_probs": [-1.0, -1.0],
    "advantages": [1.0, 1.0],
}
STACK = RolloutBatch.from_samples(
    [Sample([1, 2, 3], 1, **LOG_PROBS) for _ in range(4)], row_length=3, micro_batches=2
)
STATS = TokenStats(jnp.zeros(STACK.tokens.shape))
STATES = jnp.zeros((*STACK.tokens.shape, 4)), jnp.zeros((4, 8))
READERS = {
    "policy_loss": lambda: policy_loss(STATS, STACK, PolicyLossConfig()),
    "loss_from_stats": lambda: loss_from_stats(STATS, STACK, PPO()),
    "loss_from_hidden": lambda: loss_from_hidden(*STATES, STACK, SFT()),
    "policy_loss_from_hidden": lambda: policy_loss_from_hidden(*STATES, STACK, PolicyLossConfig()),
    "mtp_loss": lambda: mtp_loss(STATES[0][None], STATES[1], STACK),
    "draft_loss": lambda: draft_loss(STATES[0][None], STATES[1], *STATES, STACK),
    "draft_metrics": lambda: draft_metrics(STATES[0][None], STATES[1], *STATES, STACK),
    "mismatch_metrics": lambda: mismatch_metrics(STACK),
    "entropy_metrics": lambda: entropy_metrics(STATS, STACK),
}


@pytest.mark.parametrize("name", READERS)
def test_a_stack_given_to_a_loss(name):
    expected = (
        r"^batch: got a loss mask of shape \(2, 2, 3\), expected \[R, T\], one micro-batch for"
        rf" {name}: accumulate_g"
    )
    with pytest.raises(ValueError, match=expected):
        READERS[name]()
