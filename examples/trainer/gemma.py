"""Gemma 3 that reads text, in Flax NNX (https://arxiv.org/abs/2503.19786).

It differs from the Llama kind in this: embeddings are multiplied by sqrt(H), each layer has four
norms, norms scale by 1 + w, queries and keys have norms too, the gate of the MLP is a GELU, and
five of six layers are local. A local layer sees a window of tokens, and turns queries and keys at
rates of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from examples.trainer import chunks
from examples.trainer.attention import Attend
from examples.trainer.gemma_config import GemmaConfig
from examples.trainer.llama import Projection, kernel_init, rotary_angles, rotate
from jaxppo import ParallelMesh


class Norm(nnx.Module):
    """x / rms(x) * (1 + scale), in float32, and then in the dtype of x."""

    def __init__(self, features: int, epsilon: float):
        self.scale = nnx.Param(jnp.zeros(features, jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... H"]:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        scale = jnp.broadcast_to(1 + self.scale[...], x.shape)
        return (wide * inverse * scale).astype(x.dtype)


class SelfAttention(nnx.Module):
    def __init__(
        self, config: GemmaConfig, window: int | None, parallel: ParallelMesh, rngs: nnx.Rngs
    ):
        queries = config.heads * config.head_dim
        keys = config.kv_heads * config.head_dim
        given = (False, config, parallel, rngs)
        self.head_dim = config.head_dim
        self.scale = config.query_scale
        self.window = window
        self.q_proj = Projection((config.width, queries), True, *given)
        self.k_proj = Projection((config.width, keys), True, *given)
        self.v_proj = Projection((config.width, keys), True, *given)
        self.o_proj = Projection((queries, config.width), False, *given)
        self.q_norm = Norm(config.head_dim, config.norm_eps)
        self.k_norm = Norm(config.head_dim, config.norm_eps)

    def project(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values."""
        q, k, v = (
            y.reshape(*y.shape[:2], -1, self.head_dim)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        return rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles), v

    def output(self, mixed: jax.Array) -> jax.Array:
        return self.o_proj(mixed.reshape(*mixed.shape[:2], -1))


class MLP(nnx.Module):
    def __init__(self, config: GemmaConfig, parallel: ParallelMesh, rngs: nnx.Rngs):
        given = (False, config, parallel, rngs)
        self.gate_proj = Projection((config.width, config.mlp_width), True, *given)
        self.up_proj = Projection((config.width, config.mlp_width), True, *given)
        self.down_proj = Projection((config.mlp_width, config.width), False, *given)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.gelu(self.gate_proj(x), approximate=True) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(
        self, config: GemmaConfig, window: int | None, parallel: ParallelMesh, rngs: nnx.Rngs
    ):
        def norm() -> Norm:
            return Norm(config.width, config.norm_eps)

        self.input_layernorm = norm()
        self.self_attn = SelfAttention(config, window, parallel, rngs)
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.mlp = MLP(config, parallel, rngs)
        self.post_feedforward_layernorm = norm()
        self.chunked = chunks.mesh_of(config.slots, parallel)

    def __call__(self, x: jax.Array, angles: jax.Array, attend: Attend) -> jax.Array:
        q, k, v = chunks.apply(Layer.before, self, self.chunked, x, angles)
        mixed = attend(q, k, v, window=self.self_attn.window, scale=self.self_attn.scale)
        return chunks.apply(Layer.after, self, self.chunked, x, mixed)

    def before(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values."""
        return self.self_attn.project(self.input_layernorm(x), angles)

    def after(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """What follows attention."""
        y = self.self_attn.output(mixed)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y)


class Gemma(nnx.Module):
    """Tokens to final hidden states. Attributes have the names of the published tensors."""

    def __init__(self, config: GemmaConfig, parallel: ParallelMesh, rngs: nnx.Rngs):
        self.config = config
        init = kernel_init(parallel.kernel_spec("vh"), parallel)
        self.embed_tokens = nnx.Embed(
            config.padded_vocab, config.width, embedding_init=init, dtype=config.dtype, rngs=rngs
        )
        windows = [config.window if config.is_local(i) else None for i in range(config.layers)]
        self.layers = nnx.List([Layer(config, window, parallel, rngs) for window in windows])
        self.norm = Norm(config.width, config.norm_eps)
        self.chunked = chunks.mesh_of(config.slots, parallel)

    @property
    def head(self) -> nnx.Embed:
        """The head that turns hidden states into logits: the embeddings, as they are stored."""
        return self.embed_tokens

    def embed(self, tokens: Int[Array, "R T"]) -> Float[Array, "R T H"]:
        """Embeddings times sqrt(H), both in the dtype of the model: sqrt(640) is 25.25 in
        bfloat16.
        """
        embedding = jnp.take(self.embed_tokens.embedding[...], tokens, axis=0).astype(
            self.config.dtype
        )
        return embedding * jnp.asarray(self.config.width**0.5, self.config.dtype)

    def __call__(
        self,
        tokens: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        attend: Attend | Sequence[Attend],
    ) -> Float[Array, "R T H"]:
        """Final hidden states.

        `attend` is one function, or one for each layer (each with its own cache).

        With one function, as in a loss, the backward computes each layer's activations again.
        """
        config = self.config
        x = self.embed(tokens)
        of_local = rotary_angles(positions, config.head_dim, config.local_rope)
        of_global = rotary_angles(positions, config.head_dim, config.global_rope)
        for i, layer in enumerate(self.layers):
            angles = of_local if config.is_local(i) else of_global
            if callable(attend):
                x = jax.checkpoint(layer, static_argnums=2)(x, angles, attend)
            else:
                x = layer(x, angles, attend[i])
        return chunks.apply(Norm.__call__, self.norm, self.chunked, x)

    def logits(self, hidden: Float[Array, "... H"]) -> Float[Array, "... V"]:
        """The sampler's logits, in float32."""
        kernel = self.embed_tokens.embedding[...].T
        return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)
