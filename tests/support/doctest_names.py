"""A pytest plugin for examples: eight devices, and for docstrings names that they need not import."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxppo
from jaxppo import metrics, sharding
from tests.support import programs

programs.start_devices(8)


@pytest.fixture(autouse=True)
def names(request, doctest_namespace):
    """A page imports what it uses: its reader has nothing else."""
    if request.path.suffix == ".md":
        return
    both = {"advantages", "presets"}  # which share names, such as grpo
    modules = [x for name, x in vars(jaxppo).items() if inspect.ismodule(x) and name in {*jaxppo.__all__} - both]
    for module in (metrics, *modules, jaxppo):
        doctest_namespace |= {name: getattr(module, name) for name in module.__all__}
    doctest_namespace |= {"jax": jax, "jnp": jnp, "np": np, "jaxppo": jaxppo, "sharding": sharding}
