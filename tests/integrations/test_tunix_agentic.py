"""jaxppo in Tunix's agentic learner: its steps with its own loss and with the config of
docs/from_tunix.md.

Its trajectory engine drops the tokens of an answer that reaches the length limit, and those of any
answer where the learner has no chat parser. So the sampler stops here at a quarter of all ids, and
a parser joins the messages. Each request has a seed of its own: without one they all draw the same
tokens.
"""

import dataclasses
import itertools
import re
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx
from pages import DOCS
from tunix_steps import V, Words, clusters, mesh_of, need, qwen, rewards, settings_of

from jaxppo.integrations import tunix as ours

learners = need("tunix.rl.agentic.agentic_grpo_learner")

pytestmark = pytest.mark.nightly


class Chat:
    """The contents of all messages, one after another."""

    def parse(self, messages, add_generation_prompt=False, is_first_msg=False):
        # the learner's are arrays
        contents = [np.asarray(message["content"]).item() for message in messages]
        return " ".join(content for content in contents if content)


def train(cluster_class, policy_loss_fn="grpo"):
    """The losses and gradient norms of steps, the trained parameters, and the batches that the
    loss was given.
    """
    mesh = mesh_of(1, 1)
    batches = []
    logged = []
    with mesh:
        settings = settings_of(mesh, 3, temperature=0.9)
        stops = list(range(3 * V // 4, V))
        settings = dataclasses.replace(
            settings, rollout_config=dataclasses.replace(settings.rollout_config, eos_tokens=stops)
        )
        cluster = cluster_class(
            actor=qwen(), reference=qwen(1), tokenizer=Words(), cluster_config=settings
        )
        trainer = cluster.actor_trainer
        kept = trainer._buffer_metrics

        def note(buffer, loss, step, additional_metrics=None):
            value = loss.compute() if hasattr(loss, "compute") else loss
            logged.append((float(value), float(additional_metrics["grad_norm"][0])))
            return kept(buffer, loss, step, additional_metrics)

        trainer._buffer_metrics = note
        options = {"num_generations": 4, "max_response_length": 6, "max_concurrency": 1}
        config = learners.GRPOConfig(policy_loss_fn=policy_loss_fn, **options)
        learner = learners.GRPOLearner(cluster, config, rewards, chat_parser=Chat())
        update = cluster.update_actor
        generate = cluster.generate
        seeds = itertools.count()

        def seen(examples, *args, **more):
            batches.extend(examples)
            return update(examples, *args, **more)

        def drawn(*args, **more):
            cluster.get_rollout_config(clusters.Mode.TRAIN).seed = next(seeds)
            return generate(*args, **more)

        cluster.update_actor, cluster.generate = seen, drawn
        learner.train(
            [{"prompts": np.array(["3 4 5", "6 7"])}, {"prompts": np.array(["8 9 10 11", "12"])}]
        )
    return np.array(logged), nnx.state(trainer.model, nnx.Param), batches


def config_of_the_page():
    page = (DOCS / "from_tunix.md").read_text()
    [block] = [
        x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if ">>> agentic = " in x
    ]
    names = {}
    exec(re.sub(r"^(>>>|\.\.\.) ?", "", block, flags=re.MULTILINE), names)
    return names["agentic"]


def test_the_agentic_learner_takes_the_same_steps_with_the_config_of_the_page():
    theirs, parameters, batches = train(clusters.RLCluster)
    masks = np.concatenate([np.asarray(x.completion_mask) for x in batches])
    sampled = np.concatenate([np.asarray(x.old_per_token_logps) for x in batches])
    assert {0, 1, 2, 4, 5} <= {*masks.sum(axis=1)}  # of an answer of six tokens none is left
    assert (sampled[masks > 0] < 0).all()
    assert (theirs[:, 1] > 1).all()  # norms of the gradient
    name = ours.register(config_of_the_page(), agentic=True)
    found, trained, _ = train(ours.rl_cluster(), name)
    np.testing.assert_allclose(found, theirs, rtol=1e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), trained, parameters)
