"""By name, a call of each public function that computes, on arrays in the dtypes that users
have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from policy_steps import normalizer_of, step_of

import jaxppo
from jaxppo import (
    GSPO,
    KL,
    PPO,
    SFT,
    Head,
    LoRA,
    Normalizer,
    OffPolicyConfig,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    TokenStats,
    Value,
    advantages,
    loss_from_hidden,
    loss_from_stats,
    make_parallel_mesh,
)
from jaxppo.base.kl import adaptive_kl_coef, kl_divergence
from jaxppo.base.metrics import Metric, collapse_metrics, finalize_metrics, merge_metrics
from jaxppo.contrib.a2po import A2PO
from jaxppo.contrib.draft import Draft, draft_loss, draft_metrics
from jaxppo.contrib.gigpo import gigpo
from jaxppo.contrib.real import REAL
from jaxppo.contrib.score_centering import ScoreCentering
from jaxppo.losses import (
    Part,
    ReferenceKL,
    TokenLoss,
    TopKDistillation,
    by_row,
    explain_tokens,
    preference,
)
from jaxppo.losses.covariance import covariance_mask
from jaxppo.losses.distillation import distillation_loss, divergence_from_hidden
from jaxppo.losses.mtp import MTP, mtp_loss, shift_targets
from jaxppo.losses.top_k_divergence import top_k_divergence
from jaxppo.mismatch import mismatch_metrics, mismatch_report, packing_metrics, token_mismatch
from jaxppo.policy_losses import BY_NAME, ClipCov, by_name
from jaxppo.sharding import pack, redistribute, scan_affine, segment_sum, shift_left, unpack
from jaxppo.step.entropy import entropy_metrics, renormalised_entropy
from jaxppo.step.masks import second_moment_mask, top_entropy_mask
from jaxppo.step.staleness import proximal_log_probs, staleness_metrics, staleness_weights

R, T, H, V, K = 4, 16, 8, 50, 3
SAMPLES = [
    dataclasses.replace(
        s, reward=float(i % 3), policy_versions=[3 + i % 2] * len(s.tokens[s.start :])
    )
    for i, s in enumerate(step_of(3))
]
CONFIG = PolicyLossConfig(PPO(), kl=KL(0.1), entropy_coef=0.01)
CORRECTED = OffPolicyConfig(
    weights="sequence",
    batch_normalize=True,
    rejections=(Rejection("seq_max_k1", 0.5, 2.0),),
    veto=1e-3,
    opsm_delta=0.1,
)


@dataclasses.dataclass(frozen=True)
class Given:
    """The inputs of a step: a batch, hidden states, a head, and a mesh or None."""

    batch: RolloutBatch
    hidden: Any
    head: Head
    parallel: Any

    @property
    def on(self) -> dict[str, Any]:
        return {"parallel": self.parallel}

    @property
    def logits(self) -> Any:
        return self.hidden.astype(jnp.float32) @ self.head.kernel.astype(jnp.float32)

    @property
    def uncut(self) -> RolloutBatch:
        """The batch with one sample a rollout: its rewards differ between the samples of a
        rollout.
        """
        return dataclasses.replace(self.batch, rollout_ids=self.batch.sample_ids)

    @property
    def stats(self) -> TokenStats:
        return TokenStats(self.batch.returns, *[-self.batch.returns] * 3)


INTEGERS = {"tokens": "uint8", "targets": "int16", "segment_ids": "int8", "positions": "uint8"}
INTEGERS |= {
    "policy_versions": "int8",
    "sample_ids": "int8",
    "group_ids": "int8",
    "rollout_ids": "int16",
}
NARROW = INTEGERS | {
    "loss_mask": bool,
    "rewards": "bfloat16",
    "advantages": "bfloat16",
    "values": "bfloat16",
}
WIDE = dict.fromkeys(INTEGERS, "int64") | {"rewards": "float64"}
DTYPES = {  # the dtypes of some of the batch's arrays, of hidden states, and of the kernel
    "as made": ({}, "float32", "float32"),
    "narrow": (NARROW, "bfloat16", "float32"),
    "wide": (WIDE | {"loss_mask": "float64", "advantages": "float64"}, "float32", "bfloat16"),
}


@functools.cache
def given(mesh: str | None, dtypes: str) -> Given:
    parallel = mesh and make_parallel_mesh(mesh, context_layout="zigzag")
    batch = RolloutBatch.from_samples(SAMPLES, row_length=T, rows=R, parallel=parallel)
    of_batch, hidden, kernel = DTYPES[dtypes]
    cast = {
        name: np.asarray(getattr(batch, name)).astype(jnp.dtype(kind))
        for name, kind in of_batch.items()
    }
    extras = {"own": np.ones((R, T, 2), np.int8), "mark": np.zeros((R, T), bool)}
    batch = jax.tree.map(jnp.asarray, dataclasses.replace(batch, **cast, extras=extras))
    rng = np.random.default_rng(0)

    def array(dtype, *shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    lora = LoRA(array(kernel, H, 2), array(kernel, 2, V), 0.5)
    head = Head(array(kernel, H, V), bias=array(kernel, V), lora=lora, softcap=5.0)
    return Given(batch, array(hidden, R, T, H), head, parallel)


def slope(call: Callable[..., Any], x: Any) -> Any:
    """Loss, metrics and gradient of call(x), which returns (loss, metrics); one program, where a
    call outside of jit would compile each of its operations.
    """

    @jax.jit
    def step(x: Any) -> Any:
        (loss, found), gradient = jax.value_and_grad(call, has_aux=True)(x)
        return loss, finalize_metrics(found), gradient

    return step(x)


def of_head(g: Given, call: Callable[..., Any]) -> Any:
    """`slope` with respect to the hidden states and the kernel."""
    return slope(
        lambda x: call(x[0], dataclasses.replace(g.head, kernel=x[1])), (g.hidden, g.head.kernel)
    )


def policy(g: Given, config: PolicyLossConfig, **options: Any) -> Any:
    def loss(x):
        return jaxppo.policy_loss(
            TokenStats(x, -g.batch.returns), g.batch, config, **g.on, **options
        )

    return slope(loss, g.batch.returns)


def in_micro_batches(g: Given) -> Any:
    batch = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), g.batch)
    normalizer = Normalizer.of(SFT(aggregation="rollout_mean"), batch, **g.on)
    hidden = g.hidden.reshape(2, -1, T, H)
    config = PolicyLossConfig(PPO(), aggregation="rollout_mean")

    def loss(kernel: Any, part: Any) -> Any:
        batch, normalizer, hidden = part
        on = {"normalizer": normalizer, **g.on}
        return jaxppo.policy_loss_from_hidden(hidden, kernel, batch, config, temperature=0.7, **on)

    @jax.jit
    def step(kernel: Any, parts: Any) -> Any:
        (total, found), gradient = jaxppo.accumulate_gradients(loss, parts)(kernel)
        return total, finalize_metrics(found), gradient

    return step(g.head.kernel, (batch, normalizer, hidden))


def padded(g: Given) -> Any:
    ids = g.batch.tokens
    mask = g.batch.segment_ids == 1
    more = {"rewards": g.batch.rewards[:, 0], "old_log_probs": g.batch.returns}
    return RolloutBatch.from_padded(
        ids[:, :8], ids.astype(jnp.int32), mask, prompt_mask=mask[:, :8], **more
    )


def aligned(g: Given, made: Callable[..., Any], *names: str) -> Any:
    names = (*names, "segment_ids", "positions", "loss_mask")
    arrays = {name: getattr(g.batch, name) for name in (*names, "returns")}
    if g.parallel is not None:  # rows are given in the order of their tokens
        arrays = redistribute(arrays, g.parallel, g.parallel.context_layout, "contiguous")
    more = {"returns": arrays["returns"], "rewards": g.batch.rewards}
    return made(*(arrays[name] for name in names), num_segments=g.batch.num_segments, **more)


def thd(g: Given) -> Any:
    ends = jnp.tile(jnp.arange(0, T + 1, T // 2, dtype=jnp.int32), (R, 1))
    more = {
        "returns": g.batch.returns,
        "cu_seqlens_padded": ends,
        "rewards": g.batch.rewards[:, :2],
    }
    return RolloutBatch.from_cu_seqlens(
        g.batch.tokens, ends, g.batch.loss_mask, aligned="token", **more
    )


def nuclei(g: Given) -> Any:
    return jnp.stack(
        [
            g.batch.targets.astype(jnp.int16),
            *(g.batch.positions.astype(jnp.int16) + k for k in (0, 1)),
        ],
        -1,
    )


def log_probs(g: Given, **options: Any) -> Any:
    options = {
        "nucleus_ids": nuclei(g),
        "where": g.batch.loss_mask,
        "temperature": 0.7,
        **g.on,
    } | options

    def total(hidden: Any, head: Any) -> Any:
        stats = jaxppo.log_probs_from_hidden(
            hidden, head, g.batch.targets, entropy="bonus", **options
        )
        return (stats.log_probs + stats.entropy).sum(), {}

    return of_head(g, total)


def from_logits(g: Given) -> Any:
    options = {
        "nucleus_ids": nuclei(g),
        "where": g.batch.loss_mask,
        "temperature": jnp.full((R, T), 0.7),
        **g.on,
    }

    def total(logits: Any) -> Any:
        asked = {
            "logit_stats": ("log_z", "mean_logit", "accuracy", "sum_p2"),
            "top_k": 3,
            "entropy": "bonus",
        }
        stats = jaxppo.log_probs_from_logits(logits, g.batch.targets, **asked, **options)
        return (stats.log_probs + stats.entropy + stats.log_z + stats.mean_logit).sum(), {}

    return slope(total, g.logits)


def selected(g: Given) -> Any:
    config = PolicyLossConfig(ClipCov(share=0.3))
    mask = covariance_mask(g.stats, g.batch, config, jax.random.key(0), **g.on)
    g = dataclasses.replace(g, batch=dataclasses.replace(g.batch, extras={"selected": mask}))
    return mask, policy(g, config)


def teacher(g: Given, call: Callable[..., Any], **options: Any) -> Any:
    other = Head(1 + g.head.kernel[:4].astype(jnp.float32))
    states = jnp.asarray(g.hidden[..., :4], jnp.float32)
    return lambda hidden, head: call(
        hidden, head, states, other, temperature=0.9, **g.on, **options
    )


def divergence(g: Given) -> Any:
    call = teacher(g, divergence_from_hidden, where=g.batch.loss_mask, divergence="jensen_shannon")
    return of_head(g, lambda *x: (call(*x).sum(), {}))


def moved(g: Given) -> Any:
    """The functions that move and sum rows, on numbers of two dtypes."""
    ids = g.batch.segment_ids
    layout = "contiguous" if g.parallel is None else g.parallel.context_layout
    to = redistribute((g.hidden, ids), g.parallel, layout, "striped")
    later = shift_left((g.hidden, g.batch.positions), by=3, segment_ids=ids, **g.on)
    solved = scan_affine(g.batch.values, g.batch.returns, segment_ids=ids, **g.on)
    return to, later, solved, scan_affine(0.9, g.batch.values, segment_ids=ids, **g.on)


def packing_invariant(g: Given) -> Any:
    """The check of a model: attention with equal weights, along the batch's paths."""

    def hidden(kernel: Any, batch: RolloutBatch) -> Any:
        seen = batch.paths.attends(batch.paths).astype(jnp.float32)
        return seen / seen.sum(-1, keepdims=True) @ kernel.T.astype(jnp.float32)[batch.tokens]

    return jaxppo.assert_packing_invariant(hidden, g.head.kernel, vocab_size=V, **g.on)


def packed(g: Given) -> Any:
    rows = pack([np.zeros(n) for n in (3, 4, 5)], row_length=8)
    return unpack(rows.place([np.arange(n) for n in (3, 4, 5)], 0, np.int32), rows)


def merged(g: Given) -> Any:
    ones = [Metric(jnp.float32(3), jnp.float32(2), how) for how in ("mean", "sum", "min", "max")]
    both = merge_metrics(*({str(i): m for i, m in enumerate(ones)} for _ in range(2)))
    return finalize_metrics(both), finalize_metrics(
        collapse_metrics(jax.tree.map(lambda x: x[None], both))
    )


GROUPS = {
    name: lambda g, name=name: getattr(advantages, name)(g.batch.rewards, g.batch.group_ids, **g.on)
    for name in ("grpo", "dr_grpo", "rloo", "gpg", "pass_at_k", "standardize")
}
ESTIMATORS: dict[str, Callable[[Given], Any]] = {
    **GROUPS,
    "rloo, scaled": lambda g: advantages.rloo(
        g.batch.rewards, g.batch.group_ids, scale_by_std=True, **g.on
    ),
    "maxrl": lambda g: advantages.maxrl(
        jnp.abs(jnp.asarray(g.batch.rewards)), g.batch.group_ids, **g.on
    ),
    "gdpo": lambda g: advantages.gdpo(
        [g.batch.rewards] * 2, g.batch.group_ids, g.uncut, weights=[1, 0.5], **g.on
    ),
    "gdpo over samples": lambda g: advantages.gdpo(
        [g.batch.rewards],
        g.batch.group_ids,
        g.uncut,
        leave_one_out=True,
        whitened="samples",
        **g.on,
    ),
    "overlong_penalty": lambda g: advantages.overlong_penalty(
        g.batch.sample_ids, max_length=4, buffer=2
    ),
    "accepted_samples": lambda g: advantages.accepted_samples(g.batch, CORRECTED, **g.on),
    "explained_variance": lambda g: advantages.explained_variance(
        g.batch.values, g.batch.returns, g.batch.loss_mask, **g.on
    ),
    "opo": lambda g: advantages.opo(g.batch.rewards, g.batch.group_ids, g.batch.sample_ids, **g.on),
    "remax": lambda g: advantages.remax(g.batch.rewards, 0.5 * g.batch.rewards, g.batch.sample_ids),
    "whiten": lambda g: advantages.whiten(g.batch.advantages, g.batch.loss_mask, **g.on),
    "spread": lambda g: advantages.spread(g.batch.rewards, g.batch, **g.on),
    "token_rewards": lambda g: advantages.token_rewards(
        g.batch.rewards, g.batch, kl=g.batch.values, kl_coef=0.1, **g.on
    ),
    "discounted_returns": lambda g: advantages.discounted_returns(
        g.batch.advantages, g.batch, gamma=0.9, **g.on
    ),
    "last_values": lambda g: advantages.last_values(
        g.batch.values, g.batch, g.batch.sample_ids > 0, **g.on
    ),
    "gae": lambda g: advantages.gae(
        g.batch.advantages, g.batch.values, g.batch, gamma=0.9, value_lam=1.0, **g.on
    ),
    "gae, by length": lambda g: advantages.gae(
        g.batch.advantages, g.batch.values, g.batch, length_alpha=0.3, **g.on
    ),
    "reinforce_plus_plus": lambda g: advantages.reinforce_plus_plus(
        g.batch.advantages, g.batch, **g.on
    ),
    "reinforce_plus_plus_baseline": lambda g: advantages.reinforce_plus_plus_baseline(
        g.batch.rewards, g.batch.group_ids, g.uncut, kl=g.batch.values, kl_coef=0.1, **g.on
    ),
    "gigpo": lambda g: gigpo(g.batch.rewards, g.batch.rewards, *[g.batch.group_ids] * 2, **g.on),
    "optimal_token_baseline": lambda g: advantages.optimal_token_baseline(
        g.batch.advantages,
        TokenStats(g.batch.returns, sum_p2=jnp.exp(2 * g.batch.returns)),
        g.batch.group_ids,
        g.uncut,
        weights=g.batch.advantages,
        **g.on,
    ),
    "importance_weighted_distillation": lambda g: advantages.importance_weighted_distillation(
        g.batch.returns, g.batch.old_log_probs, g.batch, **g.on
    ),
    "on_policy_distillation": lambda g: advantages.on_policy_distillation(
        g.batch.advantages, g.batch.returns, g.batch.old_log_probs, g.batch.loss_mask
    ),
}
LOSSES: dict[str, Callable[[Given], Any]] = {
    f"policy_loss of {name}": lambda g, name=name: policy(
        g, PolicyLossConfig(by_name(name), kl=KL(0.1, "low_var_kl+"))
    )
    for name in sorted(BY_NAME)
    if not by_name(name).selects
}


def top_k(g: Given) -> tuple[Any, Any]:
    """Three ids at each position, the last one absent, and their log-probs under a teacher."""
    first = np.asarray(g.batch.targets, np.int32)
    ids = np.stack([first, (first + 1) % V, np.full_like(first, -1)], -1)
    return jnp.asarray(ids), jnp.asarray(np.where(ids < 0, -np.inf, -1.5), jnp.float32)


def with_ids(g: Given) -> RolloutBatch:
    """The batch with these ids and log-probs, as a teacher's and as a sampler's."""
    names = ("teacher_ids", "teacher_log_probs", "sampler_ids", "sampler_log_probs")
    extras = dict(zip(names, top_k(g) * 2, strict=True)) | {
        "teacher_target_log_probs": g.batch.ref_log_probs
    }
    return dataclasses.replace(g.batch, extras=extras)


def of_ids(g: Given, loss: TokenLoss[TokenStats]) -> Any:
    """`slope` of a loss of statistics with the log-probs of several ids, with respect to the
    tokens' log-probs.
    """

    def call(x: Any) -> Any:
        stats = TokenStats(x, id_log_probs=jnp.broadcast_to(x[..., None] - 1, (R, T, 3)))
        return loss_from_stats(stats, with_ids(g), loss, **g.on)

    return slope(call, g.batch.returns)


def mismatch_of_models(g: Given) -> Any:
    there = g.batch.loss_mask.astype(bool)
    tokens = teacher(g, token_mismatch, where=there, targets=g.batch.targets)(g.hidden, g.head)
    report = mismatch_report(tokens, where=there, bins=2)
    return tokens, jax.tree.map(np.asarray, dataclasses.asdict(report))


def pairs(g: Given) -> RolloutBatch:
    """A batch of four pairs, instead of the given one."""
    made = preference.samples_of_pairs([[1, 2]] * 4, chosen=[[3, 4]] * 4, rejected=[[5]] * 4)
    batch = RolloutBatch.from_samples(made, row_length=T, rows=R, parallel=g.parallel)
    one = np.full((R, T), -1.0, np.float32)
    return dataclasses.replace(
        batch, ref_log_probs=one, old_log_probs=one, rollout_ids=batch.group_ids
    )


def of_pairs(g: Given, loss: TokenLoss[TokenStats]) -> Any:
    return slope(
        lambda x: loss_from_stats(TokenStats(x), pairs(g), loss, **g.on),
        jnp.full((R, T), -0.5, jnp.float32),
    )


def draft(g: Given) -> Any:
    def loss(x: Any, head: Head) -> Any:
        return draft_loss(
            [x, x],
            head,
            jax.lax.stop_gradient(x),
            head,
            g.batch,
            Draft(objective="likelihood"),
            **g.on,
        )

    found = draft_metrics([g.hidden], g.head, g.hidden, g.head, g.batch, **g.on)
    return of_head(g, loss), finalize_metrics(found), Normalizer.of(Draft(2), g.batch, **g.on)


def joint(g: Given) -> Any:
    parts = {
        "policy": Part(CONFIG),
        "imitation": Part(SFT(), 0.1),
        "reference": Part(ReferenceKL(), 0.01),
    }
    parts["teacher"] = Part(TopKDistillation("jensen_shannon"), 0.1)
    on = {"normalizer": Normalizer.of(parts, g.batch, **g.on), **g.on}
    return of_head(g, lambda *x: loss_from_hidden(*x, with_ids(g), parts, **on))


def clients(g: Given) -> Any:
    """A loss by the number of its client, with numbers that are each client's own."""
    parts = by_row({"ppo": CONFIG, "sft": SFT(z_loss=0.1)}, "client", {"sft": {"z_loss": "decay"}})
    extras = {
        "client": jnp.asarray(g.batch.tokens % 2, jnp.int32),
        "decay": jnp.full((R, T), 0.2, jnp.float32),
    }
    return of_head(
        g,
        lambda *x: loss_from_hidden(*x, dataclasses.replace(g.batch, extras=extras), parts, **g.on),
    )


OBJECTIVES: dict[str, Callable[[Given], Any]] = {
    "top_k_divergence": lambda g: top_k_divergence(top_k(g)[1] - 0.5, top_k(g)[1], top_k(g)[0]),
    "TopKDistillation": lambda g: of_ids(g, TopKDistillation()),
    "TopKDistillation from hidden": lambda g: of_head(
        g, lambda *x: loss_from_hidden(*x, with_ids(g), TopKDistillation("jensen_shannon"), **g.on)
    ),
    "TopKDistillation with a sampled tail": lambda g: of_head(
        g,
        lambda *x: loss_from_hidden(
            *x, with_ids(g), TopKDistillation("reverse_kl", tail="sampled"), **g.on
        ),
    ),
    "ScoreCentering": lambda g: of_ids(
        g, ScoreCentering(PolicyLossConfig(PPO(), ratio_to="rollout"))
    ),
    "token_mismatch, mismatch_report": mismatch_of_models,
    "DPO": lambda g: of_pairs(g, preference.DPO()),
    "A2PO": lambda g: of_pairs(g, A2PO()),
    "REAL": lambda g: of_pairs(g, REAL()),
    "SimPO from hidden": lambda g: of_head(
        g, lambda *x: loss_from_hidden(*x, pairs(g), preference.SimPO(), **g.on)
    ),
    "BradleyTerry": lambda g: slope(
        lambda x: loss_from_stats(x, pairs(g), preference.BradleyTerry(), **g.on),
        jnp.full((R, T), 0.5, jnp.float32),
    ),
    "draft_loss, draft_metrics": draft,
    "loss_from_hidden of parts": joint,
    "by_row": clients,
    "explain_tokens": lambda g: explain_tokens(g.stats, g.batch, CONFIG, **g.on),
    "second_moment_mask": lambda g: second_moment_mask(g.batch, **g.on),
    "top_entropy_mask": lambda g: top_entropy_mask(-g.batch.returns, g.batch, **g.on),
    "entropy_metrics": lambda g: finalize_metrics(entropy_metrics(g.stats, g.batch, **g.on)),
    "advantages.pass_rates": lambda g: finalize_metrics(
        advantages.pass_rates(g.batch.rewards, g.batch.group_ids, **g.on)
    ),
}
CALLS: dict[str, Callable[[Given], Any]] = {
    **LOSSES,
    **OBJECTIVES,
    **{f"advantages.{name}": call for name, call in ESTIMATORS.items()},
    "policy_loss": lambda g: policy(
        g, dataclasses.replace(CONFIG, off_policy=CORRECTED, ratio_to="old")
    ),
    "policy_loss_from_hidden": lambda g: of_head(
        g, lambda *x: jaxppo.policy_loss_from_hidden(*x, g.batch, CONFIG, temperature=0.7, **g.on)
    ),
    "policy_loss_from_hidden in two passes": lambda g: of_head(
        g,
        lambda *x: jaxppo.policy_loss_from_hidden(
            *x, g.batch, PolicyLossConfig(GSPO()), memory=2**16, **g.on
        ),
    ),
    "loss_from_stats of SFT": lambda g: slope(
        lambda x: loss_from_stats(TokenStats(x), g.batch, SFT(), **g.on), g.batch.returns
    ),
    "SFT from hidden": lambda g: of_head(
        g, lambda *x: loss_from_hidden(*x, g.batch, SFT(label_smoothing=0.1, z_loss=1e-3), **g.on)
    ),
    "Value": lambda g: slope(
        lambda x: loss_from_stats(x, g.batch, Value(), **g.on), g.batch.values
    ),
    "mtp_loss": lambda g: of_head(g, lambda x, head: mtp_loss([x, x], head, g.batch, **g.on)),
    "Normalizer.of depths": lambda g: Normalizer.of(MTP(2), g.batch, **g.on),
    "shift_targets": lambda g: shift_targets(g.batch, 2, **g.on),
    "distillation_loss": lambda g: of_head(g, teacher(g, distillation_loss, batch=g.batch)),
    "divergence_from_hidden": divergence,
    "log_probs_from_hidden": log_probs,
    "log_probs_from_hidden deterministic": lambda g: log_probs(g, deterministic=True, memory=2**18),
    "log_probs_from_logits": from_logits,
    "compute_log_probs": lambda g: jaxppo.compute_log_probs(
        lambda params, batch: g.stats, None, g.batch
    ),
    "covariance_mask": selected,
    "renormalised_entropy": lambda g: slope(
        lambda x: (renormalised_entropy(jnp.stack([x, x - 1], axis=-1)).sum(), {}), g.batch.returns
    ),
    "accumulate_gradients": in_micro_batches,
    "Normalizer.of": lambda g: normalizer_of(
        g.batch, "sequence_mean_token_mean", off_policy=CORRECTED, **g.on
    ),
    "RolloutBatch.from_padded": padded,
    "RolloutBatch.from_token_aligned": lambda g: aligned(
        g, RolloutBatch.from_token_aligned, "tokens"
    ),
    "RolloutBatch.from_target_aligned": lambda g: aligned(
        g, RolloutBatch.from_target_aligned, "tokens", "targets"
    ),
    "RolloutBatch.from_cu_seqlens": thd,
    "kl_divergence": lambda g: kl_divergence(
        g.batch.returns, g.batch.ref_log_probs, "k3+", g.batch.values
    ),
    "adaptive_kl_coef": lambda g: adaptive_kl_coef(0.1, jnp.float32(0.2), 0.1, 64),
    "mismatch_metrics": lambda g: finalize_metrics(mismatch_metrics(g.batch, **g.on)),
    "packing_metrics": lambda g: finalize_metrics(packing_metrics(g.batch, **g.on)),
    "proximal_log_probs": lambda g: proximal_log_probs(
        g.batch.returns, g.batch.rollout_log_probs, g.batch.policy_versions, jnp.int32(5)
    ),
    "staleness_metrics": lambda g: finalize_metrics(staleness_metrics(g.batch, 5, **g.on)),
    "staleness_weights": lambda g: staleness_weights(
        g.batch, 5, limit=1, decay=0.5, level="sequence", **g.on
    ),
    "segment_sum": lambda g: segment_sum(g.batch.values, g.batch.segment_ids, 3, **g.on),
    "redistribute, shift_left, scan_affine": moved,
    "pack, unpack": packed,
    "assert_packing_invariant": packing_invariant,
    "merge_metrics, collapse_metrics, finalize_metrics": merged,
}
