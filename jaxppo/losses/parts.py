"""A loss as one or more parts that are added up, which may be chosen by row: many clients in one
program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxppo.base.arrays import (
    KINDS,
    ArrayKind,
    Coefficient,
    check,
    check_array,
    check_count,
    check_field,
    check_type,
    needed,
)
from jaxppo.base.traced import (
    ByToken,
    Path,
    is_frozen,
    leaves,
    name_of,
    numbers_of_tokens,
    with_leaves,
)
from jaxppo.batch.extras import check_name, extra_of
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.hooks import check_attributes
from jaxppo.losses.policy_tokens import PolicyTokenLoss
from jaxppo.losses.token_loss import TokenLoss
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy_losses import PolicyLoss
from jaxppo.policy_losses.base import Loss

ALONE = ""  # the name of a loss that is not a part of a sum
OfPolicy = PolicyLossConfig | PolicyLoss
Parts = Mapping[str, Loss]
AnyLoss = TokenLoss[Any] | OfPolicy | Parts  # what `loss_from_hidden` takes


@dataclasses.dataclass(frozen=True)
class Part(Loss):
    """One loss of several: coef times the loss, with tokens and weights of its own.

    Args:
      loss: any loss that `loss_from_hidden` takes, but no sum of parts.
      coef: a number or a traced schedule.
      mask: the extra, `[R, T]`, 0 or 1, that is this part's loss mask, in denominators too; None
        for `batch.loss_mask`.
      weights: the extra, `[R, T]`, at least 0, that holds this part's loss weights; None for
        `batch.loss_weights`. A part's denominators are counts of tokens, or with
        `batch.weighted_denominators` sums of weights.
      equals: with a mask of integers, the part has the batch's loss tokens where it is this number,
        see `by_row`.

    Raises:
      TypeError: another loss.
      ValueError: a coefficient that is not a finite number, a policy loss that wants selected
        tokens.

    Example:
      >>> Part(SFT(), coef=0.5, mask="written").coef
      0.5
    """

    loss: OfPolicy | TokenLoss[Any]
    coef: Coefficient = 1.0
    mask: str | None = None
    weights: str | None = None
    equals: int | None = None

    def __post_init__(self) -> None:
        token_loss = as_token_loss(self.loss)
        check_attributes(token_loss)
        policy_loss = self.loss
        if isinstance(policy_loss, PolicyLossConfig):
            policy_loss = policy_loss.loss
        if isinstance(policy_loss, PolicyLoss) and policy_loss.selects is not None:
            raise ValueError(
                f"loss: got {policy_loss}, expected one that selects no tokens of the step"
            )
        object.__setattr__(self, "loss", token_loss)
        check_field(self, "coef")
        if self.equals is not None:
            check_count("equals", self.equals)
            needed("mask", self.mask, "the name of an extra of integers, for equals")
        for what in ("mask", "weights"):
            if getattr(self, what) is not None:
                check_name(what, getattr(self, what))

    @property
    def token_loss(self) -> TokenLoss[Any]:
        """The loss, which the constructor has made one of tokens."""
        assert isinstance(self.loss, TokenLoss)
        return self.loss

    @property
    def extras(self) -> tuple[str, ...]:
        """The extras that hold numbers of the loss; see `by_row`."""
        return tuple(mark.extra for mark in numbers_of_tokens(self.loss).values())

    def with_numbers(self, loss: TokenLoss[Any], batch: RolloutBatch) -> TokenLoss[Any]:
        """This part's loss with the numbers that these extras hold, one for each token, NaN out
        of a field's range.
        """
        marks = numbers_of_tokens(loss)
        if not marks:
            return loss

        def checked_numbers(numbers: Mapping[Path, Array]) -> dict[Path, Array]:
            # a constructor takes a number, and knows what it may be beside the others
            checked = leaves(with_leaves(loss, numbers, dataclasses.replace))
            return {path: jnp.asarray(checked[path], jnp.float32) for path in numbers}

        counts = batch.loss_mask > 0
        numbers = {}
        for path, mark in marks.items():
            # where there is no loss the field's own number stands: that of the batch may be
            # anything there
            number = batch.extras[mark.extra].astype(jnp.float32)
            numbers[path] = jnp.where(counts, number, mark.own)
        return with_leaves(loss, jax.vmap(jax.vmap(checked_numbers))(numbers))

    def numbers_in(self, loss: TokenLoss[Any]) -> dict[str, Array]:
        """The numbers of tokens of this part's loss, as `with_numbers` gives it, by the names of
        their fields.
        """
        numbers = leaves(loss)
        return {name_of(path): numbers[path] for path in numbers_of_tokens(self.loss)}

    def own_batch(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch as this part reads it."""
        for extra in self.extras:
            x = extra_of(batch, extra, "f32[R, T], a number for each token")
            check_array(f"batch.extras[{extra!r}]", x, batch.loss_mask.shape, "the batch's")
        own: dict[str, Array] = {}
        if self.mask is not None and self.equals is not None:
            marks = _extra(batch, self.mask, "i32[R, T] for equals of a part", KINDS["ids"])
            own["loss_mask"] = jnp.where(marks == self.equals, batch.loss_mask, 0).astype(
                jnp.float32
            )
        elif self.mask is not None:
            mask = _extra(batch, self.mask, "[R, T] for loss_mask of a part", KINDS["loss_mask"])
            own["loss_mask"] = mask.astype(jnp.float32)
        if self.weights is not None:
            weights = _extra(
                batch, self.weights, "[R, T] for loss_weights of a part", KINDS["loss_weights"]
            )
            own["loss_weights"] = weights.astype(jnp.float32)
        return dataclasses.replace(batch, **own)  # type: ignore[arg-type]


def _extra(batch: RolloutBatch, name: str, expected: str, kind: ArrayKind) -> Array:
    extra = extra_of(batch, name, expected)
    check_array(f"batch.extras[{name!r}]", extra, batch.loss_mask.shape, "the batch's", kind)
    return extra


def as_parts(loss: AnyLoss) -> dict[str, Part]:
    """The parts of a loss by name; a loss that is no sum is alone."""
    if not isinstance(loss, Mapping):
        return {ALONE: Part(as_token_loss(loss))}
    check("loss", "no parts", len(loss) > 0, "at least one")
    for name in loss:
        if not isinstance(name, str) or not name:
            raise TypeError(f"loss: got a part named {name!r}, expected a string")
    parts = {}
    for name, part in loss.items():
        if not isinstance(part, Part):
            part = Part(part)  # type: ignore[arg-type]  # which its constructor checks
        parts[name] = part
    return parts


def as_token_loss(loss: Loss) -> TokenLoss[Any]:
    """The loss of a token that a loss stands for; raises unless it is a single loss as
    `loss_from_hidden` takes it.
    """
    expected = "a PolicyLossConfig, a policy loss, SFT() or another TokenLoss"
    check_type("loss", loss, isinstance(loss, OfPolicy | TokenLoss), expected)
    check_type("loss", loss, is_frozen(loss), "a frozen dataclass, whose numbers may be traced")
    if isinstance(loss, PolicyLoss):
        loss = PolicyLossConfig(loss)
    if isinstance(loss, PolicyLossConfig):
        return PolicyTokenLoss(loss)
    assert isinstance(loss, TokenLoss)
    return loss


def by_row(
    losses: Mapping[str, Loss],
    which: str,
    numbers: Mapping[str, Mapping[str, str]] | None = None,
) -> dict[str, Part]:
    """A loss for each row, or sample: parts by name, of which each has the tokens that are marked
    with its place.

    All of them share one pass of the head. Nothing compiles when clients come and go, as long as
    the losses are the same: one extra of the batch says which token has which loss, and other
    extras hold the numbers.

    Args:
      losses: by name, in the order of their numbers: the first has the tokens where `which` is 0.
      which: the name of the extra that marks the loss tokens, `i32[R, T]`; a token with another
        number has no loss.
      numbers: by the name of a loss, which of its numbers come from an extra `f32[R, T]` of the
        batch: {"clip_low":
        "client_clip_low"}. A field of the config's own parts is "loss.clip_low", "kl.coef",
        "off_policy.high" or "off_policy.rejections.0.high", of the first rejection. Give all tokens
        of a sequence the same number. It has the range of its field: beyond it the loss is NaN, and
        `broken_rules` names the field. Where the field is 0, as `entropy_coef` is by default, the
        loss still has the term.

    Returns:
      The parts, for `loss_from_hidden`, `loss_from_stats` and `Normalizer.of`.

    Raises:
      TypeError, ValueError: no losses; something else in place of one; numbers that a loss does not
        have, one of them twice, those of a loss of pairs or samples, or of weights that are divided
        by their mean over the step.

    Example:
      >>> parts = by_row({"ppo": PPO(), "sft": SFT(aggregation="token_sum")}, "client")
      >>> values = {"advantages": [1.0, 1.0], "old_log_probs": [-1.0, -1.0], "extras": {"client": [1, 1]}}
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], 1, **values)], row_length=3)
      >>> float(loss_from_stats(TokenStats(jnp.array([[-1.0, -2.0, 0.0]])), batch, parts)[0])
      3.0
    """
    check_name("which", which)
    if numbers is None:
        numbers = {}
    for what, x in (("losses", losses), ("numbers", numbers)):
        check_type(what, x, isinstance(x, Mapping), "them by the names of losses")
    check("losses", "none", bool(losses), "at least one")
    unknown = sorted(set(numbers) - set(losses))
    check("numbers", unknown, not unknown, f"names of losses, {sorted(losses)}")
    parts = {}
    for place, (name, loss) in enumerate(losses.items()):
        marked = _with_marks(as_token_loss(loss), numbers.get(name, {}))
        parts[name] = Part(marked, mask=which, equals=place)
    return parts


def _with_marks(loss: TokenLoss[Any], extras: Mapping[str, str]) -> TokenLoss[Any]:
    """The loss with marks in place of the numbers that extras hold, by their names or the ends
    of their paths.
    """
    check_type(
        "numbers", extras, isinstance(extras, Mapping), "the names of extras by those of fields"
    )
    expected = f"none for {loss}, which has one loss for several tokens"
    check("numbers", sorted(extras), not extras or loss.by_token, expected)
    marks: dict[Path, ByToken] = {}
    for field, extra in extras.items():
        check_type("numbers", field, isinstance(field, str), "names of fields, such as clip_low")
        check_name(f"numbers[{field!r}]", extra)
        path, own = _number(loss, field)
        got = f"{field!r} for {name_of(path)}, which has one"
        check("numbers", got, path not in marks, "one extra for each number")
        marks[path] = ByToken(own, extra)
    normalized = loss.off_policy is not None and loss.off_policy.batch_normalize
    good = not normalized or not any("off_policy" in path for path in marks)
    check("numbers", "one of off_policy", good, "none with batch_normalize, a mean over all rows")
    return with_leaves(loss, marks)


def _number(loss: TokenLoss[Any], field: str) -> tuple[Path, Any]:
    """The whole path of a number, and the number: a policy loss is "config.loss" in the loss of
    a token.
    """
    numbers = leaves(loss)
    for before in ((), ("config",), ("config", "loss")):
        path = (*before, *field.split("."))
        x = numbers.get(path)
        if isinstance(x, int | float | np.generic | jax.Array) and not isinstance(
            x, bool | np.bool_
        ):
            return path, x
    raise ValueError(
        f"numbers: got {field!r}, expected a number of {loss}, such as clip_low or kl.coef"
    )
