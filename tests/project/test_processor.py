"""XLA's flags that a contributor sets, such as another processor's instructions, reach every run
of tests.
"""

import os
import subprocess
import sys
from pathlib import Path

import processor
import pytest
from programs import QUICK, xla_flags

START = "import sys; sys.path.insert(0, sys.argv[1]); import programs; programs.start_devices(2)"
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize("quick", ["", "1"])
def test_the_flags_of_the_caller_reach_xla(quick):
    """XLA ends a process at a flag that it does not know: so it has read it."""
    environment = {**os.environ, "QUICK_COMPILES": quick, "XLA_FLAGS": "--xla_no_such_flag=1"}
    command = [sys.executable, "-c", START, str(SUPPORT)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode != 0
    assert "xla_no_such_flag" in done.stderr


def test_processes_that_tests_start_have_them_too(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_max_isa=AVX2")
    monkeypatch.setenv("QUICK_COMPILES", "1")
    assert xla_flags() == xla_flags(quick=True) == f"{QUICK} --xla_cpu_max_isa=AVX2"
    monkeypatch.setenv("QUICK_COMPILES", "")
    assert xla_flags() == "--xla_cpu_max_isa=AVX2"
    assert xla_flags(quick=True) == f"{QUICK} --xla_cpu_max_isa=AVX2"


def test_nights_go_through_the_settings_below_the_own_one():
    cpuinfo = (
        "processor\t: 0\nflags\t\t: fpu sse4_2 avx avx2 fma\n\nprocessor\t: 1\nflags\t\t: sse4_2\n"
    )
    names = processor.below(processor.flags_of(cpuinfo))
    assert names == ["AVX", "SSE4_2"]
    assert [processor.of_day(names, day) for day in (1, 2, 3)] == ["SSE4_2", "AVX", "SSE4_2"]
    assert processor.below({*processor.FLAGS.values()}) == ["AVX2", "AVX", "SSE4_2"]
    assert (
        processor.of_day(processor.below(processor.flags_of("Features\t: fp asimd sve\n")), 1) == ""
    )
