"""A search of preference and reward model losses: random pairs, anywhere among other samples."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import oracle.preference as truth
import pytest
from hypothesis import strategies as st
from oracle import OracleSample
from random_losses import between
from random_steps import (
    LONGEST,
    MESHES,
    MOST,
    VALUES,
    Drawn,
    Place,
    Step,
    agree,
    batch_of,
    disordered,
    f32,
    given_samples,
    of_samples,
    places,
    step_samples,
    to_rows,
)
from search_checks import accumulated, check_found, check_rows
from searches import search

from jaxppo import SFT, Normalizer, RolloutBatch, TokenStats, loss_from_stats
from jaxppo.losses import preference

LACKING = tuple({*VALUES} - {"ref_log_probs"})
SMOOTHED = st.just(0.0) | between(0.0625, 0.5)
OF_PAIRS = {
    "nll_coef": st.just(0.0) | between(0.0625, 2),
    "nll": st.sampled_from(["sequence_mean_token_mean", "sequence_mean_token_sum"]),
}
BETA = between(0.0625, 1)
WEIGHT = between(0, 2)
LOSSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "dpo": (
        preference.DPO,
        {"beta": BETA, "label_smoothing": SMOOTHED, "length_normalised": st.booleans()} | OF_PAIRS,
    ),
    "ipo": (preference.IPO, {"beta": BETA, "length_normalised": st.booleans()} | OF_PAIRS),
    "simpo": (
        preference.SimPO,
        {"beta": between(0.0625, 4), "margin": WEIGHT, "label_smoothing": SMOOTHED} | OF_PAIRS,
    ),
    "orpo": (preference.ORPO, {"beta": between(0.0625, 2)} | OF_PAIRS),
    "kto": (
        preference.KTO,
        {
            "reference_point": between(0, 3),
            "beta": BETA,
            "desirable_weight": WEIGHT,
            "undesirable_weight": WEIGHT,
        },
    ),
}


@st.composite
def few_pairs(draw) -> tuple[Drawn, ...]:
    """Draws one to three pairs and, in any order among them, samples of other groups without
    loss tokens.
    """
    pairs = draw(st.integers(1, 3))
    others = draw(st.integers(0, MOST - 6))
    ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=MOST, max_size=MOST, unique=True))
    found = []
    for i in range(2 * pairs + others):
        size = draw(st.integers(1, LONGEST - 4))
        mask = np.array(draw(st.lists(st.integers(0, 1), min_size=size, max_size=size)))
        mask[draw(st.integers(0, size - 1))] = 1
        mask, group = (mask, i // 2) if i < 2 * pairs else (0 * mask, draw(st.integers(0, 9)))
        found.append(
            Drawn(
                draw(st.integers(1, 4)),
                tuple(map(int, mask)),
                ids[i],
                ids[group] if group < 8 else 5,
                i,
            )
        )
    return tuple(draw(st.permutations(found)))


def many_pairs(count: int, seed: int) -> tuple[Drawn, ...]:
    rng = np.random.default_rng(seed)
    masks = [(*(int(x) for x in rng.random(rng.integers(0, 5)) < 0.7), 1) for _ in range(2 * count)]
    ids = rng.permutation(20 * count)
    found = [Drawn(int(rng.integers(1, 4)), m, int(ids[i]), i // 2, i) for i, m in enumerate(masks)]
    return tuple(found[i] for i in rng.permutation(2 * count))


pairs = of_samples(
    few_pairs() | st.builds(many_pairs, st.integers(50, 150), st.integers(0, 2**32 - 1))
)
WHERE = places((None, *MESHES), (None, None, 2, 3))


def samples_of(step: Step) -> list[OracleSample]:
    """Draws the step's samples.

    No two rewards are equal, and exp of a sum of log-ratios is finite in the oracle.
    """
    samples = step_samples(dataclasses.replace(step, spread=min(step.spread, 3.0)))
    rewards = f32(step.rng(5).permutation(len(samples)) - 0.4 * len(samples))
    return [dataclasses.replace(s, reward=float(r)) for s, r in zip(samples, rewards, strict=True)]


def in_place(step: Step, samples: list[OracleSample], where: Place) -> tuple[RolloutBatch, Place]:
    """Packs the batch. Micro-batches keep pairs together; there are at most as many as groups."""
    if where.micro_batches is None:
        return batch_of(step, samples, where, LACKING), where
    count = min(where.micro_batches, len({s.group_id for s in samples}))
    options = {"row_length": where.length, "parallel": where.parallel}
    batch = preference.micro_batches_of_pairs(
        given_samples(step, samples, LACKING), count, **options
    )
    rows = batch.tokens.shape[1]
    order = np.concatenate([k * rows + step.rng(1, k).permutation(rows) for k in range(count)])
    return disordered(step, batch, order), dataclasses.replace(where, micro_batches=count)


def moved(samples: list[OracleSample]) -> list[OracleSample]:
    """Moves log-probs as far as rounding of sums may: up for the higher reward of a pair, down
    for the lower.
    """
    middle = np.median([s.reward for s in samples])
    found = []
    for s in samples:
        partner = next(
            (x for x in samples if x is not s and x.count and x.group_id == s.group_id), None
        )
        by = 2e-6 if s.reward > (middle if partner is None else partner.reward) else -2e-6
        more = {"log_probs": s.log_probs * (1 - by), "ref_log_probs": s.ref_log_probs * (1 + by)}
        found.append(dataclasses.replace(s, **more))
    return found


AT_NIGHT = [pytest.param(name, marks=pytest.mark.nightly) for name in ("dpo", "ipo", "orpo")]


@pytest.mark.parametrize("name", ["simpo", "kto", *AT_NIGHT])
def test_preference_loss(name: str):
    options = st.fixed_dictionaries(LOSSES[name][1])
    search(f"preference {name}", 0.01, st.just(name), options, WHERE, pairs)(check_preference_loss)


def check_preference_loss(name: str, options: dict[str, Any], where: Place, step: Step):
    samples = samples_of(step)
    kind = LOSSES[name][0]
    batch, where = in_place(step, samples, where)
    numbers = {k: x for k, x in options.items() if isinstance(x, float)}
    static = {k: x for k, x in options.items() if k not in numbers}

    def loss_of(p: Any, batch: Any, normalizer: Any) -> Any:
        of = {"parallel": where.parallel, "normalizer": normalizer}
        return loss_from_stats(
            TokenStats(p["log_probs"]), batch, kind(**p["numbers"], **static), **of
        )

    rows = {"log_probs": to_rows(batch, samples, [s.log_probs for s in samples], step.garbage)}
    numbers = {k: np.float32(x) for k, x in numbers.items()}
    loss, gradient, found = of_pairs(loss_of, where)({"rows": rows, "numbers": numbers}, batch)

    def expected(samples: list[OracleSample]) -> Any:
        return (
            truth.kto(samples, **options)
            if name == "kto"
            else truth.preference_loss(samples, name, **options)
        )

    value, by_token, known = expected(samples)
    others, slopes, near = expected(moved(samples))
    agree("loss", loss, value, 0.1 + 1e6 * abs(value - others))
    known, near = settled(known, near, found)
    check_found(
        found, known, 1e-5 + max(abs(known[k] - near[k]) / (1 + abs(known[k])) for k in known)
    )
    off = max(np.max(np.abs(x - y), initial=0) for x, y in zip(by_token, slopes, strict=True))
    check_rows(
        "log_probs", batch, samples, gradient["rows"]["log_probs"], by_token, 1e6 * off, rtol=1e-5
    )


def of_pairs(loss_of: Any, where: Place) -> Any:
    def normalizer_of(batch: Any) -> Normalizer:
        return Normalizer.of(
            SFT(aggregation="sequence_mean_token_mean"), batch, parallel=where.parallel
        )

    return accumulated(loss_of, where, normalizer_of)


def settled(
    known: dict[str, float], near: dict[str, float], found: dict[str, Any]
) -> tuple[Any, Any]:
    """The expected metrics. Where rounding decides the accuracy, it is the one that was found."""
    if known.get("accuracy") != near.get("accuracy"):
        known = known | {"accuracy": float(found["accuracy"])}
    return known, near | ({"accuracy": known["accuracy"]} if "accuracy" in known else {})


def test_reward_model_loss():
    options = st.fixed_dictionaries(
        {"margin": WEIGHT, "centring": st.just(0.0) | between(0.0625, 1)}
    )
    search("reward model", 0.01, options, WHERE, pairs)(check_reward_model_loss)


def check_reward_model_loss(options: dict[str, float], where: Place, step: Step):
    samples = samples_of(step)
    batch, where = in_place(step, samples, where)
    scores = f32(step.rng(6).normal(size=len(samples)))
    ends = [np.arange(len(s.mask)) == len(s.mask) - 1 for s in samples]
    wide = [dataclasses.replace(s, mask=np.ones(len(s.mask))) for s in samples]

    def loss_of(p: Any, batch: Any, normalizer: Any) -> Any:
        of = {"parallel": where.parallel, "normalizer": normalizer}
        return loss_from_stats(p["scores"], batch, preference.BradleyTerry(**p["numbers"]), **of)

    placed = [np.where(end, score, step.garbage) for end, score in zip(ends, scores, strict=True)]
    rows = {"scores": to_rows(batch, wide, placed, step.garbage)}
    numbers = {k: np.float32(x) for k, x in options.items()}
    loss, gradient, found = of_pairs(loss_of, where)({"rows": rows, "numbers": numbers}, batch)
    value, by_score, known = truth.bradley_terry(samples, scores, **options)
    size = 1 + options["margin"] * len(samples)
    agree("loss", loss, value, size)
    check_found(found, known, 1e-5)
    expected = [np.where(end, x, 0) for end, x in zip(ends, by_score, strict=True)]
    check_rows(
        "scores",
        batch,
        samples,
        gradient["rows"]["scores"],
        expected,
        size * abs(by_score).max(),
        rtol=1e-5,
    )
