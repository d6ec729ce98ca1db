"""All that is static in a call to a head, its arrays, the sizes that suit a kind of device, and checks of arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import jax
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxppo.base.arrays import as_token_ids, check, check_array, check_type, needed
from jaxppo.head.head import Entropy, LogitStat, TokenStats, Transform
from jaxppo.sharding import ParallelMesh, ShardAxes, known_device

Names = tuple[str, ...]
Precision = Literal["default", "high", "highest"]
SumDtype = Literal["float32", "parameter"]
EIGHTHS = 8  # of the vocabulary, in deterministic calls
GIB = 2**30
MIB = 2**20
_OF_IDS = ("ids", "id_log_probs", "top_ids", "top_log_probs")  # the statistics that have a dimension K


class HeadOptions(TypedDict, total=False):
    """Options of how a head computes; they change its results by rounding only.

    Args:
      hidden_spec: the PartitionSpec of hidden states, if they are not sharded as `parallel.hidden_spec`. They are then
        moved to the devices of the batch's tokens, and `sharding.audit` notes the move. Inside a `shard_map` another
        spec is refused.
      memory: bytes that a device may spend beside its results. By default an eighth of an accelerator's memory for
        one pass and for logits that a loss of whole sequences keeps, and 48 MiB on CPUs; two passes that keep none take
        a block of logits, and dhidden in f32. Beside it, two passes hold the kernel that FSDP gathers and, with a mask,
        the hidden states in order and their gradients. `log_probs_from_hidden` keeps logits only if this is given.
      precision: the precision of products, as in `jnp.dot`. bf16 operands multiply in one pass with f32 sums. For f32
        operands the default is "highest", since accelerators would round them to bf16 or TF32. If hidden states are
        bf16 and the kernel is f32, both count as f32; `kernel.astype(hidden.dtype)` avoids the cost.
      gradient_sum_dtype: the dtype in which gradients of parameters are summed over devices: "float32", or "parameter"
        for the parameter's own dtype. bf16 sums send fewer bytes; their rms error is 0.3% over 4 devices.
      follow_mask: compute only the tokens that count; True by default. False computes all tokens, which takes less
        memory if nearly all of them count.
      deterministic: a token's log-prob and entropy have the same bits whatever else is in the batch, and on tp = 1, 2,
        4 and 8 if 8 divides the number of columns; for one platform, jax version and kernel dtype. Losses take two
        passes. The page "Numbers and bits" says what was tested.
    """

    hidden_spec: P | None
    memory: int | None
    precision: Precision | lax.Precision | None
    gradient_sum_dtype: SumDtype | DTypeLike
    follow_mask: bool
    deterministic: bool


@dataclasses.dataclass(frozen=True)
class Asked:
    """The statistics that are computed beside the target's log-prob; static. No others are in the program."""

    entropy: Entropy = "none"
    logit_stats: tuple[LogitStat, ...] = ()  # in the order of `LogitStat`
    top_k: int = 0


class Tokens(NamedTuple):
    """What a head reads of tokens, `[R, T, ...]` of a call and `[N, ...]` on a device; None for what is not given."""

    targets: Any = None  # i32[R, T]; None for a divergence of two heads
    nucleus_ids: Any = None  # i32[R, T, K]
    ids: Any = None  # i32[R, T, K]
    temperature: Any = None  # f32, a scalar or [R, T]; None for 1


class Inputs(NamedTuple):
    """All arrays of a call, or their PartitionSpecs; None for those not given."""

    hidden: Any  # [R, T, H]
    kernel: Any  # [H, V] or [V, H]
    bias: Any = None  # [V]
    lora_a: Any = None  # [H, r], or of several adapters [A, H, r]
    lora_b: Any = None  # [r, V] or [A, r, V]
    tokens: Any = Tokens()
    counts: Any = None  # bool[R, T], the tokens that are computed; None for all
    adapter_ids: Any = None  # i32[R], if there are several adapters


@dataclasses.dataclass(frozen=True)
class Profile:
    """The sizes that suit a kind of device."""

    memory: int  # bytes that one pass may take by default
    forward_bytes: int  # of the f32 logits of a chunk of the forward
    chunk_tokens: int  # the most tokens of a chunk
    block_width: int  # columns of a block of the second pass
    tile_tokens: int = 8192  # the most tokens of a tile of the second pass, without a mask
    block_width_with_mask: int | None = None  # tiles have fewer tokens then; None for `block_width`
    fixed_chunk: int = 1024  # tokens of a chunk of a deterministic call
    group_tokens: int = 8192  # the most tokens whose gradients of logits exist at once in one pass
    shrinks_groups: bool = True  # where groups do not fit the memory; else two passes are taken
    ring: int = 0  # the most devices around which a sum goes beside its products, if all need it; 0 for no ring
    parts: int = 4  # in which the products of one pass follow a mask
    logit_copies: int = 1  # how many arrays of a tile's f32 logits XLA keeps at once
    upcast: bool = False  # bf16 is multiplied as f32
    gathers: bool = False  # logits lie in memory, where a target's is read; else XLA finds it in a sum over all columns
    rounding_products: bool = False  # a product rounds its f32 sums itself, if no sum over devices follows


def _tpu(kind: str, block_width: int, mebibytes: int = 150, tile_tokens: int = 4096) -> Profile:
    """One pass may take an eighth of the memory. On a v5e or v6e 75 MiB of logits stay in VMEM."""
    return Profile(_eighth(kind), mebibytes * MIB, 2048, block_width, tile_tokens, ring=4)


def _gpu(kind: str) -> Profile:
    """XLA for GPUs would write an f32 product to memory before it rounds it: dkernel would exist twice."""
    return Profile(
        _eighth(kind), 512 * MIB, 2048, 4608, block_width_with_mask=9216, gathers=True, rounding_products=True
    )


def _eighth(kind: str) -> int:
    device = known_device(kind)
    if device is None:
        return 2 * GIB
    return device.memory // 8


# XLA for CPUs multiplies bf16 faster as f32, copies the rows that a product in a branch reads, keeps exponentials
# beside logits, and updates dkernel slowly
CPU = Profile(
    48 * MIB,
    16 * MIB,
    1024,
    512,
    4096,
    fixed_chunk=256,
    group_tokens=2048,
    shrinks_groups=False,
    parts=1,
    logit_copies=3,
    upcast=True,
    gathers=True,
)
# A key is a part of a device's kind, since described devices do not report their memory. The first that fits is taken:
# the last one fits all.
PROFILES = {
    "cpu": CPU,
    "TPU v4": _tpu("TPU v4", 2048),
    "TPU v5 lite": _tpu("TPU v5 lite", 2048, mebibytes=75, tile_tokens=8192),
    "TPU v5e": _tpu("TPU v5e", 2048, mebibytes=75, tile_tokens=8192),
    "TPU v5": _tpu("TPU v5", 2048),
    "TPU v6 lite": _tpu("TPU v6 lite", 3072, mebibytes=75, tile_tokens=8192),
    "TPU v6e": _tpu("TPU v6e", 3072, mebibytes=75, tile_tokens=8192),
    "TPU7x": _tpu("TPU7x", 2048),
    "TPU": _tpu("TPU", 2048),
    "H100": _gpu("H100"),
    "H200": _gpu("H200"),
    "B200": _gpu("B200"),
    "": _gpu(""),
}


def device_kind(parallel: ParallelMesh | ShardAxes | None, array: Any) -> str:
    """The kind of the mesh's devices. Inside a `shard_map` its mesh tells, else the devices on which the array lies."""
    if isinstance(parallel, ParallelMesh):
        return str(parallel.mesh.devices.flat[0].device_kind)
    for mesh in (jax.sharding.get_abstract_mesh(), getattr(jax.typeof(array).sharding, "mesh", None)):
        device = getattr(mesh, "abstract_device", None)  # has no platform in JAX 0.10.0
        if device is not None:
            return str(device.device_kind)
    return str(jax.devices()[0].device_kind)


def profile_of(device: str) -> Profile:
    return next(profile for kind, profile in PROFILES.items() if kind in device)


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
    scales: tuple[float, ...]  # the factor of each product: of the kernel's, the adapter's, the bias's
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
        """How many eighths of the vocabulary a device works on; 0 if its columns end within one."""
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


def as_id_sets(what: str, ids: Any, shape: tuple[int, ...]) -> Any:
    """Sets of ids, K at each position, as `i32[R, T, K]`; None stays None."""
    if ids is None:
        return None
    check_array(what, ids)
    good = ids.ndim == 3 and ids.shape[:2] == shape and ids.shape[2] > 0
    check(what, f"shape {ids.shape}", good, f"[R, T, K] with [R, T] = {shape}")
    return as_token_ids(ids)


def as_logit_stats(logit_stats: Any) -> tuple[LogitStat, ...]:
    """The names, each once and in one order."""
    names = get_args(LogitStat)
    several = isinstance(logit_stats, Collection) and not isinstance(logit_stats, (str, jax.Array, np.ndarray))
    good = several and all(isinstance(x, str) and x in names for x in logit_stats)
    check("logit_stats", repr(logit_stats), good, f"some of {names}, in a tuple, list or set")
    return tuple(name for name in names if name in logit_stats)


def check_stats(stats: TokenStats, shape: tuple[int, ...], *read: str, how: str = "") -> None:
    """Raises unless these are statistics of a batch of shape `[R, T]` or `[K, R, T]`, in the dtypes of `KINDS`.

    The fields `read` must not be None, nor log-probs; `how` tells in the error how to get them.
    """
    check_type("stats", stats, isinstance(stats, TokenStats), "TokenStats")
    for name in read:
        needed(f"stats.{name}", getattr(stats, name), f"f32[R, T]: {how}")
    for field in dataclasses.fields(stats):
        array = getattr(stats, field.name)
        if field.name == "entropy_mode" or (array is None and field.name != "log_probs"):
            continue
        check_array(f"stats.{field.name}", array)
        ndim = len(shape)
        expected = f"the batch's, {shape}"
        if field.name in _OF_IDS:
            ndim += 1
            expected += " and K"
        good = array.shape[: len(shape)] == shape and array.ndim == ndim
        check(f"stats.{field.name}", f"shape {array.shape}", good, expected)
