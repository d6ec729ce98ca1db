"""The types of the head. They hold no logic: what builds them lies above, so that no import goes in a circle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jaxppo._pytree import register_checked
from jaxppo.sharding import ShardAxes

if TYPE_CHECKING:
    from jaxppo.head.softmax import Cotangents, Places, Residuals, Sums

Names = tuple[str, ...]
Index = int | jax.Array  # a scalar
# submatrix(start, size, first, width): `size` of one dimension of a matrix, from `start` on, and `width` of the other,
# from `first` on. The matrix may be there already, or be computed as its parts are asked for.
Submatrix = Callable[[Index, int, Index, int], jax.Array]
Entropy = Literal["none", "metric", "bonus"]
Layout = Literal["hv", "vh"]
LogitsDtype = Literal["float32", "bfloat16"]
LogitStat = Literal["log_z", "mean_logit", "accuracy", "sum_p2"]
Precision = Literal["default", "high", "highest"]
SumDtype = Literal["float32", "parameter"]
Implementation = Literal["xla", "mosaic_tpu", "reference"]


@register_checked(static=["entropy_mode"])
@dataclasses.dataclass(frozen=True)
class TokenStats:
    """What a loss reads of a head's distribution at each token; f32 `[R, T]` each, None where it is not asked for.

    Args:
      log_probs: of the targets.
      entropy: of the distribution, nats.
      log_z: the log-sum-exp of the logits.
      mean_logit: the mean of the finite logits; columns masked by -inf are out of it.
      accuracy: 1 where no token is likelier than the target, else 0.
      sum_p2: the sum of p^2 over the vocabulary, how often two draws agree; an optimal token baseline reads it.
      id_log_probs: `f32[R, T, K]`, of the ids that were given; see `log_probs_from_hidden`.
      top_ids: `i32[R, T, K]`, the likeliest ids, of equally likely ones the lowest first; -1 behind those that can be.
      top_log_probs: `f32[R, T, K]`, of those, constants; -inf where there is none.
      entropy_mode: how the entropy was computed; static. By default "bonus" with an entropy, else "none".

    Example:
      >>> TokenStats(jnp.zeros((1, 2))).entropy_mode
      'none'
    """

    log_probs: Float[Array, "R T"]
    entropy: Float[Array, "R T"] | None = None
    log_z: Float[Array, "R T"] | None = None
    mean_logit: Float[Array, "R T"] | None = None
    accuracy: Float[Array, "R T"] | None = None
    sum_p2: Float[Array, "R T"] | None = None
    id_log_probs: Float[Array, "R T K"] | None = None
    top_ids: Int[Array, "R T K"] | None = None
    top_log_probs: Float[Array, "R T K"] | None = None
    entropy_mode: Entropy | None = None

    def __post_init__(self) -> None:
        if self.entropy_mode is None:
            object.__setattr__(self, "entropy_mode", "none" if self.entropy is None else "bonus")


@dataclasses.dataclass(frozen=True)
class Asked:
    """The statistics that are computed beside the target's log-prob; static. No other is in the program.

    Args:
      entropy: "none", "metric" or "bonus".
      logit_stats: names of the fields of `TokenStats`, sorted.
      top_k: how many of the likeliest ids.
    """

    entropy: Entropy = "none"
    logit_stats: tuple[LogitStat, ...] = ()
    top_k: int = 0


class Features(NamedTuple):
    """The features of tokens, which multiply parameters: hidden states and, with an adapter, hidden @ lora.a."""

    hidden: Any
    low: Any = None


class Parameters(NamedTuple):
    """A head's parameters of the vocabulary, None where there is none.

    On a device `lora_b` lies as the kernel does: `[r, V]` beside `[H, V]`, `[V, r]` beside `[V, H]`.
    """

    kernel: Any
    bias: Any = None
    lora_b: Any = None


class Inputs(NamedTuple):
    """All arrays of a call, None where there is none; `on_device` makes a device's of them, N tokens in a row."""

    features: Features  # [R, T, H] and [R, T, r]; `low` is None until `on_device`
    parameters: Parameters
    lora_a: Any  # [H, r], or of several adapters [A, H, r]; None after `on_device`
    targets: Any  # i32[R, T]; on a device [N]
    nucleus_ids: Any  # i32[R, T, K]; [N, K]
    ids: Any  # i32[R, T, K]; [N, K]
    counts: Any  # bool[R, T], the tokens that are computed, None for all; [N]
    temperature: Any  # f32, a scalar or [R, T], None for 1; [N]
    adapter_ids: Any = None  # i32[R], where there are several; None after `on_device`


@dataclasses.dataclass(frozen=True)
class Transform:
    """z = softcap * tanh(scale * x / softcap) of x = hidden @ kernel + bias + LoRA; static.

    Args:
      dtype: to which x is rounded first; the gradient is that of no rounding.
      softcap: None for none.
      scale: multiplies x first.
    """

    dtype: LogitsDtype = "float32"
    softcap: float | None = None
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Profile:
    """The sizes that suit a kind of device.

    Args:
      whole: whether a chunk meets the device's whole part of the vocabulary.
      one_pass: the default memory of one pass, in bytes.
      tile: bytes of a tile of two passes: f32 logits and their gradient; on accelerators the logits of a forward.
      tokens: tokens of a tile of the forward and of a chunk of one pass; on CPUs of all tiles.
      least: the fewest tokens of a group in one pass: with fewer, two passes cost less than the updates of dkernel.
      group: the most tokens whose dlogits go into one late product.
      chunk: tokens of a tile that follows a mask.
      columns: columns of a tile of the second pass; on CPUs of one pass.
      wide: tokens of a tile of the second pass.
      masked_columns: columns of a tile of the second pass that follows a mask.
      deterministic: tokens of every chunk of a deterministic call.
      rings: gradients are summed over devices by `RingSum`, beside the products that make them.
      fused_features: the largest hidden size with which dlogits are computed within products by default. XLA for TPUs
        does that without an array of dlogits, but then it needs the f32 logits of all tokens. 0: never.
      references: bytes of a tile's f32 logits where sums of exponentials are relative to the target's logit. That saves
        one of two readings of the logits. 0: they are relative to the maximum.
      fused_tokens: tokens of a forward's tile if XLA makes such sums a part of the product, as on TPUs: logits are then
        not in memory, and a tile has all columns. 0 if it does not.
      columns_grow: with n times `wide` tokens a tile of the second pass has n times the columns, since each block of
        columns reads and writes the gradient of all hidden states.
      gathers_columns: targets' columns are gathered for it from a kernel `[H, V]` too, which TPUs do slowly.
    """

    whole: bool
    one_pass: int
    tile: int
    tokens: int
    least: int
    group: int
    chunk: int
    columns: int
    wide: int
    masked_columns: int
    deterministic: int
    rings: bool
    fused_features: int
    references: int
    fused_tokens: int
    columns_grow: bool
    gathers_columns: bool


@dataclasses.dataclass(frozen=True)
class Cut:
    """Tokens and columns of a tile."""

    tokens: int
    columns: int

    def __str__(self) -> str:
        return f"{self.tokens} tokens x {self.columns} columns"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a device's work, in tokens, features, columns and bytes.

    Args:
      tokens: N, the number of tokens.
      features: H, the hidden size.
      columns: the number of vocabulary columns on the device.
      itemsize: bytes of a number in products.
      rows: bytes of hidden states gathered over the tensor axis, 0 if none are gathered.
      gathered: bytes of a kernel gathered over FSDP axes, 0 if it is not gathered.
      accumulator: bytes of an f32 gradient of the kernel beside the result, 0 if the result itself is f32.
      direct: a single late product of dkernel needs no accumulator: it is summed over devices as it is made.
      masked: the work follows the tokens that count.
      of_logit: bytes a logit takes in f32, plus a bool if there is a nucleus, a gradient in f32 if there are ids, and
        a copy with its place if the likeliest ids are asked for.
      references: sums of exponentials are relative to a reference.
    """

    tokens: int
    features: int
    columns: int
    itemsize: int
    rows: int
    gathered: int
    accumulator: int
    direct: bool
    masked: bool
    of_logit: int
    references: bool


@dataclasses.dataclass(frozen=True)
class Plan:
    """The schedule and the tiles of a call.

    Args:
      forward: the tile of the statistics.
      forward_by_vocabulary: whether their outer loop is over the vocabulary.
      backward: the schedule of the gradients, by the name of its function.
      cut: the tile of the gradients.
      group: the number of tokens whose dlogits go into one late product.
      fused: dlogits are computed within late products, from the logits of a chunk that is a whole group.
      direct: the late product of a single group is summed over devices as it is made, see `Sizes`.
      passes: 1 if a chunk's loss and gradients follow its statistics at once, else 2.
    """

    forward: Cut
    forward_by_vocabulary: bool
    backward: Literal["by_vocabulary", "late", "by_tile"]
    cut: Cut
    group: int = 0
    fused: bool = False
    direct: bool = False
    passes: Literal[1, 2] = 2

    def __str__(self) -> str:
        return f"{self.cut}" + (f", products of {self.group} tokens" if self.group > self.cut.tokens else "")


@dataclasses.dataclass(frozen=True)
class HeadCall:
    """All that is static about a call to a head, checked.

    Args:
      axes: the roles of the mesh axes.
      layout: of the kernel as a device multiplies it, "hv" or "vh".
      transposed: the kernel is given as the transpose of that.
      h_names: mesh axes that shard the kernel's H, all gathered.
      v_names: mesh axes that shard its V, the tensor axes among them or not.
      sequence_parallel: hidden states are sharded by position over the tensor axis.
      transform: of logits, before the temperature.
      lora_scale: of the adapter.
      vocab_size: columns of the whole vocabulary that exist.
      asked: the statistics to compute.
      profile: the tile sizes for the devices.
      op: the arithmetic of a tile.
      precision: of products, as in `jnp.dot`; of f32 operands "highest" by default.
      sum_dtype: in which gradients of parameters are summed over devices.
      memory: bytes a device may spend beside its results; None for its default.
      follow_mask: the work follows the tokens that count.
      deterministic: tiles do not depend on the number of tokens, nor sums on the tensor axis where `plan.eighths` are.
      heads: how many share the memory.
      copied: parameters come as one copy a device, `[D, ...]`, whose gradients wait to be summed.
    """

    axes: ShardAxes
    layout: Layout
    transposed: bool
    h_names: Names
    v_names: Names
    sequence_parallel: bool
    transform: Transform
    lora_scale: float
    vocab_size: int
    asked: Asked
    profile: Profile
    op: Op
    precision: Precision | None
    sum_dtype: SumDtype
    memory: int | None
    follow_mask: bool
    deterministic: bool
    heads: int
    copied: bool

    @property
    def v_dim(self) -> int:
        """The kernel's dimension of the vocabulary."""
        return 1 if self.layout == "hv" else 0


class Prepared(NamedTuple):
    """A call with its arrays, checked, and how they lie on the mesh."""

    call: HeadCall
    inputs: Inputs
    specs: Inputs | None
    """PartitionSpecs for `shard_call`; None where no mesh is given."""
    tokens: tuple[int, int]
    """[R, T]."""


class NeedsGrad(NamedTuple):
    """The gradients that are asked for: True in their fields, None in the others, which cost nothing."""

    features: Features
    parameters: Parameters


class Block(NamedTuple):
    """Some columns of the vocabulary."""

    parameters: Parameters  # [H, B] or [B, H]; f32[1, B]; [r, B] or [B, r]
    column_ids: jax.Array  # i32[1, B], their places in the vocabulary
    valid: jax.Array | Literal[True]  # bool[1, B], False for duplicates of other blocks and for padding; or all True


class Chunk(NamedTuple):
    """Some tokens."""

    rows: Features  # [C, H] and [C, r]
    targets: Any  # i32[C]
    nucleus_ids: jax.Array | None  # i32[C, K]
    ids: jax.Array | None  # i32[C, K]
    temperature: jax.Array | None  # f32[C]; None for 1
    counts: jax.Array | None  # bool[C], the tokens that are computed; None for all
    reference: jax.Array | None = None  # f32[C], near the largest logit: sums are relative to it, else to the largest


class Tile(NamedTuple):
    """Some tokens before some columns."""

    chunk: Chunk
    block: Block
    place: Any  # (i32[C], bool[C]), the target's column in the block, and whether the block holds it
    nucleus: jax.Array | None  # bool[C, B], the columns that the sampler could draw, the target's included; or None
    ids: Places | None  # of the ids whose log-probs are asked for


class Op:
    """The arithmetic of a tile that an implementation may replace; the products of the backward are XLA's."""

    leaves_logits: ClassVar[bool] = True  # of a forward, in memory; an op that does not is given all columns at once
    takes_references: ClassVar[bool] = False  # `Chunk.reference` is read

    def unsupported(self, call: HeadCall, inputs: Inputs) -> str | None:
        """What of a call it does not support, in words; None where it supports all."""
        return None

    def forward(self, call: HeadCall, tile: Tile, like: Sums, keep: bool) -> tuple[Sums, jax.Array | None]:
        """The softmax sums of the tile, those that `like` has, and its f32 products hidden @ kernel + bias + LoRA.

        The products may be None where `keep` does not ask for them.
        """
        raise NotImplementedError

    def dlogits(
        self, call: HeadCall, tile: Tile, residuals: Residuals, cotangents: Cotangents, x: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """d loss / d (hidden @ kernel), `[C, B]` in the dtype of products, and its f32 sum over tokens for a bias.

        It is 0 where nothing counts, and where the product is -inf: such a column is masked. The products x are
        computed again where they are None; the sum is None where the head has no bias.
        """
        raise NotImplementedError
