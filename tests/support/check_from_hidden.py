"""Compares one example of the search with the oracle, from hidden states and from logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from hypothesis import assume
from oracle.step import stats_gradients, through_head
from policy_steps import quick_jit
from random_heads import TEMPERATURE, HeadShape, HeadStep, head_step, loss_from, stats_from
from random_losses import check_metrics, is_steady, of_jaxppo, of_oracle
from random_steps import Place, Step, agree, batch_of, to_rows, to_samples, with_weights

from jaxppo import Normalizer, accumulate_gradients, finalize_metrics
from jaxppo.losses.covariance import covariance_mask

ROUNDING = 5e-6  # the rounding error of a log-prob from f32 products


def of_hidden(config: dict[str, Any], where: Place, shape: HeadShape) -> Any:
    """A compiled function of (params, batch, options, key): loss, gradient, metrics, selection."""
    mine = of_jaxppo(config)
    parallel = where.parallel
    fixed = {"none": {"temperature": 1.0}, "number": {"temperature": TEMPERATURE}}.get(
        shape.temperature, {}
    )

    @quick_jit
    def run(params: Any, batch: Any, options: Any, key: Any) -> Any:
        options = options | fixed
        selected = None
        if mine.loss.selects:
            stats = stats_from(
                params["hidden"], params["head"], batch, mine, shape, parallel, options
            )
            selected = covariance_mask(stats, batch, mine, key, parallel)
        if where.micro_batches is None:
            rest = options | {"normalizer": None, "selected": selected}

            def fn(p):
                return loss_from(p["hidden"], p["head"], batch, mine, shape, parallel, rest)

            (loss, found), gradient = jax.value_and_grad(fn, has_aux=True)(params)
            return loss, gradient, finalize_metrics(found), selected
        normalizer = Normalizer.of(mine, batch, parallel=parallel)
        by_token = {k: x for k, x in options.items() if getattr(x, "ndim", 0)}

        def part(params: Any, given: Any) -> Any:
            here, batch, normalizer, mine_of_these = given
            own = jnp.where(here[:, None, None, None], params["hidden"], 0).sum(axis=0)
            rest = options | mine_of_these | {"normalizer": normalizer, "selected": None}
            return loss_from(own, params["head"], batch, mine, shape, parallel, rest)

        each = jnp.eye(where.micro_batches, dtype=bool)
        (loss, found), gradient = accumulate_gradients(part, (each, batch, normalizer, by_token))(
            params
        )
        return loss, gradient, finalize_metrics(found), selected

    return run


def given_to(step: Step, found: HeadStep, shape: HeadShape, batch: Any) -> tuple[Any, Any]:
    """The parameters and options of a call."""

    def rows(name, fill, dtype):
        return to_rows(batch, samples, [getattr(s, name) for s in samples], fill, dtype)

    samples = found.samples
    garbage = step.garbage
    hidden = rows("hidden", garbage, np.float32)
    if shape.way == "logits":
        hidden = np.pad(
            hidden, [(0, 0)] * (hidden.ndim - 1) + [(0, shape.padding)], constant_values=garbage
        )
    ids = rows("nucleus_ids", 10**6, np.int32) if shape.nucleus else None
    temperatures = {
        "traced": lambda: jnp.float32(TEMPERATURE),
        "by token": lambda: rows("temperature", garbage, np.float32),
    }
    traced = (
        {"temperature": temperatures[shape.temperature]()}
        if shape.temperature in temperatures
        else {}
    )
    return {"hidden": hidden.astype(jnp.dtype(shape.dtype)), "head": found.arrays}, traced | {
        "nucleus_ids": ids
    }


def check_gradients(
    found: HeadStep, shape: HeadShape, batch: Any, gradient: Any, expected: Any, rtol: float
) -> None:
    """Raises if a gradient with respect to hidden states or the head is not the oracle's."""
    result, by_hidden, by_head = expected
    heaviest = np.max(result.weights, initial=0) * 10  # hidden states and parameters are of size 1
    # the kernel's dtype is that of the gradient of the logits, and of its products
    rounded = shape.dtype == "bfloat16"
    allowed = {"rtol": 2.0**-8, "share": 1.0} if rounded else {"rtol": rtol}
    # a token with a large ratio has terms that are larger than their sum, and each of them is
    # rounded
    cotangents = stats_gradients(found.samples, result)
    terms_of_hidden, terms_of_head = through_head(found.samples, found.head, cotangents, sizes=True)
    size = heaviest + max(np.max(np.abs(x), initial=0) for x in by_hidden)
    of_samples = zip(
        to_samples(batch, found.samples, gradient["hidden"]),
        by_hidden,
        terms_of_hidden,
        strict=True,
    )
    for i, (x, y, terms) in enumerate(of_samples):
        assert not np.any(x[..., y.shape[1] :]), "gradient of logits that do not exist"
        most = np.maximum(size, terms) if rounded else size
        agree(f"gradient of hidden states of sample {i}", x[..., : y.shape[1]], y, most, **allowed)
    for name, x in gradient["head"].items():
        y = getattr(by_head, name)
        x = np.asarray(x, np.float64)
        if name in ("kernel", "bias") and shape.frozen:
            assert not np.any(x), f"gradient of a frozen {name}"
            continue
        x = x.T if name == "kernel" and shape.layout == "vh" else x
        size = heaviest + np.max(np.abs(y), initial=0)
        most = np.maximum(size, getattr(terms_of_head, name)) if rounded else size
        agree(f"gradient of {name}", x, y, most, **allowed)


def check_policy_loss_from_hidden(config: dict, where: Place, shape: HeadShape, drawn: list[Step]):
    """`policy_loss_from_hidden`, and `policy_loss` after `log_probs_from_logits`."""
    selects = of_jaxppo(config).loss.selects is not None
    if selects:  # the search of `policy_loss` selects over micro-batches
        where = dataclasses.replace(where, micro_batches=None, rows=8)
    run = of_hidden(config, where, shape)
    for step in drawn:
        rtol = 3e-5 * (1 + step.spread)
        found = head_step(step, shape, config["unusable"] != "nan")
        if (weighted := config["weighted_denominators"]) is not None:
            found = dataclasses.replace(found, samples=with_weights(step, found.samples))
        if not selects:  # checked before anything is compiled
            assume(is_steady(config, found.samples, 10 * rtol, ROUNDING))
        batch = dataclasses.replace(
            batch_of(step, found.samples, where), weighted_denominators=bool(weighted)
        )
        params, options = given_to(step, found, shape, batch)
        loss, gradient, values, selected = run(params, batch, options, jax.random.key(step.seed))
        samples = found.samples
        if selects:
            chosen = to_samples(batch, samples, selected)
            samples = [
                dataclasses.replace(s, selected=x > 0) for s, x in zip(samples, chosen, strict=True)
            ]
            assume(is_steady(config, samples, 10 * rtol, ROUNDING))
        of_loss, of_config = of_oracle(config, samples)
        expected = oracle.policy_loss_from_hidden(of_loss, found.head, of_config)
        check_metrics(loss, values, expected[0], config, rtol)
        check_gradients(found, shape, batch, gradient, expected, rtol)
