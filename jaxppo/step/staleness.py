"""Asynchronous training: the staleness of each token, its metrics, and corrections for it.

The staleness of a token is the trainer's `version` minus the version that drew it, of
`policy_versions`, in updates.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import AnyArray, as_number, check, check_alike, check_choice, needed, sound
from jaxppo.base.metrics import Metrics, reduce_metric
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import at_most_zero
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call

__all__ = ["proximal_log_probs", "staleness_metrics", "staleness_weights"]

Level = Literal["token", "sequence"]
Version = int | Int[Array, ""]


def proximal_log_probs(
    log_probs: Float[Array, "R T"],
    rollout_log_probs: Float[Array, "R T"],
    policy_versions: Int[Array, "R T"],
    version: Version,
    proximal_version: Version | None = None,
) -> Float[Array, "R T"]:
    """The proximal policy's log-probs without a forward pass: a linear interpolation of sampler and
    current policy.

        log prox = log b + alpha * (log pi - log b)
        alpha = (proximal_version - policy_version) / (version - policy_version), within [0, 1]; 0 for a fresh token

    As the batch's `old_log_probs`, with
    `PolicyLossConfig(off_policy=OffPolicyConfig(weights="token"))`, it gives the decoupled
    objective, (prox / b) min(r A, clip(r) A) with r = pi / prox: the policy that a step stays near
    is not the one that drew the tokens.

    Args:
      log_probs: `f32[R, T]`, log pi, of the policy that learns.
      rollout_log_probs: `f32[R, T]`, log b, as the sampler reported them.
      policy_versions: `i32[R, T]`, the version that drew each target.
      version: of the policy that learns; may be traced.
      proximal_version: the version of the proximal policy, by default one less.

    Returns:
      `f32[R, T]`, detached, for `old_log_probs`; NaN for a token that a version above `version`
      drew.

    Raises:
      TypeError: log-probs of 16 bits.
      ValueError: arrays of different shapes; a proximal version newer than the version, NaN if one
        is traced.

    Example:
      >>> log_pi, log_b = jnp.array([[-1.0, -1.0, -1.0]]), jnp.array([[-3.0, -3.0, -3.0]])
      >>> proximal_log_probs(log_pi, log_b, jnp.array([[6, 8, 10]]), version=10).tolist()
      [[-1.5, -2.0, -3.0]]

    Hilton et al. 2021, https://arxiv.org/abs/2110.00641; AReaL, https://arxiv.org/abs/2505.24298,
    whose approximation this is: https://inclusionai.github.io/AReaL/algorithms/prox_approx.html
    """
    check_alike(
        {
            "log_probs": log_probs,
            "rollout_log_probs": rollout_log_probs,
            "policy_versions": policy_versions,
        }
    )
    _check_version("version", version)
    proximal = proximal_version
    if proximal is None:
        proximal = version - 1
    _check_version("proximal_version", proximal)
    known = not isinstance(version, jax.core.Tracer) and not isinstance(proximal, jax.core.Tracer)
    check(
        "proximal_version",
        proximal,
        not known or bool(proximal <= version),
        f"at most the version, {version}",
    )
    policy_versions = policy_versions.astype(jnp.int32)
    staleness = version - policy_versions
    share = (proximal - policy_versions) / jnp.where(staleness > 0, staleness, 1)
    alpha = jnp.where(staleness > 0, jnp.clip(share, 0, 1), 0).astype(jnp.float32)
    # no token is drawn by a version to come, and no step stays near one
    alpha = jnp.where((staleness >= 0) & (proximal <= version), alpha, jnp.nan)
    sampled = at_most_zero(sound("rollout_log_probs", rollout_log_probs).astype(jnp.float32))
    current = sound("log_probs", log_probs).astype(jnp.float32)
    return lax.stop_gradient(sampled + alpha * (current - sampled))


def staleness_metrics(
    batch: RolloutBatch, version: Version, *, parallel: ParallelMesh | ShardAxes | None = None
) -> Metrics:
    """Metrics of the staleness of loss tokens.

        staleness, staleness_max, staleness_min = mean, max, min of version - policy_version, over tokens
        version_span = mean of (newest - oldest policy_version), over sequences

    Args:
      batch, version, parallel: see `staleness_weights`.

    Returns:
      Metrics by the names above; NaN where a version above `version` drew a loss token.

    Raises:
      ValueError: no `policy_versions`.

    Example:
      >>> ids, one = jnp.array([[1, 1]]), jnp.array([[0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 2)), one, policy_versions=jnp.array([[7, 8]]))
      >>> found = staleness_metrics(batch, 8)
      >>> float(found["staleness"].value), float(found["version_span"].value)
      (0.5, 1.0)
    """

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [P(), batch.specs(p)], P()

    return shard_call("staleness_metrics", _metrics, parallel, _arguments(batch, version), specs)


def staleness_weights(
    batch: RolloutBatch,
    version: Version,
    *,
    limit: int,
    decay: float = 0.0,
    level: Level = "token",
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Float[Array, "R T"]:
    """1 for tokens of staleness s <= limit, decay^(s - limit) beyond: 0 by default, which drops
    them.

    Multiply `batch.advantages` by them. They then weigh the policy loss of each token and change
    neither penalties nor denominators, as with the weights of `OffPolicyConfig`.

    Args:
      batch: `[R, T]`; needs `policy_versions`.
      version: of the policy that learns; may be traced.
      limit: the largest staleness that keeps weight 1, in updates.
      decay: from 0 to 1.
      level: s of the "token" itself, or of the stalest loss-carrying token of its "sequence".
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      `f32[R, T]`, 1 where the mask is 0; NaN for a token that a version above `version` drew.

    Raises:
      ValueError: no `policy_versions`, a limit below 0, a decay outside [0, 1], an unknown level.

    Example:
      >>> ids, one, versions = jnp.array([[1, 1, 1]]), jnp.array([[0]]), jnp.array([[4, 6, 8]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.ones((1, 3)), one, policy_versions=versions)
      >>> staleness_weights(batch, 8, limit=2).tolist()
      [[0.0, 1.0, 1.0]]
      >>> staleness_weights(batch, 8, limit=2, decay=0.5, level="sequence").tolist()
      [[0.25, 0.25, 0.25]]

    AReaL bounds the staleness of a sample's first token: https://arxiv.org/abs/2505.24298, section
    5.1
    """
    check_choice("level", level, Level)
    numbers = {
        "limit": as_number("limit", limit, least=0),
        "decay": as_number("decay", decay, least=0, most=1),
    }
    arguments = numbers | _arguments(batch, version)

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [P(), P(), P(), batch.specs(p)], p.tokens_spec

    return shard_call("staleness_weights", _weights, parallel, arguments, specs, level)


def _check_version(what: str, version: Any) -> None:
    integer = isinstance(version, (int, np.integer)) and not isinstance(version, bool)
    if isinstance(version, AnyArray):
        integer = version.shape == () and jnp.issubdtype(version.dtype, jnp.integer)
    if not integer:
        raise TypeError(
            f"{what}: got {version!r}, expected an integer, or a scalar array of integers"
        )


def _arguments(batch: RolloutBatch, version: Version) -> dict[str, Any]:
    _check_version("version", version)
    return {"version": jnp.asarray(version, jnp.int32), "batch": checked(batch)}


def _staleness(version: jax.Array, batch: RolloutBatch) -> tuple[jax.Array, jax.Array]:
    """f32[R, T], the staleness of loss tokens, NaN where it is below 0 or the mask breaks a
    rule; and their mask.
    """
    tokens = LossTokens.of(batch)
    expected = "i32[R, T]; give samples policy_versions="
    age = version - needed("batch.policy_versions", batch.policy_versions, expected)
    # no token is drawn by a version to come
    known = jnp.where(age >= 0, age.astype(jnp.float32), jnp.nan)
    return tokens.see(known), tokens.mask


def _metrics(axes: ShardAxes, version: jax.Array, batch: RolloutBatch) -> Metrics:
    age, mask = _staleness(version, batch)
    metrics: Metrics = {
        "staleness": reduce_metric(axes, age, mask),
        "staleness_max": reduce_metric(axes, age, mask, "max"),
        "staleness_min": reduce_metric(axes, age, mask, "min"),
    }
    segments = batch.segments(axes)
    counts = (segments.sum(mask) > 0).astype(jnp.float32)
    largest = segments.max(age, mask)
    smallest = -segments.max(-age, mask)
    span = jnp.where(counts > 0, largest - smallest, 0)
    # per-sequence values are the same on all context shards
    rows = dataclasses.replace(axes, context=(), fsdp=())
    metrics["version_span"] = reduce_metric(rows, span, counts)
    return metrics


def _weights(
    axes: ShardAxes,
    level: Level,
    limit: jax.Array,
    decay: jax.Array,
    version: jax.Array,
    batch: RolloutBatch,
) -> jax.Array:
    age, mask = _staleness(version, batch)
    if level == "sequence":
        segments = batch.segments(axes)
        age = segments.spread(segments.max(age, mask))
    decayed = jnp.power(decay, jnp.maximum(age - limit, 0))
    fresh = jnp.where(age >= 0, 1, jnp.nan)
    weights = jnp.where(age > limit, decayed, fresh)
    weights = jnp.where(jnp.isnan(limit + decay), jnp.nan, weights)
    return jnp.where(mask > 0, weights, 1).astype(jnp.float32)
