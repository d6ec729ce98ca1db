"""The sum of p^2, which optimal token baselines read, by every way to the statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import R, T, call_head, head_arrays
from oracle import OracleHead
from oracle.head import log_softmax, logits

from jaxppo import log_probs_from_logits
from sharding import make_parallel_mesh

V = 97


def from_logits(parallel, arrays, **_):
    hidden = jnp.where(arrays["where"][..., None], arrays["hidden"], 0)
    z = jnp.matmul(hidden, arrays["kernel"], precision="highest") + arrays["bias"][None, None]
    options = {"where": arrays["where"], "parallel": parallel, "logit_stats": True, "temperature": 0.7}
    return log_probs_from_logits(z, arrays["targets"], **options)


@pytest.mark.parametrize("mesh", [None, "dp=2,cp=2,tp=2", "tp=8"])
@pytest.mark.parametrize("way", ["xla", "reference", "logits"])
def test_the_sum_of_squared_probabilities(way, mesh):
    """In columns that tp does not divide; with -inf columns; 0 where nothing counts."""
    arrays = head_arrays(V, with_where=True, scale=2.0)
    arrays["bias"] = arrays["bias"].at[:40].set(-jnp.inf)
    targets = jnp.where(arrays["where"], jnp.maximum(arrays["targets"], 40), -100)
    arrays["targets"] = targets
    parallel = mesh and make_parallel_mesh(mesh)
    options = {"implementation": way, "logit_stats": True, "temperature": 0.7, "device": "five"}
    call = from_logits if way == "logits" else call_head
    found = jax.jit(lambda a: call(parallel, a, **options))(arrays).sum_p2
    here = np.asarray(arrays["where"])
    hidden = np.asarray(arrays["hidden"], np.float64)[here]
    z = logits(hidden, OracleHead(np.asarray(arrays["kernel"]), np.asarray(arrays["bias"])), 0.7)
    expected = np.zeros((R, T))
    expected[here] = (np.exp(log_softmax(z)) ** 2).sum(-1)
    np.testing.assert_allclose(found, expected, rtol=5e-6, atol=1e-7)
    assert 0.05 < expected[here].min() < 0.5
