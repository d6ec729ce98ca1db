"""The records that an audit returns, and how they are printed."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled module.

    Args:
      op: "all-reduce", "all-gather", "reduce-scatter", "collective-permute" or "all-to-all".
      axes: the mesh axes that it crosses; None where its groups are not a product of axes, or no
        mesh is known.
      bytes: the size of a device's input or output, whichever is larger; for one turn of a loop.
      in_loop: whether it stands in the body or the condition of a loop.
    """

    op: str
    axes: tuple[str, ...] | None
    bytes: int
    in_loop: bool

    def __str__(self) -> str:
        where = " in a loop" if self.in_loop else ""
        return f"{self.op} over {self._over}: {self.bytes / 2**20:.3f} MiB{where}"

    @property
    def _over(self) -> str:
        if self.axes is None:
            return "unknown axes"
        return ", ".join(self.axes) or "no axis"


@dataclasses.dataclass(frozen=True)
class Flops:
    """Floating-point operations of the matrix products on one device; a multiplication and an
    addition are two.

    Args:
      low: the count if loops whose length depends on data take the fewest turns.
      high: the count if they take the most turns; infinite where nothing bounds them.
    """

    low: float
    high: float

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.low + other.low, self.high + other.high)

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low / 1e9:.3f} GFLOP"
        return f"{self.low / 1e9:.3f} to {self.high / 1e9:.3f} GFLOP"


@dataclasses.dataclass(frozen=True)
class Milliseconds:
    """The time of one device, by kind of work.

    Args:
      products: matrix products and the work fused to them.
      elementwise: other arithmetic, reductions, gathers, sorts.
      copies: moves and fills without arithmetic.
      kernels: Pallas and other custom kernels, from the costs that they declare.
      collectives: collectives that no other work overlaps.
      overlapped: collectives that other work overlaps; not a part of any sum.
      unestimated: the part of products, elementwise and copies for which the compiler gives no
        estimate (gathers, scatters, sorts). It is charged its bytes at the memory's peak, which is
        a lower bound.
    """

    products: float
    elementwise: float
    copies: float
    kernels: float
    collectives: float
    overlapped: float
    unestimated: float

    @property
    def compute(self) -> float:
        """The time of everything but the collectives."""
        return self.products + self.elementwise + self.copies + self.kernels

    def __str__(self) -> str:
        return (
            f"compute {self.compute:.3f} ms (products {self.products:.3f}, elementwise"
            f" {self.elementwise:.3f}, copies {self.copies:.3f}, kernels {self.kernels:.3f};"
            f" {self.unestimated:.3f} of it by bytes alone), collectives {self.collectives:.3f} ms,"
            f" and {self.overlapped:.3f} ms beside other work"
        )


@dataclasses.dataclass(frozen=True)
class Time(Milliseconds):
    """The time of a program with loops at full count: its compiler's estimate on a TPU, a lower
    bound on a GPU.

    XLA for GPUs makes no estimate: each kernel takes the time of its bytes at the memory's peak or
    of its products at the peak of their dtype, whichever is longer, and none to start.

    A loop that data may end early takes the most turns that it can, and a `cond` takes its longer
    branch, unless a `note` says that it rarely does. A loop that nothing bounds makes the figures
    of its body infinite.

    A collective takes 2 us and the time of the busiest link on its way, and waits for others on its
    links; opposite ways of a link do not wait for each other. With b bytes (see
    `Collective.bytes`), a message of a permutation takes b over each link from chip to chip, one
    dimension of the slice after another, and one of an all-to-all of n devices b/n. An all-gather
    or a reduce-scatter takes b (n-1)/n, and an all-reduce twice that, over all links that a chip
    has to others of its group: one along a line, two around a ring, for each dimension of the
    group. A dimension is a ring in slices of whole 4x4x4 cubes (v4, v5p, tpu7x), or if it has 16
    chips (v5e, v6e). What sparse cores or fusions send beside other work is charged the same. GPUs
    are assumed to reach each other through a switch, as within one host.

    Args:
      least: the time with the fewest turns and the shorter branches.
      unknown: what the figures leave out or guess: loops that nothing bounds, kernels that declare
        nothing, gathers and scatters of the sparse cores, collectives whose groups could not be
        read.
      compiler: the name and version of the compiler that made the estimates; "a roofline" on a GPU.
      chip: the name of the device.
    """

    least: Milliseconds
    unknown: tuple[str, ...]
    compiler: str
    chip: str

    def __str__(self) -> str:
        lines = [f"on {self.chip}, estimated by {self.compiler}: {super().__str__()}"]
        if dataclasses.astuple(self.least) != dataclasses.astuple(self)[:7]:
            lines.append(f"at least, by {self.compiler}: {self.least}")
        return "\n".join([*lines, *(f"unknown: {text}" for text in self.unknown)])


@dataclasses.dataclass(frozen=True)
class Audit:
    """The costs of a compiled function on each device.

    Args:
      collectives: its collectives, in the order of the module.
      temp_bytes: the size of temporaries, as the compiler laid them out.
      argument_bytes: the size of the arguments.
      output_bytes: the size of the results.
      flops: the flops of its matrix products, with loops counted; a range where a loop's length
        depends on data.
      time: XLA:TPU's estimate, or a roofline for GPUs, see `jaxppo.sharding.Time`; None where the
        devices are neither known TPUs nor known GPUs, or where a persistent compilation cache
        answered instead of the compiler for TPUs.
      notes: the notes that the function left, see `jaxppo.sharding.note`.
      text: the compiled module.
    """

    collectives: tuple[Collective, ...]
    temp_bytes: int
    argument_bytes: int
    output_bytes: int
    flops: Flops
    time: Time | None
    notes: tuple[str, ...]
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        sizes = {
            "temporaries": self.temp_bytes,
            "arguments": self.argument_bytes,
            "results": self.output_bytes,
        }
        costs = [f"{name} {size / 2**20:.1f} MiB" for name, size in sizes.items()]
        lines = [", ".join([*costs, str(self.flops)])]
        if self.time:
            lines.append(f"time {self.time}")
        lines += self.notes
        lines += map(str, self.collectives)
        return "\n".join(lines)
