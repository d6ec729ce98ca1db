"""The model interface of the loop, and a small decoder-only transformer in Flax NNX, sharded
over the tensor axis.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from examples.trainer import chunks
from examples.trainer.attention import Attend
from jaxppo import Head, ParallelMesh


class Config(Protocol):
    """Sizes of a model.

    Keys and values have `kv_heads`, in `dtype`. The last two are those of `Sizes`.
    """

    @property
    def vocab_size(self) -> int: ...
    @property
    def padded_vocab(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def logits_dtype(self) -> str: ...
    @property
    def slots(self) -> int | None: ...


class Model(Protocol):
    """Tokens to final hidden states, and the head of the loss: what `Head.of` takes."""

    @property
    def head(self) -> Any: ...
    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attend | Sequence[Attend]
    ) -> jax.Array: ...
    def logits(self, hidden: jax.Array) -> jax.Array: ...


def head_of(model: Model, config: Config) -> Head:
    """The head that the loss and the sampler's log-probs share."""
    return Head.of(model.head, vocab_size=config.vocab_size, logits_dtype=config.logits_dtype)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes of the decoder.

    `vocab_size` tokens are real; the kernels hold `padded_vocab` columns.
    """

    vocab_size: int
    max_length: int
    width: int = 64
    layers: int = 2
    heads: int = 8
    head_dim: int = 16
    mlp_width: int = 256
    logits_dtype: str = "float32"
    slots: int | None = None

    @property
    def padded_vocab(self) -> int:
        return -(-self.vocab_size // 8) * 8

    @property
    def kv_heads(self) -> int:
        return self.heads

    @property
    def dtype(self) -> str:
        return "float32"


def _kernel(spec: P, parallel: ParallelMesh) -> nnx.Initializer:
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), tuple(spec), mesh=parallel.mesh)


class Block(nnx.Module):
    """Attention and an MLP without a gate, each behind a norm; heads and MLP columns are split
    over the tensor axis.
    """

    def __init__(self, config: ModelConfig, parallel: ParallelMesh, rngs: nnx.Rngs):
        tensor = parallel.logits_spec[2]
        width = config.width
        heads = config.heads
        head_dim = config.head_dim
        linear: dict[str, Any] = {"use_bias": False, "rngs": rngs}
        self.attention_norm = nnx.RMSNorm(width, rngs=rngs)
        self.qkv = nnx.LinearGeneral(
            width,
            (3, heads, head_dim),
            kernel_init=_kernel(P(None, None, tensor, None), parallel),
            **linear,
        )
        self.out = nnx.LinearGeneral(
            (heads, head_dim),
            width,
            axis=(-2, -1),
            kernel_init=_kernel(P(tensor, None, None), parallel),
            **linear,
        )
        self.mlp_norm = nnx.RMSNorm(width, rngs=rngs)
        self.up = nnx.Linear(
            width, config.mlp_width, kernel_init=_kernel(P(None, tensor), parallel), **linear
        )
        self.down = nnx.Linear(
            config.mlp_width, width, kernel_init=_kernel(P(tensor, None), parallel), **linear
        )
        self.chunked = chunks.mesh_of(config.slots, parallel)

    def __call__(self, x: Float[Array, "R T H"], attend: Attend) -> Float[Array, "R T H"]:
        qkv = chunks.apply(Block.before, self, self.chunked, x)
        q, k, v = jnp.moveaxis(qkv, -3, 0)
        return chunks.apply(Block.after, self, self.chunked, x, attend(q, k, v))

    def before(self, x: Float[Array, "R T H"]) -> Float[Array, "R T 3 N D"]:
        """Queries, keys and values."""
        return self.qkv(self.attention_norm(x))

    def after(
        self, x: Float[Array, "R T H"], mixed: Float[Array, "R T N D"]
    ) -> Float[Array, "R T H"]:
        """What follows attention."""
        x = x + self.out(mixed)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class Decoder(nnx.Module):
    """Tokens to final hidden states; the head's kernel `[H, V]` is for the loss, which never
    makes the logits.
    """

    def __init__(self, config: ModelConfig, parallel: ParallelMesh, rngs: nnx.Rngs):
        small = nnx.initializers.normal(0.02)
        self.tokens = nnx.Embed(config.padded_vocab, config.width, embedding_init=small, rngs=rngs)
        self.positions = nnx.Embed(config.max_length, config.width, embedding_init=small, rngs=rngs)
        self.blocks = nnx.List([Block(config, parallel, rngs) for _ in range(config.layers)])
        self.norm = nnx.RMSNorm(config.width, rngs=rngs)
        self.chunked = chunks.mesh_of(config.slots, parallel)
        head = _kernel(parallel.kernel_spec("hv"), parallel)
        self.head = nnx.Linear(
            config.width, config.padded_vocab, use_bias=False, kernel_init=head, rngs=rngs
        )

    def __call__(
        self,
        tokens: Int[Array, "R T"],
        positions: Int[Array, "R T"],
        attend: Attend | Sequence[Attend],
    ) -> Float[Array, "R T H"]:
        """Final hidden states.

        `attend` is one function, or one for each layer (each with its own cache).
        """
        x = self.tokens(tokens) + self.positions(positions)
        for i, block in enumerate(self.blocks):
            x = block(x, attend if callable(attend) else attend[i])
        return chunks.apply(nnx.RMSNorm.__call__, self.norm, self.chunked, x)

    def logits(self, hidden: Float[Array, "... H"]) -> Float[Array, "... V"]:
        """The sampler's logits, padded columns included."""
        return self.head(hidden)


def create_model(
    config: ModelConfig, parallel: ParallelMesh, seed: int
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and its parameters, each placed on the mesh by its partition spec."""
    if config.heads % parallel.tensor_size:
        raise ValueError(
            f"mesh: got {parallel.tensor_size} tensor shards, expected a divisor of the"
            f" {config.heads} heads"
        )

    graphdef, make_params = _creation(config, parallel, seed)
    return graphdef, make_params()


@functools.cache
def _creation(
    config: ModelConfig, parallel: ParallelMesh, seed: int
) -> tuple[nnx.GraphDef, Callable[[], nnx.State]]:
    """The model's structure, and a compiled function that makes its parameters.

    Made once, so that runs of one process have equal structures, and share programs.
    """

    def create() -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(Decoder(config, parallel, nnx.Rngs(seed)))

    def params() -> nnx.State:
        return create()[1]

    graphdef, abstract = jax.eval_shape(create)
    shardings = jax.tree.map(parallel.sharding, nnx.get_partition_spec(abstract))
    return graphdef, jax.jit(params, out_shardings=shardings)
