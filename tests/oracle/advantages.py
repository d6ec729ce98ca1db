"""Advantage estimators: along one sequence (`[m]`), over all tokens of a step, over the samples
of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .samples import Array


def _read(x: Any, mask: Any) -> Array:
    """x on the tokens with mask 1, whatever stands elsewhere."""
    return np.asarray(x, np.float64)[np.asarray(mask) > 0]


def _write(x: Array, mask: Any) -> Array:
    """`[n]` to `[m]`, 0 where the mask is 0."""
    out = np.zeros(len(mask))
    out[np.asarray(mask) > 0] = x
    return out


def token_rewards(reward: float, mask: Any, kl: Any = None, kl_coef: float = 0.0) -> Array:
    """r_t = [t is the last response token] R - c kl_t on response tokens."""
    r = np.zeros(int(np.sum(np.asarray(mask) > 0)))
    if kl is not None:
        r = -kl_coef * _read(kl, mask)
    if len(r):
        r[-1] += reward
    return _write(r, mask)


def discounted_returns(rewards: Any, mask: Any, gamma: float = 1.0, masked: str = "skip") -> Array:
    """G_t = sum over k of gamma^k r_(t + k); a masked token between counts no step ("skip") or
    one ("discount").
    """
    here = np.nonzero(np.asarray(mask) > 0)[0]
    place = np.arange(len(here)) if masked == "skip" else here
    r = _read(rewards, mask)
    later = place[None, :] - place[:, None]
    return _write(
        np.sum(np.where(later >= 0, gamma ** np.maximum(later, 0), 0.0) * r, axis=1), mask
    )


def gae(
    rewards: Any,
    values: Any,
    mask: Any,
    gamma: float = 1.0,
    lam: float = 1.0,
    value_lam: float | None = None,
    length_alpha: float | None = None,
    last_value: float = 0.0,
) -> tuple[Array, Array]:
    """A_t = sum over l of (gamma lam)^l delta_(t + l), delta_t = r_t + gamma V_(t + 1) - V_t;
    returns A(value_lam) + V.

    Steps are loss tokens, and `last_value` is V after the last one. Schulman et al. 2015,
    https://arxiv.org/abs/1506.02438, equation 16; value_lam: VC-PPO,
    https://arxiv.org/abs/2503.01491; length_alpha, lambda = 1 - 1 / (alpha n) for n tokens, at
    least 0: VAPO, https://arxiv.org/abs/2504.05118.
    """
    r = _read(rewards, mask)
    v = _read(values, mask)
    delta = r + gamma * np.append(v[1:], last_value)[: len(v)] - v

    def estimate(decay: float) -> Array:
        return np.array([np.sum(decay ** np.arange(len(v) - t) * delta[t:]) for t in range(len(v))])

    returns = estimate(gamma * (lam if value_lam is None else value_lam)) + v
    if length_alpha is not None:
        lam = 1 - 1 / (length_alpha * len(v)) if length_alpha * len(v) > 1 else 0.0
    return _write(estimate(gamma * lam), mask), _write(returns, mask)


def whiten(
    arrays: Sequence[Any],
    masks: Sequence[Any],
    *,
    among: Sequence[Any] | None = None,
    shift_mean: bool = True,
    epsilon: float = 1e-12,
) -> list[Array]:
    """(x - mean) / sqrt(var + epsilon), mean and var over the tokens of the step (or those among
    them).

    The variance is over n - 1 (0 for one token). Tokens that are not among those are only shifted
    by the mean if the variance is 0, and 0 if there are no such tokens.
    """
    among = (
        masks
        if among is None
        else [np.asarray(a) * np.asarray(m) for a, m in zip(among, masks, strict=True)]
    )
    counted = np.concatenate(
        [np.zeros(0), *(_read(a, m) for a, m in zip(arrays, among, strict=True))]
    )
    n = len(counted)
    mean = counted.sum() / max(n, 1)
    scale = np.sqrt(np.sum((counted - mean) ** 2) / max(n - 1, 1) + epsilon)
    out = []
    for x, mask, counts in zip(arrays, masks, among, strict=True):
        of = np.where(_read(counts, mask) > 0, scale, scale if n and np.ptp(counted) > 0 else 1.0)
        out.append(
            _write(((_read(x, mask) - mean) / of + (0.0 if shift_mean else mean)) * (n > 0), mask)
        )
    return out


def explained_variance(
    values: Sequence[Any], returns: Sequence[Any], masks: Sequence[Any]
) -> float:
    """1 - var(G - V) / var(G) over the tokens of the step; 0 without a variance, of which
    nothing can be explained.
    """
    v, g = (
        np.concatenate([_read(a, m) for a, m in zip(x, masks, strict=True)])
        for x in (values, returns)
    )
    return 1 - np.var(g - v) / np.var(g) if len(g) > 1 and np.ptp(g) > 0 else 0.0


def spread(x: Any, masks: Sequence[Any]) -> list[Array]:
    """Each sample's number on its loss tokens."""
    return [
        _write(np.full(int(np.sum(np.asarray(m) > 0)), float(v)), m)
        for v, m in zip(x, masks, strict=True)
    ]


def overlong_penalty(lengths: Any, max_length: float, buffer: float, factor: float = 1.0) -> Array:
    """DAPO, 2503.14476, equation 13, times a factor."""
    out = []
    for n in lengths:
        if n <= max_length - buffer:
            out.append(0.0)
        else:
            out.append(factor * ((max_length - buffer - n) / buffer if n <= max_length else -1.0))
    return np.array(out)


def _of_rollouts(formula: Callable[..., Array]) -> Callable[..., Array]:
    """An estimator of samples from one of rollouts: formula(rewards, groups, [lengths], counts=,
    ...).

    The samples of a rollout have one reward, one group and the sum of their lengths. A rollout
    without a reward, NaN, is in nothing and has advantage 0. `counts` tells which rollouts are
    among those that make statistics.
    """

    def run(
        rewards: Any,
        groups: Any,
        lengths: Any = None,
        *,
        among: Any = None,
        rollouts: Any = None,
        **options: Any,
    ) -> Array:
        keys = list(range(len(rewards)) if rollouts is None else rollouts)
        firsts: dict[Any, int] = {}
        for i, key in enumerate(keys):
            firsts.setdefault(key, i)
        known = [key for key, i in firsts.items() if not np.isnan(rewards[i])]
        at = [firsts[key] for key in known]
        given = [np.asarray(rewards, np.float64)[at], np.asarray(groups)[at]]
        if lengths is not None:
            total = dict.fromkeys(keys, 0.0)
            for key, length in zip(keys, lengths, strict=True):
                total[key] += float(length)
            given.append(np.array([total[key] for key in known]))
        counts = np.ones(len(at), bool) if among is None else np.asarray(among, bool)[at]
        found = dict(zip(known, formula(*given, counts=counts, **options), strict=True))
        return np.array([found.get(key, 0.0) for key in keys])

    return run


def _groups(r: Array, g: Array, counts: Array) -> list[tuple[int, Array, Array]]:
    """For each sample: its place, the rewards of its group that count, and those of the others
    in it.
    """
    places = np.arange(len(r))
    return [
        (i, r[(g == g[i]) & counts], r[(g == g[i]) & counts & (places != i)]) for i in range(len(r))
    ]


def _deviation(x: Array) -> float:
    """Over n - 1."""
    return float(np.sqrt(np.sum((x - x.mean()) ** 2) / (len(x) - 1)))


def _scale(x: Array, epsilon: float) -> float:
    """The deviation plus epsilon; 1 where all are equal."""
    return _deviation(x) + epsilon if np.ptp(x) > 0 else 1.0


@_of_rollouts
def grpo(
    r: Array,
    g: Array,
    *,
    counts: Array,
    scale_by_std: bool = True,
    leave_one_out: bool = False,
    epsilon: float = 1e-6,
    singletons: str = "zero",
) -> Array:
    """(r - mean_g) / (std_g + epsilon); with fewer than two that count, 0 or reward / (1 +
    epsilon). 2402.03300.

    Tunix's "grpo-loo": the mean is that of the others, and the deviation that of all.
    """
    out = np.zeros(len(r))
    for i, group, others in _groups(r, g, counts):
        if len(group) > 1:
            mean = others.mean() if leave_one_out else group.mean()
            out[i] = (r[i] - mean) / (_scale(group, epsilon) if scale_by_std else 1.0)
        elif singletons == "reward":
            out[i] = r[i] / (1.0 + epsilon if scale_by_std else 1.0)
    return out


def dr_grpo(rewards: Any, groups: Any, *, singletons: str = "zero", **which: Any) -> Array:
    """r - mean_g. Liu et al. 2025, https://arxiv.org/abs/2503.20783."""
    return grpo(rewards, groups, scale_by_std=False, singletons=singletons, **which)


@_of_rollouts
def rloo(
    r: Array,
    g: Array,
    *,
    counts: Array,
    scale_by_std: bool = False,
    epsilon: float = 1e-6,
    singletons: str = "zero",
) -> Array:
    """r - the mean of the others of the group, over their deviation (NeMo-RL). 2402.14740."""
    out = np.zeros(len(r))
    for i, group, others in _groups(r, g, counts):
        if len(group) > 1:
            out[i] = (r[i] - others.mean()) / (
                _scale(others, epsilon) if scale_by_std and len(others) > 1 else 1.0
            )
        elif singletons == "reward":
            out[i] = r[i]
    return out


@_of_rollouts
def maxrl(
    r: Array, g: Array, *, counts: Array, epsilon: float = 0.0, singletons: str = "zero"
) -> Array:
    """(r - mean_g) / (mean_g + epsilon), 0 where the mean is 0, NaN where it is negative.

    2602.02710.
    """
    out = np.zeros(len(r))
    for i, group, _ in _groups(r, g, counts):
        if len(group) and group.mean() < 0:
            out[i] = np.nan
        elif len(group) > 1 and group.mean() > 0:
            out[i] = (r[i] - group.mean()) / (group.mean() + epsilon)
        elif len(group) < 2 and singletons == "reward":
            out[i] = r[i]
    return out


@_of_rollouts
def standardize(
    r: Array,
    g: Array,
    *,
    counts: Array,
    mean: str | None = "step",
    std: str | None = "step",
    leave_one_out: bool = False,
    unbiased: bool = True,
    epsilon: float = 1e-5,
) -> Array:
    """(r - mean) / (std + epsilon), each of the step or of the group, the deviation about the means
    taken off.

    Without a sample that counts in a level there is no advantage. One deviation that is 0 divides
    by 1.
    """
    members = {"step": lambda i: counts, "group": lambda i: counts & (g == g[i])}
    centred = r.copy()
    for i in range(len(r) if mean else 0):
        of = members[mean](i) & ((np.arange(len(r)) != i) | (not leave_one_out))
        centred[i] = r[i] - r[of].mean() if of.any() else 0.0
    out = centred.copy()
    for i in range(len(r) if std else 0):
        of = centred[members[std](i)]
        lone = unbiased and len(of) == 1
        scale = 1.0 if lone or not len(of) else np.sqrt(np.sum(of**2) / (len(of) - unbiased))
        out[i] = centred[i] / (scale + epsilon if scale else 1.0) * (len(of) > 0)
    return out


def gdpo(
    rewards: Sequence[Any],
    groups: Any,
    masks: Sequence[Any],
    *,
    weights: Sequence[float],
    leave_one_out: bool = False,
    whitened: str | None = "tokens",
    epsilon: float = 1e-6,
    among: Any = None,
    rollouts: Any = None,
) -> list[Array]:
    """Each reward by its group's mean and deviation, their weighted sum whitened over the step.

    2601.05242.
    """
    scaled = rloo if leave_one_out else grpo
    which = {"among": among, "rollouts": rollouts}
    nothing = np.isnan(np.stack(rewards)).any(0)
    each = [np.where(nothing, np.nan, r) for r in rewards]
    total = sum(
        w * scaled(r, groups, scale_by_std=True, epsilon=epsilon, **which)
        for w, r in zip(weights, each, strict=True)
    )
    if whitened == "samples":
        total = grpo(
            np.where(nothing, np.nan, total), np.zeros(len(total)), epsilon=epsilon, **which
        )
    on_tokens = spread(total, masks)
    return _whiten_samples(on_tokens, ~nothing, among, masks) if whitened == "tokens" else on_tokens


def _whiten_samples(
    arrays: Sequence[Any], rewarded: Any, among: Any, masks: Sequence[Any]
) -> list[Array]:
    """`whiten` over the tokens of samples with a reward."""
    masks = [m * bool(there) for m, there in zip(masks, rewarded, strict=True)]
    return whiten(
        arrays, masks, among=None if among is None else spread(np.asarray(among, float), masks)
    )


@_of_rollouts
def opo(r: Array, g: Array, n: Array, *, counts: Array, singletons: str = "zero") -> Array:
    """r - sum_g(length r) / sum_g(length), 0 in a group without a token.

    Hao et al. 2025, 2505.23585.
    """
    out = np.zeros(len(r))
    for i in range(len(r)):
        group = (g == g[i]) & counts
        if group.sum() < 2:
            out[i] = r[i] if singletons == "reward" else 0.0
        elif n[group].sum() > 0:
            out[i] = r[i] - np.sum((n * r)[group]) / n[group].sum()
    return out


@_of_rollouts
def pass_at_k(
    r: Array, g: Array, *, counts: Array, scale_by_std: bool = True, epsilon: float = 1e-6
) -> Array:
    """(best - second) / (std_g + epsilon) for the group's best, 0 for the rest.

    Tang et al. 2025, 2503.19595.
    """
    out = np.zeros(len(r))
    for i, group, others in _groups(r, g, counts):
        if counts[i] and len(others) and r[i] > others.max():
            out[i] = (r[i] - others.max()) / (_scale(group, epsilon) if scale_by_std else 1.0)
    return out


@_of_rollouts
def gpg(
    r: Array, g: Array, *, counts: Array, f_norm: float = 1.0, singletons: str = "zero"
) -> Array:
    """(N / number of rewards that are not 0) (r - mean_g) / f_norm.

    Chu et al. 2025, https://arxiv.org/abs/2504.02546.
    """
    scale = counts.sum() / max(int(np.count_nonzero(r[counts])), 1)
    out = np.zeros(len(r))
    for i, group, _ in _groups(r, g, counts):
        lone = r[i] if singletons == "reward" else 0.0
        out[i] = scale * (r[i] - group.mean() if len(group) > 1 else lone) / f_norm
    return out


def pass_rates(
    rewards: Any, groups: Any, *, at_least: float = 1.0, among: Any = None, rollouts: Any = None
) -> dict[str, float]:
    """The mean over groups of the share of rollouts with a reward of at least so much, and where
    all, none, some.

    And the share of groups in which every rollout has the same reward.
    """
    firsts: dict[Any, int] = {}
    for i in range(len(rewards)):
        firsts.setdefault(i if rollouts is None else rollouts[i], i)
    of_group: dict[Any, list[float]] = {}
    for i in firsts.values():
        if not np.isnan(rewards[i]) and (among is None or among[i]):
            of_group.setdefault(groups[i], []).append(rewards[i])
    rates = np.array([np.mean(np.asarray(x) >= at_least) for x in of_group.values()])
    equal = np.array([len(set(x)) == 1 for x in of_group.values()])
    mean = {
        "pass_rate": rates,
        "pass_all": rates == 1,
        "pass_none": rates == 0,
        "pass_some": (rates > 0) & (rates < 1),
    }
    mean["equal_rewards"] = equal
    found = {name: float(np.mean(x)) if len(x) else 0.0 for name, x in mean.items()}
    return found | {"no_reward": float(np.mean(np.isnan(np.asarray(rewards, float))))}


def remax(rewards: Any, baselines: Any) -> Array:
    """r - the greedy response's reward, 0 without a reward.

    Li et al. 2023, https://arxiv.org/abs/2310.10505.
    """
    r = np.asarray(rewards, np.float64)
    return np.where(np.isnan(r), 0.0, r - np.asarray(baselines, np.float64))


def reinforce_plus_plus(
    rewards: Sequence[Any], masks: Sequence[Any], gamma: float = 1.0, masked: str = "skip"
) -> list[Array]:
    """Discounted returns of token rewards, whitened over the step.

    Hu 2025, https://arxiv.org/abs/2501.03262.
    """
    return whiten(
        [discounted_returns(r, m, gamma, masked) for r, m in zip(rewards, masks, strict=True)],
        masks,
    )


def reinforce_plus_plus_baseline(
    rewards: Any,
    groups: Any,
    masks: Sequence[Any],
    *,
    kls: Sequence[Any] | None = None,
    kl_coef: float = 0.0,
    whitened: bool = True,
    singletons: str = "zero",
    among: Any = None,
    rollouts: Any = None,
) -> list[Array]:
    """whiten(r - mean_g - c kl_t), 0 without a reward.

    Hu 2025, https://arxiv.org/abs/2501.03262.
    """
    rewarded = ~np.isnan(np.asarray(rewards, np.float64))
    masks = [m * bool(there) for m, there in zip(masks, rewarded, strict=True)]
    centred = spread(
        dr_grpo(rewards, groups, singletons=singletons, among=among, rollouts=rollouts), masks
    )
    if kls is not None:
        centred = [
            a - kl_coef * _write(_read(k, m), m)
            for a, k, m in zip(centred, kls, masks, strict=True)
        ]
    return _whiten_samples(centred, rewarded, among, masks) if whitened else centred


def on_policy_distillation(
    advantages: Any, log_probs: Any, teacher: Any, mask: Any, coef: float = 1.0, alpha: float = 1.0
) -> Array:
    """A + coef log(alpha teacher / p + 1 - alpha).

    Agarwal et al. 2023, https://arxiv.org/abs/2306.13649.

    With an alpha below 1 it is TOP-D's reward, https://arxiv.org/abs/2607.04751; with 1 the
    log-ratio.
    """
    pull = _read(teacher, mask) - _read(log_probs, mask)
    if alpha != 1:
        pull = np.log(alpha * np.exp(pull) + 1 - alpha)
    return _write(_read(advantages, mask) + coef * pull, mask)


def trust_region_credit(log_probs: Any, teacher: Any, mask: Any, alpha: float) -> Array:
    """TOP-D's equation 8, 2607.04751: a token's reward and the mean of those after it, in one
    response.
    """
    reward = _read(
        on_policy_distillation(np.zeros(len(mask)), log_probs, teacher, mask, alpha=alpha), mask
    )
    later = [reward[t + 1 :].mean() if t + 1 < len(reward) else 0.0 for t in range(len(reward))]
    return _write(reward + later, mask)


def importance_weighted_distillation(
    log_probs: Any, teacher: Any, mask: Any, gain: float = 0.5
) -> Array:
    """w (x_T - x), w = 1 + gain (1 - the share of |x_T - x| that came before).
    https://arxiv.org/abs/2606.22600.
    """
    d = _read(teacher, mask) - _read(log_probs, mask)
    out = np.zeros(len(d))
    before = 0.0
    whole = max(sum(abs(x) for x in d), 1e-8)
    for t, x in enumerate(d):
        out[t] = (1 + gain * (1 - before / whole)) * x
        before += abs(x)
    return _write(out, mask)


def optimal_token_baseline(
    returns: Sequence[Any],
    log_probs: Sequence[Any],
    sum_p2: Sequence[Any],
    groups: Any,
    masks: Sequence[Any],
    *,
    weights: Sequence[Any] | None = None,
    place: str = "position",
    singletons: str = "reward",
    epsilon: float = 1e-8,
    among: Any = None,
) -> list[Array]:
    """G_t less the mean of the group's G_t by W_t = the sum up to t of w^2 (1 - 2 p + sum p^2).

    2602.07078.
    """
    # of each sample: its token, G and W at each place
    by_place: list[dict[int, tuple[int, float, float]]] = []
    for i, mask in enumerate(masks):
        here = np.nonzero(np.asarray(mask) > 0)[0]
        upto = 0.0
        found = {}
        for count, t in enumerate(here):
            energy = 1 - 2 * np.exp(log_probs[i][t]) + sum_p2[i][t]
            upto += energy * (1.0 if weights is None else weights[i][t] ** 2)
            found[int(count if place == "loss_token" else t - here[0])] = (
                int(t),
                float(returns[i][t]),
                float(upto),
            )
        by_place.append(found)
    out = []
    for i, mask in enumerate(masks):
        counts = [groups[j] == groups[i] and (among is None or among[j]) for j in range(len(masks))]
        group = [found for counted, found in zip(counts, by_place, strict=True) if counted]
        advantages = np.zeros(len(mask))
        for at, (t, g, _) in by_place[i].items():
            there = [found[at][1:] for found in group if at in found]
            baseline = sum(x * w for x, w in there) / (sum(w for _, w in there) + epsilon)
            if sum(max(found, default=-1) >= at for found in group) > 1:
                advantages[t] = g - baseline
            else:
                advantages[t] = g if singletons == "reward" else 0.0
        out.append(advantages)
    return out
