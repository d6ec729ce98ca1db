"""A head: hidden states to logits, logits to statistics, and the gradients of both by their
closed forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .samples import Array


@dataclass
class OracleHead:
    """z = softcap(scale * (h @ kernel + bias + lora_scale * (h @ a) @ b)) / temperature.

    Columns from vocab_size on do not exist.
    """

    kernel: Any  # [H, V]
    bias: Any = None  # [V]
    a: Any = None  # [H, rank]
    b: Any = None  # [rank, V]
    lora_scale: float = 1.0
    softcap: float | None = None
    scale: float = 1.0
    vocab_size: int | None = None

    @property
    def columns(self) -> int:
        return np.shape(self.kernel)[1] if self.vocab_size is None else self.vocab_size

    def read_kernel(self) -> Array:
        """The kernel as it is multiplied."""
        return np.asarray(self.kernel, np.float64)

    def read_hidden(self, hidden: Array) -> Array:
        """Hidden states as the kernel multiplies them."""
        return np.asarray(hidden, np.float64)

    def product(self, hidden: Array) -> Array:
        """`[n, vocab_size]`: scale * (h @ kernel + bias + LoRA), before the soft-cap."""
        h = np.asarray(hidden, np.float64)
        v = self.columns
        x = self.read_hidden(hidden) @ self.read_kernel()[:, :v]
        if self.bias is not None:
            x = x + np.asarray(self.bias, np.float64)[:v]
        if self.a is not None:
            x = (
                x
                + self.lora_scale
                * (h @ np.asarray(self.a, np.float64))
                @ np.asarray(self.b, np.float64)[:, :v]
            )
        return self.scale * x


class HeadGradient(NamedTuple):
    """By kernel, bias, a, b; None for what the head lacks, 0 in columns that do not exist."""

    kernel: Array
    bias: Array | None
    a: Array | None
    b: Array | None


class Stats(NamedTuple):
    """One number a token, `[n]`."""

    log_probs: Array
    entropy: Array
    log_z: Array
    mean_logit: Array
    likeliest: Array  # bool: the target is a likeliest token, ties count


def _by_token(temperature: Any) -> Array:
    """A number or `[n]`, to divide `[n, V]`."""
    return np.asarray(temperature, np.float64).reshape(-1, 1)


def logits(hidden: Array, head: OracleHead, temperature: Any = 1.0) -> Array:
    """z, `[n, vocab_size]`; temperature a number or `[n]`."""
    x = head.product(hidden)
    return (x if head.softcap is None else head.softcap * np.tanh(x / head.softcap)) / _by_token(
        temperature
    )


def head_gradient(
    hidden: Array, head: OracleHead, dz: Array, temperature: Any = 1.0
) -> tuple[Array, HeadGradient]:
    """From d / dz to d / d(hidden) and d / d(kernel, bias, a, b)."""
    return through_products(hidden, head, product_gradient(hidden, head, dz, temperature))


def product_gradient(hidden: Array, head: OracleHead, dz: Array, temperature: Any = 1.0) -> Array:
    """From d / dz to d / dx, where scale * x is the product before the soft-cap.

    With e = exp(-2 |scale * x / cap|), dx = scale * dz / temperature * 4 e / (1 + e)^2, which is 1
    - tanh^2 where that difference is all rounding too.
    """
    dx = head.scale * dz / _by_token(temperature)
    if head.softcap is not None:
        e = np.exp(-2 * np.abs(head.product(np.asarray(hidden, np.float64)) / head.softcap))
        dx = dx * 4 * e / (1 + e) ** 2
    return dx


def through_products(hidden: Array, head: OracleHead, dx: Array) -> tuple[Array, HeadGradient]:
    """From d / dx to d / d(hidden) and d / d(kernel, bias, a, b)."""
    h = np.asarray(hidden, np.float64)
    v = head.columns
    kernel = head.read_kernel()
    dh = dx @ kernel[:, :v].T
    d_kernel = np.zeros_like(kernel)
    d_kernel[:, :v] = head.read_hidden(hidden).T @ dx
    d_bias = d_a = d_b = None
    if head.bias is not None:
        d_bias = np.zeros(kernel.shape[1])
        d_bias[:v] = dx.sum(0)
    if head.a is not None:
        a = np.asarray(head.a, np.float64)
        b = np.asarray(head.b, np.float64)
        d_low = head.lora_scale * dx @ b[:, :v].T
        dh = dh + d_low @ a.T
        d_a = h.T @ d_low
        d_b = np.zeros_like(b)
        d_b[:, :v] = head.lora_scale * (h @ a).T @ dx
    return dh, HeadGradient(d_kernel, d_bias, d_a, d_b)


def log_softmax(z: Array) -> Array:
    """log p = (z - max z) - log sum exp(z - max z); -inf where z is."""
    d = z - z.max(-1, keepdims=True)
    return d - np.log(np.exp(d).sum(-1, keepdims=True))


def times_log(p: Array, log_p: Array) -> Array:
    """p log p, 0 where p is 0."""
    return p * np.where(p > 0, log_p, 0.0)


def nucleus_mask(nucleus: Any, targets: Array, columns: int) -> Array:
    """bool `[n, V]` of a nucleus given so, or as ids `[n, K]` padded by -1, and the targets;
    None is everything.
    """
    n = len(targets)
    if nucleus is None:
        return np.ones((n, columns), bool)
    nucleus = np.asarray(nucleus)
    mask = np.zeros((n, columns), bool)
    if nucleus.dtype == bool:
        mask[:] = nucleus[:, :columns]
    else:
        for row, ids in zip(mask, nucleus, strict=True):
            row[[i for i in ids if 0 <= i < columns]] = True
    mask[np.arange(n), targets] = True
    return mask


def token_stats(z: Array, targets: Any, nucleus: Any = None) -> Stats:
    """log p(target), H = -sum p log p, log sum exp z, the mean of the finite z, of logits `[n, V]`.

    With a nucleus the log-prob is renormalised over it and the target; all else is of the full
    distribution.
    """
    z = np.asarray(z, np.float64)
    y = np.asarray(targets, int)
    row = np.arange(len(y))
    finite = z > -np.inf
    log_p = log_softmax(z)
    peak = z.max(-1)
    within = np.where(nucleus_mask(nucleus, y, z.shape[1]), z, -np.inf)
    return Stats(
        log_softmax(within)[row, y],
        -times_log(np.exp(log_p), log_p).sum(-1),
        peak + np.log(np.exp(z - peak[:, None]).sum(-1)),
        np.where(finite, z, 0).sum(-1) / finite.sum(-1),
        z[row, y] == peak,
    )


def id_log_probs(z: Array, ids: Any) -> Array:
    """`[n, K]`: log p of each id over all columns; -inf where an id is -1, nan where another
    does not exist.
    """
    log_p = log_softmax(np.asarray(z, np.float64))
    ids = np.asarray(ids, int)
    found = np.full(ids.shape, np.nan)
    for t, k in np.ndindex(ids.shape):
        if 0 <= ids[t, k] < log_p.shape[1]:
            found[t, k] = log_p[t, ids[t, k]]
        elif ids[t, k] == -1:
            found[t, k] = -np.inf
    return found


def likeliest_ids(z: Array, k: int) -> Array:
    """`[n, k]`: the ids of the k largest of each row, of equal ones the lowest first; -1 behind
    those above -inf.
    """
    found = np.full((len(z), k), -1)
    for t, row in enumerate(np.asarray(z, np.float64)):
        order = sorted((j for j, x in enumerate(row) if x > -np.inf), key=lambda j: (-row[j], j))[
            :k
        ]
        found[t, : len(order)] = order
    return found


def set_entropy(z: Array, ids: Any) -> tuple[Array, Array]:
    """The entropy of each row renormalised over its ids, `[n]`; its gradient -q_j (log q_j + H)
    by `z`. -1 is no id.
    """
    z = np.asarray(z, np.float64)
    found = np.zeros(len(z))
    dz = np.zeros_like(z)
    for t, row in enumerate(np.asarray(ids, int)):
        inside = row[row >= 0]
        if len(inside):
            log_q = log_softmax(z[t, inside])
            q = np.exp(log_q)
            found[t] = -times_log(q, log_q).sum()
            dz[t, inside] = -times_log(q, log_q + found[t])
    return found, dz


def id_gradient(z: Array, ids: Any, by_id: Any) -> Array:
    """d / dz of sum_t sum_k g_tk log p(id_tk): sum_k g_k ([j = id_k] - p_j), ids of -1 left out."""
    p = np.exp(log_softmax(np.asarray(z, np.float64)))
    ids = np.asarray(ids, int)
    dz = np.zeros_like(p)
    for t, k in np.ndindex(ids.shape):
        if ids[t, k] >= 0:
            dz[t] -= by_id[t, k] * p[t]
            dz[t, ids[t, k]] += by_id[t, k]
    return dz


def logit_gradient(
    z: Array,
    targets: Any,
    by_log_prob: Any = 0.0,
    by_entropy: Any = 0.0,
    by_log_z: Any = 0.0,
    by_mean_logit: Any = 0.0,
    nucleus: Any = None,
) -> Array:
    """d / dz of sum_t g log_prob + e H + c log_z + u mean z: g ([j = y] - p'_j) - e p_j (log p_j +
    H) + c p_j + u / n.

    n is the number of finite z; where z is -inf all of it is 0. p' is p renormalised over the
    nucleus. The coefficients are numbers or `[n]`.
    """
    z = np.asarray(z, np.float64)
    y = np.asarray(targets, int)
    g, e, c, u = (
        np.broadcast_to(np.asarray(x, np.float64), len(y))[:, None]
        for x in (by_log_prob, by_entropy, by_log_z, by_mean_logit)
    )
    log_p = log_softmax(z)
    p = np.exp(log_p)
    entropy = -times_log(p, log_p).sum(-1, keepdims=True)
    p_nucleus = np.exp(log_softmax(np.where(nucleus_mask(nucleus, y, z.shape[1]), z, -np.inf)))
    target = np.arange(z.shape[1]) == y[:, None]
    finite = z > -np.inf
    dz = (
        g * (target - p_nucleus)
        - e * (times_log(p, log_p) + p * entropy)
        + c * p
        + u / finite.sum(-1, keepdims=True)
    )
    return np.where(finite, dz, 0)
