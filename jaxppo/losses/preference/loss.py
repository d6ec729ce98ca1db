"""`preference_loss`: from log-probs and a batch of pairs to a scalar loss and its metrics, on any mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Unpack

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo._arrays import Aggregation, masked, needed
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.head.call import HeadOptions
from jaxppo.head.head import Entropy, Head, TokenStats
from jaxppo.head.prepare import prepare_head
from jaxppo.losses.preference.base import PreferenceLoss, Responses, mean_log_prob
from jaxppo.losses.token_loss import Constants, Step, TokenLoss, loss_of_hidden, loss_of_stats
from jaxppo.metrics import Metrics, Terms, means
from jaxppo.pairs import Pairs
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes
from jaxppo.validation import checked


def preference_loss(
    stats: TokenStats,
    batch: RolloutBatch,
    loss: PreferenceLoss,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The mean of a preference loss over the step's pairs, or over its samples for `KTO`.

    Two samples with the same group id are a pair, and the one with the higher reward is the chosen one. They may lie in
    any rows of the batch. Every sample with a loss token must be in one pair, and both samples of a pair in one
    micro-batch: otherwise the loss is NaN. Gradients flow to `stats` only.

    Args:
      stats: `f32[R, T]` log-probs of the targets; see `log_probs_from_hidden`.
      batch: `[R, T]`; needs `rewards`, `group_ids` but for `KTO`, and `ref_log_probs` where the loss has a reference.
      loss: `DPO`, `IPO`, `SimPO`, `ORPO`, `KTO`, or your own.
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: the step's, if the batch is one of its micro-batches. Make it with the aggregation
        "sequence_mean_token_mean", which counts samples, two per pair.

    Returns:
      The scalar f32 loss, and the metrics `loss` (adds up over micro-batches), means over chosen and rejected samples
      of the implied rewards, `chosen_reward` and `rejected_reward`, and of the mean log-probs, `chosen_log_prob` and
      `rejected_log_prob`; of pairs `reward_margin` and `accuracy`, how often the chosen one has the higher reward;
      `entropy` where stats have one; `broken_rules` (see `policy_loss`).

    Raises:
      TypeError: stats that are no `TokenStats`, a loss that is no `PreferenceLoss`.
      ValueError: an array that the batch lacks, shapes that differ, a normalizer that does not fit (see `policy_loss`).

    Example:
      >>> from jaxppo.losses import preference
      >>> samples = preference.samples_of_pairs([[1]], chosen=[[2, 3]], rejected=[[4]])
      >>> batch = RolloutBatch.from_samples(samples, row_length=5)
      >>> batch = dataclasses.replace(batch, ref_log_probs=-np.ones((1, 5)))
      >>> now = TokenStats(jnp.array([[-0.5, -0.5, 0.0, -2.0, 0.0]]))  # the log-ratios are 1 and -1
      >>> loss, metrics = preference.preference_loss(now, batch, preference.DPO(beta=0.5))
      >>> round(float(loss), 4), float(metrics["reward_margin"].value)
      (0.3133, 1.0)
    """
    batch = _checked(batch, loss)
    if not isinstance(stats, TokenStats):
        raise TypeError(f"stats: got {type(stats).__name__}, expected TokenStats")
    if stats.log_probs.shape != batch.loss_mask.shape or stats.log_probs.ndim != 2:
        raise ValueError(
            f"stats.log_probs: got shape {stats.log_probs.shape}, expected the batch's [R, T], {batch.loss_mask.shape}"
        )
    return loss_of_stats("preference_loss", PreferenceTokenLoss(loss), stats, batch, parallel, normalizer)


def preference_loss_from_hidden(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    batch: RolloutBatch,
    loss: PreferenceLoss,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    temperature: float | Array = 1.0,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """`preference_loss` after `log_probs_from_hidden`, without the logits; two passes over the vocabulary.

    Args:
      hidden: `[R, T, H]`, see `log_probs_from_hidden`.
      head: a `Head`, or its bare kernel `[H, V]`.
      batch: see `preference_loss`.
      loss: see `preference_loss`.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      normalizer: see `preference_loss`.
      temperature: see `log_probs_from_hidden`.
      **options: see `HeadOptions`.

    Returns:
      The scalar f32 loss, and the metrics of `preference_loss`.

    Raises:
      TypeError, ValueError: as `log_probs_from_hidden` and `preference_loss` do.

    Example:
      >>> from jaxppo.losses import preference
      >>> samples = preference.samples_of_pairs([[1]], chosen=[[2, 3]], rejected=[[3]])
      >>> batch = RolloutBatch.from_samples(samples, row_length=5)
      >>> states = jnp.ones((1, 5, 2)), jnp.zeros((2, 4))
      >>> round(float(preference.preference_loss_from_hidden(*states, batch, preference.SimPO(margin=0.0))[0]), 4)
      0.6931
    """
    batch = _checked(batch, loss)
    token_loss = PreferenceTokenLoss(loss)
    prepared = prepare_head(
        hidden,
        head,
        batch.targets,
        parallel=parallel,
        temperature=temperature,
        entropy=token_loss.entropy,
        where=batch.loss_mask > 0,
        options=options,
    )
    return loss_of_hidden("preference_loss_from_hidden", token_loss, prepared, batch, parallel, normalizer, None)


def _checked(batch: RolloutBatch, loss: PreferenceLoss) -> RolloutBatch:
    batch = checked(batch)
    if not isinstance(loss, PreferenceLoss):
        raise TypeError(f"loss: got {type(loss).__name__}, expected a PreferenceLoss such as DPO()")
    check_pairs(batch, loss.paired)
    if loss.reference:
        needed("batch.ref_log_probs", batch.ref_log_probs, f"f32[R, T] for {loss}, see compute_log_probs")
    return batch


def check_pairs(batch: RolloutBatch, paired: bool) -> None:
    """Raises where a batch lacks the rewards or groups of its pairs, or has loss weights."""
    needed("batch.rewards", batch.rewards, "f32[R, S], higher for what was chosen; see samples_of_pairs")
    if paired:
        needed("batch.group_ids", batch.group_ids, "i32[R, S], one id for both samples of a pair")
    if batch.loss_weights is not None:
        raise ValueError(
            "batch.loss_weights: got an array, expected None: a loss of whole samples is not one of tokens"
        )


@dataclasses.dataclass(frozen=True)
class OfPairs(TokenLoss):
    """A loss of samples or pairs: each of a sample's loss tokens gets the sample's loss.

    The mean over samples of the mean over their tokens is then the mean over samples. It is also the mean over pairs,
    since both samples of a pair have the pair's loss.
    """

    @property
    def aggregation(self) -> Aggregation:  # type: ignore[override]
        return "sequence_mean_token_mean"

    @property
    def aggregation_norm(self) -> float | None:  # type: ignore[override]
        return None

    @property
    def entropy(self) -> Entropy:
        return "none"

    @property
    def token_local(self) -> bool:
        return False


@dataclasses.dataclass(frozen=True)
class PreferenceTokenLoss(OfPairs):
    """A preference loss by sample."""

    loss: PreferenceLoss

    def ruled(self, stats: TokenStats | None, batch: RolloutBatch) -> Mapping[str, Array | None]:
        given: dict[str, Array | None] = {"log_probs": None if stats is None else stats.log_probs}
        if self.loss.reference:
            given["ref_log_probs"] = batch.ref_log_probs
        return given | (ruled_of_pairs(batch) if self.loss.paired else {"sample_rewards": batch.rewards})

    def per_token(
        self, stats: TokenStats, batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> Float[Array, "R T"]:
        of, pairs, chosen = self._read(stats, batch, segments)
        return to_tokens(self.loss.of_samples(of, chosen, pairs), of.log_prob, segments)

    def terms(self, stats: TokenStats, step: Step, constants: Constants) -> Terms:
        of, pairs, chosen = self._read(stats, step.batch, step.segments)
        of_sides = {"reward": self.loss.reward(of), "log_prob": mean_log_prob(of)}
        terms = sample_terms(step, chosen, of_sides, {} if pairs is None else compared(of_sides["reward"], pairs))
        return terms if stats.entropy is None else {**terms, "entropy": (stats.entropy, step.weights, "mean")}

    def _read(
        self, stats: TokenStats, batch: RolloutBatch, segments: Segments
    ) -> tuple[Responses, Pairs | None, Bool[Array, "R S"]]:
        """The responses of this device, the step's pairs where the loss has pairs, and which samples were chosen."""
        mask = batch.loss_mask
        log_ratios = log_probs = masked(stats.log_probs, mask)
        if self.loss.reference:
            log_ratios = log_probs - masked(needed("batch.ref_log_probs", batch.ref_log_probs), mask)
        tokens = segments.sum(mask)
        of = Responses(segments.sum(log_probs), segments.sum(log_ratios), jnp.maximum(tokens, 1))
        if self.loss.paired:
            return of, *pairs_of(batch, segments, tokens)
        return of, None, needed("batch.rewards", batch.rewards, "f32[R, S]") > 0


def sample_terms(
    step: Step,
    chosen: Bool[Array, "R S"],
    of_sides: Mapping[str, Float[Array, "R S"]],
    of_pairs: Mapping[str, Float[Array, "R S"]],
) -> Terms:
    """The terms of means over samples: of the chosen ones and of the rejected ones, and of all."""
    spread, weights = step.segments.spread, step.weights
    is_chosen = spread(chosen.astype(jnp.float32))
    by_side = {"chosen": weights * is_chosen, "rejected": weights * (1 - is_chosen)}
    return means({name: spread(x) for name, x in of_pairs.items()}, weights) | {
        f"{side}_{name}": (spread(x), its, "mean") for name, x in of_sides.items() for side, its in by_side.items()
    }


def to_tokens(losses: Float[Array, "R S"], x: Float[Array, "R S"], segments: Segments) -> Float[Array, "R T"]:
    """The loss of each sample at its positions.

    It adds 0 * x, the array that the loss is a function of: where weights are NaN, the gradient is then NaN for samples
    without a pair too.
    """
    return segments.spread(losses + 0 * x)


def ruled_of_pairs(batch: RolloutBatch) -> dict[str, Array | None]:
    """The arrays that the rule of pairs reads."""
    return {"pair_ids": batch.group_ids, "pair_rewards": batch.rewards}


def pairs_of(batch: RolloutBatch, segments: Segments, tokens: Float[Array, "R S"]) -> tuple[Pairs, Bool[Array, "R S"]]:
    """The step's pairs, and which of this device's samples were chosen; `tokens` are the loss tokens of each."""
    rewards = needed("batch.rewards", batch.rewards, "f32[R, S]")
    pairs = Pairs.of(segments.axes, needed("batch.group_ids", batch.group_ids, "i32[R, S]"), rewards, tokens)
    return pairs, rewards == pairs.to_both(pairs.of_chosen(rewards))


def compared(rewards: Float[Array, "R S"], pairs: Pairs) -> dict[str, Float[Array, "R S"]]:
    """For each sample, the reward margin of its pair, and whether the chosen sample has the higher reward."""
    ahead = pairs.of_chosen(rewards) - pairs.of_rejected(rewards)
    return {
        "reward_margin": pairs.to_both(ahead),
        "accuracy": pairs.to_both((ahead > 0).astype(jnp.float32)),
    }
