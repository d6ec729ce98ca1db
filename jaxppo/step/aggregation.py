"""The published denominators of losses, each taken over the whole step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, overload, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import Aggregation, check_choice, masked, needed, spec_of
from jaxppo.base.by_id import ById
from jaxppo.base.pytree import register
from jaxppo.base.stacked import as_rows, check_whole_step, part_of_a_step
from jaxppo.batch.reads import at_most_zero
from jaxppo.batch.rollout_batch import RolloutBatch, check_arrays
from jaxppo.batch.validation import checked
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.off_policy import OffPolicyConfig, of_mean_weight, weight_sums
from jaxppo.policy.unusable import not_finite
from jaxppo.policy_losses import PolicyLoss
from jaxppo.policy_losses.base import Loss
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes, shard_call, vary

Parallel = ParallelMesh | ShardAxes | None


@runtime_checkable
class _OfDepths(Protocol):
    """A loss of several depths of a model, each with a mask of its own."""

    @property
    def aggregation(self) -> Aggregation: ...

    def depth_batches(
        self, micro_batches: RolloutBatch, parallel: Parallel
    ) -> list[RolloutBatch]: ...


class _Options(NamedTuple):
    """What of a loss its denominators depend on."""

    aggregation: Aggregation
    off_policy: OffPolicyConfig | None
    out_of_denominators: tuple[str, ...]


@register(static=["aggregation", "off_policy", "micro_batches", "weighted", "out_of_denominators"])
@dataclasses.dataclass(frozen=True)
class Normalizer:
    """The denominators of a whole optimiser step, so that its micro-batches add up to exactly the
    full batch.

    For stacked micro-batches `[K, R, T]` every array has a leading K too, so that `lax.scan` over
    (batch, normalizer) gives each micro-batch its own part. A loss with other options than those
    that it was made with refuses it.

    Args:
      tokens: `f32[]`, the sum of the loss mask; with the batch's `weighted_denominators`, of the
        mask times `loss_weights`, and so are `denominators`. Tokens that are `out_of_denominators`
        are in none of these numbers.
      sequences: `f32[]`, the number of sequences ("rollout_mean": rollouts) with a loss token.
      denominators: `f32[R, S]`, the loss tokens of each sequence ("rollout_mean": of all samples of
        its rollout).
      counts: `f32[R, S]`, the loss tokens of each sequence, which must be those of the batch that
        it is used with.
      aggregation: that of the denominators; static, like all fields below except `weight_mean`.
      weight_mean: `f32[]`, the mean importance weight, for `OffPolicyConfig(batch_normalize=True)`;
        else None.
      off_policy: the part of an `OffPolicyConfig` that the mean weight depends on; else None.
      micro_batches: K, if the normalizer was made from stacked micro-batches; else None.
      weighted: the batch's `weighted_denominators`.
      out_of_denominators: the names of the batch's log-probs that take a loss token out of the
        denominators where they are not finite, see `Unusable`.

    Example:
      >>> ids, one = jnp.array([[1, 1, 2, 0]]), jnp.array([[0, 1]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.array([[1.0, 1.0, 1.0, 0.0]]), one)
      >>> normalizer = Normalizer.of(PPO(), batch)
      >>> float(normalizer.tokens), float(normalizer.sequences), normalizer.denominators.tolist()
      (3.0, 2.0, [[2.0, 1.0]])
    """

    tokens: Float[Array, ""]
    sequences: Float[Array, ""]
    denominators: Float[Array, "R S"]
    counts: Float[Array, "R S"]
    aggregation: Aggregation
    weight_mean: Float[Array, ""] | None = None
    off_policy: OffPolicyConfig | None = None
    micro_batches: int | None = None
    weighted: bool = False
    out_of_denominators: tuple[str, ...] = ()

    @overload
    @classmethod
    def of(
        cls, loss: Mapping[str, Any], micro_batches: RolloutBatch, *, parallel: Parallel = None
    ) -> dict[str, Normalizer]: ...

    @overload
    @classmethod
    def of(
        cls, loss: _OfDepths, micro_batches: RolloutBatch, *, parallel: Parallel = None
    ) -> list[Normalizer]: ...

    @overload
    @classmethod
    def of(
        cls, loss: Loss, micro_batches: RolloutBatch, *, parallel: Parallel = None
    ) -> Normalizer: ...

    @classmethod
    def of(cls, loss: Any, micro_batches: RolloutBatch, *, parallel: Parallel = None) -> Any:
        """The denominators of a step for a loss.

        Args:
          loss: as `loss_from_hidden` takes it, or an `MTP` or a `Draft` with their number of
            depths.
          micro_batches: a batch, or the step's micro-batches stacked: `[K, R, T]`.
          parallel: the mesh.

        Returns:
          A `Normalizer` for the batch, or stacked ones for its micro-batches: slices of it go with
          slices of them. For a sum of parts one for each part by name, with its own mask and
          weights; for depths a list with one for each.

        Raises:
          TypeError: something else in place of a loss.
          ValueError: extras that a part names, or log-probs that a correction needs, and the batch
            lacks; rows in another context layout than the mesh's, or none; one micro-batch alone.

        Example:
          >>> from jaxppo.losses import SFT, Part
          >>> sample = Sample([1, 2, 3], response_start=1, extras={"written": [0, 1]})
          >>> batch = RolloutBatch.from_samples([sample], row_length=3)
          >>> parts = {"all": PPO(), "imitation": Part(SFT(), mask="written")}
          >>> {name: float(x.tokens) for name, x in Normalizer.of(parts, batch).items()}
          {'all': 2.0, 'imitation': 1.0}
        """
        if isinstance(loss, Mapping):
            return {
                name: cls.of(part, micro_batches, parallel=parallel) for name, part in loss.items()
            }
        if isinstance(loss, _OfDepths):
            batches = loss.depth_batches(
                checked(micro_batches, stacked=True, prefix="micro_batches."), parallel
            )
            return [
                cls._of(_Options(loss.aggregation, None, ()), batch, parallel) for batch in batches
            ]
        if not isinstance(loss, Loss):
            raise TypeError(
                f"loss: got {type(loss).__name__}, expected a loss as loss_from_hidden takes it"
            )
        one: Any = PolicyLossConfig(loss) if isinstance(loss, PolicyLoss) else loss
        if hasattr(one, "with_numbers"):  # a `Part`, whose module this one cannot import
            check_arrays(micro_batches, stacked=True, prefix="micro_batches.")
            return cls.of(one.loss, one.own_batch(micro_batches), parallel=parallel)
        return cls._of(
            _Options(one.aggregation, one.off_policy, one.out_of_denominators),
            micro_batches,
            parallel,
        )

    @classmethod
    def _of(cls, options: _Options, micro_batches: RolloutBatch, parallel: Parallel) -> Normalizer:
        check_choice("aggregation", options.aggregation, Aggregation)
        batch = checked(micro_batches, stacked=True, prefix="micro_batches.")
        check_whole_step("Normalizer.of", batch)
        batch.check_layout(parallel)
        count = batch.loss_mask.shape[0] if batch.loss_mask.ndim == 3 else None
        options = options._replace(off_policy=of_mean_weight(options.off_policy))

        def specs(parallel: ParallelMesh) -> tuple[list[Any], Any]:
            batch_specs = batch.specs(parallel)
            one: Any = P()
            rows: Any = batch_specs.sample_ids
            result = Normalizer(
                tokens=one,
                sequences=one,
                denominators=rows,
                counts=rows,
                aggregation=options.aggregation,
                weight_mean=one,
                off_policy=options.off_policy,
                micro_batches=count,
                weighted=batch.weighted_denominators,
                out_of_denominators=options.out_of_denominators,
            )
            return [batch_specs], result

        arguments = {"micro_batches": batch}
        return shard_call("Normalizer.of", _of_step, parallel, arguments, specs, options)

    def specs(self, parallel: ParallelMesh) -> Normalizer:
        """The PartitionSpec of each array: rows over data."""
        one: Any = P()
        rows: Any = spec_of(parallel.rows_spec, self.counts)
        return dataclasses.replace(
            self, tokens=one, sequences=one, weight_mean=one, denominators=rows, counts=rows
        )

    def check_step(self, batch: RolloutBatch) -> None:
        """Raises where shapes show that the batch is neither this normalizer's step nor a part
        of it.
        """
        stacked = batch.loss_mask.shape[0] if batch.loss_mask.ndim == 3 else None
        count = stacked or part_of_a_step.value or batch.micro_batches
        if count is not None and count != (self.micro_batches or 1):
            raise ValueError(
                f"normalizer: got one of a step of {self.micro_batches or 1} micro-batches,"
                f" expected {count}: Normalizer.of(loss, micro_batches) of the stacked"
                " micro-batches, sliced like them"
            )
        slots = batch.sample_ids.shape
        one = slots[:-2]
        expected = {
            "tokens": one,
            "sequences": one,
            "weight_mean": one,
            "denominators": slots,
            "counts": slots,
        }
        for name, shape in expected.items():
            x = getattr(self, name)
            if x is None:
                continue
            got = jnp.shape(x)
            if got != shape:
                raise ValueError(
                    f"normalizer: got {name} of shape {got}, expected {shape}, that of the batch:"
                    " give each micro-batch its part of each field, as lax.scan and"
                    " accumulate_gradients do"
                )


def _of_step(axes: ShardAxes, options: _Options, micro_batches: RolloutBatch) -> Normalizer:
    batch = as_rows(micro_batches)
    normalizer = normalize(batch, batch.segments(axes), *options)
    shape = micro_batches.sample_ids.shape
    if len(shape) == 2:
        return normalizer
    count, *_ = shape

    def for_each(x: jax.Array) -> jax.Array:
        if x.ndim == 0:
            return jnp.broadcast_to(x, (count,))
        return x.reshape(shape)

    return dataclasses.replace(jax.tree.map(for_each, normalizer), micro_batches=count)


def normalize(
    batch: RolloutBatch,
    segments: Segments,
    aggregation: Aggregation,
    off_policy: OffPolicyConfig | None = None,
    out_of_denominators: tuple[str, ...] = (),
) -> Normalizer:
    """Per-shard: the `Normalizer` of rows that are a whole step."""
    mask = lax.stop_gradient(batch.loss_mask.astype(jnp.float32))
    if aggregation != "token_sum":
        segments.axes.check_complete(f"the denominator of aggregation={aggregation!r}", mask)
    if out_of_denominators:
        mask = jnp.where(not_finite(batch, out_of_denominators), 0, mask)
    counts = segments.sum(mask)
    weights = counts
    if batch.weighted_denominators:
        loss_weights = needed(
            "batch.loss_weights", batch.loss_weights, "f32[R, T] with weighted_denominators=True"
        )
        weights = segments.sum(lax.stop_gradient(masked(loss_weights, mask)) * mask)
    axes = segments.axes
    tokens = axes.psum(vary(weights.sum(), axes.data), axes.data)
    if aggregation == "rollout_mean":
        sequences, denominators = _rollout_denominators(axes, batch, weights)
    else:
        own_sequences = vary((weights > 0).sum(dtype=jnp.float32), axes.data)
        sequences = axes.psum(own_sequences, axes.data)
        denominators = weights
    weight_mean = None
    mean_weight = of_mean_weight(off_policy)
    if mean_weight is not None:
        old = needed("batch.old_log_probs", batch.old_log_probs, "f32[R, T] for batch_normalize")
        rollout = needed(
            "batch.rollout_log_probs", batch.rollout_log_probs, "f32[R, T] for batch_normalize"
        )
        total, count = weight_sums(old, at_most_zero(rollout), mask, segments, mean_weight)
        weight_mean = total / jnp.maximum(count, 1)
    return Normalizer(
        tokens,
        sequences,
        denominators,
        counts,
        aggregation,
        weight_mean,
        off_policy=mean_weight,
        weighted=batch.weighted_denominators,
        out_of_denominators=out_of_denominators,
    )


def _rollout_denominators(
    axes: ShardAxes, batch: RolloutBatch, weights: Float[Array, "R S"]
) -> tuple[Float[Array, ""], Float[Array, "R S"]]:
    """The number of rollouts with a loss token, and the sum of each sample's rollout."""
    rollouts = ById.of(axes, batch.rollouts)
    totals = rollouts.sum(rollouts.gather(weights))
    count = (totals > 0).sum(dtype=jnp.float32)
    denominators = jnp.where(rollouts.there, totals[rollouts.own], 0)
    if batch.rollout_ids is None:
        # two samples of one id would be one rollout, with the tokens of both
        samples = rollouts.sum(rollouts.gather(jnp.ones_like(weights)))
        is_twice = rollouts.there & (samples[rollouts.own] > 1)
        denominators = jnp.where(is_twice, jnp.nan, denominators)
    return count, denominators


def step_normalizer(
    batch: RolloutBatch,
    segments: Segments,
    normalizer: Normalizer | None,
    aggregation: Aggregation,
    off_policy: OffPolicyConfig | None = None,
    out_of_denominators: tuple[str, ...] = (),
) -> Normalizer:
    """Per-shard: the given normalizer, checked.

    Without one, the batch's own: the batch is then a whole step.
    """
    if normalizer is None:
        # the denominators of a micro-batch alone would be wrong
        expected = (
            f"the step's, for aggregation={aggregation!r}: Normalizer.of(loss, micro_batches),"
            " sliced like them"
        )
        if part_of_a_step.value and aggregation != "token_sum":
            raise ValueError(
                f"normalizer: got None inside accumulate_gradients, expected {expected}"
            )
        if (batch.micro_batches or 1) > 1 and aggregation != "token_sum":
            raise ValueError(
                f"normalizer: got None for one of {batch.micro_batches} micro-batches, expected"
                f" {expected}; a batch that is a step of its own has micro_batches=None"
            )
        own = normalize(batch, segments, aggregation, off_policy, out_of_denominators)
        return dataclasses.replace(own, micro_batches=part_of_a_step.value or batch.micro_batches)
    if normalizer.aggregation != aggregation:
        raise ValueError(
            f"normalizer: got one of aggregation {normalizer.aggregation!r}, expected"
            f" {aggregation!r}"
        )
    if normalizer.weighted != batch.weighted_denominators:
        got = f"weighted_denominators={normalizer.weighted}"
        raise ValueError(
            f"normalizer: got one of {got}, expected the batch's, {batch.weighted_denominators}"
        )
    mean_weight = of_mean_weight(off_policy)
    if mean_weight is not None and normalizer.off_policy != mean_weight:
        raise ValueError(
            f"normalizer: got one of off_policy={normalizer.off_policy}, expected {mean_weight}"
        )
    if normalizer.out_of_denominators != out_of_denominators:
        got = f"out_of_denominators={normalizer.out_of_denominators}"
        raise ValueError(
            f"normalizer: got one of {got}, expected {out_of_denominators}, as the loss's"
            " `unusable` says"
        )
    normalizer.check_step(batch)
    return normalizer


def token_weights(
    loss_mask: Float[Array, "R T"],
    segments: Segments,
    normalizer: Normalizer,
    norm: float | None = None,
) -> Float[Array, "R T"]:
    """The weight of each token's loss: loss = sum over all tokens of weight * token loss.

    Let m be the loss mask, N its sum, n_s its sum over a sequence, and B the number of sequences
    with n_s > 0. If the batch has `weighted_denominators`, N and n_s are sums of m times its
    `loss_weights`.

        token_mean                     m / N
        token_sum                      m
        sequence_mean_token_sum        m / B
        sequence_mean_token_mean       m / (n_s B)
        sequence_mean_token_sum_norm   m / (norm B)
        rollout_mean                   m / (n_r B_r), n_r over all samples of a rollout, B_r rollouts

    The normalizer says the aggregation, and N, B and n of the whole step. Weights are 0 where a
    denominator is.
    """
    check_choice("normalizer.aggregation", normalizer.aggregation, Aggregation)
    mask = lax.stop_gradient(loss_mask.astype(jnp.float32))
    tokens = _not_zero(normalizer.tokens)
    sequences = _not_zero(normalizer.sequences)
    denominators = _not_zero(normalizer.denominators)
    match normalizer.aggregation:
        case "token_sum":
            return mask
        case "token_mean":
            return mask / tokens
        case "sequence_mean_token_sum":
            return mask / sequences
        case "sequence_mean_token_sum_norm":
            return mask / (sequences * needed("aggregation_norm", norm, "a number above 0"))
    return mask * segments.spread(1 / (denominators * sequences))


def _not_zero(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """1 in place of 0, since the mean over nothing is 0."""
    return jnp.where(x == 0, 1, x)
