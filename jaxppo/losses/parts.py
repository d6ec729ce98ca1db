"""A loss as one or more parts that are added up."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from jaxppo.base.arrays import KINDS, Coefficient, check_array, check_count, check_field, needed
from jaxppo.batch.extras import check_name, extra_of
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.policy_tokens import PolicyTokenLoss
from jaxppo.losses.token_loss import TokenLoss
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy_losses import PolicyLoss
from jaxppo.policy_losses.base import Loss

ALONE = ""  # the name of a loss that is not a part of a sum
OfPolicy = PolicyLossConfig | PolicyLoss
Parts = Mapping[str, Loss]


@dataclasses.dataclass(frozen=True)
class Part(Loss):
    """One loss of several: coef times the loss, with tokens and weights of its own.

    Args:
      loss: any loss that `loss_from_hidden` takes, but no sum of parts.
      coef: a number or a traced schedule.
      mask: the extra of the batch, `[R, T]`, 0 or 1, that is this part's loss mask, in its denominators too; None for
        `batch.loss_mask`.
      weights: the extra, `[R, T]`, at least 0, that holds this part's loss weights; None for `batch.loss_weights`. A
        part's denominators are counts of tokens, or with `batch.weighted_denominators` sums of weights.
      equals: with a mask of integers, the part has the loss tokens of the batch where the mask is this number, see
        `by_row`.

    Raises:
      TypeError: another loss.
      ValueError: a coefficient that is not a finite number, a policy loss that wants selected tokens.

    Example:
      >>> from jaxppo.losses import SFT, Part
      >>> Part(SFT(), coef=0.5, mask="written").coef
      0.5
    """

    loss: OfPolicy | TokenLoss[Any]
    coef: Coefficient = 1.0
    mask: str | None = None
    weights: str | None = None
    equals: int | None = None

    def __post_init__(self) -> None:
        as_token_loss(self.loss)  # refuses what is no loss
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
    def extras(self) -> tuple[str, ...]:
        """The extras of the batch that hold numbers of the loss, see `losses.rows.RowPart`."""
        return ()

    def with_numbers(self, loss: TokenLoss[Any], batch: RolloutBatch) -> TokenLoss[Any]:
        """The loss with the numbers that these extras hold."""
        return loss

    def of(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch as this part reads it."""
        changed: dict[str, Any] = {}
        for field, name in (("loss_mask", self.mask), ("loss_weights", self.weights)):
            if name is None:
                continue
            chosen = field == "loss_mask" and self.equals is not None
            expected = "i32[R, T] for equals of a part" if chosen else f"[R, T] for {field} of a part"
            x, kind = extra_of(batch, name, expected), KINDS["ids" if chosen else field]
            check_array(f"batch.extras[{name!r}]", x, batch.loss_mask.shape, "the batch's", kind)
            given = jnp.where(x == self.equals, batch.loss_mask, 0) if chosen else x
            changed[field] = given.astype(jnp.float32)
        return dataclasses.replace(batch, **changed)


def as_parts(loss: Any) -> dict[str, Part]:
    """The parts of a loss by name; a loss that is no sum is alone."""
    if not isinstance(loss, Mapping):
        return {ALONE: Part(as_token_loss(loss))}
    if not loss:
        raise ValueError("loss: got no parts, expected at least one")
    for name in loss:
        if not isinstance(name, str) or not name:
            raise TypeError(f"loss: got a part named {name!r}, expected a string")
    return {name: x if isinstance(x, Part) else Part(x) for name, x in loss.items()}


def as_token_loss(loss: Any) -> TokenLoss[Any]:
    """The loss of a token that a loss stands for; raises unless it is a single loss as `loss_from_hidden` takes it."""
    if not isinstance(loss, OfPolicy | TokenLoss):
        expected = "a PolicyLossConfig, a policy loss, SFT() or another TokenLoss"
        raise TypeError(f"loss: got {type(loss).__name__}, expected {expected}")
    if not dataclasses.is_dataclass(loss) or not getattr(loss, "__dataclass_params__").frozen:  # noqa: B009
        raise TypeError(f"loss: got {type(loss).__name__}, expected a frozen dataclass, whose numbers may be traced")
    loss = PolicyLossConfig(loss) if isinstance(loss, PolicyLoss) else loss
    return PolicyTokenLoss(loss) if isinstance(loss, PolicyLossConfig) else loss
