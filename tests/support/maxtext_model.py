"""What MaxText's NNX `Transformer` does with the states of its layers.

It restates `apply_output_head` of layers/nnx_decoders.py and `attend_on_embedding` of
layers/embeddings.py (0.2.5).
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
from flax import nnx


class Dense(nnx.Module):
    def __init__(self, dtype):
        self.kernel, self.bias, self.dtype = (
            nnx.Param(jax.random.normal(jax.random.key(0), (8, 32))),
            None,
            dtype,
        )

    def __call__(self, x):
        return jnp.dot(x.astype(self.dtype), self.kernel[...].astype(self.dtype))


class Transformer(nnx.Module):
    """The attributes that apply_output_head reads, and what it computes."""

    def __init__(self, **config):
        defaults = {
            "logits_via_embedding": False,
            "normalize_embedding_logits": False,
            "final_logits_soft_cap": 0.0,
        }
        self.config = SimpleNamespace(**(defaults | config))
        self.decoder = nnx.Module()
        self.decoder.decoder_norm = nnx.RMSNorm(8, rngs=nnx.Rngs(0))
        self.decoder.logits_dense = Dense(jnp.float32)
        self.token_embedder = nnx.Embed(32, 8, rngs=nnx.Rngs(1))

    def logits(self, y):
        y = self.decoder.decoder_norm(y)
        if not self.config.logits_via_embedding:
            return self.decoder.logits_dense(y)
        table = jnp.asarray(self.token_embedder.embedding[...], jnp.bfloat16)
        logits = jnp.dot(y, table.T, preferred_element_type=jnp.float32)
        logits = (
            logits / jnp.sqrt(y.shape[-1]) if self.config.normalize_embedding_logits else logits
        )
        cap = self.config.final_logits_soft_cap
        return jnp.tanh(logits / cap) * cap if cap else logits
