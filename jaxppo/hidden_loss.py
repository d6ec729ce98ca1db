"""Hidden states, a head kernel and a batch to a policy or SFT loss, without logits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo._sharding import ParallelMesh, Segments, ShardAxes, note, shard_call
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig, is_zero
from jaxppo.log_probs.from_hidden import prepare_head
from jaxppo.log_probs.hidden_rule import token_stats
from jaxppo.log_probs.one_pass import one_pass_loss, one_pass_of
from jaxppo.log_probs.stats import TokenStats
from jaxppo.loss import (
    check_batch,
    check_covariance,
    correct,
    is_token_local,
    own_normalizer,
    reduce_losses,
    step_weights,
    token_losses,
)
from jaxppo.metrics import Metrics
from jaxppo.policy_losses import PolicyLoss

ONE_PASS_BYTES = 48 * 2**20
_PER_SEGMENT = ("rewards", "sample_ids", "group_ids", "rollout_ids")


def policy_loss_from_hidden(
    hidden: Float[Array, "R T H"],
    kernel: Float[Array, "H V"],
    batch: RolloutBatch,
    config: PolicyLossConfig,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    covariance: Float[Array, "R T"] | None = None,
    one_pass_bytes: int = ONE_PASS_BYTES,
    **head: Any,
) -> tuple[Float[Array, ""], Metrics]:
    """`policy_loss` after `log_probs_from_hidden`; only tokens that carry loss meet the kernel.

    Where the loss of a token depends on its own log-prob and entropy only (`is_token_local`), gradients are computed
    while the logits of a block of tokens are at hand: three matrix products instead of four. That takes a block's
    logits over the device's part of the vocabulary, and an f32 gradient of the kernel, beside the result where the
    kernel has another dtype or devices' gradients are summed. The logits of the first H tokens, where so many count,
    are put into that gradient's memory before it is. Where they do not fit `one_pass_bytes`, where the kernel
    is sharded over FSDP axes, or the hidden states by position over the tensor axis, the log-probs come first and the
    head is walked again for the gradients. The numbers are the same to f32 rounding; `sharding.audit` reports which way
    a program goes, in its notes.

    Args:
      hidden: `[R, T, H]`, see `log_probs_from_hidden`.
      kernel: `[H, V]` or `[V, H]`.
      batch: `[R, T]`, see `policy_loss`; its targets and loss mask say what is computed.
      config: which loss, and the sampler's temperature.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      normalizer: see `policy_loss`.
      covariance: see `policy_loss`.
      one_pass_bytes: what the one pass may take on each device beside its results; 0 for never.
      **head: `kernel_layout`, `bias`, `logit_softcap`, `keep_ids`, `vocab_size`, `kernel_spec`, `hidden_spec`,
        `block_bytes` and `keep_logits` (the last two for two passes) of `log_probs_from_hidden`.

    Returns:
      The scalar f32 loss and metrics by name.

    Raises:
      TypeError, ValueError: as the two functions do.

    Example:
      >>> ids, one = jnp.array([[1, 1, 0]]), jnp.array([[0]])
      >>> mask = jnp.array([[1.0, 1.0, 0.0]])
      >>> old = -jnp.log(4.0) * mask
      >>> batch = RolloutBatch(ids, ids, ids, ids, mask, one, one, one, advantages=mask, old_log_probs=old)
      >>> loss, _ = policy_loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch, PolicyLossConfig())
      >>> float(loss)
      -1.0
    """
    check_batch(batch, config)
    check_covariance(covariance, config)
    call, args = prepare_head(
        hidden,
        kernel,
        batch.targets,
        parallel=parallel,
        temperature=config.temperature,
        entropy=config.entropy_mode,
        where=batch.loss_mask > 0,
        **head,
    )
    coefs = {n: getattr(config, n) for n in ("entropy_coef", "kl_coef") if not is_zero(getattr(config, n))}
    plain: dict[str, Any] = dict.fromkeys((*coefs, "temperature"), 1.0)
    static = dataclasses.replace(config, **plain)

    def per_shard(axes: ShardAxes, arrays: tuple, batch, normalizer, covariance, coefs) -> tuple[jax.Array, Metrics]:
        rule, inputs = call.on_device(axes, *arrays)
        coefs = lax.stop_gradient(coefs)
        local = dataclasses.replace(static, **coefs)
        segments = batch.segments(axes)
        normalizer = own_normalizer(batch, local, segments) if normalizer is None else normalizer
        weights = step_weights(batch, local, segments, normalizer)
        pass_ = None
        if is_token_local(static):
            pass_ = one_pass_of(rule, inputs, _TokenLoss(static), one_pass_bytes)
        shaped = lambda tree: jax.tree.map(lambda x: x.reshape(batch.targets.shape), tree)  # noqa: E731
        if pass_ is None:
            with note("two passes"):
                log_probs, entropy, _ = token_stats(rule, inputs)
            stats = TokenStats(*shaped((log_probs, entropy)))
            correction = correct(stats, batch, local, segments, normalizer)
            losses, values = token_losses(stats, batch, local, segments, correction, covariance)
            return reduce_losses(axes, losses, values, weights, batch, local)
        correction = correct(None, batch, local, segments, normalizer)
        per_token, shared = _by_token(batch, weights, correction, covariance)
        with note(f"one pass, {pass_.block_tokens} tokens a block"):
            loss, log_probs, entropy = one_pass_loss(pass_, inputs, per_token, (shared, coefs))
        stats = TokenStats(*shaped(lax.stop_gradient((log_probs, entropy))))
        losses, values = token_losses(stats, batch, local, segments, correction, covariance)
        _, metrics = reduce_losses(axes, losses, values, weights, batch, local)
        return loss, metrics

    def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
        of_normalizer = None if normalizer is None else Normalizer.specs(p)
        of_covariance = None if covariance is None else p.tokens_spec
        return [tuple(call.specs(p)), batch.specs(p), of_normalizer, of_covariance, P()], P()

    args = {
        "head": tuple(args.values()),
        "batch": batch,
        "normalizer": normalizer,
        "covariance": covariance,
        "coefs": coefs,
    }
    return shard_call("policy_loss_from_hidden", per_shard, parallel, args, specs)


def sft_loss_from_hidden(
    hidden: Float[Array, "R T H"],
    kernel: Float[Array, "H V"],
    batch: RolloutBatch,
    *,
    aggregation: str = "token_mean",
    aggregation_norm: float | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    one_pass_bytes: int = ONE_PASS_BYTES,
    **head: Any,
) -> tuple[Float[Array, ""], Metrics]:
    """The negative log-likelihood of the targets, in one pass where `policy_loss_from_hidden` would take one.

    loss = sum over tokens of weight_t * -log_prob_t. For label smoothing and z-loss, see `sft_loss`.

    Args:
      hidden: `[R, T, H]`, see `log_probs_from_hidden`.
      kernel: `[H, V]` or `[V, H]`.
      batch: `[R, T]`; its targets, loss mask and sequences count.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.
      one_pass_bytes: see `policy_loss_from_hidden`.
      **head: options of `log_probs_from_hidden`, `temperature` among them.

    Returns:
      The scalar f32 loss, and the metrics of `sft_loss`.

    Raises:
      TypeError, ValueError: as `log_probs_from_hidden` and `sft_loss` do.

    Example:
      >>> ids, one = jnp.array([[1, 1, 0]]), jnp.array([[0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.array([[1.0, 1.0, 0.0]]), one, one, one)
      >>> loss, _ = sft_loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch)
      >>> round(float(loss), 4)
      1.3863
    """
    config = PolicyLossConfig(
        loss=_NLL,
        old_log_probs="current",
        aggregation=aggregation,
        aggregation_norm=aggregation_norm,
        temperature=head.pop("temperature", 1.0),
    )
    # the likelihood looks at no advantage, and nothing is compared with
    batch = dataclasses.replace(
        batch, advantages=jnp.zeros_like(batch.loss_mask), ref_log_probs=None, rollout_log_probs=None
    )
    loss, found = policy_loss_from_hidden(
        hidden, kernel, batch, config, parallel=parallel, normalizer=normalizer, one_pass_bytes=one_pass_bytes, **head
    )
    return loss, {name: found[name] for name in ("loss", "nll", "entropy")}


def _nll(log_probs, old_log_probs, advantages, *, mask, segments, config):
    return -log_probs, {"nll": -log_probs}


_NLL = PolicyLoss(_nll, token_local=True)


def _by_token(batch: RolloutBatch, weights: Any, correction: Any, covariance: Any) -> tuple[Any, Any]:
    """What the loss of a token reads: arrays `[N]`, and the batch's arrays by sequence."""
    shared = {name: getattr(batch, name) for name in _PER_SEGMENT}
    tokens = dataclasses.replace(batch, **dict.fromkeys(_PER_SEGMENT))  # type: ignore[arg-type]
    return jax.tree.map(lambda x: x.reshape(-1), (tokens, weights, correction, covariance)), shared


@dataclasses.dataclass(frozen=True)
class _TokenLoss:
    """The weighted losses of some tokens, as the one pass wants them."""

    config: PolicyLossConfig

    def __call__(self, log_probs: jax.Array, entropy: jax.Array | None, per_token: Any, shared: Any) -> jax.Array:
        (batch, weights, correction, covariance), (by_segment, coefs) = (
            jax.tree.map(lambda x: x[None], per_token),
            shared,
        )
        stats = TokenStats(log_probs[None], None if entropy is None else entropy[None])
        batch = dataclasses.replace(batch, **by_segment)
        config = dataclasses.replace(self.config, **coefs)
        segments = Segments(batch.segment_ids, batch.num_segments)
        losses, _ = token_losses(stats, batch, config, segments, correction, covariance)
        return (jnp.where(weights > 0, losses, 0) * weights)[0]
