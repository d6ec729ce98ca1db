"""The base class of policy losses, and the functions that several of them share."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import (
    KINDS,
    Coefficient,
    check,
    check_aggregation,
    check_array,
    check_choice,
    check_field,
    check_flag,
    check_type,
)
from jaxppo.base.kl import MAX_LOG_RATIO, log_ratio
from jaxppo.base.option_names import NamesItsOptions, same_here
from jaxppo.sharding import Segments

Tokens = Float[Array, "R T"]
Indicators = dict[str, Tokens]
Result = tuple[Tokens, Indicators]
Level = Literal["token", "sequence"]


class Loss(NamesItsOptions):
    """A loss as a value, or a part of a sum of losses: what a dict of parts holds."""

    def __post_init__(self) -> None:
        check_fields(self)


def check_fields(config: Any) -> None:
    """Checks the fields of a dataclass that `number` and `choice` made, its flags and its
    aggregation.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if "choices" in field.metadata:
            check_choice(field.name, value, field.metadata["choices"])
        elif "bounds" in field.metadata and not (value is None and field.default is None):
            check_field(config, field.name, **field.metadata["bounds"])
        elif isinstance(field.default, bool):
            check_flag(field.name, value)
        elif field.name == "aggregation":
            check_aggregation(config)


class PolicyLoss(Loss, abc.ABC):
    """A policy loss: a frozen dataclass whose fields are its hyperparameters.

    Its `__call__` is per-shard code: `[R, T]` is what one device holds. Sums and means over a whole
    sequence come from `segments`, which crosses context shards. Fields may hold traced numbers
    where the loss is made inside `jit`. A value out of the range that `number` or `choice` gave its
    field is a ValueError; a traced one is NaN.

    Attributes:
      token_local: the loss of a token depends on that token alone. It may then be computed a block
        of tokens at a time, without `segments`, and gradients then take one product less with the
        head's kernel.
      selects: `__call__` also takes `selected`, the tokens of the step that `covariance_mask`
        picked. It picks the share `share` of the tokens for which `selectable` holds: at "random",
        or those of "highest" covariance.
      weighs_by_ratio: gradients are weighted by the ratio; off-policy weights with the same ratio
        would count it twice.

    Example:
      >>> import dataclasses
      >>> @dataclasses.dataclass(frozen=True)
      ... class Focal(PolicyLoss):
      ...     power: float = 2.0
      ...     token_local: ClassVar[bool] = True
      ...     def __call__(self, log_probs, old_log_probs, advantages, *, mask, segments, selected=None):
      ...         return -advantages * (1 - jnp.exp(log_probs)) ** self.power * log_probs, {}
    """

    token_local: ClassVar[bool] = False
    weighs_by_ratio: ClassVar[bool] = True
    selects: ClassVar[Literal["highest", "random"] | None] = None

    @classmethod
    def _in_place_of(cls, name: str, value: Any) -> str:
        if same_here(name, value, ("coef", "estimator")) or name == "kl":
            penalty = "KL(...)"
            if isinstance(value, (int, float)):
                penalty = f"KL({value!r})"
            return (
                f"it in the config of the loss: PolicyLossConfig({cls.__name__}(...), kl={penalty})"
            )
        return super()._in_place_of(name, value)

    @abc.abstractmethod
    def __call__(
        self,
        log_probs: Tokens,
        old_log_probs: Tokens,
        advantages: Tokens,
        *,
        mask: Tokens,
        segments: Segments,
        selected: Tokens | None = None,
    ) -> Result:
        """The loss of each token, and indicators that become metrics.

        Args:
          log_probs: of the policy that learns; the only argument with a gradient.
          old_log_probs: of the policy in the ratio's denominator.
          advantages: of each token.
          mask: the loss mask, 0 or 1.
          segments: the sequences of the rows.
          selected: 1 for the tokens that `covariance_mask` picked, where `selects` is set.

        Returns:
          The losses, `f32[R, T]`, and indicators `f32[R, T]` by metric name, which are averaged
          over tokens. Their names must not be those of metrics that every policy loss reports, such
          as `kl` or `ratio_mean`.
        """

    def selectable(
        self, covariance: Tokens, log_probs: Tokens, old_log_probs: Tokens, advantages: Tokens
    ) -> Bool[Array, "R T"]:
        """The tokens that `covariance_mask` may pick; all by default."""
        return jnp.ones(covariance.shape, bool)


def checked_result(loss: PolicyLoss, result: Any, shape: tuple[int, ...]) -> Result:
    """What a policy loss returns; raises unless it is the loss of each token, and indicators of
    tokens by name.
    """
    what = f"{type(loss).__name__}.__call__"
    expected = "(losses [R, T], indicators [R, T] by name)"
    got = "an array" if hasattr(result, "dtype") else type(result).__name__
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"{what}: got {got}, expected {expected}")
    losses, indicators = result
    check_type(what, indicators, isinstance(indicators, Mapping), f"{expected}, a dict last")
    for name, x in {"losses": losses, **indicators}.items():
        check_type(
            f"{what}, {name}", x, hasattr(x, "dtype") and hasattr(x, "shape"), "an array [R, T]"
        )
        check(
            f"{what}, {name}", f"shape {x.shape}", x.shape == shape, f"{shape}, one for each token"
        )
    check_array(f"{what}, losses", losses, kind=KINDS["x"])
    return losses, dict(indicators)


def number(default: Any = dataclasses.MISSING, **bounds: float | None) -> Any:
    """A field for a number in this range; None is off where it is the default."""
    return dataclasses.field(default=default, metadata={"bounds": bounds})


def choice(default: str, choices: Any) -> Any:
    """A field for one of the values of a `Literal`."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def sequence_log_ratio(
    log_probs: Tokens, old_log_probs: Tokens, mask: Tokens, segments: Segments
) -> Tokens:
    """At each token the mean of log_prob - old_log_prob over the loss tokens of its sequence."""
    return segments.spread(segments.mean(log_probs - old_log_probs, mask))


def ratio_at(
    level: Level, log_probs: Tokens, old_log_probs: Tokens, mask: Tokens, segments: Segments
) -> Tokens:
    """The ratio of each token, or of its sequence: exp(mean over the sequence of log_prob -
    old_log_prob).
    """
    if level == "token":
        return jnp.exp(log_ratio(log_probs, old_log_probs))
    sequence = sequence_log_ratio(log_probs, old_log_probs, mask, segments)
    return jnp.exp(jnp.clip(sequence, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def clipped_surrogate(
    ratio: Tokens,
    advantages: Tokens,
    clip_low: Coefficient,
    clip_high: Coefficient,
    dual_clip: Coefficient | None = None,
) -> Result:
    """max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), at most -A dual_clip where A < 0."""
    plain = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1 - clip_low, 1 + clip_high)
    loss = jnp.where(clipped > plain, clipped, plain)
    indicators = {"clip_fraction": clipped > plain}
    if dual_clip is not None:
        bound = -advantages * dual_clip
        beyond = (advantages < 0) & (loss > bound)
        loss = jnp.where(beyond, bound, loss)
        indicators["clip_fraction_lower"] = beyond
    return loss, {name: x.astype(jnp.float32) for name, x in indicators.items()}
