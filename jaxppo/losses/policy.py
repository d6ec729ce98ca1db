"""`policy_loss`: the door of policy losses, from log-probs or hidden states, a batch and a config to a scalar loss."""

from __future__ import annotations

from typing import Unpack

from jaxtyping import Array, Float, Int

from jaxppo.base.metrics import Metrics
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.call import HeadOptions
from jaxppo.head.head import Head, TokenStats
from jaxppo.losses.doors import from_hidden, from_stats
from jaxppo.losses.policy_tokens import check_config
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.sharding import ParallelMesh, ShardAxes
from jaxppo.step.aggregation import Normalizer


def policy_loss(
    stats: TokenStats,
    batch: RolloutBatch,
    config: PolicyLossConfig,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of a batch: sum over tokens of weight * (policy loss + kl.coef * KL - entropy_coef * entropy).

    Gradients flow to `stats` only; the batch and the coefficients are constants. Positions with loss mask 0 may hold
    anything, NaN included. A batch that is one of a step's micro-batches needs the step's `normalizer`. A loss without
    it would be wrong, and is refused if the shapes show that.

    Args:
      stats: `f32[R, T]` log-probs of the targets, and entropies; see `log_probs_from_hidden`.
      batch: `[R, T]`; needs `advantages`, the log-probs that `config` compares with, and for ClipCov and KLCov the
        `covariance_mask` of the whole step as the extra "selected".
      config: the policy loss, its KL and entropy terms, the off-policy correction and the aggregation.
      parallel: the mesh; rows sharded over data, positions over context. `ShardAxes` inside the caller's own
        `shard_map`, None on one device.
      normalizer: `Normalizer.of(config, micro_batches)` of the whole step, if the batch is one of its micro-batches.

    Returns:
      The scalar f32 loss, and metrics, which `finalize_metrics` turns into numbers. docs/metrics.md says what each is;
      `broken_rules` is 0 for a sound batch. Otherwise the loss is NaN, and `explain_broken_rules` says what is wrong.

    Raises:
      ValueError, TypeError: an array that the config needs and the batch lacks, shapes that differ, a bonus on
        entropies that have no gradient, a normalizer of another aggregation, correction or step, none for a
        micro-batch, rows in another context layout than the mesh's.

    Example:
      >>> sample = Sample([1, 2, 3], response_start=1, advantages=[1.0, 1.0], old_log_probs=[-0.5, -2.0])
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> loss, metrics = policy_loss(TokenStats(jnp.array([[-0.5, -2.0, 0.0]])), batch, PolicyLossConfig())
      >>> float(loss), float(metrics["ratio_max"].value)
      (-1.0, 1.0)
    """
    check_config(config)
    return from_stats("policy_loss", stats, batch, config, parallel, normalizer)


def policy_loss_from_hidden(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    batch: RolloutBatch,
    config: PolicyLossConfig,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    temperature: float | Array = 1.0,
    nucleus_ids: Int[Array, "R T K"] | None = None,
    adapter_ids: Int[Array, " R"] | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """`policy_loss` of a batch from hidden states, whose logits never exist together.

    Gradients flow to `hidden` and `head` alone. Only tokens with loss mask 1 are computed. If a token's loss depends on
    its own log-prob and entropy only, one pass over the vocabulary gives loss and gradients, with three matrix
    products. Two passes, with four products, serve other losses, calls for which `memory` has no room, and anything in
    f16 but a bias (one pass would round f16 gradients before a loss scale multiplies them). The numbers are the same to
    f32 rounding. `jaxppo.sharding.audit` tells which one a program takes, and why.

    Args:
      hidden: `bf16` or `f32[R, T, H]`, the model's final hidden states; position t predicts `batch.targets[:, t]`.
      head: a `Head`, or a bare kernel `[H, V]`.
      batch, config, normalizer: see `policy_loss`.
      parallel: the mesh, see `policy_loss`; the vocabulary sharded over tensor.
      temperature: divides the logits, as the sampler's did; a number, a traced scalar or `f32[R, T]`.
      nucleus_ids: `i32[R, T, K]`, -1 padded, the ids that top-p or top-k left to the sampler; log-probs are
        renormalised over them. See `pack_nucleus_ids`.
      adapter_ids: `i32[R]`, which of several adapters of the head each row has, -1 for none; see `LoRA`. A row whose id
        belongs to no adapter gives NaN.
      **options: how the head works, see `HeadOptions`: `memory`, `precision`, `follow_mask` and others.

    Returns:
      The scalar f32 loss, and metrics, as those of `policy_loss`.

    Raises:
      TypeError, ValueError: as `policy_loss`; shapes or dtypes that differ, a head that cannot be read.

    Example:
      >>> sample = Sample([1, 2, 3], response_start=1, advantages=[1.0, 1.0], old_log_probs=[-np.log(4)] * 2)
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> loss, _ = policy_loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch, PolicyLossConfig())
      >>> float(loss)
      -1.0
    """
    check_config(config)
    given = {"temperature": temperature, "nucleus_ids": nucleus_ids, "adapter_ids": adapter_ids, "options": options}
    return from_hidden("policy_loss_from_hidden", hidden, head, batch, config, parallel, normalizer, **given)
