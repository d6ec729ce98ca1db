"""Cotangents in the type of their primals."""

from __future__ import annotations

import jax
from jax import lax

from sharding import vary, varying


def as_primal(cotangent: jax.Array, primal: jax.Array) -> jax.Array:
    """A cotangent in its primal's dtype and varying axes, summed as it is over the axes that the primal lacks."""
    extra = tuple(sorted(varying(cotangent) - varying(primal)))
    cotangent = lax.psum(cotangent, extra) if extra else cotangent
    return vary(cotangent.astype(primal.dtype), varying(primal))
