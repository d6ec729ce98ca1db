"""The search of advantages, and of metrics that need no loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle.advantages as truth
import pytest
from estimator_cases import ESTIMATORS, Given, Options, amplified, given_of, known_of, options
from hypothesis import strategies as st
from oracle.other_losses import mismatch_metrics as mismatch_truth
from policy_steps import quick_jit
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
from searches import search

from jaxppo import advantages, finalize_metrics
from jaxppo.mismatch import mismatch_metrics


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages(name: str):
    more = st.lists(st.sampled_from(list(ESTIMATORS)), max_size=2)
    names = more.map(lambda found: list(dict.fromkeys([name, *found])))
    drawn = st.lists(steps, min_size=1, max_size=3)
    search(f"advantages {name}", 0.01, names, options, places(), drawn)(check_advantages)


@pytest.mark.every(3)
@pytest.mark.parametrize("cell", range(3))
def test_advantages_of_large_steps(cell: int):
    """All estimators on each step."""
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
        known = known_of(step, samples, o)
        batch = batch_of(step, samples, where)
        given = given_of(step, known, batch, o)
        for name, x in run(batch, given.tokens, given.slots, given.mask).items():
            expected = ESTIMATORS[name][1](known, o)
            by_sample = isinstance(expected, np.ndarray)
            got = (
                of_each(batch, samples, x)
                if by_sample
                else np.concatenate(to_samples(batch, samples, x))
            )
            expected = expected if by_sample else np.concatenate(expected)
            size = 0.1 + np.max(np.abs(expected), initial=0) + 0.1 * amplified(name, known, o)
            agree(name, got, expected, size)


@pytest.mark.every(3)
@pytest.mark.parametrize("cell", range(6))
def test_mismatch_metrics(cell: int):
    where = places(micro_batches=(None,))
    drawn = st.lists(steps | large_steps, min_size=1, max_size=3)
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
            # a difference of squares, so half of the digits where one weight is as large as all
            # others together
            largest = expected["weight_max"]
            agree(
                "weight_std",
                found.pop("weight_std"),
                expected.pop("weight_std"),
                largest,
                3e-3 * (1 + step.spread),
            )
            for name, value in expected.items():
                agree(name, found[name], value, 0.5, 1e-5 * (1 + step.spread))


@pytest.mark.every(3)
@pytest.mark.parametrize("cell", range(3))
def test_explained_variance(cell: int):
    drawn = st.lists(steps | large_steps, min_size=1, max_size=3)
    search(f"explained variance {cell}", 0.01, st.floats(-2, 2, width=32), places(), drawn)(
        check_explained_variance
    )


def check_explained_variance(share: float, where: Place, drawn: list[Step]):
    parallel = where.parallel
    run = quick_jit(lambda *arrays: advantages.explained_variance(*arrays, parallel=parallel))
    for step in drawn:
        samples = step_samples(step)
        rng = step.rng(3)
        returns = [f32(100 + rng.normal(size=len(s.mask))) for s in samples]
        values = [f32(7 + share * g + 0.5 * rng.normal(size=len(g))) for g in returns]
        batch = batch_of(step, samples, where)
        got = run(
            *(to_rows(batch, samples, x, step.garbage) for x in (values, returns)), batch.loss_mask
        )
        expected = truth.explained_variance(values, returns, [s.mask for s in samples])
        counted = np.concatenate([g[s.mask > 0] for g, s in zip(returns, samples, strict=True)])
        if expected == 0:  # all returns are equal
            assert got == 0
            assert len(set(counted)) <= 1
        else:
            agree("explained variance", got, expected, 10 * (1 + abs(expected)) / np.std(counted))
