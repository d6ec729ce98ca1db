"""Steps of pairs in rows, what the oracle makes of them, and the comparison of a preference loss
with it.
"""

import dataclasses
import functools
from typing import get_args

import jax
import numpy as np
import oracle.preference as truth
from oracle import OracleSample
from policy_steps import by_sample, quick_jit

from jaxppo import RolloutBatch, Sample, TokenStats, finalize_metrics, loss_from_stats
from jaxppo.losses import preference
from jaxppo.losses.preference.dpo import Link
from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close

LOSSES = {
    "dpo": preference.DPO(beta=0.3),
    "cdpo, sum of nll": preference.DPO(
        beta=0.3, label_smoothing=0.2, nll_coef=0.5, nll="sequence_mean_token_sum"
    ),
    "sigmoid_norm": preference.DPO(length_normalised=True),
    "ipo": preference.IPO(),
    "ipo, sums": preference.IPO(beta=0.4, length_normalised=False, nll_coef=0.1),
    "simpo": preference.SimPO(label_smoothing=0.1),
    "orpo": preference.ORPO(beta=0.5),
    **{
        link: preference.DPO(0.3, 0.1 * (link in ("robust", "exo")), link=link)
        for link in get_args(Link)
        if link != "sigmoid"
    },
    "kto": preference.KTO(reference_point=0.4, beta=0.5, undesirable_weight=1.5),
}
MESHES = {
    "dp=8": "contiguous",
    "dp=2,cp=2,tp=2": "zigzag",
    "dp=2,cp=4": "zigzag_per_segment",
    "cp=8": "striped",
}
COUNT = 12


def step_of(seed: int) -> list[Sample]:
    """Six pairs, far apart among other samples, with holes in their masks; `returns` hold the
    policy's log-probs.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for i in range(COUNT):
        prompt = int(rng.integers(1, 4))
        response = int(rng.integers(2, 9))
        mask = np.zeros(prompt + response)
        mask[prompt:] = rng.random(response) < 0.7
        mask[-1] = 1
        own = -0.05 - rng.exponential(1.0, response)
        near = np.minimum(own + 0.5 * rng.normal(size=response), -0.01)
        tokens = rng.integers(0, 50, prompt + response)
        tokens[:prompt] = i % 6  # that of the pair
        samples.append(
            Sample(
                tokens,
                response_start=prompt,
                loss_mask=mask,
                sample_id=i,
                group_id=7 * (i % 6),
                reward=float(rng.normal()),
                ref_log_probs=near,
                returns=own,
            )
        )
    return samples


def oracle_of(samples: list[Sample], other: str = "ref_log_probs") -> list[OracleSample]:
    """At the positions that predict, `[16]`, as `by_sample` has them; `other` log-probs beside
    the policy's.
    """
    found = []
    for s in samples:
        place = slice(s.start - 1, len(s.tokens) - 1)
        arrays = {name: np.full(16, np.nan) for name in ("log_probs", other)}
        arrays["log_probs"][place] = np.float32(s.returns)
        arrays[other][place] = np.float32(getattr(s, other))
        mask = np.pad(s.mask[1:], (0, 17 - len(s.mask)))
        found.append(
            OracleSample(
                mask, **arrays, reward=s.reward, group_id=s.group_id, sample_id=s.sample_id
            )
        )
    return found


def expected_of(name: str, samples: list[Sample]):
    options = {f.name: getattr(LOSSES[name], f.name) for f in dataclasses.fields(LOSSES[name])}
    if name == "kto":
        return truth.kto(oracle_of(samples), **options)
    kind = type(LOSSES[name]).__name__.lower()
    return truth.preference_loss(oracle_of(samples), kind, **options)


@functools.cache
def whole(name: str, mesh: str | None = None, layout: str = "contiguous"):
    parallel = mesh and make_parallel_mesh(mesh, context_layout=layout)

    def run(batch):
        def fn(x):
            return loss_from_stats(TokenStats(x), batch, LOSSES[name], parallel=parallel)

        (loss, found), gradient = jax.value_and_grad(fn, has_aux=True)(batch.returns)
        return loss, gradient, finalize_metrics(found)

    return quick_jit(run)


def check(name: str, samples: list[Sample], batch: RolloutBatch, got) -> None:
    agree(expected_of(name, samples), batch, len(samples), got, loss_atol=1e-6)


def agree(expected, batch: RolloutBatch, count: int, got, *, loss_atol: float = 0.0) -> None:
    """Loss, gradient by log-probs and metrics of a batch of so many samples are those that the
    oracle expects.
    """
    loss, gradient, found = got
    expected_loss, by_token, metrics = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5, atol=loss_atol)
    size = np.abs(by_token).max()
    assert size > 0
    assert_trees_close(
        by_sample(gradient, batch, count), np.float32(by_token), rtol=2e-5, atol=1e-6 * size
    )
    assert found.pop("broken_rules") == 0
    assert found.keys() == metrics.keys()
    for key, value in metrics.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=1e-6, err_msg=key)
