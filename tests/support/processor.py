"""Prints the instructions of another processor than this one, for a night's tests: others each day.

XLA compiles for the instructions that `--xla_cpu_max_isa` allows. They decide how many numbers are
added at once, and whether products are rounded before they are added, and so the last bits of every
sum.

    python -m tests.support.processor
"""

import contextlib
import datetime
from pathlib import Path

# XLA's names, and the flag of Linux that says whether a processor has the instructions; the newest
# first
FLAGS = {"AVX512": "avx512f", "AVX2": "avx2", "AVX": "avx", "SSE4_2": "sse4_2"}


def below(flags: set[str]) -> list[str]:
    """What XLA can be told to do without on a processor with these flags: all settings but the
    processor's own.
    """
    there = [name for name, flag in FLAGS.items() if flag in flags]
    return there[1:]


def of_day(names: list[str], day: int) -> str:
    """One of the settings, the next one each day; nothing where there is none, such as on Arm."""
    return names[day % len(names)] if names else ""


def flags_of(text: str) -> set[str]:
    """The flags of the first processor in a text like /proc/cpuinfo."""
    lines = [line for line in text.splitlines() if line.startswith("flags")]
    return set(lines[0].split()) if lines else set()


if __name__ == "__main__":
    today = datetime.datetime.now(datetime.UTC).timetuple().tm_yday
    # only Linux has this file
    with contextlib.suppress(FileNotFoundError), Path("/proc/cpuinfo").open() as cpuinfo:
        print(of_day(below(flags_of(cpuinfo.read())), today))
