"""Qwen3's dense models of any size in Flax NNX, loaded from their published folders.

Qwen3 Technical Report (https://arxiv.org/abs/2505.09388): RMSNorm before attention and before a SwiGLU MLP,
grouped-query attention with normed queries and keys, rotary positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from examples.trainer.attention import Attend
from examples.trainer.model_folder import Weights, read_json
from jaxppo import ParallelMesh
from jaxppo.sharding import multihost

_DTYPES = ("float32", "bfloat16", "float16")
# settings of config.json that change the model, with the values that the model below has
_ONLY = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "rope_scaling": (None,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
}


@dataclasses.dataclass(frozen=True)
class Qwen3Config:
    """Sizes of the model. Columns of `padded_vocab` that belong to no token of the tokenizer are padding."""

    vocab_size: int
    padded_vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    max_length: int
    rope_theta: float
    norm_eps: float
    tied: bool
    end: int
    """The id of the end of text."""
    dtype: str
    """Products and activations have it; parameters are float32."""

    @classmethod
    def read(cls, folder: Path) -> Qwen3Config:
        """Reads config.json. Every column of the head counts as a token until `with_tokens` says how many there are.

        Raises:
          ValueError: no config.json, one of another architecture, or one that lacks a setting.
        """
        path = folder / "config.json"
        settings = read_json(path)
        for name, allowed in _ONLY.items():
            got = settings.get(name, allowed[0] if name != "model_type" else None)
            if got not in allowed:
                raise ValueError(f"--model: got {name} {got!r} in {path}, expected {allowed[0]!r}")
        rope = settings.get("rope_parameters") or {}
        if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
            raise ValueError(f"--model: got rope_parameters {rope!r} in {path}, expected rope_type 'default'")
        kinds = settings.get("layer_types") or []
        if not isinstance(kinds, list) or (strange := [kind for kind in kinds if kind != "full_attention"]):
            got = strange[:1] if isinstance(kinds, list) else kinds
            raise ValueError(f"--model: got layer_types {got!r} in {path}, expected 'full_attention'")
        settings = {"head_dim": None, "tie_word_embeddings": False, "torch_dtype": "float32", **rope, **settings}
        eos = settings.get("eos_token_id")

        def number(name: str, kind: type = int, value: Any = None) -> Any:
            value = settings.get(name) if value is None else value
            integer = isinstance(value, int) and not isinstance(value, bool)
            good = integer or (kind is float and isinstance(value, float))
            if not good or not 0 <= value < 2**31 or (value == 0 and name != "eos_token_id"):
                raise ValueError(f"--model: got {name} {value!r} in {path}, expected a number above 0, below 2**31")
            return kind(value)

        heads, kv_heads = number("num_attention_heads"), number("num_key_value_heads")
        if heads % kv_heads:
            raise ValueError(f"--model: got num_key_value_heads {kv_heads} in {path}, expected a divisor of {heads}")
        dtype = settings.get("dtype", settings["torch_dtype"])
        if dtype not in _DTYPES:
            raise ValueError(f"--model: got dtype {dtype!r} in {path}, expected one of {', '.join(_DTYPES)}")
        tied = settings["tie_word_embeddings"]
        if not isinstance(tied, bool):
            raise ValueError(f"--model: got tie_word_embeddings {tied!r} in {path}, expected true or false")
        vocab, width = number("vocab_size"), number("hidden_size")
        return cls(
            vocab_size=vocab,
            padded_vocab=vocab,
            width=width,
            layers=number("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=width // heads if settings["head_dim"] is None else number("head_dim"),
            mlp_width=number("intermediate_size"),
            max_length=number("max_position_embeddings"),
            rope_theta=number("rope_theta", float),
            norm_eps=number("rms_norm_eps", float),
            tied=tied,
            end=number("eos_token_id", value=eos[0] if isinstance(eos, list) and eos else None),
            dtype=dtype,
        )

    def with_tokens(self, count: int, longest: int) -> Qwen3Config:
        """The config with the tokenizer's number of tokens.

        Raises:
          ValueError: more tokens than columns, or sequences of more than the model's positions.
        """
        if count > self.padded_vocab:
            raise ValueError(
                f"--model: got vocab_size {self.padded_vocab} in config.json, expected the {count} ids of "
                "tokenizer.json or more"
            )
        if longest > self.max_length:
            raise ValueError(f"--model: got max_position_embeddings {self.max_length}, expected {longest} or more")
        return dataclasses.replace(self, vocab_size=count)


def _kernel(spec: P, parallel: ParallelMesh) -> nnx.Initializer:
    return nnx.with_partitioning(nnx.initializers.normal(0.02), tuple(spec), mesh=parallel.mesh)


class Projection(nnx.Module):
    """A product with a kernel that is sharded over `fsdp`, and is gathered in the dtype of the product."""

    def __init__(self, shape: tuple[int, int], columns: bool, config: Qwen3Config, parallel: ParallelMesh, rngs: Any):
        tensor = parallel.logits_spec[2]
        self.dtype = config.dtype
        self.gathered = parallel.sharding(P(None, tensor) if columns else P(tensor, None))
        spec = parallel.kernel_spec("hv" if columns else "vh")
        self.kernel = nnx.Param(_kernel(spec, parallel)(rngs.params(), shape, jnp.float32))

    def __call__(self, x: Float[Array, "R T I"]) -> Float[Array, "R T O"]:
        return x @ jax.lax.with_sharding_constraint(self.kernel[...].astype(self.dtype), self.gathered)


class SelfAttention(nnx.Module):
    def __init__(self, config: Qwen3Config, parallel: ParallelMesh, rngs: nnx.Rngs):
        width, head_dim = config.width, config.head_dim
        self.head_dim = head_dim
        self.q_proj = Projection((width, config.heads * head_dim), True, config, parallel, rngs)
        self.k_proj = Projection((width, config.kv_heads * head_dim), True, config, parallel, rngs)
        self.v_proj = Projection((width, config.kv_heads * head_dim), True, config, parallel, rngs)
        self.o_proj = Projection((config.heads * head_dim, width), False, config, parallel, rngs)
        self.q_norm = _norm(config, head_dim, rngs)
        self.k_norm = _norm(config, head_dim, rngs)

    def __call__(self, x: jax.Array, angles: jax.Array, attend: Attend) -> jax.Array:
        q, k, v = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in (self.q_proj(x), self.k_proj(x), self.v_proj(x)))
        mixed = attend(rotate(self.q_norm(q), angles), rotate(self.k_norm(k), angles), v)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1))


class MLP(nnx.Module):
    def __init__(self, config: Qwen3Config, parallel: ParallelMesh, rngs: nnx.Rngs):
        self.gate_proj = Projection((config.width, config.mlp_width), True, config, parallel, rngs)
        self.up_proj = Projection((config.width, config.mlp_width), True, config, parallel, rngs)
        self.down_proj = Projection((config.mlp_width, config.width), False, config, parallel, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(nnx.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    def __init__(self, config: Qwen3Config, parallel: ParallelMesh, rngs: nnx.Rngs):
        self.input_layernorm = _norm(config, config.width, rngs)
        self.self_attn = SelfAttention(config, parallel, rngs)
        self.post_attention_layernorm = _norm(config, config.width, rngs)
        self.mlp = MLP(config, parallel, rngs)

    def __call__(self, x: jax.Array, angles: jax.Array, attend: Attend) -> jax.Array:
        x = x + self.self_attn(self.input_layernorm(x), angles, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nnx.Module):
    """Tokens to final hidden states. Attributes have the names of the published tensors."""

    def __init__(self, config: Qwen3Config, parallel: ParallelMesh, rngs: nnx.Rngs):
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
        return self.embed_tokens if self.lm_head is None else self.lm_head

    def __call__(
        self, tokens: Int[Array, "R T"], positions: Int[Array, "R T"], attend: Attend | Sequence[Attend]
    ) -> Float[Array, "R T H"]:
        """Final hidden states. `attend` is one function, or one for each layer (each with its own cache).

        With one function, as in a loss, the backward computes each layer's activations again.
        """
        x = jnp.take(self.embed_tokens.embedding[...], tokens, axis=0).astype(self.config.dtype)
        angles = rotary_angles(positions, self.config)
        for i, layer in enumerate(self.layers):
            if callable(attend):
                x = jax.checkpoint(layer, static_argnums=2)(x, angles, attend)
            else:
                x = layer(x, angles, attend[i])
        return self.norm(x)

    def logits(self, hidden: Float[Array, "... H"]) -> Float[Array, "... V"]:
        """The sampler's logits, in float32."""
        kernel = self.head.embedding[...].T if isinstance(self.head, nnx.Embed) else self.head.kernel[...]
        return jnp.matmul(hidden, kernel.astype(hidden.dtype), preferred_element_type=jnp.float32)


def _norm(config: Qwen3Config, features: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
    return nnx.RMSNorm(features, epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs)


def rotary_angles(positions: Int[Array, "R T"], config: Qwen3Config) -> Float[Array, "R T 1 D/2"]:
    """position * theta^(-2i/D), for every head the same (https://arxiv.org/abs/2104.09864)."""
    powers = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    return (positions[..., None].astype(jnp.float32) * (config.rope_theta**-powers)[None, None])[:, :, None]


def rotate(x: Float[Array, "R T N D"], angles: Float[Array, "R T 1 D/2"]) -> Float[Array, "R T N D"]:
    """Pairs (x_i, x_(i + D/2)) turned by their angle, in float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def describe_model(config: Qwen3Config, parallel: ParallelMesh) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and its parameters' shapes; no array is made."""
    return jax.eval_shape(lambda: nnx.split(Qwen3(config, parallel, nnx.Rngs(0))))


def load_model(folder: Path, config: Qwen3Config, parallel: ParallelMesh) -> tuple[nnx.GraphDef, nnx.State]:
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
    _check_shapes(weights.shapes, expected, {"lm_head.weight"} if config.tied else set())
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
    name = ".".join([*modules, "weight"])
    return name if modules[0] == "lm_head" else f"model.{name}", kind == "kernel"


def _check_shapes(got: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], ignored: set[str]) -> None:
    def some(names: list[str]) -> str:
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    if missing := [name for name in expected if name not in got]:
        raise ValueError(f"--model: got no tensor {some(missing)}, which config.json asks for")
    if strange := [name for name in got if name not in expected and name not in ignored]:
        raise ValueError(f"--model: got tensors {some(strange)}, which the model of config.json does not have")
    for name, shape in expected.items():
        if got[name] != shape:
            raise ValueError(f"--model: got {name} of shape {list(got[name])}, expected {list(shape)}")
