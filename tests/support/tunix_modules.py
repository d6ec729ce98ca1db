"""Modules with the attributes and methods of Tunix's.

Tunix needs a whole training stack, so it is not installed.

They restate the conventions of google-tunix 0.1.7: tunix/models/qwen3/model.py (`Einsum`,
`Embedder`) and tunix/models/gemma/model.py (the embedder without a dtype of its own); and those of
qwix 0.1.8 for adapters beside a parameter: qwix/_src/providers/lora.py (their names,
`alpha / rank`).
"""

import jax.numpy as jnp
from flax import nnx


class Einsum(nnx.Module):
    """An `lm_head`: einsum 'BTD,DV->BTV' over a parameter w."""

    def __init__(self, einsum_str, shape, *, rngs, dtype=jnp.float32):
        self.einsum_str, self.shape, self.dtype = einsum_str, shape, dtype
        self.w = nnx.Param(nnx.initializers.glorot_uniform()(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x.astype(self.dtype), self.w[...].astype(self.dtype))


class GemmaEmbedder(nnx.Module):
    """An embedding that also makes logits."""

    def __init__(self, vocab_size, embed_dim, *, rngs):
        self.input_embedding = nnx.Param(
            nnx.initializers.normal()(rngs.params(), (vocab_size, embed_dim))
        )

    def decode(self, x):
        return jnp.dot(x, self.input_embedding[...].T)


class Embedder(GemmaEmbedder):
    """An embedding that multiplies in its own dtype."""

    def __init__(self, vocab_size, embed_dim, *, rngs, dtype=jnp.float32):
        super().__init__(vocab_size, embed_dim, rngs=rngs)
        self.dtype = dtype

    def decode(self, x):
        return jnp.dot(x.astype(self.dtype), self.input_embedding[...].astype(self.dtype).T)


def adapt(module, name, rank, rngs):
    """Adds Qwix's adapter to the parameter of that name, with values other than the 0 that it
    would begin with.
    """
    first, last = getattr(module, name).shape
    normal = nnx.initializers.normal(0.3)
    setattr(module, f"{name}_lora_a", nnx.LoRAParam(normal(rngs.params(), (first, rank))))
    setattr(module, f"{name}_lora_b", nnx.LoRAParam(normal(rngs.params(), (rank, last))))
    return module


def adapted(module, name, x, scale):
    """The module's result with its adapter, as Qwix computes it."""
    a, b = (getattr(module, f"{name}_lora_{which}")[...] for which in "ab")
    return module(x) + scale * (x @ a @ b)
