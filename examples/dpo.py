"""DPO for the decoder of examples/grpo.py, on any mesh: docs/dpo.md explains it."""

import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import optax
from flax import nnx

import jaxppo
from examples.grpo import Decoder, hidden_and_head
from jaxppo import Normalizer
from jaxppo.losses import preference

LOSS = preference.DPO(beta=0.1)
OPTIMIZER = optax.adam(1e-3)
PAIRS, UPDATES = 32, 60
SIZES = {"row_length": 32, "rows": 8, "num_segments": 8}


def pairs(mesh, step):
    """To count up is better than to count down: pairs, in two micro-batches."""
    rng = np.random.default_rng(step)
    prompts = np.stack([rng.integers(6, 10, PAIRS), rng.integers(1, 7, PAIRS)], 1)
    up = [first + np.arange(1, count + 1) for first, count in prompts]
    down = [first - np.arange(1, count + 1) for first, count in prompts]
    samples = preference.samples_of_pairs(prompts.tolist(), up, rejected=down)
    batches = preference.micro_batches_of_pairs(samples, 2, **SIZES, parallel=mesh)
    return batches.put(mesh)


def update(mesh, state, batches):
    """One optimizer update on K micro-batches of whole pairs."""

    def score(model, batch):
        inputs = *hidden_and_head(model, batch), batch.targets
        return jaxppo.log_probs_from_hidden(*inputs, parallel=mesh)

    def loss(model, part):
        batch, whole = part
        inputs = *hidden_and_head(model, batch), batch, LOSS
        options = {"normalizer": whole, "parallel": mesh}
        return jaxppo.loss_from_hidden(*inputs, **options)

    model, reference = state["model"], state["reference"]
    of_reference = jaxppo.compute_log_probs(score, reference, batches)
    batches = replace(batches, ref_log_probs=of_reference.log_probs)
    whole = Normalizer.of(LOSS, batches, parallel=mesh)
    step = jaxppo.accumulate_gradients(loss, (batches, whole))
    (_, metrics), gradients = step(model)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], model)
    state |= {"model": optax.apply_updates(model, updates), "optimizer": optimizer}
    return state, jaxppo.finalize_metrics(metrics)


def create(mesh):
    model, reference = (Decoder(mesh, nnx.Rngs(0)) for _ in range(2))
    return {"model": model, "reference": reference, "optimizer": OPTIMIZER.init(model)}


def train(mesh, updates=UPDATES):
    """Yields the metrics of each update."""
    abstract = jax.eval_shape(partial(create, mesh))
    placed = jax.tree.map(mesh.sharding, nnx.get_partition_spec(abstract))
    state = jax.jit(partial(create, mesh), out_shardings=placed)()
    step = jax.jit(partial(update, mesh), out_shardings=(placed, None), donate_argnums=0)
    for i in range(updates):
        state, metrics = step(state, pairs(mesh, i))
        yield jax.tree.map(float, metrics)


# JAX_NUM_CPU_DEVICES=8 python -m examples.dpo dp=2,cp=2,tp=2
if __name__ == "__main__":
    for i, metrics in enumerate(train(jaxppo.make_parallel_mesh(sys.argv[1]))):
        print(i, *(f"{x} {metrics[x]:.3f}" for x in ("loss", "accuracy", "reward_margin")))
