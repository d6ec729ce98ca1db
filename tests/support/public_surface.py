"""Every public function and config class, found by introspection, each with a call that gives
all its arguments.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import os
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxppo
from jaxppo import (
    LoRA,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
)
from jaxppo.base.arrays import PER_TOKEN_VALUES
from jaxppo.contrib import draft
from jaxppo.head import HeadOptions
from jaxppo.losses import SFT, Part, TopKDistillation, explain_tokens, mtp
from jaxppo.mismatch import TokenMismatch
from jaxppo.policy_losses import ClipCov
from jaxppo.step import entropy as entropies

# The first has refusals of its own, in sharding/ and test_layouts_inputs; the second imports other
# packages; the third computes a dozen programs a call, see losses/test_own_losses.
ELSEWHERE = ("jaxppo.sharding", "jaxppo.integrations", "jaxppo.losses.testing")
R, T, S, H, V, K = 2, 10, 2, 4, 9, 2  # the last two positions of a row are padding


def _samples() -> list[Sample]:
    of_tokens = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs")
    made = []
    for i in range(4):
        values: dict[str, Any] = {name: [-1.0 - i, -2.0] for name in of_tokens}
        values |= {
            "values": [0.5, 0.25],
            "returns": [1.0, 0.5],
            "policy_versions": [3, 3],
            "loss_weights": [1.0, 0.5],
        }
        made.append(
            Sample(
                [1, 2, 3, 4],
                2,
                reward=float(i % 2),
                sample_id=i,
                group_id=i // 2,
                rollout_id=i,
                **values,
            )
        )
    return made


SAMPLES = _samples()
BATCH = RolloutBatch.from_samples(SAMPLES, row_length=T, rows=R)
BATCH = dataclasses.replace(
    BATCH, **{n: jnp.asarray(x) for n, x in vars(BATCH).items() if isinstance(x, np.ndarray)}
)
PLAIN = dataclasses.replace(BATCH, loss_weights=None)
HIDDEN = jnp.full((R, T, H), 0.5, jnp.float32)
KERNEL = jnp.ones((H, V), jnp.float32) * 0.1
LOG = jnp.full((R, T), -1.5, jnp.float32)
IDS = jnp.tile(jnp.array([2, -1]), (R, T, 1))
OF_IDS = jnp.full((R, T, K), -1.5, jnp.float32)
STATS = TokenStats(LOG, -LOG, LOG, LOG, -LOG, -LOG / 3, OF_IDS, IDS, OF_IDS)
MASK = BATCH.loss_mask
REWARDS = BATCH.rewards
GROUPS = BATCH.group_ids
ON_POLICY = PolicyLossConfig(ratio_to="current")
COVARIANCE = PolicyLossConfig(ClipCov())
EXTRAS = {"selected": MASK, "teacher_ids": IDS, "teacher_log_probs": OF_IDS}
GIVEN = dataclasses.replace(BATCH, extras=EXTRAS)
PARTS = {"policy": Part(PolicyLossConfig(), 1.0), "taught": Part(TopKDistillation(), 0.5)}
NORMALIZER = Normalizer.of(SFT(), BATCH)
EXPERTS = jnp.tile(IDS[:, :, None], (1, 1, 2, 1))  # of two layers
ROUTED = dataclasses.replace(BATCH, extras={"routed_experts": EXPERTS.at[..., 1].set(0)})
MTP = Normalizer.of(mtp.MTP(1), PLAIN)

SOFT: dict[str, Any] = {"parallel": None}
DENOMINATORS = {"aggregation": "token_mean", "aggregation_norm": None}
LOSS = {**SOFT, **DENOMINATORS, "normalizer": NORMALIZER}
DRAFT_IDS = np.arange(V, dtype=np.int32)
HEADS: dict[str, Any] = {"hidden": HIDDEN, "head": KERNEL, "temperature": 0.7}
OPTIONS: dict[str, Any] = dict.fromkeys(HeadOptions.__annotations__)
OPTIONS |= {"precision": "highest", "memory": 2**20, "follow_mask": True, "deterministic": False}
OPTIONS |= {"gradient_sum_dtype": "float32"}
AMONG = GROUPS >= 0
GROUPED = {
    **SOFT,
    "rewards": REWARDS,
    "group_ids": GROUPS,
    "among": AMONG,
    "rollout_ids": BATCH.rollout_ids,
}
TOP_K = {
    "ids": IDS,
    "teacher_log_probs": OF_IDS,
    "divergence": "forward_kl",
    "beta": 0.5,
    "tail": "bucket",
}
ALONE = {"singletons": "zero"}
SCALED = {"scale_by_std": True, "epsilon": 1e-6}
ROWS = {
    name: getattr(BATCH, name)
    for name in (*PER_TOKEN_VALUES, "rewards", "group_ids", "rollout_ids")
}
ROWS["extras"] = {"own": np.ones((R, T, 2))}
TOKENS = TokenMismatch(LOG, LOG, *(-LOG,) * 6)

# By name, the arguments of a call in which nothing is wrong.
CALLS: dict[str, dict[str, Any]] = {
    "Head": {
        "kernel": KERNEL, "bias": jnp.ones(V), "lora": LoRA(jnp.ones((H, 2)), jnp.ones((2, V)), 1.0), "layout": "hv",
        "logits_dtype": "float32", "softcap": 5.0, "scale": 1.0, "vocab_size": 8, "spec": None, "quantized": None,
    },
    "Head.of": {
        "module": KERNEL, "layout": "hv", "lora_scale": None, "dtype": None, "logits_dtype": "float32",
        "softcap": 5.0, "scale": 1.0, "vocab_size": 8, "spec": None, "quantized": None,
    },
    "Quantization": {"dtype": "int8", "block": 2, "hidden": True, "largest": 127.5, "powers_of_two": False},
    "QuantizedArray": {"values": jnp.ones((H, V), jnp.int8), "scale": jnp.ones((1, V))},
    "LoRA": {"a": jnp.ones((H, 2)), "b": jnp.ones((2, V)), "scale": 1.0},
    "log_probs_from_hidden": {
        **HEADS, **SOFT, **OPTIONS, "targets": BATCH.targets, "entropy": "metric", "logit_stats": ("log_z",),
        "top_k": 2, "nucleus_ids": IDS, "ids": IDS, "where": MASK > 0, "adapter_ids": None,
    },
    "log_probs_from_logits": {
        **SOFT, "logits": jnp.zeros((R, T, V)), "targets": BATCH.targets, "temperature": 0.7, "entropy": "metric",
        "logit_stats": ("log_z",), "top_k": 2, "nucleus_ids": IDS, "ids": IDS, "where": MASK > 0,
        "vocab_size": 8,
    },
    "compute_log_probs": {"apply": lambda params, batch: STATS, "params": {}, "micro_batches": BATCH},
    "Sample": {
        f.name: getattr(SAMPLES[0], f.name) for f in dataclasses.fields(Sample)
    } | {"loss_mask": [0, 0, 1, 1], "nucleus": [[3], [4, 5]]},
    "Sample.from_vllm": {
        "output": {
            "prompt_token_ids": [5, 6],
            "outputs": [{"index": 0, "token_ids": [7, 8], "logprobs": [{7: -0.5}, {8: -1.5}], "finish_reason": "stop"}],
        },
        "choice": 0, "loss_mask": [1, 0], "truncated": "train",
    },
    "Sample.from_sglang": {
        "output": {
            "input_ids": [5, 6],
            "meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [(-0.5, 7, None)]},
        },
        "loss_mask": [1], "truncated": "train",
    },
    "RolloutBatch.from_samples": {
        "samples": SAMPLES, "row_length": T, "parallel": None, "rows": R, "buckets": None, "micro_batches": None,
        "max_tokens": None, "num_segments": S, "share_prefixes": False, "mtp_depths": 0, "twin": SAMPLES,
    },
    "TokenTrees.from_samples": {
        "samples": SAMPLES, "row_length": T, "batch_row_length": 2 * T, "parallel": None, "head_extras": [],
        "rows": R, "buckets": None, "micro_batches": None, "max_tokens": None, "num_segments": 8,
    },
    "RolloutBatch.from_padded": {
        **SOFT, "prompt_ids": np.ones((2, 3), int), "completion_ids": np.ones((2, 4), int),
        "completion_mask": np.ones((2, 4)), "prompt_mask": np.ones((2, 3)), "attention_mask": np.ones((2, 7)),
        "pad_id": 0, "advantages": np.ones((2, 4)), "old_log_probs": -np.ones((2, 4)), "rewards": np.ones(2),
        "ref_log_probs": -np.ones((2, 4)), "rollout_log_probs": -np.ones((2, 4)), "values": np.ones((2, 4)),
        "returns": np.ones((2, 4)), "policy_versions": np.ones((2, 4), int), "loss_weights": np.ones((2, 4)),
        "group_ids": np.ones(2, int), "rollout_ids": np.ones(2, int), "extras": {"own": np.ones((2, 4, 2))},
    },
    "RolloutBatch.from_token_aligned": {
        **SOFT, **ROWS, "tokens": BATCH.tokens, "segment_ids": BATCH.segment_ids, "positions": BATCH.positions,
        "loss_mask": MASK, "num_segments": S,
    },
    "RolloutBatch.from_target_aligned": {
        **SOFT, **ROWS, "tokens": BATCH.tokens, "targets": BATCH.targets, "segment_ids": BATCH.segment_ids,
        "positions": BATCH.positions, "loss_mask": MASK, "num_segments": S,
    },
    "RolloutBatch.from_cu_seqlens": {
        **SOFT, **ROWS, "tokens": BATCH.tokens, "cu_seqlens": np.array([[0, 4, 8]] * R), "loss_mask": MASK,
        "aligned": "target", "cu_seqlens_padded": np.array([[0, 4, 8]] * R), "targets": BATCH.targets,
        "row_length": T, "num_segments": S,
    },
    "RolloutBatch.validate": {"vocab_size": V, "normalizer": NORMALIZER},
    "accumulate_gradients": {
        **SOFT, "loss_fn": lambda w, x: ((w * x).sum(), {}), "micro_batches": jnp.ones((2, 3)),
    },
    "assert_packing_invariant": {
        **SOFT, "hidden_fn": lambda params, batch: jnp.ones((*batch.tokens.shape, 2)), "params": {}, "vocab_size": 9,
        "tolerance": 1e-4, "seed": 0,
    },
    "StepTerm.of": {"fn": lambda means: means**2, "sums": jnp.ones(2), "counts": jnp.ones(2)},
    "finalize_metrics": {"metrics": {"a": jaxppo.base.metrics.Metric(jnp.float32(1), jnp.float32(1))}},
    "explain_broken_rules": {"broken_rules": 3},
    "PolicyLossConfig": {
        f.name: getattr(PolicyLossConfig(kl=jaxppo.KL(0.1), off_policy=OffPolicyConfig()), f.name)
        for f in dataclasses.fields(PolicyLossConfig)
    },
    "policy_loss": {
        **SOFT, "stats": STATS, "batch": GIVEN, "config": COVARIANCE, "normalizer": NORMALIZER,
    },
    "policy_loss_from_hidden": {
        **HEADS, **SOFT, **OPTIONS, "batch": GIVEN, "config": COVARIANCE, "normalizer": NORMALIZER,
        "nucleus_ids": jnp.concatenate([BATCH.targets[..., None], IDS], -1), "adapter_ids": None,
    },
    "loss_from_stats": {**SOFT, "stats": STATS, "batch": GIVEN, "loss": SFT(), "normalizer": NORMALIZER},
    "Unusable.of": {"system": "trl"},
    "by_row": {"losses": {"sft": SFT(z_loss=0.1)}, "which": "own", "numbers": {"sft": {"z_loss": "own"}}},
    "tinker": {"loss_fn": "ppo"},
    "explain_tokens": {**SOFT, "stats": STATS, "batch": GIVEN, "loss": SFT(), "normalizer": NORMALIZER},
    "loss_from_hidden": {
        **HEADS, **SOFT, **OPTIONS, "batch": GIVEN, "loss": PolicyLossConfig(), "normalizer": NORMALIZER,
        "nucleus_ids": jnp.concatenate([BATCH.targets[..., None], IDS], -1), "adapter_ids": None,
    },
    "Normalizer.of": {**SOFT, "loss": PARTS, "micro_batches": BATCH},
    "SFT": {**DENOMINATORS, "label_smoothing": 0.1, "z_loss": 0.1, "dft": False, "logit_stats": ("log_z",)},
    "Value": {
        **DENOMINATORS, "clip": 0.2, "factor": 0.5, "huber_delta": 1.0, "clip_fraction": "worse",
        "metric_aggregation": "token_mean",
    },
    "TopKDistillation": {
        **DENOMINATORS, "divergence": "forward_kl", "beta": 0.5, "tail": "bucket", "ids": "teacher_ids",
        "log_probs": "teacher_log_probs", "target_log_probs": "teacher_target_log_probs", "unusable": "nan",
    },
    "ScoreCentering": {
        "config": ON_POLICY, "tail": "renormalise", "ids": "sampler_ids", "log_probs": "sampler_log_probs",
    },
    "ReferenceKL": {**DENOMINATORS, "estimator": "k3"},
    "discounted_returns": {**SOFT, "rewards": LOG, "batch": BATCH, "gamma": 0.9, "masked": "skip", "mask": MASK},
    "dr_grpo": {**GROUPED, **ALONE},
    "drop_equal_groups": {"samples": SAMPLES, "keep_lone": False, "tolerance": 0.1},
    "accepted_samples": {**SOFT, "batch": BATCH, "config": OffPolicyConfig(veto=0.1), "unusable": "nan"},
    "explained_variance": {**SOFT, "values": BATCH.values, "returns": LOG * BATCH.values, "mask": MASK},
    "gae": {
        **SOFT, "rewards": LOG, "values": BATCH.values, "batch": BATCH, "gamma": 0.9, "lam": 0.9, "value_lam": 1.0,
        "length_alpha": 0.5, "last_values": REWARDS, "mask": MASK,
    },
    "last_values": {**SOFT, "values": BATCH.values, "batch": BATCH, "truncated": GROUPS >= 0},
    "gdpo": {
        **GROUPED, "rewards": [REWARDS, REWARDS], "batch": BATCH, "weights": [1.0, 0.5],
        "leave_one_out": False, "whitened": "tokens", "epsilon": 1e-6,
    },
    "gpg": {**GROUPED, **ALONE, "f_norm": 1.0},
    "grpo": {**GROUPED, **ALONE, **SCALED, "leave_one_out": False},
    "maxrl": {**GROUPED, **ALONE, "epsilon": 0.1},
    "on_policy_distillation": {
        "advantages": LOG, "log_probs": LOG, "teacher_log_probs": LOG, "loss_mask": MASK, "coef": 1.0, "alpha": 0.5,
    },
    "importance_weighted_distillation": {
        **SOFT, "log_probs": LOG, "teacher_log_probs": LOG, "batch": BATCH, "gain": 0.5,
    },
    "opo": {**GROUPED, **ALONE, "lengths": REWARDS + 1},
    "optimal_token_baseline": {
        **SOFT, "returns": LOG, "stats": STATS, "group_ids": GROUPS, "batch": BATCH, "place": "position",
        "weights": -LOG, "among": AMONG, "rollout_ids": BATCH.rollout_ids, "singletons": "reward", "epsilon": 1e-8,
    },
    "overlong_penalty": {"lengths": REWARDS, "max_length": 4, "buffer": 2, "factor": 1.0},
    "pass_at_k": {**GROUPED, **SCALED},
    "pass_rates": {**GROUPED, "at_least": 1.0},
    "reinforce_plus_plus": {**SOFT, "rewards": LOG, "batch": BATCH, "gamma": 0.9, "masked": "skip"},
    "reinforce_plus_plus_baseline": {
        **GROUPED, **ALONE, "batch": BATCH, "kl": -LOG, "kl_coef": 0.1, "whitened": True,
    },
    "remax": {"rewards": REWARDS, "baselines": REWARDS, "sample_ids": BATCH.sample_ids},
    "gigpo": {
        **GROUPED, **ALONE, **SCALED, "returns": REWARDS, "state_ids": GROUPS, "step_coef": 1.0,
    },
    "state_groups": {"group_ids": [7, 8], "states": ["a", None]},
    "step_returns": {"rewards": [1.0, 0.0], "rollout_ids": [3, 3], "gamma": 0.9},
    "rloo": {**GROUPED, **ALONE, **SCALED},
    "spread": {**SOFT, "x": REWARDS, "batch": BATCH},
    "standardize": {
        **GROUPED, "mean": "step", "std": "step", "leave_one_out": False, "unbiased": True, "epsilon": 1e-5,
    },
    "token_rewards": {**SOFT, "rewards": REWARDS, "batch": BATCH, "kl": -LOG, "kl_coef": 0.1},
    "whiten": {**SOFT, "x": BATCH.returns, "mask": MASK, "among": MASK > 0, "shift_mean": True, "epsilon": 1e-12},
    "align_spans": {"ends": [1, 3, 5, 6], "teacher_ends": [3, 4, 6, 8]},
    "span_distillation": {
        "log_probs": np.log([0.5, 0.4]), "teacher_log_probs": np.log([0.3]), "spans": np.array([0, 0]),
        "teacher_spans": np.array([0]), "coef": 1.0,
    },
    "Extra": {"values": [[3, 4], [5, 6]], "at": "predicting", "fill": -1},
    "by_sample": {**SOFT, "explained": explain_tokens(STATS, BATCH, SFT()), "batch": BATCH},
    "write_tokens": {"path": os.devnull, "explained": explain_tokens(STATS, BATCH, SFT()), "batch": BATCH},
    "routed_experts": {"rows": np.array([3, 1, 1, 2], "<i4").tobytes(), "tokens": 3, "layers": 1, "top_k": 2},
    "routing_metrics": {
        **SOFT, "own": EXPERTS, "batch": ROUTED, "log_probs": LOG, "replayed_log_probs": LOG, "name": "routed_experts",
    },
    "adaptive_clip": {
        **SOFT, "stats": STATS, "batch": BATCH, "ratio_to": "rollout", "target": 1.0, "low": (0.6, 0.8),
        "high": (1.2, 2.0), "step": 0.05, "first": "high", "unusable": "nan",
    },
    "covariance_mask": {**SOFT, "stats": STATS, "batch": BATCH, "config": COVARIANCE, "key": jax.random.key(0)},
    "AdaptiveEntropy.init": {"coef": 0.1},
    "AdaptiveEntropy.coef": {"state": entropies.AdaptiveEntropy().init()},
    "AdaptiveEntropy.update": {"state": entropies.AdaptiveEntropy().init(), "entropy": 0.1},
    "entropy_metrics": {**SOFT, "stats": STATS, "batch": BATCH, "quantiles": (0.5,), "starts": (0, 2)},
    "renormalised_entropy": {"log_probs": LOG},
    "adaptive_kl_coef": {"coef": 0.1, "kl": jnp.float32(0.1), "target": 0.1, "samples": 4, "horizon": 100.0},
    "kl_divergence": {"log_probs": LOG, "ref_log_probs": LOG, "estimator": "k3", "importance_ratio": -LOG},
    "check_top_k": {"ids": np.array([[1, 2]]), "log_probs": np.full((1, 2), -1.0), "vocab_size": V},
    "distillation_loss": {
        **HEADS, **LOSS, **OPTIONS, "teacher_hidden": HIDDEN, "teacher_head": KERNEL, "batch": BATCH,
        "divergence": "jensen_shannon", "beta": 0.5, "teacher_hidden_spec": None,
    },
    "divergence_from_hidden": {
        **HEADS, **SOFT, **OPTIONS, "teacher_hidden": HIDDEN, "teacher_head": KERNEL,
        "divergence": "jensen_shannon", "beta": 0.5, "where": MASK > 0, "teacher_hidden_spec": None,
    },
    "top_k_divergence": {**TOP_K, "log_probs": OF_IDS},
    "draft_loss": {
        **HEADS, **SOFT, **OPTIONS, "hidden": [HIDDEN], "policy_hidden": HIDDEN, "policy_head": KERNEL, "batch": PLAIN,
        "loss": draft.Draft(objective="likelihood"), "normalizers": Normalizer.of(draft.Draft(1), PLAIN),
        "draft_ids": DRAFT_IDS,
    },
    "draft_metrics": {
        **HEADS, **SOFT, **OPTIONS, "hidden": [HIDDEN], "policy_hidden": HIDDEN, "policy_head": KERNEL, "batch": PLAIN,
        "draft_ids": DRAFT_IDS,
    },
    "draft_ids_of_d2t": {"d2t": DRAFT_IDS * 0, "vocab_size": V},
    "draft_ids_of_counts": {"counts": DRAFT_IDS, "size": 3},
    "draft_targets": {"batch": PLAIN, "draft_ids": DRAFT_IDS, "vocab_size": V, "parallel": None},
    "Draft": {
        "depths": 1, "objective": "likelihood", "eta": 3.0, "coef": 0.1, "decay": 0.8, "aggregation": "token_mean",
    },
    "mtp_loss": {
        **HEADS, **SOFT, **OPTIONS, "hidden": [HIDDEN], "batch": PLAIN, "loss": mtp.MTP(), "normalizers": MTP,
    },
    "MTP": {"depths": 1, "coef": 0.1, "aggregation": "token_mean"},
    "shift_targets": {**SOFT, "batch": PLAIN, "by": 1},
    "KTO": {"reference_point": 0.1, "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
    "kto_reference_point": {**SOFT, "stats": STATS, "mismatched": BATCH},
    "micro_batches_of_pairs": {**SOFT, "samples": SAMPLES, "micro_batches": 1, "row_length": T},
    "mismatched_samples": {"samples": SAMPLES},
    "samples_of_pairs": {
        "prompts": [[1, 2]], "chosen": [[3]], "rejected": [[4]], "margins": [1.0], "first_id": 0,
    },
    "Metric": {"total": jnp.float32(1), "count": jnp.float32(1), "reduce": "mean"},
    "collapse_metrics": {"stacked": {"a": jaxppo.base.metrics.Metric(jnp.ones(2), jnp.ones(2))}},
    "merge_metrics": {"first": {"a": jaxppo.base.metrics.Metric(jnp.float32(1), jnp.float32(1))}},
    "mismatch_metrics": {**SOFT, "batch": BATCH, "trainer_log_probs": LOG},
    "packing_metrics": {**SOFT, "batch": BATCH, "trainer_log_probs": LOG},
    "advise": {"metrics": {"ppo_kl": 0.0}, "update": 0},
    "mismatch_report": {"tokens": TOKENS, "where": MASK > 0, "positions": BATCH.positions, "bins": 2},
    "token_mismatch": {
        **HEADS, **SOFT, **OPTIONS, "rollout_hidden": HIDDEN, "rollout_head": KERNEL, "targets": BATCH.targets,
        "rounded_to": "bfloat16", "where": MASK > 0, "rollout_hidden_spec": None,
    },
    "pack_nucleus_ids": {"recorded": [[[3], [4]]] * 4, "samples": SAMPLES, "batch": BATCH, "width": 2},
    "by_name": {"name": "ppo"},
    "dr_grpo, a preset": {"max_tokens": 8},
    "proximal_log_probs": {
        "log_probs": LOG, "rollout_log_probs": LOG, "policy_versions": BATCH.policy_versions, "version": 5,
        "proximal_version": 4,
    },
    "staleness_metrics": {**SOFT, "batch": BATCH, "version": 5},
    "staleness_weights": {**SOFT, "batch": BATCH, "version": 5, "limit": 1, "decay": 0.5, "level": "token"},
    "second_moment_mask": {**SOFT, "batch": BATCH, "bound": 0.04},
    "top_entropy_mask": {**SOFT, "entropy": -LOG, "batch": BATCH, "share": 0.5},
    "KL": {"coef": 0.1, "estimator": "k3", "importance": "none", "compares": "current/old"},
    "Part": {"loss": SFT(), "coef": 1.0, "mask": "own", "weights": "own", "equals": 1},
    "Rejection": {"statistic": "token_k3", "low": 0.0, "high": 1.0, "compares": "old/rollout"},
}  # fmt: skip

# of arrays, which the functions that read them check; and what a model reads, not a loss
CONTAINERS = {
    "TokenStats", "RolloutBatch", "Normalizer", "StepTerm", "Composite", "MismatchReport", "TokenMismatch", "Paths",
    "Paths.of", "check_recurrent", "Asks", "TokenSets", "TokenSets.empty", "TokenSets.flat", "TokenSets.join",
    "TokenSets.of", "ExplainedTokens", "Advice", "TokenTrees",
}  # fmt: skip


def documented(module: ModuleType) -> list[str]:
    """The public names of a module: those of its `__all__`, and else what a docstring explains
    to users.
    """
    if "__all__" in vars(module):
        return list(module.__all__)
    own = {
        name: x
        for name, x in vars(module).items()
        if getattr(x, "__module__", "") == module.__name__
    }
    docs = {name: inspect.getdoc(x) or "" for name, x in own.items() if not name.startswith("_")}
    return [name for name, doc in docs.items() if "\nArgs:" in doc or "\nExample:" in doc]


def modules() -> list[ModuleType]:
    """The modules with public names, jaxppo itself first."""
    found = [jaxppo]
    for module in pkgutil.walk_packages(jaxppo.__path__, "jaxppo."):
        private = any(part.startswith("_") for part in module.name.split("."))
        if not private and not module.name.startswith(ELSEWHERE):
            found.append(importlib.import_module(module.name))
    return found


def surface() -> dict[str, Callable[..., Any]]:
    """Each public function, config class, and constructor or method of a class, by name."""
    found: dict[str, Callable[..., Any]] = {}
    for module in modules():
        for name in documented(module):
            x = getattr(module, name)
            if (
                not callable(x)
                or not getattr(x, "__module__", "").startswith("jaxppo")
                or x in found.values()
            ):
                continue
            if not inspect.isclass(x):
                found[name if name not in found else f"{name}, a preset"] = x
                continue
            if dataclasses.is_dataclass(x) and not inspect.isabstract(x):
                found[name] = x
            for method in dir(x):
                of = inspect.getattr_static(x, method)
                if isinstance(of, (classmethod, staticmethod)) and not method.startswith("_"):
                    found[f"{name}.{method}"] = getattr(x, method)
    found = {name: x for name, x in found.items() if name not in CONTAINERS}
    adaptive = entropies.AdaptiveEntropy()
    found |= {
        f"AdaptiveEntropy.{name}": getattr(adaptive, name) for name in ("init", "coef", "update")
    }
    return found | {"RolloutBatch.validate": BATCH.validate}


def names_of(function: Callable[..., Any]) -> list[str]:
    """The names of all arguments, with those of `**options: Unpack[...]` in their place."""
    if dataclasses.is_dataclass(function):
        return [field.name for field in dataclasses.fields(function) if field.init]
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            unpacked = str(parameter.annotation).removeprefix("Unpack[").removesuffix("]")
            of = getattr(inspect.getmodule(function), unpacked, None)
            names += list(getattr(of, "__annotations__", {}))
        elif parameter.kind is not parameter.VAR_POSITIONAL:
            names.append(parameter.name)
    return names


def arguments_of(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The arguments of a call in which nothing is wrong: those of the table, or all defaults."""
    if name in CALLS:
        return CALLS[name]
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
