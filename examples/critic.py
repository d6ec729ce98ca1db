"""PPO with a critic for the decoder of examples/grpo.py, on any mesh: docs/critic.md explains
it.
"""

import sys
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import optax
from flax import nnx
from jax import lax

import jaxppo
from examples.grpo import WIDTH, Decoder, hidden_and_head, rollouts
from jaxppo import PPO, Normalizer, PolicyLossConfig, Value, advantages

CONFIG, VALUE = PolicyLossConfig(PPO()), Value()
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
UPDATES = 100


class Critic(nnx.Module):
    """A decoder of its own, and at each position what the response will earn."""

    def __init__(self, mesh, rngs):
        self.decoder = Decoder(mesh, rngs)
        zeros = nnx.initializers.zeros
        self.score = nnx.Linear(WIDTH, 1, kernel_init=zeros, rngs=rngs)

    def __call__(self, batch):
        return self.score(hidden_and_head(self.decoder, batch)[0])[..., 0]


def update(mesh, state, batches):
    """One optimizer update of policy and critic, on K micro-batches."""

    def score(model, batch):
        inputs = *hidden_and_head(model, batch), batch.targets
        return jaxppo.log_probs_from_hidden(*inputs, parallel=mesh)

    def loss(models, part):
        batch, whole = part
        options = {"normalizer": whole, "parallel": mesh}
        inputs = *hidden_and_head(models["policy"], batch), batch, CONFIG
        policy_loss, metrics = jaxppo.policy_loss_from_hidden(*inputs, **options)
        values = models["critic"](batch)
        value_loss, found = jaxppo.loss_from_stats(values, batch, VALUE, **options)
        metrics |= {f"critic_{name}": metric for name, metric in found.items()}
        return policy_loss + value_loss, metrics

    models = state["models"]
    old = jaxppo.compute_log_probs(score, models["policy"], batches).log_probs
    values = lax.map(models["critic"], batches)  # [K, R, T], before the update
    rewards = advantages.token_rewards(batches.rewards, batches, parallel=mesh)
    options = {"lam": 0.95, "parallel": mesh}
    gains, returns = advantages.gae(rewards, values, batches, **options)
    gains = advantages.whiten(gains, batches.loss_mask, parallel=mesh)
    fields = {"old_log_probs": old, "advantages": gains}
    batches = replace(batches, **fields, values=values, returns=returns)
    whole = Normalizer.of(CONFIG, batches, parallel=mesh)
    step = jaxppo.accumulate_gradients(loss, (batches, whole))
    (_, metrics), gradients = step(models)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], models)
    state = {"models": optax.apply_updates(models, updates), "optimizer": optimizer}
    metrics = jaxppo.finalize_metrics(metrics)
    mask = batches.loss_mask
    explained = advantages.explained_variance(values, returns, mask, parallel=mesh)
    return state, metrics | {"explained_variance": explained}


def create(mesh):
    models = {"policy": Decoder(mesh, nnx.Rngs(0)), "critic": Critic(mesh, nnx.Rngs(1))}
    return {"models": models, "optimizer": OPTIMIZER.init(models)}


def train(mesh, updates=UPDATES):
    """Yields the metrics of each update."""
    abstract = jax.eval_shape(partial(create, mesh))
    placed = jax.tree.map(mesh.sharding, nnx.get_partition_spec(abstract))
    state = jax.jit(partial(create, mesh), out_shardings=placed)()
    step = jax.jit(partial(update, mesh), out_shardings=(placed, None), donate_argnums=0)
    for i in range(updates):
        batches = rollouts(mesh, state["models"]["policy"], i)
        reward = np.mean(batches.rewards, where=batches.sample_ids >= 0)
        state, metrics = step(state, batches)
        yield {"reward": float(reward)} | jax.tree.map(float, metrics)


# JAX_NUM_CPU_DEVICES=8 python -m examples.critic dp=2,cp=2,tp=2
if __name__ == "__main__":
    for i, metrics in enumerate(train(jaxppo.make_parallel_mesh(sys.argv[1]))):
        print(i, *(f"{x} {metrics[x]:.3f}" for x in ("reward", "explained_variance")))
