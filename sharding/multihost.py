"""Several processes: starting them, agreeing on sizes, and global arrays from what each host
holds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec as P
from jaxtyping import Num

from .axes import axis_names
from .call import by_leaf
from .jax_internals import coordinator
from .mesh import ParallelMesh, check_parallel

EXCHANGE_TIMEOUT_S = 600
_EXCHANGES = itertools.count()


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    heartbeat_timeout_s: int = 100,
) -> None:
    """`jax.distributed.initialize`, once; call it before anything else uses JAX.

    Args:
      coordinator: "host:port" of process 0; None where JAX finds the cluster itself (TPU pods,
        Slurm, MPI).
      num_processes: how many processes there are; for 1 this does nothing.
      process_id: the number of this process, from 0.
      heartbeat_timeout_s: how long a process may be silent before the others end.

    Example:
      >>> start(num_processes=1)
    """
    if num_processes != 1 and not jax.distributed.is_initialized():
        jax.distributed.initialize(
            coordinator, num_processes, process_id, heartbeat_timeout_seconds=heartbeat_timeout_s
        )


def exchange(what: str, mine: bytes) -> list[bytes]:
    """The bytes of all processes, in their order.

    All must call this, in the same order and from one thread.

    The bytes travel through JAX's coordinator, so this does not wait for a running step.

    Args:
      what: the name of this exchange. Processes compare it, so that a process at another call is
        noticed.
      mine: the bytes of this process.

    Raises:
      RuntimeError: several processes without `start`, a process that does not arrive within ten
        minutes, or processes at different calls.

    Example:
      >>> exchange("sizes", b"3")
      [b'3']
    """
    if jax.process_count() == 1:
        return [mine]
    client = coordinator()
    if client is None:
        first = "jaxppo.sharding.multihost.start() before all else"
        raise RuntimeError(f"jax.distributed: got no coordinator, expected {first}")
    number = next(_EXCHANGES)
    me = jax.process_index()
    client.key_value_set_bytes(f"jaxppo/{number}/{me}", what.encode() + b"\0" + mine)
    client.wait_at_barrier(f"jaxppo/{number}", 1000 * EXCHANGE_TIMEOUT_S)
    brought = {
        int(key.rsplit("/", 1)[1]): value
        for key, value in client.key_value_dir_get_bytes(f"jaxppo/{number}")
    }
    if number:  # all processes are at this exchange, so all have read the one before
        client.key_value_delete(f"jaxppo/{number - 1}/{me}")
    calls = []
    everyone = []
    for process in sorted(brought):
        call, sent = brought[process].split(b"\0", 1)
        calls.append(call.decode())
        everyone.append(sent)
    if len(set(calls)) > 1:
        named = ", ".join(f"{call} on process {process}" for process, call in enumerate(calls))
        raise RuntimeError(
            f"exchange: got processes at different calls, {named}, expected the same"
        )
    return everyone


def agree(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The maximum of each size over all processes; every process must call this.

    Example:
      >>> agree((3, 4))
      (3, 4)
    """
    return tuple(np.concatenate(gather(np.array([sizes], np.int64))).max(axis=0).tolist())


def gather(rows: Num[np.ndarray, "N ..."]) -> list[Num[np.ndarray, "N ..."]]:
    """The rows of every process, which may have different numbers of them; every process must call
    this.

    Example:
      >>> [x.tolist() for x in gather(np.array([[1, 2]]))]
      [[[1, 2]]]
    """
    everyone = exchange(f"rows of {rows.dtype}{list(rows.shape[1:])}", rows.tobytes())
    return [np.frombuffer(sent, rows.dtype).reshape(-1, *rows.shape[1:]) for sent in everyone]


@contextlib.contextmanager
def together(parallel: ParallelMesh | None) -> Iterator[None]:
    """Raises one process's error on all processes of the mesh, and names that process and its host.

    Every process must enter the block, and must not exchange anything inside it. On a mesh of one
    process, the error is raised unchanged.

    Raises:
      TypeError, ValueError: the error itself; any other type is raised as ValueError.

    Example:
      >>> with together(None):
      ...     pass
    """
    check_parallel(parallel, "ParallelMesh or None")
    if parallel is None or not spans_processes(parallel):
        yield
        return
    raised: Exception | None = None
    text = ""
    try:
        yield
    except Exception as error:
        raised, text = error, f"{type(error).__name__}\0{socket.gethostname()}\0{error}"
    # a path may hold bytes that are not UTF-8: an error here would leave the other processes
    # waiting
    for process, brought in enumerate(exchange("errors", text.encode(errors="backslashreplace"))):
        if brought:
            kind, host, message = brought.decode().split("\0", 2)
            error_type = TypeError if kind == "TypeError" else ValueError
            raise error_type(f"{message} (on process {process}, host {host})") from raised


def spans_processes(parallel: ParallelMesh) -> bool:
    """Whether devices of the mesh belong to several processes.

    Example:
      >>> spans_processes(make_parallel_mesh("dp=1", devices=jax.devices()[:1]))
      False
    """
    return len({device.process_index for device in parallel.mesh.devices.flat}) > 1


def numbers_before(parallel: ParallelMesh, count: int) -> int:
    """The sum of `count` over the processes whose data shards come before this process's; all must
    call this.

    Processes with the same data shards hold the same rows, and are counted once.
    """
    mine = np.array([[min(local_data_shards(parallel)), count]], np.int64)
    held = dict(tuple(row) for rows in gather(mine) for row in rows.tolist())
    return sum(n for first, n in held.items() if first < mine[0, 0])


def check_equal(what: str, value: object) -> None:
    """Raises on every process unless `repr(value)` is the same on all of them; every process
    must call this.
    """
    texts = [sent.decode() for sent in exchange(f"comparison of {what}", repr(value).encode())]
    for process, other in enumerate(texts):
        if other != texts[0]:
            raise ValueError(
                f"{what}: got {texts[0]} on process 0 and {other} on process {process}, expected"
                " the same"
            )


def check_equal_rows(what: str, arrays: Mapping[str, np.ndarray], parallel: ParallelMesh) -> None:
    """Raises on every process if two with the same data shards pass different arrays; all must
    call this.
    """
    mine = local_data_shards(parallel)
    prints = {name: zlib.crc32(np.ascontiguousarray(x).tobytes()) for name, x in arrays.items()}
    first: dict[str, tuple[int, dict[str, int]]] = {}
    for process, sent in enumerate(
        exchange(f"rows of {what}", json.dumps([mine, prints]).encode())
    ):
        shards, received = json.loads(sent)
        other, expected = first.setdefault(str(shards), (process, received))
        differ = [name for name in expected if received.get(name) != expected[name]]
        if differ:
            raise ValueError(
                f"{what}: got other {', '.join(differ)} on process {process} than on process"
                f" {other}, expected the same: both hold data shards {shards}"
            )


def local_data_shards(parallel: ParallelMesh) -> list[int]:
    """The data shards that have a device in this process, by their place in the order of
    `parallel.data`.

    Example:
      >>> local_data_shards(make_parallel_mesh("dp=1", devices=jax.devices()[:1]))
      [0]
    """
    sharding = parallel.sharding(P(parallel.data))
    held = sharding.addressable_devices_indices_map((parallel.data_size,)).values()
    return sorted({index[0].start or 0 for index in held if index})


def to_global(tree: Any, specs: Any, parallel: ParallelMesh) -> Any:
    """Makes global arrays from each host's rows: those of its own data shards, in full along other
    dimensions.

    Args:
      tree: a pytree of arrays, such as a `RolloutBatch` of this host's rows; None leaves stay None.
      specs: the PartitionSpecs, or a pytree prefix of them. The data axes mark the dimension of the
        rows.
      parallel: the mesh.

    Returns:
      The pytree of `jax.Array`s over the whole mesh.

    Raises:
      ValueError: rows that the data shards of this host do not divide.
    """

    def place(spec: P, x: Any) -> jax.Array:
        local = np.asarray(x)
        names = [axis_names(entry) for entry in spec]
        shape = list(local.shape)
        if parallel.data in names:
            dim = names.index(parallel.data)
            shards = len(local_data_shards(parallel))
            if shape[dim] % shards:
                raise ValueError(
                    f"tree: got {shape[dim]} rows on this host, expected a multiple of {shards}"
                )
            shape[dim] = shape[dim] // shards * parallel.data_size
        return jax.make_array_from_process_local_data(parallel.sharding(spec), local, tuple(shape))

    # the guard takes this function's transfers for implicit ones
    with jax.transfer_guard_host_to_device("allow"):
        return by_leaf(place, specs, tree)


def to_local(tree: Any, parallel: ParallelMesh) -> Any:
    """The rows of this host's data shards, from global arrays `[R, ...]`; inverts `to_global`, and
    all must call this.

    Example:
      >>> parallel = make_parallel_mesh("dp=1", devices=jax.devices()[:1])
      >>> to_local(to_global(np.ones((2, 3)), parallel.tokens_spec, parallel), parallel).shape
      (2, 3)
    """
    if not spans_processes(parallel):
        return jax.device_get(tree)

    def rows(x: jax.Array) -> np.ndarray:
        held = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
        return np.concatenate(jax.device_get([held[start] for start in sorted(held)]))

    return jax.tree.map(rows, jax.device_put(tree, parallel.sharding(parallel.rows_spec)))


def whole(tree: Any) -> Any:
    """Gathers arrays that are spread over processes, so that each process has them in full; all
    must call this.

    Example:
      >>> whole(np.ones(3)).shape
      (3,)
    """

    def read(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(read, tree)
