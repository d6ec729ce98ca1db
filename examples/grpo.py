"""GRPO for a decoder of your own, on any mesh: docs/training_step.md explains it, step by step."""

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

import jaxppo
from jaxppo import Normalizer, PolicyLossConfig, RolloutBatch, Sample, advantages

VOCAB, WIDTH, HEADS, PLACES, PROMPT, LONGEST = 16, 64, 4, 32, 2, 8
PROMPTS, SAMPLES, UPDATES = 16, 8, 150
pack = partial(RolloutBatch.from_samples, row_length=16, rows=16, micro_batches=4, num_segments=5)
CONFIG = PolicyLossConfig(jaxppo.PPO(clip_high=0.28), kl=jaxppo.KL(0.001))
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-3))


class Decoder(nnx.Module):
    """Tokens to final hidden states, after the last norm; it never makes logits."""

    def __init__(self, mesh, rngs):
        def linear(n, m, *axes):
            init = nnx.initializers.lecun_normal()
            init = nnx.with_partitioning(init, axes, mesh=mesh.mesh)
            return nnx.Linear(n, m, use_bias=False, kernel_init=init, rngs=rngs)

        tensor = mesh.logits_spec[2]  # the axis that divides heads, MLP, vocabulary
        self.tokens = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(PLACES, WIDTH, rngs=rngs)
        self.norms = nnx.List([nnx.RMSNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.qkv = linear(WIDTH, 3 * WIDTH, None, tensor)
        self.out = linear(WIDTH, WIDTH, tensor, None)
        self.up = linear(WIDTH, 4 * WIDTH, None, tensor)
        self.down = linear(4 * WIDTH, WIDTH, tensor, None)
        self.head = linear(WIDTH, VOCAB, *mesh.kernel_spec("hv"))

    def __call__(self, tokens, positions, sees):
        x = self.tokens(tokens) + self.positions(positions)
        qkv = self.qkv(self.norms[0](x)).reshape(*tokens.shape, HEADS, -1)
        q, k, v = jnp.split(qkv, 3, -1)
        y = jax.nn.dot_product_attention(q, k, v, mask=sees[:, None])
        x = x + self.out(y.reshape(x.shape))
        return self.norms[2](x + self.down(nnx.gelu(self.up(self.norms[1](x)))))


def create(mesh):
    """The state of a run, one pytree: what a checkpoint holds."""
    model = Decoder(mesh, nnx.Rngs(0))
    copy = jax.tree.map(jnp.copy, model)
    return {"model": model, "reference": copy, "optimizer": OPTIMIZER.init(model)}


def hidden_and_head(model, batch):
    sees = batch.paths.attends(batch.paths)  # tokens of its own sample, none ahead
    return model(batch.tokens, batch.positions, sees), jaxppo.Head.of(model.head)


def score(mesh, model, batch):
    inputs = *hidden_and_head(model, batch), batch.targets
    return jaxppo.log_probs_from_hidden(*inputs, parallel=mesh)


def loss(mesh, model, part):
    batch, whole = part
    inputs = *hidden_and_head(model, batch), batch, CONFIG
    return jaxppo.policy_loss_from_hidden(*inputs, normalizer=whole, parallel=mesh)


def prepare(mesh, state, batches):
    """What the loss reads beside tokens, for the whole step, arrays [K, R, T]."""
    find = partial(jaxppo.compute_log_probs, partial(score, mesh))
    old, ref = (find(state[x], batches).log_probs for x in ("model", "reference"))
    by_sample = advantages.grpo(batches.rewards, **batches.groups, parallel=mesh)
    spread = advantages.spread(by_sample, batches, parallel=mesh)
    return replace(batches, advantages=spread, old_log_probs=old, ref_log_probs=ref)


def learn(mesh, state, batches):
    """One optimizer update on K micro-batches."""
    model, whole = state["model"], Normalizer.of(CONFIG, batches, parallel=mesh)
    step = jaxppo.accumulate_gradients(partial(loss, mesh), (batches, whole))
    (_, metrics), gradients = step(model)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], model)
    new = {"model": optax.apply_updates(model, updates), "optimizer": optimizer}
    return state | new, jaxppo.finalize_metrics(metrics)


def update(mesh, state, batches):
    return learn(mesh, state, prepare(mesh, state, batches))


@jax.jit
def generate(model, tokens, key):
    """Draws the tokens behind each prompt, without a cache: for toys."""
    positions = jnp.broadcast_to(jnp.arange(LONGEST), tokens.shape)
    sees = positions[:, :, None] >= positions[:, None, :]
    for i in range(PROMPT, LONGEST):
        logits = model.head(model(tokens, positions, sees)[:, i - 1])
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits)
        tokens = tokens.at[:, i].set(drawn)
    return tokens


def rollouts(mesh, model, step):
    """The samples of a step: s and n are to be answered by s+1, ..., s+n."""
    prompts = np.random.default_rng(step).integers(1, [10, 7], (PROMPTS, PROMPT))
    tokens = np.pad(prompts.repeat(SAMPLES, 0), ((0, 0), (0, LONGEST - PROMPT)))
    samples = []
    drawn = generate(model, tokens, jax.random.key(step))
    for i, row in enumerate(np.asarray(drawn)):
        end = PROMPT + row[1]
        reward = np.mean(row[PROMPT:end] == row[0] + np.arange(1, row[1] + 1))
        scored = {"reward": reward, "group_id": i // SAMPLES}
        samples.append(Sample(row[:end], PROMPT, **scored))
    return pack(samples, parallel=mesh).put(mesh)


def train(mesh, folder):
    """Yields the metrics of each update, from the newest checkpoint on."""
    abstract = jax.eval_shape(partial(create, mesh))
    placed = jax.tree.map(mesh.sharding, nnx.get_partition_spec(abstract))
    start = jax.jit(partial(create, mesh), out_shardings=placed)
    step = jax.jit(partial(update, mesh), out_shardings=(placed, None), donate_argnums=0)
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=10)
    with ocp.CheckpointManager(folder.absolute(), options=options) as manager:
        state, newest = start(), manager.latest_step()
        hidden = jax.jit(lambda model, batch: hidden_and_head(model, batch)[0])
        jaxppo.assert_packing_invariant(hidden, state["model"], vocab_size=VOCAB, parallel=mesh)
        if newest is not None:  # the arrays of the checkpoint, placed as those of `start`
            graph, arrays = nnx.split(state)
            arrays = manager.restore(newest, args=ocp.args.StandardRestore(arrays))
            state = nnx.merge(graph, arrays)
        for i in range(0 if newest is None else newest + 1, UPDATES):
            batches = rollouts(mesh, state["model"], i)
            reward = np.mean(batches.rewards, where=batches.sample_ids >= 0)
            state, metrics = step(state, batches)
            manager.save(i, args=ocp.args.StandardSave(nnx.state(state)))
            yield {"step": i, "reward": float(reward)} | jax.tree.map(float, metrics)


# JAX_NUM_CPU_DEVICES=8 python -m examples.grpo dp=2,cp=2,tp=2 runs/counting
if __name__ == "__main__":
    mesh, folder = jaxppo.make_parallel_mesh(sys.argv[1]), Path(sys.argv[2])
    for metrics in train(mesh, folder):
        with (folder / "metrics.jsonl").open("a") as file:
            print(json.dumps(metrics), file=file)
        print(*(f"{x} {metrics[x]:.3g}" for x in ("step", "reward", "loss", "kl")))
