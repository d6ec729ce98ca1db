"""A batch as a part of its optimiser step: the weights of its tokens, and the rules that it breaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from jaxppo.base.arrays import PER_TOKEN_VALUES, Aggregation, masked
from jaxppo.batch.broken_rules import Broken, count_broken
from jaxppo.batch.reads import at_most_zero
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.call import HeadCall, Inputs
from jaxppo.losses.token_loss import Reads, Step, TokenLoss, masked_arrays
from jaxppo.sharding import Segments, ShardAxes
from jaxppo.step.aggregation import Normalizer, step_normalizer, token_weights

Numbers = Mapping[str, Array]  # the traced numbers of a loss, and others of its call, by name


class OfHead(NamedTuple):
    """What a head reads beside its features and parameters, and the sizes that its ids must fit."""

    reads: Reads
    vocab_size: int | None
    adapters: int

    @classmethod
    def of(cls, call: HeadCall, inputs: Inputs) -> OfHead:
        names = ("targets", "nucleus_ids", "adapter_ids", "temperature")
        adapters = 0 if inputs.adapter_ids is None else inputs.lora_a.shape[-3]
        return cls({name: getattr(inputs, name) for name in names}, call.vocab_size, adapters)


def step_of(
    axes: ShardAxes,
    loss: TokenLoss[Any],
    stats: Any,
    batch: RolloutBatch,
    normalizer: Normalizer | None,
    numbers: Numbers,
    head: OfHead | None = None,
    known: Normalizer | None = None,
) -> Step:
    """Per-shard: weighs tokens and checks rules, with the statistics and the step's normalizer if there are any.

    `numbers` are those that the loss and its factor depend on, and `known` is the normalizer of an earlier `Step`
    of the same batch.
    """
    batch = lax.stop_gradient(batch)  # everything that a loss reads from it is a constant
    names = loss.asks.extras
    extras = batch.extras if names is None else {name: batch.extras[name] for name in names}
    batch = dataclasses.replace(batch, loss_mask=batch.loss_mask.astype(jnp.float32), extras=extras)
    segments = batch.segments(axes)
    weighs = known or step_normalizer(batch, segments, normalizer, loss.aggregation, loss.off_policy)
    reads = loss.reads(stats, batch, segments)
    broken = _broken_rules(batch, segments, loss.aggregation, normalizer, reads, numbers, head)
    capped = None
    if (sampled := batch.rollout_log_probs) is not None:
        capped, sampled = sampled > 0, at_most_zero(sampled)
        batch = dataclasses.replace(batch, rollout_log_probs=sampled)
    weights = token_weights(batch.loss_mask, segments, weighs, loss.aggregation_norm)
    if batch.loss_weights is not None:
        weights *= masked(batch.loss_weights, batch.loss_mask)
    left_out = loss.left_out(stats, batch)
    if left_out is not None:  # the denominators still count all tokens
        weights, mask = (jnp.where(left_out, 0, x) for x in (weights, batch.loss_mask))
        batch = dataclasses.replace(batch, loss_mask=mask)
    by_token = {name: getattr(batch, name) for name in PER_TOKEN_VALUES} | {"extras": batch.extras}
    batch = dataclasses.replace(batch, **masked_arrays(by_token, batch.loss_mask))
    step = Step(batch, segments, weighs, weights, broken, left_out, capped)
    # NaN in the weights makes gradients NaN too; a factor of the summed losses would cost one more
    # multiplication of the kernel's gradient
    return dataclasses.replace(step, weights=weights * jnp.where(step.is_broken, jnp.nan, 1))


def _broken_rules(
    batch: RolloutBatch,
    segments: Segments,
    aggregation: Aggregation,
    normalizer: Normalizer | None,
    reads: Reads,
    numbers: Numbers,
    head: OfHead | None,
) -> Broken:
    names = ("segment_ids", "positions", "loss_mask", "sample_ids", "parents", "loss_weights")
    head = head or OfHead({}, None, 0)
    arrays = {name: getattr(batch, name) for name in names} | {**head.reads, **reads}
    if aggregation == "rollout_mean":
        arrays["rollout_ids"] = batch.rollouts
    if normalizer is not None:
        own = [normalizer.tokens, normalizer.sequences, normalizer.weight_mean, normalizer.denominators]
        arrays["normalizer"] = normalizer.counts
        arrays["denominators"] = jnp.concatenate([x.reshape(-1) for x in own if x is not None])
    arrays, numbers = lax.stop_gradient((arrays, numbers))
    return count_broken(
        arrays,
        numbers,
        segments,
        real_last_targets=batch.real_last_targets,
        vocab_size=head.vocab_size,
        adapters=head.adapters,
    )
