"""The published policy losses, each on the loss tokens of one sequence.

A loss returns the loss of each token, `[n]`; its derivative by the log-probs, `[n]` where a token's
loss depends on its own log-prob alone, else the matrix `[n, n]` of d loss_t / d log_prob_t'; and
indicators of what it did, `[n]` by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .kl import clamp, inside
from .samples import Array


@dataclass
class Tokens:
    """The loss tokens of one sequence, `[n]` each.

    Constants of differentiation come from the log-probs `held`.
    """

    log_probs: Array
    old: Array
    advantages: Array
    held: Array
    selected: Array | None = None

    @property
    def d(self) -> Array:
        return self.log_probs - self.old

    @property
    def ratio(self) -> Array:
        """r = exp(log_prob - old_log_prob), its logarithm within [-20, 20]."""
        return np.exp(clamp(self.d))

    @property
    def ratio_slope(self) -> Array:
        return self.ratio * inside(self.d)

    @property
    def held_ratio(self) -> Array:
        return np.exp(clamp(self.held - self.old))

    def chosen(self) -> Array:
        if self.selected is None:
            raise ValueError("selected: got None, expected the tokens that the covariance picked")
        return np.asarray(self.selected, bool)


class TokenLoss(NamedTuple):
    values: Array
    jacobian: Array
    indicators: dict[str, Array]


def mean_of(x: Array) -> float:
    """The mean over the sequence's loss tokens, 0 where it has none."""
    return float(np.sum(x)) / max(len(x), 1)


def clipped_surrogate(
    s: Array, advantages: Array, low: float, high: float, dual: float | None
) -> tuple[Array, Array, dict[str, Array]]:
    """max(-A s, -A clip(s, 1 - low, 1 + high)), at most -A dual where A < 0; its derivative by s;
    what was clipped.

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347; dual clip: Ye et al. 2020,
    https://arxiv.org/abs/1912.09729.
    """
    plain = -advantages * s
    clipped = -advantages * np.clip(s, 1 - low, 1 + high)
    values = np.maximum(plain, clipped)
    slope = np.where(clipped > plain, 0.0, -advantages)
    indicators = {"clip_fraction": (clipped > plain) * 1.0}
    if dual is not None:
        capped = (advantages < 0) & (values > -advantages * dual)
        values = np.where(capped, -advantages * dual, values)
        slope = np.where(capped, 0.0, slope)
        indicators["clip_fraction_lower"] = capped * 1.0
    return values, slope, indicators


def ppo(
    t: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None
) -> TokenLoss:
    """The clipped surrogate of each token's ratio.

    Unequal bounds: Yu et al. 2025, https://arxiv.org/abs/2503.14476.
    """
    values, slope, indicators = clipped_surrogate(
        t.ratio, t.advantages, clip_low, clip_high, dual_clip
    )
    return TokenLoss(values, slope * t.ratio_slope, indicators)


def gspo(
    t: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    gradient: str = "sequence",
) -> TokenLoss:
    """The clipped surrogate of s = exp(mean of d); "token": log s_t = sg(mean - log_prob_t) +
    log_prob_t.

    Zheng et al. 2025, https://arxiv.org/abs/2507.18071.
    """
    n = len(t.d)
    if gradient == "token":
        log_s = mean_of(t.held - t.old) + t.log_probs - t.held
        s = np.exp(clamp(log_s))
        values, slope, indicators = clipped_surrogate(
            s, t.advantages, clip_low, clip_high, dual_clip
        )
        return TokenLoss(values, slope * s * inside(log_s), indicators)
    mean = mean_of(t.d)
    s = np.full(n, np.exp(clamp(mean)))
    values, slope, indicators = clipped_surrogate(s, t.advantages, clip_low, clip_high, dual_clip)
    return TokenLoss(values, np.outer(slope * s * inside(mean), np.ones(n) / max(n, 1)), indicators)


def cispo(
    t: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    level: str = "token",
    unified_mask: bool = False,
) -> TokenLoss:
    """-sg(clip(r, 1 - low, 1 + high)) A log_prob.

    MiniMax-M1 2025, https://arxiv.org/abs/2506.13585.

    Its equation 7 has a mask: A > 0 with r above the upper bound, A < 0 with r below the lower one.
    TRL and NeMo-RL have r = exp(mean of d) as well.
    """
    low = 1 - clip_low
    high = 1 + clip_high
    r = (
        t.held_ratio
        if level == "token"
        else np.full(len(t.d), np.exp(clamp(mean_of(t.held - t.old))))
    )
    weight = np.minimum(np.maximum(r, low), high)
    slope = -weight * t.advantages
    indicators = {"clip_fraction": (weight != r) * 1.0}
    if unified_mask:
        out = ((t.advantages > 0) & (r > high)) | ((t.advantages < 0) & (r < low))
        slope = np.where(out, 0.0, slope)
        indicators["masked_fraction"] = out * 1.0
    return TokenLoss(slope * t.log_probs, slope, indicators)


def aspo(
    t: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float = 3.0
) -> TokenLoss:
    """PPO's clip, and one over the ratio as the weight where A > 0.

    Wang et al. 2025, https://arxiv.org/abs/2510.06062.

    The authors' `compute_policy_loss_archer`, with one pair of bounds: -A max(r, 1 - low) where A <
    0, else -A (c / sg(c)) / sg(c) with c = min(r, 1 + high); -A dual log_prob where the weight, c
    or 1 / c, is above dual.
    """
    low = 1 - clip_low
    high = 1 + clip_high
    values = np.zeros(len(t.d))
    slope = np.zeros(len(t.d))
    clipped = np.zeros(len(t.d))
    heavy = np.zeros(len(t.d))
    for i, a in enumerate(t.advantages):
        r = t.ratio[i]
        held = t.held_ratio[i]
        moves = t.ratio_slope[i]
        if a < 0:
            now = max(r, low)
            weight = max(held, low)
            out = held < low
        else:
            now = min(r, high) / min(held, high) ** 2
            weight = 1 / min(held, high)
            out = held > high
            moves /= min(held, high) ** 2
        values[i], slope[i] = -a * now, 0.0 if out else -a * moves
        if weight > dual_clip:
            values[i], slope[i] = -a * dual_clip * t.log_probs[i], -a * dual_clip
        clipped[i], heavy[i] = a != 0 and out, a != 0 and weight > dual_clip
    return TokenLoss(values, slope, {"clip_fraction": clipped, "heavy_fraction": heavy})


def sapo(
    t: Tokens, *, tau_positive: float = 1.0, tau_negative: float = 1.05, level: str = "token"
) -> TokenLoss:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau by the sign of A.

    Gao et al. 2025, https://arxiv.org/abs/2511.20347.

    TRL and AReaL have r = exp(mean of d) as well.
    """
    n = len(t.d)
    tau = np.where(t.advantages > 0, tau_positive, tau_negative)
    mean = mean_of(t.d)
    r = t.ratio if level == "token" else np.full(n, np.exp(clamp(mean)))
    gate = np.exp(-np.logaddexp(0.0, -tau * (r - 1)))
    by_ratio = -4 * gate * (1 - gate) * t.advantages
    values = -4 / tau * gate * t.advantages
    if level == "token":
        return TokenLoss(values, by_ratio * t.ratio_slope, {})
    return TokenLoss(values, np.outer(by_ratio * r * inside(mean), np.ones(n) / max(n, 1)), {})


def vespo(
    t: Tokens,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> TokenLoss:
    """-sg(w^k exp(l (1 - w))) A log_prob, w the product of the sequence's ratios.
    https://arxiv.org/abs/2602.10693.

    TRL: each token's log-ratio within [-20, 20], log w within [log 1e-8, 20]; k and l by the sign
    of A.
    """
    w = np.exp(min(max(float(np.sum(clamp(t.held - t.old))), np.log(1e-8)), 20.0))
    below = t.advantages < 0
    k = np.where(below, k_negative, k_positive)
    rate = np.where(below, lambda_negative, lambda_positive)
    weight = w**k * np.exp(rate * (1 - w))
    slope = -weight * t.advantages
    return TokenLoss(slope * t.log_probs, slope, {"sequence_weight": weight})


def probability_mask(
    t: Tokens,
    *,
    clip_low: float = 0.3,
    clip_high: float = 0.3,
    ratio_cap: float = 1e4,
    pull: float = 0.0,
) -> TokenLoss:
    """-A min(r, cap), 0 where p - q is below -low or above high, plus pull d^2 everywhere.
    prime-rl, `ipo_loss_fn`.

    The cap leaves the gradient: it is that of min(r, cap) held, times log_prob.
    """
    moved = np.exp(t.held) - np.exp(t.old)
    out = (moved < -clip_low) | (moved > clip_high)
    slope = np.where(out, 0.0, -np.minimum(t.held_ratio, ratio_cap) * t.advantages)
    values = slope * (1 + t.log_probs - t.held) + pull * t.d**2
    return TokenLoss(values, slope + 2 * pull * t.d, {"clip_fraction": out * 1.0})


def reinforce(t: Tokens) -> TokenLoss:
    """-A log_prob.

    Williams 1992, https://doi.org/10.1007/BF00992696; GPG: https://arxiv.org/abs/2504.02546.
    """
    return TokenLoss(-t.advantages * t.log_probs, -t.advantages, {})


def by_sign(t: Tokens, *, positive: Any = None, negative: Any = None) -> TokenLoss:
    """One loss where A > 0 and another elsewhere, each by name and options.

    TOPR by token without them.

    Le Roux et al. 2025, https://arxiv.org/abs/2503.14286: -A log_prob, and -sg(min(r, 1)) A
    log_prob.
    """
    good = t.advantages > 0
    n = len(t.d)
    asked = (
        positive or {"name": "reinforce"},
        negative or {"name": "cispo", "clip_low": 1.0, "clip_high": 0.0},
    )
    one, two = (LOSSES[x["name"]](t, **{k: v for k, v in x.items() if k != "name"}) for x in asked)
    rows = [x.jacobian if x.jacobian.ndim == 2 else np.diag(x.jacobian) for x in (one, two)]
    names = {**one.indicators, **two.indicators}
    said = {
        k: np.where(good, one.indicators.get(k, np.zeros(n)), two.indicators.get(k, np.zeros(n)))
        for k in names
    }
    return TokenLoss(np.where(good, one.values, two.values), np.where(good[:, None], *rows), said)


def total_variation(log_p: Array, log_q: Array) -> Array:
    """|p - q|: between Bernoulli distributions, the sampled token against all others."""
    return np.abs(np.exp(log_p) - np.exp(log_q))


def binary_kl(log_p: Array, log_q: Array) -> Array:
    """q log(q / p) + (1 - q) log((1 - q) / (1 - p)): the same pair, by KL(q | p)."""
    q = np.exp(log_q)
    with np.errstate(divide="ignore", invalid="ignore"):
        rest = (1 - q) * (np.log(-np.expm1(log_q)) - np.log(-np.expm1(log_p)))
    return q * (log_q - log_p) + np.where(q == 1, 0.0, rest)


def dppo(
    t: Tokens,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ratio_cap: float = 20.0,
    divergence: Callable[[Array, Array], Array] = total_variation,
) -> TokenLoss:
    """-sg(min(r, cap)) A log_prob, 0 where p went the way of A further from q than the bound of
    that way.

    Qi et al. 2026, https://arxiv.org/abs/2602.04879: the mask is by divergence, not by ratio.
    """
    far = divergence(t.held, t.old)
    out_up = (t.advantages > 0) & (t.held > t.old) & (far > clip_high)
    out_down = (t.advantages < 0) & (t.held < t.old) & (far > clip_low)
    out = out_up | out_down
    slope = np.where(out, 0.0, -np.minimum(t.held_ratio, ratio_cap) * t.advantages)
    return TokenLoss(slope * t.log_probs, slope, {"clip_fraction": out * 1.0})


def dppo_tv(t: Tokens, **options: float) -> TokenLoss:
    """`dppo` by `total_variation`."""
    return dppo(t, divergence=total_variation, **options)


def dppo_kl(t: Tokens, **options: float) -> TokenLoss:
    """`dppo` by `binary_kl`."""
    return dppo(t, divergence=binary_kl, **options)


def gmpo(t: Tokens, *, clip_low: float = 0.2, clip_high: float = 0.2) -> TokenLoss:
    """-A exp(mean of d'), A the sequence's mean advantage; d' = min(d, high) where A_t > 0, max(d,
    -low) where A_t < 0.

    Zhao et al. 2025, https://arxiv.org/abs/2507.20673: one advantage a sequence, bounds in log
    space. Where tokens have advantages of their own, each is bounded by its own sign, and one of 0
    counts as d' = 0, as in verl.
    """
    n = len(t.d)
    a = mean_of(t.advantages)
    up = t.advantages > 0
    down = t.advantages < 0
    bounded = np.where(
        up, np.minimum(t.d, clip_high), np.where(down, np.maximum(t.d, -clip_low), 0.0)
    )
    mean = mean_of(bounded)
    value = -a * np.exp(clamp(mean))
    by_token = value * inside(mean) * ((bounded == t.d) & (up | down)) / max(n, 1)
    beyond = ((t.d > clip_high) | (t.d < -clip_low)) * 1.0
    indicators = {"clip_fraction": beyond * up, "clip_fraction_lower": beyond * down}
    return TokenLoss(np.full(n, value), np.outer(np.ones(n), by_token), indicators)


def dro(t: Tokens, *, beta: float = 0.1) -> TokenLoss:
    """-A log_prob + beta / 2 d^2. Richemond et al. 2024, https://arxiv.org/abs/2405.19107."""
    return TokenLoss(
        -t.advantages * t.log_probs + beta / 2 * t.d**2, -t.advantages + beta * t.d, {}
    )


def clip_cov(t: Tokens, **clips: Any) -> TokenLoss:
    """`ppo`, 0 and without gradient for the selected tokens.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617.
    """
    values, slope, _ = ppo(t, **clips)
    left = ~t.chosen()
    return TokenLoss(values * left, slope * left, {"clip_fraction": 1.0 - left})


def kl_cov(t: Tokens, *, coef: float = 1.0) -> TokenLoss:
    """-A r, and coef |d| more for the selected tokens.

    Cui et al. 2025, https://arxiv.org/abs/2505.22617.
    """
    chosen = t.chosen()
    values = -t.advantages * t.ratio + coef * np.abs(t.d) * chosen
    slope = -t.advantages * t.ratio_slope + coef * np.sign(t.d) * chosen
    return TokenLoss(values, slope, {"penalised_fraction": chosen * 1.0, "ppo_kl_abs": np.abs(t.d)})


LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "ppo": ppo,
    "gspo": gspo,
    "cispo": cispo,
    "sapo": sapo,
    "aspo": aspo,
    "reinforce": reinforce,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
    "gmpo": gmpo,
    "dro": dro,
    "vespo": vespo,
    "probability_mask": probability_mask,
    "by_sign": by_sign,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
}
