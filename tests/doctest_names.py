"""A pytest plugin: what the examples in docstrings need not import, `jnp`, `np` and the public names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxppo
import sharding


@pytest.fixture(autouse=True)
def names(doctest_namespace):
    public = {name: getattr(module, name) for module in (sharding, jaxppo) for name in module.__all__}
    doctest_namespace |= public | {"jax": jax, "jnp": jnp, "np": np, "jaxppo": jaxppo, "sharding": sharding}
