"""Dense models of the Llama kind in Flax NNX: Llama, Qwen 2 and Qwen 3.

RMSNorm before attention and before a SwiGLU MLP, grouped-query attention, rotary positions
(https://arxiv.org/abs/2302.13971). Qwen 2 has biases at queries, keys and values
(https://arxiv.org/abs/2407.10671), Qwen 3 norms of queries and keys
(https://arxiv.org/abs/2505.09388), Llama 3 slower rotations at long wavelengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from examples.trainer import chunks
from examples.trainer.attention import Attend
from examples.trainer.llama_config import LlamaConfig, Rope, Sizes
from jaxppo import ParallelMesh


def kernel_init(spec: P, parallel: ParallelMesh) -> nnx.Initializer:
    """Random kernels, placed on the mesh."""
    return nnx.with_partitioning(nnx.initializers.normal(0.02), tuple(spec), mesh=parallel.mesh)


class Projection(nnx.Module):
    """A product with a kernel that is sharded over `fsdp`, and is gathered in the dtype of the
    product.

    Args:
      shape: of the kernel.
      columns: its columns are sharded over the tensor axis; else its rows.
      bias: whether a bias is added.
      config: its dtype is that of the product.
      parallel: the mesh.
      rngs: of random parameters.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        columns: bool,
        bias: bool,
        config: Sizes,
        parallel: ParallelMesh,
        rngs: nnx.Rngs,
    ):
        tensor = parallel.logits_spec[2]
        self.dtype = config.dtype
        self.spec = parallel.kernel_spec("hv" if columns else "vh")
        self.gathered = P(None, tensor) if columns else P(tensor, None)
        self.gathered_sharding = None
        if config.slots is None:
            self.gathered_sharding = parallel.sharding(self.gathered)
        self.kernel = nnx.Param(kernel_init(self.spec, parallel)(rngs.params(), shape, jnp.float32))
        self.adapter = nnx.data(None)  # see lora.py
        self.bias = nnx.data(None)
        if bias:
            along = (tensor,) if columns else (None,)
            zeros = nnx.with_partitioning(nnx.initializers.zeros, along, mesh=parallel.mesh)
            self.bias = nnx.Param(zeros(rngs.params(), shape[1:], jnp.float32))

    def __call__(self, x: Float[Array, "R T I"]) -> Float[Array, "R T O"]:
        y = x @ in_sharding(self.kernel[...].astype(self.dtype), self.gathered_sharding)
        if self.bias is not None:
            y = y + self.bias[...].astype(self.dtype)[None, None]
        if self.adapter is not None:
            y = y + self.adapter(x)
        return y


def in_sharding(x: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """x sharded in this way; as it is for None, where each device holds all of it."""
    if sharding is None:
        return x
    return jax.lax.with_sharding_constraint(x, sharding)


class SelfAttention(nnx.Module):
    def __init__(self, config: LlamaConfig, parallel: ParallelMesh, rngs: nnx.Rngs):
        width = config.width
        head_dim = config.head_dim
        self.head_dim = head_dim
        queries = config.heads * head_dim
        keys = config.kv_heads * head_dim
        given = (config, parallel, rngs)
        self.q_proj = Projection((width, queries), True, config.qkv_bias, *given)
        self.k_proj = Projection((width, keys), True, config.qkv_bias, *given)
        self.v_proj = Projection((width, keys), True, config.qkv_bias, *given)
        self.o_proj = Projection((queries, width), False, config.out_bias, *given)
        self.q_norm = self.k_norm = nnx.data(None)
        if config.normed:
            self.q_norm = _norm(config, head_dim, rngs)
            self.k_norm = _norm(config, head_dim, rngs)

    def project(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values."""
        q, k, v = (
            y.reshape(*y.shape[:2], -1, self.head_dim)
            for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        )
        if self.q_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        return rotate(q, angles), rotate(k, angles), v

    def output(self, mixed: jax.Array) -> jax.Array:
        return self.o_proj(mixed.reshape(*mixed.shape[:2], -1))


class MLP(nnx.Module):
    def __init__(self, config: LlamaConfig, parallel: ParallelMesh, rngs: nnx.Rngs):
        given = (config.mlp_bias, config, parallel, rngs)
        self.gate_proj = Projection((config.width, config.mlp_width), True, *given)
        self.up_proj = Projection((config.width, config.mlp_width), True, *given)
        self.down_proj = Projection((config.mlp_width, config.width), False, *given)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: LlamaConfig, parallel: ParallelMesh, rngs: nnx.Rngs):
        self.input_layernorm = _norm(config, config.width, rngs)
        self.self_attn = SelfAttention(config, parallel, rngs)
        self.post_attention_layernorm = _norm(config, config.width, rngs)
        self.mlp = MLP(config, parallel, rngs)
        self.chunked = chunks.mesh_of(config.slots, parallel)

    def __call__(self, x: jax.Array, angles: jax.Array, attend: Attend) -> jax.Array:
        q, k, v = chunks.apply(Layer.before, self, self.chunked, x, angles)
        return chunks.apply(Layer.after, self, self.chunked, x, attend(q, k, v))

    def before(self, x: jax.Array, angles: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values."""
        return self.self_attn.project(self.input_layernorm(x), angles)

    def after(self, x: jax.Array, mixed: jax.Array) -> jax.Array:
        """What follows attention."""
        x = x + self.self_attn.output(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """Tokens to final hidden states. Attributes have the names of the published tensors."""

    def __init__(self, config: LlamaConfig, parallel: ParallelMesh, rngs: nnx.Rngs):
        self.config = config
        head: dict[str, Any] = {"dtype": config.dtype, "rngs": rngs}
        embedding = kernel_init(parallel.kernel_spec("vh"), parallel)
        self.embed_tokens = nnx.Embed(
            config.padded_vocab, config.width, embedding_init=embedding, **head
        )
        self.layers = nnx.List([Layer(config, parallel, rngs) for _ in range(config.layers)])
        self.norm = _norm(config, config.width, rngs)
        self.chunked = chunks.mesh_of(config.slots, parallel)
        self.lm_head = nnx.data(None)
        if not config.tied:
            kernel = kernel_init(parallel.kernel_spec("hv"), parallel)
            self.lm_head = nnx.Linear(
                config.width, config.padded_vocab, use_bias=False, kernel_init=kernel, **head
            )

    @property
    def head(self) -> nnx.Linear | nnx.Embed:
        """The head that turns hidden states into logits."""
        if self.lm_head is None:
            return self.embed_tokens
        return self.lm_head

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
        x = jnp.take(self.embed_tokens.embedding[...], tokens, axis=0).astype(self.config.dtype)
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope)
        for i, layer in enumerate(self.layers):
            if callable(attend):
                x = jax.checkpoint(layer, static_argnums=2)(x, angles, attend)
            else:
                x = layer(x, angles, attend[i])
        return chunks.apply(nnx.RMSNorm.__call__, self.norm, self.chunked, x)

    def logits(self, hidden: Float[Array, "... H"]) -> Float[Array, "... V"]:
        """The sampler's logits, in float32."""
        head = self.head
        if isinstance(head, nnx.Embed):
            kernel = head.embedding[...].T
        else:
            kernel = head.kernel[...]
        return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _norm(config: LlamaConfig, features: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(features, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs)


def rotary_angles(
    positions: Int[Array, "R T"], head_dim: int, rope: Rope
) -> Float[Array, "R T 1 D/2"]:
    """position * rate_i, for every head the same, where rate_i = theta^(-2i/D)
    (https://arxiv.org/abs/2104.09864).

    Rates are constants, the same in every program.
    """
    powers = np.arange(0, head_dim, 2) / head_dim
    rates = rope.theta**-powers
    if rope.kind == "linear":
        rates = rates / rope.factor
    if rope.kind == "llama3":  # https://arxiv.org/abs/2407.21783
        # in the context that the model was first trained with
        turns = rope.original * rates / (2 * np.pi)
        kept = np.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
        rates = rates * (kept + (1 - kept) / rope.factor)
    return (positions[..., None].astype(jnp.float32) * np.float32(rates)[None, None])[:, :, None]


def rotate(
    x: Float[Array, "R T N D"], angles: Float[Array, "R T 1 D/2"]
) -> Float[Array, "R T N D"]:
    """Pairs (x_i, x_(i + D/2)) turned by their angle, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
