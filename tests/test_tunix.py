"""jaxppo in Tunix itself: its GRPO learner, models, adapters and packed batches, with its loss and with ours.

`make frameworks` installs it (the extra `tunix`) beside the test extra, and `make nightly` runs that.
"""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import nnx

from jaxppo import KL, PPO, PolicyLossConfig
from jaxppo.integrations import tunix as ours

need = functools.partial(pytest.importorskip, reason="Tunix is not installed: the extra tunix")
common, registry = need("tunix.rl.common"), need("tunix.rl.function_registry")
clusters, grpo_learner = need("tunix.rl.rl_cluster"), need("tunix.rl.grpo.grpo_learner")
base_rollout, qwen3 = need("tunix.rl.rollout.base_rollout"), need("tunix.models.qwen3.model")

V, PAD, EOS = 64, 0, 1


class Words:
    """A tokenizer of numbers."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    bos_id = lambda self: 2  # noqa: E731
    eos_id = lambda self: EOS  # noqa: E731
    pad_id = lambda self: PAD  # noqa: E731


def qwen(seed=0, **options):
    sizes = {"num_layers": 2, "vocab_size": V, "embed_dim": 16, "hidden_dim": 32, "num_heads": 2, "head_dim": 8}
    sizes |= {"num_kv_heads": 1, "rope_theta": 10_000, "norm_eps": 1e-6}
    return qwen3.Qwen3(qwen3.ModelConfig(**sizes, **options), rngs=nnx.Rngs(seed))


def mesh_of(*shape):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("fsdp", "tp"), kinds, devices=jax.devices()[: shape[0] * shape[1]])


def rewards(completions, **_):
    return [sum(int(word) % 2 for word in c.split()) for c in completions]


def train(cluster_class, mesh, steps=3, temperature=0.9, optimizer=None, **config):
    """The losses and gradient norms of steps of Tunix's learner, and the trained parameters."""
    roles = clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT
    actor = qwen()
    reference = qwen(1)  # another model, so that the divergence from it is not 0
    settings = clusters.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        training_config=clusters.RLTrainingConfig(
            actor_optimizer=optimizer or optax.sgd(0.02), eval_every_n_steps=100, max_steps=steps
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=6,
            max_prompt_length=8,
            kv_cache_size=32,
            temperature=temperature,
        ),
    )
    with mesh:
        cluster = cluster_class(actor=actor, reference=reference, tokenizer=Words(), cluster_config=settings)
        logged = []
        trainer = cluster.actor_trainer
        kept = trainer._buffer_metrics

        def note(buffer, loss, step, additional_metrics=None):
            logged.append((float(loss), float(additional_metrics["grad_norm"][0])))
            return kept(buffer, loss, step, additional_metrics)

        trainer._buffer_metrics = note
        learner = grpo_learner.GRPOLearner(cluster, grpo_learner.GRPOConfig(num_generations=4, **config), rewards)
        learner.train([{"prompts": np.array(["3 4 5", "6 7"])}, {"prompts": np.array(["8 9 10 11", "12"])}] * steps)
    return np.array(logged), nnx.state(trainer.model, nnx.Param)


def test_the_learner_takes_the_same_steps_with_and_without_logits():
    mesh = mesh_of(1, 1)
    config = {"beta": 0.04, "epsilon": 0.2, "kl_loss_mode": "low_var_kl"}
    theirs, parameters = train(clusters.RLCluster, mesh, **config)
    name = ours.register(PolicyLossConfig(PPO(), kl=KL(0.04, "k3"), aggregation="sequence_mean_token_mean"))
    found, trained = train(ours.rl_cluster(), mesh, policy_loss_fn=name, **config)
    assert len(theirs) == 3
    assert np.ptp(theirs[:, 1]) > 0
    np.testing.assert_allclose(found, theirs, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), trained, parameters)
