"""Every estimator of advantages with random options and values, in jaxppo and in the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle.advantages as truth
from hypothesis import strategies as st
from oracle import OracleSample
from random_losses import between
from random_steps import Step, f32, to_rows

from jaxppo import RolloutBatch, TokenStats, advantages


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of all estimators; each reads its own."""

    gamma: float
    lam: float
    value_lam: float | None
    masked: str
    all_response: bool
    kl_coef: float
    coef: float
    scale_by_std: bool
    epsilon: float
    singletons: str
    f_norm: float
    whitened: bool
    shift_mean: bool
    length_alpha: float | None
    leave_one_out: bool
    whitened_over: str | None
    mean: str | None
    std: str | None
    unbiased: bool
    left_out: bool
    cut: bool
    lacking: bool


options = st.builds(
    Options,
    between(0, 1),
    between(0, 1),
    st.none() | between(0, 1),
    st.sampled_from(["skip", "discount"]),
    st.booleans(),
    st.just(0.0) | between(-1, 1),
    between(-1, 1),
    st.booleans(),
    st.sampled_from([float(np.float32(1e-6)), 0.125]),
    st.sampled_from(["zero", "reward"]),
    between(0.5, 4),
    st.booleans(),
    st.booleans(),
    st.none() | between(0.0625, 2),
    st.booleans(),
    st.sampled_from(["tokens", "samples", None]),
    *[st.sampled_from(["step", "group", None])] * 2,
    *[st.booleans()] * 4,
)


@dataclasses.dataclass
class Given:
    """The inputs of jaxppo's estimators: the batch, values of tokens `[R, T]` and of samples
    `[R, S]`.
    """

    batch: RolloutBatch
    tokens: dict[str, Any]
    slots: dict[str, Any]
    mask: Any

    @property
    def which(self) -> dict[str, Any]:
        return {"among": self.slots["among"], "rollout_ids": self.slots["rollouts"]}

    @property
    def of_rollouts(self) -> RolloutBatch:
        """The batch as estimators of a batch read it: without ids where parts of a rollout
        differ in their rewards.
        """
        return dataclasses.replace(self.batch, rollout_ids=self.slots["rollouts"])

    @property
    def uncut(self) -> RolloutBatch:
        """The batch with one sample a rollout."""
        return dataclasses.replace(self.batch, rollout_ids=self.batch.sample_ids)


@dataclasses.dataclass
class Known:
    """The same inputs for the oracle: lists of `[tokens]`, and `[samples]`."""

    samples: list[OracleSample]
    tokens: dict[str, list[np.ndarray]]
    slots: dict[str, np.ndarray]
    masks: list[np.ndarray]
    counted: list[np.ndarray]

    @property
    def which(self) -> dict[str, Any]:
        return {"among": self.slots["among"], "rollouts": self.slots["rollouts"]}

    def each(self, fn: Callable[..., Any], *names: str) -> list[Any]:
        """Calls fn with the named values of each sample, and with the mask of its tokens that
        count.
        """
        return [fn(*x) for x in zip(*(self.tokens[n] for n in names), self.counted, strict=True)]


def gae_of_oracle(k: Known, o: Options) -> list[np.ndarray]:
    last = k.slots["baselines"] if o.left_out else np.zeros(len(k.masks))
    options = (o.gamma, o.lam, o.value_lam, o.length_alpha)
    given = zip(k.tokens["rewards"], k.tokens["values"], k.counted, last, strict=True)
    return [np.stack(truth.gae(r, v, m, *options, x), axis=-1) for r, v, m, x in given]


def grouped(name: str, *fields: str) -> tuple[Any, Any]:
    """An estimator that compares the samples of a group, in jaxppo and in the oracle."""
    read = ("likelihoods" if name == "maxrl" else "given", "groups", *["lengths"] * (name == "opo"))

    def ours(g: Given, o: Options, p: Any) -> Any:
        given = [g.slots[x] for x in read]
        return getattr(advantages, name)(
            *given, **{f: getattr(o, f) for f in fields}, **g.which, parallel=p
        )

    def theirs(k: Known, o: Options) -> Any:
        return getattr(truth, name)(
            *(k.slots[x] for x in read), **{f: getattr(o, f) for f in fields}, **k.which
        )

    return ours, theirs


def baseline_of_oracle(k: Known, o: Options) -> list[np.ndarray]:
    more = {
        "kls": k.tokens["kl"],
        "kl_coef": o.kl_coef,
        "whitened": o.whitened,
        "singletons": o.singletons,
    }
    return truth.reinforce_plus_plus_baseline(
        k.slots["given"], k.slots["groups"], k.masks, **more, **k.which
    )


def baseline_of_jaxppo(g: Given, o: Options, p: Any) -> Any:
    more = {
        "kl": g.tokens["kl"],
        "kl_coef": o.kl_coef,
        "whitened": o.whitened,
        "singletons": o.singletons,
    }
    given = (g.slots["given"], g.slots["groups"], g.of_rollouts)
    return advantages.reinforce_plus_plus_baseline(
        *given, **more, among=g.slots["among"], parallel=p
    )


def gdpo_of_oracle(k: Known, o: Options) -> list[np.ndarray]:
    more = {"weights": [1.0, o.coef], "leave_one_out": o.leave_one_out, "whitened": o.whitened_over}
    rewards = [k.slots["given"], k.slots["likelihoods"]]
    return truth.gdpo(rewards, k.slots["groups"], k.masks, **more, **k.which, epsilon=o.epsilon)


def gdpo_of_jaxppo(g: Given, o: Options, p: Any) -> Any:
    more = {"weights": [1.0, o.coef], "leave_one_out": o.leave_one_out, "whitened": o.whitened_over}
    more |= {"among": g.slots["among"], "epsilon": o.epsilon}
    rewards = [g.slots["given"], g.slots["likelihoods"]]
    return advantages.gdpo(rewards, g.slots["groups"], g.of_rollouts, **more, parallel=p)


def of_places(o: Options, tokens: dict[str, Any]) -> dict[str, Any]:
    found = {
        "place": "loss_token" if o.masked == "skip" else "position",
        "singletons": o.singletons,
    }
    return found | {"epsilon": o.epsilon, "weights": tokens["kl"] if o.whitened else None}


# By name, two functions. jaxppo's: (given, options, parallel) -> [R, T, ...] or [R, S]. The
# oracle's: (known, options) -> a result for each sample.
ESTIMATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "token_rewards": (
        lambda g, o, p: advantages.token_rewards(
            g.slots["rewards"], g.batch, kl=g.tokens["kl"], kl_coef=o.kl_coef, parallel=p
        ),
        lambda k, o: [
            truth.token_rewards(r, m, kl, o.kl_coef)
            for r, m, kl in zip(k.slots["rewards"], k.masks, k.tokens["kl"], strict=True)
        ],
    ),
    "discounted_returns": (
        lambda g, o, p: advantages.discounted_returns(
            g.tokens["rewards"], g.batch, gamma=o.gamma, masked=o.masked, mask=g.mask, parallel=p
        ),
        lambda k, o: k.each(
            lambda r, m: truth.discounted_returns(r, m, o.gamma, o.masked), "rewards"
        ),
    ),
    "gae": (
        lambda g, o, p: jnp.stack(
            advantages.gae(
                g.tokens["rewards"],
                g.tokens["values"],
                g.batch,
                gamma=o.gamma,
                lam=o.lam,
                value_lam=o.value_lam,
                length_alpha=o.length_alpha,
                last_values=g.slots["baselines"] if o.left_out else None,
                mask=g.mask,
                parallel=p,
            ),
            axis=-1,
        ),
        gae_of_oracle,
    ),
    "whiten": (
        lambda g, o, p: advantages.whiten(
            g.tokens["values"],
            g.batch.loss_mask,
            among=g.tokens["ends"] > 0 if o.left_out else None,
            shift_mean=o.shift_mean,
            epsilon=o.epsilon,
            parallel=p,
        ),
        lambda k, o: truth.whiten(
            k.tokens["values"],
            k.masks,
            among=k.tokens["ends"] if o.left_out else None,
            shift_mean=o.shift_mean,
            epsilon=o.epsilon,
        ),
    ),
    "reinforce_plus_plus": (
        lambda g, o, p: advantages.reinforce_plus_plus(
            g.tokens["rewards"], g.batch, gamma=o.gamma, masked=o.masked, parallel=p
        ),
        lambda k, o: truth.reinforce_plus_plus(k.tokens["rewards"], k.masks, o.gamma, o.masked),
    ),
    "reinforce_plus_plus_baseline": (baseline_of_jaxppo, baseline_of_oracle),
    "spread": (
        lambda g, o, p: advantages.spread(g.slots["rewards"], g.batch, parallel=p),
        lambda k, o: truth.spread(k.slots["rewards"], k.masks),
    ),
    "on_policy_distillation": (
        lambda g, o, p: advantages.on_policy_distillation(
            g.tokens["rewards"],
            -jnp.abs(g.tokens["values"]),
            -jnp.abs(g.tokens["kl"]),
            g.batch.loss_mask,
            coef=o.coef,
        ),
        lambda k, o: [
            truth.on_policy_distillation(rewards, -np.abs(values), -np.abs(kl), mask, o.coef)
            for rewards, values, kl, mask in zip(
                *(k.tokens[n] for n in ("rewards", "values", "kl")), k.masks, strict=True
            )
        ],
    ),
    "importance_weighted_distillation": (
        lambda g, o, p: advantages.importance_weighted_distillation(
            -jnp.abs(g.tokens["values"]),
            -jnp.abs(g.tokens["kl"]),
            g.batch,
            gain=abs(o.coef),
            parallel=p,
        ),
        lambda k, o: [
            truth.importance_weighted_distillation(-np.abs(values), -np.abs(kl), mask, abs(o.coef))
            for values, kl, mask in zip(k.tokens["values"], k.tokens["kl"], k.masks, strict=True)
        ],
    ),
    "remax": (
        lambda g, o, p: advantages.remax(
            g.slots["given"], g.slots["baselines"], g.batch.sample_ids
        ),
        lambda k, o: truth.remax(k.slots["given"], k.slots["baselines"]),
    ),
    "grpo": grouped("grpo", "scale_by_std", "leave_one_out", "epsilon", "singletons"),
    "dr_grpo": grouped("dr_grpo", "singletons"),
    "rloo": grouped("rloo", "scale_by_std", "epsilon", "singletons"),
    "maxrl": grouped("maxrl", "epsilon", "singletons"),
    "standardize": grouped("standardize", "mean", "std", "leave_one_out", "unbiased", "epsilon"),
    "gdpo": (gdpo_of_jaxppo, gdpo_of_oracle),
    "overlong_penalty": (
        lambda g, o, p: advantages.overlong_penalty(
            jnp.where(g.batch.sample_ids >= 0, g.slots["lengths"], 0), max_length=6, buffer=o.f_norm
        ),
        lambda k, o: truth.overlong_penalty(k.slots["lengths"], 6, o.f_norm),
    ),
    "opo": grouped("opo", "singletons"),
    "optimal_token_baseline": (
        lambda g, o, p: advantages.optimal_token_baseline(
            g.tokens["rewards"],
            TokenStats(g.tokens["log_probs"], sum_p2=g.tokens["sum_p2"]),
            g.slots["groups"],
            g.uncut,
            **of_places(o, g.tokens),
            among=g.slots["among"],
            parallel=p,
        ),
        lambda k, o: truth.optimal_token_baseline(
            *(k.tokens[n] for n in ("rewards", "log_probs", "sum_p2")),
            k.slots["groups"],
            k.masks,
            **of_places(o, k.tokens),
            among=k.slots["among"],
        ),
    ),
    "gpg": grouped("gpg", "f_norm", "singletons"),
    "pass_at_k": grouped("pass_at_k", "scale_by_std", "epsilon"),
}


def known_of(step: Step, samples: list[OracleSample], o: Options) -> Known:
    rng = step.rng(3)
    response = []
    for s, drawn in zip(samples, step.samples, strict=True):
        mask = np.zeros(len(s.mask))
        mask[max(drawn.prompt - 1, 0) : max(len(mask) - 1, 0)] = 1
        response.append(mask)
    tokens = {
        n: [f32(rng.normal(size=len(s.mask))) for s in samples] for n in ("rewards", "values", "kl")
    }
    tokens["ends"] = [rng.integers(0, 2, len(s.mask)).astype(float) for s in samples]
    tokens["log_probs"] = [s.log_probs for s in samples]
    p = [np.exp(s.log_probs) for s in samples]
    tokens["sum_p2"] = [f32(x**2 + (1 - x) ** 2 * rng.random(len(x))) for x in p]
    slots = {
        "rewards": np.array([s.reward for s in samples]),
        "groups": np.array([s.group_id for s in samples]),
    }
    slots |= {
        "baselines": f32(rng.normal(size=len(samples))),
        "lengths": np.array([float(s.count) for s in samples]),
    }
    slots |= {"likelihoods": np.abs(slots["baselines"]) * (rng.random(len(samples)) < 0.5)}
    slots["among"] = rng.random(len(samples)) < 0.7
    slots["given"] = np.where(rng.random(len(samples)) < 0.3 * o.lacking, np.nan, slots["rewards"])
    slots["likelihoods"][rng.random(len(samples)) < 0.2 * o.lacking] = np.nan
    slots["rollouts"] = np.array([s.rollout_id for s in samples])
    if o.cut:
        _, first, inverse = np.unique(slots["rollouts"], return_index=True, return_inverse=True)
        slots |= {n: slots[n][first][inverse] for n in ("groups", "among", "given", "likelihoods")}
    absent = dict.fromkeys(["among"] * (not o.left_out) + ["rollouts"] * (not o.cut))
    masks = [s.mask for s in samples]
    return Known(samples, tokens, slots | absent, masks, response if o.all_response else masks)


def to_slots(batch: RolloutBatch, samples: list[OracleSample], x: np.ndarray) -> np.ndarray:
    """Puts one number for each sample into an array `[R, S]`: NaN, -1 or True where there is no
    sample.
    """
    ids = np.asarray(batch.sample_ids)
    fill, dtype = {"f": (np.nan, np.float32), "b": (True, bool)}.get(x.dtype.kind, (-1, np.int32))
    out = np.full(ids.shape, fill, dtype)
    for s, value in zip(samples, x, strict=True):
        out[ids == s.sample_id] = value
    return out


def given_of(step: Step, k: Known, batch: RolloutBatch, o: Options) -> Given:
    wide = [dataclasses.replace(s, mask=m) for s, m in zip(k.samples, k.counted, strict=True)]
    tokens = {n: to_rows(batch, wide, x, step.garbage) for n, x in k.tokens.items()}
    slots = {n: None if x is None else to_slots(batch, k.samples, x) for n, x in k.slots.items()}
    mask = to_rows(batch, wide, k.counted, 0.0) if o.all_response else None
    return Given(batch, tokens, slots, mask)


def amplified_by_gdpo(k: Known, o: Options) -> float:
    """The largest of the scaled rewards, and of their rounding, over the deviation of their sums.

    Scaled rewards may cancel each other in their sum. The largest reward of a group is rounded
    before it is scaled.
    """
    scaled = truth.rloo if o.leave_one_out else truth.grpo
    rewards = [k.slots["given"], o.coef * k.slots["likelihoods"]]
    nothing = np.isnan(np.stack(rewards)).any(0)
    rewards = [np.where(nothing, np.nan, x) for x in rewards]
    each, plain = (
        [
            scaled(x, k.slots["groups"], scale_by_std=by, epsilon=o.epsilon, **k.which)
            for x in rewards
        ]
        for by in (True, False)
    )
    rounded = 0.0
    for group in np.unique(k.slots["groups"]):
        its = (k.slots["groups"] == group) & ~nothing
        for x, y, r in zip(each, plain, rewards, strict=True):
            differs = its & (y != 0)
            factor = np.max(np.abs(x[differs] / y[differs]), initial=0)
            rounded = max(rounded, float(factor * np.max(np.abs(r[its]), initial=0)))
    counted = ~nothing & (k.slots["among"] if o.left_out else True)
    sums = sum(each)[counted]
    if o.whitened_over == "tokens":
        masks = [m for m, counts in zip(k.masks, counted, strict=True) if counts]
        sums = np.concatenate(
            [
                np.zeros(0),
                *(x[m > 0] for x, m in zip(truth.spread(sums, masks), masks, strict=True)),
            ]
        )
    largest = rounded + max(np.max(np.abs(x), initial=0) for x in each)
    return float(largest / np.sqrt(sums.var() + 1e-12)) if sums.size else 0.0


UNSCALED = {
    "grpo": {"scale_by_std": False},
    "rloo": {"scale_by_std": False},
    "standardize": {"std": None},
}


def amplified_by_scaling(name: str, k: Known, o: Options) -> float:
    """The largest reward, whose rounding is in every difference from a mean, over the smallest
    deviation.

    The mean of n numbers, summed one after the other in f32, is off by up to n / 2 roundings of the
    largest, 2^-24 each: equal rewards are all rounded the same way. A search allows 2e-7 of what
    this returns.
    """
    found, plain = (
        ESTIMATORS[name][1](k, x) for x in (o, dataclasses.replace(o, **UNSCALED[name]))
    )
    factors = np.abs(found[plain != 0] / plain[plain != 0])
    rewards = k.slots["rewards"]
    return float(
        np.max(np.abs(rewards), initial=0)
        * np.max(factors, initial=0)
        * max(1, 0.15 * len(rewards))
    )


def amplified(name: str, k: Known, o: Options) -> float:
    """The largest of the numbers that are whitened over their deviation.

    The numbers were rounded to f32 before, and whitening makes their rounding error this many times
    larger. A weighted mean makes the error of numbers with small weights larger.
    """
    if name == "reinforce_plus_plus_baseline":
        x = baseline_of_oracle(k, dataclasses.replace(o, whitened=False)) if o.whitened else []
    elif name == "reinforce_plus_plus":
        rewards = zip(k.tokens["rewards"], k.masks, strict=True)
        x = [truth.discounted_returns(r, m, o.gamma, o.masked) for r, m in rewards]
    else:
        x = []
    if name == "gdpo" and o.whitened_over:
        return amplified_by_gdpo(k, o)
    if name in UNSCALED:
        return amplified_by_scaling(name, k, o)
    if name == "optimal_token_baseline":
        # sum p^2 was rounded, which counts where the tokens of a place are all sure: only their W
        # is as small
        sure = [
            np.min((1 - np.exp(x[m > 0])) ** 2, initial=1)
            for x, m in zip(k.tokens["log_probs"], k.masks, strict=True)
        ]
        return float(max(np.max(np.abs(x), initial=0) for x in k.tokens["rewards"]) / min(sure))
    each = [y[m > 0] for y, m in zip(x, k.masks, strict=False)]
    counted = (
        k.slots["among"]
        if o.left_out and name == "reinforce_plus_plus_baseline"
        else [True] * len(each)
    )
    made = np.concatenate(
        [np.zeros(0), *(y for y, counts in zip(each, counted, strict=False) if counts)]
    )
    largest = max(np.max(np.abs(y), initial=0) for y in each) if each else 0.0
    return float(largest / np.sqrt(made.var() + 1e-12)) if made.size else 0.0
