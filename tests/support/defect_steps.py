"""A packed batch with every value that a loss reads, its hidden states and a kernel, for the
tests of old defects.
"""

import jax.numpy as jnp
import numpy as np

from jaxppo import (
    RolloutBatch,
    Sample,
)
from sharding import make_parallel_mesh

H, V = 8, 24
RNG = np.random.default_rng(0)
MIXED = "dp=2,cp=2,tp=2"


def samples(count=8, **more):
    rng = np.random.default_rng(3)
    found = []
    for i in range(count):

        def near():
            return -1 - rng.random(6)

        values = {name: near() for name in ("old_log_probs", "ref_log_probs", "rollout_log_probs")}
        values |= {name: rng.normal(size=6) for name in ("advantages", "values", "returns")}
        ids = {"reward": float(i), "group_id": i // 2} | more
        tokens = rng.integers(0, V, 8)
        tokens[:2] = i // 2  # the prompt of the group
        found.append(Sample(tokens, response_start=2, **ids, **values))
    return found


BATCH = RolloutBatch.from_samples(
    samples(), row_length=8, rows=8, parallel=make_parallel_mesh(MIXED)
)
HIDDEN = jnp.asarray(RNG.normal(size=(8, 8, H)), jnp.float32)
KERNEL = jnp.asarray(RNG.normal(size=(H, V)), jnp.float32)
LOG_PROBS = jnp.asarray(-1 - RNG.random((8, 8)), jnp.float32)
