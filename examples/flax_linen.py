"""A policy in Flax Linen: FSDP parameters, bf16 activations over f32 masters, tied or untied head,
TrainState.

python -m examples.flax_linen --mesh fsdp=4,tp=2 --tied        (Linen's boxes know Auto axes only)
"""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

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


class Policy(nn.Module):
    """A model of one block.

    It returns the final hidden states and the head's parameters, never the logits.
    """

    parallel: ParallelMesh
    tied: bool

    def kernel(self, layout: str) -> Any:
        spec = self.parallel.kernel_spec(layout)
        return nn.with_partitioning(
            nn.initializers.normal(0.05), tuple(spec), mesh=self.parallel.mesh
        )

    def setup(self) -> None:
        bf16, dense = jnp.bfloat16, partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
        self.tokens = nn.Embed(VOCAB, WIDTH, dtype=bf16, embedding_init=self.kernel("vh"))
        self.up, self.down = (
            dense(4 * WIDTH, kernel_init=self.kernel("hv")),
            dense(WIDTH, kernel_init=self.kernel("vh")),
        )
        self.norm = nn.RMSNorm(dtype=bf16)
        if not self.tied:
            self.head = dense(VOCAB, kernel_init=self.kernel("hv"))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens)
        return self.norm(x + self.down(nn.gelu(self.up(x))))

    def logits(self, tokens: jax.Array) -> jax.Array:
        """Called by `init` alone, which makes the parameters of the layers that run."""
        return self.tokens.attend(self(tokens)) if self.tied else self.head(self(tokens))


@partial(jax.jit, static_argnums=(2, 3), donate_argnums=0)
def step(
    state: TrainState, batch: RolloutBatch, parallel: ParallelMesh, tied: bool
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update.

    The batch is an argument: a batch that is closed over would be compiled into the program.
    """

    def loss_fn(params: Any) -> Any:
        hidden = state.apply_fn({"params": params}, batch.tokens)
        # arrays alone do not tell the dtype of the product
        head = Head.of(params["tokens" if tied else "head"], dtype=hidden.dtype)
        return policy_loss_from_hidden(hidden, head, batch, CONFIG, parallel=parallel)

    (_, found), gradients = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=gradients), finalize_metrics(found)


def train(
    parallel: ParallelMesh, *, tied: bool = False, steps: int = 10
) -> tuple[TrainState, list[float]]:
    """The trained state, and the loss before each update."""
    model = Policy(parallel, tied)

    def create(key: jax.Array) -> TrainState:
        params = model.init(key, jnp.zeros((parallel.data_size, 8), int), method="logits")["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    shardings = nn.get_sharding(jax.eval_shape(create, jax.random.key(0)), parallel.mesh)
    state = jax.jit(create, out_shardings=shardings)(jax.random.key(0))
    losses = []
    for i in range(steps):
        state, found = step(state, rollouts(i, parallel), parallel, tied)
        losses.append(float(found["loss"]))
    return state, losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", default="fsdp=4,tp=2")
    parser.add_argument("--tied", action="store_true")
    args = parser.parse_args()
    emulate_devices(8)
    print(*train(make_parallel_mesh(args.mesh), tied=args.tied)[1], sep="\n")
