"""Score centering: removes from a policy loss the gradient that it has on average over the
sampler's tokens.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import check, needed
from jaxppo.base.pytree import PyTree
from jaxppo.base.traced import leaves, with_leaves
from jaxppo.batch.reads import at_most_one
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import TokenStats
from jaxppo.losses.policy_tokens import OfConfig, check_config
from jaxppo.losses.token_loss import Losses, Reads
from jaxppo.losses.top_k_divergence import OfIds, PerId, with_tail
from jaxppo.losses.unusable_tokens import unusable_tokens, without_policy_loss
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.unusable import Unusable
from jaxppo.policy_losses.base import checked_result, choice
from jaxppo.sharding import Segments

__all__ = ["ScoreCentering"]

CenteringTail = Literal["bucket", "renormalise"]


@dataclasses.dataclass(frozen=True)
class ScoreCentering(OfConfig, OfIds):
    """A term for a policy loss that makes its expected gradient over the sampler's tokens 0 for
    equal advantages.

    Let p be the policy's probability of a token, q the sampler's, and A the advantage. If the
    gradient of the policy loss at a drawn token is -A f(p / q) grad log p, then the term is

        loss = sum over tokens of weight_t * A_t * sum over ids v of c_v log p_v
        c_v = q_v f(p_v / q_v) - a p_v

    The c_v are constants. f comes from the config's loss: it is 1 for `Reinforce`, min(r, 1 +
    clip_high) for `CISPO(clip_low=1)`, a mask for `ProbabilityMask`. For f = r, as in a `PPO` that
    clips nothing, all c_v are 0. Only the part of the gradient that is due to advantages is
    centred: a pull to the sampler stays.

    a p_v stands for the tokens that are not among the ids (the tail). They are treated as one
    token, which the policy draws with probability 1 - sum p and the sampler with 1 - sum q, with
    sums over the ids of the position. The expected gradient of that token, (1 - sum q) f(1 / rho)
    grad log(1 - sum p), is -a sum over v of p_v grad log p_v:

        rho = (1 - sum q) / (1 - sum p),   a = rho f(1 / rho)

    Use this term as a part of a sum beside the config: its value means nothing, only its gradient,
    which is exact if the ids are all that the sampler could draw. An id that the policy finds
    impossible makes the loss NaN. With an `Unusable` its c_v is 0, since drawing it has no policy
    loss. A token without a policy loss because the sampler's log-prob is not finite has no term
    either.

    The metrics are `loss` (its value), `policy_mass` and `rollout_mass` (sum p and sum q, means
    over tokens), `rollout_capped` (see docs/metrics.md) and `broken_rules`.

    Args:
      config: the config of the `policy_loss` to which this term is added. Only its loss,
        `ratio_to`, aggregation and `unusable` are read.
      tail: "bucket", or "renormalise" if the ids are the sampler's whole nucleus: p and q are then
        divided by their sums, and a is 0, since there is no tail. The log-probs of the policy loss
        then need the same `nucleus_ids`.
      ids, log_probs: the names of the extras that hold the sampler's top-k and its log-probs of
        these ids over the whole vocabulary, see `TopKDistillation`.

    Raises:
      TypeError, ValueError: the config's loss of a token depends on other tokens, or selects
        tokens; its ratio is over the trainer's old policy, whose log-probs of the ids are not
        known; it has an off-policy correction.

    Example:
      >>> sampler = {"sampler_ids": [[0, 1, 2]], "sampler_log_probs": np.log([[0.5, 0.25, 0.25]])}
      >>> sample = Sample([1, 2], response_start=1, advantages=[1.0], extras=sampler)
      >>> batch = RolloutBatch.from_samples([sample], row_length=2)
      >>> loss = ScoreCentering(PolicyLossConfig(policy_losses.Reinforce(), ratio_to="current"), tail="renormalise")
      >>> asked = {"ids": batch.extras["sampler_ids"], "where": batch.loss_mask > 0}
      >>> def centring(logits):
      ...     return loss_from_stats(log_probs_from_logits(logits, batch.targets, **asked), batch, loss)[0]
      >>> jax.grad(centring)(jnp.zeros((1, 2, 3)))[0, 0].round(2)                              # q - p
      Array([ 0.17, -0.08, -0.08], dtype=float32)

    2026, https://arxiv.org/abs/2609.20807; shipped by prime-rl (with "renormalise") and Tunix.
    """

    config: PolicyLossConfig
    tail: CenteringTail = choice("bucket", CenteringTail)
    ids: str = "sampler_ids"
    log_probs: str = "sampler_log_probs"
    rule: ClassVar[str] = "rollout_log_probs_of_ids"
    sides: ClassVar[tuple[str, str]] = ("policy", "rollout")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_config(self.config)
        loss = self.config.loss
        check(
            "config.loss",
            loss,
            loss.token_local and not loss.selects,
            "one whose tokens are each on their own",
        )
        expected = "'rollout' or 'current': only the sampler's ids are known"
        check("config.ratio_to", "'old'", self.config.ratio_to != "old", expected)
        expected = "None: its weights of the ids are not known"
        check("config.off_policy", "a correction", self.config.off_policy is None, expected)

    def check(self, batch: RolloutBatch) -> None:
        super().check(batch)
        needed("batch.advantages", batch.advantages, f"f32[R, T] for {self}")

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        arrays = {**super().reads(stats, batch, segments), "advantages": batch.advantages}
        own = arrays.get("id_log_probs")
        if own is not None and not isinstance(self.config.unusable, Unusable):
            arrays["id_log_probs"] = jnp.where(jnp.isneginf(own), jnp.nan, own)
        return arrays

    def left_out(self, stats: TokenStats | None, batch: RolloutBatch) -> Bool[Array, "R T"] | None:
        """The loss tokens whose policy loss is 0, whichever id was drawn."""
        return without_policy_loss(self.config, None, batch)

    def unusable_tokens(
        self, stats: TokenStats | None, batch: RolloutBatch
    ) -> Bool[Array, "R T"] | None:
        return unusable_tokens(self.config, None, batch)

    def terms(
        self, stats: TokenStats, batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        ids, log_p, log_q = self.of_ids(stats, batch)
        has_id = ids != -1
        log_p = with_tail(log_p, has_id, self.tail)
        log_q = with_tail(at_most_one(log_q, has_id), has_id, self.tail)
        impossible = jnp.isneginf(log_p)
        if isinstance(self.config.unusable, Unusable):
            finite = jnp.where(impossible, 0, log_p)
            of_impossible = 0.0
        else:
            finite = log_p
            of_impossible = jnp.nan
        slopes = self._slopes(finite, log_q, batch.advantages, segments)
        expected = jnp.where(impossible, of_impossible, jnp.exp(log_q) * slopes)
        if self.tail == "bucket":  # log(1 - sum p) of the bucket depends on the ids' p
            rest = expected[..., -1:] * jnp.exp(-log_p[..., -1:])
            expected = expected[..., :-1] - rest * jnp.exp(log_p[..., :-1])
            finite = finite[..., :-1]
        centring = jnp.where(has_id, lax.stop_gradient(expected) * finite, 0)
        return {"centring": -centring.sum(axis=-1)}

    def _slopes(
        self, log_p: PerId, log_q: PerId, advantages: Float[Array, "R T"], segments: Segments
    ) -> PerId:
        """The loss's gradient by each log p if that token had been drawn, minus its gradient at
        an advantage of 0.
        """
        R, T, K = log_p.shape

        def flat(x: PerId) -> Float[Array, "R TK"]:
            return lax.stop_gradient(x).reshape(R, T * K)

        new = flat(log_p)
        old = flat(log_p if self.config.ratio_to == "current" else log_q)
        of_each_id = flat(jnp.repeat(advantages[..., None], K, -1))
        # a number of each token is one of each of its ids
        by_token = {
            path: x for path, x in leaves(self.config.loss).items() if getattr(x, "ndim", 0) == 2
        }
        loss = with_leaves(
            self.config.loss, {path: jnp.repeat(x, K, axis=-1) for path, x in by_token.items()}
        )

        def loss_at(x: Float[Array, "R TK"], advantages: Float[Array, "R TK"]) -> Float[Array, ""]:
            result = loss(x, old, advantages, mask=jnp.ones_like(x), segments=segments)
            losses, *_ = checked_result(loss, result, x.shape)
            return losses.sum()

        slopes = jax.grad(loss_at)
        by_advantage = slopes(new, of_each_id) - slopes(new, jnp.zeros_like(of_each_id))
        return by_advantage.reshape(R, T, K)
