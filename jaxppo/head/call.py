"""All that is static in a call to a head, and its arrays."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, TypedDict

from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxppo.head.head import Entropy, LogitStat, Transform
from jaxppo.head.profiles import Profile
from jaxppo.head.quantized import Quantization
from jaxppo.sharding import ShardAxes

Names = tuple[str, ...]
Precision = Literal["default", "high", "highest"]
SumDtype = Literal["float32", "parameter"]
EIGHTHS = 8  # of the vocabulary, in deterministic calls


class HeadOptions(TypedDict, total=False):
    """Options of how a head computes; they change its results by rounding only.

    Args:
      hidden_spec: the PartitionSpec of hidden states, if they are not sharded as
        `parallel.hidden_spec`. They are then moved to the devices of the batch's tokens, and
        `sharding.audit` notes the move. Inside a `shard_map` another spec is refused.
      memory: bytes that a device may spend beside its results. By default an eighth of an
        accelerator's memory for one pass and for logits that a loss of whole sequences keeps, and
        48 MiB on CPUs; two passes that keep none take a block of logits, and dhidden in f32. Beside
        it, two passes hold the kernel that FSDP gathers, what a quantised head has rounded and,
        with a mask, the hidden states in order and their gradients. `log_probs_from_hidden` keeps
        logits only if this is given.
      precision: the precision of products, as in `jnp.dot`. bf16 operands are multiplied as they
        are, with f32 sums. For f32 operands the default is "highest", since accelerators would
        round them to bf16 or TF32. If hidden states are bf16 and the kernel is f32, both count as
        f32; `kernel.astype(hidden.dtype)` avoids the cost.
      gradient_sum_dtype: the dtype in which gradients of parameters are summed over devices:
        "float32", or "parameter" for the parameter's own dtype. bf16 sums send fewer bytes; their
        rms error is 0.3% over 4 devices.
      follow_mask: compute only the tokens that count; True by default. False computes all tokens,
        which takes less memory if nearly all of them count.
      deterministic: a token's log-prob and entropy have the same bits whatever else is in the
        batch, and on tp = 1, 2, 4 and 8 if 8 divides the number of columns; for one platform, jax
        version and kernel dtype. Losses take two passes. The page "Numbers and bits" says what was
        tested.
    """

    hidden_spec: P | None
    memory: int | None
    precision: Precision | lax.Precision | None
    gradient_sum_dtype: SumDtype | DTypeLike
    follow_mask: bool
    deterministic: bool


@dataclasses.dataclass(frozen=True)
class Asked:
    """The statistics that are computed beside the target's log-prob; static.

    No others are in the program.
    """

    entropy: Entropy = "none"
    logit_stats: tuple[LogitStat, ...] = ()  # in the order of `LogitStat`
    top_k: int = 0


class Tokens(NamedTuple):
    """What a head reads of tokens, `[R, T, ...]` of a call and `[N, ...]` on a device; None for
    what is not given.
    """

    targets: Any = None  # i32[R, T]; None for a divergence of two heads
    nucleus_ids: Any = None  # i32[R, T, K]
    ids: Any = None  # i32[R, T, K]
    temperature: Any = None  # f32, a scalar or [R, T]; None for 1


class Inputs(NamedTuple):
    """All arrays of a call, or their PartitionSpecs; None for those not given."""

    hidden: Any  # [R, T, H]
    kernel: Any  # [H, V] or [V, H], an array or a QuantizedArray
    bias: Any = None  # [V]
    lora_a: Any = None  # [H, r], or of several adapters [A, H, r]
    lora_b: Any = None  # [r, V] or [A, r, V]
    tokens: Any = Tokens()
    counts: Any = None  # bool[R, T], the tokens that are computed; None for all
    adapter_ids: Any = None  # i32[R], if there are several adapters


@dataclasses.dataclass(frozen=True)
class HeadCall:
    """The static part of a call to a head, checked."""

    axes: ShardAxes  # the roles of mesh axes
    v_dim: int  # the kernel's dimension of the vocabulary, as a device multiplies it
    transposed: bool  # the caller's kernel is the transpose of that
    h_names: Names  # mesh axes that shard the kernel's H; it is gathered over all of them
    v_names: Names  # mesh axes that shard the kernel's V
    sequence_parallel: bool  # hidden states are sharded by position over the tensor axis
    transform: Transform
    # the factor of each product: of the kernel's, the adapter's, the bias's
    scales: tuple[float, ...]
    quantized: Quantization | None  # how kernel and hidden states are rounded
    kernel_width: int  # columns of the whole kernel
    vocab_size: int  # columns that are no padding
    asked: Asked
    profile: Profile
    precision: Precision | None  # as in `jnp.dot`; None means "highest" for f32 operands
    # these and the precision: see `HeadOptions`
    gradient_sum_dtype: SumDtype
    memory: int | None
    follow_mask: bool  # true in deterministic calls
    deterministic: bool  # chunks do not depend on the number of tokens
    heads: int  # that share the memory

    @property
    def eighths(self) -> int:
        """How many eighths of the vocabulary a device works on; 0 if its columns end within one,
        or in other calls.
        """
        shards = self.axes.size(self.axes.tensor)
        if not self.deterministic or EIGHTHS % shards or self.kernel_width % EIGHTHS:
            return 0
        return EIGHTHS // shards


class Prepared(NamedTuple):
    """A checked call with its arrays."""

    call: HeadCall
    inputs: Inputs
    specs: Inputs | None  # PartitionSpecs for `shard_call`; None without a mesh
    shape: tuple[int, int]  # [R, T] of the tokens
