"""Malformed batches and configs: each is an error that names the argument, what came and what
was expected.
"""

import dataclasses
import math
import os
import pickle
import re
import tracemalloc
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from padded_batches import IDS, ONES, aligned, padded, shifted, thd
from policy_steps import normalizer_of

from examples.trainer.spikes import load_batch, save_batch
from jaxppo import (
    KL,
    PPO,
    SFT,
    Head,
    LoRA,
    OffPolicyConfig,
    ParallelMesh,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    Value,
    advantages,
    log_probs_from_hidden,
    log_probs_from_logits,
    loss_from_stats,
    make_parallel_mesh,
    policy_loss,
    policy_losses,
)
from jaxppo.policy.off_policy import Rejection
from sharding import pack

V = 16
INF = math.inf
NAN = math.nan


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def sample(**changes):
    return Sample(
        **{"tokens": [5, 6, 7, 8], "response_start": 2, "advantages": [0.5, -0.5]} | changes
    )


def packed(*samples, **options):
    return RolloutBatch.from_samples(samples or [sample(), sample()], **{"row_length": 8} | options)


BATCH = packed(sample(old_log_probs=[-1.0, -2.0], reward=1.0, group_id=0), row_length=8)


def changed(name, value=None, at=None):
    """The batch with another array, or with one value of it replaced."""
    if at is not None:
        array = np.array(getattr(BATCH, name))
        array[at] = value
        value = array
    return dataclasses.replace(BATCH, **{name: value})


def validated(*args, **kwargs):
    changed(*args, **kwargs).validate(V)


LOG_PROBS = np.full((1, 8), -1.0, np.float32)


def lost(batch=BATCH, log_probs=LOG_PROBS, config=None, **options):
    return policy_loss(TokenStats(log_probs), batch, config or PolicyLossConfig(), **options)


BATCHES = {
    # one sample
    "no tokens' dtype": (partial(sample, tokens=["a", "b", "c", "d"]), "tokens: got <U1"),
    "tokens of two dimensions": (
        partial(sample, tokens=[[1, 2], [3, 4]]),
        r"tokens: got shape \(2, 2\)",
    ),
    "ragged tokens": (partial(sample, tokens=[1, [2, 3], 4, 5]), r"tokens: got \[1, \[2, 3\]"),
    "tokens that are a number": (partial(sample, tokens=5), r"tokens: got shape \(\)"),
    "tokens of floats": (partial(sample, tokens=[1.0, 2.0, 3.0, 4.0]), "tokens: got float64"),
    "tokens of bools": (partial(sample, tokens=[True, False, True, True]), "tokens: got bool"),
    "tokens below 0": (partial(sample, tokens=[1, 2, -3, 4]), "tokens: got -3 to 4"),
    "tokens beyond 32 bits": (
        partial(sample, tokens=[1, 2, 2**40, 4]),
        "tokens: got 1 to 1099511627776",
    ),
    "a None among tokens": (
        partial(sample, tokens=[1, None, 3, 4]),
        r"tokens: got object \[1, None",
    ),
    "no tokens": (partial(sample, tokens=None), r"tokens: got"),
    "a response before the first token": (
        partial(sample, response_start=0),
        "response_start: got 0",
    ),
    "a response beyond the end": (partial(sample, response_start=9), "response_start: got 9"),
    "a response at half a token": (partial(sample, response_start=1.5), "response_start: got 1.5"),
    "a response at a text": (partial(sample, response_start="2"), "response_start: got '?2"),
    "neither a start nor a mask": (partial(Sample, [1, 2]), "response_start, loss_mask: got None"),
    "a mask of another length": (partial(sample, loss_mask=[0, 1]), r"loss_mask: got shape \(2,\)"),
    "a mask of halves": (
        partial(sample, loss_mask=[0, 0, 0.5, 1]),
        r"loss_mask: got \[0, 0, 0.5, 1\]",
    ),
    "a mask of NaN": (
        partial(sample, loss_mask=[0, 0, NAN, 1]),
        r"loss_mask: got \[0, 0, nan, 1\]",
    ),
    "a mask of texts": (partial(sample, loss_mask=["0", "0", "1", "1"]), r"loss_mask: got \['0'"),
    "a mask on the prompt": (
        partial(sample, loss_mask=[0, 1, 1, 1]),
        "loss_mask: got 1 at token 1",
    ),
    "a reward of texts": (partial(sample, reward="good"), "reward: got 'good'"),
    "an infinite reward": (partial(sample, reward=INF), "reward: got inf"),
    "an id of a float": (partial(sample, sample_id=1.0), "sample_id: got 1.0"),
    "an id of a bool": (partial(sample, rollout_id=True), "rollout_id: got True"),
    "an id below 0": (partial(sample, group_id=-1), "group_id: got -1"),
    "advantages of the whole sequence": (
        partial(sample, advantages=[0.1] * 4),
        r"advantages: got shape \(4,\)",
    ),
    "advantages of all samples": (
        partial(sample, advantages=[[0.5]]),
        r"advantages: got shape \(1, 1\)",
    ),
    "advantages of texts": (partial(sample, advantages=["a", "b"]), "advantages: got <U1"),
    "ragged log-probs": (
        partial(sample, old_log_probs=[-1.0, [-2.0]]),
        r"old_log_probs: got \[-1.0, \[-2.0\]\]",
    ),
    "complex values": (partial(sample, values=[1j, 2j]), "values: got complex128"),
    "versions of floats": (
        partial(sample, policy_versions=[0.0, 1.0]),
        "policy_versions: got float64",
    ),
    "versions that would be cut to i32": (
        partial(validated, "policy_versions", np.full(BATCH.tokens.shape, 2**32 - 2)),
        "policy_versions: got 4294967294, expected integers of at most 2147483647",
    ),
    "a nucleus of another length": (partial(sample, nucleus=[[1]]), "nucleus: got 1 sets"),
    # samples
    "no samples": (partial(RolloutBatch.from_samples, [], row_length=8), "samples: got none"),
    "a dictionary for a sample": (partial(packed, {"tokens": [1, 2]}), r"samples\[0\]: got dict"),
    "a sample longer than a row": (
        partial(packed, sample(), row_length=3),
        "sequences: got 4 tokens",
    ),
    "a row of no length": (partial(packed, sample(), row_length=0), "row_length: got 0"),
    "a row of half a token": (partial(packed, sample(), row_length=7.5), "row_length: got 7.5"),
    "advantages of some": (
        partial(packed, sample(), sample(advantages=None)),
        "advantages: got None in sample 1",
    ),
    "one id twice": (
        partial(packed, sample(sample_id=3), sample(sample_id=3)),
        "sample_id: got 3 for samples 0 and 1",
    ),
    "too few rows": (partial(packed, *[sample()] * 5, rows=2), "rows: got 2"),
    # padded arrays
    "prompts of one dimension": (
        partial(padded, prompt_ids=IDS[0]),
        r"prompt_ids: got shape \(4,\)",
    ),
    "prompts of floats": (partial(padded, prompt_ids=IDS * 1.0), "prompt_ids: got float64"),
    "another number of completions": (
        partial(padded, completion_ids=np.ones((2, 4), int)),
        r"prompt_ids: got shape",
    ),
    "a mask of other completions": (
        partial(padded, completion_mask=ONES[:, :2]),
        r"completion_mask: got shape \(1, 2\)",
    ),
    "a completion mask of texts": (
        partial(padded, completion_mask=IDS.astype(str)),
        "completion_mask: got <U",
    ),
    "advantages of other rows": (
        partial(padded, advantages=np.ones(3)),
        r"advantages: got shape \(3,\)",
    ),
    "rewards per token": (partial(padded, rewards=np.ones((1, 4))), r"rewards: got shape \(1, 4\)"),
    "group ids of floats": (partial(padded, group_ids=np.ones(1)), "group_ids: got float64"),
    "an array that is none": (
        partial(padded, advantage=np.ones(1)),
        "advantage: got an unknown array",
    ),
    # rows
    "segments of floats": (partial(aligned, segment_ids=ONES * 1.0), "segment_ids: got float64"),
    "positions of another length": (
        partial(aligned, positions=IDS[:, :2]),
        r"positions: got shape \(1, 2\)",
    ),
    "targets of another row": (
        partial(shifted, targets=np.ones((2, 4), int)),
        r"targets: got shape \(2, 4\)",
    ),
    "lengths for ends": (
        partial(thd, cu_seqlens=np.array([4, 0])),
        r"cu_seqlens: got \[4, 0\] in row 0, expected 0, then",
    ),
    "ends of floats": (
        partial(thd, cu_seqlens=np.array([0.0, 4.0])),
        "cu_seqlens: got float64, expected integers",
    ),
    "an unknown alignment": (
        partial(thd, aligned="left"),
        "aligned: got 'left', expected one of 'token', 'target'",
    ),
    "rewards of other segments": (
        partial(aligned, rewards=np.ones((1, 3))),
        r"rewards: got shape \(1, 3\)",
    ),
    "fewer segments than there are": (
        partial(aligned, segment_ids=3 * ONES, num_segments=2),
        "num_segments: got 2",
    ),
    # batches, checked on the host
    "a token beyond the vocabulary": (
        partial(validated, "tokens", 16, (0, 2)),
        "tokens: got 16 at row 0, position 2",
    ),
    "a target below 0": (
        partial(validated, "targets", -1, (0, 1)),
        "targets: got -1 at row 0, position 1",
    ),
    "a segment beyond S": (
        partial(validated, "segment_ids", 2, (0, 7)),
        "segment_ids: got 2 at row 0",
    ),
    "a hole in a segment": (
        partial(validated, "segment_ids", 0, (0, 1)),
        "segment_ids: got|positions: got",
    ),
    "positions out of order": (
        partial(validated, "positions", 0, (0, 2)),
        "positions: got 0 at row 0, position 2",
    ),
    "a mask on padding": (
        partial(validated, "loss_mask", 1, (0, 7)),
        "loss_mask: got 1.* at row 0, position 7",
    ),
    "a mask of two": (
        partial(validated, "loss_mask", 2, (0, 1)),
        "loss_mask: got 2.* at row 0, position 1",
    ),
    "a NaN advantage": (
        partial(validated, "advantages", NAN, (0, 1)),
        "advantages: got nan at row 0, position 1",
    ),
    "a log-prob above 0": (
        partial(validated, "old_log_probs", 0.5, (0, 1)),
        "old_log_probs: got 0.5 at row 0",
    ),
    "advantages of other rows of a batch": (
        partial(validated, "advantages", np.ones((2, 8))),
        r"advantages: got shape",
    ),
    "tokens of floats in a batch": (
        partial(validated, "tokens", np.ones((1, 8))),
        "tokens: got dtype float64",
    ),
    "an id of a segment that is not there": (
        partial(validated, "sample_ids", -1, (0, 0)),
        "sample_ids: got -1",
    ),
    "a vocabulary of nothing": (partial(BATCH.validate, 0), "vocab_size: got 0"),
    # batches at a loss
    "a loss of no advantages": (partial(lost, changed("advantages")), "batch.advantages: got None"),
    "a loss of no old log-probs": (
        partial(lost, changed("old_log_probs")),
        "batch.old_log_probs: got None",
    ),
    "log-probs of another batch": (
        partial(lost, log_probs=LOG_PROBS[:, :4]),
        r"stats.log_probs: got shape \(1, 4\)",
    ),
    "log-probs of integers": (
        partial(lost, log_probs=ones(1, 8, dtype=np.int32)),
        "stats.log_probs: got dtype int32",
    ),
    "a batch that is a dictionary": (partial(lost, {"tokens": IDS}), "batch: got dict"),
    "statistics that are an array": (
        partial(policy_loss, LOG_PROBS, BATCH, PolicyLossConfig()),
        "stats: got",
    ),
    "a KL of no reference": (
        partial(lost, config=PolicyLossConfig(kl=KL(0.1))),
        "batch.ref_log_probs: got None",
    ),
    "a value loss of no returns": (
        partial(loss_from_stats, LOG_PROBS, BATCH, Value()),
        "batch.returns: got None",
    ),
    "an SFT loss of other rows": (
        partial(loss_from_stats, TokenStats(LOG_PROBS[:, :4]), BATCH, SFT()),
        r"stats.log_probs: got shape",
    ),
    "groups of other segments": (
        partial(advantages.grpo, np.ones((1, 2)), np.ones((1, 3), int)),
        "group_ids: got",
    ),
    "rewards of one dimension": (
        partial(advantages.grpo, np.ones(2), np.ones(2, int)),
        "rewards: got",
    ),
}


HIDDEN = ones(1, 4, 6)
KERNEL = ones(6, V)
TARGETS = np.zeros((1, 4), np.int32)
ROWS = ones(1, 8)


def head(kernel=KERNEL, hidden=HIDDEN, targets=TARGETS, call=None, **options):
    return log_probs_from_hidden(hidden, Head(kernel, **options), targets, **(call or {}))


def mesh(text, **options):
    return make_parallel_mesh(text, **options)


def roles(**given):
    return ParallelMesh(
        jax.make_mesh((4, 2), ("a", "b"), (jax.sharding.AxisType.Auto,) * 2), **given
    )


CONFIGS = {
    "a loss by name": (partial(PolicyLossConfig, "ppo"), "loss: got 'ppo'"),
    "a loss that is a class": (partial(PolicyLossConfig, PPO), "loss: got <class"),
    "a KL that is a number": (
        partial(PolicyLossConfig, kl=0.1),
        r"kl: got 0.1, expected KL\(0.1\) or None",
    ),
    "an entropy coefficient of NaN": (
        partial(PolicyLossConfig, entropy_coef=NAN),
        "entropy_coef: got nan",
    ),
    "an entropy coefficient of text": (
        partial(PolicyLossConfig, entropy_coef="0.1"),
        "entropy_coef: got",
    ),
    "an unknown ratio": (partial(PolicyLossConfig, ratio_to="new"), "ratio_to: got 'new'"),
    "an unknown aggregation": (
        partial(PolicyLossConfig, aggregation="mean"),
        "aggregation: got 'mean'",
    ),
    "an aggregation that is a list": (
        partial(PolicyLossConfig, aggregation=["token_mean"]),
        r"aggregation: got \[",
    ),
    "a norm of nothing": (
        partial(PolicyLossConfig, aggregation_norm=2.0),
        "aggregation_norm: got 2.0",
    ),
    "an unknown metric aggregation": (
        partial(PolicyLossConfig, metric_aggregation="max"),
        "metric_aggregation: got",
    ),
    "corrections by name": (partial(PolicyLossConfig, off_policy="tis"), "off_policy: got str"),
    "a clip below 0": (partial(PPO, clip_low=-0.1), "clip_low: got -0.1"),
    "an infinite clip": (partial(PPO, clip_high=INF), "clip_high: got inf"),
    "a dual clip of 1": (partial(PPO, dual_clip=1.0), "dual_clip: got 1.0"),
    "a clip of two numbers": (partial(PPO, clip_high=(0.2, 0.3)), "clip_high: got"),
    "an unknown loss": (partial(policy_losses.by_name, "pop"), "name: got 'pop'"),
    "an unknown parameter of a loss": (
        partial(policy_losses.by_name, "ppo", clip=0.2),
        "clip: got",
    ),
    "a KL of an unknown estimator": (partial(KL, 0.1, "k4"), "estimator: got 'k4'"),
    "a KL of NaN": (partial(KL, NAN), "coef: got nan"),
    "a KL weighed by a text": (partial(KL, 0.1, importance="no"), "importance: got 'no'"),
    "weights of an unknown level": (
        partial(OffPolicyConfig, weights="word"),
        "weights: got 'word'",
    ),
    "bounds out of order": (
        partial(OffPolicyConfig, weights="token", low=3.0, high=2.0),
        "low, high: got|low: got",
    ),
    "bounds of NaN": (
        partial(OffPolicyConfig, weights="token", high=NAN),
        "high: got nan|low, high: got",
    ),
    "a bound of text": (
        partial(OffPolicyConfig, weights="token", high="2"),
        "high: got '2'|low, high: got",
    ),
    "rejections that are one": (
        partial(OffPolicyConfig, rejections=Rejection("token_k3")),
        "rejections: got",
    ),
    "a rejection by name": (
        partial(OffPolicyConfig, rejections=("token_k3",)),
        "rejections: got str",
    ),
    "a veto of 1": (partial(OffPolicyConfig, veto=1.0), "veto: got 1.0"),
    "a veto of text": (partial(OffPolicyConfig, veto="0.1"), "veto: got '0.1'"),
    "a delta below 0": (partial(OffPolicyConfig, opsm_delta=-1.0), "opsm_delta: got -1.0"),
    "a delta of NaN": (partial(OffPolicyConfig, opsm_delta=NAN), "opsm_delta: got nan"),
    "an unknown statistic": (partial(Rejection, "token_k4"), "statistic: got 'token_k4'"),
    "an aggregation of nothing": (partial(normalizer_of, BATCH, "mean"), "aggregation: got 'mean'"),
    # heads
    "a kernel of three dimensions": (
        partial(head, ones(6, V, 1)),
        "kernel: got|head.kernel: got",
    ),
    "a kernel of integers": (
        partial(head, ones(6, V, dtype=np.int32)),
        "head.kernel: got dtype int32",
    ),
    "a kernel of other rows": (
        partial(head, ones(5, V)),
        "(head|head.kernel|hidden|kernel): got",
    ),
    "an unknown layout": (partial(head, layout="vv"), "(head.)?layout: got 'vv'"),
    "a vocabulary beyond the kernel": (partial(head, vocab_size=99), "(head.)?vocab_size: got 99"),
    "a vocabulary of 0": (partial(head, vocab_size=0), "(head.)?vocab_size: got 0"),
    "a bias of other columns": (partial(head, bias=ones(3)), "(head.)?bias: got"),
    "a soft-cap of 0": (partial(head, softcap=0.0), "(head.)?softcap: got 0.0"),
    "a scale of NaN": (partial(head, scale=NAN), "(head.)?scale: got nan"),
    "adapters of other ranks": (
        partial(head, lora=LoRA(ones(6, 2), ones(3, V), 1.0)),
        "(head.)?lora",
    ),
    "hidden states of two dimensions": (partial(head, hidden=HIDDEN[0]), "hidden: got"),
    "targets of floats": (
        partial(head, targets=TARGETS.astype(np.float32)),
        "targets: got dtype float32",
    ),
    "targets of other rows": (partial(head, targets=TARGETS[:, :2]), "(targets|hidden): got"),
    "a temperature of 0": (partial(head, call={"temperature": 0.0}), "temperature: got 0.0"),
    "a temperature of other rows": (
        partial(head, call={"temperature": ones(1, 3)}),
        "temperature: got",
    ),
    "an unknown entropy": (partial(head, call={"entropy": "both"}), "entropy: got 'both'"),
    "an unknown precision": (partial(head, call={"precision": "low"}), "precision: got 'low'"),
    "memory below 0": (partial(head, call={"memory": -1}), "memory: got -1"),
    "memory of text": (partial(head, call={"memory": "1GB"}), "memory: got '1GB'"),
    "a mask of other rows": (partial(head, call={"where": ones(1, 3, dtype=bool)}), "where: got"),
    "logits of two dimensions": (
        partial(log_probs_from_logits, ones(4, V), TARGETS),
        "logits: got",
    ),
    # meshes
    "a mesh of text": (partial(mesh, "two by four"), "mesh: got 'two by four'"),
    "a mesh of other devices": (partial(mesh, "dp=3"), r"mesh: got sizes 3=3"),
    "an axis twice": (partial(mesh, "dp=2,dp=4"), "mesh: got 'dp=4'"),
    "an unknown axis": (partial(mesh, "pp=8"), "mesh: got axis 'pp'"),
    "an unknown context layout": (
        partial(mesh, "cp=8", context_layout="ring"),
        "context_layout: got 'ring'",
    ),
    "a mesh that is a tuple": (partial(mesh, (2, 4)), r"description: got \(2, 4\)"),
    "axes without a role": (roles, "mesh: got axes a=4, b=2"),
    "one axis for two roles": (
        partial(roles, context="a", tensor="a", replicated="b"),
        "data, context, tensor, replicated: got",
    ),
    "a role of no axis": (partial(roles, data="c", replicated=("a", "b")), "data: got"),
    "a mesh in the place of roles": (partial(lost, parallel="dp=8"), "parallel: got str"),
    "a spec in the place of roles": (partial(lost, parallel=P("dp")), "parallel: got P,"),
    # packing
    "rows of 0": (partial(pack, [[1]], row_length=2, rows=0), "rows: got 0"),
    "rows of half": (partial(pack, [[1]], row_length=2, rows=1.5), "rows: got 1.5"),
    "buckets that are a number": (partial(pack, [[1]], row_length=2, buckets=4), "buckets: got 4"),
    "rows and buckets": (
        partial(pack, [[1]], row_length=2, rows=1, buckets=(1,)),
        "rows, buckets: got",
    ),
    "micro-batches of 0": (
        partial(pack, [[1]], row_length=2, micro_batches=0),
        "micro_batches: got 0",
    ),
    "loads of others": (
        partial(pack, [[1]], row_length=2, loads=[1, 2]),
        r"loads: got shape \(2,\)",
    ),
    "loads of NaN": (partial(pack, [[1]], row_length=2, loads=[NAN]), "loads: got"),
    # numbers of other functions
    "a clip of text": (partial(PPO, clip_low="0.2"), "clip_low: got"),
    "a coefficient of text": (partial(KL, "0.1"), "coef: got"),
    "bounds of a rejection out of order": (
        partial(Rejection, "token_k3", 2.0, 1.0),
        "low, high: got",
    ),
    "a bound of a rejection of NaN": (partial(Rejection, "token_k3", NAN), "low, high: got"),
    "means of weights by a text": (
        partial(OffPolicyConfig, weights="token", batch_normalize="no"),
        "batch_normalize: got",
    ),
    "rejections of a text": (partial(OffPolicyConfig, rejections="token_k3"), "rejections: got"),
    "a config that is a loss": (partial(lost, config=PPO()), "config: got PPO"),
    "a normalizer that is a number": (partial(lost, normalizer=3.0), "normalizer: got float"),
    "a role that is a number": (partial(roles, data=3, replicated=("a", "b")), "data: got 3"),
    "axes that are a text": (partial(mesh, "dp=8", explicit="yes"), "explicit: got"),
    "devices that are a number": (partial(mesh, "dp=8", devices=8), "devices: got"),
    "a discount above 1": (partial(advantages.gae, ROWS, ROWS, BATCH, gamma=1.5), "gamma: got 1.5"),
    "a discount of NaN": (partial(advantages.gae, ROWS, ROWS, BATCH, lam=NAN), "lam: got nan"),
    "values of other rows": (partial(advantages.gae, ROWS, ROWS[:, :4], BATCH), "values: got"),
    "a clip of values below 0": (
        partial(Value, clip=-1.0),
        "clip: got -1.0",
    ),
    "smoothing above 1": (
        partial(SFT, label_smoothing=1.5),
        "label_smoothing: got",
    ),
    "a temperature of text": (partial(head, call={"temperature": "1"}), "temperature: got"),
    "memory of NaN": (partial(head, call={"memory": NAN}), "memory: got nan"),
    "a sum in another dtype": (
        partial(head, call={"gradient_sum_dtype": "int8"}),
        "gradient_sum_dtype: got",
    ),
    "an adapter's scale of text": (
        partial(LoRA, ones(6, 2), ones(2, V), "1"),
        "(head.)?lora.scale: got",
    ),
}


@pytest.mark.parametrize("name", [*BATCHES, *CONFIGS])
def test_malformed(name):
    call, pattern = {**BATCHES, **CONFIGS}[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) in (ValueError, TypeError)  # and none of JAX's own
    assert re.match(pattern, message), message
    assert re.search(r": got .*, expected ", message, re.DOTALL), message


class Payload:
    """What a pickle would run."""

    ran = False

    def __reduce__(self):
        return setattr, (Payload, "ran", True)


FILES = {
    "no file": None,
    "a text": b"not a batch",
    "a pickle": pickle.dumps(Payload()),
    "an array of objects": {"tokens": np.array([Payload()], dtype=object)},
    "an array of another batch": {"token": np.ones(3)},
    "arrays without the rest": {"tokens": np.ones((1, 8), int)},
    "settings that are none": {**vars(BATCH), "static": np.array("[1]")},
}


@pytest.mark.parametrize("name", FILES)
def test_files_of_batches_are_data(name, tmp_path):
    path = tmp_path / "step_1.npz"
    content = FILES[name]
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        static = {"static": np.array("{}")}
        np.savez(path, **static | {k: x for k, x in content.items() if isinstance(x, np.ndarray)})
    with pytest.raises(
        ValueError, match=r"path: got .*step_1.npz, expected a batch that save_batch wrote"
    ):
        load_batch(path, make_parallel_mesh("dp=8"))
    assert not Payload.ran


def test_batches_come_back_with_their_extras(tmp_path):
    """Saving one with extras was a TypeError of the json module."""
    given = dataclasses.replace(
        BATCH,
        extras={
            "experts": np.arange(16, dtype=np.int32).reshape(1, 8, 2),
            "half": jnp.arange(8, dtype=jnp.bfloat16)[None],
            "small": np.arange(8, dtype=np.float16)[None],
        },
    )
    save_batch(tmp_path / "step_1.npz", given)
    found = load_batch(tmp_path / "step_1.npz", make_parallel_mesh("tp=8"))
    assert found.extras.keys() == given.extras.keys()
    for name, x in given.extras.items():
        assert found.extras[name].dtype == x.dtype
        np.testing.assert_array_equal(
            np.asarray(found.extras[name], np.float32), np.asarray(x, np.float32)
        )
    np.testing.assert_array_equal(found.tokens, given.tokens)


def test_a_pipe_is_refused_at_once(tmp_path):
    """It waited for somebody to write."""
    os.mkfifo(tmp_path / "step_1.npz")
    with pytest.raises(
        ValueError, match=r"path: got .*step_1.npz, expected a batch .*it is no file"
    ):
        load_batch(tmp_path / "step_1.npz", make_parallel_mesh("dp=8"))


BOMBS = {
    "an unknown array": ({"bomb": np.zeros(10**7, np.uint8)}, "an array 'bomb'"),
    "settings": ({"static": np.array(" " * 10**6)}, "'static', of at most 65536"),
    "an array unlike the tokens": (
        {"loss_mask": np.zeros((1, 9), np.uint8)},
        r"'loss_mask' of shape \(1, 9\) beside",
    ),
    "all together": (
        {"extras.a": np.zeros((1, 8, 5 * 10**6), np.uint8)},
        "bytes up to 'extras.a', of at most 1000000",
    ),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_unpacks_to_too_much_is_not_unpacked(bomb, tmp_path):
    """A file of 400 KB was unpacked to 400 MB before it was refused."""
    arrays, message = BOMBS[bomb]
    fields = {k: np.asarray(x) for k, x in vars(BATCH).items() if isinstance(x, np.ndarray)}
    np.savez_compressed(tmp_path / "step_1.npz", **{"static": np.array("{}")} | fields | arrays)
    mesh = make_parallel_mesh("dp=8")
    tracemalloc.start()
    with pytest.raises(ValueError, match=message):
        load_batch(tmp_path / "step_1.npz", mesh, most_bytes=10**6)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 10**7  # of 4 * 10**7


def test_the_table_is_as_long_as_it_says():
    assert len(BATCHES) >= 60
    assert len(CONFIGS) >= 40
    assert not BATCHES.keys() & CONFIGS.keys()
