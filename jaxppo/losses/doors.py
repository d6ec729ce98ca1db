"""The doors of losses: from statistics or hidden states, a batch and a loss to a scalar and
metrics.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Unpack, get_args

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import check
from jaxppo.base.metrics import Metrics
from jaxppo.base.pytree import PyTree
from jaxppo.batch.extras import extra_of
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.arguments import Pair, prepare_head
from jaxppo.head.call import HeadOptions
from jaxppo.head.head import Entropy, Head, TokenStats
from jaxppo.losses.compute import LossAndMetrics, Normalizers, call_parts
from jaxppo.losses.parts import AnyLoss, OfPolicy, Part, Parts, as_parts
from jaxppo.losses.policy_tokens import check_config
from jaxppo.losses.token_loss import Stats, TokenLoss
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.sharding import ParallelMesh
from jaxppo.step.aggregation import Normalizer, Parallel


def policy_loss(
    stats: TokenStats,
    batch: RolloutBatch,
    config: PolicyLossConfig,
    *,
    parallel: Parallel = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of a batch: sum over tokens of weight * (policy loss + kl.coef * KL - entropy_coef *
    entropy).

    Gradients flow to `stats` only; the batch and the coefficients are constants. Positions with
    loss mask 0 may hold anything, NaN included.

    Args:
      stats: `f32[R, T]` log-probs of the targets, and entropies; see `log_probs_from_hidden`.
      batch: `[R, T]`; needs `advantages`, the log-probs that `config` compares with, and for
        ClipCov and KLCov the `covariance_mask` of the whole step as the extra "selected".
      config: the policy loss, its KL and entropy terms, the off-policy correction and the
        aggregation.
      parallel: the mesh; rows sharded over data, positions over context. `ShardAxes` inside the
        caller's own `shard_map`, None on one device.
      normalizer: `Normalizer.of(config, micro_batches)` of the whole step, if the batch is one of
        its micro-batches. Without it the loss would be wrong, and is refused if the shapes show
        that.

    Returns:
      The scalar f32 loss, and metrics, which `finalize_metrics` turns into numbers. docs/metrics.md
      says what each is; `broken_rules` is 0 for a sound batch. Otherwise the loss is NaN, and
      `explain_broken_rules` says what is wrong.

    Raises:
      ValueError, TypeError: an array that the config needs and the batch lacks, shapes that differ,
        a bonus on entropies that have no gradient, a normalizer of another aggregation, correction
        or step, none for a micro-batch, rows in another context layout than the mesh's.

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
    parallel: Parallel = None,
    normalizer: Normalizer | None = None,
    temperature: float | Array = 1.0,
    nucleus_ids: Int[Array, "R T K"] | None = None,
    adapter_ids: Int[Array, " R"] | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """`policy_loss` of a batch from hidden states, whose logits need not exist together.

    Gradients flow to `hidden` and `head` alone. Only tokens with loss mask 1 are computed. If a
    token's loss depends on its own log-prob and entropy only, one pass over the vocabulary gives
    loss and gradients, with three matrix products. Two passes serve other losses, calls for which
    `memory` has no room, and anything in f16 but a bias. They take four products, or three if the
    loss is of whole sequences and `memory` has room for its logits. The numbers are the same to f32
    rounding. `jaxppo.sharding.audit` tells which one is taken, and why.

    Args:
      hidden: `bf16` or `f32[R, T, H]`, the model's final hidden states; position t predicts
        `batch.targets[:, t]`.
      head: a `Head`, or a bare kernel `[H, V]`.
      batch, config, normalizer: see `policy_loss`.
      parallel: the mesh, see `policy_loss`; the vocabulary sharded over tensor.
      temperature: divides the logits, as the sampler's did; a number, a traced scalar or
        `f32[R, T]`.
      nucleus_ids: `i32[R, T, K]`, -1 padded, the ids that top-p or top-k left to the sampler;
        log-probs are renormalised over them. See `pack_nucleus_ids`.
      adapter_ids: `i32[R]`, which of several adapters of the head each row has, -1 for none; see
        `LoRA`. A row whose id belongs to no adapter gives NaN.
      **options: how the head works, see `HeadOptions`: `memory`, `precision`, `follow_mask` and
        others.

    Returns:
      As `policy_loss`.

    Raises:
      TypeError, ValueError: as `policy_loss`; shapes or dtypes that differ, a head that cannot be
        read.

    Example:
      >>> sample = Sample([1, 2, 3], response_start=1, advantages=[1.0, 1.0], old_log_probs=[-np.log(4)] * 2)
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> loss, _ = policy_loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch, PolicyLossConfig())
      >>> float(loss)
      -1.0
    """
    check_config(config)
    return _from_hidden(
        "policy_loss_from_hidden",
        (hidden, head),
        batch,
        config,
        parallel,
        normalizer,
        temperature=temperature,
        nucleus_ids=nucleus_ids,
        adapter_ids=adapter_ids,
        options=options,
    )


def loss_from_stats(
    stats: Stats,
    batch: RolloutBatch,
    loss: TokenLoss[Stats] | OfPolicy | Parts,
    *,
    parallel: Parallel = None,
    normalizer: Normalizer | Mapping[str, Normalizer] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of a batch from statistics: log-probs of a head, or a critic's values or scores.

    Gradients flow to `stats` only, as in `policy_loss`. Positions with loss mask 0 may hold
    anything, NaN included.

    Args:
      stats: `TokenStats` of `log_probs_from_hidden` or `log_probs_from_logits`; for `Value` and
        `preference.BradleyTerry` `f32[R, T]`.
      batch: `[R, T]`, with the arrays that the loss reads.
      loss: a `PolicyLossConfig`, or a bare policy loss for a config of it; `SFT`, `Value`, a loss
        of `losses.preference` or another `TokenLoss`; or several of these by name, for their sum.
      parallel: the mesh; rows sharded over data, positions over context. `ShardAxes` inside the
        caller's own `shard_map`, None on one device.
      normalizer: `Normalizer.of(loss, micro_batches)` of the whole step, if the batch is one of its
        micro-batches; for a sum of parts one for each by name.

    Returns:
      The scalar f32 loss, and its metrics by name, which `finalize_metrics` turns into numbers. A
      sum of parts has `loss`, and as "name/..." the metrics of each part, without its coefficient.

    Raises:
      TypeError: another loss, statistics of another kind.
      ValueError: an array or a statistic that the loss reads and that is not there, shapes that
        differ, a normalizer that does not fit (see `policy_loss`).

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> float(loss_from_stats(TokenStats(jnp.array([[-1.0, -2.0, jnp.nan]])), batch, SFT())[0])
      1.5
    """
    return from_stats("loss_from_stats", stats, batch, loss, parallel, normalizer)


def loss_from_hidden(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    batch: RolloutBatch,
    loss: AnyLoss,
    *,
    parallel: Parallel = None,
    normalizer: Normalizer | Mapping[str, Normalizer] | None = None,
    temperature: float | Array = 1.0,
    nucleus_ids: Int[Array, "R T K"] | None = None,
    adapter_ids: Int[Array, " R"] | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of a batch from hidden states, whose logits need not exist together; see
    `policy_loss_from_hidden`.

    A sum of parts is loss = sum over parts c of coef_c (1 / N_c) sum over t of w_ct loss_ct: each
    part has its own tokens, weights, aggregation and denominators. All parts share one pass of the
    head; if one part's loss of a token depends on other tokens, all take two.

    Args:
      hidden, head, temperature, adapter_ids, **options: see `policy_loss_from_hidden`.
      batch: `[R, T]`, with the arrays that the loss reads, each valid where the mask of a part that
        reads it is 1.
      loss: a `PolicyLossConfig`, or a bare policy loss for a config of it; `SFT`, `ReferenceKL`,
        `TopKDistillation`, `contrib.score_centering.ScoreCentering`; a loss of `losses.preference`;
        a `TokenLoss` of your own; or several of these by name, for their sum, each as a `Part` if
        it has a coefficient, a mask or weights of its own.
      parallel: the mesh; rows sharded over data, positions over context, the vocabulary over
        tensor. `ShardAxes` inside the caller's own `shard_map`, None on one device.
      normalizer: `Normalizer.of(loss, micro_batches)` of the whole step, if the batch is one of its
        micro-batches; for a sum of parts one for each by name.
      nucleus_ids: `i32[R, T, K]`, -1 padded, for losses of a policy alone: another loss would be
        one of log-probs that are renormalised over the nucleus.

    Returns:
      As `loss_from_stats`.

    Raises:
      TypeError, ValueError: as `log_probs_from_hidden` and `loss_from_stats` do; no parts; parts
        that compare different ids; a nucleus with a loss that is none of a policy.

    Example:
      >>> from jaxppo.losses import SFT, Part, loss_from_hidden
      >>> marks = {"drawn": [1, 0], "written": [0, 1]}
      >>> values = {"advantages": [1.0, 1.0], "old_log_probs": [-np.log(4)] * 2}
      >>> sample = Sample([1, 2, 3], response_start=1, extras=marks, **values)
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> parts = {"policy": Part(PPO(), mask="drawn"), "imitation": Part(SFT(), coef=0.5, mask="written")}
      >>> loss, metrics = loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch, parts)
      >>> round(float(loss), 4), round(float(metrics["imitation/nll"].value), 4)  # -1 + 0.5 log 4
      (-0.3069, 1.3863)
    """
    return _from_hidden(
        "loss_from_hidden",
        (hidden, head),
        batch,
        loss,
        parallel,
        normalizer,
        temperature=temperature,
        nucleus_ids=nucleus_ids,
        adapter_ids=adapter_ids,
        options=options,
    )


def from_stats(
    name: str,
    stats: PyTree,
    batch: RolloutBatch,
    loss: AnyLoss,
    parallel: Parallel,
    normalizer: Normalizers,
    *,
    numbers: Mapping[str, float | Array] | None = None,
    fn: Callable[..., Any] | None = None,
) -> Any:
    """`loss_from_stats` under the name of another door; see `call_parts` for `numbers` and `fn`,
    one to `[R, T]`.
    """
    batch = checked(batch, reader=name)
    parts = as_parts(loss)
    for part in parts.values():
        part_batch = part.own_batch(batch)
        part.token_loss.check(part_batch)
        part.token_loss.check_stats(stats, part_batch)

    def specs(p: ParallelMesh) -> tuple[PyTree, PyTree]:
        if fn is None:
            return p.tokens_spec, P()
        return p.tokens_spec, p.tokens_spec

    return call_parts(
        name, parts, {"stats": stats}, specs, batch, parallel, normalizer, numbers=numbers, fn=fn
    )


def _from_hidden(
    name: str,
    states: Pair,
    batch: RolloutBatch,
    loss: AnyLoss,
    parallel: Parallel,
    normalizer: Normalizers,
    *,
    temperature: float | Array,
    nucleus_ids: Int[Array, "R T K"] | None,
    adapter_ids: Int[Array, " R"] | None,
    options: HeadOptions,
) -> LossAndMetrics:
    """`loss_from_hidden` under the name of another door."""
    batch = checked(batch, reader=name)
    parts = as_parts(loss)
    asked = []
    masks = []
    for which, part in parts.items():
        _check_reads_head(which, part, nucleus_ids)
        part_batch = part.own_batch(batch)
        part.token_loss.check(part_batch)
        asked.append(part.token_loss.asks)
        masks.append(part_batch.loss_mask > 0)
    names = sorted({asks.ids for asks in asked if asks.ids is not None})
    check("ids", f"{names} of several parts", len(names) <= 1, "one extra that they share")
    ids = None
    if names:
        ids = extra_of(batch, names[0], "i32[R, T, K]")
    prepared = prepare_head(
        *states,
        batch.targets,
        parallel=parallel,
        entropy=max((asks.entropy for asks in asked), key=get_args(Entropy).index),
        logit_stats=[stat for asks in asked for stat in asks.logit_stats],
        ids=ids,
        where=functools.reduce(jnp.logical_or, masks),
        temperature=temperature,
        nucleus_ids=nucleus_ids,
        adapter_ids=adapter_ids,
        options=options,
    )

    def specs(p: ParallelMesh) -> tuple[PyTree, PyTree]:
        return prepared.specs, P()

    return call_parts(
        name,
        parts,
        {"head": prepared.inputs},
        specs,
        batch,
        parallel,
        normalizer,
        head=prepared.call,
    )


def _check_reads_head(which: str, part: Part, nucleus_ids: Array | None) -> None:
    """Raises where the loss of a part does not read log-probs, or not those that are
    renormalised over a nucleus.
    """
    loss = part.token_loss
    what = "loss"
    if which:
        what = f"loss[{which!r}]"
    if not loss.of_head:
        raise TypeError(
            f"{what}: got {loss}, expected one of log-probs; loss_from_stats takes this one"
        )
    if nucleus_ids is not None and not loss.takes_nucleus:
        raise ValueError(
            f"nucleus_ids: got some for {loss}, expected None but for the losses of a policy"
        )
