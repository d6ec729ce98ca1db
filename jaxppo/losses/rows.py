"""Losses chosen by row, with numbers that rows bring along: many clients in one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxppo.base.arrays import check_array
from jaxppo.base.traced import map_leaves
from jaxppo.batch.extras import check_name, extra_of
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.parts import Part, as_token_loss
from jaxppo.losses.token_loss import TokenLoss


def by_row(
    losses: Mapping[str, Any], which: str, numbers: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, Part]:
    """A loss for each row, or sample: parts by name, of which each has the tokens that are marked with its place.

    All of them share one pass of the head. Nothing compiles when clients come and go, as long as the losses are the
    same: one extra of the batch says which token has which loss, and other extras hold the numbers.

    Args:
      losses: by name, in the order of their numbers: the first has the tokens where `which` is 0.
      which: the name of the extra that marks the loss tokens, `i32[R, T]`; a token with another number has no loss.
      numbers: by the name of a loss, which of its numbers come from an extra `f32[R, T]` of the batch: {"clip_low":
        "client_clip_low"}. A field of the config's own parts is "loss.clip_low", "kl.coef", "off_policy.high" or
        "off_policy.rejections.0.high", of the first rejection. Give all tokens of a sequence the same number.

    Returns:
      The parts, for `loss_from_hidden`, `loss_from_stats` and `Normalizer.of`.

    Raises:
      TypeError, ValueError: no losses; something else in place of one; numbers that a loss does not have, or of weights
        that are divided by their mean over the step.

    Example:
      >>> from jaxppo.losses import by_row, loss_from_stats
      >>> parts = by_row({"ppo": PPO(), "sft": SFT(aggregation="token_sum")}, "client")
      >>> values = {"advantages": [1.0, 1.0], "old_log_probs": [-1.0, -1.0], "extras": {"client": [1, 1]}}
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], 1, **values)], row_length=3)
      >>> float(loss_from_stats(TokenStats(jnp.array([[-1.0, -2.0, 0.0]])), batch, parts)[0])
      3.0
    """
    check_name("which", which)
    numbers = {} if numbers is None else numbers
    for what, x in (("losses", losses), ("numbers", numbers)):
        if not isinstance(x, Mapping):
            raise TypeError(f"{what}: got {type(x).__name__}, expected them by the names of losses")
    if not losses:
        raise ValueError("losses: got none, expected at least one")
    if unknown := sorted(set(numbers) - set(losses)):
        raise ValueError(f"numbers: got {unknown}, expected names of losses, {sorted(losses)}")
    found: dict[str, Part] = {}
    for place, (name, given) in enumerate(losses.items()):
        loss, extras = as_token_loss(given), []
        for field, extra in numbers.get(name, {}).items():
            check_name(f"numbers[{field!r}]", extra)
            extras.append((_path(loss, field), extra))
        normalized = loss.off_policy is not None and loss.off_policy.batch_normalize
        if normalized and any("off_policy" in path for path, _ in extras):
            raise ValueError("numbers: got one of off_policy, expected none with batch_normalize, a mean over all rows")
        found[name] = RowPart(loss, mask=which, equals=place, numbers=tuple(extras))
    return found


@dataclasses.dataclass(frozen=True)
class RowPart(Part):
    """A part some of whose loss's numbers are extras of the batch, one for each token; see `by_row`."""

    numbers: tuple[tuple[str, str], ...] = ()  # the path of a field, such as "config.loss.clip_low", and its extra

    @property
    def extras(self) -> tuple[str, ...]:
        return tuple(extra for _, extra in self.numbers)

    def of(self, batch: RolloutBatch) -> RolloutBatch:
        for extra in self.extras:
            x = extra_of(batch, extra, "f32[R, T], a number for each token")
            check_array(f"batch.extras[{extra!r}]", x, batch.loss_mask.shape, "the batch's")
        return super().of(batch)

    def with_numbers(self, loss: TokenLoss[Any], batch: RolloutBatch) -> TokenLoss[Any]:
        extras = dict(self.numbers)

        def number(path: tuple[str, ...], own: Any) -> Any:
            extra = extras.get(".".join(path))
            if extra is None:
                return own
            # where there is no loss the loss's own number stands: that of the batch is 0 there, by which it may divide
            return jnp.where(batch.loss_mask > 0, batch.extras[extra].astype(jnp.float32), own)

        # the constructors would refuse arrays of tokens
        return loss if not extras else map_leaves(loss, number)


def _path(loss: Any, field: str) -> str:
    """The whole path of a number: a policy loss is "config.loss" in the loss of a token."""
    leaves: dict[str, Any] = {}
    map_leaves(loss, lambda path, x: leaves.setdefault(".".join(path), x))
    for path in (field, f"config.{field}", f"config.loss.{field}"):
        x = leaves.get(path)
        if isinstance(x, int | float | np.generic | jax.Array) and not isinstance(x, bool):
            return path
    raise ValueError(f"numbers: got {field!r}, expected a number of {loss}, such as clip_low or kl.coef")
