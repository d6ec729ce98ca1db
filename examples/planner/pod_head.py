"""The costs of a head's gradients on a described pod, computed in three ways, each with its
memory.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from examples.planner.described_gpu import described_gpus
from examples.planner.pod_sizes import HeadSizes
from examples.planner.pod_step import Fit, TrainStep, fit, refused_bytes
from jaxppo import (
    Head,
    ParallelMesh,
    PolicyLossConfig,
    RolloutBatch,
    TokenStats,
    log_probs_from_hidden,
    make_parallel_mesh,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.head import HeadOptions
from jaxppo.sharding import Audit, audit, known_device

GIB = 2**30


def head_of(
    sizes: HeadSizes, kernel: jax.Array, spec: jax.sharding.PartitionSpec | None = None
) -> Head:
    """The head of these sizes with this kernel."""
    return Head(kernel, layout=sizes.layout, softcap=sizes.softcap, spec=spec)


def plain_stats(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies `[R, T]` of f32 logits, as anyone would write them."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    log_probs = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - log_z
    return log_probs, log_z - (jnp.exp(logits - log_z[..., None]) * logits).sum(axis=-1)


def best_plain_stats(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The fastest plain version on TPUs: the maximum is a constant, and the target is found by
    comparing columns.
    """
    d = logits - jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True))
    e = jnp.exp(d)
    s = e.sum(axis=-1)
    picked = jnp.where(targets[..., None] == jnp.arange(d.shape[-1])[None, None], d, 0).sum(axis=-1)
    return picked - jnp.log(s), jnp.log(s) - (e * d).sum(axis=-1) / s


def plain_logits(hidden: jax.Array, kernel: jax.Array, sizes: HeadSizes) -> jax.Array:
    """f32 logits `[R, T, V]`."""
    product = "rth,vh->rtv" if sizes.tied else "rth,hv->rtv"
    logits = jnp.einsum(product, hidden, kernel, preferred_element_type=jnp.float32)
    return logits if sizes.softcap is None else sizes.softcap * jnp.tanh(logits / sizes.softcap)


CONFIG = PolicyLossConfig(entropy_coef=0.01)
BUDGETS = (0.3, 0.5, 0.75, 1.0, 2.0, 4.0)  # GiB


@dataclasses.dataclass(frozen=True)
class Step:
    """A policy-gradient step on described arrays.

    Args:
      sizes: the head.
      tokens: the number of tokens of each shard of the data and context axes.
      dtype: the dtype of hidden states and kernel.
      parallel: the mesh, over real or described devices.
    """

    sizes: HeadSizes
    tokens: int
    dtype: Any
    parallel: ParallelMesh

    @property
    def roles(self) -> ParallelMesh:
        """The mesh for the kernel, which each device holds whole if the tensor axis does not
        divide the vocabulary.
        """
        parallel = self.parallel
        if self.sizes.vocab_size % parallel.tensor_size == 0:
            return parallel
        return dataclasses.replace(parallel, tensor=(), replicated=parallel.tensor)

    @property
    def arguments(self) -> tuple[Any, Any, RolloutBatch]:
        """Hidden states, kernel and batch."""
        parallel = self.parallel
        sizes = self.sizes
        shape = (parallel.data_size, self.tokens * parallel.context_size)

        def described(
            dims: tuple[int, ...], dtype: Any, spec: jax.sharding.PartitionSpec
        ) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dims, dtype, sharding=parallel.sharding(spec))

        hidden = described((*shape, sizes.hidden_size), self.dtype, parallel.hidden_spec)
        kernel = described(sizes.kernel_shape, self.dtype, self.kernel_spec)
        ids, x = (
            described(shape, dtype, parallel.tokens_spec) for dtype in (jnp.int32, jnp.float32)
        )
        one = described((shape[0], 1), jnp.int32, parallel.rows_spec)
        layout = {
            "context_layout": parallel.context_layout,
            "context_shards": parallel.context_size,
        }
        return (
            hidden,
            kernel,
            RolloutBatch(ids, ids, ids, ids, x, one, advantages=x, old_log_probs=x, **layout),
        )

    @property
    def kernel_spec(self) -> jax.sharding.PartitionSpec:
        return self.roles.kernel_spec(self.sizes.layout)

    def head(self, kernel: jax.Array) -> Head:
        return head_of(self.sizes, kernel, self.kernel_spec)

    def one_pass(
        self, hidden: Any, kernel: Any, batch: RolloutBatch, **options: Unpack[HeadOptions]
    ) -> Any:
        """`policy_loss_from_hidden`, in one pass if memory allows it."""
        return policy_loss_from_hidden(
            hidden, self.head(kernel), batch, CONFIG, parallel=self.parallel, **options
        )[0]

    def two_passes(
        self,
        hidden: Any,
        kernel: Any,
        batch: RolloutBatch,
        *,
        where: bool = False,
        **options: Unpack[HeadOptions],
    ) -> Any:
        """Log-probs, and then a loss of them. With `where`, log-probs of unmasked tokens only."""
        of_call: Any = {"parallel": self.parallel, "entropy": "bonus", **options}
        if where:
            of_call["where"] = batch.loss_mask > 0
        stats = log_probs_from_hidden(hidden, self.head(kernel), batch.targets, **of_call)
        return policy_loss(stats, batch, CONFIG, parallel=self.parallel)[0]

    def forward(
        self, hidden: Any, kernel: Any, batch: RolloutBatch, **options: Unpack[HeadOptions]
    ) -> Any:
        """Log-probs and entropy of an old, reference or teacher policy."""
        of_call: Any = {"parallel": self.parallel, "entropy": "metric", **options}
        found = log_probs_from_hidden(hidden, self.head(kernel), batch.targets, **of_call)
        return found.log_probs, found.entropy

    def plain(
        self, hidden: Any, kernel: Any, batch: RolloutBatch, *, stats: Any = plain_stats
    ) -> Any:
        """The same loss, computed from logits in memory."""
        logits = plain_logits(hidden, kernel, self.sizes)
        logits = jax.lax.with_sharding_constraint(
            logits, self.parallel.sharding(self.roles.logits_spec)
        )
        found = TokenStats(*stats(logits, batch.targets))
        return policy_loss(found, batch, CONFIG, parallel=self.parallel)[0]

    def program(self, loss: Callable[..., Any], **options: Any) -> Any:
        """A jitted function of `arguments`: the gradients of one of these losses, or the values
        of `forward`.
        """
        if loss == self.forward:
            return jax.jit(functools.partial(loss, **options))
        hidden, kernel, _ = self.arguments
        gradients = jax.grad(lambda *args: loss(*args, **options), (0, 1))
        return jax.jit(gradients, out_shardings=(hidden.sharding, kernel.sharding))

    def cost(self, loss: Callable[..., Any], **options: Any) -> Audit:
        """Audits the `program` of one of these losses or of `forward`."""
        found = audit(self.program(loss, **options), *self.arguments)
        if loss != self.plain:
            return found
        # the plain program has global shapes: the compiler divides its products among the devices
        sharers = self.parallel.data_size * self.parallel.context_size * self.roles.tensor_size
        flops = dataclasses.replace(
            found.flops, low=found.flops.low / sharers, high=found.flops.high / sharers
        )
        return dataclasses.replace(found, flops=flops)


def _cost_or_refusal(step: Step, loss: Callable[..., Any], **options: Any) -> Audit | str:
    """The audit of one of the step's losses, or in words that it does not fit a device."""
    try:
        return step.cost(loss, **options)
    except jax.errors.JaxRuntimeError as error:
        refused = refused_bytes(error)
        if refused is None:
            raise
        chip = known_device(step.parallel.mesh.devices.flat[0].device_kind)
        of = "" if chip is None else f" of the device's {chip.memory / GIB:.0f} GiB"
        return f"does not fit: its temporaries take {refused / GIB:.2f} GiB{of}"


def plan(step: Step) -> dict[str, Audit | str]:
    """Audits three versions of the head's loss.

    Flops are those of one device. One that does not fit gives a text.

    Raises:
      ValueError: the mesh does not divide the hidden size or the number of tokens.
    """
    ways = {"one pass": step.one_pass, "two passes": step.two_passes, "plain": step.plain}
    return {name: _cost_or_refusal(step, loss) for name, loss in ways.items()}


def curve(step: Step, budgets: Sequence[float]) -> list[tuple[float, Audit | str]]:
    """Audits `policy_loss_from_hidden` with each budget in GiB. A budget that is too small, or that
    does not fit the device, gives a text.
    """
    found: list[tuple[float, Audit | str]] = []
    for gib in budgets:
        try:
            found.append((gib, _cost_or_refusal(step, step.one_pass, memory=int(gib * GIB))))
        except ValueError as error:
            found.append((gib, str(error).splitlines()[0]))
    return found


def plan_train(step: TrainStep) -> Fit:
    """Whether a whole training step fits a device, and how much of it is the loss."""
    sizes = HeadSizes(step.sizes.hidden_size, step.sizes.vocab_size, step.sizes.tied)
    head = Step(sizes, step.rows * step.tokens, jnp.dtype(jnp.bfloat16), step.parallel)
    return fit(step, head.cost(head.one_pass))


def table(found: dict[str, Audit | str]) -> str:
    """A table with a column for each version, and below it what each does, or why it cannot."""
    audits = {name: a for name, a in found.items() if not isinstance(a, str)}

    def gib(size):
        return f"{size / GIB:.3f} GiB"

    def ms(a, kind):
        return "unknown" if a.time is None else f"{getattr(a.time, kind):.2f} ms"

    rows = {
        "computing": {name: ms(a, "compute") for name, a in audits.items()},
        "collectives": {name: ms(a, "collectives") for name, a in audits.items()},
        "temporaries": {name: gib(a.temp_bytes) for name, a in audits.items()},
        "arguments": {name: gib(a.argument_bytes) for name, a in audits.items()},
        "results": {name: gib(a.output_bytes) for name, a in audits.items()},
        "head flops": {name: str(a.flops) for name, a in audits.items()},
    }
    lines = [f"{'per device':<16}" + "".join(f"{name:>32}" for name in found)]
    for what, cells in rows.items():
        lines.append(
            f"{what:<16}" + "".join(f"{cells.get(name, 'does not fit'):>32}" for name in found)
        )
    for name, a in found.items():
        lines += ["", f"{name}: {a}"] if isinstance(a, str) else ["", *_collective_lines(name, a)]
    return "\n".join(lines)


def _collective_lines(name: str, a: Audit) -> list[str]:
    """A version's notes and its collectives, the largest first."""
    lines = [f"{name}: {'; '.join(a.notes)}" if a.notes else name]
    counted = Counter(a.collectives)
    for c, times in sorted(counted.items(), key=lambda item: -item[0].bytes):
        over = "unknown axes" if c.axes is None else ", ".join(c.axes)
        each = " each turn of a loop" if c.in_loop else ""
        lines.append(f"  {times} x {c.op} over {over}, {c.bytes / 2**20:.3f} MiB{each}")
    if not counted:
        lines.append("  no collective")
    return lines


def curve_table(found: list[tuple[float, Audit | str]]) -> str:
    """A table with a line for each budget."""
    lines = ["memory given     temporaries    computing    collectives   how"]
    for gib, cost in found:
        if isinstance(cost, str):
            lines.append(f"{gib:8.3f} GiB    {cost}")
            continue
        time = (
            "      unknown       unknown"
            if cost.time is None
            else (f"{cost.time.compute:10.2f} ms {cost.time.collectives:11.2f} ms")
        )
        lines.append(
            f"{gib:8.3f} GiB {cost.temp_bytes / GIB:10.3f} GiB {time}   {'; '.join(cost.notes)}"
        )
    return "\n".join(lines)


# Without these, libtpu looks for real TPUs on the network and prints warnings. Two processes may
# use it at once, since it only compiles.
_NO_TPU_HERE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}
_NO_TPU_HERE |= {"TPU_WORKER_HOSTNAMES": "localhost", "TPU_WORKER_ID": "0"}


def described_devices(topology: str) -> Sequence[Any]:
    """Described TPUs, or the H100s of one host as "h100:8", which need no hardware.

    Raises:
      ModuleNotFoundError: libtpu, or for GPUs jax-cuda12-plugin, is not installed.
      ValueError: libtpu does not know the topology.
    """
    if gpus := re.fullmatch(r"h100:([1-8])", topology):
        return described_gpus(int(gpus[1]))
    import libtpu  # noqa: F401  without it JAX's own error is a page long

    for name, value in _NO_TPU_HERE.items():
        os.environ.setdefault(name, value)
    try:
        return topologies.get_topology_desc(topology, platform="tpu").devices
    except Exception as error:  # jaxlib raises several kinds
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"topology: got {topology!r}, expected one like v5p:8x8x8 or h100:8 ({reason})"
        ) from error


def described_mesh(mesh: str, topology: str) -> ParallelMesh:
    """A mesh over described TPUs or GPUs.

    Raises:
      ModuleNotFoundError: libtpu, or for GPUs jax-cuda12-plugin, is not installed.
      ValueError: libtpu does not know the topology, or the mesh has another number of devices.
    """
    return make_parallel_mesh(mesh, devices=described_devices(topology))
