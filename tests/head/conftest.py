"""What several files of tests of the head use."""

import jax
import jax.numpy as jnp
import pytest


@pytest.fixture(scope="module")
def nothing_is_read_that_was_not_written():
    """Fills arrays that start uninitialised on accelerators with NaN; on CPUs they would be zeros."""
    with pytest.MonkeyPatch.context() as patch:
        jax.clear_caches()
        patch.setattr(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
        yield
    jax.clear_caches()
