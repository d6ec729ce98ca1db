"""The types of the head. They hold no logic: other modules build them, so that no import goes in a circle."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jaxppo.base.pytree import register
from jaxppo.sharding import ShardAxes

if TYPE_CHECKING:
    from jaxppo.head.softmax import Places

Names = tuple[str, ...]
Index = int | jax.Array  # a scalar
# submatrix(start, size, first, width): `size` of one dimension of a matrix, from `start` on, and `width` of the other,
# from `first` on. The matrix may exist already, or be computed as its parts are asked for.
Submatrix = Callable[[Index, int, Index, int], jax.Array]
Entropy = Literal["none", "metric", "bonus"]
Layout = Literal["hv", "vh"]
LogitsDtype = Literal["float32", "bfloat16"]
LogitStat = Literal["log_z", "mean_logit", "accuracy", "sum_p2"]
Precision = Literal["default", "high", "highest"]
SumDtype = Literal["float32", "parameter"]
# The default of statistics that were not asked for. To type checkers they are there, as the arrays of a batch are.
_ABSENT: Any = None


@register(static=["entropy_mode"])
@dataclasses.dataclass(frozen=True)
class TokenStats:
    """The statistics of a head's distribution at each token; f32 `[R, T]` each, None if not asked for.

    Args:
      log_probs: the log-probs of the targets.
      entropy: the entropy of the distribution, in nats.
      log_z: the log-sum-exp of the logits.
      mean_logit: the mean of the finite logits; columns masked by -inf are left out.
      accuracy: 1 if no token is likelier than the target, else 0.
      sum_p2: the sum of p^2 over the vocabulary, which is how often two draws agree; see `optimal_token_baseline`.
      id_log_probs: `f32[R, T, K]`, the log-probs of the ids that were given; see `log_probs_from_hidden`.
      top_ids: `i32[R, T, K]`, the likeliest ids. Among equally likely ids the lowest comes first. If the vocabulary has
        fewer than K tokens, the slots left over hold -1.
      top_log_probs: `f32[R, T, K]`, the log-probs of `top_ids`, without gradients; -inf in slots left over.
      ids: `i32[R, T, K]`, the ids of `id_log_probs`; a loss of ids refuses others.
      entropy_mode: how the entropy was computed; static. By default "bonus" if there is an entropy, else "none".

    Example:
      >>> TokenStats(jnp.zeros((1, 2))).entropy_mode
      'none'
    """

    log_probs: Float[Array, "R T"]
    entropy: Float[Array, "R T"] = _ABSENT
    log_z: Float[Array, "R T"] = _ABSENT
    mean_logit: Float[Array, "R T"] = _ABSENT
    accuracy: Float[Array, "R T"] = _ABSENT
    sum_p2: Float[Array, "R T"] = _ABSENT
    id_log_probs: Float[Array, "R T K"] = _ABSENT
    top_ids: Int[Array, "R T K"] = _ABSENT
    top_log_probs: Float[Array, "R T K"] = _ABSENT
    ids: Int[Array, "R T K"] = _ABSENT
    entropy_mode: Entropy | None = None

    def __post_init__(self) -> None:
        if self.entropy_mode is None:
            object.__setattr__(self, "entropy_mode", "none" if self.entropy is None else "bonus")


@dataclasses.dataclass(frozen=True)
class Asked:
    """The statistics that are computed beside the target's log-prob; static. No others are in the program.

    Args:
      entropy: "none", "metric" or "bonus".
      logit_stats: names of the fields of `TokenStats`, sorted.
      top_k: how many of the likeliest ids to find.
    """

    entropy: Entropy = "none"
    logit_stats: tuple[LogitStat, ...] = ()
    top_k: int = 0


# The fields of `Features`, `Parameters` and `Inputs` hold arrays, or for each of them a PartitionSpec or a flag.
class Features(NamedTuple):
    """The features of tokens that parameters multiply: hidden states and, with an adapter, hidden @ lora.a."""

    hidden: Any
    low: Any = None


class Parameters(NamedTuple):
    """The parameters of a head that have a dimension of the vocabulary; None for one that it lacks.

    On a device `lora_b` has the layout of the kernel: `[r, V]` with `[H, V]`, `[V, r]` with `[V, H]`.
    """

    kernel: Any
    bias: Any = None
    lora_b: Any = None


class Inputs(NamedTuple):
    """All arrays of a call, None for those not given. `on_device` gives them the second shape, with N tokens."""

    features: Features  # [R, T, H] and [R, T, r]; `low` is None until `on_device`
    parameters: Parameters
    lora_a: Any  # [H, r], or of several adapters [A, H, r]; None after `on_device`
    targets: Any  # i32[R, T]; on a device [N]
    nucleus_ids: Any  # i32[R, T, K]; [N, K]
    ids: Any  # i32[R, T, K]; [N, K]
    counts: Any  # bool[R, T], the tokens that are computed, None for all; [N]
    temperature: Any  # f32, a scalar or [R, T], None for 1; [N]
    adapter_ids: Any = None  # i32[R], if there are several adapters; None after `on_device`


@dataclasses.dataclass(frozen=True)
class Transform:
    """z = softcap * tanh(scale * x / softcap) of x = hidden @ kernel + bias + LoRA; static.

    Args:
      dtype: the dtype to which x is rounded first; the gradient ignores the rounding.
      softcap: the bound of |z|, or None for none.
      scale: multiplies x before the soft-cap.
    """

    dtype: LogitsDtype = "float32"
    softcap: float | None = None
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Profile:
    """The sizes that suit a kind of device.

    Args:
      whole: whether a chunk is computed in all of the device's columns at once.
      one_pass: the default memory of one pass, in bytes.
      tile: bytes of the f32 logits of a tile of the forward.
      tokens: tokens of a tile of the forward and of a chunk of one pass.
      least: the fewest tokens of a group in one pass: with fewer, two passes cost less than the updates of dkernel.
        On CPUs also the fewest of a block of two passes that follows a mask.
      group: the most tokens whose dlogits go into one late product (`late.py`).
      chunk: tokens of a tile that follows a mask.
      columns: columns of a tile of the second pass; on CPUs those of one pass.
      wide: tokens of a tile of the second pass.
      masked_columns: columns of a tile of the second pass that follows a mask.
      deterministic: tokens of every chunk of a deterministic call.
      rings: gradients are summed over devices by `RingSum`, beside the products that make them.
      fused_features: the largest hidden size with which dlogits are computed within products by default. XLA for TPUs
        does that without an array of dlogits, but then it needs the f32 logits of all tokens. 0: never.
      few_logits: a group is small if its f32 logits take at most this many bytes. Its dlogits are computed within
        products whatever the hidden size is. With a mask, small groups that add to an accumulator have one chunk each.
      references: bytes of a tile's f32 logits if sums of exponentials are relative to the target's logit. That saves
        one of two readings of the logits. 0: sums are always relative to the maximum.
      fused_tokens: tokens of a forward's tile if XLA makes such sums a part of the product, as on TPUs: logits are then
        not in memory, and a tile has all columns. 0 if XLA does not.
      columns_grow: with n times `wide` tokens a tile of the second pass has n times the columns, since each block of
        columns reads and writes the gradient of all hidden states.
      gathers_columns: sums are relative to the target's logit with a kernel `[H, V]` too, although the targets' columns
        have to be gathered, which is slow on TPUs.
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
    few_logits: int
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
      of_logit: bytes of an f32 logit, plus those of a bool if there is a nucleus, of an f32 gradient if there are ids,
        and of a copy with its place if the likeliest ids are asked for.
      references: sums of exponentials are relative to the target's logit.
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
      forward_by_vocabulary: whether the outer loop of the statistics is over the vocabulary.
      backward: the schedule of the gradients, by the name of its function.
      cut: the tile of the gradients.
      group: the number of tokens whose dlogits go into one late product.
      fused: dlogits are computed within late products, from the logits of a chunk that is a whole group.
      direct: see `Sizes`.
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
    """The static part of a call to a head, checked.

    Args:
      axes: the roles of the mesh axes.
      layout: the layout of the kernel as a device multiplies it, "hv" or "vh".
      transposed: the caller's kernel is the transpose of that.
      h_names: mesh axes that shard the kernel's H; it is gathered over all of them.
      v_names: mesh axes that shard the kernel's V; the tensor axes may be among them.
      sequence_parallel: hidden states are sharded by position over the tensor axis.
      transform: the elementwise transform of logits, before the temperature.
      lora_scale: the scale of the adapter.
      vocab_size: the number of columns of the whole vocabulary without padding.
      asked: the statistics to compute.
      profile: the tile sizes for the devices.
      precision: the precision of products, as in `jnp.dot`; None means "highest" for f32 operands.
      sum_dtype: the dtype in which gradients of parameters are summed over devices.
      memory: bytes that a device may spend beside its results; None for the default.
      follow_mask: the work follows the tokens that count.
      deterministic: tiles do not depend on the number of tokens. Sums do not depend on the tensor axis if
        `plan.eighths` is not 0.
      heads: the number of heads that share the memory.
      copied: parameters come as one copy per device, `[D, ...]`; their gradients are summed later.
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
    """A checked call with its arrays, and how they are sharded."""

    call: HeadCall
    inputs: Inputs
    specs: Inputs | None
    """PartitionSpecs for `shard_call`; None if no mesh is given."""
    tokens: tuple[int, int]
    """[R, T]."""


class NeedsGrad(NamedTuple):
    """The gradients that are asked for: True in their fields, None in the others, whose gradients cost nothing."""

    features: Features
    parameters: Parameters


class Block(NamedTuple):
    """Some columns of the vocabulary."""

    parameters: Parameters  # [H, B] or [B, H]; f32[1, B]; [r, B] or [B, r]
    column_ids: jax.Array  # i32[1, B], their places in the vocabulary
    valid: jax.Array | Literal[True]  # bool[1, B], False for duplicates and padding; True if none is


class Chunk(NamedTuple):
    """Some tokens."""

    rows: Features  # [C, H] and [C, r]
    targets: Any  # i32[C]; None for a divergence of two heads
    nucleus_ids: jax.Array | None  # i32[C, K]
    ids: jax.Array | None  # i32[C, K]
    temperature: jax.Array | None  # f32[C]; None for 1
    counts: jax.Array | None  # bool[C], the tokens that are computed; None for all
    reference: jax.Array | None = None  # f32[C], sums are relative to it; if None, to the largest logit


class Tile(NamedTuple):
    """Some tokens by some columns."""

    chunk: Chunk
    block: Block
    place: Any  # (i32[C], bool[C]), the target's column in the block, and whether it is there; or None
    nucleus: jax.Array | None  # bool[C, B], the columns that the sampler could draw, the target's included; or None
    ids: Places | None  # the places of the ids whose log-probs are asked for
