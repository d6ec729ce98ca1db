"""All ways to compute the same gradients, as functions of the data, to be compiled.

A step takes the arrays of `cases.draw` and returns `(value, (dhidden, dkernel))`. Steps of one
group compute the same:

    entropy        sum(g * log_prob + e * entropy)
    log-probs      the mean log-prob
    values         log-probs and entropies, without gradients
    part           as "entropy", over the share of the tokens that have a loss
    policy loss    PPO's loss with an entropy bonus, over all tokens, and over that share in "policy loss, part"
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from benchmarks.cases import Case
from examples.planner.pod_head import head_of, plain_logits, plain_stats
from jaxppo import (
    PolicyLossConfig,
    TokenStats,
    log_probs_from_hidden,
    policy_loss,
    policy_loss_from_hidden,
)

FLOOR = "three matmuls"
CHUNK = 128  # tokens, as in Tunix
KEEPS = 32 * 2**30  # bytes with which a head keeps its logits

Step = Callable[[Any], Any]
Stats = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]


def _gradients(loss: Callable[[jax.Array, jax.Array, Any], jax.Array]) -> Step:
    return lambda data: jax.value_and_grad(loss, (0, 1))(data["hidden"], data["kernel"], data)


def _weighted(log_probs: jax.Array, entropy: jax.Array | None, data: Any) -> jax.Array:
    if entropy is None:
        return log_probs.mean()
    return (data["g"] * log_probs + data["e"] * entropy).sum()


def _step(stats: Stats) -> Step:
    return _gradients(
        lambda hidden, kernel, data: _weighted(*stats(hidden, kernel, data["targets"]), data)
    )


def three_matmuls(case: Case) -> Step:
    """The three matrix products that every version needs: logits, and the gradients of both
    factors.
    """
    f32 = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    kernel = "vh" if case.sizes.tied else "hv"

    def step(data: Any) -> Any:
        hidden = data["hidden"][0]
        weights = data["kernel"]
        z = f32(f"th,{kernel}->tv", hidden, weights).astype(hidden.dtype)
        return f32(f"tv,{kernel}->th", z, weights), f32(f"th,tv->{kernel}", hidden, z)

    return step


def _pick(x: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.take_along_axis(x, targets[..., None], axis=-1)[..., 0]


def _log_softmax(z: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_p = jax.nn.log_softmax(z)
    return _pick(log_p, targets), -(jnp.exp(log_p) * log_p).sum(-1)


def _log_softmax_softmax(z: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_p = jax.nn.log_softmax(z)
    return _pick(log_p, targets), -(jax.nn.softmax(z) * log_p).sum(-1)


def _log_sum_exp_softmax(z: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_z = jax.nn.logsumexp(z, axis=-1)
    return _pick(z, targets) - log_z, log_z - (jax.nn.softmax(z) * z).sum(-1)


def _entr(z: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_z = jax.nn.logsumexp(z, axis=-1)
    return _pick(z, targets) - log_z, jax.scipy.special.entr(jax.nn.softmax(z)).sum(-1)


PLAIN = {
    "plain: log_softmax, sum of p log p": _log_softmax,
    "plain: log_softmax, softmax times it": _log_softmax_softmax,
    "plain: log-sum-exp, mean logit by exp": plain_stats,
    "plain: log-sum-exp, mean logit by softmax": _log_sum_exp_softmax,
    "plain: log-sum-exp, entr of softmax": _entr,
}
LOG_PROBS_ONLY = {
    "plain: log_softmax": lambda z, y: (_pick(jax.nn.log_softmax(z), y), None),
    "plain: log-sum-exp": lambda z, y: (_pick(z, y) - jax.nn.logsumexp(z, axis=-1), None),
    "optax": lambda z, y: (-optax.softmax_cross_entropy_with_integer_labels(z, y), None),
}


def _from_logits(case: Case, stats: Callable[..., Any]) -> Stats:
    return lambda hidden, kernel, targets: stats(plain_logits(hidden, kernel, case.sizes), targets)


def chunked(case: Case, stats: Callable[..., Any]) -> Stats:
    """Processes chunks of tokens one after the other; the backward computes their logits again."""

    def apply(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> Any:
        size = min(CHUNK, case.tokens)
        count = -(-case.tokens // size)
        extra = count * size - case.tokens

        def split(x: jax.Array) -> jax.Array:
            """The chunks of one row, the last one filled up with zeros."""
            padding = jnp.zeros((extra, *x.shape[2:]), x.dtype)
            padded = jnp.concatenate([x[0], padding])
            return padded.reshape(count, 1, size, *x.shape[2:])

        @jax.checkpoint
        def stats_of_chunk(chunk: tuple[jax.Array, jax.Array]) -> Any:
            logits = plain_logits(chunk[0], kernel, case.sizes)
            return stats(logits, chunk[1])

        out = jax.lax.map(stats_of_chunk, (split(hidden), split(targets)))
        return jax.tree.map(lambda x: x.reshape(1, -1)[:, : case.tokens], out)

    return apply


def ours(
    case: Case, entropy: Literal["none", "metric", "bonus"] = "bonus", where: str | None = None
) -> Step:
    """`log_probs_from_hidden`; `where` names the batch whose loss mask it gets."""

    def loss(hidden: jax.Array, kernel: jax.Array, data: Any) -> jax.Array:
        head = head_of(case.sizes, kernel)
        mask = None if where is None else data[where].loss_mask > 0
        stats = log_probs_from_hidden(hidden, head, data["targets"], entropy=entropy, where=mask)
        return _weighted(stats.log_probs, stats.entropy if entropy == "bonus" else None, data)

    return _gradients(loss)


def values(stats: Stats) -> Step:
    """Log-probs and entropies alone, as of an old or a reference policy."""
    return lambda data: (None, stats(data["hidden"], data["kernel"], data["targets"]))


def our_stats(case: Case) -> Stats:
    def stats(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> Any:
        head = head_of(case.sizes, kernel)
        token_stats = log_probs_from_hidden(hidden, head, targets, entropy="metric")
        return token_stats.log_probs, token_stats.entropy

    return stats


def gathered(case: Case, step: Step) -> Step:
    """The step on the rows with loss, which are gathered first.

    Their number is known beforehand here.
    """

    def apply(data: Any) -> Any:
        rows = jnp.nonzero(data["part"].loss_mask[0], size=case.counted)[0]
        taken = {name: data[name][:, rows] for name in ("hidden", "targets", "g", "e")}
        value, (dhidden, dkernel) = step({**data, **taken})
        no_gradient = jnp.zeros_like(data["hidden"])
        return value, (no_gradient.at[:, rows].set(dhidden), dkernel)

    return apply


def masked(step: Step) -> Step:
    """The step over all tokens, with cotangents of 0 for tokens without loss."""

    def apply(data: Any) -> Any:
        mask = data["part"].loss_mask
        return step({**data, "g": data["g"] * mask, "e": data["e"] * mask})

    return apply


CONFIG = PolicyLossConfig(entropy_coef=0.01)


def plain_policy_loss(case: Case, batch: str = "batch") -> Step:
    """`policy_loss` of the plain log-probs."""
    stats = _from_logits(case, plain_stats)

    def loss(hidden: jax.Array, kernel: jax.Array, data: Any) -> jax.Array:
        token_stats = TokenStats(*stats(hidden, kernel, data["targets"]))
        return policy_loss(token_stats, data[batch], CONFIG)[0]

    return _gradients(loss)


def two_passes(case: Case, batch: str = "batch", memory: int | None = None) -> Step:
    """`policy_loss` of log-probs and entropies from hidden states.

    With so much memory as `KEEPS` logits are kept.
    """

    def loss(hidden: jax.Array, kernel: jax.Array, data: Any) -> jax.Array:
        where = None if batch == "batch" else data[batch].loss_mask > 0
        head = head_of(case.sizes, kernel)
        stats = log_probs_from_hidden(
            hidden, head, data["targets"], entropy="bonus", where=where, memory=memory
        )
        return policy_loss(stats, data[batch], CONFIG)[0]

    return _gradients(loss)


def our_policy_loss(case: Case, batch: str = "batch") -> Step:
    """`policy_loss_from_hidden`: one pass if all tokens fit the memory, which on CPUs they do in
    small heads alone.
    """

    def loss(hidden: jax.Array, kernel: jax.Array, data: Any) -> jax.Array:
        return policy_loss_from_hidden(hidden, head_of(case.sizes, kernel), data[batch], CONFIG)[0]

    return _gradients(loss)


def groups(case: Case) -> dict[str, dict[str, Step]]:
    """All versions by group. The first of each group is what the others are checked against."""
    plain = {name: _step(_from_logits(case, stats)) for name, stats in PLAIN.items()}
    fastest = _step(_from_logits(case, plain_stats))
    full = ours(case)
    return {
        "floor": {FLOOR: three_matmuls(case)},
        "entropy": {
            **plain,
            f"chunks of {CHUNK} tokens": _step(chunked(case, plain_stats)),
            "jaxppo": full,
            "jaxppo, where all": ours(case, where="batch"),
        },
        "log-probs": {
            **{name: _step(_from_logits(case, stats)) for name, stats in LOG_PROBS_ONLY.items()},
            f"chunks of {CHUNK} tokens": _step(chunked(case, LOG_PROBS_ONLY["plain: log-sum-exp"])),
            "jaxppo": ours(case, entropy="none"),
            "jaxppo, entropy a metric": ours(case, entropy="metric"),
        },
        "values": {
            "plain": values(_from_logits(case, plain_stats)),
            "jaxppo": values(our_stats(case)),
        },
        "part": {
            "plain, all tokens": masked(fastest),
            "plain, rows gathered": gathered(case, fastest),
            "jaxppo, where": masked(ours(case, where="part")),
            "jaxppo, rows gathered": gathered(case, full),
        },
        "policy loss": {
            "plain": plain_policy_loss(case),
            "jaxppo, two passes": two_passes(case),
            "jaxppo, kept logits": two_passes(case, memory=KEEPS),
            "jaxppo, one pass": our_policy_loss(case),
        },
        "policy loss, part": {
            "plain, all tokens": plain_policy_loss(case, "part"),
            "jaxppo, two passes": two_passes(case, "part"),
            "jaxppo, kept logits": two_passes(case, "part", KEEPS),
            "jaxppo, one pass": our_policy_loss(case, batch="part"),
        },
    }
