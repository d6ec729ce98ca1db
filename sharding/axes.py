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
LAYOUTS: dict[str, Any] = {}  # context layouts by name; `register_layout` adds to them


def axis_names(value: str | Sequence[str] | None, role: str = "spec") -> Names:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, tuple | list) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{role}: got {value!r}, expected an axis name, a tuple of them or None")
    return tuple(value)


def check_layout(layout: str, name: str = "context_layout") -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"{name}: got {layout!r}, expected one of {', '.join(LAYOUTS)}")


@dataclasses.dataclass(frozen=True, init=False)
class ShardAxes:
    """The roles of mesh axes, for code that already runs inside a `shard_map` (with
    `check_vma=True`).

    In `ShardAxes()` no axis has a role, and no function sends anything: it is for one device.

    Args:
      data, context, tensor, replicated: axes as in `ParallelMesh`, but none beside those given.
      fsdp: axes that a head kernel is sharded over beside `tensor`; each is a data or context axis
        for tokens.
      sequence_parallel, context_layout: see `ParallelMesh`.

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
        roles = {
            "data": data,
            "context": context,
            "tensor": tensor,
            "fsdp": fsdp,
            "replicated": replicated,
        }
        # the class is frozen
        vars(self).update({role: axis_names(value, role) for role, value in roles.items()})
        vars(self).update(sequence_parallel=sequence_parallel, context_layout=context_layout)
        check_flag("sequence_parallel", sequence_parallel)
        check_layout(context_layout)
        if len(set(self.used)) != len(self.used):
            raise ValueError(
                f"data, context, tensor, replicated: got {self.data}, {self.context},"
                f" {self.tensor}, {self.replicated}, expected no axis in two roles"
            )
        if not set(self.fsdp) <= set(self.tokens):
            raise ValueError(
                f"fsdp: got {self.fsdp}, expected a subset of the data and context axes"
                f" {self.tokens}"
            )

    @property
    def tokens(self) -> Names:
        """The axes that tokens are spread over: data, then context."""
        return self.data + self.context

    @property
    def used(self) -> Names:
        """All axes that have a role."""
        return self.tokens + self.tensor + self.replicated

    def size(self, names: Names) -> int:
        """The number of shards over `names`, 1 for none; static. Only inside the `shard_map`."""
        if not names:
            return 1
        return lax.axis_size(names)

    def index(self, names: Names) -> jax.Array | int:
        """This device's place among the shards over `names`, first name slowest; 0 for none."""
        if not names:
            return 0
        return lax.axis_index(names)

    def psum(self, x: Tree, names: Names) -> Tree:
        """The sum of x over the shards of `names`; x itself for none.

        A replicated x is counted once for each shard.
        """
        if not names:
            return x
        return lax.psum(x, names)

    def permute(self, x: jax.Array, names: Names, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """x of shard i on shard j, for each pair (i, j) of places as `index` counts them; 0 where
        nothing arrives.

        `lax.ppermute` counts places in the order of the mesh, whatever the order of the names.
        """
        mesh = jax.sharding.get_abstract_mesh()
        ordered = tuple(name for name in mesh.axis_names if name in names)
        by_names = np.arange(self.size(names)).reshape([lax.axis_size(name) for name in names])
        by_mesh = by_names.transpose([names.index(name) for name in ordered]).reshape(-1)
        place = np.argsort(by_mesh).tolist()
        return lax.ppermute(x, ordered, [(place[i], place[j]) for i, j in pairs])

    def check_manual(self, what: str) -> None:
        """Raises unless the axes with a role are axes of the surrounding `shard_map`, which has
        `check_vma=True`.
        """
        manual = jax.sharding.get_abstract_mesh().manual_axes
        for name in self.used:
            if name not in manual:
                raise ValueError(
                    f"parallel: got mesh axis {name!r} in {what}, expected axes of the shard_map"
                    f" around this call, {manual}; the shard_map must be over all axes of the mesh"
                )
        for name in self.tokens + self.tensor:
            if not _tracks_varying(name):
                raise ValueError(
                    f"shard_map around this call: got check_vma=False over axis {name!r}, expected"
                    " check_vma=True; without it the gradients of replicated inputs would be wrong"
                    " by axis sizes; in place of a pmap, use a shard_map"
                )

    def check_complete(self, what: str, *arrays: Any) -> None:
        """Raises where arrays differ between devices along a mesh axis that has no role here.

        A sum over devices, which the error calls `what`, would leave that axis out. Under `pmap`
        and `check_vma=False` JAX does not track which arrays differ, so any axis without a role
        raises.
        """
        for name in self.unknown(*arrays):
            instead = ""
            if not _tracks_varying(name):  # `check_manual` would refuse every role here
                instead = " in a shard_map with check_vma=True in its place"
            raise ValueError(
                f"parallel: got no role for mesh axis {name!r} inside a shard_map or pmap, expected"
                f" one, since {what} would be that of one device's part; pass"
                f" parallel=ShardAxes(data=..., context=...){instead}, or"
                f" ShardAxes(replicated={name!r}) where all devices along it hold the same"
            )

    def unknown(self, *arrays: Any) -> list[str]:
        """The mesh axes without a role here along which arrays differ between devices, see
        `check_complete`.
        """
        mesh = jax.sharding.get_abstract_mesh()
        differ = varying(*arrays)
        names = [
            name for name in mesh.manual_axes if mesh.shape[name] > 1 and name not in self.used
        ]
        return [name for name in names if name in differ or not _tracks_varying(name)]


def _tracks_varying(name: str) -> bool:
    """Whether the `shard_map` around this call has `check_vma=True`."""
    return name in varying(lax.axis_index(name))


def varying(*trees: Any) -> frozenset[str]:
    """The manual mesh axes along which arrays, or pytrees of them, differ between devices, read
    from their types.
    """
    return frozenset(
        name for x in jax.tree.leaves(trees) for name in jax.typeof(x).manual_axis_type.varying
    )


def vary(x: jax.Array, names: Names | frozenset[str]) -> jax.Array:
    """x with `names` added to the axes along which it varies; under a gradient this sums over
    the added ones.
    """
    missing = tuple(sorted(set(names) - varying(x)))
    if not missing:
        return x
    return lax.pcast(x, missing, to="varying")


def unvary(x: jax.Array, names: Names) -> jax.Array:
    """x without `names` among the axes along which it varies; without a derivative.

    The caller must know that x is equal along them, as JAX cannot after a gather by permutations.
    Nothing is checked.
    """
    return _unvarying().bind(x, names=names)


@functools.cache
def _unvarying() -> Any:
    from jax.extend.core import Primitive  # imported here because it loads Pallas
    from jax.interpreters import batching, mlir

    def of_type(x: Any, names: Names) -> Any:
        kept = x.manual_axis_type.varying - set(names)
        return x.update(manual_axis_type=jax.sharding.ManualAxisType(varying=kept))

    equal = Primitive("equal_along")
    equal.def_abstract_eval(of_type)
    equal.def_impl(lambda x, names: x)
    mlir.register_lowering(equal, lambda _, x, names: [x])
    batching.primitive_batchers[equal] = lambda args, dims, names: (
        equal.bind(*args, names=names),
        *dims,
    )
    return equal


def vary_like(x: jax.Array, *others: Any) -> jax.Array:
    """x with all varying axes of the arrays `others` added; a loop carry must start with them."""
    return vary(x, varying(*others))
