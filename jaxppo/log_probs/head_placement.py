"""How a head's hidden states and kernel lie on a mesh: from the caller's specs, or the mesh's defaults, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from jaxppo._sharding import ParallelMesh, ShardAxes, check_parallel, varying
from jaxppo.log_probs.head import Head
from jaxppo.log_probs.stats import check_floating, check_vocab_size

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

    def check_hidden(self, hidden: Any) -> tuple[int, int]:
        """[R, T] of the targets that belong to the hidden states."""
        return hidden.shape[0], hidden.shape[1] * self.position_shards

    def specs(self, p: ParallelMesh) -> list[P | None]:
        """For `shard_call`, in the order of the head's arguments."""
        bias_spec = P(self.kernel_spec[self._v_dim])
        tokens = p.tokens_spec
        return [self.hidden_spec, self.kernel_spec, bias_spec, tokens, tokens, tokens, P()]

    def head(
        self,
        axes: ShardAxes,
        hidden: Any,
        kernel: Any,
        softcap: float | None,
        vocab_size: int | None,
        block_columns: int,
    ) -> Head:
        """The `Head` of a device.

        Args:
          axes: the roles of the mesh axes.
          hidden, kernel: as the device holds them.
          softcap: of the logits.
          vocab_size: None for all columns.
          block_columns: columns of a block.
        """
        h_names, v_names = (entry_names(self.kernel_spec[dim]) for dim in (1 - self._v_dim, self._v_dim))
        v_names = tuple(n for n in v_names if n in varying(kernel))
        all_columns = kernel.shape[self._v_dim] * axes.size(v_names)
        vocab_size = check_vocab_size(vocab_size, all_columns)
        return Head(axes, self.layout, h_names, v_names, vocab_size, softcap, block_columns)


def entry_names(entry: Any) -> Names:
    """The mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def place_head(
    parallel: ParallelMesh | ShardAxes | None,
    hidden: Any,
    kernel: Any,
    layout: str,
    bias: Any,
    kernel_spec: P | None,
    hidden_spec: P | None,
) -> HeadPlacement:
    """The specs of a head, given or by default, with every disagreement between shapes and specs raised."""
    if layout not in ("hv", "vh"):
        raise ValueError(f"kernel_layout: got {layout!r}, expected 'hv' or 'vh'")
    check_parallel(parallel)
    v_dim = 1 if layout == "hv" else 0
    roles = parallel.axes if isinstance(parallel, ParallelMesh) else parallel or ShardAxes()
    on_mesh = isinstance(parallel, ParallelMesh)
    kernel_spec = _kernel_spec(parallel, roles, hidden, kernel, v_dim, kernel_spec)
    gathered = entry_names(kernel_spec[1 - v_dim])
    H = kernel.shape[1 - v_dim] * (1 if on_mesh else roles.size(gathered))
    if hidden.shape[2] != H:
        raise ValueError(
            f"kernel: got shape {kernel.shape} with layout {layout!r}, expected {hidden.shape[2]} rows of H, "
            f"as in hidden {hidden.shape}"
        )
    if bias is not None and bias.shape != (kernel.shape[v_dim],):
        raise ValueError(
            f"bias: got shape {bias.shape}, expected {(kernel.shape[v_dim],)}, one for each column of kernel"
        )
    if bias is not None:
        check_floating("bias", bias, 1, "[V]")
    hidden_spec = _hidden_spec(parallel, hidden, hidden_spec)
    sequence_parallel = bool(roles.tensor) and roles.sequence_parallel
    if hidden_spec is not None:
        sequence_parallel = bool(set(entry_names(hidden_spec[1])) & set(roles.tensor))
    shards = roles.size(roles.tensor) if sequence_parallel and not on_mesh else 1
    return HeadPlacement(layout, kernel_spec, hidden_spec, sequence_parallel, shards)


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
        raise ValueError(f"kernel_spec: got {spec}, expected the tensor axes {roles.tensor} on the vocabulary only")
    if set(v_names) & set(roles.tensor) and not set(roles.tensor) <= set(v_names):
        raise ValueError(f"kernel_spec: got {spec}, expected all of the tensor axes {roles.tensor} or none")
    return spec


def _hidden_spec(parallel: Any, hidden: Any, given: P | None) -> P | None:
    if given is not None:
        given = _full(given, 3)
        if given[2] is not None:
            raise ValueError(f"hidden_spec: got {given}, expected the hidden dimension unsharded")
        return given
    return parallel.hidden_spec if isinstance(parallel, ParallelMesh) else None
