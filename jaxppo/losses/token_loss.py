"""`TokenLoss`: what a loss of tokens is, apart from how `losses.compute` computes it."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import PER_TOKEN_VALUES, Aggregation, check, masked
from jaxppo.base.metrics import Terms
from jaxppo.base.pytree import PyTree
from jaxppo.batch.broken_rules import Broken
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import Entropy, LogitStat, TokenStats
from jaxppo.head.token_arguments import check_stats
from jaxppo.policy.off_policy import OffPolicyConfig
from jaxppo.policy_losses.base import Loss
from jaxppo.sharding import Segments
from jaxppo.step.aggregation import Normalizer

Stats = TypeVar("Stats")
# by the names of `reads` and `rules`; None for statistics that are yet to come
Reads = Mapping[str, Array | None]
Losses = Mapping[str, Float[Array, "R T"]]
OF_EVERY_LOSS = frozenset({"loss", "broken_rules", "unusable_tokens"})  # metrics


@dataclasses.dataclass(frozen=True)
class Asks:
    """What a loss needs beside the log-probs and the fields of its batch.

    Args:
      entropy: the entropy mode that the head must use.
      logit_stats: the statistics of `log_probs_from_hidden(..., logit_stats=)`.
      ids: the extra of the batch that holds the ids whose log-probs it reads.
      extras: the extras that it reads; None for all.
    """

    entropy: Entropy = "metric"
    logit_stats: tuple[LogitStat, ...] = ()
    ids: str | None = None
    extras: tuple[str, ...] | None = ()


@dataclasses.dataclass(frozen=True)
class WeighedBatch:
    """Per-shard: a batch, and what each token weighs in its optimiser step.

    The batch holds constants. Its loss mask is 0 where the loss leaves a token out, its floats are
    0 where the mask is, and the sampler's log-probs are at most 0.
    """

    loss: TokenLoss[Any]  # with the numbers that the batch brings, see `by_row`
    batch: RolloutBatch
    # with the loss mask of the tokens that are left out too, and what stands elsewhere
    whole_batch: RolloutBatch
    segments: Segments
    normalizer: Normalizer  # of the whole step
    weights: Float[Array, "R T"]  # of each token's loss; NaN where a rule is broken anywhere
    broken: Broken  # how often each rule is broken on all devices together
    known: frozenset[str]  # the names of what the loss reads, whose rules are among these
    # the tokens of the loss mask without a loss; None where none is left out
    left_out: Bool[Array, "R T"] | None
    # the tokens of the loss mask that `TokenLoss.unusable_tokens` finds
    unusable: Bool[Array, "R T"] | None
    # the tokens whose sampler's log-prob was above 0; None without the sampler's
    capped: Bool[Array, "R T"] | None


class TokenLoss(Loss, abc.ABC, Generic[Stats]):
    """The loss of a token as a value: a frozen dataclass of numbers, which may be traced, and of
    names of arrays.

    It reads the batch, its extras too, and the `Stats` of a model: a head's `TokenStats`, or a
    critic's values. A class of your own needs `terms` alone. Where the loss mask is 0, the
    statistics and float arrays that it sees are 0.

    Attributes:
      aggregation, aggregation_norm: the denominators, see `token_weights`; fields in classes that
        let them be chosen.
      off_policy: the correction whose mean weight is in the normalizer.
      out_of_denominators: the batch's log-probs that take a loss token out of the denominators
        where they are not finite; `left_out` must leave it out too.
      token_local: the loss of a token depends only on the batch and on the statistics of that
        token.
      of_head: the statistics are a head's `TokenStats`.
      takes_nucleus: log-probs may be renormalised over a nucleus, see `loss_from_hidden`.
      by_token: a number of the loss may be an array `[R, T]` in `terms`, one for each token, see
        `by_row`.
      coefficients: the fields, such as "kl.coef" for one in a field, that are traced unless they
        are known to be 0.

    Example:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Focal(TokenLoss[TokenStats]):
      ...     gamma: float = 2.0
      ...
      ...     def terms(self, stats, batch, constants, segments):
      ...         return {"focal": -((1 - jnp.exp(stats.log_probs)) ** self.gamma) * stats.log_probs}
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> loss, _ = loss_from_stats(TokenStats(jnp.log(jnp.array([[0.5, 0.5, 0.9]]))), batch, Focal())
      >>> round(float(loss), 4)  # log(2) / 4
      0.1733
    """

    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None
    off_policy: OffPolicyConfig | None = None
    out_of_denominators: tuple[str, ...] = ()
    of_head: ClassVar[bool] = True
    takes_nucleus: ClassVar[bool] = False
    by_token: ClassVar[bool] = True
    coefficients: ClassVar[tuple[str, ...]] = ()

    @property
    def token_local(self) -> bool:
        return True

    @property
    def asks(self) -> Asks:
        """What it needs of the head and of the batch's extras."""
        return Asks(extras=None)

    def check(self, batch: RolloutBatch) -> None:
        """Raises where the batch lacks what the loss reads, or where shapes or dtypes are wrong."""

    def check_stats(self, stats: PyTree, batch: RolloutBatch) -> None:
        """Raises where the statistics lack what the loss reads, or where shapes or dtypes are
        wrong.
        """
        shape = batch.loss_mask.shape
        if self.of_head:
            how = (
                f"log_probs_from_hidden(..., logit_stats={self.asks.logit_stats}) or from logits,"
                f" for {self}"
            )
            return check_stats(stats, shape, *self.asks.logit_stats, how=how)
        for path, x in jax.tree.leaves_with_path(stats):
            what = f"stats{jax.tree_util.keystr(path)}"
            check(
                what,
                f"shape {jnp.shape(x)}",
                jnp.shape(x)[:2] == shape,
                f"{shape} and more, the batch's",
            )

    def left_out(self, stats: Stats | None, batch: RolloutBatch) -> Bool[Array, "R T"] | None:
        """The loss tokens that the loss leaves out; None for none.

        `stats` are None before they are computed.
        """
        return None

    def unusable_tokens(
        self, stats: Stats | None, batch: RolloutBatch
    ) -> Bool[Array, "R T"] | None:
        """The loss tokens that the metric `unusable_tokens` counts: those of `left_out`, and
        others with a loss.
        """
        return self.left_out(stats, batch)

    def reads(self, stats: Stats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        """Per-shard: the arrays of the batch, as the caller gave it, and of `stats` that the loss
        reads.

        A rule of each is that of its name, see `reads.PER_TOKEN`; an array under another name must
        be finite. One that is None, since the batch lacks it, is an error that names it. Arrays
        that only metrics read are not among them, nor the sequences, the loss mask and its weights.
        """
        if isinstance(stats, TokenStats):
            return {"log_probs": stats.log_probs}
        return {}

    def constants(self, stats: Stats | None, weighed: WeighedBatch) -> PyTree:
        """Per-shard: a pytree of `[R, T]` constants; `stats` are None, and not needed, if the
        loss is token-local.
        """
        return None

    @abc.abstractmethod
    def terms(
        self, stats: Stats, batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        """Per-shard: the terms of each token's loss by name, before weighting; finite where the
        mask is 0.
        """

    def metrics(self, stats: Stats, weighed: WeighedBatch, constants: PyTree) -> Terms:
        """Per-shard: by name, what is reduced to one number over the tokens of all devices and
        micro-batches.

        Each is (values, weights, how), of two arrays `[R, T]`: "mean" is sum(values * weights) /
        sum(weights), "sum" is sum(values * weights), and "min" and "max" are extremes of the values
        whose weight is above 0. Weights must be 0 where a token does not count: weights of ones
        count prompts and padding. `base.metrics.CompositeTerm` combines several of these.

        Args:
          stats: as `terms` sees them, without gradients.
          weighed: `weighed.batch` is the batch as `terms` sees it, and `weighed.batch.loss_mask`
            the weights of a mean over loss tokens; `weighed.weights` are the tokens' weights in the
            loss; see `WeighedBatch`.
          constants: those of `constants`.

        Example:
          >>> class Mine(TokenLoss[TokenStats]):
          ...     def terms(self, stats, batch, constants, segments):
          ...         return {"nll": -stats.log_probs}
          ...     def metrics(self, stats, weighed, constants):
          ...         mask = weighed.batch.loss_mask
          ...         unlikely = (stats.log_probs < -2).astype(jnp.float32)
          ...         return {"unlikely": (unlikely, mask, "mean"), "lowest": (stats.log_probs, mask, "min")}
          >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
          >>> mine = dataclasses.dataclass(frozen=True)(Mine)()
          >>> _, found = loss_from_stats(TokenStats(jnp.array([[-1.0, -3.0, 0.0]])), batch, mine)
          >>> float(found["unlikely"].value), float(found["lowest"].value)
          (0.5, -3.0)
        """
        return {}

    def reasons(
        self, stats: Stats, weighed: WeighedBatch, constants: PyTree
    ) -> Mapping[str, Bool[Array, "R T"]]:
        """Per-shard: by name, why the loss does not train some of its tokens; the first reason
        that holds counts.
        """
        return {}

    def seen(self, stats: Stats, mask: Float[Array, "R T"]) -> Stats:
        """The statistics as `terms` and `metrics` see them."""
        return masked_arrays(stats, mask)


def for_each(number: Any) -> Any:
    """A number of a loss beside arrays `[R, T, K]`: one for each token gets a dimension of 1 for
    K.
    """
    if jnp.ndim(number) == 2:
        return number[..., None]
    return number


def masked_arrays(tree: PyTree, mask: Float[Array, "R T"]) -> PyTree:
    """Arrays `[R, T, ...]`: floats in f32, 0 where the mask is 0, whatever was there; others are
    unchanged.
    """

    def masked_array(x: Array) -> Array:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return masked(x, mask)
        return x

    return jax.tree.map(masked_array, tree)


def masked_batch(batch: RolloutBatch, mask: Float[Array, "R T"]) -> RolloutBatch:
    """The batch with this loss mask, and its arrays of tokens and extras as `masked_arrays`
    gives them.
    """
    of_tokens = {name: getattr(batch, name) for name in PER_TOKEN_VALUES} | {"extras": batch.extras}
    return dataclasses.replace(batch, loss_mask=mask, **masked_arrays(of_tokens, mask))
