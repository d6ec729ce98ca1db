"""A policy in Flax NNX: FSDP parameters, bf16 activations over f32 masters, tied or untied head,
nnx.Optimizer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from examples.flax_linen import VOCAB, WIDTH, rollouts
from jaxppo import (
    PPO,
    Head,
    ParallelMesh,
    PolicyLossConfig,
    RolloutBatch,
    finalize_metrics,
    policy_loss_from_hidden,
)

CONFIG = PolicyLossConfig(PPO(clip_high=0.28))


class Policy(nnx.Module):
    """A model of one block, up to its final hidden states; it never makes the logits."""

    def __init__(self, parallel: ParallelMesh, *, tied: bool, rngs: nnx.Rngs):
        def kernel(layout: str) -> nnx.Initializer:
            spec = parallel.kernel_spec(layout)
            return nnx.with_partitioning(
                nnx.initializers.normal(0.05), tuple(spec), mesh=parallel.mesh
            )

        bf16: dict[str, Any] = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.activations = parallel.hidden_spec if parallel.is_explicit else None
        self.inner = P(*parallel.logits_spec) if parallel.is_explicit else None
        self.tokens = nnx.Embed(VOCAB, WIDTH, embedding_init=kernel("vh"), **bf16)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, use_bias=False, kernel_init=kernel("hv"), **bf16)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, use_bias=False, kernel_init=kernel("vh"), **bf16)
        self.norm = nnx.RMSNorm(WIDTH, **bf16)
        self.head = nnx.data(None)
        if not tied:
            self.head = nnx.Linear(WIDTH, VOCAB, use_bias=False, kernel_init=kernel("hv"), **bf16)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens, out_sharding=self.activations)
        y = nnx.gelu(self.up(x, out_sharding=self.inner))
        return self.norm(x + self.down(y, out_sharding=self.activations))


@nnx.jit(static_argnums=3)
def step(
    model: Policy, optimizer: nnx.Optimizer, batch: RolloutBatch, parallel: ParallelMesh
) -> dict[str, jax.Array]:
    """One update.

    The batch is an argument: a batch that is closed over would be compiled into the program.
    """

    def loss_fn(model: Policy) -> Any:
        head = Head.of(model.tokens if model.head is None else model.head)
        return policy_loss_from_hidden(model(batch.tokens), head, batch, CONFIG, parallel=parallel)

    (_, found), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model)
    optimizer.update(model, gradients)
    return finalize_metrics(found)


def train(
    parallel: ParallelMesh, *, tied: bool = False, steps: int = 10
) -> tuple[Policy, list[float]]:
    """The trained model, and the loss before each update."""
    with jax.set_mesh(parallel.mesh):
        # Flax's default, but importing Tunix 0.1.7 turns it off for all
        with nnx.use_eager_sharding(True):
            model = Policy(parallel, tied=tied, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        losses = [
            float(step(model, optimizer, rollouts(i, parallel), parallel)["loss"])
            for i in range(steps)
        ]
    return model, losses
