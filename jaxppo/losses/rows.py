"""Losses chosen by row, with numbers that rows bring along: many clients in one program."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxppo.base.arrays import check_array
from jaxppo.base.metrics import Terms
from jaxppo.base.traced import map_leaves
from jaxppo.batch.extras import check_name, extra_of
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.parts import Part, as_token_loss
from jaxppo.losses.token_loss import Asks, Losses, Reads, Step, TokenLoss
from jaxppo.sharding import Segments


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
    found = {}
    for place, (name, loss) in enumerate(losses.items()):
        of = as_token_loss(loss)
        if given := numbers.get(name):
            of = WithNumbers(of, tuple(given.items()))
        found[name] = Part(of, mask=which, equals=place)
    return found


def _of_loss(name: str) -> Any:
    return property(lambda self: getattr(self.loss, name))


@dataclasses.dataclass(frozen=True)
class WithNumbers(TokenLoss[Any]):
    """A loss some of whose numbers are extras of the batch, one for each token; see `by_row`."""

    loss: TokenLoss[Any]
    numbers: tuple[tuple[str, str], ...]  # the path of a field, such as "config.loss.clip_low", and its extra

    def __post_init__(self) -> None:
        for field, extra in self.numbers:
            check_name(f"numbers[{field!r}]", extra)
        numbers = tuple((_path(self.loss, field), extra) for field, extra in self.numbers)
        off_policy = self.loss.off_policy
        if off_policy is not None and off_policy.batch_normalize and any("off_policy" in path for path, _ in numbers):
            raise ValueError("numbers: got one of off_policy, expected none with batch_normalize, a mean over all rows")
        object.__setattr__(self, "numbers", numbers)

    aggregation = _of_loss("aggregation")
    aggregation_norm = _of_loss("aggregation_norm")
    token_local = _of_loss("token_local")
    off_policy = _of_loss("off_policy")
    check_stats = _of_loss("check_stats")
    left_out = _of_loss("left_out")
    seen = _of_loss("seen")

    @property
    def asks(self) -> Asks:
        of = self.loss.asks
        names = tuple(extra for _, extra in self.numbers)
        return of if of.extras is None else dataclasses.replace(of, extras=(*of.extras, *names))

    def traceable(self) -> WithNumbers:
        return WithNumbers(self.loss.traceable(), self.numbers)

    def check(self, batch: RolloutBatch) -> None:
        self.loss.check(batch)
        for _, extra in self.numbers:
            x = extra_of(batch, extra, "f32[R, T], a number for each token")
            check_array(f"batch.extras[{extra!r}]", x, batch.loss_mask.shape, "the batch's")

    def reads(self, stats: Any, batch: RolloutBatch, segments: Segments) -> Reads:
        return {**self.loss.reads(stats, batch, segments), **{f"extras.{x}": batch.extras[x] for _, x in self.numbers}}

    def constants(self, stats: Any, step: Step) -> Any:
        return self._of(step.batch).constants(stats, step)

    def terms(self, stats: Any, batch: RolloutBatch, constants: Any, segments: Segments) -> Losses:
        return self._of(batch).terms(stats, batch, constants, segments)

    def metrics(self, stats: Any, step: Step, constants: Any) -> Terms:
        return self._of(step.batch).metrics(stats, step, constants)

    def reasons(self, stats: Any, step: Step, constants: Any) -> Mapping[str, Bool[Array, "R T"]]:
        return self._of(step.batch).reasons(stats, step, constants)

    def _of(self, batch: RolloutBatch) -> TokenLoss[Any]:
        """The loss with the batch's numbers, whatever its constructor would say of arrays."""
        extras = dict(self.numbers)

        def number(path: tuple[str, ...], own: Any) -> Any:
            extra = extras.get(".".join(path))
            if extra is None:
                return own
            # where there is no loss the loss's own number stands: that of the batch is 0 there, by which it may divide
            return jnp.where(batch.loss_mask > 0, batch.extras[extra].astype(jnp.float32), own)

        loss: TokenLoss[Any] = map_leaves(self.loss, number)
        return loss


def _path(loss: Any, field: str) -> str:
    """The whole path of a number: a policy loss is "config.loss" in the loss of a token."""
    leaves: dict[str, Any] = {}
    map_leaves(loss, lambda path, x: leaves.setdefault(".".join(path), x))
    for path in (field, f"config.{field}", f"config.loss.{field}"):
        x = leaves.get(path)
        if isinstance(x, int | float | np.generic | jax.Array) and not isinstance(x, bool):
            return path
    raise ValueError(f"numbers: got {field!r}, expected a number of {loss}, such as clip_low or kl.coef")
