"""The policy losses of papers and systems, as `PolicyLossConfig`s.

A preset is only the loss. Advantages come from `jaxppo.advantages`; each docstring names the
estimator that the method was published with.
`dataclasses.replace(presets.dapo(), entropy_coef=1e-3)` changes a field.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import jax

from jaxppo.base.arrays import check, check_count, check_number, plain_number
from jaxppo.base.kl import KL
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.off_policy import OffPolicyConfig, Rejection
from jaxppo.policy_losses import (
    ASPO,
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    PPO,
    SAPO,
    VESPO,
    BySign,
    ClipCov,
    KLCov,
    PolicyLoss,
    ProbabilityMask,
    Reinforce,
)


def grpo() -> PolicyLossConfig:
    """Group relative policy optimisation: clip 0.2, k3 penalty with coefficient 0.04, a mean of
    sequence means.

    Each response counts the same, whatever its length. With `advantages.grpo`.

    Example:
      >>> grpo().kl
      KL(coef=0.04, estimator='k3', importance='none', compares='current/old')

    Shao et al. 2024, DeepSeekMath, https://arxiv.org/abs/2402.03300
    """
    return PolicyLossConfig(kl=KL(0.04), aggregation="sequence_mean_token_mean")


def dapo() -> PolicyLossConfig:
    """DAPO: the upper clip raised to 0.28 so that unlikely tokens can grow, a mean over tokens, no
    KL.

    With the token mean, a response's weight is proportional to its length. With `advantages.grpo`.

    Yu et al. 2025, https://arxiv.org/abs/2503.14476
    """
    return PolicyLossConfig(PPO(clip_low=0.2, clip_high=0.28), aggregation="token_mean")


def dr_grpo(max_tokens: int) -> PolicyLossConfig:
    """Dr.

    GRPO: token sums over one constant length, so that length is not rewarded; no KL. With
    `advantages.dr_grpo`.

    Args:
      max_tokens: the constant, in the paper the longest response allowed.

    Liu et al. 2025, Understanding R1-Zero-like training, https://arxiv.org/abs/2503.20783
    """
    check_count("max_tokens", max_tokens, least=1)
    return PolicyLossConfig(aggregation="sequence_mean_token_sum_norm", aggregation_norm=max_tokens)


def gspo() -> PolicyLossConfig:
    """GSPO: the ratio of whole sequences, so the clip is far narrower, 3e-4 and 4e-4.

    With `advantages.grpo`.

    Zheng et al. 2025, https://arxiv.org/abs/2507.18071
    """
    return PolicyLossConfig(GSPO(), aggregation="sequence_mean_token_mean")


def luspo() -> PolicyLossConfig:
    """LUSPO: GSPO's term of a sequence times its number of loss tokens, a mean over sequences.

    This is GSPO with a sum over tokens, so that length is not punished. The clip is 2e-3 and
    2.5e-3. With `advantages.grpo`.

    Example:
      >>> luspo().aggregation
      'sequence_mean_token_sum'

    2026, Length-unbiased sequence policy optimization, https://github.com/murphy4122/luspo
    """
    return PolicyLossConfig(GSPO(2e-3, 2.5e-3), aggregation="sequence_mean_token_sum")


def vespo() -> PolicyLossConfig:
    """VESPO: sequences softly weighed by the product of their ratios, a mean over tokens.

    With `advantages.grpo`.

    The ratios are over the sampler, whose drift `OffPolicyConfig` weights would count twice.

    2026, https://arxiv.org/abs/2602.10693
    """
    return PolicyLossConfig(VESPO(), aggregation="token_mean")


def prime_rl_default() -> PolicyLossConfig:
    """prime-rl's default since September 2026, "ipo": a token has no loss if its probability moved
    by more than 0.3.

    In August 2026 the bounds were 0.1, with `pull=1e-3`.

    Example:
      >>> prime_rl_default().ratio_to
      'rollout'

    https://github.com/PrimeIntellect-ai/prime-rl
    """
    return PolicyLossConfig(ProbabilityMask(), ratio_to="rollout", aggregation="token_mean")


def prime_rl_ref_kl() -> PolicyLossConfig:
    """prime-rl's `ref_kl`: on-policy distillation, the reverse KL of sampled tokens as their
    advantage.

    The advantages are `advantages.on_policy_distillation` of the current log-probs, computed again
    in each update. A token has no loss if its probability is 0.2 below the sampler's, whatever the
    sign of its advantage.

    Example:
      >>> prime_rl_ref_kl().loss.clip_low, prime_rl_ref_kl().loss.clip_high
      (0.2, 1.0)

    https://github.com/PrimeIntellect-ai/prime-rl
    """
    loss = ProbabilityMask(clip_low=0.2, clip_high=1.0)
    return PolicyLossConfig(loss, ratio_to="rollout", aggregation="token_mean")


def importance_sampling() -> PolicyLossConfig:
    """Tinker's `importance_sampling`: -r A over the sampler, no clip, a sum over tokens.

    It is PPO with bounds that no ratio meets. The sum makes the gradient grow with the batch.

    Example:
      >>> importance_sampling().loss
      PPO(clip_low=1.0, clip_high=1000000000.0, dual_clip=None)

    https://tinker-docs.thinkingmachines.ai/losses
    """
    return PolicyLossConfig(
        PPO(clip_low=1.0, clip_high=1e9), ratio_to="rollout", aggregation="token_sum"
    )


def tinker(loss_fn: str, **loss_fn_config: float) -> PolicyLossConfig:
    """Tinker's losses of a policy by their names and numbers: over the sampler, sums over tokens
    and samples.

    `cross_entropy` is `SFT(aggregation="token_sum")` with the weights as `loss_weights`. SkyRL's
    server takes means over each sequence, and 0.8 and 1.2 for cispo too.

    For gspo the batch's loss mask is Tinker's `sequence_ratio_mask`, over which the mean of the
    sequence's ratio is taken. Tokens that only the mean reads have an advantage of 0 here as there.
    A token that Tinker trains outside of that mask has no counterpart. There is no
    stable_reinforce: it needs the service's own record of what was sampled, and its formula is not
    public.

    Args:
      loss_fn: "importance_sampling", "ppo", "cispo", "gspo" or "dro".
      **loss_fn_config: its numbers. Bounds of the ratio itself, `clip_low_threshold` and
        `clip_high_threshold`: 0.8 and 1.2 for ppo, 0 and 4 for cispo, without a default for gspo.
        `beta` of dro, without a default.

    Raises:
      ValueError: another name, a number that the loss does not have or lacks, bounds out of order.

    Example:
      >>> tinker("ppo", clip_high_threshold=1.5).loss.clip_high
      0.5

    https://tinker-docs.thinkingmachines.ai/tinker/losses
    """
    known: dict[str, dict[str, Any]] = {
        "importance_sampling": {},
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "gspo": {"clip_low_threshold": None, "clip_high_threshold": None},
        "dro": {"beta": None},
    }
    check(
        "loss_fn",
        repr(loss_fn),
        isinstance(loss_fn, str) and loss_fn in known,
        f"one of {', '.join(known)}",
    )
    numbers = {}
    for name, x in {**known[loss_fn], **loss_fn_config}.items():
        expected = f"one of {', '.join(known[loss_fn]) or 'none'}"
        check(name, f"{x} for {loss_fn!r}", name in known[loss_fn], expected)
        numbers[name] = check_number(name, x, least=0)
    if loss_fn == "importance_sampling":
        return importance_sampling()
    loss: PolicyLoss
    if loss_fn == "dro":
        loss = DRO(**numbers)
    else:
        low, high = numbers.values()
        # the constructor makes them NaN
        traced = isinstance(low, jax.Array) or isinstance(high, jax.Array)
        good = traced or low <= 1 <= high
        check("clip_low_threshold", f"{low} and {high}", good, "low <= 1 <= clip_high_threshold")
        losses: dict[str, Callable[..., PolicyLoss]] = {
            "ppo": PPO,
            "cispo": CISPO,
            "gspo": partial(GSPO, gradient="token"),
        }
        loss = losses[loss_fn](1 - low, high - 1)
    return PolicyLossConfig(loss, ratio_to="rollout", aggregation="token_sum")


def cispo() -> PolicyLossConfig:
    """CISPO: REINFORCE weighted by a ratio that is clipped above only, a mean over tokens.

    With `advantages.grpo`.

    MiniMax 2025, MiniMax-M1, https://arxiv.org/abs/2506.13585
    """
    return PolicyLossConfig(CISPO(), aggregation="token_mean")


def sapo() -> PolicyLossConfig:
    """SAPO: a sigmoid gate in place of the clip, steeper (1.05) where A is not positive.

    With `advantages.grpo`.

    Gao et al. 2025, https://arxiv.org/abs/2511.20347
    """
    return PolicyLossConfig(SAPO(), aggregation="sequence_mean_token_mean")


def aspo() -> PolicyLossConfig:
    """ASPO: PPO's clip with one over the ratio as the weight where A > 0, at most 3.

    With `advantages.grpo`.

    Wang et al. 2025, https://arxiv.org/abs/2510.06062
    """
    return PolicyLossConfig(ASPO(), aggregation="token_mean")


def gmpo() -> PolicyLossConfig:
    """GMPO: the geometric mean of ratios, their logs clipped at 0.4, one value a sequence.

    With `advantages.grpo`.

    Zhao et al. 2025, https://arxiv.org/abs/2507.20673
    """
    return PolicyLossConfig(GMPO(), aggregation="sequence_mean_token_mean")


def gpg() -> PolicyLossConfig:
    """GPG: the plain score function, neither ratio nor KL. With `advantages.gpg`.

    Chu et al. 2025, https://arxiv.org/abs/2504.02546
    """
    return PolicyLossConfig(Reinforce(), ratio_to="current", aggregation="token_mean")


def topr() -> PolicyLossConfig:
    """TOPR: the score function where A > 0, min(r, 1) times it elsewhere, over the sampler; a mean
    over tokens.

    The ratio is of a token, as in ROLL and Trinity; the paper's is of a sequence. ROLL takes the
    sign of the raw score, not that of the advantage.

    Example:
      >>> topr().loss.positive
      Reinforce()

    Le Roux et al. 2025, https://arxiv.org/abs/2503.14286
    """
    return PolicyLossConfig(BySign(), ratio_to="rollout")


def up_grpo() -> PolicyLossConfig:
    """UP-GRPO: the score function where A > 0, without ratio and clip, and GRPO's clipped loss
    elsewhere.

    That is verl's PPO, clip 0.2 and dual clip 3. Nothing corrects an old sample with A > 0, and a
    note on the pull request reports a collapse where both signs are without bounds. With
    `advantages.grpo`.

    Example:
      >>> up_grpo().loss.negative.dual_clip
      3.0

    2026, https://arxiv.org/abs/2607.06987, https://github.com/volcengine/verl/pull/7022
    """
    return PolicyLossConfig(BySign(negative=PPO(dual_clip=3.0)))


def dppo() -> PolicyLossConfig:
    """DPPO: a token leaves the loss if its probability moved by more than 0.15 (total variation),
    whatever its ratio.

    The ratio is over the sampler's own log-probs. `DPPO("kl", 0.05, 0.05)` measures by binary KL.

    Qi et al. 2026, https://arxiv.org/abs/2602.04879
    """
    return PolicyLossConfig(DPPO(), ratio_to="rollout")


def clip_cov() -> PolicyLossConfig:
    """Clip-Cov: a few random tokens of high covariance leave the loss, against the collapse of
    entropy.

    It needs the `covariance_mask` of each step. With `advantages.grpo`.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617
    """
    return PolicyLossConfig(ClipCov())


def kl_cov() -> PolicyLossConfig:
    """KL-Cov: the tokens of highest covariance are held to their old log-prob; else as `clip_cov`.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617
    """
    return PolicyLossConfig(KLCov())


def truncated_importance_sampling() -> PolicyLossConfig:
    """PPO with tokens weighted by min(trainer / sampler, 2), for samplers in another precision; a
    mean over tokens.

    Yao et al. 2025, https://fengyao.notion.site/off-policy-rl
    """
    return PolicyLossConfig(off_policy=OffPolicyConfig(weights="token", high=2.0))


def sequence_masked_importance_sampling(
    low: float = 0.999, high: float = 1.002
) -> PolicyLossConfig:
    """PPO weighted by the unclipped trainer / sampler; a sequence has no loss if its geometric mean
    is out of bounds.

    "seq-mask-tis" of NeMo-RL and OpenRLHF, with NeMo-RL's bounds and a mean over tokens.

    Args:
      low: the smallest geometric mean.
      high: the largest.

    Raises:
      ValueError: bounds out of order.

    Example:
      >>> sequence_masked_importance_sampling(0.5, 2.0).off_policy.rejections[0].high
      2.0

    https://github.com/NVIDIA-NeMo/RL, https://github.com/OpenRLHF/OpenRLHF
    """
    low = plain_number("low", low, above=0)
    high = plain_number("high", high, above=low)
    rejection = Rejection("seq_mean_k1", 1 / high, 1 / low)  # k1 bounds are for sampler / trainer
    return PolicyLossConfig(
        off_policy=OffPolicyConfig(weights="token", high=math.inf, rejections=(rejection,))
    )


def rollout_is(clip_low: float = 0.2, clip_high: float = 0.28) -> PolicyLossConfig:
    """SkyRL's `rollout_is`: REINFORCE weighted by current / sampler, 0 outside of [1 - clip_low, 1
    + clip_high].

    A mean over tokens, SkyRL's default of August 2026. Only SkyRL ships it.

    Args:
      clip_low: from 0 to 1.
      clip_high: at least 0.

    Raises:
      ValueError: bounds out of range.

    Example:
      >>> rollout_is().off_policy.outside
      'zero'

    https://github.com/NovaSky-AI/SkyRL
    """
    clip_low = plain_number("clip_low", clip_low, least=0, most=1)
    clip_high = plain_number("clip_high", clip_high, least=0)
    low, high = 1 - clip_low, 1 + clip_high
    off_policy = OffPolicyConfig("token", low, high, outside="zero", compares="current/rollout")
    return PolicyLossConfig(Reinforce(), ratio_to="rollout", off_policy=off_policy)


def icepop() -> PolicyLossConfig:
    """IcePop: a token's weight is its trainer / sampler ratio, or 0 where that lies outside [0.5,
    5].

    Ling Team 2025, https://arxiv.org/abs/2510.18855
    """
    return PolicyLossConfig(
        off_policy=OffPolicyConfig(weights="token", low=0.5, high=5.0, outside="zero")
    )


def slime_default() -> PolicyLossConfig:
    """slime's defaults at 624b824a: clip 0.2, no dual clip, k1 with coefficient 0, loss and metrics
    by rollout.

    Example:
      >>> slime_default().aggregation, slime_default().metric_aggregation
      ('rollout_mean', 'loss')

    https://github.com/THUDM/slime
    """
    loss = PPO(clip_low=0.2, clip_high=0.2)
    return PolicyLossConfig(
        loss, kl=KL(0.0, "k1"), aggregation="rollout_mean", metric_aggregation="loss"
    )


def verl_default() -> PolicyLossConfig:
    """verl's defaults of 0.9.1: clip 0.2, dual clip 3, low_var_kl with coefficient 0, a mean over
    tokens.

    Example:
      >>> verl_default().loss
      PPO(clip_low=0.2, clip_high=0.2, dual_clip=3.0)

    https://github.com/verl-project/verl
    """
    loss = PPO(clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    return PolicyLossConfig(loss, kl=KL(0.0, "low_var_kl"), aggregation="token_mean")


__all__ = [
    name
    for name, x in list(vars().items())
    if isinstance(x, FunctionType) and x.__module__ == __name__
]
