"""What a head costs on a pod that is not there: time, memory, collectives and flops per device, against the plain way.

    python -m examples.plan_pod --model qwen3-8b --mesh dp=8,cp=8,tp=8 --topology v5p:8x8x8 --tokens 8192
    python -m examples.plan_pod --model qwen3-8b --memory 0.3 0.5 1 2 4
    python -m examples.plan_pod --train --model qwen3-8b --mesh fsdp=16,cp=4,tp=8 --topology v5p:8x8x8 --tokens 4096

The gradients of a PPO loss with an entropy bonus are compiled by the TPU compiler (`pip install libtpu`; no TPU is
needed), which also estimates their time; all tokens carry loss. With --memory the head is given so many GiB in turn.
With --train the whole training step is compiled, and what it holds is compared with the device's memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, Unpack

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from examples.pod_step import MODELS, Fit, TrainStep, fit
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
from jaxppo.sharding import Audit, audit, links

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class HeadSizes:
    """A model's head: hidden size, vocabulary, and whether its kernel is the `[V, H]` embedding."""

    hidden_size: int
    vocab_size: int
    tied: bool = False
    softcap: float | None = None

    @property
    def layout(self) -> Literal["hv", "vh"]:
        return "vh" if self.tied else "hv"

    def head(self, kernel: jax.Array, spec: jax.sharding.PartitionSpec | None = None) -> Head:
        """The head with this kernel."""
        return Head(kernel, layout=self.layout, softcap=self.softcap, spec=spec)

    @property
    def kernel_shape(self) -> tuple[int, int]:
        H, V = self.hidden_size, self.vocab_size
        return (V, H) if self.tied else (H, V)


# From the models' published configs; Gemma 3 dropped the soft-cap that Gemma 2 has.
HEADS = {
    "qwen3-0.6b": HeadSizes(1024, 151936, tied=True),
    "qwen3-8b": HeadSizes(4096, 151936),
    "llama3-8b": HeadSizes(4096, 128256),
    "gemma3-4b": HeadSizes(2560, 262208, tied=True),
    "gemma2-2b": HeadSizes(2304, 256000, tied=True, softcap=30.0),
    "gpt2": HeadSizes(768, 50257, tied=True),
}


def plain_stats(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies `[R, T]` of f32 logits, as anyone would write them."""
    log_z = jax.nn.logsumexp(logits, axis=-1)
    log_probs = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0] - log_z
    return log_probs, log_z - (jnp.exp(logits - log_z[..., None]) * logits).sum(axis=-1)


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
      tokens: on each shard of the data and context axes.
      dtype: of hidden states and kernel.
      parallel: the mesh, over real or described devices.
    """

    sizes: HeadSizes
    tokens: int
    dtype: Any
    parallel: ParallelMesh

    @property
    def roles(self) -> ParallelMesh:
        """The mesh as the kernel lies on it: JAX cannot shard a vocabulary that the tensor axis does not divide."""
        parallel = self.parallel
        if self.sizes.vocab_size % parallel.tensor_size == 0:
            return parallel
        return dataclasses.replace(parallel, tensor=(), replicated=parallel.tensor)

    @property
    def arguments(self) -> tuple[Any, Any, RolloutBatch]:
        """Hidden states, kernel and batch."""
        parallel, sizes = self.parallel, self.sizes
        shape = (parallel.data_size, self.tokens * parallel.context_size)

        def described(dims: tuple[int, ...], dtype: Any, spec: jax.sharding.PartitionSpec) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(dims, dtype, sharding=parallel.sharding(spec))

        hidden = described((*shape, sizes.hidden_size), self.dtype, parallel.hidden_spec)
        kernel = described(sizes.kernel_shape, self.dtype, self.kernel_spec)
        ids, x = (described(shape, dtype, parallel.tokens_spec) for dtype in (jnp.int32, jnp.float32))
        one = described((shape[0], 1), jnp.int32, parallel.rows_spec)
        layout = {"context_layout": parallel.context_layout, "context_shards": parallel.context_size}
        return hidden, kernel, RolloutBatch(ids, ids, ids, ids, x, one, advantages=x, old_log_probs=x, **layout)

    @property
    def kernel_spec(self) -> jax.sharding.PartitionSpec:
        return self.roles.kernel_spec(self.sizes.layout)

    def head(self, kernel: jax.Array) -> Head:
        return self.sizes.head(kernel, self.kernel_spec)

    def one_pass(self, hidden: Any, kernel: Any, batch: RolloutBatch, **options: Unpack[HeadOptions]) -> Any:
        """`policy_loss_from_hidden`, in one pass where the memory allows it."""
        return policy_loss_from_hidden(hidden, self.head(kernel), batch, CONFIG, parallel=self.parallel, **options)[0]

    def two_passes(
        self, hidden: Any, kernel: Any, batch: RolloutBatch, *, where: bool = False, **options: Unpack[HeadOptions]
    ) -> Any:
        """What a loss takes that is not token-local; with `where`, for the tokens of the mask alone."""
        of_call: Any = {"parallel": self.parallel, "entropy": "bonus", **options}
        if where:
            of_call["where"] = batch.loss_mask > 0
        stats = log_probs_from_hidden(hidden, self.head(kernel), batch.targets, **of_call)
        return policy_loss(stats, batch, CONFIG, parallel=self.parallel)[0]

    def forward(self, hidden: Any, kernel: Any, batch: RolloutBatch, **options: Unpack[HeadOptions]) -> Any:
        """Log-probs and entropy of an old, reference or teacher policy."""
        of_call: Any = {"parallel": self.parallel, "entropy": "metric", **options}
        found = log_probs_from_hidden(hidden, self.head(kernel), batch.targets, **of_call)
        return found.log_probs, found.entropy

    def plain(self, hidden: Any, kernel: Any, batch: RolloutBatch) -> Any:
        """The same loss of logits that exist."""
        logits = plain_logits(hidden, kernel, self.sizes)
        logits = jax.lax.with_sharding_constraint(logits, self.parallel.sharding(self.roles.logits_spec))
        stats = TokenStats(*plain_stats(logits, batch.targets))
        return policy_loss(stats, batch, CONFIG, parallel=self.parallel)[0]

    def cost(self, loss: Callable[..., Any], **options: Any) -> Audit:
        """What the gradients of one of these cost; of `forward` its values."""
        hidden, kernel, batch = self.arguments
        if loss == self.forward:
            return audit(functools.partial(loss, **options), hidden, kernel, batch)
        gradients = jax.grad(lambda *args: loss(*args, **options), (0, 1))
        found = audit(jax.jit(gradients, out_shardings=(hidden.sharding, kernel.sharding)), hidden, kernel, batch)
        if loss != self.plain:
            return found
        # the shapes of the plain version are the whole mesh's, and the compiler shares its products out
        sharers = self.parallel.data_size * self.parallel.context_size * self.roles.tensor_size
        flops = dataclasses.replace(found.flops, low=found.flops.low / sharers, high=found.flops.high / sharers)
        return dataclasses.replace(found, flops=flops)


def plan(step: Step) -> dict[str, Audit]:
    """What the head costs on each device of the mesh, in three ways; the flops are one device's.

    Raises:
      ValueError: a hidden size or a token count that the mesh does not divide.
    """
    ways = {"one pass": step.one_pass, "two passes": step.two_passes, "plain": step.plain}
    return {name: step.cost(loss) for name, loss in ways.items()}


def curve(step: Step, budgets: Sequence[float]) -> list[tuple[float, Audit | str]]:
    """What `policy_loss_from_hidden` costs in so many GiB; in words where they are too few."""
    found: list[tuple[float, Audit | str]] = []
    for gib in budgets:
        try:
            found.append((gib, step.cost(step.one_pass, memory=int(gib * GIB))))
        except ValueError as error:
            found.append((gib, str(error).splitlines()[0]))
    return found


def plan_train(step: TrainStep) -> Fit:
    """Whether a whole training step fits, with its loss on its own beside it."""
    sizes = HeadSizes(step.sizes.hidden_size, step.sizes.vocab_size, step.sizes.tied)
    head = Step(sizes, step.rows * step.tokens, jnp.dtype(jnp.bfloat16), step.parallel)
    return fit(step, head.cost(head.one_pass))


def table(found: dict[str, Audit]) -> str:
    """The costs of each version in columns."""
    gib = lambda size: f"{size / GIB:.3f} GiB"  # noqa: E731
    ms = lambda a, kind: "unknown" if a.time is None else f"{getattr(a.time, kind):.2f} ms"  # noqa: E731
    rows = {
        "computing": [ms(a, "compute") for a in found.values()],
        "collectives": [ms(a, "collectives") for a in found.values()],
        "temporaries": [gib(a.temp_bytes) for a in found.values()],
        "arguments": [gib(a.argument_bytes) for a in found.values()],
        "results": [gib(a.output_bytes) for a in found.values()],
        "head flops": [str(a.flops) for a in found.values()],
    }
    lines = [f"{'per device':<16}" + "".join(f"{name:>32}" for name in found)]
    lines += [f"{what:<16}" + "".join(f"{cell:>32}" for cell in cells) for what, cells in rows.items()]
    for name, a in found.items():
        lines += ["", f"{name}: {'; '.join(a.notes)}" if a.notes else f"{name}"]
        counted = Counter(a.collectives)
        for c, times in sorted(counted.items(), key=lambda item: -item[0].bytes):
            over = "unknown axes" if c.axes is None else ", ".join(c.axes)
            each = " each turn of a loop" if c.in_loop else ""
            lines.append(f"  {times} x {c.op} over {over}, {c.bytes / 2**20:.3f} MiB{each}")
        if not counted:
            lines.append("  no collective")
    return "\n".join(lines)


def curve_table(found: list[tuple[float, Audit | str]]) -> str:
    """A line a budget."""
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
        lines.append(f"{gib:8.3f} GiB {cost.temp_bytes / GIB:10.3f} GiB {time}   {'; '.join(cost.notes)}")
    return "\n".join(lines)


def described_mesh(mesh: str, topology: str) -> ParallelMesh:
    """A mesh over TPUs that are only described.

    Raises:
      ModuleNotFoundError: no libtpu.
      ValueError: a topology that libtpu does not know, a mesh that does not multiply to its devices.
    """
    import libtpu  # noqa: F401  without it JAX's own error is a page long

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # else libtpu asks the network for real TPUs
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # it only compiles: another process may, too
    try:
        devices = topologies.get_topology_desc(topology, platform="tpu").devices
    except Exception as error:  # jaxlib raises several kinds
        reason = str(error).splitlines()[0]
        raise ValueError(f"topology: got {topology!r}, expected one like v5p:8x8x8 ({reason})") from error
    return make_parallel_mesh(mesh, devices=devices)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = sorted({**HEADS, **MODELS})
    parser.add_argument("--model", choices=known, help="a known head, instead of its two sizes; with --train a model")
    parser.add_argument("--train", action="store_true", help="the whole training step: whether it fits, and its time")
    parser.add_argument("--rows", type=int, default=1, help="of each data shard, with --train")
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--tied", action="store_true", help="the kernel is the [V, H] embedding")
    parser.add_argument("--tokens", type=int, default=8192, help="on each data and context shard")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--mesh", default="cp=4,tp=4", help="such as dp=8,cp=8,tp=8; axes dp, fsdp, cp, tp")
    parser.add_argument("--topology", default="v5p:2x2x4", help="such as v5p:8x8x8, v6e:16x16")
    parser.add_argument("--memory", type=float, nargs="*", help="GiB, the curve over them; by default of some")
    args = parser.parse_args(arguments)
    args.memory = BUDGETS if args.memory == [] else args.memory
    sizes = (args.hidden_size, args.vocab_size)
    if (args.model is None) == (None in sizes) or (args.model and sizes != (None, None)):
        parser.error("model: expected --model, or --hidden-size and --vocab-size")
    choices = MODELS if args.train else HEADS
    if args.model not in choices and (args.model or args.train):
        parser.error(f"model: got {args.model}, expected one of {', '.join(choices)}")
    if min(n for n in (*sizes, args.tokens, args.rows) if n is not None) < 1:
        parser.error(f"sizes: got {(*sizes, args.tokens)}, expected positive numbers")
    jax.config.update("jax_platforms", "cpu")  # a real TPU here is not to be taken
    try:
        parallel = described_mesh(args.mesh, args.topology)
        if args.train:
            found = plan_train(TrainStep(MODELS[args.model], args.tokens, parallel, args.rows))
            print(f"{args.model}, {args.rows} x {args.tokens} tokens a shard, {args.mesh}, {args.topology}\n\n{found}")
            return 0 if found.fits else 1
        head = HEADS[args.model] if args.model else HeadSizes(*sizes, tied=args.tied)
        step = Step(head, args.tokens, jnp.dtype(args.dtype), parallel)
        text = curve_table(curve(step, args.memory)) if args.memory is not None else table(plan(step))
    except ModuleNotFoundError:
        print("plan_pod: libtpu is missing, expected `pip install libtpu`", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"plan_pod: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(f"{args.model or head}, {args.tokens} tokens a shard, {args.dtype}, {args.mesh} on {args.topology}")
    chosen = (f"{name} {' '.join(along)}" for name, along in links(parallel.mesh).items() if along)
    print(f"placed along links: {'; '.join(chosen)}\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
