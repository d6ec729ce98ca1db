"""A file as a user writes it: type checkers read it, and `smoke.py` runs it with an installed
jaxppo.
"""

import dataclasses
from typing import ClassVar, assert_type

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import jaxppo
from jaxppo import (
    GSPO,
    KL,
    PPO,
    Head,
    LoRA,
    Normalizer,
    OffPolicyConfig,
    ParallelMesh,
    PolicyLossConfig,
    Rejection,
    RolloutBatch,
    Sample,
    ShardAxes,
    TokenStats,
    accumulate_gradients,
    advantages,
    compute_log_probs,
    finalize_metrics,
    log_probs_from_hidden,
    log_probs_from_logits,
    policy_loss,
    policy_loss_from_hidden,
    policy_losses,
    presets,
)
from jaxppo.base.metrics import Metrics
from jaxppo.policy_losses import PolicyLoss
from jaxppo.sharding import Segments

Params = dict[str, jax.Array]
V, H = 96, 16


@dataclasses.dataclass(frozen=True)
class Focal(PolicyLoss):
    """A loss that the user wrote."""

    power: float = 2.0
    token_local: ClassVar[bool] = True

    def __call__(
        self,
        log_probs: jax.Array,
        old_log_probs: jax.Array,
        advantages: jax.Array,
        *,
        mask: jax.Array,
        segments: Segments,
        selected: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        far = (jnp.abs(log_probs - old_log_probs) > 1).astype(jnp.float32)
        return -advantages * (1 - jnp.exp(log_probs)) ** self.power * log_probs, {"far": far}


def configs() -> list[PolicyLossConfig]:
    correction = OffPolicyConfig(
        weights="token", high=2.0, rejections=(Rejection("token_k3", high=5.0),)
    )
    return [
        PolicyLossConfig(
            PPO(clip_low=0.2, clip_high=0.28), kl=KL(0.01, "low_var_kl"), off_policy=correction
        ),
        PolicyLossConfig(loss=GSPO(gradient="token"), aggregation="sequence_mean_token_mean"),
        PolicyLossConfig(Focal(power=1.0), entropy_coef=1e-3, ratio_to="rollout"),
        PolicyLossConfig(policy_losses.by_name("ppo", clip_high=0.28)),
        presets.dr_grpo(max_tokens=1024),
        dataclasses.replace(presets.grpo(), entropy_coef=0.5),
    ]


def samples() -> list[Sample]:
    made: list[Sample] = []
    for n in (8, 5, 3, 2, 6, 4, 7, 2):
        values = [-3.0 - 0.1 * i for i in range(n - 2)]
        made.append(
            Sample(
                list(range(3, 3 + n)),
                response_start=2,
                reward=float(n % 3),
                group_id=n % 2,
                advantages=[n - 4.0] * (n - 2),
                old_log_probs=values,
                ref_log_probs=values,
                rollout_log_probs=np.asarray(values),
            )
        )
    return made


def batches(parallel: ParallelMesh | None) -> list[RolloutBatch]:
    ids = jnp.ones((2, 4), jnp.int32)
    mask = jnp.array([[0, 0, 1, 1]] * 2)
    places = jnp.array([[0, 1, 2, 3]] * 2)
    zeros = jnp.zeros((2, 4))
    pair = RolloutBatch.from_samples(
        samples(), row_length=16, rows=4, parallel=parallel, twin=samples()
    )
    assert_type(pair, tuple[RolloutBatch, RolloutBatch])
    return [
        RolloutBatch.from_samples(
            samples(), row_length=16, rows=4, num_segments=4, parallel=parallel
        ),
        RolloutBatch.from_padded(
            ids, ids, mask, prompt_mask=mask, advantages=jnp.ones(2), parallel=parallel
        ),
        RolloutBatch.from_token_aligned(
            ids, ids, places, mask, old_log_probs=zeros, num_segments=1, parallel=parallel
        ),
        RolloutBatch.from_target_aligned(
            ids, ids, ids, places, mask, advantages=zeros, parallel=parallel
        ),
        RolloutBatch.from_cu_seqlens(
            ids, jnp.array([[0, 4]] * 2), mask, aligned="token", row_length=4, parallel=parallel
        ),
    ]


def parameters() -> Params:
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = {"embedding": (V, H), "kernel": (H, V), "a": (H, 4), "b": (4, V)}
    return {
        name: jax.random.normal(key, shape) / 4
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def head_of(params: Params) -> Head:
    lora = LoRA(params["a"], params["b"], scale=2.0)
    return Head(params["kernel"], bias=None, lora=lora, layout="hv", softcap=30.0, vocab_size=V - 3)


def hidden_of(params: Params, batch: RolloutBatch) -> jax.Array:
    return params["embedding"][batch.tokens] + jnp.sin(batch.positions)[..., None]


def loss_of(
    params: Params, batch: RolloutBatch, config: PolicyLossConfig, parallel: ParallelMesh | None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    hidden = hidden_of(params, batch)
    head = head_of(params)
    loss, found = policy_loss_from_hidden(
        hidden, head, batch, config, parallel=parallel, normalizer=None, temperature=0.7
    )
    assert_type(loss, jax.Array)
    assert_type(found, Metrics)
    return loss, finalize_metrics(found)


def by_hand(params: Params, batch: RolloutBatch, config: PolicyLossConfig) -> jax.Array:
    """The same loss from log-probs, which come from logits."""
    hidden = hidden_of(params, batch)
    where = batch.loss_mask > 0
    temperature = jnp.float32(0.7)
    stats: TokenStats = log_probs_from_hidden(
        hidden,
        head_of(params),
        batch.targets,
        entropy=config.entropy_mode,
        where=where,
        temperature=temperature,
    )
    assert_type(stats.entropy, jax.Array)
    logits = hidden @ (params["kernel"] + 2.0 * params["a"] @ params["b"])
    plain = log_probs_from_logits(
        30 * jnp.tanh(logits / 30), batch.targets, vocab_size=V - 3, temperature=0.7
    )
    difference = jnp.where(where, stats.log_probs - plain.log_probs, 0)
    return policy_loss(stats, batch, config)[0] + jnp.abs(difference).sum()


def in_my_own_shard_map(params: Params, batch: RolloutBatch, parallel: ParallelMesh) -> jax.Array:
    axes = ShardAxes(data="dp", context="cp", tensor="tp", context_layout="zigzag")

    def per_shard(params: Params, batch: RolloutBatch) -> jax.Array:
        hidden = hidden_of(params, batch)
        return policy_loss_from_hidden(
            hidden, params["kernel"], batch, PolicyLossConfig(), parallel=axes
        )[0]

    kernels = {name: P(None, "tp") if name == "kernel" else P() for name in params}
    sharded = jax.shard_map(
        per_shard, mesh=parallel.mesh, in_specs=(kernels, batch.specs(parallel)), out_specs=P()
    )
    out: jax.Array = sharded(params, batch)
    return out


def step(params: Params, micro_batches: RolloutBatch, parallel: ParallelMesh) -> Params:
    config = PolicyLossConfig(aggregation="sequence_mean_token_mean")
    normalizer = Normalizer.of(config, micro_batches, parallel=parallel)

    def loss_fn(params: Params, part: tuple[RolloutBatch, Normalizer]) -> tuple[jax.Array, Metrics]:
        batch, normalizer = part
        hidden = hidden_of(params, batch)
        return policy_loss_from_hidden(
            hidden, params["kernel"], batch, config, parallel=parallel, normalizer=normalizer
        )

    (_, found), gradients = accumulate_gradients(loss_fn, (micro_batches, normalizer))(params)
    assert_type(finalize_metrics(found), dict[str, jax.Array])
    return {name: params[name] - 0.1 * gradients[name] for name in params}


def old_log_probs(params: Params, batch: RolloutBatch) -> jax.Array:
    def apply(params: Params, batch: RolloutBatch) -> TokenStats:
        return log_probs_from_hidden(hidden_of(params, batch), params["kernel"], batch.targets)

    return compute_log_probs(apply, params, batch).log_probs


def mesh() -> ParallelMesh:
    return jaxppo.make_parallel_mesh("dp=2,cp=2,tp=2", context_layout="zigzag")


def group_advantages(batch: RolloutBatch, parallel: ParallelMesh) -> jax.Array:
    batch.validate(V - 3)
    return advantages.spread(
        advantages.grpo(batch.rewards, **batch.groups, parallel=parallel), batch, parallel=parallel
    )
