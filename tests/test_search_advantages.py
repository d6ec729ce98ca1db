"""The search of advantages and of metrics that look at a batch alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle.advantages as truth
import pytest
from hypothesis import strategies as st
from oracle import OracleSample
from oracle.other_losses import mismatch_metrics as mismatch_truth
from policy_steps import quick_jit
from random_losses import between
from random_steps import (
    Place,
    Step,
    agree,
    batch_of,
    f32,
    large_steps,
    of_each,
    places,
    step_samples,
    steps,
    to_rows,
    to_samples,
)
from test_search import search

from jaxppo import RolloutBatch, advantages, finalize_metrics
from jaxppo.mismatch import mismatch_metrics


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
    st.booleans(),
)


@dataclasses.dataclass
class Given:
    """What jaxppo's estimators read: the batch, values of tokens `[R, T]` and of samples `[R, S]`."""

    batch: RolloutBatch
    tokens: dict[str, Any]
    slots: dict[str, Any]
    mask: Any


@dataclasses.dataclass
class Known:
    """The same as the oracle's read it: lists of `[tokens]`, and `[samples]`."""

    samples: list[OracleSample]
    tokens: dict[str, list[np.ndarray]]
    slots: dict[str, np.ndarray]
    masks: list[np.ndarray]
    counted: list[np.ndarray]

    def each(self, fn: Callable[..., Any], *names: str) -> list[Any]:
        """fn of the named values of each sample, and of what counts there."""
        return [fn(*x) for x in zip(*(self.tokens[n] for n in names), self.counted, strict=True)]


def gae_of_oracle(k: Known, o: Options) -> list[np.ndarray]:
    found = k.each(lambda r, v, m: truth.gae(r, v, m, o.gamma, o.lam, o.value_lam, o.length_alpha), "rewards", "values")
    return [np.stack(x, axis=-1) for x in found]


def grouped(name: str, *fields: str) -> tuple[Any, Any]:
    """An estimator of samples by group, in jaxppo and in the oracle."""
    read = ("likelihoods" if name == "maxrl" else "rewards", "groups", *["lengths"] * (name == "opo"))

    def ours(g: Given, o: Options, p: Any) -> Any:
        given = [g.slots[x] for x in read]
        return getattr(advantages, name)(*given, **{f: getattr(o, f) for f in fields}, parallel=p)

    def theirs(k: Known, o: Options) -> Any:
        return getattr(truth, name)(*(k.slots[x] for x in read), **{f: getattr(o, f) for f in fields})

    return ours, theirs


def baseline_of_oracle(k: Known, o: Options) -> list[np.ndarray]:
    more = {"kls": k.tokens["kl"], "kl_coef": o.kl_coef, "whitened": o.whitened, "singletons": o.singletons}
    return truth.reinforce_plus_plus_baseline(k.slots["rewards"], k.slots["groups"], k.masks, **more)


def baseline_of_jaxppo(g: Given, o: Options, p: Any) -> Any:
    more = {"kl": g.tokens["kl"], "kl_coef": o.kl_coef, "whitened": o.whitened, "singletons": o.singletons}
    return advantages.reinforce_plus_plus_baseline(g.slots["rewards"], g.slots["groups"], g.batch, **more, parallel=p)


def gdpo_of_oracle(k: Known, o: Options) -> list[np.ndarray]:
    more = {"weights": [1.0, o.coef], "leave_one_out": o.leave_one_out, "whitened": o.whitened_over}
    return truth.gdpo(
        [k.slots["rewards"], k.slots["likelihoods"]], k.slots["groups"], k.masks, **more, epsilon=o.epsilon
    )


def gdpo_of_jaxppo(g: Given, o: Options, p: Any) -> Any:
    more = {"weights": [1.0, o.coef], "leave_one_out": o.leave_one_out, "whitened": o.whitened_over}
    rewards = [g.slots["rewards"], g.slots["likelihoods"]]
    return advantages.gdpo(rewards, g.slots["groups"], g.batch, **more, epsilon=o.epsilon, parallel=p)


# By name: jaxppo's (given, options, parallel) -> [R, T, ...] or [R, S], the oracle's (known, options) -> by sample.
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
        lambda k, o: k.each(lambda r, m: truth.discounted_returns(r, m, o.gamma, o.masked), "rewards"),
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
                mask=g.mask,
                parallel=p,
            ),
            axis=-1,
        ),
        gae_of_oracle,
    ),
    "whiten": (
        lambda g, o, p: advantages.whiten(
            g.tokens["values"], g.batch.loss_mask, shift_mean=o.shift_mean, epsilon=o.epsilon, parallel=p
        ),
        lambda k, o: truth.whiten(k.tokens["values"], k.masks, shift_mean=o.shift_mean, epsilon=o.epsilon),
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
            g.tokens["rewards"], g.tokens["values"], g.tokens["kl"], g.batch.loss_mask, coef=o.coef
        ),
        lambda k, o: [
            truth.on_policy_distillation(*x, o.coef)
            for x in zip(*(k.tokens[n] for n in ("rewards", "values", "kl")), k.masks, strict=True)
        ],
    ),
    "remax": (
        lambda g, o, p: advantages.remax(g.slots["rewards"], g.slots["baselines"], g.batch.sample_ids),
        lambda k, o: truth.remax(k.slots["rewards"], k.slots["baselines"]),
    ),
    "grpo": grouped("grpo", "scale_by_std", "epsilon", "singletons"),
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
    tokens = {n: [f32(rng.normal(size=len(s.mask))) for s in samples] for n in ("rewards", "values", "kl")}
    slots = {"rewards": np.array([s.reward for s in samples]), "groups": np.array([s.group_id for s in samples])}
    slots |= {"baselines": f32(rng.normal(size=len(samples))), "lengths": np.array([float(s.count) for s in samples])}
    slots |= {"likelihoods": np.abs(slots["baselines"]) * (rng.random(len(samples)) < 0.5)}
    masks = [s.mask for s in samples]
    return Known(samples, tokens, slots, masks, response if o.all_response else masks)


def to_slots(batch: RolloutBatch, samples: list[OracleSample], x: np.ndarray, fill: float) -> np.ndarray:
    """`[R, S]` of a number for each sample."""
    ids = np.asarray(batch.sample_ids)
    out = np.full(ids.shape, fill, np.int32 if np.isfinite(fill) else np.float32)
    for s, value in zip(samples, x, strict=True):
        out[ids == s.sample_id] = value
    return out


def given_of(step: Step, k: Known, batch: RolloutBatch, o: Options) -> Given:
    wide = [dataclasses.replace(s, mask=m) for s, m in zip(k.samples, k.counted, strict=True)]
    tokens = {n: to_rows(batch, wide, x, step.garbage) for n, x in k.tokens.items()}
    slots = {n: to_slots(batch, k.samples, x, -1 if n == "groups" else np.nan) for n, x in k.slots.items()}
    mask = to_rows(batch, wide, k.counted, 0.0) if o.all_response else None
    return Given(batch, tokens, slots, mask)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages(name: str):
    more = st.lists(st.sampled_from(list(ESTIMATORS)), max_size=2)
    names = more.map(lambda found: list(dict.fromkeys([name, *found])))
    drawn = st.lists(steps, min_size=1, max_size=3)
    search(f"advantages {name}", 0.01, names, options, places(), drawn)(check_advantages)


@pytest.mark.parametrize("cell", range(3))
def test_advantages_of_large_steps(cell: int):
    """All of them on each step."""
    names = st.just([*ESTIMATORS])
    drawn = st.lists(large_steps, min_size=1, max_size=1)
    where = places(micro_batches=(None,))
    search(f"advantages, large {cell}", 0.01, names, options, where, drawn)(check_advantages)


def check_advantages(names: list[str], o: Options, where: Place, drawn: list[Step]):
    parallel = where.parallel

    @quick_jit
    def run(batch: Any, tokens: Any, slots: Any, mask: Any) -> Any:
        given = Given(batch, tokens, slots, mask)
        return {name: ESTIMATORS[name][0](given, o, parallel) for name in names}

    for step in drawn:
        samples = step_samples(step)
        known, batch = known_of(step, samples, o), batch_of(step, samples, where)
        given = given_of(step, known, batch, o)
        for name, x in run(batch, given.tokens, given.slots, given.mask).items():
            expected = ESTIMATORS[name][1](known, o)
            by_sample = isinstance(expected, np.ndarray)
            got = of_each(batch, samples, x) if by_sample else np.concatenate(to_samples(batch, samples, x))
            expected = expected if by_sample else np.concatenate(expected)
            size = 0.1 + np.max(np.abs(expected), initial=0) + 0.1 * amplified(name, known, o)
            agree(name, got, expected, size)


def amplified(name: str, k: Known, o: Options) -> float:
    """The largest of the numbers that are whitened over their deviation.

    They were rounded to f32 before, and whitening makes that rounding so many times larger.
    """
    if name == "reinforce_plus_plus_baseline":
        x = baseline_of_oracle(k, dataclasses.replace(o, whitened=False)) if o.whitened else []
    elif name == "gdpo" and o.whitened_over:
        x = gdpo_of_oracle(k, dataclasses.replace(o, whitened_over=None))
    elif name == "reinforce_plus_plus":
        rewards = zip(k.tokens["rewards"], k.masks, strict=True)
        x = [truth.discounted_returns(r, m, o.gamma, o.masked) for r, m in rewards]
    else:
        x = []
    made = np.concatenate([np.zeros(0), *(each[m > 0] for each, m in zip(x, k.masks, strict=False))])
    return float(np.abs(made).max() / np.sqrt(made.var() + 1e-12)) if made.size else 0.0


@pytest.mark.parametrize("cell", range(6))
def test_mismatch_metrics(cell: int):
    where, drawn = places(micro_batches=(None,)), st.lists(steps | large_steps, min_size=1, max_size=3)
    search(f"mismatch {cell}", 0.01, where, drawn)(check_mismatch_metrics)


def check_mismatch_metrics(where: Place, drawn: list[Step]):
    parallel = where.parallel
    run = quick_jit(lambda batch: finalize_metrics(mismatch_metrics(batch, parallel=parallel)))
    for step in drawn:
        samples = step_samples(step)
        found = run(batch_of(step, samples, where))
        if any(s.count for s in samples):
            expected = mismatch_truth(samples)
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                agree(name, found[name], value, 0.5, 1e-5 * (1 + step.spread))


@pytest.mark.parametrize("cell", range(3))
def test_explained_variance(cell: int):
    drawn = st.lists(steps | large_steps, min_size=1, max_size=3)
    search(f"explained variance {cell}", 0.01, st.floats(-2, 2, width=32), places(), drawn)(check_explained_variance)


def check_explained_variance(share: float, where: Place, drawn: list[Step]):
    parallel = where.parallel
    run = quick_jit(lambda *arrays: advantages.explained_variance(*arrays, parallel=parallel))
    for step in drawn:
        samples, rng = step_samples(step), step.rng(3)
        returns = [f32(100 + rng.normal(size=len(s.mask))) for s in samples]
        values = [f32(7 + share * g + 0.5 * rng.normal(size=len(g))) for g in returns]
        batch = batch_of(step, samples, where)
        got = run(*(to_rows(batch, samples, x, step.garbage) for x in (values, returns)), batch.loss_mask)
        expected = truth.explained_variance(values, returns, [s.mask for s in samples])
        if np.isnan(expected):
            assert np.isnan(got)
        else:
            counted = np.concatenate([g[s.mask > 0] for g, s in zip(returns, samples, strict=True)])
            agree("explained variance", got, expected, 10 * (1 + abs(expected)) / np.std(counted))
