"""A search: random steps, configs, meshes, packings and micro-batches, each compared with the
oracle.

An example is one program, run on a few steps. `make test` runs a fixed slice of them, `--nightly`
600 fresh ones.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from oracle import OracleSample
from oracle.step import clip_cov_candidates, covariance, how_many, with_policy_loss
from policy_steps import quick_jit, with_selected
from random_losses import (
    LOSSES,
    Found,
    check_step,
    configs,
    is_steady,
    moved,
    needed,
    numbers_of,
    of_jaxppo,
    of_oracle,
)
from random_steps import (
    VALUES,
    Place,
    Step,
    batch_of,
    large_steps,
    places,
    step_samples,
    steps,
    to_rows,
    to_samples,
    with_weights,
)
from searches import search

from jaxppo import Normalizer, TokenStats, accumulate_gradients, finalize_metrics, policy_loss
from jaxppo.losses.covariance import covariance_mask


def of_stats(config: dict[str, Any], where: Place, traced: bool) -> Any:
    """Compiles a function of (stats, batch, key, numbers) that returns loss, gradient, metrics
    and selection.
    """
    parallel = where.parallel

    @quick_jit
    def run(stats: Any, batch: Any, key: Any, numbers: Any) -> Any:
        mine = of_jaxppo(config, numbers if traced else None)
        selected = covariance_mask(stats, batch, mine, key, parallel) if mine.loss.selects else None
        if where.micro_batches is None:

            def fn(stats):
                return policy_loss(stats, with_selected(batch, selected), mine, parallel=parallel)

            (loss, found), gradient = jax.value_and_grad(fn, has_aux=True)(stats)
            return loss, gradient, finalize_metrics(found), selected
        normalizer = Normalizer.of(mine, batch, parallel=parallel)

        def part(stats: Any, given: Any) -> Any:
            here, batch, normalizer, selected = given
            # a select and a sum, since jax 0.12 has no gradient of x[i] on an explicit mesh
            own = jax.tree.map(lambda x: jnp.where(here[:, None, None], x, 0).sum(axis=0), stats)
            return policy_loss(
                own, with_selected(batch, selected), mine, parallel=parallel, normalizer=normalizer
            )

        each = jnp.eye(where.micro_batches, dtype=bool)
        (loss, found), gradient = accumulate_gradients(part, (each, batch, normalizer, selected))(
            stats
        )
        return loss, gradient, finalize_metrics(found), selected

    return run


def check_selection(
    config: dict[str, Any], samples: list[OracleSample], selected: list[np.ndarray]
) -> None:
    """Checks which tokens the loss selected.

    If it selects at random: how many, and that they are candidates.
    """
    samples = [with_policy_loss(s, config) for s in samples]
    loss = config["loss"]
    here = [s.here for s in samples]
    covariances = covariance(samples)
    got = np.concatenate([x[y] for x, y in zip(selected, here, strict=True)])
    assert not any(np.any(x & ~y) for x, y in zip(selected, here, strict=True)), (
        "selected: tokens without loss"
    )
    rounding = 1e-5 * np.max(
        [np.max(np.abs(s.at("advantages")) * np.abs(s.at("log_probs")), initial=0) for s in samples]
    )
    if loss["name"] == "kl_cov":
        cov = np.concatenate(covariances)
        least = np.sort(cov)[::-1][: how_many(samples, loss["share"])][-1:]
        sure = cov > least + rounding
        possible = cov >= least - rounding
    else:
        config = config | {"loss": {k: loss[k] for k in ("name", "clip_low", "clip_high")}}

        def of(by, d):
            return clip_cov_candidates(
                moved(samples, by), config, loss["low"] + d, loss["high"] - d
            )

        def flat(found):
            return np.concatenate([x[y] for x, y in zip(found, here, strict=True)])

        sure = flat(of(-2e-6, rounding)) & flat(of(2e-6, rounding))
        possible = flat(of(-2e-6, -rounding)) | flat(of(2e-6, -rounding))
    assert not np.any(got & ~possible), "selected: tokens that are no candidates"
    count = how_many(samples, loss["share"])
    assert min(count, sure.sum()) <= got.sum() <= min(count, possible.sum()), (
        "selected: another number of tokens"
    )
    if loss["name"] == "kl_cov":
        assert not np.any(sure & ~got), "selected: not the highest"


@pytest.mark.every(4)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss(name: str):
    drawn = st.lists(steps, min_size=1, max_size=3)
    search(name, 0.025, configs(name), places(), st.booleans(), st.booleans(), drawn)(
        check_policy_loss
    )


@pytest.mark.every(14)
@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss_of_large_steps(name: str):
    drawn = st.lists(large_steps, min_size=1, max_size=1)
    search(f"{name} large", 0.005, configs(name), places(), st.booleans(), st.booleans(), drawn)(
        check_policy_loss
    )


def check_policy_loss(config: dict, where: Place, traced: bool, bare: bool, drawn: list[Step]):
    """Checks `policy_loss` of given statistics.

    A `bare` batch has only the arrays that the config needs.
    """
    run = of_stats(config, where, traced)
    with_entropy = traced or not bare or config["entropy_coef"] != 0
    lacking = tuple({*VALUES} - needed(config)) if bare else ()
    rollouts = not bare or config["aggregation"] == "rollout_mean"
    for step in drawn:
        rtol = 1e-5 * (1 + step.spread)
        samples = step_samples(step, rollouts=rollouts, unusable=config["unusable"] != "nan")
        weighted = config["weighted_denominators"]
        samples = samples if weighted is None else with_weights(step, samples)
        batch = batch_of(step, samples, where, lacking if rollouts else (*lacking, "rollout_id"))
        batch = dataclasses.replace(batch, weighted_denominators=bool(weighted))
        gone = dict.fromkeys(lacking) | ({} if with_entropy else {"entropy": None})
        samples = [dataclasses.replace(s, **gone) for s in samples]

        def rows(name, s=samples, b=batch, g=step.garbage):
            return to_rows(b, s, [getattr(x, name) for x in s], g)

        stats = TokenStats(rows("log_probs"), rows("entropy") if with_entropy else None)
        loss, gradient, found, selected = run(
            stats, batch, jax.random.key(step.seed), numbers_of(config)
        )
        if selected is not None:
            selected = [x > 0 for x in to_samples(batch, samples, selected)]
            samples = [
                dataclasses.replace(s, selected=x) for s, x in zip(samples, selected, strict=True)
            ]
        assume(is_steady(config, samples, rtol))
        if selected is not None:
            check_selection(config, samples, selected)
        by_entropy = to_samples(batch, samples, gradient.entropy) if with_entropy else None
        got = Found(loss, to_samples(batch, samples, gradient.log_probs), by_entropy, found)
        check_step(got, oracle.policy_loss(*of_oracle(config, samples)), config, rtol)
