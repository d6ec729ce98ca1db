"""Compares sampler and trainer at each token: by their log-probs, or by the full distributions
of two heads.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal, Unpack

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from jaxppo.base.arrays import check_choice
from jaxppo.base.pytree import register
from jaxppo.head.api import log_probs_from_hidden
from jaxppo.head.arguments import prepare_pair
from jaxppo.head.call import HeadOptions, Inputs
from jaxppo.head.divergence import DivergenceCall
from jaxppo.head.head import Head
from jaxppo.mismatch.heads import F32_UNIT, Comparison, comparison_of_tokens
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call

Rounding = Literal["bfloat16", "float16", "float32"]
_UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": F32_UNIT}


@register()
@dataclasses.dataclass(frozen=True)
class TokenMismatch:
    """Trainer p and sampler q at each token, arrays of one shape; the last six are None where they
    are not known.

    Args:
      log_probs: of the sampled tokens, the trainer's.
      rollout_log_probs: the sampler's.
      entropy: of p, nats.
      kl: KL(q || p) over the whole vocabulary.
      reverse_kl: KL(p || q).
      total_variation: the sum of |p_j - q_j| / 2.
      same_top: 1 where both find the same token likeliest, else 0.
      rounding: the scale s of the difference that rounding alone explains, see `token_mismatch`.

    Example:
      >>> TokenMismatch(jnp.array([-1.0]), jnp.array([-1.5])).kl is None
      True
    """

    log_probs: Float[Array, "..."]
    rollout_log_probs: Float[Array, "..."]
    entropy: Float[Array, "..."] | None = None
    kl: Float[Array, "..."] | None = None
    reverse_kl: Float[Array, "..."] | None = None
    total_variation: Float[Array, "..."] | None = None
    same_top: Float[Array, "..."] | None = None
    rounding: Float[Array, "..."] | None = None


def token_mismatch(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    rollout_hidden: Float[Array, "R T G"],
    rollout_head: Head | Float[Array, "G V"],
    targets: Int[Array, "R T"],
    *,
    rounded_to: Rounding = "bfloat16",
    temperature: float | Array = 1.0,
    where: Bool[Array, "R T"] | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    rollout_hidden_spec: P | None = None,
    **options: Unpack[HeadOptions],
) -> TokenMismatch:
    """Compares the trainer's hidden states and head with the sampler's at the same tokens, without
    logits.

    `rounding` is the scale of the error of d = log p_y - log q_y that rounding in the two heads
    causes: hidden states and kernels are each rounded twice to `rounded_to`, logits are rounded if
    a head rounds them, and sums are in f32 in any order. If these errors are independent and have
    mean 0, to first order in them,

        P(|d| > t rounding) <= 2 exp(-t^2 / 2),   rounding = 2 (1 - min(p_y, q_y)) * (the scale of a logit's error)

    so that a difference beyond 6 times the rounding, which 3 tokens in 10^8 have by chance, has
    another cause: a weight, a temperature, a layer. Rounding errors inside the model, before the
    hidden states, are not included.

    Args:
      hidden: `[R, T, H]`, the trainer's; this and what is not listed here: see
        `log_probs_from_hidden`.
      head: the trainer's.
      rollout_hidden: `[R, T, G]`, the sampler's.
      rollout_head: the sampler's head, with the same number of columns and the same sharding.
      rounded_to: the dtype to which hidden states and kernels are rounded: "bfloat16", "float16" or
        "float32".
      temperature: divides both models' logits; a positive scalar or `[R, T]`.
      rollout_hidden_spec: how the sampler's hidden states are sharded, see
        `HeadOptions.hidden_spec`.

    Returns:
      `TokenMismatch` of `f32[R, T]`. Its log-probs and entropy are those of
      `log_probs_from_hidden`.

    Raises:
      TypeError, ValueError: an argument of the wrong dtype, rank, shape, sharding or range, named.

    Example:
      >>> states = jnp.ones((1, 1, 2)), jnp.zeros((2, 4)), jnp.ones((1, 1, 1)), jnp.array([[0.0, 0.0, -100.0, -100.0]])
      >>> found = token_mismatch(*states, jnp.array([[1]]))
      >>> found.kl.round(4), found.total_variation
      (Array([[0.6931]], dtype=float32), Array([[0.5]], dtype=float32))

    The bound: Higham and Mary 2019, probabilistic rounding error analysis,
    https://doi.org/10.1137/18M1226312
    """
    check_choice("rounded_to", rounded_to, Rounding)
    trainer, sampler = prepare_pair(
        (hidden, head),
        (rollout_hidden, rollout_head),
        names=("trainer", "rollout"),
        second_spec=rollout_hidden_spec,
        parallel=parallel,
        temperature=temperature,
        where=where,
        options=options,
    )

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [trainer.specs, sampler.specs], p.tokens_spec

    call = DivergenceCall(trainer.call, sampler.call, (), 0.5)
    inputs = {"hidden": trainer.inputs, "rollout_hidden": sampler.inputs}
    compared: Comparison = shard_call(
        "token_mismatch", _per_shard, parallel, inputs, specs, (call, _UNITS[rounded_to])
    )
    log_probs_of = partial(
        log_probs_from_hidden,
        targets=targets,
        parallel=parallel,
        temperature=temperature,
        where=where,
    )
    rollout_options: HeadOptions = {**options, "hidden_spec": rollout_hidden_spec}
    stats = log_probs_of(hidden, head, entropy="metric", **options)
    rollout = log_probs_of(rollout_hidden, rollout_head, **rollout_options)
    least = jnp.minimum(stats.log_probs, rollout.log_probs)
    # the f32 sum over the vocabulary is rounded, too, however likely the token
    rounding = -2 * jnp.expm1(least) * compared.logit_error + 16 * F32_UNIT * (1 - least)
    return TokenMismatch(
        log_probs=stats.log_probs,
        rollout_log_probs=rollout.log_probs,
        entropy=stats.entropy,
        kl=compared.forward_kl,
        reverse_kl=compared.reverse_kl,
        total_variation=compared.total_variation,
        same_top=compared.same_top,
        rounding=rounding,
    )


def _per_shard(
    axes: ShardAxes, static: tuple[DivergenceCall, float], trainer: Inputs, rollout: Inputs
) -> Comparison:
    call, unit = static
    return comparison_of_tokens(call, unit, trainer, rollout)
