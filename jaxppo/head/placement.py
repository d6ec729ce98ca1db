"""How a head's hidden states and kernel lie on a mesh: from the caller's specs, or the mesh's defaults, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxppo.head.columns import Columns
from jaxppo.head.head import Head
from jaxppo.head.ops.tile import Form
from jaxppo.head.stats import check_vocab_size
from jaxppo.head.varying import Summing
from jaxppo.sharding import ParallelMesh, ShardAxes, check_parallel, varying

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class HeadPlacement:
    """The specs of one call to a head.

    Args:
      layout: "hv" or "vh".
      kernel_spec: of the kernel.
      hidden_spec: of the hidden states, on a mesh.
      sequence_parallel: hidden states are sharded by position over the tensor axis.
      position_shards: how many times fewer positions the given hidden states have than targets.
    """

    layout: str
    kernel_spec: P
    hidden_spec: P | None
    sequence_parallel: bool
    position_shards: int

    @property
    def _v_dim(self) -> int:
        return 1 if self.layout == "hv" else 0

    def tokens(self, hidden: Any) -> tuple[int, int]:
        """[R, T] of the targets that belong to the hidden states."""
        return hidden.shape[0], hidden.shape[1] * self.position_shards

    def specs(self, p: ParallelMesh) -> dict[str, P | None]:
        """For `shard_call`, of the arguments of a head by name."""
        v_entry = self.kernel_spec[self._v_dim]
        vary = {"hidden": self.hidden_spec, "kernel": self.kernel_spec, "bias": P(v_entry)}
        return vary | {"lora_a": P(), "lora_b": P(None, v_entry)}

    def columns(
        self, axes: ShardAxes, head: Head, kernel: Any, summing: Summing, precision: str | None
    ) -> tuple[Columns, Form]:
        """What is static about the head on a device.

        Args:
          axes: the roles of the mesh axes.
          head: its static fields are read.
          kernel: as the device holds it.
          summing: how gradients of parameters are summed over devices.
          precision: of products.
        """
        h_names, v_names = (entry_names(self.kernel_spec[dim]) for dim in (1 - self._v_dim, self._v_dim))
        v_names = tuple(n for n in v_names if n in varying(kernel))
        vocab_size = check_vocab_size(head.vocab_size, kernel.shape[self._v_dim] * axes.size(v_names))
        lora_scale = 1.0 if head.lora is None else head.lora.scale
        form = Form(self.layout, head.transform, lora_scale, precision, vocab_size)
        return Columns(axes, self._v_dim, h_names, v_names, vocab_size, summing), form


def entry_names(entry: Any) -> Names:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def place_head(
    parallel: ParallelMesh | ShardAxes | None, name: str, hidden: Any, head: Head, hidden_spec: P | None
) -> HeadPlacement:
    """The specs of a head, given or by default, with every disagreement between shapes and specs raised."""
    check_parallel(parallel)
    head.check(name, hidden.shape[2])
    kernel, v_dim = head.kernel, head.v_dim
    roles = parallel.axes if isinstance(parallel, ParallelMesh) else parallel or ShardAxes()
    on_mesh = isinstance(parallel, ParallelMesh)
    kernel_spec = _kernel_spec(parallel, roles, hidden, kernel, v_dim, head.spec)
    gathered = entry_names(kernel_spec[1 - v_dim])
    H = kernel.shape[1 - v_dim] * (1 if on_mesh else roles.size(gathered))
    if hidden.shape[2] != H:
        raise ValueError(
            f"{name}.kernel: got shape {kernel.shape} with layout {head.layout!r}, expected {hidden.shape[2]} rows of "
            f"H, as in hidden {hidden.shape}"
        )
    if isinstance(parallel, ShardAxes):
        _check_part(name, parallel, head, v_dim)
    hidden_spec = _hidden_spec(parallel, hidden, hidden_spec)
    sequence_parallel = bool(roles.tensor) and roles.sequence_parallel
    if hidden_spec is not None:
        sequence_parallel = bool(set(entry_names(hidden_spec[1])) & set(roles.tensor))
    shards = roles.size(roles.tensor) if sequence_parallel and not on_mesh else 1
    assert head.layout is not None  # Head sees to it
    return HeadPlacement(head.layout, kernel_spec, hidden_spec, sequence_parallel, shards)


def _check_part(name: str, axes: ShardAxes, head: Head, v_dim: int) -> None:
    """Raises where a kernel that varies over the tensor axis can be no part of the vocabulary, but all of it."""
    own, shards = head.kernel.shape[v_dim], axes.size(axes.tensor)
    is_part = bool(set(axes.tensor) & varying(head.kernel))
    if is_part and head.vocab_size is not None and head.vocab_size <= own * (shards - 1):
        raise ValueError(
            f"{name}.vocab_size: got {head.vocab_size} with {own} columns on each of {shards} tensor shards, the last "
            "of which would hold padding alone, expected each device's part of the vocabulary; a kernel that was "
            "gathered over the tensor axis is to be invariant over it: all_gather(..., to='invarying')"
        )


def _full(spec: P, rank: int) -> P:
    return P(*spec, *[None] * (rank - len(spec)))


def _kernel_spec(parallel: Any, roles: ShardAxes, hidden: Any, kernel: Any, v_dim: int, given: P | None) -> P:
    if given is not None:
        return _checked_kernel_spec(roles, _full(given, 2), v_dim)
    if isinstance(parallel, ParallelMesh):
        if parallel.is_explicit and (spec := getattr(jax.typeof(kernel).sharding, "spec", None)) is not None:
            return _checked_kernel_spec(roles, _full(spec, 2), v_dim)
        h_entry, v_entry = parallel.kernel_spec("hv")
        if kernel.shape[v_dim] % parallel.tensor_size:
            v_entry = None  # such a kernel cannot be sharded by JAX, and arrives whole
    else:
        sharded_h = roles.fsdp and kernel.shape[1 - v_dim] != hidden.shape[2]
        h_entry, v_entry = (roles.fsdp if sharded_h else None), roles.tensor or None
    return P(h_entry, v_entry) if v_dim == 1 else P(v_entry, h_entry)


def _checked_kernel_spec(roles: ShardAxes, spec: P, v_dim: int) -> P:
    h_names, v_names = entry_names(spec[1 - v_dim]), entry_names(spec[v_dim])
    if set(h_names) & set(roles.tensor):
        raise ValueError(f"head.spec: got {spec}, expected the tensor axes {roles.tensor} on the vocabulary only")
    if set(v_names) & set(roles.tensor) and not set(roles.tensor) <= set(v_names):
        raise ValueError(f"head.spec: got {spec}, expected all of the tensor axes {roles.tensor} or none")
    return spec


def _hidden_spec(parallel: Any, hidden: Any, given: P | None) -> P | None:
    if given is not None:
        given = _full(given, 3)
        if given[2] is not None:
            raise ValueError(f"hidden_spec: got {given}, expected the hidden dimension unsharded")
        return given
    return parallel.hidden_spec if isinstance(parallel, ParallelMesh) else None
