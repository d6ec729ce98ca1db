"""Options that users of TRL, Tunix and verl type first: the error says what to write.

And a stack given to a loss.
"""

import re
from functools import partial

import numpy as np
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
    (partial(PPO, epsilon=0.2), "epsilon: got 0.2 for PPO, expected clip_low=0.2, clip_high=0.2"),
    (partial(PPO, epsilon_high=0.28), "epsilon_high: got 0.28 for PPO, expected clip_high=0.28"),
    (partial(PPO, clip_ratio_c=3.0), "clip_ratio_c: got 3.0 for PPO, expected dual_clip=3.0"),
    (
        partial(PPO, beta=0.04),
        (
            "beta: got 0.04 for PPO, expected it in the config of the loss:"
            " PolicyLossConfig(PPO(...), "
        ),
    ),
    (
        partial(PPO, kl=0.04),
        (
            "kl: got 0.04 for PPO, expected it in the config of the loss:"
            " PolicyLossConfig(PPO(...), kl=KL"
        ),
    ),
    (partial(PPO, size=1), "size: got 1 for PPO, expected one of clip_low, clip_high, dual_clip"),
    (
        partial(GSPO, epsilon=3e-4),
        "epsilon: got 0.0003 for GSPO, expected clip_low=0.0003, clip_high=0.0003",
    ),
    (partial(Reinforce, epsilon=0.2), "epsilon: got 0.2 for Reinforce, expected no options"),
    (
        partial(by_name, "ppo", epsilon=0.2),
        "epsilon: got it with 'ppo', expected clip_low=0.2, clip_high=0.2",
    ),
    (partial(PolicyLossConfig, kl=0.04), "kl: got 0.04, expected KL(0.04) or None"),
    (
        partial(PolicyLossConfig, beta=0.04),
        "beta: got 0.04 for PolicyLossConfig, expected it in kl=KL(coef=0.04)",
    ),
    (
        partial(PolicyLossConfig, epsilon=0.2),
        "epsilon: got 0.2 for PolicyLossConfig, expected it in loss=PPO(clip_low=0.2, ",
    ),
    (
        partial(PolicyLossConfig, loss_type="grpo"),
        "loss_type: got 'grpo' for PolicyLossConfig, expected loss=...",
    ),
    (
        partial(PolicyLossConfig, loss_agg_mode="x"),
        "loss_agg_mode: got 'x' for PolicyLossConfig, expected aggregation=...",
    ),
    (
        partial(PolicyLossConfig, veto=0.1),
        "veto: got 0.1 for PolicyLossConfig, expected it in off_policy=OffPolicyConfig(",
    ),
    (partial(KL, beta=0.04), "beta: got 0.04 for KL, expected coef=0.04"),
    (partial(KL, 0.1, kl_type="k1"), "kl_type: got 'k1' for KL, expected estimator=..."),
    (
        partial(OffPolicyConfig, tis_cap=2.0),
        "tis_cap: got 2.0 for OffPolicyConfig, expected high=2.0",
    ),
    (
        partial(Rejection, "token_k1", lower=0.5),
        "lower: got 0.5 for Rejection, expected one of statistic, low, high, comp",
    ),
    (partial(preference.DPO, loss_type="ipo"), "loss_type: got 'ipo' for DPO, expected link=..."),
    (partial(preference.DPO, rpo_alpha=1.0), "rpo_alpha: got 1.0 for DPO, expected nll_coef=1.0"),
    (partial(preference.SimPO, gamma=1.0), "gamma: got 1.0 for SimPO, expected margin=1.0"),
    (partial(Value, cliprange_value=0.2), "cliprange_value: got 0.2 for Value, expected clip=0.2"),
    (
        partial(SFT, smoothing=0.1),
        "smoothing: got 0.1 for SFT, expected one of label_smoothing, z_loss, dft",
    ),
    (
        partial(Part, SFT(), weight=2.0),
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
STATS = TokenStats(np.zeros(STACK.tokens.shape, np.float32))
STATES = np.zeros((*STACK.tokens.shape, 4), np.float32), np.zeros((4, 8), np.float32)
READERS = {
    "policy_loss": partial(policy_loss, STATS, STACK, PolicyLossConfig()),
    "loss_from_stats": partial(loss_from_stats, STATS, STACK, PPO()),
    "loss_from_hidden": partial(loss_from_hidden, *STATES, STACK, SFT()),
    "policy_loss_from_hidden": partial(policy_loss_from_hidden, *STATES, STACK, PolicyLossConfig()),
    "mtp_loss": partial(mtp_loss, STATES[0][None], STATES[1], STACK),
    "draft_loss": partial(draft_loss, STATES[0][None], STATES[1], *STATES, STACK),
    "draft_metrics": partial(draft_metrics, STATES[0][None], STATES[1], *STATES, STACK),
    "mismatch_metrics": partial(mismatch_metrics, STACK),
    "entropy_metrics": partial(entropy_metrics, STATS, STACK),
}


@pytest.mark.parametrize("name", READERS)
def test_a_stack_given_to_a_loss(name):
    expected = (
        r"^batch: got a loss mask of shape \(2, 2, 3\), expected \[R, T\], one micro-batch for"
        rf" {name}: accumulate_g"
    )
    with pytest.raises(ValueError, match=expected):
        READERS[name]()
