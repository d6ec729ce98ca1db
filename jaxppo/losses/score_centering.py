"""Score centering: removes from a policy loss the gradient that it has on average over the sampler's tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxppo._arrays import Aggregation, check_choice
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.config import ImpossibleTokens, PolicyLossConfig
from jaxppo.head.head import Entropy, TokenStats
from jaxppo.losses.policy import advantages_of
from jaxppo.losses.token_loss import Constants, Step, TokenLoss, loss_of_stats
from jaxppo.losses.top_k_distillation import as_top_k, mass, of_ids
from jaxppo.losses.top_k_divergence import with_tail
from jaxppo.metrics import Metrics, Terms, means
from jaxppo.policy_losses.base import PolicyLoss
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes
from jaxppo.validation import checked

__all__ = ["score_centering_loss"]

CenteringTail = Literal["bucket", "renormalise"]


def score_centering_loss(
    stats: TokenStats,
    ids: Int[Array, "R T K"],
    rollout_log_probs: Float[Array, "R T K"],
    batch: RolloutBatch,
    config: PolicyLossConfig,
    *,
    tail: CenteringTail = "bucket",
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """A term for a policy loss that makes its expected gradient over the sampler's tokens 0 for equal advantages.

    Let p be the policy's probability of a token, q the sampler's, and A the advantage. If the gradient of the policy
    loss at a drawn token is -A f(p / q) grad log p, then the term is

        loss = sum over tokens of weight_t * A_t * sum over ids v of c_v log p_v
        c_v = q_v f(p_v / q_v) - a p_v

    The c_v are constants. Without this term a weight other than p / q moves the policy even if all tokens have the same
    advantage. f comes from the config's loss: it is 1 for `Reinforce`, min(r, 1 + clip_high) for `CISPO(clip_low=1)`, a
    mask for `ProbabilityMask`. For f = r, as in a `PPO` that clips nothing, all c_v are 0. Only that part of the
    gradient is centred which is due to advantages: a pull to the sampler stays.

    a p_v stands for the tokens that are not among the ids (the tail). They are treated as one token, which the policy
    draws with probability 1 - sum p and the sampler with 1 - sum q, with sums over the ids of the position. rho is the
    ratio of these two. The expected gradient of that token, (1 - sum q) f(1 / rho) grad log(1 - sum p), is
    -a sum over v of p_v grad log p_v:

        rho = (1 - sum q) / (1 - sum p),   a = rho f(1 / rho)

    Only the gradient of this term has a meaning, its value does not. It is exact if the ids are all that the sampler
    could draw. An id that the policy finds impossible makes the loss NaN. With `impossible_tokens="leave_out"` its c_v
    is 0, since drawing it has no policy loss.

    Args:
      stats: the result of `log_probs_from_hidden(..., ids=ids)`, or of the same from logits; its `id_log_probs` are
        read.
      ids: `i32[R, T, K]`, -1 padded, the sampler's top-k at each position.
      rollout_log_probs: `[R, T, K]`, the sampler's log-probs of these ids over the whole vocabulary.
      batch: `[R, T]`, with advantages.
      config: the config of the `policy_loss` to which this term is added. Only its loss, `ratio_to`, aggregation and
        `impossible_tokens` are read.
      tail: "bucket", or "renormalise" if the ids are the sampler's whole nucleus: p and q are then divided by their
        sums, and a is 0, since there is no tail. The log-probs of the policy loss then need the same `nucleus_ids`.
      parallel: the mesh; rows sharded over data, positions over context.
      normalizer: the denominators of the whole step, if the batch is one of its micro-batches.

    Returns:
      The scalar f32 to be added to the loss, and the metrics `loss` (its value), `policy_mass` and `rollout_mass` (sum
      p and sum q, means over tokens) and `broken_rules` (see `policy_loss`).

    Raises:
      TypeError, ValueError: arrays are no log-probs or differ in shape; the statistics have no log-probs of ids; the
        config's loss of a token depends on other tokens, or selects tokens; its ratio is over the trainer's old policy,
        whose log-probs of the ids are not known; it has an off-policy correction.

    Example:
      >>> from jaxppo.losses.score_centering import score_centering_loss
      >>> batch = RolloutBatch.from_samples([Sample([1, 2], response_start=1, advantages=[1.0])], row_length=2)
      >>> ids, q = jnp.array([[[0, 1, 2], [-1, -1, -1]]]), jnp.log(jnp.array([[[0.5, 0.25, 0.25], [1.0, 1.0, 1.0]]]))
      >>> config = PolicyLossConfig(policy_losses.Reinforce(), ratio_to="current")
      >>> def centring(logits):
      ...     stats = log_probs_from_logits(logits, batch.targets, ids=ids, where=batch.loss_mask > 0)
      ...     return score_centering_loss(stats, ids, q, batch, config, tail="renormalise")[0]
      >>> jax.grad(centring)(jnp.zeros((1, 2, 3)))[0, 0].round(2)                              # q - p
      Array([ 0.17, -0.08, -0.08], dtype=float32)

    2026, https://arxiv.org/abs/2609.20807; shipped by prime-rl (with "renormalise") and Tunix.
    """
    batch = checked(batch)
    if not isinstance(config, PolicyLossConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected PolicyLossConfig")
    check_choice("tail", tail, CenteringTail)
    if not config.loss.token_local or config.loss.selects:
        raise ValueError(f"config.loss: got {config.loss}, expected one whose tokens are each on their own")
    if config.ratio_to == "old":
        raise ValueError(
            "config.ratio_to: got 'old', expected 'rollout' or 'current': only the sampler's ids are known"
        )
    if config.off_policy is not None:
        raise ValueError("config.off_policy: got a correction, expected None: its weights of the ids are not known")
    given = as_top_k(stats, ids, rollout_log_probs, batch, "rollout_log_probs")
    on_policy, gone = config.ratio_to == "current", config.impossible_tokens
    own = CenteringLoss(config.loss, on_policy, gone, tail, config.aggregation, config.aggregation_norm)
    return loss_of_stats("score_centering_loss", own, stats, batch, parallel, normalizer, given)


@dataclasses.dataclass(frozen=True)
class CenteringLoss(TokenLoss):
    """The centring term of a token; its constants are the ids and the sampler's log-probs."""

    loss: PolicyLoss
    on_policy: bool
    impossible_tokens: ImpossibleTokens
    tail: CenteringTail
    aggregation: Aggregation
    aggregation_norm: float | None

    @property
    def token_local(self) -> bool:
        return True

    @property
    def entropy(self) -> Entropy:
        return "none"

    def ruled(self, stats: TokenStats | None, batch: RolloutBatch) -> Mapping[str, Array | None]:
        log_probs = None if stats is None else stats.log_probs
        if log_probs is not None and self.impossible_tokens == "leave_out":
            log_probs = jnp.where(jnp.isneginf(log_probs), 0, log_probs)  # the term depends on the ids alone
        return {"log_probs": log_probs, "advantages": batch.advantages}

    def per_token(
        self, stats: TokenStats, batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> Float[Array, "R T"]:
        ids, *log_probs = of_ids(stats, constants, batch.loss_mask)
        has_id = ids != -1
        log_p, log_q = (with_tail(x, has_id, self.tail) for x in log_probs)
        gone = jnp.isneginf(log_p)
        if self.impossible_tokens == "leave_out":
            of_none, finite = 0.0, jnp.where(gone, 0, log_p)
        else:
            of_none, finite = jnp.nan, log_p
        slopes = self._slopes(finite, log_q, advantages_of(batch), segments)
        drawn = jnp.where(gone, of_none, jnp.exp(log_q) * slopes)
        if self.tail == "bucket":  # log(1 - sum p) of the bucket depends on the ids' p
            rest = drawn[..., -1:] * jnp.exp(-log_p[..., -1:])
            log_p, finite, drawn = log_p[..., :-1], finite[..., :-1], drawn[..., :-1]
            drawn = drawn - rest * jnp.exp(log_p)
        return -jnp.where(has_id, lax.stop_gradient(drawn) * finite, 0).sum(axis=-1)

    def terms(self, stats: TokenStats, step: Step, constants: Constants) -> Terms:
        mask = step.batch.loss_mask
        ids, log_p, log_q = of_ids(stats, constants, mask)
        return means({"policy_mass": mass(log_p, ids), "rollout_mass": mass(log_q, ids)}, mask)

    def _slopes(
        self,
        log_p: Float[Array, "R T K"],
        log_q: Float[Array, "R T K"],
        advantages: Float[Array, "R T"],
        segments: Segments,
    ) -> Float[Array, "R T K"]:
        """The loss's gradient by each log p if that token had been drawn, minus its gradient at an advantage of 0."""
        R, T, K = log_p.shape
        given = log_p, log_p if self.on_policy else log_q, jnp.repeat(advantages[..., None], K, axis=-1)
        new, old, wide = (lax.stop_gradient(x).reshape(R, T * K) for x in given)

        def at(x: Float[Array, "R TK"], advantages: Float[Array, "R TK"]) -> Float[Array, ""]:
            return self.loss(x, old, advantages, mask=jnp.ones_like(x), segments=segments)[0].sum()

        by_advantage, without = (jax.grad(at)(new, a) for a in (wide, jnp.zeros_like(wide)))
        return (by_advantage - without).reshape(R, T, K)
