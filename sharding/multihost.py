"""Several processes: starting them, agreeing on sizes, and global arrays from what each host holds."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from jaxtyping import Num

from .mesh import ParallelMesh


def start(coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None) -> None:
    """`jax.distributed.initialize`, once; call it before anything else uses JAX.

    Args:
      coordinator: "host:port" of process 0; None where JAX finds the cluster itself (TPU pods, Slurm, MPI).
      num_processes: how many processes there are; 1 makes this a no-op.
      process_id: this one's number, from 0.

    Example:
      >>> start(num_processes=1)
    """
    if num_processes != 1 and not jax.distributed.is_initialized():
        jax.distributed.initialize(coordinator, num_processes, process_id)


def agree(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The largest of each size over all processes, every one of which must call this: `pack(..., agree=agree)`.

    Example:
      >>> agree((3, 4))
      (3, 4)
    """
    if jax.process_count() == 1:
        return sizes
    everyone = np.asarray(multihost_utils.process_allgather(np.asarray(sizes, np.int32)))
    return tuple(int(size) for size in everyone.reshape(-1, len(sizes)).max(axis=0))


def gather(rows: Num[np.ndarray, "N ..."]) -> list[Num[np.ndarray, "N ..."]]:
    """The rows of every process, which may have different numbers of them; every process must call this.

    Example:
      >>> [x.tolist() for x in gather(np.array([[1, 2]]))]
      [[[1, 2]]]
    """
    if jax.process_count() == 1:
        return [rows]
    most = agree((len(rows),))[0]
    padded = np.concatenate([rows, np.zeros((most - len(rows), *rows.shape[1:]), rows.dtype)])
    counts = np.asarray(multihost_utils.process_allgather(np.int32(len(rows)))).reshape(-1)
    # in words of 32 bits, since JAX makes 32 of 64
    words = np.asarray(multihost_utils.process_allgather(np.ascontiguousarray(padded).view(np.int32)))
    everyone = words.view(rows.dtype).reshape(len(counts), most, *rows.shape[1:])
    return [part[:count] for part, count in zip(everyone, counts, strict=True)]


def spans_processes(parallel: ParallelMesh) -> bool:
    """Whether devices of the mesh belong to several processes.

    Example:
      >>> from sharding import make_parallel_mesh
      >>> spans_processes(make_parallel_mesh("dp=1", devices=jax.devices()[:1]))
      False
    """
    return len({device.process_index for device in parallel.mesh.devices.flat}) > 1


def numbers_before(parallel: ParallelMesh, count: int) -> int:
    """How many things the data shards before this process's hold, each process holding `count`; all must call this.

    Processes that hold the same data shards hold the same things, and count once.
    """
    mine = np.array([[min(_local_data_shards(parallel)), count]], np.int64)
    held = dict(tuple(row) for part in gather(mine) for row in part.tolist())
    return sum(n for first, n in held.items() if first < mine[0, 0])


def check_equal(what: str, value: Any) -> None:
    """Raises on every process where `value` is not the same text on all of them; every process must call this."""
    text = np.frombuffer(repr(value).encode(), np.uint8).astype(np.int32)
    texts = [bytes(part.astype(np.uint8)).decode() for part in gather(text)]
    for process, other in enumerate(texts):
        if other != texts[0]:
            raise ValueError(f"{what}: got {texts[0]} on process 0 and {other} on process {process}, expected the same")


def local_data_size(parallel: ParallelMesh) -> int:
    """How many of the data shards have a device in this process.

    Example:
      >>> from sharding import make_parallel_mesh
      >>> local_data_size(make_parallel_mesh("dp=1", devices=jax.devices()[:1]))
      1
    """
    return len(_local_data_shards(parallel))


def to_global(tree: Any, specs: Any, parallel: ParallelMesh) -> Any:
    """Global arrays of the rows that each host holds: those of its own data shards, whole in every other dimension.

    Args:
      tree: a pytree of arrays, such as a `RolloutBatch` of this host's rows; None leaves stay None.
      specs: the PartitionSpec of each, or a prefix; the dimension given the data axes is that of the rows.
      parallel: the mesh.

    Returns:
      The pytree of `jax.Array`s over the whole mesh.

    Raises:
      ValueError: rows that the data shards of this host do not divide.

    Example:
      >>> from sharding import make_parallel_mesh
      >>> parallel = make_parallel_mesh("dp=1", devices=jax.devices()[:1])
      >>> to_global(np.ones((2, 3)), parallel.tokens_spec, parallel).shape
      (2, 3)
    """
    is_spec = lambda leaf: leaf is None or isinstance(leaf, P)  # noqa: E731
    place = lambda spec, part: jax.tree.map(lambda leaf: _to_global(np.asarray(leaf), spec, parallel), part)  # noqa: E731
    with jax.transfer_guard_host_to_device("allow"):  # JAX takes its callbacks for transfers that nobody asked for
        return jax.tree.map(place, specs, tree, is_leaf=is_spec)


def _local_data_shards(parallel: ParallelMesh) -> list[int]:
    """The data shards that have a device in this process, by their place in the order of `parallel.data`."""
    axes = list(parallel.mesh.axis_names)
    others = [axes.index(name) for name in axes if name not in parallel.data]
    order = [axes.index(name) for name in parallel.data] + others
    shards = np.transpose(parallel.mesh.devices, order).reshape(parallel.data_size, -1)
    me = jax.process_index()
    return [i for i, devices in enumerate(shards) if any(device.process_index == me for device in devices)]


def _to_global(local: np.ndarray, spec: P, parallel: ParallelMesh) -> jax.Array:
    names = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    sharding = parallel.sharding(spec)
    if parallel.data not in names:
        return jax.make_array_from_callback(local.shape, sharding, lambda index: local[index])
    dim = names.index(parallel.data)
    mine = _local_data_shards(parallel)
    if local.shape[dim] % len(mine):
        raise ValueError(f"tree: got {local.shape[dim]} rows on this host, expected a multiple of {len(mine)}")
    each = local.shape[dim] // len(mine)
    shape = (*local.shape[:dim], each * parallel.data_size, *local.shape[dim + 1 :])

    def part(index: Any) -> np.ndarray:
        first = mine.index((index[dim].start or 0) // each) * each
        return local[(*index[:dim], slice(first, first + each), *index[dim + 1 :])]

    return jax.make_array_from_callback(shape, sharding, part)
