"""Compiles candidates in separate processes, and keeps what was found in a file."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import math
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from examples.planner.plan_bounds import Candidate, Work
from examples.trainer.files import read_bytes, read_text

KINDS = ("products", "elementwise", "copies", "kernels", "collectives")


@dataclasses.dataclass(frozen=True)
class Found:
    """The compiler's figures for a candidate.

    Args:
      candidate: the plan.
      needed: bytes that a device needs for parameters, moments, batch and temporaries. None if the
        compiler refused the program for another reason than memory.
      times: milliseconds by kind, as in `jaxppo.sharding.Time`; empty if the program does not fit.
      refused: why the compiler refused the program, if it did.
      seconds: how long it took to compile.
    """

    candidate: Candidate
    needed: int | None
    times: dict[str, float]
    refused: str = ""
    seconds: float = 0.0

    @property
    def ms(self) -> float:
        if not self.times:
            return math.inf
        return sum(self.times[kind] for kind in KINDS)


class Compilers:
    """Processes that compile, one for each candidate: one that crashes or is stopped does not
    affect the others.
    """

    def __init__(self, work: Work, workers: int) -> None:
        self._work = work
        self._workers = workers
        self._running: dict[Connection, tuple[Candidate, Any]] = {}

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: Any) -> None:
        for _, process in self._running.values():
            process.terminate()
            process.join()

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, c: Candidate) -> bool:
        return any(c == other for other, _ in self._running.values())

    def start(self, todo: Sequence[Candidate]) -> None:
        """Starts as many of these as there are free processes, the first ones first."""
        context = multiprocessing.get_context("spawn")
        for c in todo[: self._workers - len(self._running)]:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(self._work, c, theirs), daemon=True)
            process.start()
            theirs.close()
            self._running[ours] = c, process

    def done(self, seconds: float) -> Iterator[tuple[Candidate, Found | int]]:
        """Waits for processes to end: each candidate with its figures, or with the exit code of
        a failed process.
        """
        for end in wait(list(self._running), timeout=None if math.isinf(seconds) else seconds):
            assert isinstance(end, Connection)
            c, process = self._running.pop(end)
            found = None
            with contextlib.suppress(EOFError), end:
                found = Found(c, **end.recv())
            process.join()
            yield c, process.exitcode if found is None else found


def _send(work: Work, c: Candidate, end: Connection) -> None:
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        end.send(compile_candidate(work, c))


def compile_candidate(work: Work, c: Candidate) -> dict[str, Any]:
    """Compiles one candidate in this process. Returns the fields of its `Found`."""
    import jax

    from examples.planner import pod_head
    from examples.planner.pod_step import GIB, TrainStep, held

    start = time.monotonic()
    jax.config.update("jax_platforms", "cpu")  # do not take a real TPU of this machine
    # a cached program has no estimates of time
    jax.config.update("jax_enable_compilation_cache", False)
    memory = None if c.memory is None else int(c.memory * GIB)
    tokens = work.row_length // c.cp
    rows = c.rows(work)
    try:
        parallel = pod_head.described_mesh(c.mesh, work.topology)
        parts, found = held(
            TrainStep(work.sizes, tokens, parallel, rows, c.micro_batches, memory, c.trees)
        )
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return {"needed": None, "times": {}, "refused": str(error).splitlines()[0]}
    times = {}
    if found and found.time:
        times = {kind: getattr(found.time, kind) for kind in (*KINDS, "overlapped")}
    refused = "" if found else "out of memory"
    return {
        "needed": sum(parts.values()),
        "times": times,
        "refused": refused,
        "seconds": time.monotonic() - start,
    }


class Kept:
    """The file `plans.jsonl` of a folder: a line for each candidate, with a digest of all that its
    figures depend on.

    Lines of other searches are kept. A last line that is incomplete, because the process was
    killed, is ignored.
    """

    def __init__(self, folder: Path, work: Work) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "plans.jsonl"
        self._work = dataclasses.asdict(work) | {"model": None}
        versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")]
        self._versions = [*versions, _source_digest()]

    def __enter__(self) -> Kept:
        whole = not self._path.exists() or read_bytes(self._path)[-1:] in (b"", b"\n")
        self._file = self._path.open("a")
        if not whole:
            self._file.write("\n")
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def key(self, c: Candidate) -> str:
        work = dict(self._work)
        if not c.trees:
            work["saved"] = None
        given = json.dumps([work, dataclasses.asdict(c), self._versions], sort_keys=True)
        return hashlib.sha256(given.encode()).hexdigest()

    def read(self) -> Iterator[Found]:
        """The figures of this search that are in the file."""
        for line in read_text(self._path, errors="replace").splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                candidate = Candidate(**record.pop("candidate"))
                if record.pop("key") == self.key(candidate):
                    yield Found(candidate, **record)

    def add(self, found: Found) -> None:
        self._file.write(
            json.dumps({"key": self.key(found.candidate)} | dataclasses.asdict(found)) + "\n"
        )
        self._file.flush()
        os.fsync(self._file.fileno())


def _source_digest() -> str:
    """A digest of the source code of a step."""
    import jaxppo
    import sharding

    files = [
        Path(__file__).with_name(name) for name in ("pod_step.py", "pod_sizes.py", "pod_head.py")
    ]
    for package in (jaxppo, sharding):
        files += sorted(Path(package.__path__[0]).rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()
