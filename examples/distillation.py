"""On-policy distillation for the decoder of examples/grpo.py, on any mesh: docs/distillation.md
explains it.
"""

import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxppo
from examples.grpo import Decoder, hidden_and_head, rollouts
from jaxppo import PPO, SFT, Normalizer, PolicyLossConfig, advantages
from jaxppo.losses.distillation import distillation_loss

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


def update_whole(mesh, state, batches):
    """The same, by whole distributions in place of sampled tokens."""

    def loss(student, part):
        batch, whole = part
        ours = hidden_and_head(student, batch)
        inputs = *ours, *hidden_and_head(state["teacher"], batch), batch
        options = {"normalizer": whole, "parallel": mesh}
        return distillation_loss(*inputs, **options)

    student, optimizer = state["student"], state["optimizer"]
    whole = Normalizer.of(SFT(), batches, parallel=mesh)
    step = jaxppo.accumulate_gradients(loss, (batches, whole))
    (_, metrics), gradients = step(student)
    updates, optimizer = OPTIMIZER.update(gradients, optimizer, student)
    student = optax.apply_updates(student, updates)
    state |= {"student": student, "optimizer": optimizer}
    return state, jaxppo.finalize_metrics(metrics)


def create(mesh):
    """A student, and a teacher of the same tokens: here a random one, surer of itself."""
    student, teacher = (Decoder(mesh, nnx.Rngs(seed)) for seed in (0, 1))
    teacher.head.kernel[...] *= 3
    return {"student": student, "teacher": teacher, "optimizer": OPTIMIZER.init(student)}


def train(mesh, updates=UPDATES, update=update):
    """Yields the metrics of each update, or `update_whole`."""
    abstract = jax.eval_shape(partial(create, mesh))
    placed = jax.tree.map(mesh.sharding, nnx.get_partition_spec(abstract))
    state = jax.jit(partial(create, mesh), out_shardings=placed)()
    step = jax.jit(partial(update, mesh), out_shardings=(placed, None), donate_argnums=0)
    for i in range(updates):
        state, metrics = step(state, rollouts(mesh, state["student"], i))
        yield jax.tree.map(float, metrics)


# JAX_NUM_CPU_DEVICES=8 python -m examples.distillation dp=2,cp=2,tp=2 [whole]
if __name__ == "__main__":
    how = update_whole if "whole" in sys.argv[2:] else update
    for i, metrics in enumerate(train(jaxppo.make_parallel_mesh(sys.argv[1]), update=how)):
        print(
            i,
            *(
                f"{name} {x:.3f}"
                for name, x in metrics.items()
                if name in ("reverse_kl", "divergence")
            ),
        )
