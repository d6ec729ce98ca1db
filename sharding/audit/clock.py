"""The time of a compiled program: its instructions are added up, those of loops as often as these
turn; see `Time`.

XLA:TPU writes the cycles that it expects of most instructions into the text of the code that it
generates.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import math
from collections.abc import Sequence

import numpy as np

from ..devices import Device
from ..notes import is_rare
from .hlo import (
    Computation,
    Instruction,
    Module,
    Transfer,
    chain,
    dimensions,
    parse,
    root,
    transfer,
)
from .hlo_bytes import hbm_bytes
from .hlo_integers import Known, loop, values
from .links import Link, Switch
from .results import Milliseconds, Time

_KERNEL_PEAK = 0.93  # the share of the peak that a good kernel reaches, by profiles of its code
_LATENCY = 2e-6  # seconds that a collective takes to start
# Peaks of GPUs relative to bf16's. f32 operands are multiplied as TF32 or, at the highest
# precision, outside of the tensor cores, at a sixteenth on an H100
# (https://www.nvidia.com/en-us/data-center/h100).
_TF32 = 1 / 2
_FULL_F32 = 1 / 16

_KINDS = tuple(field.name for field in dataclasses.fields(Milliseconds))
_KIND = dict(zip(_KINDS, np.eye(len(_KINDS)), strict=True))
_COMPUTE = slice(0, 4)


def estimate_time(text: str, chip: Device, links: Switch) -> Time:
    """The time of a TPU's generated code (`*.after_codegen.txt` of a dump of XLA), by the
    estimates in it.
    """
    try:
        compiler = f"libtpu {importlib.metadata.version('libtpu')}"
    except importlib.metadata.PackageNotFoundError:
        compiler = "libtpu of an unknown version"
    return Clock(parse(text), chip, links).time(compiler)


def roofline(text: str, chip: Device) -> Time:
    """The least time of a GPU's optimized module."""
    return Clock(parse(text), chip, Switch(), is_gpu=True).time("a roofline")


# instructions that take no time of their own, or whose time passes beside other work
_FREE = frozenset(
    {"after-all", "async-done", "async-start", "async-update", "bitcast", "constant", "copy-done", "copy-start",
     "get-tuple-element", "infeed", "opt-barrier", "outfeed", "parameter", "partition-id", "recv", "replica-id", "send",
     "tuple"}
)  # fmt: skip
_MOVES = frozenset(
    {"bitcast", "broadcast", "concatenate", "constant", "copy", "dynamic-slice", "dynamic-update-slice",
     "get-tuple-element", "pad", "parameter", "reshape", "reverse", "slice", "transpose", "tuple"}
)  # fmt: skip


class Clock:
    """Adds up a module.

    Times are in seconds by kind of work: `[2, kinds]`, with the fewest turns and with the most, or
    `[kinds]` for both.
    """

    def __init__(self, module: Module, chip: Device, links: Switch, is_gpu: bool = False) -> None:
        self.module = module
        self.chip = chip
        self.is_gpu = is_gpu
        self.unknown: list[str] = []
        self.shares = functools.cache(links.shares)

    def time(self, compiler: str) -> Time:
        """The time of the module, by the compiler of this name."""
        milliseconds = self._run(self.module.entry, ()).clip(0) * 1e3
        least = Milliseconds(*milliseconds[0].tolist())
        full = Milliseconds(*milliseconds[1].tolist())
        unknown = tuple(dict.fromkeys(self.unknown))
        return Time(
            **dataclasses.asdict(full),
            least=least,
            unknown=unknown,
            compiler=compiler,
            chip=self.chip.name,
        )

    def _run(self, name: str, args: Sequence[Known]) -> np.ndarray:
        """The time of a computation, given what is known of its parameters."""
        computation = self.module.computations[name]
        known = values(self.module, computation, args)
        total = np.zeros((2, len(_KINDS)))
        # how long a collective takes, and when it ends
        started: dict[str, tuple[float, np.ndarray]] = {}
        busy: dict[Link, np.ndarray] = {}  # when a link becomes free
        for x in computation.values():
            source = x.operands[0] if x.operands else ""
            sent = self._sent(name, x)
            if sent is not None:
                # the fusion also does work of its own
                if x.op == "fusion" and x.cycles is not None:
                    total += self._plain(computation, x)
                seconds, end = self._send(sent, x, _elapsed(total), busy)
                begun = self._begun(x)
                if begun:
                    started[begun] = seconds, end
                else:
                    total += _beside(seconds, end, _elapsed(total))
            elif source in started and x.op == "async-update":
                started[x.name] = started.pop(source)
            elif self._ended(x, source) in started:
                seconds, end = started.pop(self._ended(x, source))
                total += _beside(seconds, end, _elapsed(total))
            else:
                total += self._instruction(computation, x, known)
        return total + sum(_KIND["overlapped"] * seconds for seconds, _ in started.values())

    def _begun(self, x: Instruction) -> str:
        """The key of the collective that an instruction begins and another one ends; empty for a
        whole one.
        """
        if x.op.endswith("-start"):
            return x.name
        return self._chain(x, "AsyncCollectiveStart")

    def _ended(self, x: Instruction, source: str) -> str:
        """The key of the collective that an instruction ends, given its first operand; empty for
        none.
        """
        if x.op.endswith("-done"):
            return source
        return self._chain(x, "AsyncCollectiveDone")

    def _sent(self, name: str, x: Instruction, within: bool = False) -> Transfer | None:
        """The collective of an instruction: itself, or the one that it wraps."""
        if x.op in ("fusion", "async-start") or (within and x.op in ("call", "custom-call")):
            for inner in x.all_called:
                for wrapped in self.module.computations[inner].values():
                    sent = self._sent(inner, wrapped, within=True)
                    if sent:
                        return sent
        return transfer(self.module, name, x)

    def _chain(self, x: Instruction, target: str) -> str:
        if x.op != "fusion":
            return ""
        return chain(self.module.called(x, "calls"), target)

    def _send(
        self, sent: Transfer, x: Instruction, now: np.ndarray, busy: dict[Link, np.ndarray]
    ) -> tuple[float, np.ndarray]:
        """How long a collective takes by itself, and when it ends, as each of its links waits
        until it is free.
        """
        groups = sent.groups or (tuple(range(self.module.devices)),)
        if not sent.groups:
            self.unknown.append(
                f"what {x.name} joins ({x.op_name}): charged for all {len(groups[0])} devices"
            )
        if max(map(len, groups)) == 1:
            return 0.0, now
        alone = 0.0
        ends = [now]
        for link, share in self.shares(sent.op, groups).items():
            seconds = share * sent.bytes / self.chip.link
            busy[link] = np.maximum(now, busy.get(link, now)) + seconds
            alone = max(alone, seconds)
            ends.append(busy[link])
        return alone + _LATENCY, np.max(ends, 0) + _LATENCY

    def _instruction(
        self, computation: Computation, x: Instruction, known: dict[str, Known]
    ) -> np.ndarray:
        match x.op:
            case "while":
                return self._loop(x, known)
            case "conditional":
                return self._conditional(x, known)
            case "call":
                [name] = x.calls["to_apply"]
                return self._run(name, [known.get(operand) for operand in x.operands])
            case "async-start" if 'async_execution_thread="sparsecore"' in x.attributes:
                wrapped = self.module.called(x, "calls")
                self.unknown.append(
                    "what the sparse cores take beside the rest"
                    f" ({root(wrapped).op_name or x.name})"
                )
            case "custom-call" if x.target == "tpu_custom_call":
                return _KIND["kernels"] * self._kernel_seconds(computation, x)
        return self._plain(computation, x)

    def _conditional(self, x: Instruction, known: dict[str, Known]) -> np.ndarray:
        """The shortest branch at least, and the longest at most unless it is rarely taken."""
        keys = ("true_computation", "false_computation", "branch_computations")
        names = [name for key in keys for name in x.calls.get(key, ())]
        branches = [
            self._run(name, [known.get(arg)])
            for name, arg in zip(names, x.operands[1:], strict=True)
        ]
        least = min((branch[0] for branch in branches), key=_elapsed)
        most = min if is_rare(x.op_name) else max
        return np.stack([least, most((branch[1] for branch in branches), key=_elapsed)])

    def _loop(self, x: Instruction, known: dict[str, Known]) -> np.ndarray:
        counted = loop(self.module, x, known)
        body = self._run(x.calls["body"][0], counted.body_args)
        asking = self._run(x.calls["condition"][0], counted.condition_args)
        low, high = counted.turns
        if math.isinf(high):
            one = 1e3 * body[1, _COMPUTE].sum()
            turns = f"{low} times or more, {one:.3g} ms of compute each"
            self.unknown.append(f"how often {x.name} turns ({x.op_name}): {turns}")
        return _repeated(body, low, high) + _repeated(asking, low + 1, high + 1)

    def _plain(self, computation: Computation, x: Instruction) -> np.ndarray:
        """The time of an instruction or a fusion that runs by itself."""
        inside = self._inside(computation, x)
        if self._is_free(x) or (x.cycles is None and all(_is_on_scalars(c, y) for c, y in inside)):
            return np.zeros(len(_KINDS))
        products = sum(self._product_seconds(c, y) for c, y in inside)
        if products:
            kind = "products"
        elif all(y.op in _MOVES or _is_on_scalars(c, y) for c, y in inside):
            kind = "copies"
        else:
            kind = "elementwise"
        by_bytes = hbm_bytes(self.module, computation, x) / self.chip.bandwidth
        if x.cycles is None:
            seconds = max(by_bytes, products)
            if self.is_gpu:
                return seconds * _KIND[kind]
            return seconds * (_KIND[kind] + _KIND["unestimated"])
        seconds = x.cycles / self.chip.hertz
        if all(_is_fill(c, y) for c, y in inside):
            # a constant: the estimate is up to ten times its bytes
            seconds = min(seconds, by_bytes)
        return seconds * _KIND[kind]

    def _is_free(self, x: Instruction) -> bool:
        """Whether an instruction takes no time of its own."""
        if x.op in _FREE or x.op.endswith("-done"):
            return True
        if self.is_gpu:
            return x.target == "AllocateBuffer"
        return x.op == "custom-call" and x.cycles is None

    def _product_seconds(self, computation: Computation, x: Instruction) -> float:
        """The time of an instruction's product at the device's peak; 0 if it is not a product."""
        seconds = product_flops(computation, x) / self.chip.flops
        factors = [computation[name].shape for name in x.operands[:2] if name in computation]
        if not (seconds and self.is_gpu and any(shape.startswith("f32") for shape in factors)):
            return seconds
        if x.is_highest:
            return seconds / _FULL_F32
        return seconds / _TF32

    def _inside(
        self, computation: Computation, x: Instruction
    ) -> list[tuple[Computation, Instruction]]:
        """The instructions of a fusion and of those in it; any other instruction itself."""
        if x.op != "fusion":
            return [(computation, x)]
        inner = self.module.called(x, "calls")
        return [pair for y in inner.values() for pair in self._inside(inner, y)]

    def _kernel_seconds(self, computation: Computation, x: Instruction) -> float:
        if x.cycles is not None:  # the XLA of jax 0.10 writes none for a kernel
            return x.cycles / self.chip.hertz
        cost = x.declared
        if not any(cost.values()):
            self.unknown.append(
                f"what the kernel {x.name} takes ({x.op_name}): it declares nothing, charged its"
                " bytes"
            )
        moved = cost.get("bytes_accessed") or hbm_bytes(self.module, computation, x)
        return max(
            cost.get("flops", 0) / (_KERNEL_PEAK * self.chip.flops), moved / self.chip.bandwidth
        )


def product_flops(computation: Computation, x: Instruction) -> float:
    """The flops of a `dot`, of TPUs' `convolution`, or of `[M, K] @ [K, N]` in a GPU's library;
    0 of anything else.
    """
    factors = [computation[name].shape if name in computation else "" for name in x.operands[:2]]
    if x.op in ("convolution", "dot"):
        return 2 * math.prod(dimensions(x.shape)) * x.contracted(*factors)
    if x.op == "custom-call" and x.target.startswith("__cublas"):
        sizes = [math.prod(dimensions(shape)) for shape in (*factors, x.shape)]  # M K, K N, M N
        return 2.0 * math.prod(sizes) ** 0.5
    return 0.0


def _repeated(time: np.ndarray, low: float, high: float) -> np.ndarray:
    """The time of a body that runs from `low` to `high` times; 0 stays 0 where `high` is
    infinite.
    """
    times = np.array([[low], [high]])
    return np.multiply(time, times, out=np.zeros_like(time), where=(time > 0) & (times > 0))


def _elapsed(time: np.ndarray) -> np.ndarray:
    return np.asarray(time[..., _COMPUTE].sum(-1) + time[..., _KINDS.index("collectives")])


def _beside(seconds: float, end: np.ndarray, now: np.ndarray) -> np.ndarray:
    """The time of a collective that is waited for now: what of it is still to come, and what
    other work overlapped.
    """
    left = np.maximum(
        np.subtract(end, now, out=np.full_like(end, seconds), where=np.isfinite(end)), 0
    )[:, None]
    return left * (_KIND["collectives"] - _KIND["overlapped"]) + _KIND["overlapped"] * seconds


def _is_on_scalars(computation: Computation, x: Instruction) -> bool:
    return all(
        y.scalar_dtype
        for y in (x, *(computation[name] for name in x.operands if name in computation))
    )


def _is_fill(computation: Computation, x: Instruction) -> bool:
    """Whether an instruction only fills an array with one value."""
    if x.op == "broadcast":
        return all(computation[name].scalar_dtype for name in x.operands)
    return x.op in ("bitcast", "constant", "tuple") or (
        x.op == "parameter" and x.scalar_dtype != ""
    )
