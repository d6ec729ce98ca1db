"""Errors name arguments that are not arrays, or have another shape or dtype: those of a batch
and of functions.
"""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import (
    GSPO,
    KL,
    PPO,
    SFT,
    Normalizer,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    advantages,
    compute_log_probs,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_hidden,
    loss_from_stats,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.base.kl import adaptive_kl_coef, kl_divergence
from jaxppo.batch.nucleus import pack_nucleus_ids
from jaxppo.losses.covariance import covariance_mask
from jaxppo.losses.distillation import distillation_loss, divergence_from_hidden
from jaxppo.losses.mtp import MTP, mtp_loss, shift_targets
from jaxppo.mismatch import mismatch_metrics
from jaxppo.policy_losses import ClipCov
from jaxppo.sharding import redistribute, scan_affine, segment_sum, shift_left
from jaxppo.step.staleness import proximal_log_probs, staleness_metrics, staleness_weights

OF_TOKENS = (
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "values",
    "returns",
)
SAMPLES = [
    Sample(
        [1, 2, 3, 4], response_start=2, group_id=0, reward=1.0, rollout_id=i, policy_versions=[3, 3]
    )
    for i in range(2)
]
SAMPLES = [
    dataclasses.replace(sample, **{name: [-1.0, -2.0] for name in OF_TOKENS}) for sample in SAMPLES
]
BATCH = RolloutBatch.from_samples(SAMPLES, row_length=8)
NAMES = [
    field.name
    for field in dataclasses.fields(BATCH)
    if isinstance(getattr(BATCH, field.name), np.ndarray)
]
HIDDEN = np.ones((1, 8, 4), np.float32)
KERNEL = np.ones((4, 9), np.float32)
STATS = TokenStats(np.full((1, 8), -1.0, np.float32))
CONFIG = PolicyLossConfig(PPO(), kl=KL(0.1))
VALUES = STATS.log_probs
REWARDS = np.zeros((1, 2), np.float32)
GROUPS = np.zeros((1, 2), np.int32)


def stats_of(params, batch):
    return STATS


# each lacks a batch alone, whose name follows
TAKE_A_BATCH = {
    "policy_loss": partial(policy_loss, STATS, config=CONFIG),
    "policy_loss, gspo": partial(policy_loss, STATS, config=PolicyLossConfig(GSPO())),
    "policy_loss_from_hidden": partial(policy_loss_from_hidden, HIDDEN, KERNEL, config=CONFIG),
    "SFT": partial(loss_from_stats, STATS, loss=SFT()),
    "SFT from hidden": partial(loss_from_hidden, HIDDEN, KERNEL, loss=SFT()),
    "Value": partial(loss_from_stats, VALUES, loss=Value(clip=0.2)),
    "mtp_loss": partial(mtp_loss, [HIDDEN], KERNEL),
    "Normalizer.of depths": partial(Normalizer.of, MTP(1)),
    "shift_targets": partial(shift_targets, by=1),
    "distillation_loss": partial(distillation_loss, HIDDEN, KERNEL, HIDDEN, KERNEL),
    "compute_log_probs": partial(compute_log_probs, stats_of, None),
    "Normalizer": partial(Normalizer.of, SFT(aggregation="rollout_mean")),
    "covariance_mask": partial(
        covariance_mask, STATS, config=PolicyLossConfig(ClipCov()), key=jax.random.key(0)
    ),
    "mismatch_metrics": mismatch_metrics,
    "staleness_metrics": partial(staleness_metrics, version=3),
    "staleness_weights": partial(staleness_weights, version=3, limit=1),
    "pack_nucleus_ids": partial(pack_nucleus_ids, [[[1], [1]]] * 2, SAMPLES),
    "gdpo": partial(advantages.gdpo, [REWARDS], GROUPS),
    "spread": partial(advantages.spread, REWARDS),
    "token_rewards": partial(advantages.token_rewards, REWARDS),
    "discounted_returns": partial(advantages.discounted_returns, VALUES),
    "gae": partial(advantages.gae, VALUES, VALUES),
    "reinforce_plus_plus": partial(advantages.reinforce_plus_plus, VALUES),
    "reinforce_plus_plus_baseline": partial(
        advantages.reinforce_plus_plus_baseline, REWARDS, GROUPS
    ),
    "validate": partial(RolloutBatch.validate, vocab_size=9),
}


def spoilt(x):
    """The array in each way that is wrong."""
    return {
        "list": x.tolist(),
        "text": "x",
        "number": 1.0,
        "objects": x.astype(object),
        "complex": x.astype(complex),
        "fewer positions": x[:, 1:],
        "more rows": np.concatenate([x, x]),
        "no rows": x[0],
    }


def named(name, error):
    """If the shapes of two arrays differ, the error names both."""
    return ": got " in error and re.search(rf"\b{name.replace('_', '[_ ]')}\b", error)


def test_all_arrays_are_there():
    assert len(NAMES) == 16


@pytest.mark.every(3)
@pytest.mark.parametrize("function", TAKE_A_BATCH)
def test_an_array_of_a_batch_is_named(function):
    TAKE_A_BATCH[function](BATCH)
    for name in NAMES:
        for how, x in spoilt(getattr(BATCH, name)).items():
            wrong = dataclasses.replace(BATCH, **{name: x})
            with pytest.raises((TypeError, ValueError)) as found:
                TAKE_A_BATCH[function](wrong)
            assert named(name, str(found.value)), (name, how, str(found.value))


@pytest.mark.parametrize("function", sorted({*TAKE_A_BATCH} - {"validate"}))
def test_no_batch_at_all(function):
    with pytest.raises(TypeError, match=r"batch(es)?: got dict, expected RolloutBatch"):
        TAKE_A_BATCH[function]({"tokens": BATCH.tokens})


def test_a_normalizer_and_samples_of_another_type():
    with pytest.raises(TypeError, match="normalizer: got float, expected Normalizer or None"):
        policy_loss_from_hidden(HIDDEN, KERNEL, BATCH, CONFIG, normalizer=3.0)
    with pytest.raises(TypeError, match="samples: got Sample, expected a sequence of Sample"):
        RolloutBatch.from_samples(SAMPLES[0], row_length=8)


X = np.zeros((1, 8), np.float32)
IDS = np.ones((1, 8), np.int32)


def value_loss(values):
    return loss_from_stats(values, BATCH, Value())


OF_GROUPS = {"rewards": REWARDS, "group_ids": GROUPS, "among": GROUPS >= 0, "rollout_ids": GROUPS}
TAKE_ARRAYS = {
    **{
        name: (getattr(advantages, name), OF_GROUPS)
        for name in ("grpo", "dr_grpo", "rloo", "gpg", "pass_at_k", "maxrl", "standardize")
    },
    "opo": (advantages.opo, {**OF_GROUPS, "lengths": REWARDS}),
    "remax": (advantages.remax, {"rewards": REWARDS, "baselines": REWARDS, "sample_ids": GROUPS}),
    "overlong_penalty": (
        partial(advantages.overlong_penalty, max_length=9, buffer=3),
        {"lengths": REWARDS},
    ),
    "explained_variance": (advantages.explained_variance, {"values": X, "returns": X, "mask": X}),
    "whiten": (advantages.whiten, {"x": X, "mask": X, "among": X == 0}),
    "on_policy_distillation": (
        advantages.on_policy_distillation,
        {"advantages": X, "log_probs": X, "teacher_log_probs": X, "loss_mask": X},
    ),
    "importance_weighted_distillation": (
        partial(advantages.importance_weighted_distillation, batch=BATCH),
        {"log_probs": X, "teacher_log_probs": X},
    ),
    "gae": (partial(advantages.gae, batch=BATCH), {"rewards": X, "values": X}),
    "discounted_returns": (partial(advantages.discounted_returns, batch=BATCH), {"rewards": X}),
    "token_rewards": (partial(advantages.token_rewards, batch=BATCH), {"rewards": REWARDS}),
    "spread": (partial(advantages.spread, batch=BATCH), {"x": REWARDS}),
    "Value": (value_loss, {"values": X}),
    "kl_divergence": (kl_divergence, {"log_probs": X, "ref_log_probs": X, "importance_ratio": X}),
    "proximal_log_probs": (
        partial(proximal_log_probs, version=3),
        {"log_probs": X, "rollout_log_probs": X, "policy_versions": IDS},
    ),
    "log_probs_from_logits": (log_probs_from_logits, {"logits": HIDDEN, "targets": IDS}),
    "log_probs_from_hidden": (
        log_probs_from_hidden,
        {"hidden": HIDDEN, "head": KERNEL, "targets": IDS, "where": X},
    ),
    "divergence_from_hidden": (
        divergence_from_hidden,
        {
            "hidden": HIDDEN,
            "head": KERNEL,
            "teacher_hidden": HIDDEN,
            "teacher_head": KERNEL,
            "where": X,
        },
    ),
    "segment_sum": (partial(segment_sum, num_segments=2), {"x": X, "segment_ids": IDS}),
    "shift_left": (shift_left, {"x": X, "segment_ids": IDS}),
    "redistribute": (
        partial(redistribute, parallel=None, source="contiguous", target="contiguous"),
        {"x": X},
    ),
    "scan_affine": (scan_affine, {"a": X, "b": X, "segment_ids": IDS}),
}
MOVE_ANY_NUMBERS = ("segment_sum", "shift_left", "redistribute", "scan_affine")
OPTIONAL = {"where", "importance_ratio", "segment_ids", "among", "rollout_ids"}


@pytest.mark.parametrize("function", TAKE_ARRAYS)
def test_an_argument_is_named(function):
    call, arguments = TAKE_ARRAYS[function]
    call(**arguments)
    for name, x in arguments.items():
        bad = {"text": "x", "no rows": x[0]}
        if name not in OPTIONAL:
            bad["none"] = None
        if function not in MOVE_ANY_NUMBERS:
            bad |= {"complex": np.asarray(x).astype(complex), "list": x.tolist()}
        for how, wrong in bad.items():
            with pytest.raises((TypeError, ValueError)) as found:
                call(**{**arguments, name: wrong})
            assert named(name, str(found.value)), (name, how, str(found.value))


@pytest.mark.parametrize("name", ["coef", "kl", "target", "samples", "horizon"])
def test_numbers_of_the_adaptive_coefficient(name):
    numbers = {"coef": 0.1, "kl": jnp.float32(0.2), "target": 0.1, "samples": 4, "horizon": 100.0}
    adaptive_kl_coef(**numbers)
    for wrong in ("x", None, float("nan"), jnp.ones(2)):
        with pytest.raises(ValueError, match=f"{name}: got .*, expected"):
            adaptive_kl_coef(**{**numbers, name: wrong})


def test_versions_are_integers():
    for wrong in ("x", None, 1.5, np.array([1])):
        with pytest.raises(TypeError, match=r"version: got .*, expected an integer"):
            proximal_log_probs(X, X, IDS, wrong)
        with pytest.raises(TypeError, match=r"version: got .*, expected an integer"):
            staleness_metrics(BATCH, wrong)
