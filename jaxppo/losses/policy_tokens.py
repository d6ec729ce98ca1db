"""The policy loss of a token, a config's loss with its correction and penalties; and the KL to
the reference alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Set
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import Aggregation, check, check_array, check_type, is_zero, masked, needed
from jaxppo.base.kl import KL, Estimator, k3, kl_divergence, log_ratio
from jaxppo.base.metrics import CompositeTerm, Term, Terms, effective_share, means, moments, share
from jaxppo.base.pytree import PyTree
from jaxppo.batch.extras import extra_of
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import TokenStats
from jaxppo.head.token_arguments import check_stats
from jaxppo.losses.token_loss import OF_EVERY_LOSS, Asks, Losses, Reads, TokenLoss, WeighedBatch
from jaxppo.losses.unusable_tokens import (
    agreeing,
    excused,
    penalised,
    unusable_tokens,
    without_loss,
    without_policy_loss,
)
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.off_policy import correction as off_policy_correction
from jaxppo.policy.off_policy import left_out_by
from jaxppo.policy.unusable import Unusable
from jaxppo.policy_losses.base import Indicators, PolicyLoss, checked_result, choice, ratio_at
from jaxppo.sharding import Segments

SELECTED = "selected"  # the extra of a batch that holds the tokens which ClipCov and KLCov select
# the log-probs of each `ratio_to` of a batch
BY_RATIO = {"old": "old_log_probs", "rollout": "rollout_log_probs"}


def check_config(config: PolicyLossConfig) -> None:
    check_type("config", config, isinstance(config, PolicyLossConfig), "PolicyLossConfig")


def check_needed(batch: RolloutBatch, config: PolicyLossConfig) -> None:
    """Raises ValueError where the config asks for an array that the batch lacks."""
    needed("batch.advantages", batch.advantages, "f32[R, T] for every policy loss")
    policies: dict[str, Set[str]] = {f"ratio_to={config.ratio_to!r}": {config.ratio_to}}
    if config.kl is not None:
        policies[f"kl={config.kl}"] = config.kl.policies
        if config.penalises_kl:
            policies[f"kl={config.kl}"] = config.kl.policies | {"ref"}
    if config.off_policy is not None:
        policies[f"off_policy={config.off_policy}"] = config.off_policy.policies
    for name in ("old", "ref", "rollout"):
        readers = [what for what, compared in policies.items() if name in compared]
        if readers:
            expected = f"f32[R, T] for {', '.join(readers)}"
            needed(f"batch.{name}_log_probs", getattr(batch, f"{name}_log_probs"), expected)


def old_log_probs(
    log_probs: Float[Array, "R T"], batch: RolloutBatch, config: PolicyLossConfig
) -> Float[Array, "R T"]:
    """The log-probs in the denominator of the config's ratio, constants."""
    if config.ratio_to != "current":
        log_probs = getattr(batch, BY_RATIO[config.ratio_to])
    return lax.stop_gradient(log_probs)


class Correction(NamedTuple):
    """The off-policy correction of each token: factors of the policy loss, 0 where it is left
    out, and indicators.
    """

    weights: Float[Array, "R T"]
    values: Indicators


# The metrics of every policy loss, which its indicators must not hide, beside those of its
# correction.
REPORTED = OF_EVERY_LOSS | {
    *(
        "pg_loss",
        "kl",
        "entropy",
        "ppo_kl",
        "ratio_mean",
        "ratio_min",
        "ratio_max",
        "effective_sample_size",
    ),
    *("sampler_log_prob_abs_diff", "sampler_k3", "rollout_capped"),
    *("clip_fraction_positive", "clip_fraction_negative"),
}


class OfConfig(TokenLoss[TokenStats]):
    """A loss of a policy's config."""

    config: PolicyLossConfig
    takes_nucleus: ClassVar[bool] = True
    aggregation = property(lambda self: self.config.aggregation)
    aggregation_norm = property(lambda self: self.config.aggregation_norm)
    off_policy = property(lambda self: self.config.off_policy)
    out_of_denominators = property(lambda self: self.config.out_of_denominators)


@dataclasses.dataclass(frozen=True)
class PolicyTokenLoss(OfConfig):
    """The policy loss of a token, with its penalties."""

    config: PolicyLossConfig
    coefficients: ClassVar[tuple[str, ...]] = ("config.kl.coef", "config.entropy_coef")

    @property
    def asks(self) -> Asks:
        if self.config.loss.selects:
            return Asks(entropy=self.config.entropy_mode, extras=(SELECTED,))
        return Asks(entropy=self.config.entropy_mode)

    @property
    def token_local(self) -> bool:
        if self.config.kl is not None and self.config.kl.importance == "sequence":
            return False
        off_policy = self.config.off_policy
        if off_policy is not None:
            if "current" in off_policy.policies:  # the correction is not known before the log-probs
                return False
            if isinstance(self.config.unusable, Unusable) and not off_policy.token_local:
                # a token that the current policy finds impossible is in no mean over its sequence
                return False
        return self.config.loss.token_local

    def check(self, batch: RolloutBatch) -> None:
        check_needed(batch, self.config)
        if self.config.loss.selects is not None:
            expected = (
                "the step's covariance_mask(stats, batch, config, key), for"
                f" loss={self.config.loss}"
            )
            check_array(
                "selected",
                extra_of(batch, SELECTED, expected),
                batch.loss_mask.shape,
                "the batch's",
            )

    def check_stats(self, stats: PyTree, batch: RolloutBatch) -> None:
        check_stats(stats, batch.loss_mask.shape)
        if self.config.entropy_mode != "bonus":
            return
        what = f"entropy_coef={self.config.entropy_coef}"
        needed("stats.entropy", stats.entropy, f"f32[R, T] for {what}")
        got = f"entropies of mode {stats.entropy_mode!r}, which have no gradient"
        expected = f"'bonus' for {what}: log_probs_from_hidden(..., entropy=config.entropy_mode)"
        check("stats", got, stats.entropy_mode == "bonus", expected)

    def left_out(self, stats: TokenStats | None, batch: RolloutBatch) -> Bool[Array, "R T"] | None:
        """The loss tokens without policy loss, penalties and statistics, see `Unusable`."""
        return without_loss(self.config, _current(stats), batch)

    def unusable_tokens(
        self, stats: TokenStats | None, batch: RolloutBatch
    ) -> Bool[Array, "R T"] | None:
        """The loss tokens with a log-prob that is not finite, see `Unusable`."""
        return unusable_tokens(self.config, _current(stats), batch)

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        config = self.config
        reads: dict[str, Array | None] = {"advantages": batch.advantages}
        if SELECTED in batch.extras:
            reads["selected"] = batch.extras[SELECTED]
        policies: set[str] = {config.ratio_to}
        if config.off_policy is not None:
            policies |= config.off_policy.policies
        if config.kl is not None and config.penalises_kl:  # else it is a metric only
            policies |= {*config.kl.policies, "ref"}
        log_probs = {}
        for policy in ("old", "rollout", "ref"):
            if policy in policies:
                log_probs[f"{policy}_log_probs"] = getattr(batch, f"{policy}_log_probs")
        if stats is not None:
            log_probs["log_probs"] = stats.log_probs
            if config.entropy_mode == "bonus":
                reads["entropy"] = stats.entropy
        return reads | excused(config, log_probs, _current(stats), batch)

    def constants(self, stats: TokenStats | None, weighed: WeighedBatch) -> Correction | None:
        """The off-policy correction, None without one."""
        off_policy = self.config.off_policy
        batch = weighed.batch
        if off_policy is None:
            return None
        weights, indicators = off_policy_correction(
            _policies(stats, batch),
            batch.advantages,
            batch.loss_mask,
            weighed.segments,
            off_policy,
            weighed.normalizer.weight_mean,
        )
        if off_policy.opsm_fraction == "response" and "opsm_clipfrac" in indicators:
            share = _response_share(batch, weighed.segments)
            indicators = indicators | {"opsm_clipfrac": indicators["opsm_clipfrac"] * share}
        return Correction(weights, indicators)

    def reasons(
        self, stats: TokenStats, weighed: WeighedBatch, constants: Correction | None
    ) -> dict[str, Bool[Array, "R T"]]:
        """Why the policy loss does not move a token."""
        off_policy = self.config.off_policy
        batch = weighed.batch
        advantages = batch.advantages
        reasons: dict[str, Bool[Array, "R T"]] = {}
        without = without_policy_loss(self.config, None, batch)
        if without is not None:
            reasons["unusable"] = without
        if off_policy is not None and constants is not None:
            policies = _policies(stats, batch)
            reasons |= left_out_by(
                policies, advantages, batch.loss_mask, weighed.segments, off_policy
            )
            if off_policy.outside == "zero":
                reasons["weight outside its bounds"] = constants.weights == 0

        def policy(log_probs: Float[Array, "R T"]) -> tuple[Float[Array, "R T"], Indicators]:
            return self._policy(log_probs, batch, None, weighed.segments)

        values, pull, indicators = jax.vjp(policy, stats.log_probs, has_aux=True)
        still = pull(weighed.weights + 0 * values)[0] == 0
        reasons["advantage 0"] = still & (advantages == 0)
        selected = batch.extras.get(SELECTED)
        if selected is not None:
            reasons["selected"] = still & (selected > 0)
        if "clip_fraction_lower" in indicators:
            reasons["dual clip"] = still & (indicators["clip_fraction_lower"] > 0)
        return reasons | {
            "clipped above": still & (advantages > 0),
            "clipped below": still & (advantages < 0),
        }

    def terms(
        self, stats: TokenStats, batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        config = self.config
        policy, _ = self._policy(stats.log_probs, batch, constants, segments)
        terms = {"policy": policy}
        if config.kl is not None and config.penalises_kl:
            terms["kl"] = config.kl.coef * self._kl(config.kl, stats.log_probs, batch, segments)
        if not is_zero(config.entropy_coef) and stats.entropy is not None:
            terms["entropy"] = -(config.entropy_coef * penalised(config, stats.entropy, batch))
        return terms

    def _kl(
        self, kl: KL, log_probs: Float[Array, "R T"], batch: RolloutBatch, segments: Segments
    ) -> Float[Array, "R T"]:
        """The KL divergence to the reference at each token."""
        divergence = reference_kl(kl, log_probs, agreeing(self.config, log_probs, batch), segments)
        return penalised(self.config, divergence, batch)

    def _penalties(
        self, stats: TokenStats, weighed: WeighedBatch
    ) -> dict[str, Float[Array, "R T"]]:
        """The divergence and the entropy of each token, where there are any, without coefficients."""
        config = self.config
        batch = weighed.batch
        penalties: dict[str, Float[Array, "R T"]] = {}
        if config.kl is not None and batch.ref_log_probs is not None:
            penalties["kl"] = self._kl(config.kl, stats.log_probs, batch, weighed.segments)
        if stats.entropy is not None:
            penalties["entropy"] = penalised(config, stats.entropy, batch)
        return penalties

    def metrics(
        self, stats: TokenStats, weighed: WeighedBatch, constants: Correction | None
    ) -> Terms:
        config = self.config
        batch = weighed.batch
        mask = batch.loss_mask

        def reduced(x: Float[Array, "R T"]) -> Term:
            if config.metric_aggregation == "token_mean":
                return x, mask, "mean"
            return x, weighed.weights, "sum"

        policy, indicators = self._policy(stats.log_probs, batch, constants, weighed.segments)
        old = old_log_probs(stats.log_probs, agreeing(config, stats.log_probs, batch), config)
        ratio = jnp.exp(log_ratio(stats.log_probs, old))
        compared = {"ppo_kl": old - stats.log_probs, "ratio_mean": ratio}
        trainer = stats.log_probs
        if config.ratio_to == "old":
            trainer = old
        compared |= _sampler_distances(trainer, batch, weighed.unusable)
        corrected: Indicators = {}
        if constants is not None:
            corrected = constants.values
        _check_names(config.loss, indicators, corrected)
        indicators = indicators | corrected
        values = {**indicators, **self._penalties(stats, weighed), **compared}
        terms: Terms = {name: reduced(x) for name, x in values.items()}
        if config.clip_by_sign and "clip_fraction" in indicators:
            terms |= _clips_by_sign(indicators["clip_fraction"], batch.advantages, reduced)
        terms |= {
            "pg_loss": (policy, weighed.weights, "sum"),
            "ratio_min": (ratio, mask, "min"),
            "ratio_max": (ratio, mask, "max"),
            "effective_sample_size": CompositeTerm(moments(ratio, mask), effective_share),
        }
        if weighed.capped is not None:
            terms["rollout_capped"] = (weighed.capped, mask, "sum")
        return terms

    def _policy(
        self,
        log_probs: Float[Array, "R T"],
        batch: RolloutBatch,
        correction: Correction | None,
        segments: Segments,
    ) -> tuple[Float[Array, "R T"], Indicators]:
        """The corrected policy loss of each token, and the indicators of the config's loss."""
        loss = self.config.loss
        mask = batch.loss_mask
        old = old_log_probs(log_probs, agreeing(self.config, log_probs, batch), self.config)
        if SELECTED in batch.extras:
            selected = masked(batch.extras[SELECTED], mask)
            result = loss(
                log_probs, old, batch.advantages, mask=mask, segments=segments, selected=selected
            )
        else:
            result = loss(log_probs, old, batch.advantages, mask=mask, segments=segments)
        policy, indicators = checked_result(loss, result, mask.shape)
        if correction is not None:
            policy = policy * correction.weights
        without = without_policy_loss(self.config, None, batch)
        if without is not None:
            policy = jnp.where(without, 0, policy)
        return policy, indicators


def _clips_by_sign(
    clipped: Float[Array, "R T"], advantages: Float[Array, "R T"], reduced: Callable[[Array], Term]
) -> Terms:
    """The share of clipped tokens among those of positive advantages, and among those of
    negative ones.
    """
    terms: Terms = {}
    for sign, has_sign in (("positive", advantages > 0), ("negative", advantages < 0)):
        by_sign = {"part": reduced(jnp.where(has_sign, clipped, 0)), "whole": reduced(has_sign)}
        terms[f"clip_fraction_{sign}"] = CompositeTerm(by_sign, share)
    return terms


def _sampler_distances(
    trainer: Float[Array, "R T"], batch: RolloutBatch, unusable: Bool[Array, "R T"] | None
) -> Indicators:
    """How far the sampler's log-probs are from the trainer's, if the batch has them; 0 at
    unusable tokens.
    """
    if batch.rollout_log_probs is None:
        return {}
    apart = trainer - batch.rollout_log_probs
    if unusable is not None:
        apart = jnp.where(unusable, 0, apart)
    return {"sampler_log_prob_abs_diff": jnp.abs(apart), "sampler_k3": k3(apart)}


def _check_names(loss: PolicyLoss, indicators: Indicators, corrected: Indicators) -> None:
    """Raises where an indicator has the name of a metric that the policy loss reports itself."""
    taken = sorted(indicators.keys() & (REPORTED | corrected.keys()))
    what = f"{type(loss).__name__}.__call__"
    check(what, f"indicators {taken}", not taken, "other names: every policy loss reports these")


def _policies(
    stats: TokenStats | None, batch: RolloutBatch
) -> dict[str, Float[Array, "R T"] | None]:
    """The log-probs of the policies that a correction may compare."""
    return {
        "current": _current(stats),
        "old": batch.old_log_probs,
        "rollout": batch.rollout_log_probs,
    }


def _current(stats: TokenStats | None) -> Float[Array, "R T"] | None:
    """The current log-probs, once they are computed."""
    if stats is None:
        return None
    return stats.log_probs


def _response_share(batch: RolloutBatch, segments: Segments) -> Float[Array, "R T"]:
    """For each sequence, the positions from its first loss token to its last, divided by its
    number of loss tokens.
    """
    mask = batch.loss_mask
    positions = batch.positions.astype(jnp.float32)
    span = segments.max(positions, mask) + segments.max(-positions, mask) + 1
    count = segments.sum((mask > 0).astype(jnp.float32))
    return segments.spread(jnp.where(count > 0, span / jnp.maximum(count, 1), 0))


def reference_kl(
    kl: KL, log_probs: Float[Array, "R T"], batch: RolloutBatch, segments: Segments
) -> Float[Array, "R T"]:
    """The KL divergence to the reference at each token."""
    weight = None
    if kl.importance == "score":
        weight = jnp.exp(log_probs - lax.stop_gradient(log_probs))
    elif kl.importance != "none":
        base = batch.rollout_log_probs
        if kl.compares == "current/old":
            base = batch.old_log_probs
        weight = ratio_at(kl.importance, log_probs, base, batch.loss_mask, segments)
    return kl_divergence(log_probs, batch.ref_log_probs, kl.estimator, weight)


@dataclasses.dataclass(frozen=True)
class ReferenceKL(TokenLoss[TokenStats]):
    """The KL divergence to the reference as a loss, for tokens that may have no policy loss.

    Its metric is `kl`.

    Args:
      estimator: see `kl_divergence`.
      aggregation, aggregation_norm: the denominators, see `token_weights`.

    Raises:
      ValueError: an unknown estimator or aggregation.

    Example:
      >>> ReferenceKL("k2").estimator
      'k2'
    """

    asks = Asks()
    estimator: Estimator = choice("k3", Estimator)
    aggregation: Aggregation = "token_mean"
    aggregation_norm: float | None = None

    def check(self, batch: RolloutBatch) -> None:
        needed("batch.ref_log_probs", batch.ref_log_probs, f"f32[R, T] for {self}")

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        reads: dict[str, Array | None] = {"ref_log_probs": batch.ref_log_probs}
        if stats is not None:
            reads["log_probs"] = stats.log_probs
        return reads

    def terms(
        self, stats: TokenStats, batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        return {"kl": reference_kl(KL(1.0, self.estimator), stats.log_probs, batch, segments)}

    def metrics(self, stats: TokenStats, weighed: WeighedBatch, constants: PyTree) -> Terms:
        return means(
            self.terms(stats, weighed.batch, constants, weighed.segments), weighed.batch.loss_mask
        )
