"""All that is static in a call to a head, its arrays, the sizes that suit a kind of device, and checks of arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, Literal, NamedTuple, TypedDict, get_args

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxppo.base.arrays import as_token_ids, check, check_array, check_type, needed
from jaxppo.head.head import Entropy, LogitStat, TokenStats, Transform
from jaxppo.sharding import ParallelMesh, ShardAxes, known_device

Names = tuple[str, ...]
Precision = Literal["default", "high", "highest"]
SumDtype = Literal["float32", "parameter"]
GIB, MIB = 2**30, 2**20
_OF_IDS = ("ids", "id_log_probs", "top_ids", "top_log_probs")  # the statistics that have a dimension K


class HeadOptions(TypedDict, total=False):
    """Options of how a head computes; they change its results by rounding only.

    Args:
      hidden_spec: the PartitionSpec of hidden states, if they are not sharded as `parallel.hidden_spec`. They are then
        moved to the devices of the batch's tokens, and `sharding.audit` notes the move. Inside a `shard_map` another
        spec is refused.
      memory: bytes that a device may spend beside its results. By default an eighth of an accelerator's memory for
        one pass; for two 0.27 GiB on TPUs and 0.4 on GPUs, and dhidden in f32 beyond 8192 tokens; on CPUs 48 MiB and
        tiles of 4 MiB.
      precision: the precision of products, as in `jnp.dot`. bf16 operands multiply in one pass with f32 sums. For f32
        operands the default is "highest", since accelerators would round them to bf16 or TF32. If hidden states are
        bf16 and the kernel is f32, both count as f32; `kernel.astype(hidden.dtype)` avoids the cost.
      gradient_sum_dtype: the dtype in which gradients of parameters are summed over devices: "float32", or "parameter"
        for the parameter's own dtype. bf16 sums send fewer bytes; their rms error is 0.3% over 4 devices.
      follow_mask: compute only the tokens that count; True by default. False computes all tokens. If nearly all of
        them count that takes less memory on accelerators, or, on TPUs with few features, less time and more memory.
      deterministic: a token's log-prob and entropy have the same bits whatever else is in the batch, and on tp = 1, 2,
        4 and 8 if 8 divides the number of columns and FSDP does not shard them; for one platform, jax version and
        kernel dtype. Losses take two passes. The page "Numbers and bits" has the costs, and what was tested.
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

    whole: bool  # a chunk in all of the device's columns at once, as accelerators want it; CPUs want tiles in caches
    one_pass: int  # the default memory of one pass, in bytes
    tile: int  # bytes of the f32 logits of a tile of the forward
    tokens: int  # the most tokens of a chunk of the forward
    group: int  # the most tokens whose dlogits fill one array
    columns: int  # of a block of the second pass
    rings: int  # the most devices around which gradients are summed beside the products that make them; 0 for none
    upcast: bool  # bf16 is multiplied as f32, and moved as bits: XLA for CPUs does both slowly in bf16


def _accelerator(kind: str, columns: int, tile: int = 150, tokens: int = 1024, rings: int = 4) -> Profile:
    """One pass may take an eighth of the memory. On a v5e or v6e 75 MiB of logits stay in VMEM, and rings of 16 pay."""
    device = known_device(kind)
    memory = 16 * GIB if device is None else device.memory
    return Profile(True, memory // 8, tile * MIB, tokens, 8192, columns, rings, upcast=False)


CPU = Profile(False, 48 * MIB, 4 * MIB, 1024, 2048, 512, rings=0, upcast=True)
# A key is a part of a device's kind, since described devices do not report their memory. The last key fits them all.
PROFILES = {
    "cpu": CPU,
    "TPU v4": _accelerator("TPU v4", 1536),
    **{kind: _accelerator(kind, 2048, tile=75, rings=16) for kind in ("TPU v5 lite", "TPU v5e")},
    "TPU v5": _accelerator("TPU v5", 1536),
    **{kind: _accelerator(kind, 3072, tile=75, tokens=2048, rings=16) for kind in ("TPU v6 lite", "TPU v6e")},
    "TPU7x": _accelerator("TPU7x", 2048),
    # a slice of columns is copied before it is multiplied: few tokens by all columns of a vocabulary up to 155k. On an
    # H100 two passes in blocks of 1152 columns take a tenth longer: each block adds to all gradients of features
    **{kind: _accelerator(kind, 4608, tile=304, tokens=512, rings=0) for kind in ("H100", "H200", "B200", "")},
}


def device_kind(parallel: ParallelMesh | ShardAxes | None, x: Any) -> str:
    """The kind of the mesh's devices. Inside a `shard_map` its mesh tells, else the devices on which x lies."""
    if isinstance(parallel, ParallelMesh):
        return str(parallel.mesh.devices.flat[0].device_kind)
    for mesh in (jax.sharding.get_abstract_mesh(), getattr(jax.typeof(x).sharding, "mesh", None)):
        device = getattr(mesh, "abstract_device", None)  # has no platform in JAX 0.10.0
        if device is not None:
            return str(device.device_kind)
    return str(jax.devices()[0].device_kind)


@dataclasses.dataclass(frozen=True)
class HeadCall:
    """The static part of a call to a head, checked."""

    axes: ShardAxes
    v_dim: int  # the kernel's dimension of the vocabulary, as a device multiplies it
    transposed: bool  # the caller's kernel is the transpose of that
    h_names: Names  # mesh axes that shard the kernel's H; it is gathered over all of them
    v_names: Names  # mesh axes that shard the kernel's V; the tensor axes may be among them
    sequence_parallel: bool  # hidden states are sharded by position over the tensor axis
    transform: Transform
    scales: tuple[float, ...]  # the factor of each product: of the kernel's, the adapter's, the bias's
    vocab_size: int  # columns of the whole vocabulary without padding
    asked: Asked
    profile: Profile
    precision: Precision | None  # as in `jnp.dot`; None means "highest" for f32 operands
    # these and the precision: see `HeadOptions`
    gradient_sum_dtype: SumDtype
    memory: int | None
    follow_mask: bool  # true in deterministic calls
    deterministic: bool  # tiles do not depend on the number of tokens, nor on tp where `border.parts_of` allows
    heads: int  # that share the memory
    copied: bool  # parameters come as one copy per device, `[D, ...]`; their gradients are summed later

    @property
    def gathered_v(self) -> Names:
        """The data axes that shard the vocabulary beside the tensor axes; the kernel is gathered over them."""
        return tuple(name for name in self.v_names if name not in self.axes.tensor)

    @property
    def shared(self) -> bool:
        """Whether the devices of a tensor axis hold the same columns, of which each works on a window."""
        return bool(self.axes.tensor) and not set(self.axes.tensor) & set(self.v_names)

    @property
    def fixed_chunk(self) -> int:
        """The tokens of each chunk of a deterministic call."""
        return 1024 if self.profile.whole else 256


class Prepared(NamedTuple):
    """A checked call with its arrays."""

    call: HeadCall
    inputs: Inputs
    specs: Inputs | None  # PartitionSpecs for `shard_call`; None without a mesh
    tokens: tuple[int, int]  # [R, T]


def as_id_sets(what: str, ids: Any, tokens: tuple[int, ...]) -> Any:
    """Sets of ids, K at each position, as `i32[R, T, K]`; None stays None."""
    if ids is None:
        return None
    check_array(what, ids)
    good = ids.ndim == 3 and ids.shape[:2] == tokens and ids.shape[2] > 0
    check(what, f"shape {ids.shape}", good, f"[R, T, K] with [R, T] = {tokens}")
    return as_token_ids(ids)


def as_logit_stats(logit_stats: Any) -> tuple[LogitStat, ...]:
    """The names, each once and in one order."""
    names = get_args(LogitStat)
    several = isinstance(logit_stats, Collection) and not isinstance(logit_stats, str)
    good = several and set(logit_stats) <= set(names)
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
        x = getattr(stats, field.name)
        if field.name == "entropy_mode" or (x is None and field.name != "log_probs"):
            continue
        name, of_ids = f"stats.{field.name}", field.name in _OF_IDS
        check_array(name, x)
        good = x.shape[: len(shape)] == shape and x.ndim == len(shape) + of_ids
        check(name, f"shape {x.shape}", good, f"the batch's, {shape} and K" if of_ids else f"the batch's, {shape}")
