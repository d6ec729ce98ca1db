"""A coefficient of the entropy bonus that moves with the entropy of each step."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxppo._arrays import check_number

__all__ = ["AdaptiveEntropy", "EntropyState"]


class EntropyState(NamedTuple):
    """What a run saves between its steps: a pytree of two `f32[]`."""

    coef: Float[Array, ""]
    """The coefficient, whether or not the next step uses it."""
    entropy: Float[Array, ""]
    """The mean entropy of the last step, nats; -inf before the first."""


@dataclasses.dataclass(frozen=True)
class AdaptiveEntropy:
    """Raises the coefficient c of the entropy bonus while entropy H is low, and takes the bonus away while it is high.

        after a step:      c <- clip(c + step where H <= target, else c - step, 0, most)
        in the next step:  the bonus has the coefficient c where H <= target, else 0

    Args:
      target: the entropy to keep, nats.
      step: how far the coefficient moves in one step of the optimiser.
      most: the largest coefficient.

    Raises:
      ValueError: a number out of its range.

    Example:
      >>> adaptive = AdaptiveEntropy(target=0.2)
      >>> state = adaptive.update(adaptive.init(), 0.1)
      >>> round(float(adaptive.coef(state)), 4), float(adaptive.coef(adaptive.update(state, 0.3)))
      (0.005, 0.0)

    He et al. 2025, Skywork open reasoner 1, https://arxiv.org/abs/2505.22312
    """

    target: float = 0.2
    step: float = 0.005
    most: float = 1.0

    def __post_init__(self) -> None:
        check_number("target", self.target, least=0)
        check_number("step", self.step, least=0)
        check_number("most", self.most, least=0)

    def init(self, coef: float = 0.0) -> EntropyState:
        """The state before the first step, which has the bonus `coef`.

        Args:
          coef: the first coefficient, 0 to `most`.

        Returns:
          The state.

        Raises:
          ValueError: a coefficient out of its range.

        Example:
          >>> float(AdaptiveEntropy().init(0.25).coef)
          0.25
        """
        check_number("coef", coef, least=0, most=self.most)
        return EntropyState(jnp.float32(coef), jnp.float32(-jnp.inf))

    def coef(self, state: EntropyState) -> Float[Array, ""]:
        """The coefficient of the coming step, for `PolicyLossConfig(entropy_coef=)` inside `jit`.

        Args:
          state: after the last step.

        Returns:
          `f32[]`, 0 where the last step's entropy was above the target.

        Example:
          >>> float(AdaptiveEntropy().coef(AdaptiveEntropy().init(0.25)))
          0.25
        """
        return jnp.where(state.entropy > self.target, 0 * state.coef, state.coef)

    def update(self, state: EntropyState, entropy: Float[Array, ""] | float) -> EntropyState:
        """The state after a step.

        Args:
          state: before the step.
          entropy: the mean over the loss tokens of the whole step, nats: its metric `entropy`.

        Returns:
          The state; NaN, and so is the next loss, where the entropy is NaN.

        Raises:
          ValueError: an entropy that is no finite number, where it is not an array.

        Example:
          >>> float(AdaptiveEntropy(step=0.5).update(AdaptiveEntropy().init(), jnp.float32(0.0)).coef)
          0.5
        """
        if not (isinstance(entropy, (jax.Array, np.ndarray, np.floating)) and jnp.shape(entropy) == ()):
            check_number("entropy", entropy)
        moved = jnp.where(entropy > self.target, -self.step, self.step) + jnp.where(jnp.isnan(entropy), jnp.nan, 0)
        return EntropyState(jnp.clip(state.coef + moved, 0, self.most).astype(jnp.float32), jnp.float32(entropy))
