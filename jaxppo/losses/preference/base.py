"""The base classes of preference losses and of reward models, and the functions that several of
them share.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import Aggregation, Coefficient, check, check_type, needed
from jaxppo.base.metrics import Terms, means
from jaxppo.base.pytree import PyTree
from jaxppo.batch.pairs import Pairs
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import TokenStats
from jaxppo.losses.token_loss import Asks, Losses, Reads, Stats, TokenLoss, WeighedBatch
from jaxppo.policy_losses.base import choice, number
from jaxppo.sharding import Segments

Numbers = Float[Array, "*n"]
# as of `token_weights`, over chosen responses
NLL = Literal["sequence_mean_token_mean", "sequence_mean_token_sum"]


class OfPairs(TokenLoss[Stats]):
    """A loss of samples or pairs: each of a sample's loss tokens gets its loss, so that the mean
    is over samples.
    """

    aggregation: Aggregation = "sequence_mean_token_mean"
    asks = Asks("none")
    token_local = False
    by_token = False
    paired: ClassVar[bool] = True

    @abc.abstractmethod
    def of_batch(
        self, stats: Stats, batch: RolloutBatch, segments: Segments, tokens: Numbers
    ) -> Any:
        """What the loss reads of each sample, arrays `f32[R, S]`; `tokens` are the loss tokens
        of each.
        """

    @abc.abstractmethod
    def of_samples(self, x: Any, batch: RolloutBatch, pairs: Any) -> Float[Array, "R S"]:
        """The loss of each sample, from what it reads of them; `pairs` are the step's `Pairs` if
        it is `paired`.
        """

    @abc.abstractmethod
    def sides(self, x: Any) -> dict[str, Float[Array, "R S"]]:
        """The "reward" of each sample, and what else has a mean over chosen samples and one over
        rejected ones.
        """

    def check(self, batch: RolloutBatch) -> None:
        needed(
            "batch.rewards",
            batch.rewards,
            "f32[R, S], higher for what was chosen; see samples_of_pairs",
        )
        if self.paired:
            needed(
                "batch.group_ids", batch.group_ids, "i32[R, S], one id for both samples of a pair"
            )
        expected = "None: a loss of whole samples is not one of tokens"
        check("batch.loss_weights", "an array", batch.loss_weights is None, expected)

    def reads(self, stats: Stats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        rewards = {"sample_rewards": batch.rewards}
        if self.paired:
            return {"pair_ids": batch.group_ids, **rewards}
        return rewards

    def terms(
        self, stats: Stats, batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        x, pairs = self._read(stats, batch, segments)
        # with 0 * x the gradient is NaN where weights are NaN, for samples without a pair too
        losses = self.of_samples(x, batch, pairs)
        first = jax.tree.leaves(x)[0]
        check_entries(f"{type(self).__name__}.of_samples", losses, first.shape, "sample")
        return {"preference": segments.spread(losses + 0 * first)}

    def metrics(self, stats: Stats, weighed: WeighedBatch, constants: PyTree) -> Terms:
        spread = weighed.segments.spread
        weights = weighed.weights
        rewards = weighed.batch.rewards
        x, pairs = self._read(stats, weighed.batch, weighed.segments)
        by_sample = self.sides(x)
        chosen = rewards > 0
        terms: Terms = {}
        if pairs is not None:
            chosen = rewards == pairs.to_both(pairs.of_chosen(rewards))
            margin = pairs.of_chosen(by_sample["reward"]) - pairs.of_rejected(by_sample["reward"])
            by_pair = {"reward_margin": margin, "accuracy": (margin > 0).astype(jnp.float32)}
            terms = means({name: spread(pairs.to_both(y)) for name, y in by_pair.items()}, weights)
        is_chosen = spread(chosen.astype(jnp.float32))
        for side, side_weights in (
            ("chosen", weights * is_chosen),
            ("rejected", weights * (1 - is_chosen)),
        ):
            terms |= means(
                {f"{side}_{name}": spread(y) for name, y in by_sample.items()}, side_weights
            )
        return terms

    def _read(
        self, stats: Stats, batch: RolloutBatch, segments: Segments
    ) -> tuple[Any, Pairs | None]:
        tokens = segments.sum(batch.loss_mask)
        pairs = None
        if self.paired:
            pairs = Pairs.of(segments.axes, batch.group_ids, batch.rewards, tokens)
        return self.of_batch(stats, batch, segments, tokens), pairs


class Responses(NamedTuple):
    """Responses as a preference loss sees them, by sums over the loss tokens of each.

    Args:
      log_prob: the sum of log_probs.
      log_ratio: the sum of log_probs - ref_log_probs; that of log_probs where the loss reads no
        reference.
      tokens: the number of loss tokens, at least 1.
    """

    log_prob: Numbers
    log_ratio: Numbers
    tokens: Numbers


class PreferenceLoss(OfPairs[TokenStats]):
    """A preference loss: a frozen dataclass whose fields are its hyperparameters, which may be
    traced.

    It is a mean over the step's pairs, or over its samples for `KTO`, and NaN unless every sample
    with a loss token is in one pair, whose two samples are in one micro-batch. The batch needs
    `rewards`, `group_ids` (not for `KTO`) and, where the loss has a reference, `ref_log_probs`, and
    no `loss_weights`. From hidden states it takes two passes.

    The metrics are `loss` (adds up over micro-batches), means over chosen and rejected samples of
    the implied rewards, `chosen_reward` and `rejected_reward`, and of the mean log-probs,
    `chosen_log_prob` and `rejected_log_prob`; of pairs `reward_margin` and `accuracy`, how often
    the chosen one has the higher reward; `entropy` where statistics have one; `broken_rules` (see
    `policy_loss`).

    Attributes:
      reference: the loss reads `ref_log_probs`.
      paired: the loss compares the two samples of a pair. Else those with a reward above 0 are the
        desirable ones.
      beta: multiplies the log-ratio of a response in `reward`.
      length_normalised: that log-ratio is the mean over tokens, not the sum.
    """

    reference: ClassVar[bool] = True
    beta: Coefficient
    length_normalised: bool = False

    def log_ratio(self, x: Responses) -> Numbers:
        """The log-ratio of each response, or its log-prob without a reference; per token if
        `length_normalised`.
        """
        total = x.log_prob
        if self.reference:
            total = x.log_ratio
        if self.length_normalised:
            return total / x.tokens
        return total

    def reward(self, x: Responses) -> Numbers:
        """The reward that the policy implies, for metrics and, in most losses, for the loss."""
        return self.beta * self.log_ratio(x)

    def sides(self, x: Responses) -> dict[str, Float[Array, "R S"]]:
        return {"reward": self.reward(x), "log_prob": mean_log_prob(x)}

    def check(self, batch: RolloutBatch) -> None:
        super().check(batch)
        if self.reference:
            needed(
                "batch.ref_log_probs",
                batch.ref_log_probs,
                f"f32[R, T] for {self}, see compute_log_probs",
            )

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        reads = {**super().reads(stats, batch, segments)}
        if stats is not None:
            reads["log_probs"] = stats.log_probs
        if self.reference:
            reads["ref_log_probs"] = batch.ref_log_probs
        return reads

    def of_batch(
        self, stats: TokenStats, batch: RolloutBatch, segments: Segments, tokens: Numbers
    ) -> Responses:
        log_ratios = stats.log_probs
        if self.reference:
            log_ratios = stats.log_probs - batch.ref_log_probs
        return Responses(
            segments.sum(stats.log_probs), segments.sum(log_ratios), jnp.maximum(tokens, 1)
        )

    def metrics(self, stats: TokenStats, weighed: WeighedBatch, constants: PyTree) -> Terms:
        terms = super().metrics(stats, weighed, constants)
        if stats.entropy is not None:
            terms["entropy"] = (stats.entropy, weighed.weights, "mean")
        return terms


@dataclasses.dataclass(frozen=True)
class PairLoss(PreferenceLoss):
    """The base of losses of pairs: a frozen dataclass with `__call__`, and with `beta` or a
    `reward` of its own.

    Args:
      nll_coef: the coefficient of the chosen response's negative log-likelihood, which is added to
        the pair's loss.
      nll: how it is summed over the chosen responses, an aggregation of `token_weights`: a mean
        over pairs of its mean over loss tokens, or "sequence_mean_token_sum", a mean over pairs of
        sums, as NeMo-RL. For a mean over the tokens of all chosen responses add a
        `Part(SFT(), mask=)` of them.

    Raises:
      ValueError: a number out of its range, an unknown name; so do all losses of pairs.

    Example:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Hinge(PairLoss):
      ...     beta: float = 0.1
      ...
      ...     def __call__(self, chosen, rejected):
      ...         return jnp.maximum(1 - self.reward(chosen) + self.reward(rejected), 0)
      >>> Hinge(nll_coef=0.2)
      Hinge(nll_coef=0.2, nll='sequence_mean_token_mean', beta=0.1)
    """

    _: dataclasses.KW_ONLY
    nll_coef: Coefficient = number(0.0, least=0)
    nll: NLL = choice("sequence_mean_token_mean", NLL)

    @abc.abstractmethod
    def __call__(self, chosen: Responses, rejected: Responses) -> Numbers:
        """The loss of each pair, without the negative log-likelihood."""

    def of_table(
        self, chosen: Responses, rejected: Responses, there: Bool[Array, " N"]
    ) -> Float[Array, " N"]:
        """The loss of each pair of the step; `there` are the slots that hold a pair."""
        return self(chosen, rejected)

    def of_samples(self, x: Responses, batch: RolloutBatch, pairs: Any) -> Float[Array, "R S"]:
        better, worse = (Responses(*map(of, x)) for of in (pairs.of_chosen, pairs.of_rejected))
        there = better.tokens > 0
        # an empty slot of the table of pairs holds 0 tokens: its mean must not be NaN
        better, worse = (of._replace(tokens=jnp.maximum(of.tokens, 1)) for of in (better, worse))
        nll = -mean_log_prob(better) if self.nll == "sequence_mean_token_mean" else -better.log_prob
        losses = self.of_table(better, worse, there)
        check_entries(f"{type(self).__name__}.__call__", losses, nll.shape, "pair")
        return pairs.to_both(losses + self.nll_coef * nll)


def check_entries(what: str, losses: Array, shape: tuple[int, ...], of: str) -> None:
    """Raises unless a loss gave one number for each pair or sample: a single one would be spread
    over them.
    """
    check_type(
        what,
        losses,
        hasattr(losses, "dtype") and hasattr(losses, "shape"),
        f"an array, one loss for each {of}",
    )
    check(what, f"shape {losses.shape}", losses.shape == shape, f"{shape}, one loss for each {of}")


def mean_log_prob(x: Responses) -> Numbers:
    """The mean over the loss tokens of each response."""
    return x.log_prob / x.tokens


def preferred(margin: Numbers, label_smoothing: Coefficient = 0.0) -> Numbers:
    """-log sigmoid(margin), where the label is wrong with the probability `label_smoothing`."""
    right = jax.nn.log_sigmoid(margin)
    wrong = jax.nn.log_sigmoid(-margin)
    return -(1 - label_smoothing) * right - label_smoothing * wrong
