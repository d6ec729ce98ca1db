"""Dense models of the Llama kind in Flax NNX, loaded from their published folders: Llama, Qwen 2 and Qwen 3.

RMSNorm before attention and before a SwiGLU MLP, grouped-query attention, rotary positions
(https://arxiv.org/abs/2302.13971). Qwen 2 has biases at queries, keys and values (https://arxiv.org/abs/2407.10671),
Qwen 3 norms of queries and keys (https://arxiv.org/abs/2505.09388), Llama 3 slower rotations at long wavelengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from examples.trainer.attention import Attend
from examples.trainer.llama_config import LlamaConfig, Rope
from examples.trainer.model_folder import Weights
from jaxppo import ParallelMesh
from jaxppo.sharding import multihost


def _kernel(spec: P, parallel: ParallelMesh) -> nnx.Initializer:
    return nnx.with_partitioning(nnx.initializers.normal(0.02), tuple(spec), mesh=parallel.mesh)


class Projection(nnx.Module):
    """A product with a kernel that is sharded over `fsdp`, and is gathered in the dtype of the product.

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
        config: LlamaConfig,
        parallel: ParallelMesh,
        rngs: nnx.Rngs,
    ):
        tensor = parallel.logits_spec[2]
        self.dtype = config.dtype
        self.spec = parallel.kernel_spec("hv" if columns else "vh")
        self.gathered = P(None, tensor) if columns else P(tensor, None)
        self.gathered_sharding = parallel.sharding(self.gathered)
        self.kernel = nnx.Param(_kernel(self.spec, parallel)(rngs.params(), shape, jnp.float32))
        self.adapter = nnx.data(None)  # see lora.py
        self.bias = nnx.data(None)
        if bias:
            along = (tensor,) if columns else (None,)
            zeros = nnx.with_partitioning(nnx.initializers.zeros, along, mesh=parallel.mesh)
            self.bias = nnx.Param(zeros(rngs.params(), shape[1:], jnp.float32))

    def __call__(self, x: Float[Array, "R T I"]) -> Float[Array, "R T O"]:
        y = x @ jax.lax.with_sharding_constraint(self.kernel[...].astype(self.dtype), self.gathered_sharding)
        if self.bias is not None:
            y = y + self.bias[...].astype(self.dtype)[None, None]
        if self.adapter is not None:
            y = y + self.adapter(x)
        return y


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

    def __call__(self, x: jax.Array, angles: jax.Array, attend: Attend) -> jax.Array:
        q, k, v = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        if self.q_norm is not None:
            q = self.q_norm(q)
            k = self.k_norm(k)
        mixed = attend(rotate(q, angles), rotate(k, angles), v)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


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

    def __call__(self, x: jax.Array, angles: jax.Array, attend: Attend) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), angles, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nnx.Module):
    """Tokens to final hidden states. Attributes have the names of the published tensors."""

    def __init__(self, config: LlamaConfig, parallel: ParallelMesh, rngs: nnx.Rngs):
        self.config = config
        head: dict[str, Any] = {"dtype": config.dtype, "rngs": rngs}
        embedding = _kernel(parallel.kernel_spec("vh"), parallel)
        self.embed_tokens = nnx.Embed(config.padded_vocab, config.width, embedding_init=embedding, **head)
        self.layers = nnx.List([Layer(config, parallel, rngs) for _ in range(config.layers)])
        self.norm = _norm(config, config.width, rngs)
        self.lm_head = nnx.data(None)
        if not config.tied:
            kernel = _kernel(parallel.kernel_spec("hv"), parallel)
            self.lm_head = nnx.Linear(config.width, config.padded_vocab, use_bias=False, kernel_init=kernel, **head)

    @property
    def head(self) -> nnx.Linear | nnx.Embed:
        """The head that turns hidden states into logits."""
        if self.lm_head is None:
            return self.embed_tokens
        return self.lm_head

    def __call__(
        self, tokens: Int[Array, "R T"], positions: Int[Array, "R T"], attend: Attend | Sequence[Attend]
    ) -> Float[Array, "R T H"]:
        """Final hidden states. `attend` is one function, or one for each layer (each with its own cache).

        With one function, as in a loss, the backward computes each layer's activations again.
        """
        x = jnp.take(self.embed_tokens.embedding[...], tokens, axis=0).astype(self.config.dtype)
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope)
        for i, layer in enumerate(self.layers):
            if callable(attend):
                x = jax.checkpoint(layer, static_argnums=2)(x, angles, attend)
            else:
                x = layer(x, angles, attend[i])
        return self.norm(x)

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


def rotary_angles(positions: Int[Array, "R T"], head_dim: int, rope: Rope) -> Float[Array, "R T 1 D/2"]:
    """position * rate_i, for every head the same, where rate_i = theta^(-2i/D) (https://arxiv.org/abs/2104.09864)."""
    powers = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    rates = rope.theta**-powers
    if rope.kind == "linear":
        rates = rates / rope.factor
    if rope.kind == "llama3":  # https://arxiv.org/abs/2407.21783
        turns = rope.original * rates / (2 * jnp.pi)  # in the context that the model was first trained with
        kept = jnp.clip((turns - rope.low) / (rope.high - rope.low), 0, 1)
        rates = rates * (kept + (1 - kept) / rope.factor)
    return (positions[..., None].astype(jnp.float32) * rates[None, None])[:, :, None]


def rotate(x: Float[Array, "R T N D"], angles: Float[Array, "R T 1 D/2"]) -> Float[Array, "R T N D"]:
    """Pairs (x_i, x_(i + D/2)) turned by their angle, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos = jnp.cos(angles)
    sin = jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def describe_model(config: LlamaConfig, parallel: ParallelMesh) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and its parameters' shapes; no array is made."""
    return jax.eval_shape(lambda: nnx.split(Llama(config, parallel, nnx.Rngs(0))))


def load_model(folder: Path, config: LlamaConfig, parallel: ParallelMesh) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and the folder's parameters, each placed on the mesh by its partition spec.

    Raises:
      ValueError: tensors that are missing, of another shape, not finite, or of a model with more parts; a mesh that
        does not divide the model.
    """
    if config.kv_heads % parallel.tensor_size:
        raise ValueError(
            f"mesh: got {parallel.tensor_size} tensor shards, expected a divisor of the {config.kv_heads} key-value "
            "heads"
        )
    weights = Weights(folder)
    layers = {name.split(".")[2] for name in weights.shapes if name.startswith("model.layers.")}
    if config.layers != len(layers):  # checked first, since describing many layers takes time
        raise ValueError(
            f"--model: got num_hidden_layers {config.layers} in config.json, expected {len(layers)}, the layers of "
            "the tensors"
        )
    graphdef, abstract = describe_model(config, parallel)
    shardings = jax.tree.map(parallel.sharding, nnx.get_partition_spec(abstract))
    leaves, structure = jax.tree.flatten_with_path(abstract)
    names = [_published_name(path) for path, _ in leaves]
    expected = {
        name: leaf.shape[::-1] if transposed else leaf.shape
        for (name, transposed), (_, leaf) in zip(names, leaves, strict=True)
    }
    # early folders hold the rates of the positions, which config.json says too
    ignored = {name for name in weights.shapes if name.endswith(".rotary_emb.inv_freq")}
    if config.tied:
        ignored.add("lm_head.weight")
    _check_shapes(weights.shapes, expected, ignored)
    placed = list(zip(names, leaves, jax.tree.leaves(shardings), strict=True))
    for (name, _), (_, leaf), sharding in placed:
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError:
            raise ValueError(
                f"mesh: got {dict(parallel.mesh.shape)}, expected sizes that divide {name} {leaf.shape} as "
                f"{sharding.spec}"
            ) from None
    with multihost.together(parallel):  # each process reads its own part of the weights
        arrays = [weights.place(name, sharding, transposed) for (name, transposed), _, sharding in placed]
    return graphdef, jax.tree.unflatten(structure, arrays)


def _published_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """A parameter's name in the files, and whether the file holds it transposed."""
    *modules, kind = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
    name = ".".join([*modules, "bias" if kind == "bias" else "weight"])
    if modules[0] != "lm_head":
        name = f"model.{name}"
    return name, kind == "kernel"


def _check_shapes(got: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], ignored: set[str]) -> None:
    def some(names: list[str]) -> str:
        listed = ", ".join(names[:3])
        if len(names) > 3:
            listed += f" and {len(names) - 3} more"
        return listed

    if missing := [name for name in expected if name not in got]:
        raise ValueError(f"--model: got no tensor {some(missing)}, which config.json asks for")
    if strange := [name for name in got if name not in expected and name not in ignored]:
        raise ValueError(f"--model: got tensors {some(strange)}, which the model of config.json does not have")
    for name, shape in expected.items():
        if got[name] != shape:
            raise ValueError(f"--model: got {name} of shape {list(got[name])}, expected {list(shape)}")
