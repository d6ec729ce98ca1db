"""Orders devices into a mesh so that the busiest axes have the fastest links, and describes each
axis's links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh


def place(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as an array of shape `sizes`, whose axes are ordered from the least traffic to
    the most.

    The first axes span the slices, which a slower network connects. Within a slice
    `jax.experimental.mesh_utils` decides. It refuses an axis that is not a product of whole
    dimensions of the torus; then dimensions are split here.
    """
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(_coordinates(device)[0], []).append(device)
    slice_sizes = sorted({len(devices) for devices in slices.values()})
    if len(slice_sizes) > 1:
        raise ValueError(
            f"devices: got slices of {slice_sizes} devices, expected slices of one size"
        )
    outer = []
    rest = len(slices)
    for size in sizes:
        outer.append(math.gcd(rest, size))
        rest //= outer[-1]
    inner = [size // count for size, count in zip(sizes, outer, strict=True)]
    blocks = np.empty(len(slices), object)
    blocks[:] = [_in_slice(inner, slices[index]) for index in sorted(slices)]
    if len(slices) == 1:
        return blocks[0]
    return np.block(blocks.reshape(outer).tolist())


def _in_slice(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    try:
        return mesh_utils.create_device_mesh(sizes, devices)
    # AssertionError: chips whose cores are devices of their own
    except (NotImplementedError, AssertionError):
        grid = _grid(devices)
        if grid is not None:
            return _split(sizes, grid)
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def _coordinates(device: jax.Device) -> tuple[int, ...]:
    """The slice, then x, y, z and the core, where a device has them."""
    slice_index = getattr(device, "slice_index", None) or 0
    if not hasattr(device, "coords"):
        return (slice_index,)
    return (slice_index, *device.coords, getattr(device, "core_on_chip", None) or 0)


def _grid(devices: Sequence[jax.Device]) -> np.ndarray | None:
    """The devices by their coordinates, or None where they do not fill a box."""
    places = np.array([_coordinates(device) for device in devices])
    places -= places.min(0)
    grid = np.empty(places.max(0) + 1, object)
    grid[tuple(places.T)] = devices
    if grid.size != len(devices) or any(device is None for device in grid.flat):
        return None
    return grid


def _split(sizes: Sequence[int], grid: np.ndarray) -> np.ndarray:
    """Makes axes of `sizes` of parts of the grid's dimensions; the busiest, the last, takes
    neighbours if it can.
    """
    left = list(grid.shape)
    # per dimension: (axis, count), neighbours first
    taken: list[list[tuple[int, int]]] = [[] for _ in left]
    for axis in reversed(range(len(sizes))):
        size = sizes[axis]

        def preference(d: int, size: int = size) -> tuple[bool, int, int]:
            # first dimensions that `size` divides, then unsplit ones (neighbours are one hop
            # apart), then the shortest
            return left[d] % size > 0, grid.shape[d] // left[d], left[d]

        for dimension in sorted(range(len(left)), key=preference):
            count = math.gcd(size, left[dimension])
            if count > 1:
                taken[dimension].append((axis, count))
                left[dimension] //= count
                size //= count
    factors = [factor for parts in taken for factor in reversed(parts)]
    axes = sorted(range(len(factors)), key=lambda i: factors[i][0])
    return grid.reshape([count for _, count in factors]).transpose(axes).reshape(sizes)


def links(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """The links between the devices along each axis of a mesh; none for devices without
    coordinates.

    "slice" is the network between slices, "x", "y" and "z" are dimensions of the torus, "core" is
    the link between two cores of a chip.

    Example:
      >>> links(jax.make_mesh((1,), ("dp",), devices=jax.devices()[:1]))
      {'dp': ()}
    """
    names = np.array(["slice", "x", "y", "z", "core"])
    places = np.array([_coordinates(device) for device in mesh.devices.flat]).reshape(
        *mesh.devices.shape, -1
    )
    if places.shape[-1] < len(names):
        return dict.fromkeys(mesh.axis_names, ())
    differ = [
        np.ptp(places, axis=axis).reshape(-1, len(names)).any(0)
        for axis in range(mesh.devices.ndim)
    ]
    return {
        name: tuple(names[along].tolist())
        for name, along in zip(mesh.axis_names, differ, strict=True)
    }
