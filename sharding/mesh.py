"""A device mesh and the role that each of its axes plays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .axes import Names, ShardAxes, axis_names
from .axis_rules import roles_of_rules
from .checks import check_flag
from .placement import place

Role = str | Sequence[str] | EllipsisType | None
_CONVENTION = {
    "data": ("dp", "data", "replica"),
    "context": ("cp", "context", "sequence", "sp"),
    "tensor": ("tp", "tensor", "model"),
    "fsdp": ("fsdp",),
}
_BY_TRAFFIC = ("data", "fsdp", "context", "tensor")  # from the least to the most


@dataclasses.dataclass(frozen=True, init=False)
class ParallelMesh:
    """A `jax.sharding.Mesh` and the role of each of its axes; axis names are the caller's.

    A role takes a name, a tuple of names, or None for no axis. A role that is not given takes the
    axes of its usual names, except those given to another role. Axes of size 1 have no role. Axes
    may be Auto or Explicit.

    Args:
      mesh: the device mesh (`jax.make_mesh`).
      data: axes that shard the rows of a batch; dp, data, replica. Axes of `fsdp` that are not in
        `context` are added.
      context: axes that shard the positions of a row; cp, context, sequence, sp.
      tensor: axes that shard the vocabulary; tp, tensor, model.
      fsdp: axes over which a head kernel is sharded beside `tensor`; fsdp.
      replicated: axes along which every device does the same work.
      sequence_parallel: hidden states arrive with positions sharded over `tensor` too.
      context_layout: "contiguous", "zigzag", "zigzag_per_segment", "striped", or one that was
        registered.

    Raises:
      ValueError: an axis that the mesh lacks or that has two roles, one of size above 1 without a
        role, a bad layout.

    Example:
      >>> parallel = ParallelMesh(jax.make_mesh((1, jax.device_count()), ("fsdp", "tp")))  # as Tunix has them
      >>> parallel.data, parallel.tensor == (("tp",) if jax.device_count() > 1 else ())
      ((), True)
    """

    mesh: Mesh
    data: Names
    context: Names
    tensor: Names
    fsdp: Names
    replicated: Names
    sequence_parallel: bool
    context_layout: str

    def __init__(
        self,
        mesh: Mesh,
        data: Role = ...,
        context: Role = ...,
        tensor: Role = ...,
        fsdp: Role = ...,
        replicated: str | Sequence[str] | None = (),
        sequence_parallel: bool = False,
        context_layout: str = "contiguous",
    ) -> None:
        if not isinstance(mesh, Mesh):
            raise TypeError(f"mesh: got {type(mesh).__name__}, expected jax.sharding.Mesh")
        roles = {
            "data": data,
            "context": context,
            "tensor": tensor,
            "fsdp": fsdp,
            "replicated": replicated,
        }
        axes_by_role = {
            role: axis_names(value, role)
            for role, value in roles.items()
            if not isinstance(value, EllipsisType)
        }
        for role, names in axes_by_role.items():
            for name in names:
                if name not in mesh.shape:
                    raise ValueError(
                        f"{role}: got axis {name!r}, expected one of the mesh's axes"
                        f" {tuple(mesh.shape)}"
                    )
        axes = ShardAxes(
            **_roles_of(mesh, axes_by_role),
            sequence_parallel=sequence_parallel,
            context_layout=context_layout,
        )
        vars(self).update(mesh=mesh, **vars(axes))  # the class is frozen
        if lost := [
            name for name, size in mesh.shape.items() if size > 1 and name not in axes.used
        ]:
            described = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
            raise ValueError(
                f"mesh: got axes {described}, expected a role for each;"
                f" {', '.join(map(repr, lost))} has none. Pass data=, context=, tensor= or fsdp=,"
                f" or replicated={tuple(lost)} for the same work on each device along it"
            )

    @classmethod
    def from_rules(
        cls,
        mesh: Mesh,
        rules: Sequence[Sequence[Any]],
        *,
        batch: str | None = None,
        length: str | None = None,
        embed: str | None = None,
        vocab: str | None = None,
        replicated: str | Sequence[str] | None = (),
        sequence_parallel: bool = False,
        context_layout: str = "contiguous",
    ) -> ParallelMesh:
        """A `ParallelMesh` with the roles that logical axis rules imply: MaxText's
        `logical_axis_rules`, Flax's rules.

        As in Flax, the first rule whose axes no other dimension of the same array uses applies.

        Args:
          mesh: the device mesh.
          rules: pairs of a logical name and its mesh axes: a name, several, or None. Axes that the
            mesh lacks, or has in size 1, are left out.
          batch: the logical name of rows; by default the first of
            activation_embed_and_logits_batch, activation_batch and batch that has a rule.
          length: the logical name of positions; by default activation_length or length.
          embed: the logical name of a head kernel's H; by default embed_vocab or embed.
          vocab: the logical name of its V; by default vocab.
          replicated, sequence_parallel, context_layout: see `ParallelMesh`.

        Raises:
          ValueError: rules that are not pairs, a name without a rule, an axis that shards both
            tokens and the vocabulary, an axis that shards a kernel's rows but no tokens, an axis of
            size above 1 without a role.

        Example:
          >>> mesh = jax.make_mesh((jax.device_count(), 1), ("fsdp", "tensor"))
          >>> rules = [("batch", ("data", "fsdp")), ("embed", "fsdp"), ("vocab", "tensor")]
          >>> ParallelMesh.from_rules(mesh, rules) == ParallelMesh(mesh, fsdp="fsdp")
          True
        """
        logical_names = {"batch": batch, "length": length, "embed": embed, "vocab": vocab}
        roles = roles_of_rules(rules, mesh.shape, logical_names)
        return cls(mesh, *roles, replicated, sequence_parallel, context_layout)

    @property
    def axes(self) -> ShardAxes:
        """The same roles for code inside a `shard_map` over this mesh."""
        roles = self.data, self.context, self.tensor, self.fsdp, self.replicated
        return ShardAxes(*roles, self.sequence_parallel, self.context_layout)

    def size(self, names: Names) -> int:
        """The number of shards over `names`."""
        return math.prod(self.mesh.shape[name] for name in names)

    @property
    def data_size(self) -> int:
        return self.size(self.data)

    @property
    def context_size(self) -> int:
        return self.size(self.context)

    @property
    def tensor_size(self) -> int:
        return self.size(self.tensor)

    @property
    def is_explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    @property
    def rows_spec(self) -> P:
        """The spec of per-segment arrays `[R, S]`."""
        return P(self.data)

    @property
    def tokens_spec(self) -> P:
        """The spec of per-token arrays `[R, T]`."""
        return P(self.data, self.context)

    @property
    def hidden_spec(self) -> P:
        """The spec of hidden states `[R, T, H]`."""
        if self.sequence_parallel:
            return P(self.data, self.context + self.tensor, None)
        return P(self.data, self.context, None)

    @property
    def logits_spec(self) -> P:
        """The spec of logits `[R, T, V]`."""
        return P(self.data, self.context, self.tensor)

    def kernel_spec(self, kernel_layout: str = "hv") -> P:
        """The spec of a head kernel, `[H, V]` for "hv" and `[V, H]` for "vh"."""
        if kernel_layout == "hv":
            return P(self.fsdp, self.tensor)
        return P(self.tensor, self.fsdp)

    def sharding(self, spec: P) -> NamedSharding:
        """The NamedSharding of a spec, in the form in which `jax.jit` returns it: on Auto axes
        without None at its end.

        With the other form, `jit` would compile a step a second time when it is given its own
        results.
        """
        entries = list(spec)
        while entries and entries[-1] is None and not self.is_explicit:
            entries.pop()
        return NamedSharding(self.mesh, P(*entries))


def check_parallel(parallel: object, expected: str = "ParallelMesh, ShardAxes or None") -> None:
    """Raises unless `parallel` is what `expected` names."""
    kinds = {"ParallelMesh": ParallelMesh, "ShardAxes": ShardAxes, "None": type(None)}
    if isinstance(parallel, tuple(kind for name, kind in kinds.items() if name in expected)):
        return
    got = "None" if parallel is None else type(parallel).__name__
    roles = "; ParallelMesh(mesh) gives its axes their roles" if isinstance(parallel, Mesh) else ""
    raise TypeError(f"parallel: got {got}, expected {expected}{roles}")


def _roles_of(mesh: Mesh, axes_by_role: Mapping[str, Names]) -> dict[str, Names]:
    """The axes of each role: those of `axes_by_role`, else those with the usual names.

    Axes of size 1 are left out.
    """
    # one axis may shard both tokens and a kernel, so fsdp takes no axis away from other roles
    claimed = {name for role, names in axes_by_role.items() if role != "fsdp" for name in names}
    roles: dict[str, Names] = {}
    for role, usual in _CONVENTION.items():
        taken = claimed
        if role == "fsdp":
            taken = claimed - {*axes_by_role.get("data", ()), *axes_by_role.get("context", ())}
        by_name = tuple(name for name in mesh.axis_names if name in usual and name not in taken)
        roles[role] = axes_by_role.get(role, by_name)
    fsdp_rows = [name for name in roles["fsdp"] if name not in roles["context"]]
    if "data" in axes_by_role:
        roles["data"] += tuple(name for name in fsdp_rows if name not in roles["data"])
    else:
        roles["data"] = tuple(
            name for name in mesh.axis_names if name in (*roles["data"], *fsdp_rows)
        )
    roles["replicated"] = axes_by_role.get("replicated", ())
    return {
        role: tuple(name for name in names if mesh.shape[name] > 1) for role, names in roles.items()
    }


def make_parallel_mesh(
    description: str,
    *,
    context_layout: str = "contiguous",
    devices: Sequence[jax.Device] | None = None,
    explicit: bool = False,
    sequence_parallel: bool = False,
) -> ParallelMesh:
    """A `ParallelMesh` from text such as "dp=2,cp=2,tp=2", whatever the order of its axes and the
    shape of the slice.

    Tensor axes take the fastest links, then context axes; data axes span slices. `links` tells
    which each axis has.

    Args:
      description: comma-separated `axis=size`, with the usual names of axes: see `ParallelMesh`.
      context_layout, sequence_parallel: see `ParallelMesh`.
      devices: the devices to use; all of them by default.
      explicit: make the axes Explicit rather than Auto.

    Raises:
      ValueError: unreadable text, an unknown axis, sizes whose product is not the number of
        devices, uneven slices.

    Example:
      >>> make_parallel_mesh("dp=1,cp=1,tp=1", devices=jax.devices()[:1]).tokens_spec == P(None, None)
      True
    """
    if not isinstance(description, str):
        raise TypeError(f"description: got {description!r}, expected text like 'dp=2,cp=2,tp=2'")
    if devices is not None and not isinstance(devices, Iterable):
        raise TypeError(f"devices: got {devices!r}, expected a sequence of jax.Device")
    check_flag("explicit", explicit)
    if devices is None:
        devices = jax.devices()
    devices = list(devices)
    sizes = _sizes(description)
    total = math.prod(sizes.values())
    if total != len(devices):
        product = "*".join(map(str, sizes.values()))
        raise ValueError(
            f"mesh: got sizes {product}={total} in {description!r}, expected {len(devices)} devices"
        )
    traffic = [name for role in _BY_TRAFFIC for name in sizes if name in _CONVENTION[role]]
    placed = place([sizes[name] for name in traffic], devices).transpose(
        [traffic.index(name) for name in sizes]
    )
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = Mesh(placed, tuple(sizes), axis_types=(kind,) * len(sizes))
    return ParallelMesh(mesh, sequence_parallel=sequence_parallel, context_layout=context_layout)


def _sizes(description: str) -> dict[str, int]:
    """The axes and sizes of text such as "dp=2,cp=2,tp=2"."""
    usual = [name for names in _CONVENTION.values() for name in names]
    sizes: dict[str, int] = {}
    for part in description.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not size.isdecimal() or int(size) < 1 or name in sizes:
            raise ValueError(
                f"mesh: got {part!r} in {description!r}, expected text like 'dp=2,cp=2,tp=2'"
            )
        if name not in usual:
            raise ValueError(f"mesh: got axis {name!r}, expected one of {', '.join(usual)}")
        sizes[name] = int(size)
    return sizes
