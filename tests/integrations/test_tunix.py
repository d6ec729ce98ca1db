"""jaxppo in Tunix's GRPO learner and cluster: steps with Tunix's loss and passes, and with
jaxppo's.

`make nightly` installs Tunix (the extra `tunix`) beside the other extras. Tunix's main branch is
tested from a checkout on the path:
PYTHONPATH=.../tunix python -m pytest tests/integrations/test_tunix*.py --nightly
"""

import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix_steps import (
    EOS,
    PAD,
    LossOutput,
    Words,
    cluster_of,
    clusters,
    example,
    grpo,
    grpo_learner,
    losses,
    mesh_of,
    qwen,
    rewards,
    settings_of,
)

from jaxppo import KL, PPO, PolicyLossConfig
from jaxppo.integrations import tunix as ours

pytestmark = pytest.mark.nightly


def train(cluster_class, mesh, steps=3, temperature=0.9, training=(), **config):
    """The losses and gradient norms of steps of Tunix's learner, and the trained parameters."""
    with mesh:
        cluster = cluster_of(cluster_class, mesh, steps, temperature, **dict(training))
        logged = []
        trainer = cluster.actor_trainer
        kept = trainer._buffer_metrics

        def note(buffer, loss, step, additional_metrics=None):
            value = loss.compute() if hasattr(loss, "compute") else loss
            logged.append((float(value), float(additional_metrics["grad_norm"][0])))
            return kept(buffer, loss, step, additional_metrics)

        trainer._buffer_metrics = note
        learner = grpo_learner.GRPOLearner(
            cluster, grpo_learner.GRPOConfig(num_generations=4, **config), rewards
        )
        learner.train(
            [{"prompts": np.array(["3 4 5", "6 7"])}, {"prompts": np.array(["8 9 10 11", "12"])}]
            * steps
        )
    return np.array(logged), nnx.state(trainer.model, nnx.Param)


def test_the_learner_takes_the_same_steps_with_and_without_logits():
    mesh = mesh_of(1, 1)
    config = {"beta": 0.04, "epsilon": 0.2, "kl_loss_mode": "low_var_kl"}
    theirs, parameters = train(clusters.RLCluster, mesh, **config)
    name = ours.register(
        PolicyLossConfig(PPO(), kl=KL(0.04, "k3"), aggregation="sequence_mean_token_mean")
    )
    found, trained = train(ours.rl_cluster(), mesh, policy_loss_fn=name, **config)
    assert len(theirs) == 3
    assert np.ptp(theirs[:, 1]) > 0
    np.testing.assert_allclose(found, theirs, rtol=1e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), trained, parameters)


def test_the_example_of_the_docs_trains():
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [block] = [block for block in blocks if "jaxppo_tunix.rl_cluster()" in block]
    mesh = mesh_of(1, 1)
    actor = qwen()
    with mesh:
        names = {
            "mesh": mesh,
            "actor": actor,
            "reference": qwen(1),
            "tokenizer": Words(),
            "reward_fns": rewards,
        }
        names |= {"cluster_config": settings_of(mesh, steps=1, temperature=0.9)}
        names |= {"GRPOLearner": grpo_learner.GRPOLearner, "GRPOConfig": grpo_learner.GRPOConfig}
        before = jax.tree.map(np.array, nnx.state(actor, nnx.Param))
        exec(block, names)
        names["learner"].train([{"prompts": np.array(["3 4 5", "6 7"])}])
    after = nnx.state(names["cluster"].actor_trainer.model, nnx.Param)
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x != y).any()), before, after)))


def test_old_log_probs_of_several_iterations_have_no_logits_either():
    """At temperature 1: at another, those of Tunix 0.1.7 are of temperature 1 and its policy's are
    not.

    Its main branch takes the sampler's, which a rollout returns with what it drew.
    """
    config = {"beta": 0.0, "num_iterations": 2, "loss_agg_mode": "token-mean"}
    theirs, parameters = train(
        clusters.RLCluster, mesh_of(1, 1), steps=4, temperature=1.0, **config
    )
    name = ours.register()
    found, trained = train(
        ours.rl_cluster(), mesh_of(1, 1), steps=4, temperature=1.0, policy_loss_fn=name, **config
    )
    np.testing.assert_allclose(found, theirs, rtol=2e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), trained, parameters)


def test_micro_batches_of_a_step_add_up_as_theirs():
    """Tunix 0.1.7 takes the mean of their means, its main branch sums over counts: with its
    `LossOutput`, so do we.
    """
    options = {
        "training": {"mini_batch_size": 2, "train_micro_batch_size": 1},
        "loss_agg_mode": "token-mean",
    }
    theirs, parameters = train(clusters.RLCluster, mesh_of(1, 1), steps=2, **options)
    found, trained = train(
        ours.rl_cluster(), mesh_of(1, 1), steps=2, policy_loss_fn=ours.register(), **options
    )
    assert len(theirs) == 4
    np.testing.assert_allclose(found, theirs, rtol=2e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), trained, parameters)


def test_log_probs_of_the_actor_at_the_start_of_a_step():
    """Its agentic learner asks in micro-batches, and for the reference's too."""
    batch = example()
    mesh = mesh_of(1, 1)
    found = []
    with mesh:
        for cluster_class in (clusters.RLCluster, ours.rl_cluster()):
            cluster = cluster_of(cluster_class, mesh)
            args = batch.prompt_ids, batch.completion_ids, PAD, EOS
            actor = cluster.get_actor_per_token_logps(*args, micro_batch_size=2)
            found.append(
                [
                    jnp.where(batch.completion_mask, x, 0)
                    for x in (actor, cluster.get_ref_per_token_logps(*args))
                ]
            )
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert np.abs(found[1][0] - found[1][1]).max() > 1e-3


def test_what_contradicts_the_learner_is_refused_by_name():
    name = ours.register(PolicyLossConfig(kl=KL(0.01)))
    with pytest.raises(
        ValueError,
        match=r"beta: got 0.04 in GRPOConfig, expected 0.01, the coefficient of config.kl",
    ):
        losses(qwen(), name, grpo(), example())
    with pytest.raises(ValueError, match=r"batch.ref_log_probs: got None"):
        losses(qwen(), name, grpo(beta=0.01), example(ref_per_token_logps=None))
    with pytest.raises(
        ValueError, match=r"config: got a config that reads log-probs of the sampler"
    ):
        ours.register(PolicyLossConfig(ratio_to="rollout"))
    with pytest.raises(TypeError, match=r"config: got str, expected PolicyLossConfig or None"):
        ours.register("grpo")
    with pytest.raises(ValueError, match=r"kl_clamp_value: got 5.0 with 'kl'"):
        ours.config_of(grpo(kl_clamp_value=5.0))


def test_weights_of_the_learner_multiply_the_policy_loss():
    """As in Tunix's own loss, and not its penalty; those of the agentic learner with
    `sampler_is="token"`.
    """
    weights = jnp.asarray(np.random.default_rng(1).uniform(0, 2, (4, 7)), jnp.float32)
    weighted = example().replace(sampler_is_weights=weights)
    model = qwen()
    config = grpo()
    (theirs, _), gradient = losses(model, "grpo", config, weighted)
    (found, metrics), mine = losses(model, ours.register(), config, weighted)
    np.testing.assert_allclose(found, theirs, rtol=2e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), mine, gradient)
    where = np.asarray(weighted.completion_mask)
    np.testing.assert_allclose(metrics["sampler_is/weight_mean"], weights[where].mean(), rtol=1e-6)


class Routed(nnx.Module):
    """The embedder of a Qwen 3, and one expert a token: the sampler's, or where it has none the
    token's own.
    """

    def __init__(self):
        self.embedder, self.final_norm = qwen().embedder, nnx.RMSNorm(16, rngs=nnx.Rngs(0))
        self.experts = nnx.Param(jax.random.normal(jax.random.key(1), (4, 16)))

    def __call__(
        self,
        tokens,
        positions,
        cache,
        attention_mask,
        skip_lm_head=False,
        forced_routed_experts=None,
    ):
        own = tokens % 4
        chosen = own if forced_routed_experts is None else forced_routed_experts[:, :, 0, 0]
        x = self.embedder.encode(tokens) + self.experts[...][jnp.where(chosen < 0, own, chosen)]
        x = self.final_norm(x)
        return (x if skip_lm_head else self.embedder.decode(x)), cache


def test_the_samplers_experts_are_replayed_in_passes_and_in_the_loss(monkeypatch):
    """As branches of September hand them over: an array of prompts and completions, -1 at what
    nobody sampled.
    """
    batch = example()
    model = Routed()
    shape = (
        *batch.prompt_ids.shape[:1],
        batch.prompt_ids.shape[1] + batch.completion_ids.shape[1],
        1,
        1,
    )
    experts = jnp.asarray(np.random.default_rng(0).integers(-1, 4, shape), jnp.int16)
    logits, _ = model(
        jnp.concatenate([batch.prompt_ids, batch.completion_ids], 1),
        None,
        None,
        None,
        forced_routed_experts=experts,
    )
    at = batch.prompt_ids.shape[1] - 1
    expected = jnp.take_along_axis(
        jax.nn.log_softmax(logits[:, at:-1]), batch.completion_ids[..., None], 2
    )[..., 0]
    kept = batch.completion_mask

    def found(**more):
        return jnp.where(
            kept,
            ours.log_probs(model, batch.prompt_ids, batch.completion_ids, pad_id=PAD, **more),
            0,
        )

    np.testing.assert_allclose(
        found(routed_experts=experts), jnp.where(kept, expected, 0), rtol=1e-5, atol=1e-5
    )
    assert np.abs(found() - jnp.where(kept, expected, 0)).max() > 1e-2
    with mesh_of(1, 1) as mesh:
        worker = cluster_of(ours.rl_cluster(), mesh).inference_worker
    monkeypatch.setattr(worker._of, "get_model", lambda role: model)
    args = batch.prompt_ids, batch.completion_ids, PAD, EOS, 1.0
    passed = worker.get_ref_per_token_logps(*args, routed_experts=experts)
    np.testing.assert_array_equal(jnp.where(kept, passed, 0), found(routed_experts=experts))
    # at the old log-probs of the replayed pass the ratio is 1, and not without replay
    loss = ours.loss_fn(PolicyLossConfig(PPO()))
    payload = SimpleNamespace(
        **vars(batch) | {"old_per_token_logps": expected, "ref_per_token_logps": None}
    )
    config = SimpleNamespace(temperature=1.0)
    ratios = []
    for payload.routed_experts in (experts, None):
        returned = loss(model, payload, config, PAD, EOS)
        metrics = returned.aux_metrics if isinstance(returned, LossOutput) else returned[1]
        ratio = metrics["ratio_max"]
        ratios.append(float(ratio.compute() if hasattr(ratio, "compute") else ratio))
    np.testing.assert_allclose(ratios[0], 1, rtol=1e-5)
    assert ratios[1] > 1.01
