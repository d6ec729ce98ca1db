"""Emulated devices, meshes to try, and one assertion: a function's numbers do not depend on the
mesh.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .mesh import ParallelMesh, make_parallel_mesh


def emulate_devices(count: int = 8) -> None:
    """Makes the CPU appear as `count` devices; raises RuntimeError where JAX already runs with
    other devices.
    """
    with contextlib.suppress(RuntimeError):  # raised once devices exist; then their number decides
        jax.config.update("jax_num_cpu_devices", count)
        jax.config.update("jax_platforms", "cpu")
    if jax.device_count() != count:
        raise RuntimeError(
            f"count: got {jax.device_count()} devices already in use, expected {count}"
        )


def factorings(count: int = 8) -> list[str]:
    """Every way to write `count` as dp*cp*tp, as mesh descriptions.

    Example:
      >>> factorings(2)
      ['dp=1,cp=1,tp=2', 'dp=1,cp=2,tp=1', 'dp=2,cp=1,tp=1']
    """
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    return [
        f"dp={dp},cp={cp},tp={count // dp // cp}"
        for dp in sizes
        for cp in sizes
        if count // dp % cp == 0
    ]


def assert_mesh_invariant(
    fn: Callable[..., Any],
    *args: Any,
    meshes: Sequence[str | ParallelMesh] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    equal_nan: bool = False,
) -> Any:
    """Checks that jitted `fn(parallel, *args)` gives on every mesh what it gives with
    `parallel=None`.

    Args:
      fn: returns a pytree of arrays; put gradients into it to have them checked too.
      *args: arrays.
      meshes: ParallelMeshes or descriptions; every dp x cp x tp factoring of the devices by
        default.
      rtol, atol: tolerances; atol is a share of each array's largest magnitude.
      equal_nan: whether the function may give NaN, which must then be NaN on every mesh.

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
        found = jax.jit(lambda *a, p=parallel: fn(p, *a))(*args)
        assert_trees_close(found, expected, rtol, atol, f"mesh {mesh}", equal_nan=equal_nan)
    return expected


def assert_trees_close(
    got: Any,
    expected: Any,
    rtol: float = 1e-5,
    atol: float = 1e-6,
    context: str = "",
    *,
    equal_nan: bool = False,
) -> None:
    """Like `chex.assert_trees_all_close`, but `atol` is a share of each array's largest magnitude,
    and NaN is refused.

    |got - expected| <= rtol |expected| + atol max |expected|. Integers and bools must be equal.

    Args:
      got, expected: pytrees of arrays, or of numbers.
      rtol, atol: tolerances for floats.
      context: how the error begins.
      equal_nan: whether NaN may be expected, and equals NaN. Without it, an array that expects NaN,
        or has no finite number to compare with, is an error: two broken functions would agree on
        it.

    Raises:
      AssertionError: names the leaf, with the largest error and its place.

    Example:
      >>> assert_trees_close({"loss": 1.0}, {"loss": 1.000001})
      >>> assert_trees_close({"loss": jnp.nan}, {"loss": jnp.nan})
      Traceback (most recent call last):
      AssertionError: at ['loss']: got an expectation of NaN, expected numbers, or equal_nan=True
    """
    got_leaves, got_tree = jax.tree.flatten_with_path(got)
    leaves, tree = jax.tree.flatten(expected)
    if str(got_tree) != str(tree):
        raise AssertionError(f"{context}: got a tree {got_tree}, expected {tree}")
    for (path, a), b in zip(got_leaves, leaves, strict=True):
        place = jax.tree_util.keystr(path) or "the result"
        _assert_close(
            _widened(a),
            _widened(b),
            rtol,
            atol,
            f"{context} at {place}".strip(),
            equal_nan=equal_nan,
        )


def _widened(x: Any) -> np.ndarray[Any, Any]:
    """A leaf as a numpy array, floats in f64; of keys of `jax.random` their bits."""
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    x = np.asarray(x)
    return x.astype(np.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _assert_close(
    got: np.ndarray[Any, Any],
    expected: np.ndarray[Any, Any],
    rtol: float,
    atol: float,
    where: str,
    *,
    equal_nan: bool,
) -> None:
    """Raises if two arrays differ by more than rounding, or if the expected one could not tell."""
    if got.shape != expected.shape:
        raise AssertionError(f"{where}: got shape {got.shape}, expected {expected.shape}")
    if "f" not in (got.dtype.kind, expected.dtype.kind):
        rtol = atol = 0.0
    if expected.dtype.kind == "f" and not equal_nan:
        _assert_tells(expected, where)
    finite = np.isfinite(expected)
    scale = float(np.max(np.abs(expected), initial=0.0, where=finite)) if atol else 0.0
    bad = ~np.isclose(got, expected, rtol=rtol, atol=atol * scale, equal_nan=equal_nan)
    if bad.any():
        error = np.where(bad, np.abs(got.astype(np.float64) - expected.astype(np.float64)), 0)
        worst = np.unravel_index(np.argmax(error), error.shape)
        raise AssertionError(
            f"{where}: {bad.sum()} of {bad.size} differ, most at {tuple(map(int, worst))}: got"
            f" {got[worst]}, expected {expected[worst]} (off by {error[worst]:.3g}, rtol {rtol},"
            f" atol {atol} of {scale:.3g})"
        )


def _assert_tells(expected: np.ndarray[Any, Any], where: str) -> None:
    """Raises if an expected array holds NaN, or nothing but infinities."""
    if np.isnan(expected).any():
        raise AssertionError(
            f"{where}: got an expectation of NaN, expected numbers, or equal_nan=True"
        )
    if expected.size and not np.isfinite(expected).any():
        raise AssertionError(
            f"{where}: got an expectation without a finite number, expected one, or equal_nan=True"
        )
