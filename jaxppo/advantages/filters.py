"""Changes of rewards and samples before estimators compare them: a length penalty, groups without a signal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from jaxppo._arrays import check, check_array, check_flag, check_number
from jaxppo.samples import Sample, check_samples


def overlong_penalty(
    lengths: Num[Array, "*K R S"], *, max_length: float, buffer: float, factor: float = 1.0
) -> Float[Array, "*K R S"]:
    """DAPO's soft punishment of long responses, to be added to rewards: -factor * clip((n - L + b) / b, 0, 1).

    It is 0 up to the length L - b, falls along the buffer b, and is -factor from the maximal length L on.

    Args:
      lengths: numbers `[R, S]`, or `[K, R, S]` for a stacked step: n, the response tokens of each sample, 0 where there
        is no sample; `segment_sum(loss_mask, ...)` computes them.
      max_length: L, the length at which generation ends.
      buffer: b, the number of tokens before L over which the penalty grows; at most L.
      factor: the penalty of a response of the maximal length.

    Returns:
      `f32`, the shape of lengths, at most 0.

    Raises:
      ValueError, TypeError: lengths that are no numbers or of another rank; a maximal length, buffer or factor
        out of range.

    Example:
      >>> overlong_penalty(jnp.array([[8, 12, 14, 16, 20]]), max_length=16, buffer=8)
      Array([[ 0.  , -0.5 , -0.75, -1.  , -1.  ]], dtype=float32)

    Yu et al. 2025, DAPO, https://arxiv.org/abs/2503.14476, equation 13
    """
    check_array("lengths", lengths)
    check("lengths", f"shape {lengths.shape}", lengths.ndim in (2, 3), "[R, S], or [K, R, S]")
    check_number("max_length", max_length, above=0)
    check_number("buffer", buffer, above=0, most=max_length)
    check_number("factor", factor, least=0)
    over = (lengths.astype(jnp.float32) - (max_length - buffer)) / buffer
    return lax.stop_gradient(0 - factor * jnp.clip(over, 0, 1))


def drop_equal_groups(samples: Sequence[Sample], *, keep_lone: bool = False) -> list[Sample]:
    """The samples of those groups whose rewards differ: DAPO's dynamic sampling. Runs on the host, before packing.

    A group of equal rewards has no advantages and no gradient, but counts in every mean over the step. The number of
    samples that are left is not known in advance; the caller has to sample the missing ones.

    Args:
      samples: each with its reward and group_id.
      keep_lone: keep groups of one (verl). They have an advantage only with `singletons="reward"`.

    Returns:
      The kept samples, in their order. Samples without a sample_id are numbered by their place in that list, as
      `RolloutBatch.from_samples` does.

    Raises:
      TypeError: `samples` is not a sequence of samples.
      ValueError: no sample, or one without a reward or group_id.

    Example:
      >>> rewards = [(7, 1.0), (7, 0.0), (8, 1.0), (8, 1.0), (9, 1.0)]
      >>> samples = [Sample([5, 6], response_start=1, group_id=g, reward=r) for g, r in rewards]
      >>> [s.group_id for s in advantages.drop_equal_groups(samples)]
      [7, 7]

    Yu et al. 2025, DAPO, https://arxiv.org/abs/2503.14476, section 3.2
    """
    check_flag("keep_lone", keep_lone)
    check_samples(samples)
    rewards: dict[int, list[float]] = defaultdict(list)
    for i, s in enumerate(samples):
        if s.reward is None or s.group_id is None:
            missing = "reward" if s.reward is None else "group_id"
            raise ValueError(f"samples[{i}].{missing}: got None, expected one for every sample")
        rewards[int(s.group_id)].append(float(s.reward))
    kept = {g for g, found in rewards.items() if min(found) != max(found) or (keep_lone and len(found) == 1)}
    return [s for s in samples if s.group_id in kept]
