"""Compiles programs faster, and frees them before a process has too many."""

import contextlib
import ctypes
import functools
import gc
import os
import re
import time
from pathlib import Path

import jax

from sharding.testing import emulate_devices

# Linux lets a process map 65,530 regions of memory. XLA for CPUs needs several for each program,
# and crashes when there are no more.
MOST_REGIONS = 30_000
MOST_GROWTH = 2 * 2**30  # bytes, since programs were freed
SECONDS = 5.0  # between two checks
_looked, _held = 0.0, 0
# XLA's flags that halve a run's time. LLVM does not optimize, and code for fusions comes from the
# older of two emitters, which JAX has up to 0.10. Numbers may be rounded otherwise. Devices may
# wait for each other for 200 seconds, not 40, before XLA ends the process: a loaded machine can
# stand still for that long.
QUICK = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):
    QUICK += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    QUICK += " --xla_cpu_collective_call_terminate_timeout_seconds=200"


def start_devices(count: int) -> None:
    """Makes the CPU appear as so many devices.

    With QUICK_COMPILES in the environment, adds the flags of `QUICK`.
    """
    before = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = xla_flags()
    emulate_devices(count)
    # libtpu reads them later, and ends the process if it does not know one
    os.environ["XLA_FLAGS"] = before


def xla_flags(*, quick: bool | None = None) -> str:
    """The flags for a process that a test starts, so that it compiles for CPUs as this one does.

    The caller's own flags stay, behind those of `QUICK`: XLA obeys the last. `quick` decides for
    QUICK_COMPILES.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    quick = bool(os.environ.get("QUICK_COMPILES")) if quick is None else quick
    return f"{QUICK} {flags}".rstrip() if quick else flags


def without_gpu_plugin(text: str) -> str:
    """What a process printed, without the lines of JAX's GPU plugin (the extra gpu-aot) on a
    machine with no driver.
    """
    return re.sub(
        r"^(WARNING: All log messages before absl|I\d+ .*cudart_stub\.cc).*\n",
        "",
        text,
        flags=re.MULTILINE,
    )


@functools.cache
def float16_compiles() -> bool:
    """Whether XLA can convert float16 here.

    For a processor without F16C it calls a function that jaxlib lacks.
    """
    try:
        jax.jit(lambda x: x.astype("float32") * 2)(jax.numpy.ones(8, "float16"))
    except jax.errors.JaxRuntimeError:
        return False
    return True


def let_go() -> None:
    """Frees programs if there are many, or memory grew; called between tests, and between
    examples of a search.
    """
    global _looked, _held
    if time.monotonic() - _looked < SECONDS:
        return
    _looked = time.monotonic()
    # only Linux has this file
    with contextlib.suppress(FileNotFoundError), Path("/proc/self/maps").open() as regions:
        if sum(1 for _ in regions) > MOST_REGIONS or _resident() > _held + MOST_GROWTH:
            jax.clear_caches()
            gc.collect()
            # glibc keeps what compilers freed, up to 10 GiB in a night
            getattr(ctypes.CDLL(None), "malloc_trim", id)(0)
            _held = _resident()


def _resident() -> int:
    """Bytes of memory that the process holds; Linux alone tells."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def kept_in(folder, seconds):
    """Keeps programs that take so long to compile in a folder: the same program is then read
    from there.
    """
    options = {
        "jax_compilation_cache_dir": str(folder),
        "jax_persistent_cache_min_compile_time_secs": seconds,
    }
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    yield str(folder)
    for name, value in before.items():
        jax.config.update(name, value)


def compilations(fn):
    """How many programs a call compiles."""
    count = []

    def listener(name, *_, **__):
        return count.append(name) if "backend_compile" in name else None

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        jax.block_until_ready(fn())
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    return len(count)


def narrow_sums(fn, *args):
    """The lines of a traced program that sum bf16 arrays over devices."""
    lines = str(jax.make_jaxpr(fn)(*args)).splitlines()
    return [line for line in lines if re.search(r":bf16\[.*= (psum|reduce_scatter)", line)]
