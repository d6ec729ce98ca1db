"""A step as stacked micro-batches, `[K, R, ...]`: statistics are over all of it, and refused for
a single part.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

# K while `accumulate_gradients` traces one of K micro-batches, else 0. It is part of the key of
# jit's caches, so that a function that was traced outside is traced again for a part of a step.
part_of_a_step = jax.make_user_context(0)


def check_whole_step(name: str, batch: Any = None) -> None:
    """Raises where the public function `name`, a statistic of the whole step, is called on one
    of its micro-batches.
    """
    expected = "expected the whole step, its micro-batches stacked, [K, R, ...]"
    if part_of_a_step.value:
        raise ValueError(
            f"{name}: got one micro-batch inside accumulate_gradients, {expected}: call it before,"
            " and put its result into micro_batches"
        )
    if batch is not None and batch.loss_mask.ndim == 2 and (batch.micro_batches or 1) > 1:
        raise ValueError(
            f"{name}: got one of {batch.micro_batches} micro-batches, {expected}; a batch that is a"
            " step of its own has micro_batches=None"
        )


def as_rows(tree: Any) -> Any:
    """The tree with each array `[K, R, n]` reshaped to `[K R, n]`; other arrays are unchanged."""

    def rows(x: Any) -> Any:
        if getattr(x, "ndim", 0) == 3:
            return x.reshape(-1, x.shape[-1])
        return x

    return jax.tree.map(rows, tree)


def of_rows(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a per-shard function of rows, `[R, n]` to `[R, m]`, to take stacked
    micro-batches too.
    """

    @functools.wraps(fn)
    def run(*args: Any) -> Any:
        stacked = [x.shape[:2] for x in jax.tree.leaves(args) if getattr(x, "ndim", 0) == 3]
        results = fn(*as_rows(args))
        if not stacked:
            return results
        return jax.tree.map(lambda x: x.reshape(*stacked[0], x.shape[-1]), results)

    return run
