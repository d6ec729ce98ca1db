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


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["batch", "hidden", "head"],
    meta_fields=["parallel"],
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

    def of_both(x: Any) -> Any:
        hidden, kernel = x
        return call(hidden, dataclasses.replace(g.head, kernel=kernel))

    return slope(of_both, (g.hidden, g.head.kernel))


def policy(g: Given, config: PolicyLossConfig, **options: Any) -> Any:
    def loss(x: Any) -> Any:
        stats = TokenStats(x, -g.batch.returns)
        return jaxppo.policy_loss(stats, g.batch, config, **g.on, **options)

    return slope(loss, g.batch.returns)


def in_micro_batches(g: Given) -> Any:
    def halves(x: Any) -> Any:
        return x.reshape(2, -1, *x.shape[1:])

    batch = jax.tree.map(halves, g.batch)
    normalizer = Normalizer.of(SFT(aggregation="rollout_mean"), batch, **g.on)
    hidden = halves(g.hidden)
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


def aligned(g: Given, made: Callable[..., Any], of: tuple[str, ...]) -> Any:
    names = (*of, "segment_ids", "positions", "loss_mask")
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
    first = g.batch.targets.astype(jnp.int16)
    second = g.batch.positions.astype(jnp.int16)
    return jnp.stack([first, second, second + 1], -1)


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

    def with_teacher(hidden: Any, head: Any) -> Any:
        return call(hidden, head, states, other, temperature=0.9, **g.on, **options)

    return with_teacher


def divergence(g: Given) -> Any:
    call = teacher(g, divergence_from_hidden, where=g.batch.loss_mask, divergence="jensen_shannon")

    def total(hidden: Any, head: Any) -> Any:
        return call(hidden, head).sum(), {}

    return of_head(g, total)


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
    names = ("mean", "sum", "min", "max")
    one = {how: Metric(jnp.float32(3), jnp.float32(2), how) for how in names}
    both = merge_metrics(one, one)

    def as_stack(x: Any) -> Any:
        return x[None]

    stacked = jax.tree.map(as_stack, both)
    return finalize_metrics(both), finalize_metrics(collapse_metrics(stacked))


def of_arrays(
    function: Callable[..., Any], *names: str, on_mesh: bool = True, **options: Any
) -> Callable[[Given], Any]:
    """A call of the function with arrays of what is given, or of its batch, by their names."""

    def call(g: Given) -> Any:
        arrays = [getattr(g if hasattr(g, name) else g.batch, name) for name in names]
        on = g.on if on_mesh else {}
        return function(*arrays, **options, **on)

    return call


def maxrl(g: Given) -> Any:
    rewards = jnp.abs(jnp.asarray(g.batch.rewards))
    return advantages.maxrl(rewards, g.batch.group_ids, **g.on)


def gdpo(g: Given) -> Any:
    rewards = [g.batch.rewards] * 2
    return advantages.gdpo(rewards, g.batch.group_ids, g.uncut, weights=[1, 0.5], **g.on)


def gdpo_over_samples(g: Given) -> Any:
    options = {"leave_one_out": True, "whitened": "samples", **g.on}
    return advantages.gdpo([g.batch.rewards], g.batch.group_ids, g.uncut, **options)


def remax(g: Given) -> Any:
    return advantages.remax(g.batch.rewards, 0.5 * g.batch.rewards, g.batch.sample_ids)


def token_rewards(g: Given) -> Any:
    options = {"kl": g.batch.values, "kl_coef": 0.1, **g.on}
    return advantages.token_rewards(g.batch.rewards, g.batch, **options)


def last_values(g: Given) -> Any:
    truncated = g.batch.sample_ids > 0
    return advantages.last_values(g.batch.values, g.batch, truncated, **g.on)


def reinforce_plus_plus_baseline(g: Given) -> Any:
    options = {"kl": g.batch.values, "kl_coef": 0.1, **g.on}
    given = (g.batch.rewards, g.batch.group_ids, g.uncut)
    return advantages.reinforce_plus_plus_baseline(*given, **options)


def optimal_token_baseline(g: Given) -> Any:
    stats = TokenStats(g.batch.returns, sum_p2=jnp.exp(2 * g.batch.returns))
    given = (g.batch.advantages, stats, g.batch.group_ids, g.uncut)
    return advantages.optimal_token_baseline(*given, weights=g.batch.advantages, **g.on)


GROUPS = {
    name: of_arrays(getattr(advantages, name), "rewards", "group_ids")
    for name in ("grpo", "dr_grpo", "rloo", "gpg", "pass_at_k", "standardize")
}
ESTIMATORS: dict[str, Callable[[Given], Any]] = {
    **GROUPS,
    "rloo, scaled": of_arrays(advantages.rloo, "rewards", "group_ids", scale_by_std=True),
    "maxrl": maxrl,
    "gdpo": gdpo,
    "gdpo over samples": gdpo_over_samples,
    "overlong_penalty": of_arrays(
        advantages.overlong_penalty, "sample_ids", on_mesh=False, max_length=4, buffer=2
    ),
    "accepted_samples": of_arrays(advantages.accepted_samples, "batch", config=CORRECTED),
    "explained_variance": of_arrays(
        advantages.explained_variance, "values", "returns", "loss_mask"
    ),
    "opo": of_arrays(advantages.opo, "rewards", "group_ids", "sample_ids"),
    "remax": remax,
    "whiten": of_arrays(advantages.whiten, "advantages", "loss_mask"),
    "spread": of_arrays(advantages.spread, "rewards", "batch"),
    "token_rewards": token_rewards,
    "discounted_returns": of_arrays(
        advantages.discounted_returns, "advantages", "batch", gamma=0.9
    ),
    "last_values": last_values,
    "gae": of_arrays(advantages.gae, "advantages", "values", "batch", gamma=0.9, value_lam=1.0),
    "gae, by length": of_arrays(advantages.gae, "advantages", "values", "batch", length_alpha=0.3),
    "reinforce_plus_plus": of_arrays(advantages.reinforce_plus_plus, "advantages", "batch"),
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gigpo": of_arrays(gigpo, "rewards", "rewards", "group_ids", "group_ids"),
    "optimal_token_baseline": optimal_token_baseline,
    "importance_weighted_distillation": of_arrays(
        advantages.importance_weighted_distillation, "returns", "old_log_probs", "batch"
    ),
    "on_policy_distillation": of_arrays(
        advantages.on_policy_distillation,
        "advantages",
        "returns",
        "old_log_probs",
        "loss_mask",
        on_mesh=False,
    ),
}
LOSSES: dict[str, Callable[[Given], Any]] = {
    f"policy_loss of {name}": functools.partial(
        policy, config=PolicyLossConfig(by_name(name), kl=KL(0.1, "low_var_kl+"))
    )
    for name in sorted(BY_NAME)
    if not by_name(name).selects
}


def top_k(g: Given) -> tuple[Any, Any]:
    """Three ids at each position, the last one absent, and their log-probs under a teacher."""
    first = jnp.asarray(g.batch.targets, jnp.int32)
    ids = jnp.stack([first, (first + 1) % V, jnp.full_like(first, -1)], -1)
    return ids, jnp.where(ids < 0, jnp.float32(-jnp.inf), jnp.float32(-1.5))


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
    batch = pairs(g)

    def call(x: Any) -> Any:
        return loss_from_stats(TokenStats(x), batch, loss, **g.on)

    return slope(call, jnp.full((R, T), -0.5, jnp.float32))


def simpo_from_hidden(g: Given) -> Any:
    call = functools.partial(loss_from_hidden, batch=pairs(g), loss=preference.SimPO(), **g.on)
    return of_head(g, call)


def bradley_terry(g: Given) -> Any:
    loss = preference.BradleyTerry()
    call = functools.partial(loss_from_stats, batch=pairs(g), loss=loss, **g.on)
    return slope(call, jnp.full((R, T), 0.5, jnp.float32))


def draft(g: Given) -> Any:
    def loss(x: Any, head: Head) -> Any:
        policy = (jax.lax.stop_gradient(x), head)
        drafted = Draft(objective="likelihood")
        return draft_loss([x, x], head, *policy, g.batch, drafted, **g.on)

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
    call = functools.partial(loss_from_hidden, batch=with_ids(g), loss=parts, **on)
    return of_head(g, call)


def clients(g: Given) -> Any:
    """A loss by the number of its client, with numbers that are each client's own."""
    parts = by_row({"ppo": CONFIG, "sft": SFT(z_loss=0.1)}, "client", {"sft": {"z_loss": "decay"}})
    extras = {
        "client": jnp.asarray(g.batch.tokens % 2, jnp.int32),
        "decay": jnp.full((R, T), 0.2, jnp.float32),
    }
    batch = dataclasses.replace(g.batch, extras=extras)
    return of_head(g, functools.partial(loss_from_hidden, batch=batch, loss=parts, **g.on))


def divergence_of_ids(g: Given) -> Any:
    ids, log_probs = top_k(g)
    return top_k_divergence(log_probs - 0.5, log_probs, ids)


def hidden_of_ids(g: Given, loss: TokenLoss[TokenStats]) -> Any:
    """`slope` of the loss of several ids from hidden states."""
    call = functools.partial(loss_from_hidden, batch=with_ids(g), loss=loss, **g.on)
    return of_head(g, call)


def explained(g: Given) -> Any:
    return explain_tokens(g.stats, g.batch, CONFIG, **g.on)


def tokens_of_entropy(g: Given) -> Any:
    return top_entropy_mask(-g.batch.returns, g.batch, **g.on)


def metrics(function: Callable[..., Any], *names: str, **options: Any) -> Callable[[Given], Any]:
    """The numbers of the metrics that the function returns, called as `of_arrays` does."""
    call = of_arrays(function, *names, **options)

    def numbers(g: Given) -> Any:
        return finalize_metrics(call(g))

    return numbers


OBJECTIVES: dict[str, Callable[[Given], Any]] = {
    "top_k_divergence": divergence_of_ids,
    "TopKDistillation": functools.partial(of_ids, loss=TopKDistillation()),
    "TopKDistillation from hidden": functools.partial(
        hidden_of_ids, loss=TopKDistillation("jensen_shannon")
    ),
    "TopKDistillation with a sampled tail": functools.partial(
        hidden_of_ids, loss=TopKDistillation("reverse_kl", tail="sampled")
    ),
    "ScoreCentering": functools.partial(
        of_ids, loss=ScoreCentering(PolicyLossConfig(PPO(), ratio_to="rollout"))
    ),
    "token_mismatch, mismatch_report": mismatch_of_models,
    "DPO": functools.partial(of_pairs, loss=preference.DPO()),
    "A2PO": functools.partial(of_pairs, loss=A2PO()),
    "REAL": functools.partial(of_pairs, loss=REAL()),
    "SimPO from hidden": simpo_from_hidden,
    "BradleyTerry": bradley_terry,
    "draft_loss, draft_metrics": draft,
    "loss_from_hidden of parts": joint,
    "by_row": clients,
    "explain_tokens": explained,
    "second_moment_mask": of_arrays(second_moment_mask, "batch"),
    "top_entropy_mask": tokens_of_entropy,
    "entropy_metrics": metrics(entropy_metrics, "stats", "batch"),
    "advantages.pass_rates": metrics(advantages.pass_rates, "rewards", "group_ids"),
}


def from_hidden(g: Given) -> Any:
    options = {"config": CONFIG, "temperature": 0.7, **g.on}
    return of_head(g, functools.partial(jaxppo.policy_loss_from_hidden, batch=g.batch, **options))


def in_two_passes(g: Given) -> Any:
    options = {"config": PolicyLossConfig(GSPO()), "memory": 2**16, **g.on}
    return of_head(g, functools.partial(jaxppo.policy_loss_from_hidden, batch=g.batch, **options))


def sft(g: Given) -> Any:
    def loss(x: Any) -> Any:
        return loss_from_stats(TokenStats(x), g.batch, SFT(), **g.on)

    return slope(loss, g.batch.returns)


def sft_from_hidden(g: Given) -> Any:
    loss = SFT(label_smoothing=0.1, z_loss=1e-3)
    return of_head(g, functools.partial(loss_from_hidden, batch=g.batch, loss=loss, **g.on))


def value_loss(g: Given) -> Any:
    call = functools.partial(loss_from_stats, batch=g.batch, loss=Value(), **g.on)
    return slope(call, g.batch.values)


def mtp(g: Given) -> Any:
    def loss(hidden: Any, head: Head) -> Any:
        return mtp_loss([hidden, hidden], head, g.batch, **g.on)

    return of_head(g, loss)


def distilled(g: Given) -> Any:
    return of_head(g, teacher(g, distillation_loss, batch=g.batch))


def statistics(g: Given) -> Any:
    def apply(params: Any, batch: RolloutBatch) -> TokenStats:
        return g.stats

    return jaxppo.compute_log_probs(apply, None, g.batch)


def renormalised(g: Given) -> Any:
    def total(x: Any) -> Any:
        log_probs = jnp.stack([x, 2 * x], axis=-1)  # of x and x - 1 the slope would be 0, rounded
        return renormalised_entropy(log_probs).sum(), {}

    return slope(total, g.batch.returns)


def normalizer_of_sequences(g: Given) -> Any:
    aggregation = "sequence_mean_token_mean"
    return normalizer_of(g.batch, aggregation, off_policy=CORRECTED, **g.on)


def proximal(g: Given) -> Any:
    log_probs = (g.batch.returns, g.batch.rollout_log_probs)
    return proximal_log_probs(*log_probs, g.batch.policy_versions, jnp.int32(5))


def kl(g: Given) -> Any:
    return kl_divergence(g.batch.returns, g.batch.ref_log_probs, "k3+", g.batch.values)


def kl_coef(g: Given) -> Any:
    return adaptive_kl_coef(0.1, jnp.float32(0.2), 0.1, 64)


CALLS: dict[str, Callable[[Given], Any]] = {
    **LOSSES,
    **OBJECTIVES,
    **{f"advantages.{name}": call for name, call in ESTIMATORS.items()},
    "policy_loss": functools.partial(
        policy, config=dataclasses.replace(CONFIG, off_policy=CORRECTED, ratio_to="old")
    ),
    "policy_loss_from_hidden": from_hidden,
    "policy_loss_from_hidden in two passes": in_two_passes,
    "loss_from_stats of SFT": sft,
    "SFT from hidden": sft_from_hidden,
    "Value": value_loss,
    "mtp_loss": mtp,
    "Normalizer.of depths": of_arrays(functools.partial(Normalizer.of, MTP(2)), "batch"),
    "shift_targets": of_arrays(shift_targets, "batch", by=2),
    "distillation_loss": distilled,
    "divergence_from_hidden": divergence,
    "log_probs_from_hidden": log_probs,
    "log_probs_from_hidden deterministic": functools.partial(
        log_probs, deterministic=True, memory=2**18
    ),
    "log_probs_from_logits": from_logits,
    "compute_log_probs": statistics,
    "covariance_mask": selected,
    "renormalised_entropy": renormalised,
    "accumulate_gradients": in_micro_batches,
    "Normalizer.of": normalizer_of_sequences,
    "RolloutBatch.from_padded": padded,
    "RolloutBatch.from_token_aligned": functools.partial(
        aligned, made=RolloutBatch.from_token_aligned, of=("tokens",)
    ),
    "RolloutBatch.from_target_aligned": functools.partial(
        aligned, made=RolloutBatch.from_target_aligned, of=("tokens", "targets")
    ),
    "RolloutBatch.from_cu_seqlens": thd,
    "kl_divergence": kl,
    "adaptive_kl_coef": kl_coef,
    "mismatch_metrics": metrics(mismatch_metrics, "batch"),
    "packing_metrics": metrics(packing_metrics, "batch"),
    "proximal_log_probs": proximal,
    "staleness_metrics": metrics(staleness_metrics, "batch", version=5),
    "staleness_weights": of_arrays(
        staleness_weights, "batch", version=5, limit=1, decay=0.5, level="sequence"
    ),
    "segment_sum": of_arrays(segment_sum, "values", "segment_ids", num_segments=3),
    "redistribute, shift_left, scan_affine": moved,
    "pack, unpack": packed,
    "assert_packing_invariant": packing_invariant,
    "merge_metrics, collapse_metrics, finalize_metrics": merged,
}
