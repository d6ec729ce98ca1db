"""Constructors check their arguments when a user calls them, not each time that JAX unflattens a tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import Head, LoRA, TokenStats
from jaxppo.metrics import Metric

ONES = jnp.ones((8, 4))
OBJECTS = [
    Metric(jnp.array(6.0), jnp.array(2.0), "sum"),
    LoRA(ONES[:, :2], ONES[:2], scale=0.5),
    Head(ONES, lora=LoRA(ONES[:, :2], ONES[:2]), softcap=3.0, logits_dtype=jnp.bfloat16),
    TokenStats(ONES, ONES, entropy_mode="metric"),
]


@pytest.mark.parametrize("given", OBJECTS, ids=lambda x: type(x).__name__)
def test_a_tree_is_put_together_without_its_constructor(monkeypatch, given):
    cls, calls = type(given), []
    monkeypatch.setattr(cls, "__post_init__", lambda self: calls.append(self))
    found = jax.jit(lambda x: jax.tree.map(lambda leaf: 2 * leaf, x))(given)
    assert type(found) is cls
    assert calls == []
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(2 * x, y), given, found)  # static fields are the same too
    assert jax.tree.structure(given) == jax.tree.structure(found)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(given)]
    assert names[0] in (".total", ".a", ".kernel", ".log_probs")


def test_static_fields_tell_trees_apart():
    one, other = Metric(1.0, 1.0, "sum"), Metric(1.0, 1.0, "mean")
    assert jax.tree.structure(one) != jax.tree.structure(other)
    with pytest.raises(ValueError, match="reduce"):
        Metric(1.0, 1.0, "median")
