"""A search of value, supervised, multi-token-prediction and distillation losses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import oracle.other_losses as truth
import pytest
from hypothesis import strategies as st
from jax import lax
from oracle.head import head_gradient, logits
from oracle.samples import sample_weights, weighted_sum
from oracle.step import through_head
from policy_steps import normalizer_of
from random_heads import HeadShape, head_of, head_step, heads
from random_losses import AGGREGATIONS, between, norm_of
from random_steps import (
    MESHES,
    Place,
    Step,
    agree,
    batch_of,
    large_steps,
    places,
    step_samples,
    steps,
    to_rows,
)
from search_checks import (
    BF16,
    F32,
    accumulated,
    check_found,
    check_head,
    check_rows,
    hidden_rows,
    simple,
    with_gap,
)
from searches import search

from jaxppo import SFT, Normalizer, Value, log_probs_from_hidden, loss_from_hidden, loss_from_stats
from jaxppo.losses.distillation import distillation_loss
from jaxppo.losses.mtp import MTP, mtp_loss

LARGE = st.lists(large_steps, min_size=1, max_size=1)


@st.composite
def value_options(draw, aggregation: str) -> dict[str, Any]:
    return {
        "clip": draw(st.none() | between(0.0625, 2)),
        "factor": draw(between(0.25, 2)),
        "huber_delta": draw(st.none() | between(0.0625, 2)),
        "clip_fraction": draw(st.sampled_from(["worse", "outside"])),
        "aggregation": aggregation,
        "aggregation_norm": norm_of(draw, aggregation),
        "metric_aggregation": draw(st.sampled_from(["token_mean", "loss"])),
    }


@pytest.mark.every(7)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_value_loss(aggregation: str):
    drawn = st.lists(steps, min_size=1, max_size=3)
    search(f"value {aggregation}", 0.01, value_options(aggregation), places(), drawn)(
        check_value_loss
    )
    search(f"value {aggregation}, large", 0.005, value_options(aggregation), places(), LARGE)(
        check_value_loss
    )


def check_value_loss(options: dict, where: Place, drawn: list[Step]):
    parallel = where.parallel
    aggregation = options["aggregation"]
    run = accumulated(
        lambda p, b, n: loss_from_stats(
            p["values"], b, Value(**options), parallel=parallel, normalizer=n
        ),
        where,
        lambda b: normalizer_of(b, aggregation, parallel=parallel),
    )
    for step in drawn:
        samples = step_samples(step)
        batch = batch_of(step, samples, where)
        values = to_rows(batch, samples, [s.new_values for s in samples], step.garbage)
        loss, gradient, found = run({"rows": {"values": values}}, batch)
        expected, by_values, known = truth.value_loss(samples, **options)
        heaviest = np.max(sample_weights(samples, aggregation, options["aggregation_norm"]))
        agree("loss", loss, expected, 0.0)
        check_found(found, known, 1e-5)
        check_rows(
            "values", batch, samples, gradient["rows"]["values"], by_values, heaviest, rtol=1e-5
        )


@st.composite
def sft_options(draw, aggregation: str) -> dict[str, Any]:
    smooth = st.just(0.0) | between(0.0625, 0.5)
    found = {"aggregation": aggregation, "aggregation_norm": norm_of(draw, aggregation)}
    return found | {
        "label_smoothing": draw(smooth),
        "z_loss": draw(smooth),
        "dft": draw(st.booleans()),
    }


@pytest.mark.every(7)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_sft_loss(aggregation: str):
    where = places((None, *MESHES), (None, None, 2), sequence_parallel=True)
    drawn = st.lists(steps, min_size=1, max_size=2)
    search(f"sft {aggregation}", 0.02, sft_options(aggregation), where, heads.map(simple), drawn)(
        check_sft_loss
    )
    given = sft_options(aggregation), where, heads.map(simple), LARGE
    search(f"sft {aggregation}, large", 0.005, *given)(check_sft_loss)


def check_sft_loss(options: dict, where: Place, shape: HeadShape, drawn: list[Step]):
    """Checks one example from hidden states, in one pass if these options allow it."""
    parallel = where.parallel
    T = 0.75 if shape.temperature == "number" else 1.0
    of_loss = {k: options[k] for k in ("dft", "aggregation", "aggregation_norm")}
    plain = not options["label_smoothing"] and not options["z_loss"] and not shape.nucleus

    def loss_of(p: Any, batch: Any, normalizer: Any) -> Any:
        head = head_of(shape, p["head"])
        call = {"parallel": parallel, "temperature": T}
        if plain:
            return loss_from_hidden(
                p["hidden"], head, batch, SFT(**of_loss), normalizer=normalizer, **call
            )
        where = batch.loss_mask.astype(jnp.float32) > 0
        call |= {"logit_stats": ("log_z", "mean_logit", "accuracy"), "where": where}
        stats = log_probs_from_hidden(p["hidden"], head, batch.targets, **call)
        return loss_from_stats(
            stats, batch, SFT(**options), parallel=parallel, normalizer=normalizer
        )

    aggregation = options["aggregation"]
    run = accumulated(loss_of, where, lambda b: normalizer_of(b, aggregation, parallel=parallel))
    shape = dataclasses.replace(shape, nucleus=False)
    for step in drawn:
        found = head_step(step, shape)
        if not with_gap(found):
            continue
        batch = batch_of(step, found.samples, where)
        params = {
            "rows": {"hidden": hidden_rows(step, found, batch, shape, False)},
            "head": found.arrays,
        }
        loss, gradient, values = run(params, batch)
        with_entropy = (
            found.samples
            if plain
            else [dataclasses.replace(s, entropy=None) for s in found.samples]
        )
        samples = [
            dataclasses.replace(s, log_z=None, likeliest=None) if plain else s for s in with_entropy
        ]
        expected, by_stats, known = truth.sft_loss(samples, **options)
        agree("loss", loss, expected, 0.0, 3e-5)
        check_found(values, known, 3e-5)
        by_hidden, by_head = through_head(found.samples, found.head, by_stats)
        floor = 10 * np.max(sample_weights(samples, aggregation, options["aggregation_norm"]))
        allowed = BF16 if shape.dtype == "bfloat16" else F32
        check_rows(
            "hidden", batch, samples, gradient["rows"]["hidden"], by_hidden, floor, **allowed
        )
        check_head(gradient["head"], by_head, shape, floor, **allowed)


@pytest.mark.every(7)
@pytest.mark.parametrize(
    "aggregation", ["token_mean", "token_sum", "sequence_mean_token_mean", "rollout_mean"]
)
def test_mtp_loss(aggregation: str):
    head = heads.map(lambda s: simple(s, nucleus=False))
    where = places((None, *MESHES), (None, None, 2))
    given = st.just(aggregation), st.integers(1, 3), between(0.0625, 1), where, head, steps
    search(f"mtp {aggregation}", 0.01, *given)(check_mtp_loss)
    search(f"mtp {aggregation}, large", 0.005, *given[:-1], large_steps)(check_mtp_loss)


def check_mtp_loss(
    aggregation: str, depths: int, coef: float, where: Place, shape: HeadShape, step: Step
):
    parallel = where.parallel
    T = 0.75 if shape.temperature == "number" else 1.0
    given = [head_step(dataclasses.replace(step, seed=step.seed + k), shape) for k in range(depths)]
    samples = given[0].samples
    head = given[0].head
    batch = batch_of(step, samples, where)
    loss_given = MTP(depths, coef, aggregation=aggregation)

    def loss_of(p: Any, batch: Any, normalizers: Any) -> Any:
        options = {"parallel": parallel, "temperature": T, "normalizers": normalizers}
        hidden = [p[f"hidden {k}"] for k in range(depths)]
        return mtp_loss(hidden, head_of(shape, p["head"]), batch, loss_given, **options)

    def normalizers_of(b):
        return Normalizer.of(loss_given, b, parallel=parallel)

    hidden = {f"hidden {k}": hidden_rows(step, x, batch, shape, True) for k, x in enumerate(given)}
    params = {"rows": hidden, "head": given[0].arrays}
    loss, gradient, found = accumulated(loss_of, where, normalizers_of)(params, batch)
    states = [[s.hidden for s in x.samples] for x in given]
    expected, by_hidden, by_heads, known = truth.mtp_loss(
        samples, states, head, coef=coef, aggregation=aggregation
    )
    if not all(with_gap(x) for x in given):
        known = known | {k: float(found[k]) for k in known if k.endswith("accuracy")}
    agree("loss", loss, expected, 0.1, 3e-5)
    check_found(found, known, 3e-5)
    allowed = BF16 if shape.dtype == "bfloat16" else F32
    floor = 10 * coef * np.max(sample_weights(samples, aggregation))
    for k in range(depths):
        check_rows(
            f"hidden {k}",
            batch,
            samples,
            gradient["rows"][f"hidden {k}"],
            by_hidden[k],
            floor,
            **allowed,
        )
    sums = type(by_heads[0])(
        *(None if x[0] is None else np.sum(x, axis=0) for x in zip(*by_heads, strict=True))
    )
    # each depth's gradient is rounded to the dtype of the parameter before they are summed
    check_head(
        gradient["head"], sums, shape, floor, **(allowed | {"share": allowed["share"] * depths})
    )


@pytest.mark.every(7)
@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jensen_shannon"])
def test_distillation_loss(kind: str):
    head = heads.map(lambda s: simple(s, nucleus=False))
    where = places((None, *MESHES), (None, None, 2))
    given = st.just(kind), between(0.125, 0.875), st.sampled_from(AGGREGATIONS), where, head, steps
    search(f"distillation {kind}", 0.01, *given)(check_distillation_loss)
    search(f"distillation {kind}, large", 0.005, *given[:-1], large_steps)(check_distillation_loss)


def check_distillation_loss(
    kind: str, beta: float, aggregation: str, where: Place, shape: HeadShape, step: Step
):
    parallel = where.parallel
    T = 0.75 if shape.temperature == "number" else 1.0
    norm = 8.0 if aggregation == "sequence_mean_token_sum_norm" else None
    student = head_step(step, shape)
    plain = dataclasses.replace(shape, bias=False, lora=False, frozen=False, dtype="float32")
    teacher = head_step(dataclasses.replace(step, seed=step.seed + 1), plain)
    samples = student.samples
    batch = batch_of(step, samples, where)

    def loss_of(p: Any, batch: Any, normalizer: Any) -> Any:
        options = {
            "divergence": kind,
            "beta": beta,
            "temperature": T,
            "parallel": parallel,
            "normalizer": normalizer,
        }
        of_teacher = lax.stop_gradient((p["teacher"], head_of(plain, p["teacher_head"])))
        of_loss = {"aggregation": aggregation, "aggregation_norm": norm}
        return distillation_loss(
            p["hidden"], head_of(shape, p["head"]), *of_teacher, batch, **of_loss, **options
        )

    rows = {"hidden": hidden_rows(step, student, batch, shape, False)}
    rows |= {"teacher": hidden_rows(step, teacher, batch, plain, False)}
    params = {"rows": rows, "head": student.arrays, "teacher_head": teacher.arrays}
    run = accumulated(loss_of, where, lambda b: normalizer_of(b, aggregation, parallel=parallel))
    loss, gradient, found = run(params, batch)

    weights = sample_weights(samples, aggregation, norm)
    values = []
    by_hidden = []
    by_head = []
    for s, t, w in zip(samples, teacher.samples, weights, strict=True):
        z = logits(s.at("hidden"), student.head, T)
        its = logits(t.hidden[s.here], teacher.head, T)
        value, dz = truth.divergence(z, its, kind, beta)
        dh, parts = head_gradient(s.at("hidden"), student.head, w * dz, T)
        values.append(value)
        by_hidden.append(s.scatter(dh))
        by_head.append(parts)
    expected = weighted_sum(weights, values)
    count = max(sum(map(len, values)), 1)
    agree("loss", loss, expected, weights.max(), 3e-5)
    check_found(found, {"loss": expected, "divergence": sum(map(np.sum, values)) / count}, 3e-5)
    allowed = BF16 if shape.dtype == "bfloat16" else F32
    floor = 10 * np.max(weights)
    check_rows("hidden", batch, samples, gradient["rows"]["hidden"], by_hidden, floor, **allowed)
    sums = type(by_head[0])(
        *(None if x[0] is None else np.sum(x, axis=0) for x in zip(*by_head, strict=True))
    )
    check_head(gradient["head"], sums, shape, floor, **allowed)
