"""Gradients of a step too large for one pass: the sum over its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo._arrays import check_array
from jaxppo._stacked import part_of_a_step
from jaxppo.metrics import Composite, Metric, Metrics, collapse_metrics


def accumulate_gradients(
    loss_fn: Callable[[Any, Any], tuple[Float[Array, ""], Metrics]], micro_batches: Any
) -> Callable[[Any], tuple[tuple[Float[Array, ""], Metrics], Any]]:
    """`jax.value_and_grad` of a whole step, one micro-batch at a time: sum over k of loss_fn(params, micro_batches[k]).

    The sum is the loss of the whole step only where each loss is normalised by the whole step: put the
    `Normalizer.from_batches` of the stacked micro-batches (and for ClipCov and KLCov their `covariance_mask`) into
    `micro_batches` beside them. A loss of this package without one is refused here, since the mean of the means of
    uneven micro-batches is another number. So are group advantages, `whiten` and whatever else is a statistic of the
    step: call them before, on the stacked micro-batches. One `lax.scan`, so one program whatever K is, with one set of
    f32 gradient buffers.

    Args:
      loss_fn: (params, micro_batch) -> (scalar loss, metrics).
      micro_batches: a pytree whose arrays all have a leading K.

    Returns:
      A function of params, a pytree of floating-point arrays, to ((loss, metrics), gradients): metrics merged over
      the micro-batches, gradients in the dtypes of params.

    Raises:
      TypeError: parameters that are no floating-point arrays; a `loss_fn` that does not return a scalar and metrics.
      ValueError: arrays without a common leading K, or with K = 0; in loss_fn, a loss of this package without a
        `Normalizer` or with one of another number of micro-batches, or a statistic of the step.

    Example:
      >>> from jaxppo.metrics import Metric
      >>> loss_fn = lambda w, x: (jnp.sum(w * x), {"largest": Metric(x.max(), jnp.float32(1), "max")})
      >>> step = accumulate_gradients(loss_fn, jnp.array([[1.0, 2.0], [3.0, 4.0]]))
      >>> (loss, metrics), gradients = step(jnp.ones(2))
      >>> float(loss), float(metrics["largest"].value), gradients.tolist()
      (10.0, 4.0, [4.0, 6.0])
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: got {type(loss_fn).__name__}, expected a function of (params, micro_batch)")
    for path, x in jax.tree.leaves_with_path(micro_batches):
        check_array(f"micro_batches{jax.tree_util.keystr(path)}", x)
    lengths = {x.shape[:1] for x in jax.tree.leaves(micro_batches)}
    if len(lengths) != 1 or lengths <= {(), (0,)}:
        raise ValueError(f"micro_batches: got leading dimensions {sorted(lengths)}, expected one K above 0 for all")
    (count,) = lengths.pop()

    def checked(params: Any, micro_batch: Any) -> tuple[Float[Array, ""], Metrics]:
        found = loss_fn(params, micro_batch)
        _check_result(found)
        return found

    value_and_grad = jax.value_and_grad(checked, has_aux=True)

    def run(params: Any) -> tuple[tuple[Float[Array, ""], Metrics], Any]:
        for path, x in jax.tree.leaves_with_path(params):
            check_array(f"params{jax.tree_util.keystr(path)}", x, "floats")

        def step(carry: Any, micro_batch: Any) -> Any:
            loss, gradients = carry
            with part_of_a_step(count):
                (part, metrics), more = value_and_grad(params, micro_batch)
            gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, more)
            return (loss + part, gradients), metrics

        start = jnp.float32(0), jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
        (loss, gradients), metrics = lax.scan(step, start, micro_batches)
        gradients = jax.tree.map(lambda g, x: g.astype(x.dtype), gradients, params)
        return (loss, collapse_metrics(metrics)), gradients

    return run


def _check_result(found: Any) -> None:
    """Raises where it is not what a loss of this package returns."""
    expected = "(scalar loss, metrics), as policy_loss returns them"
    if not isinstance(found, tuple) or len(found) != 2:
        got = f"an array of shape {found.shape}" if hasattr(found, "shape") else type(found).__name__
        raise TypeError(f"loss_fn: got {got}, expected {expected}")
    loss, metrics = found
    check_array("loss_fn", loss, "floats")
    if loss.shape != ():
        raise TypeError(f"loss_fn: got a loss of shape {loss.shape}, expected {expected}")
    for name, x in metrics.items() if isinstance(metrics, Mapping) else [("it", metrics)]:
        if not isinstance(x, Metric | Composite):
            raise TypeError(f"loss_fn: got {type(x).__name__} for metric {name!r}, expected Metric or Composite")
