"""The base classes of preference losses, and the functions that several of them share."""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax
from jaxtyping import Array, Bool, Float

from jaxppo._arrays import Coefficient, check_choice, check_field, needed
from jaxppo.pairs import Pairs

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


class PreferenceLoss(abc.ABC):
    """A preference loss: a frozen dataclass whose fields are its hyperparameters, which may be traced.

    Attributes:
      reference: the loss reads `ref_log_probs`.
      paired: the loss compares the two samples of a pair. Otherwise each sample has its own loss, and those with a
        reward above 0 are the desirable ones.
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
        better, worse = (of._replace(tokens=jax.numpy.maximum(of.tokens, 1)) for of in (better, worse))
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
