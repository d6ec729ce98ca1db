"""A step too large for one pass, a micro-batch at a time: its gradient, and forward passes that
have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxppo.base.arrays import KINDS, check_array
from jaxppo.base.metrics import Composite, Metric, Metrics, collapse_metrics
from jaxppo.base.stacked import part_of_a_step
from jaxppo.batch.rollout_batch import RolloutBatch, check_arrays
from jaxppo.head.head import TokenStats
from jaxppo.head.tile import rounded
from jaxppo.sharding import ShardAxes, check_parallel, vary, varying

LossAndMetrics = tuple[Float[Array, ""], Metrics]
_LEARNS = KINDS["params"]._replace(
    expected=(
        "floats, which learn; keys, counts and all else that does not learn go to loss_fn another"
        " way, such as nnx.split(model, nnx.Param, ...)"
    )
)


def accumulate_gradients(
    loss_fn: Callable[[Any, Any], LossAndMetrics],
    micro_batches: Any,
    *,
    parallel: ShardAxes | None = None,
) -> Callable[[Any], tuple[LossAndMetrics, Any]]:
    """`jax.value_and_grad` of a whole step, one micro-batch at a time: sum over k of
    loss_fn(params, micro_batches[k]).

    The sum is the loss of the whole step only if each part is normalised by the whole step. So put
    the stacked `Normalizer.of(loss, micro_batches)` (and for ClipCov and KLCov their
    `covariance_mask`) into `micro_batches` beside them. Group advantages, `whiten` and other
    statistics of the step are refused here: call them before, on the stacked micro-batches. The
    loop is one `lax.scan`, with one set of f32 gradient buffers.

    On a mesh each micro-batch sums its gradients over data and context axes: those of a head's
    parameters in f32. With `parallel` all gradients are summed once, behind the loop.

    Args:
      loss_fn: (params, micro_batch) -> (scalar loss, metrics).
      micro_batches: a pytree whose arrays, keys of `jax.random` among them, all have a leading K.
      parallel: inside the caller's `shard_map`, the roles of its axes. The gradients of all
        parameters are then summed over data and context axes once, behind the loop, in f32. The
        loss must be a sum over these axes, without terms of the parameters alone.

    Returns:
      A function that maps params, a pytree of floating-point arrays, to ((loss, metrics),
      gradients): metrics merged over the micro-batches, gradients in the dtypes of params.

    Raises:
      TypeError: parameters that are not floating-point arrays, such as the random state of a model
        with dropout; a `loss_fn` that does not return a scalar and metrics.
      ValueError: arrays without a common leading K, or with K = 0; in loss_fn, a loss of this
        package without a `Normalizer` or with one of another number of micro-batches, or a
        statistic of the step; with `parallel`, a loss that is not summed over the data and context
        axes.

    Example:
      >>> from jaxppo.base.metrics import Metric
      >>> loss_fn = lambda w, x: (jnp.sum(w * x), {"largest": Metric(x.max(), jnp.float32(1), "max")})
      >>> step = accumulate_gradients(loss_fn, jnp.array([[1.0, 2.0], [3.0, 4.0]]))
      >>> (loss, metrics), gradients = step(jnp.ones(2))
      >>> float(loss), float(metrics["largest"].value), gradients.tolist()
      (10.0, 4.0, [4.0, 6.0])
    """
    if not callable(loss_fn):
        raise TypeError(
            f"loss_fn: got {type(loss_fn).__name__}, expected a function of (params, micro_batch)"
        )
    count = _check_micro_batches(micro_batches)
    check_parallel(parallel, "ShardAxes or None")
    names: tuple[str, ...] = ()
    if parallel is not None:
        parallel.check_manual("accumulate_gradients")
        names = parallel.tokens

    def checked_loss(params: Any, micro_batch: Any) -> LossAndMetrics:
        with part_of_a_step(count):
            loss, metrics = _checked_result(loss_fn(params, micro_batch))
        _check_summed(loss, names)
        return loss, metrics

    def run(params: Any) -> tuple[LossAndMetrics, Any]:
        for path, x in jax.tree.leaves_with_path(params):
            check_array(f"params{jax.tree_util.keystr(path)}", x, kind=_LEARNS)
        # parameters that vary have gradients that are not summed over devices in each micro-batch
        own_params = jax.tree.map(lambda x: vary(x, names), params)
        total, metrics, gradients = _sum_over_micro_batches(checked_loss, own_params, micro_batches)
        gradients = jax.tree.map(_summed, gradients, params)
        return (total, collapse_metrics(metrics)), gradients

    return run


def _sum_over_micro_batches(
    loss_fn: Callable[[Any, Any], LossAndMetrics], params: Any, micro_batches: Any
) -> tuple[Float[Array, ""], Metrics, Any]:
    """The loss, the stacked metrics of the micro-batches and the f32 gradients of the
    parameters, in one loop.
    """

    def step(carry: tuple[Float[Array, ""], Any], micro_batch: Any) -> Any:
        total, sums = carry
        (loss, metrics), gradients = jax.value_and_grad(loss_fn, has_aux=True)(params, micro_batch)
        sums = jax.tree.map(
            lambda sum_, gradient: sum_ + gradient.astype(jnp.float32), sums, gradients
        )
        return (total + loss, sums), metrics

    zeros = jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), params)
    (total, gradients), metrics = lax.scan(step, (jnp.float32(0), zeros), micro_batches)
    return total, metrics, gradients


def _check_summed(loss: Float[Array, ""], names: tuple[str, ...]) -> None:
    """Raises if devices along these axes hold different losses: parts of a sum that nobody has
    summed.
    """
    left = [name for name in names if name in varying(loss)]
    if left:
        raise ValueError(
            f"loss_fn: got a loss that varies over mesh axes {left}, expected the sum over them,"
            " lax.psum; a term of the parameters alone, such as weight decay, must be added after"
            " accumulate_gradients"
        )


def _check_micro_batches(micro_batches: Any) -> int:
    """K; raises where an array of the micro-batches has no leading K."""
    for path, x in jax.tree.leaves_with_path(micro_batches):
        if not (isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)):
            check_array(
                f"micro_batches{jax.tree_util.keystr(path)}", x, kind=KINDS["micro_batches"]
            )
    lengths = {x.shape[:1] for x in jax.tree.leaves(micro_batches)}
    if len(lengths) != 1 or lengths <= {(), (0,)}:
        raise ValueError(
            f"micro_batches: got leading dimensions {sorted(lengths)}, expected one K above 0"
            " for all"
        )
    ((count,),) = lengths
    return count


def _summed(total: Float[Array, "..."], param: Float[Array, "..."]) -> Float[Array, "..."]:
    """An f32 gradient in its parameter's dtype, summed over the axes along which only the
    gradient varies.
    """
    missing = tuple(sorted(varying(total) - varying(param)))
    if missing:
        total = lax.psum(total, missing)
    return rounded(total, param.dtype)


def _checked_result(result: Any) -> LossAndMetrics:
    """The result of a loss; raises unless it is a scalar with metrics, as losses of this package
    return them.
    """
    expected = "(scalar loss, metrics), as policy_loss returns them"
    if not isinstance(result, tuple) or len(result) != 2:
        got = (
            f"an array of shape {result.shape}"
            if hasattr(result, "shape")
            else type(result).__name__
        )
        raise TypeError(f"loss_fn: got {got}, expected {expected}")
    loss, metrics = result
    check_array("loss_fn", loss)
    if loss.shape != ():
        raise TypeError(f"loss_fn: got a loss of shape {loss.shape}, expected {expected}")
    named = metrics if isinstance(metrics, Mapping) else {"it": metrics}
    for name, metric in named.items():
        if not isinstance(metric, Metric | Composite):
            got = type(metric).__name__
            raise TypeError(f"loss_fn: got {got} for metric {name!r}, expected Metric or Composite")
    return loss, metrics


def compute_log_probs(
    apply: Callable[[Any, RolloutBatch], TokenStats], params: Any, micro_batches: RolloutBatch
) -> TokenStats:
    """Computes the statistics of micro-batches one after another, and keeps nothing for a backward.

    Call it under jit.

    Args:
      apply: takes params and one micro-batch `[R, T]`, returns its `TokenStats`; see
        `log_probs_from_hidden`.
      params: the parameters of the model that scores.
      micro_batches: `[K, R, T]`, or one batch `[R, T]`.

    Returns:
      `TokenStats`, f32 `[K, R, T]` or `[R, T]` each.

    Raises:
      TypeError: apply does not return `TokenStats`.
      ValueError: apply's log-probs have another shape than its micro-batch.

    Example:
      >>> ids, one = jnp.ones((2, 1, 3), int), jnp.zeros((2, 1, 1), int)
      >>> batches = RolloutBatch(ids, ids, ids, ids, ids * 1.0, one)
      >>> score = lambda params, batch: TokenStats(params * batch.targets)
      >>> compute_log_probs(score, -2.0, batches).log_probs.shape
      (2, 1, 3)
    """
    if not callable(apply):
        raise TypeError(
            f"apply: got {type(apply).__name__}, expected a function that returns TokenStats"
        )
    check_arrays(micro_batches, stacked=True, prefix="micro_batches.")
    for path, x in jax.tree.leaves_with_path(params):
        try:
            jax.typeof(x)
        except TypeError:  # texts, objects, and numpy's arrays of them
            got = getattr(x, "dtype", type(x).__name__)
            raise TypeError(
                f"params{jax.tree_util.keystr(path)}: got {got}, expected an array or a number"
            ) from None
    params = lax.stop_gradient(params)

    def score(batch: RolloutBatch) -> TokenStats:
        stats = apply(params, batch)
        if not isinstance(stats, TokenStats):
            raise TypeError(
                f"apply: got {type(stats).__name__}, expected a function that returns TokenStats"
            )
        if stats.log_probs.shape != batch.loss_mask.shape:
            raise ValueError(
                f"apply: got log-probs of shape {stats.log_probs.shape}, expected the batch's,"
                f" {batch.loss_mask.shape}"
            )
        return lax.stop_gradient(stats)

    if micro_batches.loss_mask.ndim == 3:
        return lax.map(score, micro_batches)
    return score(micro_batches)
