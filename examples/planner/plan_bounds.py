"""Lower bounds of a training step's memory and time on a device: which plans cannot fit, or cannot
be the best.

The step is that of `pod_step.TrainStep`. The bounds never leave out a plan that fits or that is
among the best. `expected` is a guess. It decides what to compile first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from examples.planner.pod_sizes import ModelSizes

# products for each product of a layer: forward, the same recomputed, and two in the backward
_RECOMPUTED = 4
# the two products of attention together: scores five times, weighted values four times
_OF_ATTENTION = 9
_OF_HEAD = 3
# bytes that plain attention moves for each score in a step, by the TPU compiler's estimate
_BYTES_A_SCORE = 100
# time of products and elementwise work, divided by that of products at the chip's peak
_SLOWDOWN = 1.3


@dataclasses.dataclass(frozen=True)
class Work:
    """A model, the chips, and the rows of one step.

    Args:
      model: name of the model.
      sizes: sizes of the model.
      topology: the chips, by libtpu's name.
      device: figures of one chip, from `jaxppo.sharding.known_device`.
      devices: number of chips.
      rows: number of rows in a step.
      row_length: number of tokens in a row.
      saved: the share of rows that packing as trees saves. None: trees are not considered.
    """

    model: str
    sizes: ModelSizes
    topology: str
    device: Any
    devices: int
    rows: int
    row_length: int
    saved: float | None = None


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One plan: the sizes of mesh axes, K micro-batches, GiB for the head (None: its default),
    and trees or not.
    """

    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    tp: int = 1
    micro_batches: int = 1
    memory: float | None = None
    trees: bool = False

    @property
    def mesh(self) -> str:
        sizes = {"dp": self.dp, "fsdp": self.fsdp, "cp": self.cp, "tp": self.tp}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "dp=1"

    def rows(self, work: Work) -> int:
        """The rows of each data shard in a micro-batch; the last ones may be empty."""
        rows = math.ceil(work.rows * (1 - (work.saved or 0))) if self.trees else work.rows
        return math.ceil(rows / (self.dp * self.fsdp * self.micro_batches))

    def __str__(self) -> str:
        memory = "" if self.memory is None else f", head {self.memory:g} GiB"
        return f"{self.mesh}, K={self.micro_batches}{memory}{', trees' if self.trees else ''}"


def candidates(work: Work) -> Iterator[Candidate]:
    """Every mesh that divides the model, with every K that divides its rows.

    The head has its default memory.
    """
    for tp in _divisors(work.devices):
        for cp in _divisors(work.devices // tp):
            for fsdp in _divisors(work.devices // tp // cp):
                dp = work.devices // tp // cp // fsdp
                for trees in (False, True) if work.saved else (False,):
                    mesh = Candidate(dp, fsdp, cp, tp, trees=trees)
                    if _divides(work, mesh):
                        for K in _divisors(mesh.rows(work)):
                            yield dataclasses.replace(mesh, micro_batches=K)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _divides(work: Work, c: Candidate) -> bool:
    sizes = work.sizes
    shards = {None: 1, "fsdp": c.fsdp, "tensor": c.tp}
    if (
        sizes.heads % c.tp
        or sizes.kv_heads % c.tp
        or work.row_length % c.cp
        or c.dp * c.fsdp > work.rows
    ):
        return False
    parameters = sizes.parameters.values()
    return all(
        size % shards[role] == 0
        for shape, roles in parameters
        for size, role in zip(shape, roles, strict=True)
    )


@dataclasses.dataclass(frozen=True)
class Bound:
    """The least memory and time that a device needs.

    Args:
      held: bytes of parameters, moments and batch, which are exact.
      gradients: bytes of gradients.
      activations: bytes of the inputs of all layers, kept for the backward.
      compute: milliseconds of products at the chip's peak, and of the optimiser at its memory's
        bandwidth.
      collectives: milliseconds of the sums and gathers that every plan with this mesh needs.
      expected: milliseconds of the whole step. A guess, not a bound.
    """

    held: int
    gradients: int
    activations: int
    compute: float
    collectives: float
    expected: float

    @property
    def bytes(self) -> int:
        """The sum: gradients of the last layers exist beside the inputs of the first ones."""
        return self.held + self.gradients + self.activations

    @property
    def ms(self) -> float:
        """The larger of the two times, since collectives may overlap all other work."""
        return max(self.compute, self.collectives)


def bound(work: Work, c: Candidate) -> Bound:
    """The least bytes and the least time of a plan.

    Example:
      >>> from examples.planner.pod_sizes import MODELS
      >>> from jaxppo.sharding import known_device
      >>> work = Work("qwen3-8b", MODELS["qwen3-8b"], "v5p:4x4x4", known_device("TPU v5"), 64, 128, 8192)
      >>> found = bound(work, Candidate(fsdp=16, tp=4))
      >>> found.held // 2**20, found.compute < found.expected
      (1469, True)
    """
    sizes = work.sizes
    chip = work.device
    K = c.micro_batches
    L = sizes.layers
    H = sizes.hidden_size
    D = sizes.head_dim
    rows = c.rows(work)
    own = work.row_length // c.cp
    tokens = K * rows * own  # of a device's shards in a whole step
    of_layers = _parameters(sizes, c, layers=True)
    whole = _parameters(sizes, c)
    scores = tokens * work.row_length * sizes.heads // c.tp * L
    products = least_flops(work, c) / chip.flops
    update = 6 * 4 * whole / chip.bandwidth

    def ring(size: float, n: int) -> float:
        return size * (n - 1) / n / (chip.link * (2 if n >= chip.wraps else 1))

    # bytes, of bf16
    hidden = 2 * tokens * H
    gathered = 2 * whole * c.fsdp
    sums = 2 * L * ring(hidden, c.tp)  # over the tensor axis, once a layer
    least = 4 * sums + ring(2 * whole * c.fsdp, c.dp * c.fsdp * c.cp)
    least += min(ring(gathered, c.fsdp), ring(hidden * c.fsdp, c.fsdp))
    keys = 2 * 2 * tokens * c.cp * sizes.kv_heads * D // c.tp
    expected = _SLOWDOWN * products + update + _BYTES_A_SCORE * scores / chip.bandwidth
    expected += 5 * sums + 3 * L * ring(keys, c.cp)
    expected += K * (3 * ring(gathered, c.fsdp) + 2 * ring(4 * whole, c.dp * c.cp))
    return Bound(
        held=3 * 4 * whole + K * rows * own * 4 * 7,
        gradients=2 * of_layers if K == 1 else 4 * whole + 2 * of_layers,
        activations=2 * L * rows * own * H,
        compute=1e3 * (products + update),
        collectives=1e3 * least,
        expected=1e3 * expected,
    )


def least_flops(work: Work, c: Candidate) -> float:
    """Operations of a step's matrix products on one device, with the head in one pass."""
    sizes = work.sizes
    tokens = c.micro_batches * c.rows(work) * work.row_length // c.cp
    L = sizes.layers
    H = sizes.hidden_size
    D = sizes.head_dim
    matrices = H * (2 * sizes.heads * D + 2 * sizes.kv_heads * D + 3 * sizes.mlp_size)
    # the last product of a layer is not computed again: nothing in the backward needs its result
    of_a_token = L * (_RECOMPUTED * matrices - H * sizes.mlp_size) + _OF_HEAD * H * sizes.vocab_size
    return 2 * tokens * (of_a_token + _OF_ATTENTION * L * work.row_length * sizes.heads * D) / c.tp


def _parameters(sizes: ModelSizes, c: Candidate, *, layers: bool = False) -> int:
    """How many parameters a device holds; with `layers`, only those of layers."""
    shards = {None: 1, "fsdp": c.fsdp, "tensor": c.tp}
    return sum(
        math.prod(size // shards[role] for size, role in zip(shape, roles, strict=True))
        for shape, roles in sizes.parameters.values()
        if not layers or (len(shape) > 1 and roles[0] is None)
    )
