"""Compares two tools of the TPU compiler on the same instructions of a head's program.

No TPU is needed.

XLA:TPU estimates the cycles of most instructions before it generates their code; `audit(...).time`
adds these up. With a flag of libtpu it also counts the cycles of the generated code, copies
included. This static profile is a small text file for each instruction (`profile_of`). It takes
minutes to write, and some instructions take much memory.

The flag holds for a whole process. So each program is compiled twice: here without the flag, and
with it in a process of its own. That process may fail after it has written files. Files written by
then are used, and the last record says why the process failed.
"""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from examples.planner.pod_head import Step, best_plain_stats, described_mesh
from examples.planner.pod_sizes import HEADS
from sharding.audit.clock import Clock
from sharding.audit.hlo import Instruction, Module, parse
from sharding.audit.links import Switch
from sharding.devices import Device, device_of

FLAG = "--xla_jf_dump_static_llo_profile_to"
LARGE = 0.1  # ms; instructions that take less by both tools are in the last record only
SMALL = 1000  # cycles; instructions that take fewer are not looked at one by one
# bytes that the compiler may take to make a profile, so that it takes no machine down
MEMORY = 16 * 2**30

# the name of a function of `Step`, and its options
VERSIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "best plain": ("plain", {"stats": best_plain_stats}),
    "forward": ("forward", {}),
    "one pass, no mask": ("one_pass", {"follow_mask": False}),
    "one pass, a mask": ("one_pass", {}),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One version of a head on a described mesh, in words that a command line can carry."""

    topology: str
    mesh: str
    head: str
    tokens: str
    version: str

    @property
    def step(self) -> Step:
        return Step(
            HEADS[self.head],
            int(self.tokens),
            jnp.bfloat16,
            described_mesh(self.mesh, self.topology),
        )


def compared(case: Case) -> list[dict[str, Any]]:
    """A record of each large instruction of a program and one of all its computing, both in
    milliseconds.
    """
    chip = device_of(case.step.parallel.mesh.devices.flat[0])
    assert chip is not None
    with tempfile.TemporaryDirectory() as folder:
        code, files = (Path(folder, name) for name in ("code", "profile"))
        compile_case(case, {"xla_dump_to": str(code), "xla_dump_hlo_as_text": True})
        text = "\n".join(path.read_text() for path in code.glob("*.after_codegen.txt"))
        failure = _profile(case, files)
        found = records(text, profile_of(files), chip)
    found[-1]["profile_ended_early"] = failure
    return found


def compile_case(case: Case, options: dict[str, Any]) -> None:
    """Compiles the program of a case with these options for the compiler."""
    step = case.step
    loss, of_call = VERSIONS[case.version]
    step.program(getattr(step, loss), **of_call).lower(*step.arguments).compile(options)


def _profile(case: Case, folder: Path) -> str | None:
    """Makes a process write the profile into a folder; returns why that ended early, None where
    it did not.
    """
    folder.mkdir()
    env = {
        **os.environ,
        "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {FLAG}={folder}",
    }
    command = [sys.executable, "-m", "benchmarks.static_profile", *dataclasses.astuple(case)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if not any(folder.iterdir()):
        raise RuntimeError(f"{case}: no profile was written\n{run.stderr[-2000:]}")
    if run.returncode == 0:
        return None
    said = re.search(r"Ran out of memory in memory space \w+", run.stderr)
    return said[0] if said else f"exit code {run.returncode}"


def profile_of(folder: Path) -> dict[str, int]:
    """Cycles by instruction, from the files of a static profile.

    Each has this text, and more fields:

        hlo_op_estimate {
          hlo_op_name: "fusion.27"
          estimated_cycles: 1372855
        }

    Of instructions that compute the same, one alone has a file.
    """
    found = {}
    for path in folder.glob("*_static_llo_profile.textproto"):
        text = path.read_text()
        name = re.search(r'hlo_op_name: "([^"]+)"', text)
        cycles = re.search(r"estimated_cycles: (\d+)", text)
        if name and cycles:  # a process that ended early may leave a file empty
            found[name[1]] = int(cycles[1])
    return found


def records(text: str, profile: Mapping[str, int], chip: Device) -> list[dict[str, Any]]:
    """Milliseconds of a program's large instructions by both tools, equal instructions in one
    record.

    An instruction takes what the program takes less without it. So those of a loop count as often
    as it turns, and those of a branch that is rarely taken not at all.

    Args:
      text: generated code.
      profile: cycles by instruction. One without has no `static_ms`, and counts in the last record
        by its estimate.
      chip: that the code was generated for.
    """
    module = parse(text)
    instructions = {
        x.name: x for computation in module.computations.values() for x in computation.values()
    }
    if unknown := profile.keys() - instructions.keys():
        raise ValueError(
            f"the profile is of another program, which has {', '.join(sorted(unknown))}"
        )
    known = with_twins(instructions, profile)
    profile = {
        name: cycles
        for name, cycles in known.items()
        if not passed_by(instructions[name], cycles, chip)
    }
    profiled = counted(module, profile)
    names = [
        x.name for x in instructions.values() if max(x.cycles or 0, known.get(x.name, 0)) > SMALL
    ]
    estimated = without_each(module, names, chip)
    static = without_each(profiled, profile.keys() & {*names}, chip)
    groups: dict[str, dict[str, Any]] = {}
    for name in names:
        what = label(instructions[name])
        record = groups.setdefault(
            what, {"instruction": what, "count": 0, "estimated_ms": 0.0, "static_ms": None}
        )
        record["count"] += estimated[name] > 0
        record["estimated_ms"] += estimated[name]
        if name in static:
            record["static_ms"] = (record["static_ms"] or 0.0) + static[name]
    large = [
        record
        for record in groups.values()
        if max(record["estimated_ms"], record["static_ms"] or 0.0) >= LARGE
    ]
    total = {
        "instruction": "all computing",
        "estimated_ms": computing(module, chip),
        "static_ms": computing(profiled, chip),
        "not_in_profile_ms": computing(counted(module, dict.fromkeys(profile, 0)), chip),
    }
    return [*sorted(large, key=lambda record: -record["estimated_ms"]), total]


def with_twins(
    instructions: Mapping[str, Instruction], profile: Mapping[str, int]
) -> dict[str, int]:
    """The profile, in which instructions that compute the same have the same cycles."""

    def kind(x: Instruction) -> tuple[str, str, int]:
        return label(x), x.shape, x.cycles or 0

    known = {kind(instructions[name]): cycles for name, cycles in profile.items()}
    twins = {name: known[kind(x)] for name, x in instructions.items() if kind(x) in known}
    return twins | dict(profile)


def passed_by(x: Instruction, cycles: int, chip: Device) -> bool:
    """Whether these cycles are too few for what a kernel declares, since the profile took a
    branch around its work.
    """
    flops = x.declared.get("flops")
    return flops is not None and cycles / chip.hertz < flops / chip.flops


def label(x: Instruction) -> str:
    """What an instruction computes: the operation of the traced program that it is named after, and
    its results.

    Example:
      >>> label(Instruction("f", "f32[8,4]{1,0:T(8,128)}", "fusion", "", 'metadata={op_name="jit(f)/while/add"}', True))
      'add f32[8,4], in a loop'
    """
    operation = x.op_name.rsplit("/", 1)[-1] or x.op
    shape = re.sub(r"{[^}]*}", "", x.shape)  # without its layout
    return f"{operation} {shape}{', in a loop' if '/while/' in x.op_name else ''}"


def counted(module: Module, cycles: Mapping[str, int]) -> Module:
    """The module with these numbers of cycles in place of its own."""

    def with_cycles(x: Instruction) -> Instruction:
        if x.name not in cycles:
            return x
        return dataclasses.replace(
            x, attributes=f'"estimated_cycles":"{cycles[x.name]}" {x.attributes}'
        )

    computations = {
        name: {y: with_cycles(x) for y, x in computation.items()}
        for name, computation in module.computations.items()
    }
    return dataclasses.replace(module, computations=computations)


def computing(module: Module, chip: Device) -> float:
    """Milliseconds of everything but collectives."""
    return Clock(module, chip, Switch()).time("").compute


def without_each(module: Module, names: Iterable[str], chip: Device) -> dict[str, float]:
    """The milliseconds of computing that the program takes less without each of these
    instructions.
    """
    everything = computing(module, chip)
    return {name: everything - computing(counted(module, {name: 0}), chip) for name in names}


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    compile_case(Case(*sys.argv[1:]), {})
