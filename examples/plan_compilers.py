"""Compilation of candidates in processes of their own, and the file in which their figures are kept."""

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

from examples.plan_bounds import Candidate, Work

KINDS = ("products", "elementwise", "copies", "kernels", "collectives")


@dataclasses.dataclass(frozen=True)
class Found:
    """What the compiler says of a candidate: bytes that a device needs, or why there is no program, and milliseconds.

    Args:
      candidate: the plan.
      needed: bytes of parameters, moments, batch and temporaries; None where it was refused for another reason.
      times: milliseconds by kind, as in `jaxppo.sharding.Time`; empty where it does not fit.
      refused: the compiler's reason, if it has one.
      seconds: that its compilation took.
    """

    candidate: Candidate
    needed: int | None
    times: dict[str, float]
    refused: str = ""
    seconds: float = 0.0

    @property
    def ms(self) -> float:
        return sum(self.times[kind] for kind in KINDS) if self.times else math.inf


class Compilers:
    """Processes, one a candidate: a compiler that dies takes no other with it, and can be stopped at any time."""

    def __init__(self, work: Work, workers: int) -> None:
        self._work, self._workers = work, workers
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
        """Starts the first of these, as many as there are processes free."""
        context = multiprocessing.get_context("spawn")
        for c in todo[: self._workers - len(self._running)]:
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_send, args=(self._work, c, theirs), daemon=True)
            process.start()
            theirs.close()
            self._running[ours] = c, process

    def done(self, seconds: float) -> Iterator[tuple[Candidate, Found | int]]:
        """What ends next: a candidate with what was found, or with the exit code of a process that found nothing."""
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
    """Compiles one candidate in this process: the fields of its `Found`."""
    import jax

    from examples import pod_head
    from examples.pod_step import GIB, TrainStep, held

    start = time.monotonic()
    jax.config.update("jax_platforms", "cpu")  # a real TPU here is not to be taken
    jax.config.update("jax_enable_compilation_cache", False)  # what it answers has no times
    memory = None if c.memory is None else int(c.memory * GIB)
    tokens, rows = work.row_length // c.cp, c.rows(work)
    try:
        parallel = pod_head.described_mesh(c.mesh, work.topology)
        parts, found = held(TrainStep(work.sizes, tokens, parallel, rows, c.micro_batches, memory, c.trees))
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        return {"needed": None, "times": {}, "refused": str(error).splitlines()[0]}
    times = {kind: getattr(found.time, kind) for kind in (*KINDS, "overlapped")} if found and found.time else {}
    refused = "" if found else "out of memory"
    return {"needed": sum(parts.values()), "times": times, "refused": refused, "seconds": time.monotonic() - start}


class Kept:
    """`plans.jsonl` of a folder: a line each candidate, with a digest of all that determines what is found of it.

    Lines of other searches stay in it. A last line that a sudden end cut short is passed over.
    """

    def __init__(self, folder: Path, work: Work) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "plans.jsonl"
        self._work = dataclasses.asdict(work) | {"model": None}
        versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")]
        self._versions = [*versions, _source_digest()]

    def __enter__(self) -> Kept:
        whole = not self._path.exists() or self._path.read_bytes()[-1:] in (b"", b"\n")
        self._file = self._path.open("a")
        self._file.write("" if whole else "\n")
        return self

    def __exit__(self, *_: Any) -> None:
        self._file.close()

    def key(self, c: Candidate) -> str:
        work = self._work | ({} if c.trees else {"saved": None})
        given = json.dumps([work, dataclasses.asdict(c), self._versions], sort_keys=True)
        return hashlib.sha256(given.encode()).hexdigest()

    def read(self) -> Iterator[Found]:
        """What was kept of this search."""
        for line in self._path.read_text().splitlines():
            with contextlib.suppress(ValueError, KeyError, TypeError):
                record = json.loads(line)
                candidate = Candidate(**record.pop("candidate"))
                if record.pop("key") == self.key(candidate):
                    yield Found(candidate, **record)

    def add(self, found: Found) -> None:
        self._file.write(json.dumps({"key": self.key(found.candidate)} | dataclasses.asdict(found)) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _source_digest() -> str:
    """A digest of the code that a step is made of."""
    import jaxppo
    import sharding

    files = [Path(__file__).with_name(name) for name in ("pod_step.py", "pod_sizes.py", "pod_head.py")]
    for package in (jaxppo, sharding):
        files += sorted(Path(package.__path__[0]).rglob("*.py"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()
