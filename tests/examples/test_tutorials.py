"""The examples of the tutorials: each learns, and has the same numbers on eight devices as on
one.
"""

import functools
from functools import partial

import jax
import numpy as np
import pytest
from flax import nnx

from examples import agent, critic, distillation, dpo, moe
from jaxppo import make_parallel_mesh


def falls(metric, share, first, last):
    """Whether the metric is below so much of what it was."""
    return last[metric] < share * first[metric]


def rises(metric, times, first, last):
    return last[metric] > times * first[metric]


def critic_learns(first, last):
    return last["explained_variance"] > 0.2 and rises("reward", 2, first, last)


whole_distributions = partial(distillation.train, update=distillation.update_whole)
LEARNS = {  # after so many updates
    "dpo": (dpo.train, 12, partial(falls, "loss", 0.6)),
    "distillation": (distillation.train, 12, partial(falls, "reverse_kl", 0.85)),
    "distillation of whole distributions": (
        whole_distributions,
        12,
        partial(falls, "divergence", 0.6),
    ),
    "moe": (moe.train, 32, partial(rises, "reward", 2)),
    "agent": (agent.train, 50, partial(rises, "reward", 4)),
    "critic": (critic.train, 40, critic_learns),
}


@pytest.mark.every(2)  # the pages train each of them a little, by day too
@pytest.mark.parametrize("example", LEARNS)
def test_an_example_learns_on_any_mesh(example):
    train, updates, learns = LEARNS[example]
    one = list(train(make_parallel_mesh("dp=1", devices=jax.devices()[:1]), updates))
    several = list(train(make_parallel_mesh("dp=2,cp=2,tp=2", context_layout="zigzag"), updates=2))
    for step, (here, there) in enumerate(zip(one, several, strict=False)):
        assert {*here} == {*there}
        # before the first update all margins are 0
        for metric in {*here} - ({"accuracy"} if step == 0 else set()):
            assert there[metric] == pytest.approx(here[metric], rel=2e-3, abs=2e-5), metric
    assert learns(one[0], one[-1]), (one[0], one[-1])
    assert all(metrics["broken_rules"] == 0 for metrics in one)


def created(example, mesh):
    """The example's state, placed as its training places it: the programs of that serve here."""
    create = partial(example.create, mesh)
    specs = nnx.get_partition_spec(jax.eval_shape(create))
    return jax.jit(create, out_shardings=jax.tree.map(mesh.sharding, specs))()


@functools.cache
def mixture_on_a_mesh():
    """The mesh, whose layout moves tokens, and the metrics of two updates on it."""
    mesh = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout="zigzag")
    return mesh, [*moe.train(mesh, updates=2)]


def test_the_balance_of_experts_is_that_of_the_whole_step():
    """In f64, over all tokens of the step.

    A mean of the micro-batches' balances is 1.3185 for 1.2859.
    """
    mesh, (metrics, _) = mixture_on_a_mesh()
    model = created(moe, mesh)["model"]
    batches = moe.rollouts(mesh, model, 0)
    forward = jax.jit(moe.forward)
    used = []
    score = []
    for k in range(4):
        batch = jax.tree.map(lambda x, k=k: x[k], batches)
        _, own, scores = forward(model, batch)
        read = np.asarray(batch.segment_ids) > 0
        used.append(np.eye(moe.EXPERTS)[np.asarray(own)[read][:, 0]].mean(1))
        score.append(np.asarray(scores, np.float64)[read])

    def balance(used, score):
        return moe.EXPERTS * np.sum(used.mean(0) * score.mean(0))

    expected = balance(np.concatenate(used), np.concatenate(score))
    assert float(metrics["balance"]) == pytest.approx(expected, rel=1e-6)
    mean_of_means = np.mean([balance(*part) for part in zip(used, score, strict=True)])
    assert mean_of_means == pytest.approx(1.3185, rel=1e-3)
    assert expected == pytest.approx(1.2859, rel=1e-3)


def test_replay_closes_the_gap_between_sampler_and_trainer():
    """On a mesh whose layout moves tokens: rows of experts that went to other tokens would leave
    the gap.
    """
    _, steps = mixture_on_a_mesh()
    for metrics in steps:
        assert metrics["choices_differ"] > 0.01
        assert metrics["log_prob_gap"] > 1e-4
        assert metrics["log_prob_gap_replayed"] < 2e-6
        assert metrics["gap_explained"] > 0.99
