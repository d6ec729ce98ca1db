"""Losses chosen by row, with numbers that rows bring along: many clients in one program."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from jaxppo.base.arrays import check_array
from jaxppo.base.metrics import Terms
from jaxppo.batch.extras import check_name, extra_of
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.losses.parts import Part, as_token_loss
from jaxppo.losses.token_loss import Asks, Losses, Reads, Step, TokenLoss
from jaxppo.sharding import Segments


def by_row(
    losses: Mapping[str, Any], which: str, numbers: Mapping[str, Mapping[str, str]] | None = None
) -> dict[str, Part]:
    """A loss for each row, or sample: parts by name, of which each has the tokens that are marked with its place.

    All of them share one pass of the head. No program changes when clients come and go, as long as the losses are the
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
    for what, x in (("losses", losses), ("numbers", {} if numbers is None else numbers)):
        if not isinstance(x, Mapping):
            raise TypeError(f"{what}: got {type(x).__name__}, expected them by the names of losses")
    if not losses:
        raise ValueError("losses: got none, expected at least one")
    unknown = sorted(set(numbers or {}) - set(losses))
    if unknown:
        raise ValueError(f"numbers: got {unknown}, expected names of losses, {sorted(losses)}")
    found = {}
    for place, (name, loss) in enumerate(losses.items()):
        of, given = as_token_loss(loss), (numbers or {}).get(name, {})
        found[name] = Part(WithNumbers(of, tuple(given.items())) if given else of, mask=which, equals=place)
    return found


def _of_loss(name: str) -> Any:
    return property(lambda self: getattr(self.loss, name))


@dataclasses.dataclass(frozen=True)
class WithNumbers(TokenLoss[Any]):
    """A loss some of whose numbers are extras of the batch, one for each token; see `by_row`.

    Args:
      loss: the loss.
      numbers: pairs of a field's name, such as "config.loss.clip_low", and the name of the extra.

    Raises:
      ValueError: a number that the loss does not have.

    Example:
      >>> from jaxppo.losses import SFT
      >>> from jaxppo.losses.rows import WithNumbers
      >>> WithNumbers(SFT(z_loss=0.1), (("z_loss", "client_z_loss"),)).token_local
      True
    """

    loss: TokenLoss[Any]
    numbers: tuple[tuple[str, str], ...]
    of_head: ClassVar[bool] = True

    def __post_init__(self) -> None:
        paths = []
        for field, extra in self.numbers:
            check_name(f"numbers[{field!r}]", extra)
            paths.append((_path(self.loss, field), extra))
        off_policy = self.loss.off_policy
        if off_policy is not None and off_policy.batch_normalize and any("off_policy" in path for path, _ in paths):
            raise ValueError("numbers: got one of off_policy, expected none with batch_normalize, a mean over all rows")
        object.__setattr__(self, "numbers", tuple(paths))

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
        loss: Any = self.loss
        for path, extra in self.numbers:
            loss = _replaced(loss, path.split("."), batch.extras[extra].astype(jnp.float32), batch.loss_mask > 0)
        return loss


def _replaced(x: Any, path: list[str], value: Array, here: Bool[Array, "R T"]) -> Any:
    if isinstance(x, tuple):
        place = int(path[0])
        return (*x[:place], _replaced(x[place], path[1:], value, here), *x[place + 1 :])
    new, own = copy.copy(x), getattr(x, path[0])  # the constructor's checks want scalars
    # where there is no loss the loss's own number stands: that of the batch is 0 there, by which it may divide
    found = jnp.where(here, value, own) if len(path) == 1 else _replaced(own, path[1:], value, here)
    object.__setattr__(new, path[0], found)
    return new


def _path(loss: Any, field: str) -> str:
    """The whole path of a number: a policy loss is "config.loss" in the loss of a token."""
    for prefix in ("", "config.", "config.loss."):
        x: Any = loss
        for name in (prefix + field).split("."):
            if isinstance(x, tuple):
                x = {str(i): part for i, part in enumerate(x)}.get(name)
            else:
                x = vars(x).get(name) if dataclasses.is_dataclass(x) else None
        if isinstance(x, int | float | np.generic | jax.Array) and not isinstance(x, bool):
            return prefix + field
    raise ValueError(f"numbers: got {field!r}, expected a number of {loss}, such as clip_low or kl.coef")
