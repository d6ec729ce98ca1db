"""A term of the loss that is a function of means over the whole step, such as the balance loss
of experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from jaxppo.base.arrays import KINDS, check, check_array
from jaxppo.base.metrics import Metric, share
from jaxppo.base.pytree import register
from jaxppo.base.stacked import check_whole_step, part_of_a_step

__all__ = ["StepTerm"]


@register(static=["micro_batches"])
@dataclasses.dataclass(frozen=True)
class StepTerm:
    """A term f(m) of the loss, where m are means over all tokens of the step, for each of its K
    micro-batches.

    A product of two means over the step is not the mean of the micro-batches' products. So m is
    computed first, in a pass without gradients. In the gradient's pass micro-batch k has sums s_k,
    and adds

        f(m) / K + f'(m) . (s_k - stop_gradient(s_k)) / N

    for N tokens of the step. The sum over k is f(m), and its gradient is that of f(m), exactly.

    Args:
      value: `f32[]`, f(m); with a leading K, as all arrays, until `accumulate_gradients` slices
        them.
      slopes: a pytree, f'(m) / N, in the shapes of the sums.
      micro_batches: K.

    Example:
      >>> from jaxppo.step.terms import StepTerm
      >>> xs = jnp.array([[1.0, 2.0], [3.0, 6.0]])               # two micro-batches of two tokens
      >>> def sums(w, x):
      ...     return {"first": (w * x).sum(), "second": (w * x**2).sum()}
      >>> def product(means):
      ...     return means["first"] * means["second"]
      >>> def step(w):
      ...     before = jax.lax.map(lambda x: sums(w, x), xs)      # [K] each
      ...     term = StepTerm.of(product, before, counts=jnp.array([2, 2]))
      ...     def loss_fn(w, part):
      ...         x, term = part
      ...         return term.of_part(sums(w, x)), {"product": term.metric}
      ...     return accumulate_gradients(loss_fn, (xs, term))(w)
      >>> (loss, metrics), gradient = step(jnp.float32(1))
      >>> float(loss), float(metrics["product"].value), float(gradient)  # 3 w * 12.5 w; a mean of products is 82.5 / 2
      (37.5, 37.5, 75.0)
    """

    value: Float[Array, ""]
    slopes: Any
    micro_batches: int

    @classmethod
    def of(
        cls, fn: Callable[[Any], Float[Array, ""]], sums: Any, counts: Num[Array, " K"]
    ) -> StepTerm:
        """The term of a step, to be put into `micro_batches` of `accumulate_gradients`, beside the
        batches.

        Args:
          fn: f, from a pytree of means to a scalar.
          sums: a pytree of floating-point arrays `[K, ...]`: for each micro-batch the sum over its
            tokens of all that f takes the mean of. Inside a `shard_map` they are sums over the data
            and context axes too.
          counts: `[K]`, the number of tokens that each micro-batch's sums are over.

        Returns:
          A term with a leading K. m is the sum of sums over the sum of counts, 0 where that is 0.
          It has no gradient.

        Raises:
          TypeError: no function, arrays of other dtypes, or a function that returns no scalar.
          ValueError: arrays without the common leading K; a call inside `accumulate_gradients`.
        """
        if not callable(fn):
            raise TypeError(f"fn: got {type(fn).__name__}, expected a function of the means")
        check_whole_step("StepTerm.of")
        check_array("counts", counts, kind=KINDS["micro_batches"])
        check(
            "counts",
            f"shape {counts.shape}",
            counts.ndim == 1 and counts.size > 0,
            "[K], the tokens of each part",
        )
        (count,) = counts.shape
        check(
            "sums",
            repr(sums),
            bool(jax.tree.leaves(sums)),
            "a pytree of arrays [K, ...], at least one",
        )
        for path, x in jax.tree.leaves_with_path(sums):
            what = f"sums{jax.tree_util.keystr(path)}"
            check_array(what, x, kind=KINDS["params"])
            check(
                what,
                f"shape {x.shape}",
                x.shape[:1] == (count,),
                f"a leading K of {count}, as counts have it",
            )
        total = jnp.sum(jnp.asarray(counts).astype(jnp.float32))

        def mean(x: Array) -> Array:
            return lax.stop_gradient(share(x.astype(jnp.float32).sum(axis=0), total))

        means = jax.tree.map(mean, sums)
        shape = getattr(jax.eval_shape(fn, means), "shape", None)
        if shape != ():
            raise TypeError(f"fn: got a result of shape {shape}, expected a scalar")
        value, slopes = jax.value_and_grad(fn)(means)

        def for_each(x: Array) -> Array:
            return jnp.broadcast_to(x, (count, *x.shape))

        slopes = jax.tree.map(lambda slope: for_each(share(slope, total)), slopes)
        return cls(for_each(value.astype(jnp.float32)), slopes, count)

    def of_part(self, sums: Any) -> Float[Array, ""]:
        """What one micro-batch adds to the loss, from its own sums: its share of the value, and all
        of its gradient.

        Raises:
          ValueError: sums of another structure or shape than those that the term was made of; a
            step of another K.
        """
        count = part_of_a_step.value
        check(
            "term",
            f"one of {self.micro_batches} micro-batches",
            count in (0, self.micro_batches),
            f"one of {count}",
        )
        check(
            "term",
            f"value of shape {self.value.shape}",
            self.value.ndim == 0,
            "that of one micro-batch, ()",
        )
        expected = str(jax.tree.structure(self.slopes))
        structure = str(jax.tree.structure(sums))
        check("sums", structure, structure == expected, f"those of the first pass, {expected}")
        total = self.value / self.micro_batches
        slopes = jax.tree.leaves(self.slopes)
        for (path, x), slope in zip(jax.tree.leaves_with_path(sums), slopes, strict=True):
            what = f"sums{jax.tree_util.keystr(path)}"
            check_array(what, x, slope.shape, "those of the first pass", KINDS["params"])
            x = x.astype(jnp.float32)
            total = total + jnp.sum(slope * (x - lax.stop_gradient(x)))
        return total

    @property
    def metric(self) -> Metric:
        """The value of the whole step, as each micro-batch reports it: merged over all of them
        it is the same.
        """
        return Metric(lax.stop_gradient(self.value), jnp.ones_like(self.value))
