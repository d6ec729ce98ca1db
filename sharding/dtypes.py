"""The common dtype of arrays of several dtypes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import DTypeLike


def wider_dtype(*given: ArrayLike | DTypeLike) -> np.dtype:
    """JAX's common dtype of arrays, Python numbers or dtypes.

    Under `jax_numpy_dtype_promotion="strict"`, `jnp.result_type` raises for floats of two widths;
    this does not.

    Example:
      >>> wider_dtype(jnp.bfloat16, jnp.float16)
      dtype('float32')
    """
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*given)
