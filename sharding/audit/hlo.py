"""Parses the text of a compiled module (HLO): computations, instructions, shapes, and the groups
of collectives.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np

_NAME = r"[\w.\-<>]+"
_HEADER = re.compile(rf"(ENTRY )?%?({_NAME}) \(.*\{{$")
_INSTRUCTION = re.compile(rf"\s*(ROOT )?%?({_NAME}) = ")
_CALLS = re.compile(
    r"(calls|to_apply|body|condition|true_computation|false_computation|branch_computations|called_computations)="
    rf"(?:\{{([^}}]*)\}}|%?({_NAME}))"
)
_COLLECTIVE = re.compile(
    r"(all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all|ragged-all-to-all)(-start)?"
)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation: `name = shape op(operands), attributes`.

    Args:
      inside: the text between the parentheses: the operands, the number of a parameter, the value
        of a constant.
    """

    name: str
    shape: str
    op: str
    inside: str
    attributes: str
    is_root: bool

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(rf"%({_NAME})", self.inside))

    @functools.cached_property
    def calls(self) -> dict[str, tuple[str, ...]]:
        """The computations that the instruction calls, by attribute: calls, to_apply, body,
        condition, ...
        """
        return {
            key: tuple(name.strip().lstrip("%") for name in many.split(",")) if many else (one,)
            for key, many, one in _CALLS.findall(self.attributes.split("backend_config=", 1)[0])
        }

    @property
    def all_called(self) -> tuple[str, ...]:
        return sum(self.calls.values(), ())

    @functools.cached_property
    def cycles(self) -> int | None:
        """XLA:TPU's estimate; None where it makes none."""
        digits = self._found(r'"estimated_cycles":"(\d+)"')
        if not digits:
            return None
        return int(digits)

    @property
    def declared(self) -> dict[str, int]:
        """What a Pallas kernel declares: its flops, bytes_accessed and transcendentals."""
        costs = self._found(r'"cost_estimate":\{([^}]*)\}')
        return {key: int(number) for key, number in re.findall(r'"(\w+)":"?(\d+)', costs)}

    @property
    def op_name(self) -> str:
        """The name of the operation in the traced program."""
        return self.attribute("op_name")

    @property
    def target(self) -> str:
        """What a custom-call calls."""
        return self.attribute("custom_call_target")

    @property
    def is_highest(self) -> bool:
        """Whether a product on a GPU asks for the highest precision."""
        return bool(
            self._found(r'(operand_precision=\{[^}]*highest|"operand_precision":\["HIGHEST)')
        )

    @property
    def scalar_dtype(self) -> str:
        """The dtype of a scalar; empty for arrays."""
        match = re.match(r"(\w+)\[\]", self.shape)
        if match is None:
            return ""
        return match[1]

    def contracted(self, lhs: str, rhs: str) -> int:
        """The size of the dimensions that a product sums over, given the shapes of its factors."""
        # `convolution(rows, kernel), dim_labels=bf_io->bf`
        if labels := self._found(r"dim_labels=\w+_(\w+)->"):
            return math.prod(
                size for size, label in zip(dimensions(rhs), labels, strict=False) if label != "o"
            )
        sizes = dimensions(lhs)
        if not sizes:
            return 1
        dims = self._found(r"lhs_contracting_dims=\{([\d,]*)\}")
        return math.prod(sizes[d] for d in _integers(dims))

    def attribute(self, name: str) -> str:
        """The value of `name=word` or `name="value"`; empty where there is none."""
        return self._found(rf'\b{name}="([^"]*)"') or self._found(rf"\b{name}=(\w+)")

    def _found(self, pattern: str) -> str:
        match = re.search(pattern, self.attributes)
        if match is None:
            return ""
        return match[1]


Computation = dict[str, Instruction]
Groups = tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled module: its computations, each a dict of instructions by name, and the number
    of `devices`.
    """

    computations: dict[str, Computation]
    entry: str
    devices: int

    def called(self, x: Instruction, *keys: str) -> Computation:
        """The one computation that an instruction calls by one of these attributes."""
        [name] = (name for key in keys for name in x.calls.get(key, ()))
        return self.computations[name]

    @functools.cached_property
    def looped(self) -> frozenset[str]:
        """The computations that run in the body or the condition of a loop."""
        everywhere = [x for computation in self.computations.values() for x in computation.values()]
        pending = [
            name
            for x in everywhere
            for key in ("body", "condition")
            for name in x.calls.get(key, ())
        ]
        looped: set[str] = set()
        while pending:
            name = pending.pop()
            if name in looped:
                continue
            looped.add(name)
            for x in self.computations.get(name, {}).values():
                pending += x.all_called
        return frozenset(looped)


def parse(text: str) -> Module:
    """Reads a module's text, as `compiled.as_text()` or a dump of XLA gives it."""
    computations: dict[str, Computation] = {}
    entry = ""
    current = None
    for line in text.splitlines():
        if header := _HEADER.match(line):
            current = computations.setdefault(header[2], {})
            if header[1]:
                entry = header[2]
        elif line.startswith("}"):
            current = None
        elif current is not None and (start := _INSTRUCTION.match(line)):
            instruction = _instruction(start, line)
            current[instruction.name] = instruction
    sizes = (
        re.search(rf"^HloModule.*\b{key}=(\d+)", text, re.M)
        for key in ("num_partitions", "replica_count")
    )
    return Module(computations, entry, math.prod(int(size[1]) for size in sizes if size))


def _instruction(start: re.Match[str], line: str) -> Instruction:
    rest = line[start.end() :]
    if rest.startswith("("):
        end_of_shape = _closing(rest, 0)
    else:
        end_of_shape = rest.index(" ")
    call = rest[end_of_shape:].lstrip()
    opening = call.index("(")
    end = _closing(call, opening)
    return Instruction(
        name=start[2],
        shape=rest[:end_of_shape],
        op=call[:opening],
        inside=call[opening + 1 : end - 1],
        attributes=call[end:],
        is_root=bool(start[1]),
    )


def _closing(text: str, opening: int) -> int:
    """The index after the parenthesis that closes the one at `opening`."""
    steps = {"(": 1, ")": -1}
    depth = 0
    for match in re.compile("[()]").finditer(text, opening):
        depth += steps[match[0]]
        if depth == 0:
            return match.end()
    return len(text)


def root(computation: Computation) -> Instruction:
    """The instruction whose value a computation returns."""
    return next((x for x in computation.values() if x.is_root), list(computation.values())[-1])


def shape_bytes(shape: str, in_hbm: bool = False) -> int:
    """The bytes of a shape, of all parts of a tuple; `in_hbm` leaves out other memories (`S(1)`
    in a layout).
    """
    total = 0
    for dtype, dims, layout in re.findall(r"(\w+)\[([^\]]*)\](\{[^}]*\})?", shape):
        if not (in_hbm and re.search(r"S\([1-9]", layout)):
            total += math.prod(dimensions(f"[{dims}]")) * _bits(dtype) // 8
    return total


def _bits(dtype: str) -> int:
    """The bits of a number of a dtype, which stand in its name; 0 for what has none, such as a
    token.
    """
    if dtype == "pred":
        return 8
    digits = re.findall(r"\d+", dtype)
    return int(digits[0]) if digits else 0


def dimensions(shape: str) -> list[int]:
    """The dimensions of a shape, of a tuple those of its first part."""
    match = re.search(r"\[([^\]]*)\]", shape)
    if match is None:
        return []
    return [int(size.lstrip("<=")) for size in match[1].split(",") if size]


def parts(shape: str) -> list[str]:
    """The parts of a tuple's shape."""
    steps = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1) | {",": 0}
    texts = []
    depth = 0
    begin = 1
    for match in re.finditer(r"[(\[{]|[)\]}]|,", shape):
        depth += steps[match[0]]
        if (match[0] == "," and depth == 1) or depth == 0:
            texts.append(shape[begin : match.start()])
            begin = match.end()
    return texts


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective: its name, the groups of devices that it joins, and the larger of a device's
    input and output.

    The groups are pairs for a permutation, and empty where they could not be read.
    """

    op: str
    groups: Groups
    bytes: int


def chain(computation: Computation, target: str) -> str:
    """The id of a collective in parts, if this is the fusion that calls `target`; an empty string
    for others.

    XLA:TPU divides some collectives among fusions that compute something else: one with
    `AsyncCollectiveStart`, any number of others, and one with `AsyncCollectiveDone`. Each holds the
    whole collective, with the same id.
    """
    if not any(x.target == target for x in computation.values()):
        return ""
    found = (re.search(r'chain_id="?(\d+)', x.attributes) for x in computation.values())
    return next((match[0] for match in found if match), "")


def transfer(module: Module, computation: str, instruction: Instruction) -> Transfer | None:
    """The collective that an instruction is, or begins; None for any other instruction."""
    if not (match := _COLLECTIVE.fullmatch(instruction.op)):
        return None
    if "chain_id=" in instruction.attributes and not chain(
        module.computations[computation], "AsyncCollectiveStart"
    ):
        return None
    kind = match[1]
    groups = _groups(instruction.attributes, module.devices)
    size = shape_bytes(instruction.shape)
    # its operands are a part of its result, and semaphores too
    if match[2] and kind != "all-reduce":
        size = max(map(shape_bytes, parts(instruction.shape)), default=0)
    if kind == "reduce-scatter" and groups:
        size *= len(groups[0])
    # the fusion that is XLA's reduce-scatter on TPU
    if computation.startswith("all-reduce-scatter"):
        kind = "reduce-scatter"
    return Transfer(kind, groups, max(size, 1))


def _groups(attributes: str, devices: int) -> Groups:
    """The groups of devices of a collective, in any of the ways in which XLA writes them."""
    if match := re.search(r"(?:replica_groups|source_target_pairs)=\{(\{[^=]*?\})\}", attributes):
        return tuple(tuple(map(int, g.split(","))) for g in re.findall(r"\{([\d,]+)\}", match[1]))
    if "replica_groups={}" in attributes:
        return (tuple(range(devices)),)
    if match := re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes):
        return tuple(map(tuple, _iota(match[2]).reshape(_integers(match[1])).tolist()))
    mesh = (
        r"replica_groups=@?mesh\[([^\]]*)\](?:, device_ids=\((\[[^)]*\)|\[[\d,]+\]|[\d,]+)\))?"
        r" ?\{([^}]*)\}"
    )
    if match := re.search(mesh, attributes):
        return _mesh_groups(*match.groups())
    return ()


def _mesh_groups(axes: str, device_ids: str | None, joined: str) -> Groups:
    """The groups of `mesh['a'=2,'b'=8] {'b':(2)4}`: along axes, or along a part of one; `(2)4`
    is a 4 behind a 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'?(\w+)'?=(\d+)", axes)}
    places = np.indices(tuple(sizes.values())).reshape(len(sizes), -1)
    if device_ids is None:
        ids = np.arange(places.shape[1])
    elif "[" in device_ids:
        ids = _iota(device_ids).reshape(-1)
    else:
        ids = np.array(_integers(device_ids))
    for name, before, part in re.findall(r"'?(\w+)'?(?::\((\d+)\)(\d+))?", joined):
        size = int(part or sizes[name])
        stride = sizes[name] // (int(before or 1) * size)
        axis = list(sizes).index(name)
        # the same for all members of a group
        places[axis] -= places[axis] // stride % size * stride
    groups: dict[tuple[int, ...], list[int]] = {}
    for device, place in zip(ids, places.T, strict=True):
        groups.setdefault(tuple(map(int, place)), []).append(int(device))
    return tuple(map(tuple, groups.values()))


def _iota(text: str) -> np.ndarray:
    """`[2,3]T(1,0)`: the numbers from 0 on in that shape, transposed."""
    shape, _, order = text.partition("T")
    dims = _integers(shape.strip("[]"))
    ids = np.arange(math.prod(dims)).reshape(dims)
    if not order:
        return ids
    return ids.transpose(_integers(order.strip("()")))


def _integers(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]
