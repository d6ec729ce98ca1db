"""Tunix's models, batches and learner on one small head, for tests that are skipped if Tunix is
missing.

The names of Tunix's modules are those of 0.1.7 and of its main branch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

need = functools.partial(pytest.importorskip, reason="Tunix is not installed: the extra tunix")
registry = need("tunix.rl.function_registry")
clusters = need("tunix.rl.rl_cluster")
grpo_learner = need("tunix.rl.grpo.grpo_learner")
base_rollout = need("tunix.rl.rollout.base_rollout")
qwen3 = need("tunix.models.qwen3.model")
# the main branch has it; () stands for no class
LossOutput = getattr(need("tunix.sft.utils"), "LossOutput", ())

V, PAD, EOS = 64, 0, 1


class Words:
    """A tokenizer of numbers."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 2

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


def qwen(seed=0, **options):
    sizes = {
        "num_layers": 2,
        "vocab_size": V,
        "embed_dim": 16,
        "hidden_dim": 32,
        "num_heads": 2,
        "head_dim": 8,
    }
    sizes |= {"num_kv_heads": 1, "rope_theta": 10_000, "norm_eps": 1e-6} | options
    return qwen3.Qwen3(qwen3.ModelConfig(**sizes), rngs=nnx.Rngs(seed))


def mesh_of(*shape):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("fsdp", "tp"), kinds, devices=jax.devices()[: shape[0] * shape[1]])


def rewards(completions, **_):
    return [sum(int(word) % 2 for word in c.split()) for c in completions]


def settings_of(mesh, steps, temperature, **training):
    roles = clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT
    training |= {"actor_optimizer": optax.sgd(0.02), "eval_every_n_steps": 100, "max_steps": steps}
    training = clusters.RLTrainingConfig(**training)
    sampler = {
        "max_tokens_to_generate": 6,
        "max_prompt_length": 8,
        "kv_cache_size": 32,
        "temperature": temperature,
    }
    sampler |= {"return_logprobs": True}
    return clusters.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        training_config=training,
        rollout_config=base_rollout.RolloutConfig(**sampler),
    )


def cluster_of(cluster_class, mesh, steps=3, temperature=0.9, **training):
    settings = settings_of(mesh, steps, temperature, **training)
    # the reference is another model, so that the divergence from it is not 0
    return cluster_class(
        actor=qwen(), reference=qwen(1), tokenizer=Words(), cluster_config=settings
    )


def example(rows=4, prompt=5, completion=7, shortest=0, **arrays):
    """A padded batch: prompts padded on the left, completions on the right, some of them short
    or empty.
    """
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, V, (rows, prompt)) * (
        np.arange(prompt) >= np.arange(rows)[:, None] % prompt
    )
    lengths = np.maximum(np.arange(rows)[:, None] * 2 % (completion + 1), shortest)
    completions = rng.integers(2, V, (rows, completion)) * (np.arange(completion) < lengths)
    given = {
        "advantages": rng.normal(size=rows),
        "ref_per_token_logps": -4 + 0.3 * rng.normal(size=completions.shape),
    }
    given |= {"old_per_token_logps": -4.2 + 0.2 * rng.normal(size=completions.shape)} | arrays
    given = {name: x if x is None else jnp.asarray(x, jnp.float32) for name, x in given.items()}
    ids = {
        "prompt_ids": jnp.asarray(prompts, jnp.int32),
        "completion_ids": jnp.asarray(completions, jnp.int32),
    }
    masks = {
        "prompt_mask": ids["prompt_ids"] != PAD,
        "completion_mask": ids["completion_ids"] != PAD,
    }
    return grpo_learner.TrainExample(**ids, **masks, **given)


def grpo(**options):
    config = grpo_learner.GRPOConfig(**options)
    config.temperature = 0.7
    return config


def loss_and_metrics(name):
    """A registered loss as a number, with its metrics.

    The main branch returns sums, which are divided here.
    """
    loss_fn = registry.get_policy_loss_fn(name)

    def called(*args):
        found = loss_fn(*args)
        if not isinstance(found, LossOutput):
            return found
        metrics = {
            name: x.compute() if hasattr(x, "compute") else x
            for name, x in found.aux_metrics.items()
        }
        return found.primary_loss.compute(), metrics

    return called


def losses(model, name, algo_config, train_example, wrt=nnx.Param):
    """((loss, aux), gradient) of a registered loss, as Tunix's trainer takes them."""

    @nnx.jit
    def step(model, train_example):
        grad = nnx.value_and_grad(
            loss_and_metrics(name), argnums=nnx.DiffState(0, wrt), has_aux=True
        )
        return grad(model, train_example, algo_config, PAD, EOS)

    return step(model, train_example)
