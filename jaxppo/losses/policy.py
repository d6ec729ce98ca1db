"""`policy_loss`: from log-probs, a batch and a config to a scalar loss and its metrics, on any mesh."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple, Unpack

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxppo._arrays import LOG_PROBS, Aggregation, as_coefficient, masked, needed, times
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig
from jaxppo.head.call import HeadOptions
from jaxppo.head.head import Entropy, Head, TokenStats
from jaxppo.head.prepare import prepare_head
from jaxppo.kl import KL, k3, kl_divergence, log_ratio
from jaxppo.losses.policy_checks import BY_RATIO, check_batch, check_stats
from jaxppo.losses.token_loss import Constants, Step, TokenLoss, loss_of_hidden, loss_of_stats
from jaxppo.metrics import CompositeTerm, Metrics, Term, Terms, effective_share, moments, share
from jaxppo.off_policy import OffPolicyConfig
from jaxppo.off_policy import correction as off_policy_correction
from jaxppo.policy_losses.base import Indicators, ratio_at
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes


def policy_loss(
    stats: TokenStats,
    batch: RolloutBatch,
    config: PolicyLossConfig,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    selected: Float[Array, "R T"] | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The loss of a batch: sum over tokens of weight * (policy loss + kl.coef * KL - entropy_coef * entropy).

    Gradients flow to `stats` only; the batch and the coefficients are constants. Positions with loss mask 0 may hold
    anything, NaN included. A batch that is one of a step's micro-batches needs the step's `normalizer`. Without it the
    loss would be wrong; that is refused if the shapes show it.

    Args:
      stats: `f32[R, T]` log-probs of the targets, and entropies; see `log_probs_from_hidden`.
      batch: `[R, T]`; needs `advantages`, and the log-probs that `config` compares with.
      config: the policy loss, its KL and entropy terms, the off-policy correction and the aggregation.
      parallel: the mesh; rows sharded over data, positions over context. `ShardAxes` inside the caller's own
        `shard_map`, None on one device.
      normalizer: the denominators of the whole step, for a batch that is one of its micro-batches; the batch's own
        by default.
      selected: `f32[R, T]`, the `covariance_mask` of the whole step; for ClipCov and KLCov.

    Returns:
      The scalar f32 loss, and metrics by name, which `finalize_metrics` turns into numbers:

      - sums with the loss's own weights, which add up over micro-batches: `loss`, `pg_loss`;
      - means over loss tokens, or with those weights (`config.metric_aggregation`): `entropy`, `kl` (to the
        reference), `ppo_kl` (old_log_prob - log_prob), `ratio_mean`, `clip_fraction`, `clip_fraction_lower` and others
        of the loss, `tis`, `rejected_fraction` and others of the correction, `sampler_log_prob_abs_diff`, `sampler_k3`;
      - extremes over loss tokens: `ratio_min`, `ratio_max`;
      - with `config.clip_by_sign`, `clip_fraction_positive` and `clip_fraction_negative`, the `clip_fraction`
        over the tokens with an advantage of that sign, if the loss has one;
      - `effective_sample_size`, (sum r)^2 / (N sum r^2), a share of the loss tokens;
      - `impossible_tokens`, with `config.impossible_tokens="leave_out"`, the number of tokens left out;
      - `broken_rules`, 0 for a sound batch. Otherwise the loss is NaN, and `explain_broken_rules` says what is wrong.

    Raises:
      ValueError, TypeError: an array that the config needs and the batch lacks, shapes that differ, a bonus on
        entropies that have no gradient, a normalizer of another aggregation, correction or step, none for a
        micro-batch, rows in another context layout than the mesh's.

    Example:
      >>> sample = Sample([1, 2, 3], response_start=1, advantages=[1.0, 1.0], old_log_probs=[-0.5, -2.0])
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> loss, metrics = policy_loss(TokenStats(jnp.array([[-0.5, -2.0, 0.0]])), batch, PolicyLossConfig())
      >>> float(loss), float(metrics["ratio_max"].value)
      (-1.0, 1.0)
    """
    batch = check_batch(batch, config, selected)
    check_stats(stats, batch, config)
    return loss_of_stats("policy_loss", token_loss_of(config), stats, batch, parallel, normalizer, selected)


def policy_loss_from_hidden(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    batch: RolloutBatch,
    config: PolicyLossConfig,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    selected: Float[Array, "R T"] | None = None,
    temperature: float | Array = 1.0,
    nucleus_ids: Int[Array, "R T K"] | None = None,
    adapter_ids: Int[Array, " R"] | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """The policy loss of a batch from hidden states, whose logits never exist together.

        loss = sum over tokens of weight * (policy loss + kl.coef * KL - entropy_coef * entropy)

    Gradients flow to `hidden` and `head` alone: the batch, the temperature and the coefficients are constants. Only
    tokens with loss mask 1 are computed; the others may hold anything, NaN included.

    If a token's loss depends on its own log-prob and entropy only, one pass over the vocabulary gives loss and
    gradients, with three matrix products. Two passes, with four products, serve other losses, calls for which `memory`
    has no room, and anything in f16 (one pass would round f16 gradients before a loss scale multiplies them). The
    numbers are the same to f32 rounding. `jaxppo.sharding.audit` tells which one a program takes, and why.

    Args:
      hidden: `bf16` or `f32[R, T, H]`, the model's final hidden states; position t predicts `batch.targets[:, t]`.
      head: a `Head`, or a bare kernel `[H, V]`.
      batch: `[R, T]`; needs `advantages`, and the log-probs that `config` compares with.
      config: the policy loss, its KL and entropy terms, the off-policy correction and the aggregation.
      parallel: the mesh; rows sharded over data, positions over context, the vocabulary over tensor. `ShardAxes` inside
        the caller's own `shard_map`, None on one device.
      normalizer: the denominators of the whole step, for a batch that is one of its micro-batches; the batch's own
        by default.
      selected: `f32[R, T]`, the `covariance_mask` of the whole step; for ClipCov and KLCov.
      temperature: divides the logits, as the sampler's did; a number, a traced scalar or `f32[R, T]`.
      nucleus_ids: `i32[R, T, K]`, -1 padded, the ids that top-p or top-k left to the sampler; log-probs are
        renormalised over them. See `pack_nucleus_ids`.
      adapter_ids: `i32[R]`, which of several adapters of the head each row has, -1 for none; see `LoRA`. A row whose id
        belongs to no adapter gives NaN.
      **options: how the head works, see `HeadOptions`: `memory`, `precision`, `follow_mask` and others.

    Returns:
      The scalar f32 loss, and the metrics of `policy_loss` by name, which `finalize_metrics` turns into numbers.

    Raises:
      TypeError, ValueError: an array that the config needs and the batch lacks, shapes or dtypes that differ, a
        normalizer of another aggregation or none for a micro-batch, rows in another context layout than the mesh's, a
        head that cannot be read.

    Example:
      >>> sample = Sample([1, 2, 3], response_start=1, advantages=[1.0, 1.0], old_log_probs=[-np.log(4)] * 2)
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> loss, _ = policy_loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch, PolicyLossConfig())
      >>> float(loss)
      -1.0
    """
    batch = check_batch(batch, config, selected)
    loss = token_loss_of(config)
    prepared = prepare_head(
        hidden,
        head,
        batch.targets,
        parallel=parallel,
        temperature=temperature,
        entropy=loss.entropy,
        nucleus_ids=nucleus_ids,
        adapter_ids=adapter_ids,
        where=batch.loss_mask > 0,
        options=options,
    )
    return loss_of_hidden("policy_loss_from_hidden", loss, prepared, batch, parallel, normalizer, selected)


def old_log_probs(log_probs: Float[Array, "R T"], batch: RolloutBatch, config: PolicyLossConfig) -> Float[Array, "R T"]:
    """The log-probs in the denominator of the config's ratio; a constant of differentiation."""
    name = BY_RATIO.get(config.ratio_to)
    return lax.stop_gradient(log_probs if name is None else getattr(batch, name))


def advantages_of(batch: RolloutBatch) -> Float[Array, "R T"]:
    """The advantages in f32, 0 where the mask is 0."""
    return masked(needed("batch.advantages", batch.advantages), batch.loss_mask)


def impossible_tokens(
    log_probs: Float[Array, "R T"] | None, batch: RolloutBatch, config: PolicyLossConfig
) -> Bool[Array, "R T"] | None:
    """The loss tokens with log-prob -inf under a policy that the config compares; None unless it leaves them out."""
    if config.impossible_tokens == "nan":
        return None
    old = batch.old_log_probs if "old" in config.policies else None
    given = [x for x in (log_probs, old, batch.rollout_log_probs) if x is not None]
    found = [(batch.loss_mask > 0) & jnp.isneginf(x) for x in given]
    return functools.reduce(jnp.logical_or, found, jnp.zeros(batch.loss_mask.shape, bool))


def token_loss_of(config: PolicyLossConfig) -> PolicyTokenLoss:
    """The config's loss, with its coefficients in the form that traced code takes."""
    kl = config.kl and dataclasses.replace(config.kl, coef=as_coefficient(config.kl.coef))
    return PolicyTokenLoss(dataclasses.replace(config, kl=kl, entropy_coef=as_coefficient(config.entropy_coef)))


class Correction(NamedTuple):
    """The off-policy correction of each token."""

    weights: Float[Array, "R T"]
    """Factors of the policy loss, 0 for the tokens that the correction leaves out."""
    values: Indicators


@dataclasses.dataclass(frozen=True)
class PolicyTokenLoss(TokenLoss):
    """The policy loss of a token, with its penalties."""

    config: PolicyLossConfig

    @property
    def aggregation(self) -> Aggregation:  # type: ignore[override]
        return self.config.aggregation

    @property
    def aggregation_norm(self) -> float | None:  # type: ignore[override]
        return self.config.aggregation_norm

    @property
    def entropy(self) -> Entropy:
        return self.config.entropy_mode

    @property
    def off_policy(self) -> OffPolicyConfig | None:
        return self.config.off_policy

    @property
    def token_local(self) -> bool:
        off = self.config.off_policy
        given = off is None or "current" not in off.policies  # known before the log-probs
        if off is not None and self.config.impossible_tokens == "leave_out":
            given = given and off.token_local  # a token that is left out changes sequence statistics
        of_sequences = self.config.kl is not None and self.config.kl.importance == "sequence"
        return self.config.loss.token_local and given and not of_sequences

    def left_out(self, stats: TokenStats | None, batch: RolloutBatch) -> Bool[Array, "R T"] | None:
        return impossible_tokens(None if stats is None else stats.log_probs, batch, self.config)

    def ruled(self, stats: TokenStats | None, batch: RolloutBatch) -> Mapping[str, Array | None]:
        given: dict[str, Array | None] = {
            "log_probs": None if stats is None else stats.log_probs,
            "advantages": batch.advantages,
            "rollout_log_probs": batch.rollout_log_probs,
        }
        if "old" in self.config.policies:
            given["old_log_probs"] = batch.old_log_probs
        if self.config.kl is not None:
            given["ref_log_probs"] = batch.ref_log_probs
        left_out = self.left_out(stats, batch)
        if left_out is None:
            return given
        of_policies = {name: given.get(name) for name in ("log_probs", *LOG_PROBS)}
        return given | {name: jnp.where(left_out, 0, x) for name, x in of_policies.items() if x is not None}

    def constants(self, stats: TokenStats | None, step: Step) -> Correction | None:
        """The off-policy correction, None without one."""
        off_policy, batch, segments = self.config.off_policy, step.batch, step.segments
        if off_policy is None:
            return None
        current = None if stats is None else stats.log_probs
        weights, values = off_policy_correction(
            {"current": current, "old": batch.old_log_probs, "rollout": batch.rollout_log_probs},
            advantages_of(batch),
            batch.loss_mask,
            segments,
            off_policy,
            step.normalizer.weight_mean,
        )
        if off_policy.opsm_fraction == "response" and "opsm_clipfrac" in values:
            values = values | {"opsm_clipfrac": values["opsm_clipfrac"] * _response_share(batch, segments)}
        return Correction(weights, values)

    def per_token(
        self, stats: TokenStats, batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> Float[Array, "R T"]:
        config, mask = self.config, batch.loss_mask
        log_probs = masked(stats.log_probs, mask)
        policy, _ = self._policy(log_probs, batch, constants, segments)
        kl = reference_kl(config.kl, log_probs, batch, segments)
        kl_coef = 0.0 if config.kl is None else config.kl.coef
        entropy = None if stats.entropy is None else masked(stats.entropy, mask)
        return masked(policy + times(kl_coef, kl) - times(config.entropy_coef, entropy), mask)

    def terms(self, stats: TokenStats, step: Step, constants: Constants) -> Terms:
        config, batch, weights, mask = self.config, step.batch, step.weights, step.batch.loss_mask

        def reduced(x: Float[Array, "R T"]) -> Term:
            return (x, mask, "mean") if config.metric_aggregation == "token_mean" else (x, weights, "sum")

        log_probs = masked(stats.log_probs, mask)
        policy, indicators = self._policy(log_probs, batch, constants, step.segments)
        correction: Correction | None = constants[0]
        kl = reference_kl(config.kl, log_probs, batch, step.segments)
        compared = self._comparisons(log_probs, batch)
        corrected = {} if correction is None else correction.values
        found = {**indicators, **corrected, "kl": kl, "entropy": stats.entropy, **compared}
        terms: Terms = {name: reduced(x) for name, x in found.items() if x is not None}
        if config.clip_by_sign and "clip_fraction" in indicators:
            advantages = advantages_of(batch)
            for sign, of_sign in (("positive", advantages > 0), ("negative", advantages < 0)):
                clipped = jnp.where(of_sign, indicators["clip_fraction"], 0)
                parts = {"part": reduced(clipped), "whole": reduced(of_sign)}
                terms[f"clip_fraction_{sign}"] = CompositeTerm(parts, share)
        ratio = compared["ratio_mean"]
        return terms | {
            "pg_loss": (policy, weights, "sum"),
            "ratio_min": (ratio, mask, "min"),
            "ratio_max": (ratio, mask, "max"),
            "effective_sample_size": CompositeTerm(moments(ratio, mask), effective_share),
        }

    def _policy(
        self, log_probs: Float[Array, "R T"], batch: RolloutBatch, constants: Constants, segments: Segments
    ) -> tuple[Float[Array, "R T"], Indicators]:
        """The corrected policy loss of each token, and the indicators of the config's loss."""
        correction, selected = constants
        mask = batch.loss_mask
        given = self._old(log_probs, batch), advantages_of(batch)
        extra = {} if selected is None else {"selected": masked(selected, mask)}
        policy, indicators = self.config.loss(log_probs, *given, mask=mask, segments=segments, **extra)
        return policy if correction is None else policy * correction.weights, indicators

    def _old(self, log_probs: Float[Array, "R T"], batch: RolloutBatch) -> Float[Array, "R T"]:
        """The log-probs in the denominator of the ratio, 0 where the mask is 0."""
        return masked(old_log_probs(log_probs, batch, self.config), batch.loss_mask)

    def _comparisons(self, log_probs: Float[Array, "R T"], batch: RolloutBatch) -> dict[str, Float[Array, "R T"]]:
        """The values of metrics that compare policies: the ratio, and the sampler's difference from the trainer."""
        old = self._old(log_probs, batch)
        values = {"ppo_kl": old - log_probs, "ratio_mean": jnp.exp(log_ratio(log_probs, old))}
        if batch.rollout_log_probs is None:
            return values
        trainer = old if self.config.ratio_to == "old" else log_probs
        apart = trainer - masked(batch.rollout_log_probs, batch.loss_mask)
        return values | {"sampler_log_prob_abs_diff": jnp.abs(apart), "sampler_k3": k3(apart)}


def reference_kl(
    kl: KL | None, log_probs: Float[Array, "R T"], batch: RolloutBatch, segments: Segments
) -> Float[Array, "R T"] | None:
    """The KL divergence to the reference at each token; None without a config or a reference."""
    if kl is None or batch.ref_log_probs is None:
        return None
    weight, mask = None, batch.loss_mask
    if kl.importance == "score":
        weight = jnp.exp(log_probs - lax.stop_gradient(log_probs))
    elif kl.importance != "none":
        name = "old_log_probs" if kl.compares == "current/old" else "rollout_log_probs"
        base = masked(needed(f"batch.{name}", getattr(batch, name)), mask)
        weight = ratio_at(kl.importance, log_probs, base, mask, segments)
    return kl_divergence(log_probs, masked(batch.ref_log_probs, mask), kl.estimator, weight)


def _response_share(batch: RolloutBatch, segments: Segments) -> Float[Array, "R T"]:
    """For each sequence, the positions from its first loss token to its last, divided by its number of loss tokens."""
    mask, positions = batch.loss_mask, batch.positions.astype(jnp.float32)
    span = segments.max(positions, mask) + segments.max(-positions, mask) + 1
    count = segments.sum((mask > 0).astype(jnp.float32))
    return segments.spread(jnp.where(count > 0, span / jnp.maximum(count, 1), 0))
