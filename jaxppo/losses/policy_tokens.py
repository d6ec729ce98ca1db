"""The policy loss of a token, a config's loss with its correction and penalties; and the KL to the reference alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Set
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import Aggregation, check, check_array, check_type, is_zero, masked, needed
from jaxppo.base.kl import KL, Estimator, k3, kl_divergence, log_ratio
from jaxppo.base.metrics import CompositeTerm, Term, Terms, effective_share, means, moments, share
from jaxppo.batch.extras import extra_of
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.call import check_stats
from jaxppo.head.head import TokenStats
from jaxppo.losses.token_loss import Asks, Losses, Reads, Step, TokenLoss
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.off_policy import correction as off_policy_correction
from jaxppo.policy.off_policy import left_out_by
from jaxppo.policy_losses.base import Indicators, checked_result, choice, ratio_at
from jaxppo.sharding import Segments

SELECTED = "selected"  # the extra of a batch that holds the tokens which ClipCov and KLCov select
BY_RATIO = {"old": "old_log_probs", "rollout": "rollout_log_probs"}  # the log-probs of each `ratio_to` of a batch


def check_config(config: PolicyLossConfig) -> None:
    check_type("config", config, isinstance(config, PolicyLossConfig), "PolicyLossConfig")


def check_needed(batch: RolloutBatch, config: PolicyLossConfig) -> None:
    """Raises ValueError where the config asks for an array that the batch lacks."""
    needed("batch.advantages", batch.advantages, "f32[R, T] for every policy loss")
    asks: dict[str, Set[str]] = {f"ratio_to={config.ratio_to!r}": {config.ratio_to}}
    if config.kl is not None:
        asks[f"kl={config.kl}"] = config.kl.policies | ({"ref"} if config.penalises_kl else set())
    if config.off_policy is not None:
        asks[f"off_policy={config.off_policy}"] = config.off_policy.policies
    for name in ("old", "ref", "rollout"):
        if purposes := ", ".join(what for what, policies in asks.items() if name in policies):
            needed(f"batch.{name}_log_probs", getattr(batch, f"{name}_log_probs"), f"f32[R, T] for {purposes}")


def old_log_probs(log_probs: Float[Array, "R T"], batch: RolloutBatch, config: PolicyLossConfig) -> Float[Array, "R T"]:
    """The log-probs in the denominator of the config's ratio, constants."""
    name = BY_RATIO.get(config.ratio_to)
    return lax.stop_gradient(log_probs if name is None else getattr(batch, name))


class Correction(NamedTuple):
    """The off-policy correction of each token: factors of the policy loss, 0 where it is left out, and indicators."""

    weights: Float[Array, "R T"]
    values: Indicators


class OfConfig(TokenLoss[TokenStats]):
    """A loss of a policy's config."""

    config: PolicyLossConfig
    takes_nucleus: ClassVar[bool] = True
    aggregation = property(lambda self: self.config.aggregation)
    aggregation_norm = property(lambda self: self.config.aggregation_norm)
    off_policy = property(lambda self: self.config.off_policy)


@dataclasses.dataclass(frozen=True)
class PolicyTokenLoss(OfConfig):
    """The policy loss of a token, with its penalties."""

    config: PolicyLossConfig
    coefficients: ClassVar[tuple[str, ...]] = ("config.kl.coef", "config.entropy_coef")

    @property
    def asks(self) -> Asks:
        return Asks(entropy=self.config.entropy_mode, extras=(SELECTED,) if self.config.loss.selects else ())

    @property
    def token_local(self) -> bool:
        off = self.config.off_policy
        given = off is None or "current" not in off.policies  # known before the log-probs
        if off is not None and self.config.impossible_tokens == "leave_out":
            given = given and off.token_local  # a token that is left out changes sequence statistics
        of_sequences = self.config.kl is not None and self.config.kl.importance == "sequence"
        return self.config.loss.token_local and given and not of_sequences

    def check(self, batch: RolloutBatch) -> None:
        check_needed(batch, self.config)
        if self.config.loss.selects is not None:
            expected = f"the step's covariance_mask(stats, batch, config, key), for loss={self.config.loss}"
            check_array("selected", extra_of(batch, SELECTED, expected), batch.loss_mask.shape, "the batch's")

    def check_stats(self, stats: Any, batch: RolloutBatch) -> None:
        check_stats(stats, batch.loss_mask.shape)
        if self.config.entropy_mode != "bonus":
            return
        what = f"entropy_coef={self.config.entropy_coef}"
        needed("stats.entropy", stats.entropy, f"f32[R, T] for {what}")
        got = f"entropies of mode {stats.entropy_mode!r}, which have no gradient"
        expected = f"'bonus' for {what}: log_probs_from_hidden(..., entropy=config.entropy_mode)"
        check("stats", got, stats.entropy_mode == "bonus", expected)

    def left_out(self, stats: TokenStats | None, batch: RolloutBatch) -> Bool[Array, "R T"] | None:
        """The loss tokens with log-prob -inf under a policy that the config compares."""
        if self.config.impossible_tokens == "nan":
            return None
        old = batch.old_log_probs if "old" in self.config.policies else None
        given = [x for x in (None if stats is None else stats.log_probs, old, batch.rollout_log_probs) if x is not None]
        found = [(batch.loss_mask > 0) & jnp.isneginf(x) for x in given]
        return functools.reduce(jnp.logical_or, found, jnp.zeros(batch.loss_mask.shape, bool))

    def reads(self, stats: TokenStats | None, batch: RolloutBatch, segments: Segments) -> Reads:
        config = self.config
        found: dict[str, Array | None] = {"advantages": batch.advantages, "selected": batch.extras.get(SELECTED)}
        kl = config.kl if config.penalises_kl else None  # else it is a metric only
        names = {config.ratio_to}.union(*(x.policies for x in (kl, config.off_policy) if x is not None))
        compared = [*sorted(names - {"current"}), *([] if kl is None else ["ref"])]
        of_policies = {f"{name}_log_probs": getattr(batch, f"{name}_log_probs") for name in compared}
        if stats is not None:
            of_policies["log_probs"] = stats.log_probs
            found["entropy"] = stats.entropy if config.entropy_mode == "bonus" else None
        left_out = self.left_out(stats, batch)
        if left_out is not None:
            of_policies = {name: jnp.where(left_out, 0, x) for name, x in of_policies.items()}
        return found | of_policies

    def constants(self, stats: TokenStats | None, step: Step) -> Correction | None:
        """The off-policy correction, None without one."""
        off_policy, batch, segments = self.config.off_policy, step.batch, step.segments
        if off_policy is None:
            return None
        given = _policies(stats, batch), batch.advantages, batch.loss_mask, segments, off_policy
        weights, values = off_policy_correction(*given, step.normalizer.weight_mean)
        if off_policy.opsm_fraction == "response" and "opsm_clipfrac" in values:
            values = values | {"opsm_clipfrac": values["opsm_clipfrac"] * _response_share(batch, segments)}
        return Correction(weights, values)

    def reasons(self, stats: TokenStats, step: Step, constants: Correction | None) -> dict[str, Bool[Array, "R T"]]:
        """Why the policy loss does not move a token."""
        off_policy, batch, advantages = self.config.off_policy, step.batch, step.batch.advantages
        found: dict[str, Bool[Array, "R T"]] = {}
        if off_policy is not None and constants is not None:
            policies = _policies(stats, batch)
            found = left_out_by(policies, advantages, batch.loss_mask, step.segments, off_policy)
            if off_policy.outside == "zero":
                found["weight outside its bounds"] = constants.weights == 0

        def policy(log_probs: Float[Array, "R T"]) -> tuple[Float[Array, "R T"], Indicators]:
            return self._policy(log_probs, batch, None, step.segments)

        values, pull, indicators = jax.vjp(policy, stats.log_probs, has_aux=True)
        still = pull(step.weights + 0 * values)[0] == 0
        found["advantage 0"] = still & (advantages == 0)
        if (selected := batch.extras.get(SELECTED)) is not None:
            found["selected"] = still & (selected > 0)
        if "clip_fraction_lower" in indicators:
            found["dual clip"] = still & (indicators["clip_fraction_lower"] > 0)
        return found | {"clipped above": still & (advantages > 0), "clipped below": still & (advantages < 0)}

    def terms(self, stats: TokenStats, batch: RolloutBatch, constants: Any, segments: Segments) -> Losses:
        config, entropy_coef = self.config, self.config.entropy_coef
        found = {"policy": self._policy(stats.log_probs, batch, constants, segments)[0]}
        if config.kl is not None and config.penalises_kl:
            found["kl"] = config.kl.coef * reference_kl(config.kl, stats.log_probs, batch, segments)
        if not is_zero(entropy_coef) and stats.entropy is not None:
            found["entropy"] = -(entropy_coef * stats.entropy)
        return found

    def metrics(self, stats: TokenStats, step: Step, constants: Correction | None) -> Terms:
        config, batch, weights, mask = self.config, step.batch, step.weights, step.batch.loss_mask

        def reduced(x: Float[Array, "R T"]) -> Term:
            return (x, mask, "mean") if config.metric_aggregation == "token_mean" else (x, weights, "sum")

        log_probs = stats.log_probs
        policy, indicators = self._policy(log_probs, batch, constants, step.segments)
        kl = None
        if config.kl is not None and batch.ref_log_probs is not None:
            kl = reference_kl(config.kl, log_probs, batch, step.segments)
        old = old_log_probs(log_probs, batch, config)
        ratio = jnp.exp(log_ratio(log_probs, old))
        compared = {"ppo_kl": old - log_probs, "ratio_mean": ratio}
        if batch.rollout_log_probs is not None:  # the sampler's difference from the trainer
            apart = (old if config.ratio_to == "old" else log_probs) - batch.rollout_log_probs
            compared |= {"sampler_log_prob_abs_diff": jnp.abs(apart), "sampler_k3": k3(apart)}
        corrected = {} if constants is None else constants.values
        found = {**indicators, **corrected, "kl": kl, "entropy": stats.entropy, **compared}
        terms: Terms = {name: reduced(x) for name, x in found.items() if x is not None}
        if config.clip_by_sign and "clip_fraction" in indicators:
            for sign, of_sign in (("positive", batch.advantages > 0), ("negative", batch.advantages < 0)):
                clipped = jnp.where(of_sign, indicators["clip_fraction"], 0)
                parts = {"part": reduced(clipped), "whole": reduced(of_sign)}
                terms[f"clip_fraction_{sign}"] = CompositeTerm(parts, share)
        return terms | {
            "pg_loss": (policy, weights, "sum"),
            "ratio_min": (ratio, mask, "min"),
            "ratio_max": (ratio, mask, "max"),
            "effective_sample_size": CompositeTerm(moments(ratio, mask), effective_share),
            **({} if step.capped is None else {"rollout_capped": (step.capped, mask, "sum")}),
        }

    def _policy(
        self, log_probs: Float[Array, "R T"], batch: RolloutBatch, correction: Correction | None, segments: Segments
    ) -> tuple[Float[Array, "R T"], Indicators]:
        """The corrected policy loss of each token, and the indicators of the config's loss."""
        mask, selected = batch.loss_mask, batch.extras.get(SELECTED)
        given = old_log_probs(log_probs, batch, self.config), batch.advantages
        extra = {} if selected is None else {"selected": masked(selected, mask)}
        loss = self.config.loss
        result = loss(log_probs, *given, mask=mask, segments=segments, **extra)
        policy, indicators = checked_result(loss, result, mask.shape)
        return policy if correction is None else policy * correction.weights, indicators


def _policies(stats: TokenStats | None, batch: RolloutBatch) -> dict[str, Float[Array, "R T"] | None]:
    """The log-probs of the policies that a correction may compare."""
    current = None if stats is None else stats.log_probs
    return {"current": current, "old": batch.old_log_probs, "rollout": batch.rollout_log_probs}


def _response_share(batch: RolloutBatch, segments: Segments) -> Float[Array, "R T"]:
    """For each sequence, the positions from its first loss token to its last, divided by its number of loss tokens."""
    mask, positions = batch.loss_mask, batch.positions.astype(jnp.float32)
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
        base = batch.old_log_probs if kl.compares == "current/old" else batch.rollout_log_probs
        weight = ratio_at(kl.importance, log_probs, base, batch.loss_mask, segments)
    return kl_divergence(log_probs, batch.ref_log_probs, kl.estimator, weight)


@dataclasses.dataclass(frozen=True)
class ReferenceKL(TokenLoss[TokenStats]):
    """The KL divergence to the reference as a loss, for tokens that may have no policy loss. Its metric is `kl`.

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
        return {"log_probs": None if stats is None else stats.log_probs, "ref_log_probs": batch.ref_log_probs}

    def terms(self, stats: TokenStats, batch: RolloutBatch, constants: Any, segments: Segments) -> Losses:
        return {"kl": reference_kl(KL(1.0, self.estimator), stats.log_probs, batch, segments)}

    def metrics(self, stats: TokenStats, step: Step, constants: Any) -> Terms:
        return means(self.terms(stats, step.batch, constants, step.segments), step.batch.loss_mask)
