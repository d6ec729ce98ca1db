"""The recipe of several teachers over whole distributions: its loss on meshes, and its mean over a
sampler's responses.

The model is a table: hidden states say which state a position is in, the kernel holds the logits of
each state.
"""

import dataclasses
import itertools
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracle import other_losses
from oracle.head import log_softmax
from policy_steps import by_sample, quick_jit, step_of, with_garbage

from jaxppo import RolloutBatch, Sample, advantages
from jaxppo.losses.distillation import divergence_from_hidden
from jaxppo.sharding import segment_sum
from sharding import make_parallel_mesh

PAGE = (Path(__file__).parents[2] / "docs/recipes.md").read_text()
V = 3
# of each of two prompts: before a response, and after each of its first tokens
STATES = 2 * (1 + V)


def of_page(name):
    """A function of the page."""
    lines = re.search(rf">>> def {name}.*?(?=>>>)", PAGE, re.DOTALL)[0].splitlines()
    found = {"advantages": advantages, "divergence_from_hidden": divergence_from_hidden, "jnp": jnp}
    found["segment_sum"] = segment_sum
    exec("\n".join(line[4:] for line in lines), found)
    return found[name]


RNG = np.random.default_rng(4)
TABLE = RNG.normal(size=(STATES, V))
# the first of prompt 0, the second of prompt 1
TEACHERS = [RNG.normal(size=(STATES, V)), RNG.normal(size=(STATES, V))]
SAMPLER = TABLE + 0.2 * RNG.normal(size=TABLE.shape)
TEMPERATURE = 0.7


def drawn(parallel=None):
    """Every response of two tokens to both prompts, how likely the sampler draws each, and the
    states of the tokens.

    The third token of a response is a tool's, without loss, of which sampler and trainer differ
    most.
    """
    log_p = log_softmax(TABLE)
    log_q = log_softmax(SAMPLER)
    samples = []
    for prompt, one, two in itertools.product(range(2), range(V), range(V)):
        states = [prompt * (1 + V), prompt * (1 + V) + 1 + one]
        tokens = [one, two]
        own = [log_p[s, y] for s, y in zip(states, tokens, strict=True)]
        theirs = [log_q[s, y] for s, y in zip(states, tokens, strict=True)]
        extras = {
            "state": [*states, 0],
            "teacher": [prompt] * 3,
            "likelihood": [np.exp(sum(theirs))] * 3,
        }
        values = {
            "old_log_probs": [*own, -9.0],
            "rollout_log_probs": [*theirs, -0.1],
            "extras": extras,
        }
        samples.append(Sample([7 + prompt, *tokens, 5], 1, loss_mask=[0, 1, 1, 0], **values))
    return RolloutBatch.from_samples(
        samples, row_length=8, rows=12, num_segments=2, parallel=parallel
    )


def gradient_of(batch, weights, parallel=None):
    """The page's loss and its gradient by the table, each response by how likely the sampler
    draws it.
    """
    hidden = jax.nn.one_hot(batch.extras["state"], STATES, dtype=jnp.float32)
    teachers = [(hidden, jnp.asarray(x, jnp.float32)) for x in TEACHERS]
    step = dataclasses.replace(
        batch, extras={**batch.extras, "weight": weights * batch.extras["likelihood"]}
    )

    def loss(table):
        return of_page("from_teachers")((hidden, table), teachers, step, TEMPERATURE, parallel)

    return jax.value_and_grad(loss)(jnp.asarray(TABLE, jnp.float32))


def expected_of(likelihoods):
    """The divergence and its gradient in each state, by how often the states are met; by prompt
    `[2, 1 + V]`.
    """
    value = 0.0
    gradient = np.zeros(TABLE.shape)
    for prompt, place in np.ndindex(2, 1 + V):
        state = prompt * (1 + V) + place
        pair = TABLE[state][None] / TEMPERATURE, TEACHERS[prompt][state][None] / TEMPERATURE
        found, by_logits = other_losses.divergence(*pair)
        value += likelihoods[prompt, place] * found[0]
        gradient[state] = likelihoods[prompt, place] * by_logits[0] / TEMPERATURE
    return value, gradient


TOKENS = 2 * V * V * 2  # of the batch, which the loss is a mean over


@pytest.mark.parametrize(("mesh", "layout"), [(None, "contiguous"), ("dp=2,cp=2,tp=1", "zigzag")])
def test_the_mean_over_the_samplers_responses(mesh, layout):
    """Each state counts as often as the trainer's policy meets it, though the sampler drew the
    responses.

    A token's own ratio leaves the sampler's frequencies as they are. So does no weight.
    """
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout, devices=jax.devices()[:4])
    batch = with_garbage(drawn(parallel), np.nan)
    p = np.exp(log_softmax(TABLE))
    q = np.exp(log_softmax(SAMPLER))
    met = np.ones((2, 1 + V))
    by_sampler = met.copy()
    for prompt in range(2):
        met[prompt, 1:], by_sampler[prompt, 1:] = p[prompt * (1 + V)], q[prompt * (1 + V)]

    @quick_jit
    def run(batch):
        one = jnp.ones(batch.loss_mask.shape)
        own = jnp.where(
            batch.loss_mask > 0, jnp.exp(batch.old_log_probs - batch.rollout_log_probs), 0
        )
        right = of_page("ratio_before")(batch, parallel)
        return [gradient_of(batch, weights, parallel) for weights in (right, own, one)]

    expected = expected_of(met)
    wrong = expected_of(by_sampler)
    assert np.abs(wrong[1] - expected[1]).max() > 0.01
    for (value, gradient), (known, by_table) in zip(
        run(batch), (expected, wrong, wrong), strict=True
    ):
        np.testing.assert_allclose(value * TOKENS, known, rtol=1e-5)
        np.testing.assert_allclose(gradient * TOKENS, by_table, rtol=1e-4, atol=1e-6)


def test_the_ratio_before_each_token():
    """In any packing and layout, over masked tokens, at most 2: the product of the ratios of the
    loss tokens before.
    """
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout="zigzag")
    samples = step_of(6)
    lower = [np.asarray(s.rollout_log_probs) * (1 + 0.3 * (i % 2)) for i, s in enumerate(samples)]
    samples = [
        dataclasses.replace(s, rollout_log_probs=x) for s, x in zip(samples, lower, strict=True)
    ]
    batch = RolloutBatch.from_samples(
        samples, row_length=24, rows=4, num_segments=9, parallel=parallel
    )
    found = quick_jit(lambda b: of_page("ratio_before")(b, parallel))(with_garbage(batch, np.nan))
    places = by_sample(found, batch, len(samples))
    capped = 0
    others = 0
    for i, s in enumerate(samples):
        on = np.asarray(s.loss_mask)[s.start :] > 0
        d = np.where(
            on, np.float64(np.float32(s.old_log_probs)) - np.float32(s.rollout_log_probs), 0
        )
        ratio = np.exp(np.cumsum(d) - d)
        capped = capped + int((ratio[on] > 2).sum())
        others = others + int((ratio[on] < 2).sum())
        got = places[i, s.start - 1 : len(s.tokens) - 1]
        np.testing.assert_allclose(got[on], np.minimum(ratio, 2)[on], rtol=1e-5)
    assert capped > 3
    assert others > 3
    assert np.isfinite(found).all()
