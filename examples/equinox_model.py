"""A policy in Equinox: FSDP parameters, bf16 activations over f32 masters, tied or untied head,
optax.

python -m examples.equinox_model --mesh fsdp=4,tp=2 --tied --explicit        (needs equinox)
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxppo import (
    PPO,
    Head,
    ParallelMesh,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    finalize_metrics,
    make_parallel_mesh,
    policy_loss_from_hidden,
)
from jaxppo.sharding.testing import emulate_devices

VOCAB, WIDTH = 128, 32
CONFIG = PolicyLossConfig(PPO(clip_high=0.28))


def rollouts(seed: int, parallel: ParallelMesh | None) -> RolloutBatch:
    """16 samples, whose lengths depend on the seed, in rows whose number and length never
    change.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(16):
        length = 2 * int(rng.integers(2, 7))
        # even and odd tokens in turns
        tokens = 2 * rng.integers(0, 8, 3 + length) + np.arange(3 + length) % 2
        response = tokens[3:]
        samples.append(
            Sample(
                tokens,
                response_start=3,
                group_id=group,
                advantages=np.where(response % 2 == 0, 1.0, -1.0),
                old_log_probs=np.full(len(response), -math.log(VOCAB)),
            )
        )
    batch = RolloutBatch.from_samples(
        samples, row_length=32, rows=16, num_segments=4, parallel=parallel
    )
    return batch if parallel is None else batch.put(parallel)


class Policy(eqx.Module):
    """A model of one block, up to its final hidden states; it never makes the logits."""

    tokens: eqx.nn.Embedding
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear | None

    def __init__(self, *, tied: bool, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.tokens = eqx.nn.Embedding(weight=0.05 * jax.random.normal(keys[0], (VOCAB, WIDTH)))
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, use_bias=False, key=keys[1])
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, use_bias=False, key=keys[2])
        self.norm = eqx.nn.RMSNorm(WIDTH)
        self.head = None if tied else eqx.nn.Linear(WIDTH, VOCAB, key=keys[3])

    def __call__(self, token: jax.Array) -> jax.Array:
        x = self.tokens(token)
        return self.norm(x + self.down(jax.nn.gelu(self.up(x))))


def shardings_of(tree: Any, parallel: ParallelMesh) -> Any:
    """Weights `[out, in]`, and their moments, over the mesh as a head's kernel; vectors on each
    device.
    """

    def sharding(x):
        return parallel.sharding(parallel.kernel_spec("vh") if x.ndim == 2 else P())

    return jax.tree.map(sharding, tree)


def hidden_states(model: Policy, tokens: jax.Array, parallel: ParallelMesh) -> jax.Array:
    """`bf16[R, T, H]`. Equinox's layers know no Explicit axes; within `auto_axes` they need not."""
    model = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)

    def run(model, tokens):
        return jax.vmap(jax.vmap(model))(tokens)

    if parallel.is_explicit:
        run = jax.sharding.auto_axes(run, out_sharding=parallel.sharding(parallel.hidden_spec))
    return run(model, tokens)


@eqx.filter_jit(donate="all-except-first")
def step(
    batch: RolloutBatch,
    model: Policy,
    optimizer: Any,
    tx: optax.GradientTransformation,
    parallel: ParallelMesh,
) -> tuple[Policy, Any, dict[str, jax.Array]]:
    """One update.

    The batch is an argument: a batch that is closed over would be compiled into the program.
    """

    def loss_fn(model: Policy) -> Any:
        hidden = hidden_states(model, batch.tokens, parallel)
        head = Head.of(model.tokens if model.head is None else model.head, dtype=hidden.dtype)
        return policy_loss_from_hidden(hidden, head, batch, CONFIG, parallel=parallel)

    (_, found), gradients = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model)
    updates, optimizer = tx.update(gradients, optimizer, model)
    # as they came: else vectors would be spread over the mesh, and the next step compiled again
    state = eqx.apply_updates(model, updates), optimizer
    model, optimizer = jax.lax.with_sharding_constraint(state, shardings_of(state, parallel))
    return model, optimizer, finalize_metrics(found)


def train(
    parallel: ParallelMesh, *, tied: bool = False, steps: int = 10
) -> tuple[Policy, list[float]]:
    """The trained model, and the loss before each update."""
    tx = optax.adam(1e-2)
    with jax.set_mesh(parallel.mesh):
        model = Policy(tied=tied, key=jax.random.key(0))
        model = jax.device_put(model, shardings_of(model, parallel))
        optimizer = tx.init(eqx.filter(model, eqx.is_array))
        losses = []
        for i in range(steps):
            model, optimizer, found = step(rollouts(i, parallel), model, optimizer, tx, parallel)
            losses.append(float(found["loss"]))
    return model, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="fsdp=4,tp=2")
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--explicit", action="store_true")
    args = parser.parse_args()
    emulate_devices(8)
    print(
        *train(make_parallel_mesh(args.mesh, explicit=args.explicit), tied=args.tied)[1], sep="\n"
    )
