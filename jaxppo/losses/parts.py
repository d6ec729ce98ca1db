"""One loss of several that are added up."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax.numpy as jnp

from jaxppo.base.arrays import KINDS, Coefficient, check_array, check_count, check_field, needed
from jaxppo.batch.extras import check_name, extra_of
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.token_loss import TokenLoss
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy_losses import PolicyLoss
from jaxppo.policy_losses.base import Loss


@dataclasses.dataclass(frozen=True)
class Part(Loss):
    """One loss of several: coef times the loss, with tokens and weights of its own.

    Args:
      loss: any loss that `loss_from_hidden` takes, but no sum of parts.
      coef: a number or a traced schedule.
      mask: the name of the extra of the batch, `[R, T]`, 0 or 1, that is this part's loss mask, in its denominators
        too; None for `batch.loss_mask`.
      equals: with a mask of integers, the part has the loss tokens of the batch where the mask is this number, see
        `by_row`.
      weights: the name of the extra, `[R, T]`, at least 0, that holds this part's loss weights; None for
        `batch.loss_weights`. A part's denominators are counts of tokens, or with `batch.weighted_denominators` sums of
        weights.

    Raises:
      TypeError: another loss.
      ValueError: a coefficient that is not a finite number, a policy loss that wants selected tokens.

    Example:
      >>> from jaxppo.losses import SFT, Part
      >>> Part(SFT(), coef=0.5, mask="written").coef
      0.5
    """

    loss: PolicyLossConfig | PolicyLoss | TokenLoss[Any]
    coef: Coefficient = 1.0
    mask: str | None = None
    weights: str | None = None
    equals: int | None = None

    def __post_init__(self) -> None:
        check_loss(self.loss)
        of = self.loss.loss if isinstance(self.loss, PolicyLossConfig) else self.loss
        if isinstance(of, PolicyLoss) and of.selects is not None:
            raise ValueError(f"loss: got {of}, expected one that selects no tokens of the step")
        check_field(self, "coef")
        if self.equals is not None:
            check_count("equals", self.equals)
            needed("mask", self.mask, "the name of an extra of integers, for equals")
        for what in ("mask", "weights"):
            if getattr(self, what) is not None:
                check_name(what, getattr(self, what))

    @property
    def of_tokens(self) -> TokenLoss[Any]:
        """The loss, of a part that `doors.as_parts` made."""
        return cast("TokenLoss[Any]", self.loss)

    def of(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch as this part reads it."""
        changed: dict[str, Any] = {}
        if self.mask is not None and self.equals is not None:
            x = extra_of(batch, self.mask, "i32[R, T] for equals of a part")
            check_array(f"batch.extras[{self.mask!r}]", x, batch.loss_mask.shape, "the batch's", KINDS["ids"])
            changed["loss_mask"] = jnp.where(x == self.equals, batch.loss_mask.astype(jnp.float32), 0)
        for field, name in (("loss_mask", self.mask), ("loss_weights", self.weights)):
            if name is not None and field not in changed:
                x = extra_of(batch, name, f"[R, T] for {field} of a part")
                check_array(f"batch.extras[{name!r}]", x, batch.loss_mask.shape, "the batch's", KINDS[field])
                changed[field] = x.astype(jnp.float32)
        return dataclasses.replace(batch, **changed)


def check_loss(loss: Any) -> None:
    """Raises unless this is a single loss as `loss_from_hidden` takes it."""
    if not isinstance(loss, (PolicyLossConfig, PolicyLoss, TokenLoss)):
        expected = "a PolicyLossConfig, a policy loss, SFT() or another TokenLoss"
        raise TypeError(f"loss: got {type(loss).__name__}, expected {expected}")
    if not dataclasses.is_dataclass(loss) or not getattr(loss, "__dataclass_params__").frozen:  # noqa: B009
        raise TypeError(f"loss: got {type(loss).__name__}, expected a frozen dataclass, whose numbers may be traced")
