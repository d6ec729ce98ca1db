"""A pytest plugin for examples: eight devices, and for docstrings names that they need not
import.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxppo
from jaxppo import mismatch, policy_losses, sharding
from jaxppo.base import kl, metrics
from jaxppo.batch import nucleus
from jaxppo.losses import covariance
from jaxppo.step import staleness
from tests.support import programs

programs.start_devices(8)


@pytest.fixture(autouse=True)
def names(request, doctest_namespace):
    """A page imports what it uses: its reader has nothing else. CONTRIBUTING shows a docstring.

    The dict is one for all tests of a process.
    """
    doctest_namespace.clear()
    if request.path.suffix == ".md" and request.path.stem != "CONTRIBUTING":
        return
    for module in (
        covariance,
        kl,
        metrics,
        mismatch,
        nucleus,
        policy_losses,
        sharding,
        staleness,
        jaxppo,
    ):
        doctest_namespace |= {name: getattr(module, name) for name in module.__all__}
    doctest_namespace |= {"jax": jax, "jnp": jnp, "np": np, "jaxppo": jaxppo, "sharding": sharding}
