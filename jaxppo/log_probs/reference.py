"""The shortest obviously right log-probs and entropy: one device, f32, every array written out, JAX's own gradients."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxppo.log_probs.stats import TokenStats


def reference_from_logits(
    logits: Any, targets: Any, *, temperature=1.0, entropy="none", keep_mask=None, where=None, vocab_size=None
) -> TokenStats:
    """`log_probs_from_logits`, in the arithmetic of its arguments' dtype but at least f32."""
    z = logits[..., :vocab_size].astype(jnp.promote_types(logits.dtype, jnp.float32)) / temperature
    z = z if where is None else jnp.where(where[..., None], z, 0)
    y = targets if where is None else jnp.where(where, targets, 0)
    is_target = y[..., None] == jnp.arange(z.shape[-1])
    kept = z if keep_mask is None else jnp.where(keep_mask[..., :vocab_size] | is_target, z, -jnp.inf)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(kept), y[..., None], axis=-1)[..., 0]
    log_probs = jnp.where((y >= 0) & (y < z.shape[-1]), log_probs, jnp.nan)
    log_p = jax.nn.log_softmax(z)
    plogp = jnp.where(jnp.exp(log_p) > 0, jnp.exp(log_p) * jnp.where(jnp.exp(log_p) > 0, log_p, 0), 0)
    h = -plogp.sum(-1)
    if where is not None:
        log_probs, h = jnp.where(where, log_probs, 0), jnp.where(where, h, 0)
    return TokenStats(log_probs, {"none": None, "metric": jax.lax.stop_gradient(h), "bonus": h}[entropy])


def reference_from_hidden(
    hidden: Any,
    kernel: Any,
    targets: Any,
    *,
    kernel_layout="hv",
    bias=None,
    logit_softcap=None,
    keep_ids=None,
    **options,
) -> TokenStats:
    """`log_probs_from_hidden` through logits; `options` are those of `reference_from_logits`."""
    dtype = jnp.promote_types(hidden.dtype, jnp.float32)
    where = options.get("where")
    hidden = hidden if where is None else jnp.where(where[..., None], hidden, 0)
    kernel = kernel if kernel_layout == "hv" else kernel.T
    logits = jnp.matmul(hidden.astype(dtype), kernel.astype(dtype), precision="highest")
    logits = logits if bias is None else logits + bias.astype(dtype)
    logits = logits if logit_softcap is None else logit_softcap * jnp.tanh(logits / logit_softcap)
    if keep_ids is not None:
        options["keep_mask"] = (keep_ids[..., None] == jnp.arange(logits.shape[-1])).any(-2)
    return reference_from_logits(logits, targets, **options)
