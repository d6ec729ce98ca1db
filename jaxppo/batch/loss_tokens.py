"""What functions beside the loss read of a batch: the same numbers as the loss, by the same
kinds.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxppo.base.arrays import masked
from jaxppo.batch.reads import SAMPLED, ValueRule, at_most_zero
from jaxppo.batch.rollout_batch import RolloutBatch


@dataclasses.dataclass(frozen=True)
class LossTokens:
    """Per-shard: the tokens with loss, and what a loss sees of arrays there.

    Under jit a function cannot raise. It reads its arrays through this class, so that an entry
    which breaks the rule of a loss is NaN, and makes the result NaN rather than a plausible number.
    """

    # 1 where a token has loss, else 0; an entry of the loss mask that is no number is 1
    mask: Float[Array, "R T"]
    unsound: Float[Array, "R T"]  # NaN where the loss mask breaks a rule, else 0

    @classmethod
    def of(cls, batch: RolloutBatch, mask: Float[Array, "R T"] | None = None) -> LossTokens:
        """The tokens of another mask than the loss mask, if one is given."""
        if mask is None:
            mask = batch.loss_mask
        else:
            mask = mask.astype(jnp.float32)
        counts = mask != 0
        in_sequence = (batch.segment_ids > 0) & (batch.segment_ids <= batch.num_segments)
        sound = ~counts | ((mask == 1) & in_sequence)
        return cls(counts.astype(jnp.float32), jnp.where(sound, jnp.float32(0), jnp.nan))

    def read(
        self, rule: ValueRule, x: Float[Array, "R T"], *, impossible: bool = False
    ) -> Float[Array, "R T"]:
        """`see` of an array with this rule: NaN where an entry breaks it, a sampler's log-probs at
        most 0.

        A log-prob of -inf breaks no rule if the caller knows what to do with tokens that are
        `impossible`.
        """
        x = x.astype(jnp.float32)
        bad = rule.bad(x, jnp)
        if impossible:
            bad &= ~jnp.isneginf(x)
        if rule is SAMPLED:
            x = at_most_zero(x)
        return self.see(jnp.where(bad, jnp.nan, x))

    def see(self, x: jax.Array) -> Float[Array, "R T"]:
        """x in f32, 0 where a token has no loss, and NaN where the loss mask breaks a rule."""
        return masked(x, self.mask) + self.unsound
