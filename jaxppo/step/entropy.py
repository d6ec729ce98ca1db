"""The entropy of a step: an adaptive coefficient of its bonus, and metrics of its distribution."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxppo.base.arrays import as_number, check, check_array, check_number, plain_number, sound
from jaxppo.base.metrics import Composite, Metric, Metrics, Terms, reduce_metrics
from jaxppo.base.pytree import register
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import ENTROPIES
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.head import TokenStats
from jaxppo.head.token_arguments import check_stats
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, vary

__all__ = ["AdaptiveEntropy", "EntropyState", "entropy_metrics", "renormalised_entropy"]


@register()
class EntropyState(NamedTuple):
    """The state of `AdaptiveEntropy` between steps, two `f32[]`.

    Args:
      coef: the coefficient, whether or not the next step uses it.
      entropy: the mean entropy of the last step, nats; -inf before the first.
    """

    coef: Float[Array, ""]
    entropy: Float[Array, ""]


@dataclasses.dataclass(frozen=True)
class AdaptiveEntropy:
    """Raises the coefficient c of the entropy bonus while the entropy H is low; no bonus while H is
    above the target.

        after a step:      c <- clip(c + step where H <= target, else c - step, 0, most)
        in the next step:  the bonus has the coefficient c where H <= target, else 0

    Args:
      target: the entropy to keep, nats.
      step: how far the coefficient moves in one step of the optimiser.
      most: the largest coefficient.

    Raises:
      ValueError: a number out of its range, also in its methods.

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
        for name in ("target", "step", "most"):
            check_number(name, getattr(self, name), least=0)

    def init(self, coef: float = 0.0) -> EntropyState:
        """The state before the first step, whose bonus has the coefficient `coef`, 0 to `most`."""
        check_number("coef", coef, least=0, most=self.most)
        return EntropyState(jnp.float32(coef), jnp.float32(-jnp.inf))

    def coef(self, state: EntropyState) -> Float[Array, ""]:
        """The coefficient of the coming step, `f32[]`, for `PolicyLossConfig(entropy_coef=)`
        inside `jit`.
        """
        _check_state(state)
        return jnp.where(state.entropy > self.target, 0 * state.coef, state.coef)

    def update(self, state: EntropyState, entropy: Float[Array, ""] | float) -> EntropyState:
        """The state after a step whose metric `entropy` this is: the mean over its loss tokens,
        nats.

        Where the entropy is a NaN of an array, the state is NaN, and so is the next loss.
        """
        _check_state(state)
        if isinstance(entropy, (np.ndarray, np.floating)) and np.ndim(entropy) == 0:
            entropy = jnp.asarray(entropy)  # a metric, which may be NaN
        number = as_number("entropy", entropy)
        change = jnp.where(number > self.target, -self.step, self.step) + jnp.where(
            jnp.isnan(number), jnp.nan, 0
        )
        coef = jnp.clip(state.coef + change, 0, self.most)
        return EntropyState(coef.astype(jnp.float32), number)


def _check_state(state: Any) -> None:
    if not isinstance(state, EntropyState):
        raise TypeError(
            f"state: got {type(state).__name__}, expected EntropyState, of AdaptiveEntropy.init"
        )


_HIGHEST = 13.0  # nats, above the logarithm of any vocabulary
_BINS = 512  # narrower at low entropies


def entropy_metrics(
    stats: TokenStats,
    batch: RolloutBatch,
    *,
    quantiles: Sequence[float] = (0.5, 0.8, 0.95),
    starts: Sequence[int] = (0, 64, 512, 4096),
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Metrics:
    """The entropy of the loss tokens: its quantiles, and its mean by the place in the response.

    Quantiles are read from a histogram, which adds up over micro-batches and hosts: a quantile H is
    off by at most 0.015 sqrt(H). A token's place is its distance from the first loss token of its
    sequence. Losses do not compute these metrics, since the histogram is a scatter of every token.

    Args:
      stats: `TokenStats` with entropies, `f32[R, T]`.
      batch: `[R, T]`; only its sequences and its loss mask are read.
      quantiles: numbers in [0, 1]; training on the top 20% keeps the tokens above the quantile 0.8.
      starts: the first place of each range of places, from 0, in increasing order.
      parallel: the mesh; rows sharded over data, positions over context.

    Returns:
      The metrics `entropy_p50` and so on, 0 where there is no token, and `entropy_from_0`,
      `entropy_from_64` and so on, the mean up to the next start.

    Raises:
      TypeError, ValueError: stats without entropies or of another shape, quantiles or starts out of
        order or range.

    Example:
      >>> from jaxppo.step.entropy import entropy_metrics
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3, 4], response_start=1)], row_length=4)
      >>> stats = TokenStats(-jnp.ones((1, 4)), jnp.array([[2.0, 1.0, 0.0, 9.0]]))
      >>> found = finalize_metrics(entropy_metrics(stats, batch, quantiles=(0.5,), starts=(0, 2)))
      >>> {name: round(float(x), 2) for name, x in found.items()}
      {'entropy_from_0': 1.5, 'entropy_from_2': 0.0, 'entropy_p50': 1.01}

    Why the tail matters: Wang et al. 2025, https://arxiv.org/abs/2506.01939
    """
    batch = checked(batch, reader="entropy_metrics")
    check_stats(
        stats, batch.loss_mask.shape, "entropy", how="log_probs_from_hidden(..., entropy='metric')"
    )
    for name, numbers in (("quantiles", quantiles), ("starts", starts)):
        if not isinstance(numbers, Sequence) or isinstance(numbers, str):
            raise TypeError(
                f"{name}: got {type(numbers).__name__}, expected a tuple or list of numbers"
            )
    shares = tuple(plain_number("quantiles", quantile, least=0, most=1) for quantile in quantiles)
    places = tuple(plain_number("starts", start) for start in starts)
    in_order = places[:1] == (0,) and all(start < end for start, end in itertools.pairwise(places))
    check("starts", places, in_order, "0 and then larger numbers")

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [p.tokens_spec, batch.specs(p)], P()

    arguments = {"entropy": stats.entropy, "batch": batch}
    return shard_call("entropy_metrics", _per_shard, parallel, arguments, specs, (shares, places))


def renormalised_entropy(log_probs: Float[Array, "*batch K"]) -> Float[Array, "*batch"]:
    """The entropy of a distribution p that is renormalised over K of its tokens: -sum q log q, with
    q = p / sum p.

    For the sampler's nucleus, pass the `id_log_probs` of `ids=nucleus_ids`, which are
    differentiable. For the likeliest tokens, pass `top_log_probs`, which are constants, or, for a
    gradient, the `id_log_probs` of `ids=top_ids`.

    Args:
      log_probs: `[..., K]`, of different tokens; -inf for an empty slot.

    Returns:
      `f32[...]`, nats; 0 where all slots are empty.

    Raises:
      TypeError, ValueError: arrays of another dtype, or without the dimension K.

    Example:
      >>> from jaxppo.step.entropy import renormalised_entropy
      >>> stats = log_probs_from_logits(jnp.array([[[0.0, 2.0, 1.0, 2.0]]]), jnp.zeros((1, 1), int), top_k=2)
      >>> stats.top_ids, renormalised_entropy(stats.top_log_probs).round(4)
      (Array([[[1, 3]]], dtype=int32), Array([[0.6931]], dtype=float32))
    """
    check_array("log_probs", log_probs)
    if not log_probs.ndim or not log_probs.shape[-1]:
        raise ValueError(f"log_probs: got shape {log_probs.shape}, expected [..., K]")
    log_probs = sound("log_probs", log_probs)
    possible = log_probs != -jnp.inf
    some = possible.any(axis=-1, keepdims=True)
    # a placeholder distribution, so that the gradient is 0 if no slot is filled
    possible = possible | ~some
    logits = jnp.where(some, log_probs.astype(jnp.float32), 0)
    log_q = jax.nn.log_softmax(jnp.where(possible, logits, -jnp.inf))
    q_log_q = jnp.exp(log_q) * jnp.where(possible, log_q, 0)
    terms = jnp.where(possible & some, q_log_q, 0)
    return -terms.sum(axis=-1)


def _per_shard(
    axes: ShardAxes,
    static: tuple[tuple[float, ...], tuple[int, ...]],
    entropy: Float[Array, "R T"],
    batch: RolloutBatch,
) -> Metrics:
    quantiles, starts = static
    tokens = LossTokens.of(batch)
    segments = batch.segments(axes)
    mask = tokens.mask
    entropy = lax.stop_gradient(tokens.read(ENTROPIES, entropy))
    positions = batch.positions.astype(jnp.float32)
    first = -segments.max(-positions, mask)
    first = jnp.where(jnp.isfinite(first), first, 0)
    place = positions - segments.spread(first)
    terms: Terms = {}
    for start, end in itertools.pairwise((*starts, np.inf)):
        inside = (place >= start) & (place < end)
        terms[f"entropy_from_{start}"] = (entropy, jnp.where(inside, mask, 0), "mean")
    metrics = reduce_metrics(axes, terms)
    if not quantiles:
        return metrics
    histogram = _histogram(axes, entropy, mask)
    for quantile in quantiles:
        metrics[f"entropy_p{100 * quantile:g}"] = Composite(
            {"counts": histogram}, _Quantile(quantile)
        )
    return metrics


def _histogram(axes: ShardAxes, entropy: Float[Array, "R T"], mask: Float[Array, "R T"]) -> Metric:
    """The number of loss tokens in each bin; NaN in one if an entropy is not finite."""
    bins = jnp.sqrt(jnp.maximum(entropy, 0) / _HIGHEST) * _BINS
    bins = jnp.clip(bins.astype(jnp.int32), 0, _BINS - 1)
    empty = vary(jnp.zeros(_BINS, jnp.float32), axes.tokens)
    own = empty.at[bins].add(jnp.where(jnp.isfinite(entropy), mask, jnp.nan))
    counts = axes.psum(own, axes.tokens)
    return Metric(counts, counts.sum(), "sum")


@dataclasses.dataclass(frozen=True)
class _Quantile:
    """The quantile q of a histogram; equal ones are equal, so that metrics of two steps have the
    same structure.
    """

    q: float

    def __call__(self, counts: Float[Array, " B"]) -> Float[Array, ""]:
        upto = jnp.cumsum(counts)
        wanted = jnp.maximum(self.q * upto[-1], 0.5)  # the smallest where q is 0
        i = jnp.minimum(jnp.searchsorted(upto, wanted), _BINS - 1)
        before = upto[i] - counts[i]
        inside = (wanted - before) / jnp.where(counts[i] == 0, 1, counts[i])
        edges = jnp.stack([i, i + 1]).astype(jnp.float32) / _BINS
        low, high = _HIGHEST * edges**2
        quantile = low + (high - low) * jnp.clip(inside, 0, 1)
        return jnp.where(upto[-1] == 0, 0, quantile) + 0 * upto[-1]
