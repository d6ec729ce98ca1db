"""The one way to run a per-shard function on a mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from .axes import ShardAxes, axis_names
from .mesh import ParallelMesh, check_parallel


def shard_call(
    name: str,
    fn: Callable[..., Any],
    parallel: ParallelMesh | ShardAxes | None,
    args: Mapping[str, Any],
    specs: Callable[[ParallelMesh], tuple[Sequence[Any], Any]],
    static: Hashable = None,
) -> Any:
    """Runs the per-shard `fn(axes, *args.values())` on one device, in the caller's `shard_map`, or
    on a mesh.

    The call is jitted where the caller does not jit: with a module-level `fn`, a second call with
    equal `static` and arrays of the same shapes compiles nothing. In a caller's `jit` the call is
    not jitted again: JAX would first trace all of it without gradients.

    Args:
      name: the public function's name, for errors.
      fn: takes `ShardAxes`, `static` where it is not None, then the arguments as this device holds
        them.
      parallel: None (one device), `ShardAxes` (already inside a `shard_map`), or `ParallelMesh`.
      args: arrays or pytrees of them by argument name; None stays None.
      specs: maps the mesh to (one PartitionSpec or pytree prefix of them for each argument, the
        same for the results).
      static: the static argument of `fn`, hashable; None for none.

    Raises:
      TypeError: `parallel` is of another type.
      ValueError: a dimension that the mesh does not divide, an array that was put on other devices,
        a surrounding `shard_map` with `check_vma=False`, a mesh inside a `shard_map`.

    Example:
      >>> mesh = make_parallel_mesh("dp=1,cp=1,tp=1", devices=jax.devices()[:1])
      >>> total = lambda axes, power, x: axes.psum((x**power).sum(), axes.tokens)
      >>> shard_call("total", total, mesh, {"x": 2 * jnp.ones((2, 4))}, lambda p: ([p.tokens_spec], P()), static=2)
      Array(32., dtype=float32)
    """
    check_parallel(parallel)
    if isinstance(parallel, ShardAxes):
        parallel.check_manual(name)
        return _call(fn, parallel, static, *args.values())
    # even an operation without arguments becomes a part of the program of a `jit` around this call
    staged = isinstance(lax.iota(jnp.int32, 1), jax.core.Tracer)
    if parallel is None and staged:
        arrays = jax.tree.map(jnp.asarray, tuple(args.values()))
        return _call(fn, ShardAxes(), static, *arrays)
    if parallel is None:
        # with numpy's arrays as they are: outside of a `jit`, `jnp.asarray` compiles a program for
        # each new shape
        return _jitted_call(fn, ShardAxes(), static, *args.values())
    if manual := jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"parallel: got ParallelMesh in {name} inside a shard_map or pmap over {manual},"
            " expected ShardAxes inside a shard_map over all axes of the mesh, or ParallelMesh"
            " outside of it"
        )
    in_specs, out_specs = specs(parallel)
    for (what, arg), spec in zip(args.items(), in_specs, strict=True):
        for field, part, part_spec in _named(what, arg, spec):
            by_leaf(functools.partial(_check, name, field, parallel), part_spec, part)
    # a dict of specs has no hash, so they are flattened for the cache; a PartitionSpec is a leaf
    leaves, structure = jax.tree.flatten((tuple(in_specs), out_specs))
    run_on_mesh = _on_mesh if staged else _jitted_on_mesh
    return run_on_mesh(fn, static, parallel, tuple(leaves), structure, *args.values())


def _call(fn: Callable[..., Any], axes: ShardAxes, static: Hashable, *args: Any) -> Any:
    if static is None:
        return fn(axes, *args)
    return fn(axes, static, *args)


_jitted_call = jax.jit(_call, static_argnums=(0, 1, 2))


def _on_mesh(
    fn: Callable[..., Any],
    static: Hashable,
    parallel: ParallelMesh,
    specs: tuple[P, ...],
    structure: jax.tree_util.PyTreeDef,
    *args: Any,
) -> Any:
    in_specs, out_specs = jax.tree.unflatten(structure, specs)
    if parallel.is_explicit:  # there in_specs assert shardings and never reshard

        def reshard(spec: P, x: Any) -> Any:
            return jax.reshard(x, parallel.sharding(spec))

        args = tuple(by_leaf(reshard, spec, arg) for spec, arg in zip(in_specs, args, strict=True))
    body = functools.partial(_call, fn, parallel.axes, static)
    return jax.shard_map(body, mesh=parallel.mesh, in_specs=in_specs, out_specs=out_specs)(*args)


_jitted_on_mesh = jax.jit(_on_mesh, static_argnums=(0, 1, 2, 3, 4))


def by_leaf(fn: Callable[[P, Any], Any], spec: Any, arg: Any) -> Any:
    """fn(spec, leaf) over a pytree whose specs are a pytree prefix of it."""

    def over_arrays(spec: P, part: Any) -> Any:
        return jax.tree.map(functools.partial(fn, spec), part)

    return jax.tree.map(over_arrays, spec, arg)


def _named(what: str, arg: Any, spec: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields (name for errors, value, spec): of the argument, or of each field of a NamedTuple,
    nested ones too.
    """
    if not hasattr(arg, "_fields") or isinstance(spec, P):
        yield what, arg, spec
        return
    for name, part, part_spec in zip(arg._fields, arg, spec, strict=True):
        if part is not None:
            yield from _named(name, part, part_spec)


def _check(name: str, what: str, parallel: ParallelMesh, spec: P, x: Any) -> None:
    """Raises where the mesh lacks an axis of the spec, does not divide an array by it, or lacks
    the array's devices.
    """
    shape = jnp.shape(x)
    for dim, entry in enumerate(spec[: len(shape)]):
        names = axis_names(entry)
        if not set(names) <= set(parallel.mesh.shape):
            raise ValueError(
                f"{what}: got spec {spec} in {name}, expected axes of the mesh,"
                f" {tuple(parallel.mesh.shape)}"
            )
        if shape[dim] % parallel.size(names):
            raise ValueError(
                f"{what}: got shape {shape} in {name}, expected dimension {dim} to be a multiple of"
                f" {parallel.size(names)}, the size of mesh axes {names}"
            )
    # an array that was restored without a sharding; within the caller's `jit` JAX itself raises,
    # when it is called
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer) and x.committed:
        _check_devices(name, what, parallel, x)


def _check_devices(name: str, what: str, parallel: ParallelMesh, x: jax.Array) -> None:
    held_by: set[Any] = x.sharding.device_set
    expected = set(parallel.mesh.devices.flat)
    if held_by != expected:
        where = ", ".join(map(str, sorted(device.id for device in held_by)))
        raise ValueError(
            f"{what}: got an array on device {where} in {name}, expected all {len(expected)}"
            " devices of the mesh; jax.device_put(x, parallel.sharding(spec)) places it, and"
            " replicates it for the spec P()"
        )
