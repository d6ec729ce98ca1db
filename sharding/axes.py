"""The roles of mesh axes, for code that runs on one device's shards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax import lax

from .checks import check_flag

Names = tuple[str, ...]
Tree = TypeVar("Tree")  # a pytree of arrays
LAYOUTS: dict[str, Any] = {}  # Layouts by name, which import this module; `register_layout` adds to them


def axis_names(value: str | Sequence[str] | None) -> Names:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def check_names(role: str, value: object) -> None:
    names = value if isinstance(value, (tuple, list)) else [value]
    if value is not None and not all(isinstance(name, str) for name in names):
        raise TypeError(f"{role}: got {value!r}, expected an axis name, a tuple of them or None")


def check_layout(layout: str, name: str = "context_layout") -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"{name}: got {layout!r}, expected one of {', '.join(LAYOUTS)}")


@dataclasses.dataclass(frozen=True, init=False)
class ShardAxes:
    """The roles of mesh axes, for code that already runs inside a `shard_map` (with `check_vma=True`).

    Without arguments no axis has a role, and every collective over a role does nothing: a per-shard function
    given `ShardAxes()` is the one-device function.

    Args:
      data: axes that the rows of a batch are sharded over.
      context: axes that the positions of a row are sharded over.
      tensor: axes that the vocabulary is sharded over.
      fsdp: axes that a head kernel is sharded over beside `tensor`; each is a data or context axis for tokens.
      replicated: axes along which every device does the same work.
      sequence_parallel: hidden states arrive with the positions sharded over `tensor` too.
      context_layout: which positions of a row each context shard holds.

    Raises:
      ValueError: an axis in two roles, an fsdp axis that does not shard tokens, an unknown layout.

    Example:
      >>> ShardAxes(data="dp", context=None, tensor=("tp",)).tokens
      ('dp',)
    """

    data: Names
    context: Names
    tensor: Names
    fsdp: Names
    replicated: Names
    sequence_parallel: bool
    context_layout: str

    def __init__(
        self,
        data: str | Sequence[str] | None = (),
        context: str | Sequence[str] | None = (),
        tensor: str | Sequence[str] | None = (),
        fsdp: str | Sequence[str] | None = (),
        replicated: str | Sequence[str] | None = (),
        sequence_parallel: bool = False,
        context_layout: str = "contiguous",
    ) -> None:
        roles = {"data": data, "context": context, "tensor": tensor, "fsdp": fsdp, "replicated": replicated}
        fields: dict[str, Any] = {role: axis_names(value) for role, value in roles.items()}
        fields |= {"sequence_parallel": sequence_parallel, "context_layout": context_layout}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        check_flag("sequence_parallel", self.sequence_parallel)
        check_layout(self.context_layout)
        used = self.data + self.context + self.tensor + self.replicated
        if len(set(used)) != len(used):
            raise ValueError(
                f"data, context, tensor, replicated: got {self.data}, {self.context}, {self.tensor}, "
                f"{self.replicated}, expected no axis in two roles"
            )
        if not set(self.fsdp) <= set(self.tokens):
            raise ValueError(f"fsdp: got {self.fsdp}, expected a subset of the data and context axes {self.tokens}")

    @property
    def tokens(self) -> Names:
        """The axes that tokens are spread over: data, then context."""
        return self.data + self.context

    def size(self, names: Names) -> int:
        """The number of shards over `names`, 1 for none; static. Only inside the `shard_map`."""
        return lax.axis_size(names) if names else 1

    def index(self, names: Names) -> jax.Array | int:
        """This device's place among the shards over `names`, first name slowest; 0 for none."""
        return lax.axis_index(names) if names else 0

    def psum(self, x: Tree, names: Names) -> Tree:
        """The sum of x over the shards of `names`; x itself for none. A replicated x is counted once for each shard."""
        return lax.psum(x, names) if names else x

    def permute(self, x: jax.Array, names: Names, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """x of shard i on shard j, for each pair (i, j) of places as `index` counts them; 0 where nothing arrives.

        `lax.ppermute` counts places in the order of the mesh, whatever the order of the names.
        """
        mesh = jax.sharding.get_abstract_mesh()
        ordered = tuple(name for name in mesh.axis_names if name in names)
        places = np.arange(self.size(names)).reshape([lax.axis_size(name) for name in names])
        places = np.argsort(places.transpose([names.index(name) for name in ordered]).reshape(-1))
        return lax.ppermute(x, ordered, [(int(places[i]), int(places[j])) for i, j in pairs])

    def check_manual(self, what: str) -> None:
        """Raises where an axis with a role is not an axis of the surrounding `shard_map`."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        for name in (*self.tokens, *self.tensor, *self.replicated):
            if name not in manual:
                raise ValueError(
                    f"parallel: got mesh axis {name!r} in {what}, expected axes of the shard_map around this call, "
                    f"{manual}; the shard_map must be over all axes of the mesh"
                )

    def check_vma(self) -> None:
        """Raises where the surrounding `shard_map` has `check_vma=False`, which changes the rules of gradients."""
        for name in self.tokens + self.tensor:
            if not _tracks_varying(name):
                raise ValueError(
                    f"shard_map around this call: got check_vma=False over axis {name!r}, expected check_vma=True; "
                    "without it the gradients of replicated inputs would be wrong by axis sizes; "
                    "in place of a pmap, use a shard_map"
                )

    def check_complete(self, what: str, *arrays: Any) -> None:
        """Raises where arrays differ between devices along a mesh axis that has no role here.

        A sum over devices would leave that axis out and be only a part of the whole. Axes along which no array varies
        are harmless. Under `pmap` and `check_vma=False` JAX does not track varying axes, so any axis without a role
        raises.

        Args:
          what: the name of the sum, for the error.
          *arrays: the arrays that the sum is computed from.
        """
        for name in self.unknown(*arrays):
            roles = "parallel=ShardAxes(data=..., context=...)"
            if not _tracks_varying(name):  # there `check_vma` refuses every role
                roles += " in a shard_map with check_vma=True in its place"
            raise ValueError(
                f"parallel: got no role for mesh axis {name!r} inside a shard_map or pmap, expected one, since "
                f"{what} would be that of one device's part; pass {roles}, or "
                f"ShardAxes(replicated={name!r}) where all devices along it hold the same"
            )

    def unknown(self, *arrays: Any) -> list[str]:
        """The mesh axes without a role here along which arrays differ between devices, see `check_complete`."""
        mesh = jax.sharding.get_abstract_mesh()
        known = {*self.data, *self.context, *self.tensor, *self.replicated}
        leaves = jax.tree.leaves(arrays)
        names = [name for name in mesh.manual_axes if mesh.shape[name] > 1 and name not in known]
        return [name for name in names if any(name in varying(x) for x in leaves) or not _tracks_varying(name)]


def _tracks_varying(name: str) -> bool:
    """Whether the `shard_map` around this call has `check_vma=True`."""
    return name in varying(lax.axis_index(name))


def varying(x: Any) -> frozenset[str]:
    """The manual mesh axes along which x differs from device to device, read from its type."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: jax.Array, names: Names | frozenset[str]) -> jax.Array:
    """x with `names` added to the axes along which it varies; under a gradient this sums over the added ones."""
    missing = tuple(sorted(set(names) - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def unvary(x: jax.Array, names: Names) -> jax.Array:
    """x without `names` among the axes along which it varies.

    The caller must know that x is equal along them. JAX cannot know it, for example after a gather by permutations.
    Nothing is checked or sent. It has no derivative.
    """
    return _unvarying().bind(x, names=names)


@functools.cache
def _unvarying() -> Any:
    from jax.extend.core import Primitive  # imported here because it loads Pallas
    from jax.interpreters import batching, mlir

    equal = Primitive("equal_along")
    equal.def_abstract_eval(
        lambda x, names: x.update(
            manual_axis_type=jax.sharding.ManualAxisType(varying=x.manual_axis_type.varying - set(names))
        )
    )
    equal.def_impl(lambda x, names: x)
    mlir.register_lowering(equal, lambda _, x, names: [x])
    batching.primitive_batchers[equal] = lambda args, dims, names: (equal.bind(*args, names=names), *dims)
    return equal


def vary_like(x: jax.Array, *others: Any) -> jax.Array:
    """x with all varying axes of the arrays `others` added; a loop carry must start with them."""
    return vary(x, frozenset().union(*(varying(leaf) for leaf in jax.tree.leaves(others))))
