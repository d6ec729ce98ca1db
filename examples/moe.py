"""GRPO for a mixture of experts on any mesh, with replay of what the sampler's router chose, see
docs/batches.md.
"""

import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax

import jaxppo
from examples.grpo import HEADS, LONGEST, PROMPT, PROMPTS, SAMPLES, WIDTH, Decoder, pack
from jaxppo import PPO, Normalizer, PolicyLossConfig, Sample, advantages
from jaxppo.base.metrics import collapse_metrics
from jaxppo.mismatch.routing import routed_experts, routing_metrics
from jaxppo.step.terms import StepTerm

EXPERTS, TOP_K, BALANCE, UPDATES = 8, 2, 0.01, 150
CONFIG = PolicyLossConfig(PPO(clip_high=0.28))
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-3))


class Mixture(Decoder):
    """The decoder whose MLP is a mixture of experts: each is a part of the MLP's columns, and
    has a weight.
    """

    def __init__(self, mesh, rngs):
        super().__init__(mesh, rngs)
        self.router = nnx.Linear(WIDTH, EXPERTS, use_bias=False, rngs=rngs)

    def __call__(self, tokens, positions, sees, replayed=None, *, rounded=False):
        """Final hidden states, the router's own choices `[R, T, layers, k]`, and its scores
        `[R, T, experts]`.
        """
        x = self.tokens(tokens) + self.positions(positions)
        qkv = self.qkv(self.norms[0](x)).reshape(*tokens.shape, HEADS, -1)
        y = jax.nn.dot_product_attention(*jnp.split(qkv, 3, -1), mask=sees[:, None])
        x = x + self.out(y.reshape(x.shape))
        y = self.norms[1](x)
        scores = jax.nn.softmax(self.router(y))
        # as float8_e4m3 rounds; a cast goes through float16, which XLA does not compile for every
        # processor
        seen = lax.reduce_precision(scores, exponent_bits=4, mantissa_bits=3) if rounded else scores
        own = lax.top_k(seen, TOP_K)[1]
        # the ids are replayed; weights are today's scores of them, so that the router has a
        # gradient
        ids = own if replayed is None else jnp.where(replayed[:, :, 0] < 0, own, replayed[:, :, 0])
        weights = scores * jax.nn.one_hot(ids, EXPERTS).sum(-2)
        weights /= weights.sum(-1, keepdims=True)
        y = nnx.gelu(self.up(y)).reshape(*tokens.shape, EXPERTS, -1) * weights[..., None]
        return self.norms[2](x + self.down(y.reshape(*tokens.shape, -1))), own[:, :, None], scores


def forward(model, batch, *, replay=True):
    sees = batch.paths.attends(batch.paths)
    replayed = batch.extras["routed_experts"] if replay else None
    return model(batch.tokens, batch.positions, sees, replayed)


def sums(own, scores, batch):
    """What `balance` takes the means of, summed over the tokens of a micro-batch: uses and
    scores, `[experts]` each.
    """
    read = (batch.segment_ids > 0)[..., None]
    chosen = jax.nn.one_hot(own[:, :, 0], EXPERTS).mean(-2)
    return {"used": jnp.sum(chosen * read, (0, 1)), "score": jnp.sum(scores * read, (0, 1))}


def balance(means):
    """1 where experts are used evenly, more where not (Fedus et al. 2021,
    https://arxiv.org/abs/2101.03961).
    """
    return EXPERTS * jnp.sum(means["used"] * means["score"])


def update(mesh, state, batches):
    """One optimizer update on K micro-batches, and how far the sampler is with replay and
    without.
    """

    def log_probs(hidden, batch):
        head = jaxppo.Head.of(model.head)
        return jaxppo.log_probs_from_hidden(hidden, head, batch.targets, parallel=mesh).log_probs

    def before(batch):
        """All that the step needs to know of a micro-batch before its first gradient."""
        hidden, own, scores = forward(model, batch)
        old = log_probs(hidden, batch)
        alone, chosen, _ = forward(model, batch, replay=False)
        gaps = {"log_probs": log_probs(alone, batch), "replayed_log_probs": old}
        return old, sums(own, scores, batch), routing_metrics(chosen, batch, **gaps, parallel=mesh)

    def loss(model, part):
        batch, whole, balanced = part
        hidden, own, scores = forward(model, batch)
        inputs = hidden, jaxppo.Head.of(model.head), batch, CONFIG
        policy_loss, metrics = jaxppo.policy_loss_from_hidden(
            *inputs, normalizer=whole, parallel=mesh
        )
        metrics |= {"balance": balanced.metric}
        return policy_loss + BALANCE * balanced.of_part(sums(own, scores, batch)), metrics

    model = state["model"]
    by_sample = advantages.grpo(batches.rewards, **batches.groups, parallel=mesh)
    spread = advantages.spread(by_sample, batches, parallel=mesh)
    old, uses, routing = lax.map(before, batches)
    batches = replace(batches, advantages=spread, old_log_probs=old)
    whole = Normalizer.of(CONFIG, batches, parallel=mesh)
    balanced = StepTerm.of(balance, uses, (batches.segment_ids > 0).sum((1, 2)))
    step = jaxppo.accumulate_gradients(loss, (batches, whole, balanced))
    (_, metrics), gradients = step(model)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], model)
    state = {"model": optax.apply_updates(model, updates), "optimizer": optimizer}
    return state, jaxppo.finalize_metrics(metrics | collapse_metrics(routing))


@jax.jit
def generate(model, tokens, key):
    """The tokens behind each prompt, their log-probs, and the experts of each token: the router
    has 8 bits here.
    """
    positions = jnp.broadcast_to(jnp.arange(LONGEST), tokens.shape)
    sees = positions[:, :, None] >= positions[:, None, :]
    for i in range(PROMPT, LONGEST):
        logits = model.head(model(tokens, positions, sees, rounded=True)[0][:, i - 1])
        drawn = jax.random.categorical(jax.random.fold_in(key, i), logits)
        tokens = tokens.at[:, i].set(drawn)
    hidden, own, _ = model(tokens, positions, sees, rounded=True)
    of_all = jax.nn.log_softmax(model.head(hidden[:, PROMPT - 1 : -1]))
    log_probs = jnp.take_along_axis(of_all, tokens[:, PROMPT:, None], -1)[..., 0]
    return tokens, log_probs, own


def rollouts(mesh, model, step):
    """The samples of a step, as in examples/grpo.py, with what the sampler's router chose."""
    prompts = np.random.default_rng(step).integers(1, [10, 7], (PROMPTS, PROMPT))
    tokens = np.pad(prompts.repeat(SAMPLES, 0), ((0, 0), (0, LONGEST - PROMPT)))
    drawn = jax.device_get(generate(model, tokens, jax.random.key(step)))
    samples = []
    for i, (row, log_probs, own) in enumerate(zip(*drawn, strict=True)):
        end = PROMPT + row[1]
        reward = np.mean(row[PROMPT:end] == row[0] + np.arange(1, row[1] + 1))
        scored = {
            "reward": reward,
            "group_id": i // SAMPLES,
            "rollout_log_probs": log_probs[: row[1]],
        }
        experts = routed_experts(own[: end - 1], tokens=int(end))
        samples.append(Sample(row[:end], PROMPT, **scored, extras={"routed_experts": experts}))
    return pack(samples, parallel=mesh).put(mesh)


def create(mesh):
    model = Mixture(mesh, nnx.Rngs(0))
    return {"model": model, "optimizer": OPTIMIZER.init(model)}


def train(mesh, updates=UPDATES):
    """Yields the metrics of each update."""
    abstract = jax.eval_shape(partial(create, mesh))
    placed = jax.tree.map(mesh.sharding, nnx.get_partition_spec(abstract))
    state = jax.jit(partial(create, mesh), out_shardings=placed)()
    step = jax.jit(partial(update, mesh), out_shardings=(placed, None), donate_argnums=0)
    for i in range(updates):
        batches = rollouts(mesh, state["model"], i)
        reward = np.mean(batches.rewards, where=batches.sample_ids >= 0)
        state, metrics = step(state, batches)
        yield {"reward": float(reward)} | jax.tree.map(float, metrics)


# JAX_NUM_CPU_DEVICES=8 python -m examples.moe dp=2,cp=2,tp=2
if __name__ == "__main__":
    for i, metrics in enumerate(train(jaxppo.make_parallel_mesh(sys.argv[1]))):
        told = ("reward", "choices_differ", "log_prob_gap", "log_prob_gap_replayed")
        print(i, *(f"{x} {metrics[x]:.2g}" for x in told))
