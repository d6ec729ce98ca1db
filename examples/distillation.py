"""On-policy distillation for the decoder of examples/grpo.py, on any mesh: docs/distillation.md explains it."""

import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxppo
from examples.grpo import Decoder, hidden_and_head, rollouts
from jaxppo import PPO, Normalizer, PolicyLossConfig, advantages

CONFIG = PolicyLossConfig(PPO(clip_high=0.28))
OPTIMIZER = optax.adam(1e-3)
UPDATES = 60


def update(mesh, state, batches):
    """One optimizer update on the student's own samples, K micro-batches."""

    def score(model, batch):
        inputs = *hidden_and_head(model, batch), batch.targets
        return jaxppo.log_probs_from_hidden(*inputs, parallel=mesh)

    def loss(student, part):
        batch, whole = part
        inputs = *hidden_and_head(student, batch), batch, CONFIG
        options = {"normalizer": whole, "parallel": mesh}
        return jaxppo.policy_loss_from_hidden(*inputs, **options)

    student, optimizer = state["student"], state["optimizer"]
    old = jaxppo.compute_log_probs(score, student, batches).log_probs
    teacher = jaxppo.compute_log_probs(score, state["teacher"], batches).log_probs
    none, mask = jnp.zeros_like(old), batches.loss_mask
    pull = advantages.on_policy_distillation(none, old, teacher, mask)
    batches = replace(batches, old_log_probs=old, advantages=pull)
    whole = Normalizer.of(CONFIG, batches, parallel=mesh)
    step = jaxppo.accumulate_gradients(loss, (batches, whole))
    (_, metrics), gradients = step(student)
    updates, optimizer = OPTIMIZER.update(gradients, optimizer, student)
    student = optax.apply_updates(student, updates)
    state |= {"student": student, "optimizer": optimizer}
    reverse_kl = jnp.sum(mask * (old - teacher)) / jnp.sum(mask)
    return state, jaxppo.finalize_metrics(metrics) | {"reverse_kl": reverse_kl}


def create(mesh):
    """A student, and a teacher of the same tokens: here a random one, surer of itself."""
    student, teacher = (Decoder(mesh, nnx.Rngs(seed)) for seed in (0, 1))
    teacher.head.kernel[...] *= 3
    return {"student": student, "teacher": teacher, "optimizer": OPTIMIZER.init(student)}


def train(mesh, updates=UPDATES):
    """Yields the metrics of each update."""
    abstract = jax.eval_shape(partial(create, mesh))
    placed = jax.tree.map(mesh.sharding, nnx.get_partition_spec(abstract))
    state = jax.jit(partial(create, mesh), out_shardings=placed)()
    step = jax.jit(partial(update, mesh), out_shardings=(placed, None), donate_argnums=0)
    for i in range(updates):
        state, metrics = step(state, rollouts(mesh, state["student"], i))
        yield jax.tree.map(float, metrics)


# JAX_NUM_CPU_DEVICES=8 python -m examples.distillation dp=2,cp=2,tp=2
if __name__ == "__main__":
    for i, metrics in enumerate(train(jaxppo.make_parallel_mesh(sys.argv[1]))):
        print(i, *(f"{x} {metrics[x]:.3f}" for x in ("reverse_kl", "entropy")))
