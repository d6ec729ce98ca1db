"""GRPO for an agent that calls a tool, while its engine lags behind the trainer: docs/agent.md
explains it.
"""

import sys
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxppo
from examples.grpo import Decoder, hidden_and_head, score
from jaxppo import Normalizer, OffPolicyConfig, PolicyLossConfig, RolloutBatch, Sample, advantages
from jaxppo.mismatch import mismatch_metrics
from jaxppo.step.staleness import staleness_metrics, staleness_weights

ASK, CALL, RESULT, STOP = 12, 13, 14, 15  # the other tokens are numbers
TURN, LONGEST, PROMPTS, TRIES, UPDATES = 3, 12, 8, 8, 80
LIMIT = 2  # an older token is not trained on
CONFIG = PolicyLossConfig(
    jaxppo.PPO(clip_high=0.28),
    aggregation="rollout_mean",
    off_policy=OffPolicyConfig(weights="token", high=2.0),
)
OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.3), optax.adam(1e-3))
pack = partial(RolloutBatch.from_samples, row_length=16, rows=32, micro_batches=2, num_segments=8)


@jax.jit
def draw(model, tokens, ends, key):
    """TURN tokens behind each prompt, and their log-probs: [N, TURN]."""
    rows, positions = jnp.arange(len(tokens)), jnp.broadcast_to(jnp.arange(LONGEST), tokens.shape)
    sees = positions[:, :, None] >= positions[:, None, :]
    drawn, log_probs = [], []
    for i in range(TURN):
        logits = model.head(model(tokens, positions, sees)[rows, ends + i - 1])
        drawn.append(jax.random.categorical(jax.random.fold_in(key, i), logits))
        log_probs.append(jax.nn.log_softmax(logits)[rows, drawn[i]])
        tokens = tokens.at[rows, ends + i].set(drawn[i])
    return jnp.stack(drawn, 1), jnp.stack(log_probs, 1)


def complete(model, prompts, key, aborted=()):
    """What vLLM returns for each prompt: an engine for toys, which may lose requests."""
    ends = np.array([len(prompt) for prompt in prompts])
    tokens = np.stack([np.pad(prompt, (0, LONGEST - len(prompt))) for prompt in prompts])
    turns = []
    for i, (ids, log_probs) in enumerate(
        zip(*map(np.asarray, draw(model, tokens, ends, key)), strict=True)
    ):
        ends_here = np.flatnonzero((ids == CALL) | (ids == STOP))
        count = TURN if ends_here.size == 0 else ends_here[0] + 1
        reason = "length" if ends_here.size == 0 else "stop"
        if i in aborted:
            count, reason = 1, "abort"
        ids, log_probs = ids[:count].tolist(), log_probs[:count].tolist()
        of_tokens = [{token: value} for token, value in zip(ids, log_probs, strict=True)]
        output = {"index": 0, "token_ids": ids, "logprobs": of_tokens, "finish_reason": reason}
        turns.append({"prompt_token_ids": list(prompts[i]), "outputs": [output]})
    return turns


def play(previous, model, step):
    """The trajectories of a step.

    The engine gets new weights between the first turn and the second.
    """
    rng, key = np.random.default_rng(step), jax.random.key(step)
    numbers = rng.integers(1, 5, PROMPTS).repeat(TRIES)  # what the tool answers to each prompt
    aborted = np.flatnonzero(rng.random(len(numbers)) < 1 / 16)
    first = complete(previous, [[ASK]] * len(numbers), jax.random.fold_in(key, 0))
    written = [turn["outputs"][0]["token_ids"] for turn in first]
    # every other prompt's agent forgets its call
    kept = [ids * (1 - i // TRIES % 2) for i, ids in enumerate(written)]
    prompts = [[ASK, *ids, number, RESULT] for ids, number in zip(kept, numbers, strict=True)]
    second = complete(model, prompts, jax.random.fold_in(key, 1), aborted)
    trajectories = []
    for i, number in enumerate(numbers):
        reward, contexts, versions = 0.0, [[first[i]]], [[max(step - 1, 0)]]
        if written[i][-1] == CALL:
            answer = second[i]["outputs"][0]["token_ids"]
            reward = 0.2 + 0.4 * (answer[0] == number) + 0.4 * (answer == [number, STOP])
            if kept[i]:
                contexts[0].append(second[i])
                versions[0].append(step)
            else:
                contexts.append([second[i]])
                versions.append([step])
        found = {"contexts": contexts, "versions": versions, "reward": reward}
        trajectories.append(found | {"group_id": i // TRIES})
    return trajectories


def samples_of(trajectories):
    """One sample for each context: its turns, which continue one another."""
    samples = []
    for i, trajectory in enumerate(trajectories):
        last_turns = [context[-1] for context in trajectory["contexts"]]
        reasons = [turn["outputs"][0]["finish_reason"] for turn in last_turns]
        reward = None if "abort" in reasons else trajectory["reward"]
        each = zip(trajectory["contexts"], trajectory["versions"], strict=True)
        for context, versions in each:
            shared = {"reward": reward, "group_id": trajectory["group_id"]}
            fields = shared | {"rollout_id": i, "policy_versions": versions}
            samples.append(Sample.from_vllm(context, truncated="mask", **fields))
    return samples


def prepare(mesh, model, batches, version):
    """What the loss reads beside what the samples hold, arrays [K, R, T]."""
    old = jaxppo.compute_log_probs(partial(score, mesh), model, batches)
    by_sample = advantages.grpo(batches.rewards, **batches.groups, parallel=mesh)
    spread = advantages.spread(by_sample, batches, parallel=mesh)
    options = {"version": version, "limit": LIMIT, "parallel": mesh}
    of_part = partial(staleness_weights, **options)
    fresh = jax.lax.map(of_part, batches)  # one micro-batch after the other
    new = {"old_log_probs": old.log_probs, "advantages": spread * fresh}
    return replace(batches, **new)


def update(mesh, state, batches, version):
    """One optimizer update on K micro-batches."""

    def loss(model, part):
        batch, whole = part
        inputs = *hidden_and_head(model, batch), batch, CONFIG
        options = {"normalizer": whole, "parallel": mesh}
        value, metrics = jaxppo.policy_loss_from_hidden(*inputs, **options)
        engine = mismatch_metrics(batch, parallel=mesh)
        metrics |= {f"engine_{name}": metric for name, metric in engine.items()}
        return value, metrics | staleness_metrics(batch, version, parallel=mesh)

    model = state["model"]
    batches = prepare(mesh, model, batches, version)
    whole = Normalizer.of(CONFIG, batches, parallel=mesh)
    step = jaxppo.accumulate_gradients(loss, (batches, whole))
    (_, metrics), gradients = step(model)
    groups = batches.groups
    metrics |= advantages.pass_rates(batches.rewards, **groups, parallel=mesh)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], model)
    state = {"model": optax.apply_updates(model, updates), "optimizer": optimizer}
    return state, jaxppo.finalize_metrics(metrics)


def create(mesh):
    model = Decoder(mesh, nnx.Rngs(0))
    return {"model": model, "optimizer": OPTIMIZER.init(model)}


def train(mesh, updates=UPDATES):
    """Yields the metrics of each update."""
    abstract = jax.eval_shape(partial(create, mesh))
    placed = jax.tree.map(mesh.sharding, nnx.get_partition_spec(abstract))
    state = jax.jit(partial(create, mesh), out_shardings=placed)()
    step = jax.jit(partial(update, mesh), out_shardings=(placed, None))
    previous = state["model"]
    for i in range(updates):
        trajectories = play(previous, state["model"], i)
        batches = pack(samples_of(trajectories), parallel=mesh).put(mesh)
        previous = state["model"]
        state, metrics = step(state, batches, i)
        reward = np.mean([trajectory["reward"] for trajectory in trajectories])
        yield {"reward": float(reward)} | jax.tree.map(float, metrics)


# JAX_NUM_CPU_DEVICES=8 python -m examples.agent dp=2,cp=2,tp=2
if __name__ == "__main__":
    for i, metrics in enumerate(train(jaxppo.make_parallel_mesh(sys.argv[1]))):
        print(
            i, *(f"{x} {metrics[x]:.3f}" for x in ("reward", "pass_rate", "engine_kl", "staleness"))
        )
