"""The gradient of a step that is too large for one pass: the sum over its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Float

from jaxppo.base.arrays import KINDS, check_array
from jaxppo.base.metrics import Composite, Metric, Metrics, collapse_metrics
from jaxppo.base.stacked import part_of_a_step
from jaxppo.sharding import ShardAxes, check_parallel, vary, varying
from jaxppo.step.once_a_step import Split, gradients_of_originals, split

# What is differentiated in each micro-batch: the parameters that it reads, None for others, and the copies.
Wanted = tuple[list[Float[Array, "..."] | None], list[Float[Array, "D ..."]]]


def accumulate_gradients(
    loss_fn: Callable[[Any, Any], tuple[Float[Array, ""], Metrics]],
    micro_batches: Any,
    *,
    parallel: ShardAxes | None = None,
) -> Callable[[Any], tuple[tuple[Float[Array, ""], Metrics], Any]]:
    """`jax.value_and_grad` of a whole step, one micro-batch at a time: sum over k of loss_fn(params, micro_batches[k]).

    The sum is the loss of the whole step only if each part is normalised by the whole step. So put the
    `Normalizer.of(loss, micro_batches)`, stacked (and for ClipCov and KLCov their `covariance_mask`) into
    `micro_batches` beside them. A loss of this package without a normalizer is refused here, since the mean of the
    means of uneven micro-batches is another number. Group advantages, `whiten` and other statistics of the step are
    refused too: call them before, on the stacked micro-batches. The loop is one `lax.scan`: one program for any K, with
    one set of f32 gradient buffers.

    On a mesh the gradients of a head's parameters are summed over data and context axes once, after the loop, in f32.
    docs/normalizers.md tells how the gradients of the rest of a model are summed.

    Args:
      loss_fn: (params, micro_batch) -> (scalar loss, metrics).
      micro_batches: a pytree whose arrays, keys of `jax.random` among them, all have a leading K.
      parallel: inside the caller's `shard_map`, the roles of its axes. The gradients of all parameters are then summed
        over data and context axes once, after the loop, in f32. Without it JAX sums them in each micro-batch. The loss
        must be summed over these axes, and must not hold a term that depends on the parameters alone.

    Returns:
      A function that maps params, a pytree of floating-point arrays, to ((loss, metrics), gradients): metrics merged
      over the micro-batches, gradients in the dtypes of params.

    Raises:
      TypeError: parameters that are not floating-point arrays; a `loss_fn` that does not return a scalar and metrics.
      ValueError: arrays without a common leading K, or with K = 0; in loss_fn, a loss of this package without a
        `Normalizer` or with one of another number of micro-batches, or a statistic of the step; with `parallel`, a loss
        that is not summed over the data and context axes.

    Example:
      >>> from jaxppo.base.metrics import Metric
      >>> loss_fn = lambda w, x: (jnp.sum(w * x), {"largest": Metric(x.max(), jnp.float32(1), "max")})
      >>> step = accumulate_gradients(loss_fn, jnp.array([[1.0, 2.0], [3.0, 4.0]]))
      >>> (loss, metrics), gradients = step(jnp.ones(2))
      >>> float(loss), float(metrics["largest"].value), gradients.tolist()
      (10.0, 4.0, [4.0, 6.0])
    """
    if not callable(loss_fn):
        raise TypeError(f"loss_fn: got {type(loss_fn).__name__}, expected a function of (params, micro_batch)")
    count = _check_micro_batches(micro_batches)
    check_parallel(parallel, "ShardAxes or None")
    names = () if parallel is None else parallel.tokens
    if parallel is not None:
        parallel.check_manual("accumulate_gradients")
        parallel.check_vma()

    def run(params: Any) -> tuple[tuple[Float[Array, ""], Metrics], Any]:
        for path, x in jax.tree.leaves_with_path(params):
            check_array(f"params{jax.tree_util.keystr(path)}", x, kind=KINDS["params"])
        given, structure = jax.tree.flatten(params)
        leaves = [vary(x, names) for x in given]
        loss = _split_loss(loss_fn, jax.tree.unflatten(structure, leaves), micro_batches, count, names)
        originals, back = jax.vjp(loss.split.originals, *leaves)
        read = [x if used else None for x, used in zip(leaves, loss.split.used, strict=True)]
        wanted = read, loss.split.copies(*originals)
        total, metrics, (found, of_copies) = _sum_over_micro_batches(loss, leaves, wanted, micro_batches, count)
        gradients = [jnp.zeros_like(x, jnp.float32) if g is None else g for x, g in zip(leaves, found, strict=True)]
        if of_copies:
            gradients = list(map(jnp.add, gradients, gradients_of_originals(back, originals, of_copies)))
        gradients = list(map(_summed, gradients, given))
        return (total, collapse_metrics(metrics)), jax.tree.unflatten(structure, gradients)

    return run


class _SplitLoss(NamedTuple):
    """The loss of one micro-batch, split into what runs once a step and what runs for each micro-batch."""

    split: Split
    result: PyTreeDef
    """The structure of (loss, metrics)."""

    def of_one(
        self, leaves: list[Float[Array, "..."]], wanted: Wanted, micro_batch: Any
    ) -> tuple[Float[Array, ""], Metrics]:
        """(loss, metrics) of a micro-batch; `leaves` are constants where `wanted` has no parameter."""
        read, copies = wanted
        params = [x if y is None else y for x, y in zip(leaves, read, strict=True)]
        found = self.split.rest(*params, *copies, *jax.tree.leaves(micro_batch))
        loss, metrics = jax.tree.unflatten(self.result, found)
        return loss, metrics


def _split_loss(
    loss_fn: Callable[[Any, Any], Any], params: Any, micro_batches: Any, count: int, names: tuple[str, ...]
) -> _SplitLoss:
    """Traces the loss of one micro-batch, and checks what it returns."""

    def checked(params: Any, micro_batch: Any) -> tuple[Float[Array, ""], Metrics]:
        found = loss_fn(params, micro_batch)
        _check_result(found)
        return found

    one = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x[0], tree), micro_batches)
    with part_of_a_step(count):
        traced, result = jax.make_jaxpr(checked, return_shape=True)(params, one)
    _check_summed(traced.out_avals[0], names)
    return _SplitLoss(split(traced, jax.tree.leaves(params), jax.tree.leaves(one)), jax.tree.structure(result))


def _sum_over_micro_batches(
    loss: _SplitLoss, leaves: list[Float[Array, "..."]], wanted: Wanted, micro_batches: Any, count: int
) -> tuple[Float[Array, ""], Metrics, Wanted]:
    """The loss, the stacked metrics of the micro-batches and the f32 gradients of what is wanted, in one loop."""
    value_and_grad = jax.value_and_grad(partial(loss.of_one, leaves), has_aux=True)

    def step(carry: tuple[Float[Array, ""], Wanted], micro_batch: Any) -> Any:
        total, gradients = carry
        with part_of_a_step(count):
            (here, metrics), more = value_and_grad(wanted, micro_batch)
        gradients = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), gradients, more)
        return (total + here, gradients), metrics

    start = jnp.float32(0), jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), wanted)
    (total, gradients), metrics = lax.scan(step, start, micro_batches)
    return total, metrics, gradients


def _check_micro_batches(micro_batches: Any) -> int:
    """K; raises where an array of the micro-batches has no leading K."""
    for path, x in jax.tree.leaves_with_path(micro_batches):
        if not (isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
            check_array(f"micro_batches{jax.tree_util.keystr(path)}", x, kind=KINDS["micro_batches"])
    lengths = {x.shape[:1] for x in jax.tree.leaves(micro_batches)}
    if len(lengths) != 1 or lengths <= {(), (0,)}:
        raise ValueError(f"micro_batches: got leading dimensions {sorted(lengths)}, expected one K above 0 for all")
    ((count,),) = lengths
    return count


def _summed(total: Float[Array, "..."], param: Float[Array, "..."]) -> Float[Array, "..."]:
    """An f32 gradient in its parameter's dtype, summed over the axes along which only the gradient varies."""
    missing = tuple(sorted(varying(total) - varying(param)))
    if missing:
        info = jnp.finfo(param.dtype)
        # rounded before it is converted: else XLA for TPU sums over devices in bf16
        total = lax.reduce_precision(lax.psum(total, missing), info.nexp, info.nmant)
    return total.astype(param.dtype)


def _check_summed(loss: Any, names: tuple[str, ...]) -> None:
    """Raises where a loss differs between the devices over which gradients are to be summed."""
    if left := [name for name in names if name in loss.manual_axis_type.varying]:
        raise ValueError(
            f"loss_fn: got a loss that varies over mesh axes {left}, expected the sum over them, lax.psum; a term of "
            "the parameters alone, such as weight decay, must be added after accumulate_gradients"
        )


def _check_result(found: object) -> None:
    """Raises unless `found` is a scalar loss with metrics, as losses of this package return them."""
    expected = "(scalar loss, metrics), as policy_loss returns them"
    if not isinstance(found, tuple) or len(found) != 2:
        got = f"an array of shape {found.shape}" if hasattr(found, "shape") else type(found).__name__
        raise TypeError(f"loss_fn: got {got}, expected {expected}")
    loss, metrics = found
    check_array("loss_fn", loss)
    if loss.shape != ():
        raise TypeError(f"loss_fn: got a loss of shape {loss.shape}, expected {expected}")
    for name, x in metrics.items() if isinstance(metrics, Mapping) else [("it", metrics)]:
        if not isinstance(x, Metric | Composite):
            raise TypeError(f"loss_fn: got {type(x).__name__} for metric {name!r}, expected Metric or Composite")
