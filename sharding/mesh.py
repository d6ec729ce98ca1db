"""A device mesh, the role that each of its axes plays, and the one way to run a per-shard function on it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

Names = tuple[str, ...]
LAYOUTS: dict[str, Any] = {}  # by name, the context layouts that `sharding.layouts` registers here
_DEFAULT_ROLES = {"data": ("dp",), "context": ("cp",), "tensor": ("tp",), "fsdp": ()}
_ROLE_OF_NAME = {
    "dp": "data",
    "data": "data",
    "cp": "context",
    "context": "context",
    "tp": "tensor",
    "tensor": "tensor",
}


def _names(value: str | Sequence[str] | None) -> Names:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _entry(names: Names) -> Any:
    """One entry of a PartitionSpec."""
    return None if not names else names[0] if len(names) == 1 else names


def check_layout(layout: str, name: str = "context_layout") -> None:
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"{name}: got {layout!r}, expected one of {', '.join(LAYOUTS)}")


@dataclasses.dataclass(frozen=True)
class ShardAxes:
    """The roles of mesh axes, for code that already runs inside a `shard_map` (with `check_vma=True`).

    Without arguments no axis has a role, and every collective over a role does nothing: a per-shard function
    given `ShardAxes()` is the one-device function.

    Args:
      data: axes that the rows of a batch are sharded over.
      context: axes that the positions of a row are sharded over.
      tensor: axes that the vocabulary is sharded over.
      fsdp: axes that a head kernel is sharded over beside `tensor`; each is a data axis for tokens.
      sequence_parallel: hidden states arrive with the positions sharded over `tensor` too.
      context_layout: which positions of a row each context shard holds.

    Example:
      >>> ShardAxes(data="dp", context=None, tensor=("tp",)).tokens
      ('dp',)
    """

    data: Names = ()
    context: Names = ()
    tensor: Names = ()
    fsdp: Names = ()
    sequence_parallel: bool = False
    context_layout: str = "contiguous"

    def __post_init__(self) -> None:
        for role in _DEFAULT_ROLES:
            object.__setattr__(self, role, _names(getattr(self, role)))
        check_layout(self.context_layout)
        used = self.data + self.context + self.tensor
        if len(set(used)) != len(used):
            raise ValueError(
                f"data, context, tensor: got {self.data}, {self.context}, {self.tensor}, expected no axis in two roles"
            )
        if not set(self.fsdp) <= set(self.data):
            raise ValueError(f"fsdp: got {self.fsdp}, expected a subset of the data axes {self.data}")

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

    def psum(self, x: Any, names: Names) -> Any:
        """Sum over the shards of `names`; x itself for none. An x that is the same on all shards counts once each."""
        return lax.psum(x, names) if names else x

    def check_vma(self) -> None:
        """Raises where the surrounding `shard_map` has `check_vma=False`: gradients there are another contract."""
        for name in self.tokens + self.tensor:
            if name not in varying(lax.axis_index(name)):
                raise ValueError(
                    f"shard_map around this call: got check_vma=False over axis {name!r}, expected check_vma=True; "
                    "without it the gradients of replicated inputs would be wrong by axis sizes"
                )


def varying(x: Any) -> frozenset[str]:
    """The manual mesh axes along which x differs from device to device, read from its type."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def vary(x: jax.Array, names: Names | frozenset[str]) -> jax.Array:
    """x with `names` added to the axes along which it varies; under a gradient this sums over the added ones."""
    missing = tuple(sorted(set(names) - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def vary_like(x: jax.Array, *others: Any) -> jax.Array:
    """x with all the varying axes of the arrays `others`: what a loop carry must start from."""
    return vary(x, frozenset().union(*(varying(leaf) for leaf in jax.tree.leaves(others))))


@dataclasses.dataclass(frozen=True)
class ParallelMesh:
    """A `jax.sharding.Mesh` and the role of each of its axes; axis names are the caller's.

    A role takes a name, a tuple of names, or None. Axes of size 1 vanish from their roles, and so do the default
    names where the mesh lacks them; any other name that the mesh lacks is an error. Axes without a role are
    replicated. Meshes of Auto and of Explicit axis types both work.

    Args:
      mesh: the device mesh (`jax.make_mesh`).
      data: axes of the rows of a batch.
      context: axes of the positions of a row.
      tensor: axes of the vocabulary.
      fsdp: axes over which a head kernel is sharded beside `tensor`; they count as data axes for tokens.
      sequence_parallel: hidden states arrive with positions sharded over `tensor` too.
      context_layout: "contiguous", "zigzag", "zigzag_per_segment", "striped", or one that was registered.

    Raises:
      ValueError: an axis that the mesh lacks, an axis in two roles, an unknown layout.

    Example:
      >>> import jax
      >>> parallel = ParallelMesh(jax.make_mesh((1, 1), ("fsdp", "tp")), data="fsdp", fsdp="fsdp", context=None)
      >>> parallel.data_size, parallel.tensor
      (1, ())
    """

    mesh: Mesh
    data: Names = _DEFAULT_ROLES["data"]
    context: Names = _DEFAULT_ROLES["context"]
    tensor: Names = _DEFAULT_ROLES["tensor"]
    fsdp: Names = _DEFAULT_ROLES["fsdp"]
    sequence_parallel: bool = False
    context_layout: str = "contiguous"

    def __post_init__(self) -> None:
        for role, default in _DEFAULT_ROLES.items():
            names = _names(getattr(self, role))
            for name in names:
                if name not in self.mesh.shape and name not in default:
                    raise ValueError(
                        f"{role}: got axis {name!r}, expected one of the mesh's axes {tuple(self.mesh.shape)}"
                    )
            object.__setattr__(self, role, tuple(n for n in names if self.mesh.shape.get(n, 1) > 1))
        object.__setattr__(self, "data", self.data + tuple(n for n in self.fsdp if n not in self.data))
        self.axes  # noqa: B018  ShardAxes checks the roles against each other

    @property
    def axes(self) -> ShardAxes:
        """The same roles for code inside a `shard_map` over this mesh."""
        return ShardAxes(self.data, self.context, self.tensor, self.fsdp, self.sequence_parallel, self.context_layout)

    def size(self, names: Names) -> int:
        """The number of shards over `names`."""
        return math.prod(self.mesh.shape[n] for n in names)

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
        return any(t == AxisType.Explicit for t in self.mesh.axis_types)

    # PartitionSpecs, so that users do not write them.

    @property
    def rows_spec(self) -> P:
        """Of per-segment arrays `[R, S]`."""
        return P(_entry(self.data))

    @property
    def tokens_spec(self) -> P:
        """Of per-token arrays `[R, T]`."""
        return P(_entry(self.data), _entry(self.context))

    @property
    def hidden_spec(self) -> P:
        """Of hidden states `[R, T, H]`."""
        positions = self.context + (self.tensor if self.sequence_parallel else ())
        return P(_entry(self.data), _entry(positions), None)

    @property
    def logits_spec(self) -> P:
        """Of logits `[R, T, V]`."""
        return P(_entry(self.data), _entry(self.context), _entry(self.tensor))

    def kernel_spec(self, kernel_layout: str = "hv") -> P:
        """Of a head kernel, `[H, V]` for "hv" and `[V, H]` for "vh"."""
        spec = (_entry(self.fsdp), _entry(self.tensor))
        return P(*spec) if kernel_layout == "hv" else P(*reversed(spec))

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)


def make_parallel_mesh(
    description: str,
    *,
    context_layout: str = "contiguous",
    devices: Sequence[jax.Device] | None = None,
    explicit: bool = False,
    sequence_parallel: bool = False,
) -> ParallelMesh:
    """A `ParallelMesh` from text such as "dp=2,cp=2,tp=2".

    Args:
      description: comma-separated `axis=size`; axes dp (or data), cp (context), tp (tensor), fsdp.
      context_layout: see `ParallelMesh`.
      devices: the devices to use; all of them by default.
      explicit: make the axes Explicit rather than Auto.
      sequence_parallel: see `ParallelMesh`.

    Raises:
      ValueError: unreadable text, an unknown axis, sizes that do not multiply to the number of devices.

    Example:
      >>> make_parallel_mesh("dp=1,cp=1,tp=1", devices=jax.devices()[:1]).tokens_spec == P(None, None)
      True
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes: dict[str, int] = {}
    for part in description.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not size.isdigit() or int(size) < 1 or name in sizes:
            raise ValueError(f"mesh: got {part!r} in {description!r}, expected text like 'dp=2,cp=2,tp=2'")
        if name not in _ROLE_OF_NAME and name != "fsdp":
            raise ValueError(f"mesh: got axis {name!r}, expected one of {', '.join([*_ROLE_OF_NAME, 'fsdp'])}")
        sizes[name] = int(size)
    if math.prod(sizes.values()) != len(devices):
        product = "*".join(map(str, sizes.values()))
        raise ValueError(
            f"mesh: got sizes {product}={math.prod(sizes.values())} in {description!r}, expected {len(devices)} devices"
        )
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), (kind,) * len(sizes), devices=devices)
    roles: dict[str, Any] = {
        role: [n for n in sizes if _ROLE_OF_NAME.get(n) == role] for role in ("data", "context", "tensor")
    }
    fsdp = ("fsdp",) if "fsdp" in sizes else ()
    return ParallelMesh(mesh, **roles, fsdp=fsdp, sequence_parallel=sequence_parallel, context_layout=context_layout)


def check_parallel(parallel: Any) -> None:
    if not isinstance(parallel, ParallelMesh | ShardAxes | None):
        raise TypeError(f"parallel: got {type(parallel).__name__}, expected ParallelMesh, ShardAxes or None")


def shard_call(
    name: str,
    fn: Callable[..., Any],
    parallel: ParallelMesh | ShardAxes | None,
    args: Mapping[str, Any],
    specs: Callable[[ParallelMesh], tuple[Sequence[Any], Any]],
) -> Any:
    """Runs the per-shard `fn(axes, *args.values())` on one device, inside the caller's `shard_map`, or on a mesh.

    This is how every mesh-level function here is made, so that the per-shard function is the only implementation.

    Args:
      name: the public function's name, for errors.
      fn: takes `ShardAxes`, then the arguments as this device holds them.
      parallel: None (one device), `ShardAxes` (already inside a `shard_map`), or `ParallelMesh`.
      args: arrays or pytrees of them by argument name; None stays None.
      specs: maps the mesh to (one PartitionSpec or pytree prefix of them for each argument, the same for the results).

    Raises:
      TypeError: `parallel` is something else.
      ValueError: a dimension that the mesh does not divide, `vmap` over a ParallelMesh call, `check_vma=False` around.

    Example:
      >>> mesh = make_parallel_mesh("dp=1,cp=1,tp=1", devices=jax.devices()[:1])
      >>> total = lambda axes, x: axes.psum(x.sum(), axes.tokens)
      >>> shard_call("total", total, mesh, {"x": jnp.ones((2, 4))}, lambda p: ([p.tokens_spec], P()))
      Array(8., dtype=float32)
    """
    check_parallel(parallel)
    if parallel is None:
        return fn(ShardAxes(), *jax.tree.map(jnp.asarray, list(args.values())))
    if isinstance(parallel, ShardAxes):
        parallel.check_vma()
        return fn(parallel, *args.values())
    in_specs, out_specs = specs(parallel)
    placed = [_place(name, what, arg, spec, parallel) for (what, arg), spec in zip(args.items(), in_specs, strict=True)]
    body = functools.partial(fn, parallel.axes)
    return jax.shard_map(body, mesh=parallel.mesh, in_specs=tuple(in_specs), out_specs=out_specs)(*placed)


def _place(name: str, what: str, arg: Any, spec: Any, parallel: ParallelMesh) -> Any:
    """arg, checked to divide over the mesh and, on Explicit meshes, resharded to what shard_map asserts."""
    if not isinstance(spec, P):  # a pytree prefix of specs
        is_spec = lambda s: isinstance(s, P)  # noqa: E731
        return jax.tree.map(lambda s, a: _place(name, what, a, s, parallel), spec, arg, is_leaf=is_spec)

    def place(x: Any) -> Any:
        value = x
        while hasattr(value, "primal"):  # what a gradient is taken of
            value = value.primal
        if "BatchTracer" in type(value).__name__:
            raise ValueError(f"{name}: got vmap around a ParallelMesh call, expected parallel=None or a per-shard call")
        x = jnp.asarray(x)
        for dim, entry in enumerate(spec[: x.ndim]):
            names = _names(entry)
            if not set(names) <= set(parallel.mesh.shape):
                raise ValueError(
                    f"{what}: got spec {spec} in {name}, expected axes of the mesh, {tuple(parallel.mesh.shape)}"
                )
            if x.shape[dim] % parallel.size(names):
                raise ValueError(
                    f"{what}: got shape {x.shape} in {name}, expected dimension {dim} to be a multiple of "
                    f"{parallel.size(names)}, the size of mesh axes {names}"
                )
        return jax.reshard(x, parallel.sharding(spec)) if parallel.is_explicit else x

    return jax.tree.map(place, arg)
