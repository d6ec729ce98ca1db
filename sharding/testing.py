"""Emulated devices, meshes to try, and one assertion: a function's numbers do not depend on the mesh."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .mesh import ParallelMesh, make_parallel_mesh


def emulate_devices(count: int = 8) -> None:
    """Makes the CPU appear as `count` devices; raises RuntimeError where JAX already runs with other devices."""
    with contextlib.suppress(RuntimeError):  # raised once devices exist; then their number decides
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    if jax.device_count() != count:
        raise RuntimeError(f"count: got {jax.device_count()} devices already in use, expected {count}")


def factorings(count: int = 8) -> list[str]:
    """Every way to write `count` as dp*cp*tp, as mesh descriptions.

    Example:
      >>> factorings(2)
      ['dp=1,cp=1,tp=2', 'dp=1,cp=2,tp=1', 'dp=2,cp=1,tp=1']
    """
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    return [f"dp={dp},cp={cp},tp={count // dp // cp}" for dp in sizes for cp in sizes if count // dp % cp == 0]


def assert_mesh_invariant(
    fn: Callable[..., Any],
    *args: Any,
    meshes: Sequence[str | ParallelMesh] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> Any:
    """Checks that jitted `fn(parallel, *args)` gives on every mesh what it gives with `parallel=None`.

    Args:
      fn: returns a pytree of arrays; put gradients into it to have them checked too.
      *args: arrays.
      meshes: ParallelMeshes or descriptions; every dp x cp x tp factoring of the devices by default.
      rtol, atol: tolerances; atol is a share of each array's largest magnitude.

    Returns:
      What `fn(None, *args)` gives.

    Raises:
      AssertionError: names the mesh and the leaf, with the largest error and its place.

    Example:
      >>> total = assert_mesh_invariant(lambda parallel, x: x.sum(), jnp.ones(3), meshes=[f"dp={jax.device_count()}"])
      >>> float(total)
      3.0
    """
    expected = jax.jit(lambda *a: fn(None, *a))(*args)
    for mesh in factorings(jax.device_count()) if meshes is None else meshes:
        parallel = make_parallel_mesh(mesh) if isinstance(mesh, str) else mesh
        assert_trees_close(jax.jit(lambda *a, p=parallel: fn(p, *a))(*args), expected, rtol, atol, f"mesh {mesh}")
    return expected


def assert_trees_close(got: Any, expected: Any, rtol: float = 1e-5, atol: float = 1e-6, context: str = "") -> None:
    """Like `chex.assert_trees_all_close`, but `atol` is a share of each array's largest magnitude."""
    got_leaves, got_tree = jax.tree.flatten_with_path(got)
    leaves, tree = jax.tree.flatten(expected)
    if str(got_tree) != str(tree):
        raise AssertionError(f"{context}: got a tree {got_tree}, expected {tree}")
    for (path, a), b in zip(got_leaves, leaves, strict=True):
        a, b = (np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else None) for x in (a, b))
        where = f"{context} at {jax.tree_util.keystr(path) or 'the result'}"
        if a.shape != b.shape:
            raise AssertionError(f"{where}: got shape {a.shape}, expected {b.shape}")
        scale = np.max(np.abs(b), initial=0.0, where=np.isfinite(b)) if b.dtype.kind == "f" else 0.0
        bad = ~np.isclose(a, b, rtol=rtol, atol=atol * scale, equal_nan=True)
        if bad.any():
            error = np.where(bad, np.abs(a - b), 0)
            worst = np.unravel_index(np.argmax(error), error.shape)
            raise AssertionError(
                f"{where}: {bad.sum()} of {bad.size} differ, most at {tuple(map(int, worst))}: got {a[worst]}, "
                f"expected {b[worst]} (off by {error[worst]:.3g}, rtol {rtol}, atol {atol} of {scale:.3g})"
            )
