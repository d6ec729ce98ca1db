"""All that is static in a call to a head, its arrays, and the sizes that suit a kind of device."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple, TypedDict

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxppo.head.head import Entropy, LogitStat, Transform
from jaxppo.sharding import ParallelMesh, ShardAxes, known_device

Names = tuple[str, ...]
Precision = Literal["default", "high", "highest"]
SumDtype = Literal["float32", "parameter"]
GIB, MIB = 2**30, 2**20


class HeadOptions(TypedDict, total=False):
    """Options of how a head computes; they change its results by rounding only.

    Args:
      hidden_spec: the PartitionSpec of hidden states, if they are not sharded as `parallel.hidden_spec`. They are
        resharded like the batch's tokens, which `sharding.audit` notes. Inside a `shard_map` another spec is refused.
      memory: bytes that a device may spend beside its results. By default an eighth of an accelerator's memory for
        one pass, 0.3 GiB (and dhidden in f32 beyond 8192 tokens) for two; on CPUs 48 MiB and tiles of 4 MiB.
      precision: the precision of products, as in `jnp.dot`. bf16 operands multiply in one pass with f32 sums. For f32
        operands the default is "highest", since accelerators would round them to bf16 or TF32. On a TPU v5p the
        products then take 6.5 times the time of bf16. If hidden states are bf16 and the kernel is f32, both count as
        f32, and the products take 4.5 times the time (two passes, estimated). `kernel.astype(hidden.dtype)` avoids
        that. An "f32 head" is a kernel in f32 at that cost; the logits are always f32.
      gradient_sum_dtype: the dtype in which gradients of parameters are summed over devices: "float32", or "parameter"
        for the parameter's own dtype. bf16 sums send two thirds of the bytes on TPUs and half elsewhere. They lose 0.3%
        rms over 4 devices and 1.4% over 128.
      follow_mask: compute only the tokens that count; True by default. False computes all tokens, which takes less
        memory on accelerators if nearly all tokens count.
      deterministic: a token's log-prob and entropy have the same bits whatever else is in the batch, and on tp = 1, 2,
        4 and 8, for one platform, jax version, kernel dtype and `memory`. Tiles then do not depend on the number of
        tokens, which costs time if there are few, and losses take two passes. Each eighth of the vocabulary is summed
        apart. The bits agree for these tp only if 8 divides the number of columns and FSDP does not shard them. With
        `logit_stats` or `top_k` the bits may differ from those without. On TPUs and GPUs the code is the same, but
        nobody has tested the bits there.
    """

    hidden_spec: P | None
    memory: int | None
    precision: Precision | lax.Precision | None
    gradient_sum_dtype: SumDtype | DTypeLike
    follow_mask: bool
    deterministic: bool


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


class Inputs(NamedTuple):
    """All arrays of a call, or their PartitionSpecs; None for those not given."""

    hidden: Any  # [R, T, H]
    kernel: Any  # [H, V] or [V, H]
    bias: Any = None  # [V]
    lora_a: Any = None  # [H, r], or of several adapters [A, H, r]
    lora_b: Any = None  # [r, V] or [A, r, V]
    targets: Any = None  # i32[R, T]; None for a divergence of two heads
    nucleus_ids: Any = None  # i32[R, T, K]
    ids: Any = None  # i32[R, T, K]
    counts: Any = None  # bool[R, T], the tokens that are computed; None for all
    temperature: Any = None  # f32, a scalar or [R, T]; None for 1
    adapter_ids: Any = None  # i32[R], if there are several adapters


@dataclasses.dataclass(frozen=True)
class Profile:
    """The sizes that suit a kind of device.

    Args:
      whole: a chunk is computed in all of the device's columns at once, as accelerators want it. CPUs want tiles that
        fit their caches.
      one_pass: the default memory of one pass, in bytes.
      tile: bytes of the f32 logits of a tile of the forward.
      tokens: the most tokens of a chunk of the forward.
      group: the most tokens whose dlogits fill one array.
      columns: columns of a block of the second pass.
      rings: gradients are summed over devices around rings, beside the products that make them.
      upcast: bf16 is multiplied as f32, and moved as bits: XLA for CPUs does both slowly in bf16.
    """

    whole: bool
    one_pass: int
    tile: int
    tokens: int
    group: int
    columns: int
    rings: bool
    upcast: bool


def _accelerator(kind: str, columns: int, tile: int = 150, tokens: int = 1024, rings: bool = True) -> Profile:
    """One pass may take an eighth of the memory. 75 MiB of logits stay in the VMEM of a v5e or v6e."""
    device = known_device(kind)
    memory = 16 * GIB if device is None else device.memory
    return Profile(True, memory // 8, tile * MIB, tokens, 8192, columns, rings, upcast=False)


CPU = Profile(False, 48 * MIB, 4 * MIB, 1024, 2048, 512, rings=False, upcast=True)
# A key is a part of a device's kind, since described devices do not report their memory. The last key fits them all.
PROFILES = {
    "cpu": CPU,
    "TPU v4": _accelerator("TPU v4", 1536),
    "TPU v5 lite": _accelerator("TPU v5 lite", 2048, tile=75),
    "TPU v5": _accelerator("TPU v5", 1536),
    "TPU v6 lite": _accelerator("TPU v6 lite", 3584, tile=75, tokens=2048),
    "TPU7x": _accelerator("TPU7x", 2048),
    # a slice of columns is copied before it is multiplied: few tokens by all columns of a vocabulary up to 155k
    **{kind: _accelerator(kind, 1152, tile=304, tokens=512, rings=False) for kind in ("H100", "H200", "B200", "")},
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
    """The static part of a call to a head, checked.

    Args:
      axes: the roles of the mesh axes.
      v_dim: the kernel's dimension of the vocabulary, as a device multiplies it.
      transposed: the caller's kernel is the transpose of that.
      h_names: mesh axes that shard the kernel's H; it is gathered over all of them.
      v_names: mesh axes that shard the kernel's V; the tensor axes may be among them.
      sequence_parallel: hidden states are sharded by position over the tensor axis.
      transform: the elementwise transform of logits, before the temperature.
      scales: the factor of each product: of the kernel's, the adapter's, the bias's.
      vocab_size: the number of columns of the whole vocabulary without padding.
      asked: the statistics to compute.
      profile: the sizes for the devices.
      precision: the precision of products, as in `jnp.dot`; None means "highest" for f32 operands.
      sum_dtype: the dtype in which gradients of parameters are summed over devices.
      memory: bytes that a device may spend beside its results; None for the default.
      follow_mask: the work follows the tokens that count.
      deterministic: tiles do not depend on the number of tokens, nor on the tensor axis where `border.parts_of` allows.
      heads: the number of heads that share the memory.
      copied: parameters come as one copy per device, `[D, ...]`; their gradients are summed later.
    """

    axes: ShardAxes
    v_dim: int
    transposed: bool
    h_names: Names
    v_names: Names
    sequence_parallel: bool
    transform: Transform
    scales: tuple[float, ...]
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
    """A checked call with its arrays, and how they are sharded."""

    call: HeadCall
    inputs: Inputs
    specs: Inputs | None
    """PartitionSpecs for `shard_call`; None if no mesh is given."""
    tokens: tuple[int, int]
    """[R, T]."""
