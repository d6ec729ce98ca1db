"""A device mesh, the role that each of its axes plays, and the one way to run a per-shard function on it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from .axis_rules import roles_of_rules
from .placement import place

Names = tuple[str, ...]
Role = str | Sequence[str] | EllipsisType | None
LAYOUTS: dict[str, Any] = {}  # by name, the context layouts that `sharding.layouts` registers here
_CONVENTION = {
    "data": ("dp", "data", "replica"),
    "context": ("cp", "context", "sequence", "sp"),
    "tensor": ("tp", "tensor", "model"),
    "fsdp": ("fsdp",),
}
_BY_TRAFFIC = ("data", "fsdp", "context", "tensor")  # from the least to the most


def _names(value: str | Sequence[str] | None) -> Names:
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def _check_names(role: str, value: Any) -> None:
    names = value if isinstance(value, (tuple, list)) else [value]
    if value is not None and not all(isinstance(name, str) for name in names):
        raise TypeError(f"{role}: got {value!r}, expected an axis name, a tuple of them or None")


def _entry(names: Names) -> Any:
    """One entry of a PartitionSpec."""
    return None if not names else names[0] if len(names) == 1 else names


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
      replicated: axes over which every device does the same work.
      sequence_parallel: hidden states arrive with the positions sharded over `tensor` too.
      context_layout: which positions of a row each context shard holds.

    Raises:
      ValueError: an axis in two roles, an fsdp axis that tokens are not spread over, an unknown layout.

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
        fields: dict[str, Any] = {role: _names(value) for role, value in roles.items()}
        fields |= {"sequence_parallel": sequence_parallel, "context_layout": context_layout}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
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

    def psum(self, x: Any, names: Names) -> Any:
        """Sum over the shards of `names`; x itself for none. An x that is the same on all shards counts once each."""
        return lax.psum(x, names) if names else x

    def check_vma(self) -> None:
        """Raises where the surrounding `shard_map` has `check_vma=False`: gradients there are another contract."""
        for name in self.tokens + self.tensor:
            if not _tracks_varying(name):
                raise ValueError(
                    f"shard_map around this call: got check_vma=False over axis {name!r}, expected check_vma=True; "
                    "without it the gradients of replicated inputs would be wrong by axis sizes"
                )

    def check_complete(self, what: str, *arrays: Any) -> None:
        """Raises where devices hold different parts of what `what` is about, over a mesh axis that has no role here.

        A sum over devices would then be one device's part of it. Axes along which no array varies are no such axes, as
        far as JAX tracks that: under `pmap` and `check_vma=False` any axis without a role is one.

        Args:
          what: what is summed, for the error.
          *arrays: what it is made of.
        """
        for name in self.unknown(*arrays):
            raise ValueError(
                f"parallel: got no role for mesh axis {name!r} inside a shard_map or pmap, expected one, since "
                f"{what} would be that of one device's part; pass parallel=ShardAxes(data=..., context=...), or "
                f"ShardAxes(replicated={name!r}) where all devices along it hold the same"
            )

    def unknown(self, *arrays: Any) -> list[str]:
        """The mesh axes without a role here along which devices hold different parts of arrays, as `check_complete`."""
        mesh = jax.sharding.get_abstract_mesh()
        known = {*self.data, *self.context, *self.tensor, *self.replicated}
        differs = lambda name: any(name in varying(x) for x in jax.tree.leaves(arrays))  # noqa: E731
        names = [name for name in mesh.manual_axes if mesh.shape[name] > 1 and name not in known]
        return [name for name in names if differs(name) or not _tracks_varying(name)]


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


def vary_like(x: jax.Array, *others: Any) -> jax.Array:
    """x with all the varying axes of the arrays `others`: what a loop carry must start from."""
    return vary(x, frozenset().union(*(varying(leaf) for leaf in jax.tree.leaves(others))))


@dataclasses.dataclass(frozen=True, init=False)
class ParallelMesh:
    """A `jax.sharding.Mesh` and the role of each of its axes; axis names are the caller's.

    A role takes a name, a tuple of names, or None for no axis. A role that is not given takes the axes of the usual
    names: dp, data, replica; cp, context, sequence, sp; tp, tensor, model; fsdp, but none that another role was given.
    Axes of size 1 vanish from their roles. Meshes of Auto and of Explicit axis types both work.

    Args:
      mesh: the device mesh (`jax.make_mesh`).
      data: axes of the rows of a batch. Those of `fsdp` that are not in `context` count as such too.
      context: axes of the positions of a row.
      tensor: axes of the vocabulary.
      fsdp: axes over which a head kernel is sharded beside `tensor`.
      replicated: axes over which every device does the same work.
      sequence_parallel: hidden states arrive with positions sharded over `tensor` too.
      context_layout: "contiguous", "zigzag", "zigzag_per_segment", "striped", or one that was registered.

    Raises:
      ValueError: an axis that the mesh lacks, an axis in two roles, an axis of size above 1 without a role, an unknown
        layout.

    Example:
      >>> import jax
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
        roles = {"data": data, "context": context, "tensor": tensor, "fsdp": fsdp}
        for role, value in {**roles, "replicated": replicated}.items():
            if not isinstance(value, EllipsisType):
                _check_names(role, value)
        given = {role: _names(value) for role, value in roles.items() if not isinstance(value, EllipsisType)}
        given["replicated"] = _names(replicated)
        for role, names in given.items():
            for name in names:
                if name not in mesh.shape:
                    raise ValueError(f"{role}: got axis {name!r}, expected one of the mesh's axes {tuple(mesh.shape)}")
        fields: dict[str, Any] = _roles_of(mesh, given) | {"mesh": mesh}
        fields |= {"sequence_parallel": sequence_parallel, "context_layout": context_layout}
        for name, value in fields.items():
            object.__setattr__(self, name, value)
        self.axes  # noqa: B018  ShardAxes checks the roles against each other
        known = {*self.data, *self.context, *self.tensor, *self.replicated}
        lost = {name: size for name, size in mesh.shape.items() if size > 1 and name not in known}
        if lost:
            described = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
            raise ValueError(
                f"mesh: got axes {described}, expected a role for each; {', '.join(map(repr, lost))} has none. Pass "
                f"data=, context=, tensor= or fsdp=, or replicated={tuple(lost)} for the same work on each device "
                "along it"
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
        """The roles that logical axis rules give the axes of a mesh: MaxText's `logical_axis_rules`, Flax's rules.

        Rows are sharded as the rules shard the batch of logits, positions as its length, a head kernel as its
        dimensions embed and vocab. As in Flax, the first rule whose axes are free in that array is taken.

        Args:
          mesh: the device mesh.
          rules: pairs of a logical name and its mesh axes: a name, several, or None. Axes that the mesh lacks, or
            has in size 1, are left out.
          batch: the logical name of rows; by default the first of activation_embed_and_logits_batch, activation_batch
            and batch that has a rule.
          length: of positions; activation_length, length.
          embed: of a head kernel's H; embed_vocab, embed.
          vocab: of its V; vocab.
          replicated: see `ParallelMesh`; likewise the next ones.

        Raises:
          ValueError: rules that are no pairs, a name without a rule, an axis that shards both tokens and the
            vocabulary, or a kernel's rows and no tokens, an axis of size above 1 without a role.

        Example:
          >>> import jax
          >>> mesh = jax.make_mesh((jax.device_count(), 1), ("fsdp", "tensor"))
          >>> rules = [("batch", ("data", "fsdp")), ("embed", "fsdp"), ("vocab", "tensor")]
          >>> ParallelMesh.from_rules(mesh, rules) == ParallelMesh(mesh, fsdp="fsdp")
          True
        """
        given = {"batch": batch, "length": length, "embed": embed, "vocab": vocab}
        roles = roles_of_rules(rules, dict(mesh.shape), given)
        return cls(
            mesh,
            replicated=replicated,
            sequence_parallel=sequence_parallel,
            context_layout=context_layout,
            **roles,
        )

    @property
    def axes(self) -> ShardAxes:
        """The same roles for code inside a `shard_map` over this mesh."""
        return ShardAxes(
            self.data,
            self.context,
            self.tensor,
            self.fsdp,
            self.replicated,
            self.sequence_parallel,
            self.context_layout,
        )

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


def _roles_of(mesh: Mesh, given: Mapping[str, Names]) -> dict[str, Names]:
    """The axes of each role: those given, else those of the usual names; axes of size 1 left out."""
    # one axis may shard both tokens and a kernel, so that fsdp is not a role that others compete with
    claimed = {name for role, names in given.items() if role != "fsdp" for name in names}
    usual: dict[str, Names] = {}
    for role, names in _CONVENTION.items():
        taken = claimed - {*given.get("data", ()), *given.get("context", ())} if role == "fsdp" else claimed
        usual[role] = tuple(name for name in mesh.axis_names if name in names and name not in taken)
    roles = {role: given.get(role, usual[role]) for role in _CONVENTION}
    of_rows = [name for name in roles["fsdp"] if name not in roles["context"]]
    if "data" in given:
        roles["data"] += tuple(name for name in of_rows if name not in roles["data"])
    else:
        roles["data"] = tuple(name for name in mesh.axis_names if name in (*roles["data"], *of_rows))
    roles["replicated"] = given["replicated"]
    return {role: tuple(name for name in names if mesh.shape[name] > 1) for role, names in roles.items()}


def make_parallel_mesh(
    description: str,
    *,
    context_layout: str = "contiguous",
    devices: Sequence[jax.Device] | None = None,
    explicit: bool = False,
    sequence_parallel: bool = False,
) -> ParallelMesh:
    """A `ParallelMesh` from text such as "dp=2,cp=2,tp=2", whatever the order of its axes and the shape of the slice.

    Tensor axes, then context axes, take the fastest links; data axes span slices, if there are several. See
    `sharding.placement`.

    Args:
      description: comma-separated `axis=size`, with the usual names of axes: see `ParallelMesh`.
      context_layout: see `ParallelMesh`.
      devices: the devices to use; all of them by default.
      explicit: make the axes Explicit rather than Auto.
      sequence_parallel: see `ParallelMesh`.

    Raises:
      ValueError: unreadable text, an unknown axis, sizes that do not multiply to the number of devices, slices of
        different sizes.

    Example:
      >>> make_parallel_mesh("dp=1,cp=1,tp=1", devices=jax.devices()[:1]).tokens_spec == P(None, None)
      True
    """
    if not isinstance(description, str):
        raise TypeError(f"description: got {description!r}, expected text like 'dp=2,cp=2,tp=2'")
    if devices is not None and not isinstance(devices, Iterable):
        raise TypeError(f"devices: got {devices!r}, expected a sequence of jax.Device")
    for name, flag in (("explicit", explicit), ("sequence_parallel", sequence_parallel)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {flag!r}, expected True or False")
    devices = list(jax.devices() if devices is None else devices)
    usual = [name for names in _CONVENTION.values() for name in names]
    sizes: dict[str, int] = {}
    for part in description.split(","):
        name, _, size = (piece.strip() for piece in part.partition("="))
        if not name or not size.isdigit() or int(size) < 1 or name in sizes:
            raise ValueError(f"mesh: got {part!r} in {description!r}, expected text like 'dp=2,cp=2,tp=2'")
        if name not in usual:
            raise ValueError(f"mesh: got axis {name!r}, expected one of {', '.join(usual)}")
        sizes[name] = int(size)
    if math.prod(sizes.values()) != len(devices):
        product = "*".join(map(str, sizes.values()))
        raise ValueError(
            f"mesh: got sizes {product}={math.prod(sizes.values())} in {description!r}, expected {len(devices)} devices"
        )
    names = list(sizes)
    traffic = sorted(names, key=lambda name: [name in _CONVENTION[role] for role in _BY_TRAFFIC].index(True))
    placed = place([sizes[name] for name in traffic], devices).transpose([traffic.index(name) for name in names])
    kind = AxisType.Explicit if explicit else AxisType.Auto
    mesh = Mesh(placed, tuple(names), axis_types=(kind,) * len(names))
    return ParallelMesh(mesh, sequence_parallel=sequence_parallel, context_layout=context_layout)


def check_parallel(parallel: Any) -> None:
    if not isinstance(parallel, ParallelMesh | ShardAxes | None):
        raise TypeError(f"parallel: got {type(parallel).__name__}, expected ParallelMesh, ShardAxes or None")


def shard_call(
    name: str,
    fn: Callable[..., Any],
    parallel: ParallelMesh | ShardAxes | None,
    args: Mapping[str, Any],
    specs: Callable[[ParallelMesh], tuple[Sequence[Any], Any]],
    static: Hashable = None,
) -> Any:
    """Runs the per-shard `fn(axes, *args.values())` on one device, in the caller's `shard_map`, or on a mesh.

    This is how every mesh-level function here is made, so that the per-shard function is the only implementation. It is
    compiled as a whole, also where the caller does not jit: with a module-level `fn`, a second call with equal `static`
    and arrays of the same shapes compiles nothing.

    Args:
      name: the public function's name, for errors.
      fn: takes `ShardAxes`, `static` where it is not None, then the arguments as this device holds them.
      parallel: None (one device), `ShardAxes` (already inside a `shard_map`), or `ParallelMesh`.
      args: arrays or pytrees of them by argument name; None stays None.
      specs: maps the mesh to (one PartitionSpec or pytree prefix of them for each argument, the same for the results).
      static: whatever else `fn` takes; hashable.

    Raises:
      TypeError: `parallel` is something else.
      ValueError: a dimension that the mesh does not divide, `check_vma=False` around.

    Example:
      >>> mesh = make_parallel_mesh("dp=1,cp=1,tp=1", devices=jax.devices()[:1])
      >>> total = lambda axes, power, x: axes.psum((x**power).sum(), axes.tokens)
      >>> shard_call("total", total, mesh, {"x": 2 * jnp.ones((2, 4))}, lambda p: ([p.tokens_spec], P()), static=2)
      Array(32., dtype=float32)
    """
    check_parallel(parallel)
    if isinstance(parallel, ShardAxes):
        parallel.check_vma()
        return _call(fn, parallel, static, *args.values())
    if parallel is None:
        return _on_one_device(fn, static, *jax.tree.map(jnp.asarray, tuple(args.values())))
    in_specs, out_specs = specs(parallel)
    for (what, arg), spec in zip(args.items(), in_specs, strict=True):
        _check_divides(name, what, arg, spec, parallel)
    leaves, structure = jax.tree.flatten((tuple(in_specs), out_specs), is_leaf=_is_spec)
    return _on_mesh(fn, static, parallel, tuple(leaves), structure, *args.values())


def _call(fn: Callable[..., Any], axes: ShardAxes, static: Any, *args: Any) -> Any:
    return fn(axes, *args) if static is None else fn(axes, static, *args)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _on_one_device(fn: Callable[..., Any], static: Any, *args: Any) -> Any:
    return _call(fn, ShardAxes(), static, *args)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _on_mesh(
    fn: Callable[..., Any],
    static: Any,
    parallel: ParallelMesh,
    specs: tuple[P, ...],
    structure: jax.tree_util.PyTreeDef,
    *args: Any,
) -> Any:
    in_specs, out_specs = jax.tree.unflatten(structure, specs)  # taken apart since a dict of specs has no hash
    if parallel.is_explicit:  # where in_specs only assert what the arrays' types say
        to = lambda spec, arg: _by_leaf(lambda s, x: jax.reshard(x, parallel.sharding(s)), spec, arg)  # noqa: E731
        args = tuple(map(to, in_specs, args))
    body = functools.partial(_call, fn, parallel.axes, static)
    return jax.shard_map(body, mesh=parallel.mesh, in_specs=in_specs, out_specs=out_specs)(*args)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def _by_leaf(fn: Callable[[P, Any], Any], spec: Any, arg: Any) -> Any:
    """fn(spec, leaf) over a pytree whose specs are a pytree prefix of it."""
    return jax.tree.map(lambda s, x: jax.tree.map(functools.partial(fn, s), x), spec, arg, is_leaf=_is_spec)


def _check_divides(name: str, what: str, arg: Any, spec: Any, parallel: ParallelMesh) -> None:
    """Raises where an array of the argument cannot be laid over the mesh as its spec says."""

    def check(spec: P, x: Any) -> None:
        shape = jnp.shape(x)
        for dim, entry in enumerate(spec[: len(shape)]):
            names = _names(entry)
            if not set(names) <= set(parallel.mesh.shape):
                raise ValueError(
                    f"{what}: got spec {spec} in {name}, expected axes of the mesh, {tuple(parallel.mesh.shape)}"
                )
            if shape[dim] % parallel.size(names):
                raise ValueError(
                    f"{what}: got shape {shape} in {name}, expected dimension {dim} to be a multiple of "
                    f"{parallel.size(names)}, the size of mesh axes {names}"
                )

    _by_leaf(check, spec, arg)
