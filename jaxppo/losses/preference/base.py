"""The base classes of preference losses, and the functions that several of them share."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import Coefficient, check_choice, check_field, needed
from jaxppo.base.metrics import Terms
from jaxppo.batch.pairs import Pairs
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import TokenStats
from jaxppo.losses.preference.of_pairs import (
    OfPairs,
    check_pairs,
    compared,
    pairs_of,
    reads_of_pairs,
    sample_terms,
    to_tokens,
)
from jaxppo.losses.token_loss import Losses, Reads, Step
from jaxppo.sharding import Segments

Numbers = Float[Array, "*n"]
NLL = Literal["token_mean", "token_sum"]


class Responses(NamedTuple):
    """Responses as a preference loss sees them: sums over the loss tokens of each."""

    log_prob: Numbers
    """The sum of log_probs."""
    log_ratio: Numbers
    """The sum of log_probs - ref_log_probs; the sum of log_probs where the loss reads no reference."""
    tokens: Numbers
    """The number of loss tokens, at least 1."""


class PreferenceLoss(OfPairs[TokenStats]):
    """A preference loss: a frozen dataclass whose fields are its hyperparameters, which may be traced.

    It is a mean over the step's pairs, or over its samples for `KTO`. Two samples with the same group id are a pair,
    and the one with the higher reward is the chosen one. They may lie in any rows of the batch. Every sample with a
    loss token must be in one pair, and both samples of a pair in one micro-batch: otherwise the loss is NaN. The batch
    needs `rewards`, `group_ids` (not for `KTO`) and, where the loss has a reference, `ref_log_probs`. It must have no
    `loss_weights`.

    The metrics are `loss` (adds up over micro-batches), means over chosen and rejected samples of the implied rewards,
    `chosen_reward` and `rejected_reward`, and of the mean log-probs, `chosen_log_prob` and `rejected_log_prob`; of
    pairs `reward_margin` and `accuracy`, how often the chosen one has the higher reward; `entropy` where statistics
    have one; `broken_rules` (see `policy_loss`). From hidden states it takes two passes over the vocabulary.

    Attributes:
      reference: the loss reads `ref_log_probs`.
      paired: the loss compares the two samples of a pair. Otherwise each sample has its own loss, and those with a
        reward above 0 are the desirable ones.

    Example:
      >>> from jaxppo.losses import loss_from_stats, preference
      >>> samples = preference.samples_of_pairs([[1]], chosen=[[2, 3]], rejected=[[4]])
      >>> batch = RolloutBatch.from_samples(samples, row_length=5)
      >>> batch = dataclasses.replace(batch, ref_log_probs=-np.ones((1, 5)))
      >>> now = TokenStats(jnp.array([[-0.5, -0.5, 0.0, -2.0, 0.0]]))  # the log-ratios are 1 and -1
      >>> loss, metrics = loss_from_stats(now, batch, preference.DPO(beta=0.5))
      >>> round(float(loss), 4), float(metrics["reward_margin"].value)
      (0.3133, 1.0)
    """

    reference: ClassVar[bool] = True
    paired: ClassVar[bool] = True

    @abc.abstractmethod
    def reward(self, x: Responses) -> Numbers:
        """The reward that the policy implies, for metrics and, in most losses, for the loss."""

    @abc.abstractmethod
    def of_samples(self, x: Responses, chosen: Bool[Array, "R S"], pairs: Pairs | None) -> Float[Array, "R S"]:
        """The loss of each sample, whose mean over the step's samples is the loss.

        Args:
          x: the responses of this device's samples, `[R, S]`.
          chosen: which samples were chosen, or are desirable.
          pairs: the pairs of the step, where the loss is `paired`.
        """

    def check(self, batch: RolloutBatch) -> None:
        check_pairs(batch, self.paired)
        if self.reference:
            needed("batch.ref_log_probs", batch.ref_log_probs, f"f32[R, T] for {self}, see compute_log_probs")

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        found: dict[str, Array | None] = {"log_probs": None if stats is None else stats.log_probs}
        if self.reference:
            found["ref_log_probs"] = batch.ref_log_probs
        return found | (reads_of_pairs(batch) if self.paired else {"sample_rewards": batch.rewards})

    def terms(self, stats: TokenStats, batch: RolloutBatch, constants: Any, segments: Segments) -> Losses:
        of, pairs, chosen = self._read(stats, batch, segments)
        return {"preference": to_tokens(self.of_samples(of, chosen, pairs), of.log_prob, segments)}

    def metrics(self, stats: TokenStats, step: Step, constants: Any) -> Terms:
        of, pairs, chosen = self._read(stats, step.batch, step.segments)
        of_sides = {"reward": self.reward(of), "log_prob": mean_log_prob(of)}
        terms = sample_terms(step, chosen, of_sides, {} if pairs is None else compared(of_sides["reward"], pairs))
        return terms if stats.entropy is None else {**terms, "entropy": (stats.entropy, step.weights, "mean")}

    def _read(
        self, stats: TokenStats, batch: RolloutBatch, segments: Segments
    ) -> tuple[Responses, Pairs | None, Bool[Array, "R S"]]:
        """The responses of this device, the step's pairs where the loss has pairs, and which samples were chosen."""
        log_ratios = log_probs = stats.log_probs
        if self.reference:
            log_ratios = log_probs - needed("batch.ref_log_probs", batch.ref_log_probs)
        tokens = segments.sum(batch.loss_mask)
        of = Responses(segments.sum(log_probs), segments.sum(log_ratios), jnp.maximum(tokens, 1))
        if self.paired:
            return of, *pairs_of(batch, segments, tokens)
        return of, None, needed("batch.rewards", batch.rewards, "f32[R, S]") > 0


@dataclasses.dataclass(frozen=True)
class PairLoss(PreferenceLoss):
    """The base of losses on pairs. A subclass adds `__call__` and `reward`.

    Args:
      nll_coef: the coefficient of the chosen response's negative log-likelihood, which is added to the pair's loss.
      nll: "token_mean" is its mean over loss tokens; "token_sum" is the sum, NeMo-RL's default.

    Raises:
      ValueError: a coefficient below 0, an unknown `nll`.

    Example:
      >>> import dataclasses
      >>> from jaxppo.losses import preference
      >>> @dataclasses.dataclass(frozen=True)
      ... class Hinge(preference.PairLoss):
      ...     def reward(self, x):
      ...         return 0.1 * x.log_ratio
      ...
      ...     def __call__(self, chosen, rejected):
      ...         return jnp.maximum(1 - self.reward(chosen) + self.reward(rejected), 0)
      >>> Hinge(nll_coef=0.2)
      Hinge(nll_coef=0.2, nll='token_mean')
    """

    nll_coef: Coefficient = dataclasses.field(default=0.0, kw_only=True)
    nll: NLL = dataclasses.field(default="token_mean", kw_only=True)

    def __post_init__(self) -> None:
        check_field(self, "nll_coef", least=0)
        check_choice("nll", self.nll, NLL)

    @abc.abstractmethod
    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        """The loss of each pair, without the negative log-likelihood."""

    def of_samples(self, x: Responses, chosen: Bool[Array, "R S"], pairs: Pairs | None) -> Float[Array, "R S"]:
        pairs = needed("pairs", pairs, "the pairs of the step, since the loss is paired")
        better, worse = (Responses(*map(of, x)) for of in (pairs.of_chosen, pairs.of_rejected))
        # an empty slot of the table of pairs holds 0 tokens: its mean must not be NaN
        better, worse = (of._replace(tokens=jnp.maximum(of.tokens, 1)) for of in (better, worse))
        nll = -mean_log_prob(better) if self.nll == "token_mean" else -better.log_prob
        return pairs.to_both(self(better, worse) + self.nll_coef * nll)


def mean_log_prob(x: Responses) -> Numbers:
    """The mean over the loss tokens of each response."""
    return x.log_prob / x.tokens


def log_ratio_of(x: Responses, length_normalised: bool) -> Numbers:
    """The log-ratio of a response to the reference: the sum over its loss tokens, or their mean."""
    return x.log_ratio / x.tokens if length_normalised else x.log_ratio


def preferred(margin: Numbers, label_smoothing: Coefficient = 0.0) -> Numbers:
    """-log sigmoid(margin), where the label is wrong with the probability `label_smoothing`."""
    right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def check_label_smoothing(loss: PreferenceLoss) -> None:
    check_field(loss, "label_smoothing", least=0, most=0.5)
