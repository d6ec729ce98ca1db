"""Before estimators compare samples: a length penalty, groups without a signal, samples that a
correction rejects.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Num

from jaxppo.advantages.by_group import readable
from jaxppo.advantages.token_statistics import Parallel, on_rows
from jaxppo.base.arrays import (
    as_number,
    check,
    check_array,
    check_flag,
    check_number,
    is_nan,
    is_number,
    needed,
)
from jaxppo.base.ranks import total
from jaxppo.base.stacked import of_rows
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import PER_TOKEN
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.samples import Sample, check_samples
from jaxppo.policy.off_policy import OffPolicyConfig, correction
from jaxppo.policy.unusable import Unusable, UnusableRule, check_rule, not_finite
from jaxppo.sharding import ShardAxes


def overlong_penalty(
    lengths: Num[Array, "*K R S"], *, max_length: float, buffer: float, factor: float = 1.0
) -> Float[Array, "*K R S"]:
    """DAPO's soft punishment of long responses, to be added to rewards: -factor * clip((n - L + b)
    / b, 0, 1).

    Args:
      lengths: numbers `[R, S]`, or `[K, R, S]` for a stacked step: n, the response tokens of each
        sample, 0 where there is no sample; `segment_sum(loss_mask, ...)` computes them.
      max_length: L, the length at which generation ends.
      buffer: b, the number of tokens before L over which the penalty grows; at most L.
      factor: the penalty of a response of the maximal length.

    Returns:
      `f32`, the shape of lengths, at most 0.

    Raises:
      ValueError, TypeError: lengths that are no numbers or of another rank; a number out of its
        range.

    Example:
      >>> overlong_penalty(jnp.array([[8, 12, 14, 16, 20]]), max_length=16, buffer=8)
      Array([[ 0.  , -0.5 , -0.75, -1.  , -1.  ]], dtype=float32)

    Yu et al. 2025, DAPO, https://arxiv.org/abs/2503.14476, equation 13
    """
    check_array("lengths", lengths)
    check("lengths", f"shape {lengths.shape}", lengths.ndim in (2, 3), "[R, S], or [K, R, S]")
    limit = as_number("max_length", max_length, above=0)
    width = as_number("buffer", buffer, above=0)
    if is_number(max_length) and is_number(buffer):
        check("buffer", buffer, buffer <= max_length, f"at most max_length, {max_length}")
    width = jnp.where(width <= limit, width, jnp.nan)
    over = (lengths.astype(jnp.float32) - (limit - width)) / width
    penalty = as_number("factor", factor, least=0) * jnp.clip(over, 0, 1)
    return lax.stop_gradient(0 - penalty)


def drop_equal_groups(
    samples: Sequence[Sample], *, keep_lone: bool = False, tolerance: float = 0.0
) -> list[Sample]:
    """The samples of those groups whose rewards differ in f32: DAPO's dynamic sampling, on the host
    before packing.

    A group of equal rewards has no advantages and no gradient, but counts in every mean over the
    step. The number of samples that are left is not known in advance; the caller has to sample the
    missing ones.

    Args:
      samples: each with its group_id. Those without a reward are not compared, and stay with their
        group.
      keep_lone: keep groups of one rollout with a reward (verl). They have an advantage only with
        `singletons="reward"`.
      tolerance: rewards that differ by at most so much are equal.

    Returns:
      The kept samples, in their order. `RolloutBatch.from_samples` numbers those without a
      sample_id in this order.

    Raises:
      TypeError, ValueError: no sequence of samples, no reward, or a sample without a group_id; a
        negative tolerance.

    Example:
      >>> rewards = [(7, 1.0), (7, 0.0), (8, 1.0), (8, 1.0), (9, 1.0)]
      >>> samples = [Sample([5, 6], response_start=1, group_id=g, reward=r) for g, r in rewards]
      >>> [s.group_id for s in advantages.drop_equal_groups(samples)]
      [7, 7]

    Yu et al. 2025, DAPO, https://arxiv.org/abs/2503.14476, section 3.2
    """
    check_flag("keep_lone", keep_lone)
    check_samples(samples)
    check_number("tolerance", tolerance, least=0)
    check(
        "samples", "no reward", any(s.reward is not None for s in samples), "samples with rewards"
    )
    rewards: dict[int, dict[Hashable, np.float32]] = defaultdict(dict)
    for i, sample in enumerate(samples):
        group_id = needed(f"samples[{i}].group_id", sample.group_id, "one for every sample")
        if sample.reward is None or is_nan(sample.reward):
            continue
        rollout: Hashable = (i,)  # equal to no id
        if sample.rollout_id is not None:
            rollout = int(sample.rollout_id)
        rewards[int(group_id)][rollout] = np.float32(sample.reward)

    def is_kept(rollouts: Mapping[Hashable, np.float32]) -> bool:
        if keep_lone and len(rollouts) == 1:
            return True
        return bool(np.ptp(list(rollouts.values())) > np.float32(tolerance))

    kept = {group_id for group_id, rollouts in rewards.items() if is_kept(rollouts)}
    return [sample for sample in samples if sample.group_id in kept]


def accepted_samples(
    batch: RolloutBatch,
    config: OffPolicyConfig,
    *,
    unusable: UnusableRule = "nan",
    parallel: Parallel = None,
) -> Bool[Array, "*K R S"]:
    """The samples that rejections, veto and bounds of an off-policy correction leave in, before the
    step.

    These are the samples with a loss token whose weight is above 0 in the first update of the step,
    when the current policy is the old one. Give them to an estimator as `among=`, so that samples
    without a gradient are in no baseline.

    Args:
      batch, parallel: see `spread`; the batch's `old_log_probs` and `rollout_log_probs` are read
        too.
      config: the correction. Its `opsm_delta`, which reads advantages, and `batch_normalize` are
        not read.
      unusable: that of the loss, see `PolicyLossConfig`, for log-probs of old policy and sampler.

    Returns:
      `bool[R, S]`; False also where a sample has no loss token. Under `jit`, False for all samples
      in place of the error for data: the loss of such a step is NaN.

    Raises:
      TypeError, ValueError: another config; log-probs that the correction needs are absent, or
        break a rule of a loss.

    Example:
      >>> ids, mask = jnp.array([[1, 1, 2]]), jnp.ones((1, 3))
      >>> old, rollout = -mask, jnp.array([[-1.0, -1.0, -9.0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, mask, ids[:, 1:], old_log_probs=old, rollout_log_probs=rollout)
      >>> accepted_samples(batch, OffPolicyConfig(rejections=(Rejection("seq_min_k1", low=0.01),)))
      Array([[ True, False]], dtype=bool)
    """
    if not isinstance(config, OffPolicyConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected OffPolicyConfig")
    check_rule(unusable)
    config = dataclasses.replace(config, opsm_delta=None, batch_normalize=False)
    static = config, unusable
    accepted = on_rows(
        "accepted_samples", _accepted_samples, parallel, batch, {}, static=static, per_sample=True
    )
    if readable(accepted):
        got = "a loss mask or log-probs that break a rule of a loss"
        check(
            "batch",
            got,
            not np.isnan(accepted).any(),
            "none: batch.validate(vocab_size) names the first entry",
        )
    return accepted > 0


@of_rows
def _accepted_samples(
    axes: ShardAxes, static: tuple[OffPolicyConfig, UnusableRule], batch: RolloutBatch
) -> jax.Array:
    """f32[R, S], 1 for accepted samples; NaN for all of a step whose loss would be NaN."""
    config, rule = static
    segments = batch.segments(axes)
    tokens = LossTokens.of(batch)
    names = set(config.policies)
    if "current" in names:  # it is the old one
        names = names - {"current"} | {"old"}
    log_probs = {name: _log_probs(batch, tokens, name, rule) for name in sorted(names)}
    policies = {
        "current": log_probs.get("old"),
        "old": log_probs.get("old"),
        "rollout": log_probs.get("rollout"),
    }
    unusable = not_finite(batch, [f"{name}_log_probs" for name in sorted(names | {"rollout"})])
    mask = tokens.mask
    if isinstance(rule, Unusable) and rule.denominators == "out":
        mask = jnp.where(unusable, 0, mask)
    weights, _ = correction(policies, jnp.zeros_like(mask), mask, segments, config)
    if isinstance(rule, Unusable) and rule.policy == "weight_0":
        weights = jnp.where(unusable, 0, weights)
    weighted_tokens = segments.sum((weights > 0).astype(jnp.float32))
    accepted = (weighted_tokens > 0).astype(jnp.float32)
    unsound = total(axes, sum(log_probs.values(), tokens.unsound))
    return jnp.where(jnp.isnan(unsound), jnp.nan, accepted)


def _log_probs(
    batch: RolloutBatch, tokens: LossTokens, policy: str, rule: UnusableRule
) -> jax.Array:
    """A policy's log-probs of the loss tokens, NaN where they break a rule, inf where an
    `Unusable` excuses them.
    """
    name = f"{policy}_log_probs"
    kind, _ = PER_TOKEN[name]
    log_probs = needed(f"batch.{name}", getattr(batch, name))
    if not isinstance(rule, Unusable):
        return tokens.read(kind, log_probs)
    finite = jnp.isfinite(log_probs)
    return jnp.where(finite, tokens.read(kind, jnp.where(finite, log_probs, 0)), jnp.inf)
