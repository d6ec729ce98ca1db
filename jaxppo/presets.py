"""Policy losses as papers and systems have them: each a `PolicyLossConfig`, with any field changed by keyword.

A preset is the loss only. Advantages come from `jaxppo.advantages`, and each docstring names those that the method is
published with.
"""

from __future__ import annotations

from typing import Any

from jaxppo.config import PolicyLossConfig
from jaxppo.off_policy import OffPolicyConfig

__all__ = [
    "cispo",
    "clip_cov",
    "dapo",
    "dppo",
    "dr_grpo",
    "gmpo",
    "gpg",
    "grpo",
    "gspo",
    "icepop",
    "kl_cov",
    "sapo",
    "slime_default",
    "truncated_importance_sampling",
    "verl_default",
]


def _preset(changes: dict[str, Any], **fields: Any) -> PolicyLossConfig:
    return PolicyLossConfig(**fields | changes)


def grpo(**changes: Any) -> PolicyLossConfig:
    """Group relative policy optimisation: clip 0.2, k3 against the reference with 0.04, a mean of sequence means.

    Each response counts the same, whatever its length. With `advantages.grpo`.

    Args:
      **changes: fields of `PolicyLossConfig`.

    Example:
      >>> grpo(entropy_coef=1e-3).kl_coef
      0.04

    Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300
    """
    return _preset(changes, kl_coef=0.04, kl_estimator="k3", aggregation="sequence_mean_token_mean")


def dapo(**changes: Any) -> PolicyLossConfig:
    """DAPO: the upper clip raised to 0.28 so that unlikely tokens can grow, a mean over tokens, no KL.

    The token mean lets long responses weigh what they are long. With `advantages.grpo`.

    Yu et al. 2025, https://arxiv.org/abs/2503.14476
    """
    return _preset(changes, clip_low=0.2, clip_high=0.28, aggregation="token_mean")


def dr_grpo(max_tokens: float, **changes: Any) -> PolicyLossConfig:
    """Dr. GRPO: token sums over one constant length, so that length is not rewarded; no KL. With `advantages.dr_grpo`.

    Args:
      max_tokens: the constant, in the paper the longest response allowed.
      **changes: fields of `PolicyLossConfig`.

    Liu et al. 2025, Understanding R1-Zero-like training, https://arxiv.org/abs/2503.20783
    """
    return _preset(changes, aggregation="sequence_mean_token_sum_norm", aggregation_norm=max_tokens)


def gspo(**changes: Any) -> PolicyLossConfig:
    """GSPO: the ratio of whole sequences, so the clip is far narrower, 3e-4 and 4e-4. With `advantages.grpo`.

    Zheng et al. 2025, https://arxiv.org/abs/2507.18071
    """
    return _preset(changes, loss="gspo", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean_token_mean")


def cispo(**changes: Any) -> PolicyLossConfig:
    """CISPO: REINFORCE weighted by a ratio that is clipped above only, a mean over tokens. With `advantages.grpo`.

    `clip_low=1` is no lower bound. The paper tunes the upper one and does not state it; 0.28 is slime's.

    MiniMax 2025, MiniMax-M1, https://arxiv.org/abs/2506.13585
    """
    return _preset(changes, loss="cispo", clip_low=1.0, clip_high=0.28, aggregation="token_mean")


def sapo(**changes: Any) -> PolicyLossConfig:
    """SAPO: a sigmoid gate in place of the clip, steeper (1.05) where A is not positive. With `advantages.grpo`.

    Gao et al. 2025, https://arxiv.org/abs/2511.20347
    """
    return _preset(changes, loss="sapo", aggregation="sequence_mean_token_mean")


def gmpo(**changes: Any) -> PolicyLossConfig:
    """GMPO: the geometric mean of ratios, their logs clipped at 0.4, one value a sequence. With `advantages.grpo`.

    Zhao et al. 2025, https://arxiv.org/abs/2507.20673
    """
    return _preset(changes, loss="gmpo", clip_low=0.4, clip_high=0.4, aggregation="sequence_mean_token_mean")


def gpg(**changes: Any) -> PolicyLossConfig:
    """GPG: the plain score function, neither ratio nor KL. With `advantages.gpg`.

    Chu et al. 2025, https://arxiv.org/abs/2504.02546
    """
    return _preset(changes, loss="gpg", old_log_probs="current", aggregation="token_mean")


def dppo(**changes: Any) -> PolicyLossConfig:
    """DPPO: tokens leave the loss by how far their probability moved, total variation over 0.15, not by the ratio.

    The ratio is over the sampler's own log-probs. `loss="dppo_kl"` measures by binary KL, which wants bounds of 0.05.

    Qi et al. 2026, https://arxiv.org/abs/2602.04879
    """
    return _preset(changes, loss="dppo_tv", clip_low=0.15, clip_high=0.15, old_log_probs="sampler")


def clip_cov(**changes: Any) -> PolicyLossConfig:
    """Clip-Cov: a few random tokens of high covariance leave the loss, against the collapse of entropy.

    Wants the `covariance_mask` of each step. With `advantages.grpo`.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617
    """
    return _preset(changes, loss="clip_cov", cov_ratio=2e-4, cov_low=1.0, cov_high=5.0)


def kl_cov(**changes: Any) -> PolicyLossConfig:
    """KL-Cov: the tokens of highest covariance are held to their old log-prob, against the collapse of entropy.

    Wants the `covariance_mask` of each step. 2e-3 of the tokens, as for 7B models; the paper has 2e-4 for 32B.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617
    """
    return _preset(changes, loss="kl_cov", cov_ratio=2e-3, kl_cov_coef=1.0)


def truncated_importance_sampling(**changes: Any) -> PolicyLossConfig:
    """PPO whose tokens are weighted by min(trainer / sampler, 2), for samplers of another precision. Token means.

    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl
    """
    return _preset(changes, off_policy=OffPolicyConfig(weights="token", high=2.0))


def icepop(**changes: Any) -> PolicyLossConfig:
    """IcePop: tokens whose trainer / sampler ratio leaves [0.5, 5] count nothing, the others by that ratio.

    Ling Team 2025, https://arxiv.org/abs/2510.18855
    """
    return _preset(changes, off_policy=OffPolicyConfig(weights="token", low=0.5, high=5.0, outside="zero"))


def slime_default(**changes: Any) -> PolicyLossConfig:
    """slime's defaults: clip 0.2, no dual clip, k1 (off), one denominator for each rollout, metrics like the loss.

    https://github.com/THUDM/slime
    """
    return _preset(changes, kl_estimator="k1", aggregation="rollout_mean", metric_aggregation="loss")


def verl_default(**changes: Any) -> PolicyLossConfig:
    """verl's defaults: clip 0.2, dual clip 3, low_var_kl (off), a mean over tokens; GSPO's gradient by token.

    https://github.com/volcengine/verl
    """
    dual_clip = 3.0 if changes.get("loss", "ppo") == "ppo" else None
    return _preset(changes, dual_clip=dual_clip, kl_estimator="low_var_kl", gspo_gradient="token")
