"""Shared by the searches of several losses: a step in micro-batches, and comparisons with the
oracle.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from oracle.head import logits
from policy_steps import quick_jit
from random_heads import HeadShape, HeadStep
from random_steps import Place, Step, agree, to_rows, to_samples

from jaxppo import accumulate_gradients, finalize_metrics

F32 = {"rtol": 3e-5, "share": 0.2}
BF16 = {"rtol": 2.0**-8, "share": 1.0}


def accumulated(loss_of: Any, where: Place, normalizers_of: Any) -> Any:
    """A compiled function of (params, batch) to loss, gradient and metrics, in micro-batches if the
    place has some.

    Args:
      loss_of: takes params, a batch and its normalizer.
      where: the place of the batch.
      normalizers_of: takes stacked micro-batches. "rows" of params have their leading dimension
        too.
    """

    @quick_jit
    def run(params: Any, batch: Any) -> Any:
        if where.micro_batches is None:

            def fn(p):
                return loss_of({**p, **p["rows"]}, batch, None)

            (loss, found), gradient = jax.value_and_grad(fn, has_aux=True)(params)
            return loss, gradient, finalize_metrics(found)

        def part(params: Any, given: Any) -> Any:
            here, batch, normalizer = given

            def pick(x):
                return jnp.where(here.reshape(-1, *(1,) * (x.ndim - 1)), x, 0).sum(axis=0)

            return loss_of({**params, **jax.tree.map(pick, params["rows"])}, batch, normalizer)

        given = jnp.eye(where.micro_batches, dtype=bool), batch, normalizers_of(batch)
        (loss, found), gradient = accumulate_gradients(part, given)(params)
        return loss, gradient, finalize_metrics(found)

    return run


def check_found(found: dict[str, Any], expected: dict[str, float], rtol: float) -> None:
    """Raises if a metric differs or is missing, or if a rule was broken."""
    names = {name for name in found if not name.endswith("broken_rules")}
    assert names == expected.keys()
    assert all(int(found[name]) == 0 for name in found if name not in names)
    for name, value in expected.items():
        agree(f"metric {name}", found[name], value, 1.0, rtol)


def check_rows(
    name: str,
    batch: Any,
    samples: Any,
    got: Any,
    expected: list[np.ndarray],
    floor: float,
    **allowed: Any,
):
    """Raises if a gradient `[R, T, ...]` is not the oracle's, which is `[tokens, ...]` for each
    sample.
    """
    size = floor + max(np.max(np.abs(x), initial=0) for x in expected)
    for i, (x, y) in enumerate(zip(to_samples(batch, samples, got), expected, strict=True)):
        agree(f"gradient of {name} of sample {i}", x, y, size, **allowed)


def check_head(
    gradient: dict[str, Any], expected: Any, shape: HeadShape, floor: float, **allowed: Any
) -> None:
    """Raises if the gradient of a parameter is not the oracle's."""
    for name, x in gradient.items():
        y = getattr(expected, name)
        y = np.zeros_like(y) if shape.frozen and name in ("kernel", "bias") else y
        x = np.asarray(x, np.float64)
        x = x.T if name == "kernel" and shape.layout == "vh" else x
        agree(f"gradient of {name}", x, y, floor + np.max(np.abs(y), initial=0), **allowed)


def hidden_rows(step: Step, found: HeadStep, batch: Any, shape: HeadShape, everywhere: bool) -> Any:
    """Hidden states `[R, T, H]`, with garbage at positions without loss and outside of
    sequences.
    """
    samples = found.samples
    wide = (
        [dataclasses.replace(s, mask=np.ones(len(s.mask))) for s in samples]
        if everywhere
        else samples
    )
    rows = to_rows(batch, wide, [s.hidden for s in samples], step.garbage)
    return rows.astype(jnp.dtype(shape.dtype))


def simple(shape: HeadShape, **more: Any) -> HeadShape:
    """The shape without the options that these losses do not have."""
    fixed = shape.temperature if shape.temperature == "number" else "none"
    way = "one call" if shape.way == "logits" else shape.way
    return dataclasses.replace(shape, way=way, temperature=fixed, **more)


def with_gap(found: HeadStep) -> bool:
    """Whether the likeliest token is ahead by more than rounding."""
    for s in found.samples:
        z = logits(s.hidden, found.head)
        rival = np.where(np.arange(z.shape[1]) == s.targets[:, None], -np.inf, z).max(
            1, initial=-np.inf
        )
        if np.any(np.abs(rival - z[np.arange(len(z)), s.targets]) < 1e-4):
            return False
    return True
