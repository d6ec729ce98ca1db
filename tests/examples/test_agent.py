"""The page on agents: each of its numbers, worked by hand or in float64, and its example's step
against both.
"""

import contextlib
import doctest
import io
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import agent
from jaxppo import (
    Normalizer,
    PolicyLossConfig,
    RolloutBatch,
    TokenStats,
    advantages,
    make_parallel_mesh,
    policy_loss,
)
from jaxppo.step.staleness import staleness_weights

PAGE = (Path(__file__).parents[2] / "docs/agent.md").read_text()
# The five samples of the page, by hand: which rollout, which response tokens are trained on, the
# reward, the versions, and the trainer's probability over the engine's.
ROLLOUTS = [0, 1, 1, 2, 3]
MASKS = [[1, 1, 0, 0, 1], [1], [1, 1], [0], [0, 0, 0]]
REWARDS = [1.0, 0.0, 0.0, None, 0.5]
VERSIONS = [[8, 8, 9, 9, 9], [8], [9, 9], [9], [9, 9, 9]]
RATIOS = [[1, 3, 1, 1, 1], [1], [1, 0.5], [1], [1, 1, 1]]


@pytest.fixture(scope="module")
def page():
    """What the blocks of the page define, but those that train."""
    names = {}
    for example in doctest.DocTestParser().get_examples(PAGE[: PAGE.index("## The update")]):
        with contextlib.redirect_stdout(io.StringIO()):
            exec(compile(example.source, "agent.md", "single"), names)
    return names


def by_group(rewards, rollouts):
    """The mean of the rollouts' rewards, and each sample's difference from it over their
    deviation, over n - 1.
    """
    counted = {rollout: r for rollout, r in zip(rollouts, rewards, strict=True) if r is not None}
    each = np.array(list(counted.values()))
    deviation = np.sqrt(((each - each.mean()) ** 2).sum() / (len(each) - 1))
    return each.mean(), [
        0.0 if r is None else (r - each.mean()) / (deviation + 1e-6) for r in rewards
    ]


def loss_by_hand(masks, by_sample, ratios, rollouts):
    """The loss, a mean over rollouts of means over their tokens, and its gradient by each
    response token's log-prob.
    """
    tokens = {
        r: sum(sum(m) for m, of in zip(masks, rollouts, strict=True) if of == r) for r in rollouts
    }
    trained = sum(count > 0 for count in tokens.values())
    gradients = []
    for mask, advantage, ratio, rollout in zip(masks, by_sample, ratios, rollouts, strict=True):
        weight = np.array(mask, np.float64) / (max(tokens[rollout], 1) * trained)
        # d exp(x - old) is 1 where x is old
        gradients.append(-weight * np.minimum(ratio, 2.0) * advantage)
    return sum(g.sum() for g in gradients), gradients


def of_sample(batch, array, sample):
    """The values of the response tokens of a sample of the page: the prompts have 2, 2, 3, 2 and
    2 tokens.
    """
    row, slot = np.argwhere(np.asarray(batch.sample_ids) == sample)[0]
    places = np.flatnonzero(np.asarray(batch.segment_ids)[row] == slot + 1)
    prompt = [2, 2, 3, 2, 2][sample]
    return np.asarray(array)[row][places][prompt - 1 : prompt - 1 + len(MASKS[sample])]


def packed(page, **changes):
    """The page's samples as a batch, with other fields."""
    samples = [
        replace(x, **{name: values[i] for name, values in changes.items()})
        for i, x in enumerate(page["samples"])
    ]
    return RolloutBatch.from_samples(samples, row_length=16)


def test_samples(page):
    for sample, rollout, mask, reward, versions in zip(
        page["samples"], ROLLOUTS, MASKS, REWARDS, VERSIONS, strict=True
    ):
        assert sample.rollout_id == rollout
        assert sample.mask[sample.start :].tolist() == mask
        assert sample.reward == reward
        assert list(sample.policy_versions) == versions
    assert page["samples"][0].tokens == [1, 2, 3, 4, 90, 91, 5]
    assert page["samples"][2].tokens == [1, 2, 92, 6, 7]


MISTAKES = {
    "none": (ROLLOUTS, REWARDS),
    "no `rollout_id`": ([0, 1, 2, 3, 4], REWARDS),
    "the aborted request has reward 0": (ROLLOUTS, [1.0, 0.0, 0.0, 0.0, 0.5]),
    "the truncated response has no reward": (ROLLOUTS, [1.0, 0.0, 0.0, None, None]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_baselines(page, mistake):
    """The rows of the table of mistakes, in float64 and from the package."""
    rollouts, rewards = MISTAKES[mistake]
    baseline, expected = by_group(rewards, rollouts)
    row = next(line for line in PAGE.splitlines() if line.startswith(f"| {mistake}"))
    shown = [float(x) for x in re.findall(r"-?\d+\.\d+", row)]
    assert shown == pytest.approx([baseline, *expected], abs=5.01e-4)
    batch = packed(page, rollout_id=rollouts, reward=rewards)
    found = page["in_order"](advantages.grpo(batch.rewards, **batch.groups))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_denominators(page):
    """6 tokens: 3 of the first sample, 1 and 2 of the parts of the second rollout."""
    batch = packed(page)
    expected = {
        "token_mean": (6, 3, None),
        "sequence_mean_token_mean": (6, 3, [3, 1, 2, 0, 0]),
        "rollout_mean": (6, 2, [3, 3, 3, 0, 0]),
    }
    for name, (tokens, sequences, each) in expected.items():
        found = Normalizer.of(PolicyLossConfig(aggregation=name), batch)
        assert (float(found.tokens), float(found.sequences)) == (tokens, sequences)
        assert each is None or page["in_order"](found.denominators).tolist() == each


@pytest.mark.parametrize("old_tokens", ["trained on", "no policy loss", "no loss mask"])
def test_losses(page, old_tokens):
    """Value and gradient: -0.25, then 0.0833 and -0.125 without the tokens that are two updates
    old.
    """
    _, by_sample = by_group(REWARDS, ROLLOUTS)
    fresh = [[version >= 9 for version in versions] for versions in VERSIONS]
    masks = MASKS
    each = [np.full(len(m), a) for m, a in zip(MASKS, by_sample, strict=True)]
    batch = page["batch"]
    weights = staleness_weights(batch, 10, limit=1)
    if old_tokens == "no policy loss":
        each = [a * f for a, f in zip(each, fresh, strict=True)]
        batch = replace(batch, advantages=batch.advantages * weights)
    if old_tokens == "no loss mask":
        masks = [(np.array(m) * f).tolist() for m, f in zip(MASKS, fresh, strict=True)]
        batch = replace(batch, loss_mask=batch.loss_mask * weights)
    value, expected = loss_by_hand(masks, each, RATIOS, ROLLOUTS)
    by_hand = {"trained on": -0.25, "no policy loss": 0.5 / 6, "no loss mask": -0.125}
    assert value == pytest.approx(by_hand[old_tokens], rel=1e-5)  # the deviation's epsilon is 1e-6

    def loss(log_probs):
        return policy_loss(TokenStats(log_probs), batch, page["CONFIG"])[0]

    found, gradient = jax.value_and_grad(loss)(jnp.asarray(batch.old_log_probs))
    assert float(found) == pytest.approx(value, rel=1e-5, abs=1e-6)
    for sample, of_tokens in enumerate(expected):
        np.testing.assert_allclose(
            of_sample(batch, gradient, sample), of_tokens, rtol=1e-5, atol=1e-7
        )


def test_without_the_correction_the_loss_is_0(page):
    config = replace(page["CONFIG"], off_policy=None)
    loss, _ = policy_loss(page["stats"], page["batch"], config)
    assert float(loss) == pytest.approx(0.0, abs=1e-6)


def test_every_row_of_the_table(page):
    """What the table says of masks, baselines and denominators, on changed copies of the page's
    step.
    """

    def counts(trajectories, truncated=None):
        samples = page["samples_of"](trajectories)
        if truncated is not None:
            last = trajectories[3]["contexts"][0]
            options = {"reward": 0.5, "group_id": 0, "rollout_id": 3, "policy_versions": [9]}
            samples[4] = page["Sample"].from_vllm(last, truncated=truncated, **options)
        batch = RolloutBatch.from_samples(samples, row_length=16)
        one = Normalizer.of(page["CONFIG"], batch)
        by_sample = (
            page["in_order"](advantages.grpo(batch.rewards, **batch.groups))
            if len(samples) == 5
            else None
        )
        return float(one.tokens), float(one.sequences), by_sample

    here = page["trajectories"]
    tokens, rollouts, by_sample = counts(here)
    assert (tokens, rollouts) == (6, 2)
    # a truncated response that is trained on: its 3 tokens and its rollout count; the baseline is
    # the same
    tokens, rollouts, same = counts(here, truncated="train")
    assert (tokens, rollouts) == (9, 3)
    np.testing.assert_array_equal(same, by_sample)
    # a trajectory without a reward: its tokens count, its advantage is 0, and the others' are those
    # of 0 and 0.5
    tokens, rollouts, found = counts([here[0] | {"reward": None}, *here[1:]])
    assert (tokens, rollouts) == (6, 2)
    np.testing.assert_allclose(found, [0, -np.sqrt(0.5), -np.sqrt(0.5), 0, np.sqrt(0.5)], rtol=1e-5)
    # equal rewards: no advantage, and the tokens count
    tokens, rollouts, found = counts([x | {"reward": 0.5} for x in here])
    assert (tokens, rollouts, found.tolist()) == (6, 2, [0] * 5)
    # a part that was aborted takes the reward of the whole trajectory; without that, parts differ
    # and are refused
    cut = here[1]["contexts"]
    stopped = [cut[0], [page["turn"]([1, 2, 92], [6, 7], "abort")]]
    samples = page["samples_of"]([here[0], here[1] | {"contexts": stopped}, *here[2:]])
    assert [sample.reward for sample in samples] == [1.0, None, None, None, 0.5]
    assert [int(sample.mask.sum()) for sample in samples] == [3, 1, 0, 0, 0]
    differ = [samples[0], replace(samples[1], reward=0.0), *samples[2:]]
    batch = RolloutBatch.from_samples(differ, row_length=16)
    with pytest.raises(ValueError, match="the reward of the whole rollout"):
        advantages.grpo(batch.rewards, **batch.groups)


@pytest.mark.parametrize("of", ["page", "example"])
def test_a_trajectory_that_was_aborted_and_resumed_has_its_reward(page, of):
    """Rewards 1, 0 and 0.5 have the mean 0.5 and the deviation 0.5.

    Without the first: 0, -0.707 and 0.707.
    """
    turn = page["turn"]
    resumed = [turn([1, 2], [3], "abort"), turn([1, 2, 3], [4])]
    each = [resumed], [[turn([1, 2], [5])]], [[turn([1, 2], [6])]]
    versions = [[8, 9]], [[9]], [[9]]
    trajectories = [
        page["trajectory"](*x) for x in zip(each, versions, [1.0, 0.0, 0.5], strict=True)
    ]
    samples_of = {"page": page["samples_of"], "example": agent.samples_of}[of]
    samples = samples_of(trajectories)
    assert [sample.reward for sample in samples] == [1.0, 0.0, 0.5]
    assert samples[0].mask.tolist() == [0, 0, 1, 1]
    batch = RolloutBatch.from_samples(samples, row_length=12)
    found = np.asarray(advantages.grpo(batch.rewards, **batch.groups))
    by_sample = [found[np.asarray(batch.sample_ids) == i].item() for i in range(3)]
    np.testing.assert_allclose(by_sample, [1, -1, 0], rtol=1e-5, atol=1e-7)


def test_a_step_of_the_example():
    """The loss of an update in two micro-batches, from its trajectories in float64: first turns
    are 3 updates old.
    """
    mesh = make_parallel_mesh("dp=1", devices=jax.devices()[:1])
    state = jax.jit(partial(agent.create, mesh))()
    older = jax.jit(lambda model: jax.tree.map(lambda x: 1.05 * x, model))(state["model"])
    for step in range(1, 60):  # until one has an aborted request, and a trajectory that was cut
        trajectories = agent.play(older, state["model"], step)
        samples = agent.samples_of(trajectories)
        turns = [turn for x in trajectories for context in x["contexts"] for turn in context]
        reasons = [turn["outputs"][0]["finish_reason"] for turn in turns]
        if "abort" in reasons and len(samples) > len(trajectories):
            break
    assert {*reasons} == {"stop", "length", "abort"}

    batches = agent.pack(samples)
    old = jax.jit(partial(agent.prepare, mesh))(state["model"], batches, step + 2).old_log_probs
    _, metrics = jax.jit(partial(agent.update, mesh))(state, batches, step + 2)
    groups = [sample.group_id for sample in samples]
    rollouts = [sample.rollout_id for sample in samples]
    rewards = [sample.reward for sample in samples]
    by_sample = np.zeros(len(samples))
    for group in {*groups}:
        members = np.flatnonzero(np.array(groups) == group)
        _, by_sample[members] = by_group(
            [rewards[i] for i in members], [rollouts[i] for i in members]
        )
    masks = []
    ratios = []
    each = []
    for i, sample in enumerate(samples):
        k, row, slot = np.argwhere(batches.sample_ids == i)[0]
        places = np.flatnonzero(batches.segment_ids[k, row] == slot + 1)[sample.start - 1 : -1]
        log_ratio = np.asarray(old, np.float64)[k, row, places] - sample.rollout_log_probs
        masks.append(sample.mask[sample.start :].tolist())
        ratios.append(np.exp(log_ratio))
        each.append(by_sample[i] * (step + 2 - np.asarray(sample.policy_versions) <= agent.LIMIT))
    expected, _ = loss_by_hand(masks, each, ratios, rollouts)
    assert abs(expected) > 1e-3
    assert float(metrics["loss"]) == pytest.approx(expected, rel=1e-4)
    assert float(metrics["staleness_max"]) == 3
