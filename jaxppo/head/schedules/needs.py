"""Which gradients a call is asked for, and what a forward leaves to the backward that computes them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxppo.head.ops.tile import Features, Parameters
from jaxppo.head.schedules.walk import Inputs


class NeedsGrad(NamedTuple):
    """Which gradients are asked for, as fields that are True, not None; the others leave nothing in the program."""

    features: Features
    parameters: Parameters

    def of(self, like: Any, tree: Any) -> Any:
        """The fields of a `Features` or `Parameters` whose gradient is asked for, None for the others."""
        return type(tree)(*(x if needed else None for needed, x in zip(like, tree, strict=True)))


def values_and_needs(inputs: Inputs) -> tuple[Inputs, NeedsGrad]:
    """What a rule's forward with `symbolic_zeros` gets: the arrays, and which gradients will be asked for."""
    is_primal = lambda x: hasattr(x, "perturbed")  # noqa: E731
    needed = jax.tree.map(lambda x: x.perturbed or None, inputs, is_leaf=is_primal)
    inputs = jax.tree.map(lambda x: x.value, inputs, is_leaf=is_primal)
    return inputs, NeedsGrad(needed.features, needed.parameters)


# Where a forward saves None or True it leaves an array with no element and of such a shape.
_NONE, _TRUE = (0,) * 6, (0,) * 7


def to_save(tree: Any) -> Any:
    """What a forward leaves to its backward, in the same structure whichever gradients are asked for.

    A function under `jit` is traced once, and the forward of a rule in it once for each set of gradients that is asked
    for. But JAX gives every backward the structure of what the last of these forwards saved.
    """
    mark = lambda x: jnp.zeros(_NONE) if x is None else jnp.zeros(_TRUE) if x is True else x  # noqa: E731
    return jax.tree.map(mark, tree, is_leaf=lambda x: x is None)


def saved(tree: Any) -> Any:
    """What was given to `to_save`."""
    return jax.tree.map(lambda x: {_NONE: None, _TRUE: True}.get(x.shape, x), tree)
