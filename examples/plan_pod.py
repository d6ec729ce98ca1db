"""What a head costs on a pod that is not there: memory, collectives and flops per device, against the plain way.

    python -m examples.plan_pod --model qwen3-8b --mesh dp=8,cp=8,tp=8 --topology v5p:8x8x8 --tokens 8192

Both are compiled by the TPU compiler (`pip install libtpu`; no TPU is needed), forward and gradient, log-probs and
entropy, for tokens that all carry loss.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from jaxppo import Head, log_probs_from_hidden
from sharding import ParallelMesh, make_parallel_mesh
from sharding.audit import Audit, audit
from sharding.placement import links


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


def plan(sizes: HeadSizes, tokens: int, dtype: Any, parallel: ParallelMesh) -> dict[str, Audit]:
    """What the head costs on each device of the mesh.

    Args:
      sizes: the head.
      tokens: on each shard of the data and context axes.
      dtype: of hidden states and kernel.
      parallel: the mesh, over real or described devices.

    Returns:
      An audit for "jaxppo" and one for "plain"; the flops of both are one device's.

    Raises:
      ValueError: a hidden size or a token count that the mesh does not divide.
    """
    divides = sizes.vocab_size % parallel.tensor_size == 0  # else JAX cannot shard the kernel over the tensor axis
    tensor = {"tensor": (), "replicated": parallel.tensor}
    roles = parallel if divides else dataclasses.replace(parallel, **tensor)
    shape = (parallel.data_size, tokens * parallel.context_size)
    described = lambda dims, dtype, spec: jax.ShapeDtypeStruct(dims, dtype, sharding=parallel.sharding(spec))  # noqa: E731
    hidden = described((*shape, sizes.hidden_size), dtype, parallel.hidden_spec)
    kernel = described(sizes.kernel_shape, dtype, roles.kernel_spec(sizes.layout))
    targets = described(shape, jnp.int32, parallel.tokens_spec)
    cotangents = described(shape, jnp.float32, parallel.tokens_spec)

    def ours(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> Any:
        stats = log_probs_from_hidden(
            hidden,
            sizes.head(kernel, roles.kernel_spec(sizes.layout)),
            targets,
            parallel=parallel,
            entropy="bonus",
        )
        return stats.log_probs, stats.entropy

    def plain(hidden: jax.Array, kernel: jax.Array, targets: jax.Array) -> Any:
        logits = plain_logits(hidden, kernel, sizes)
        return plain_stats(jax.lax.with_sharding_constraint(logits, parallel.sharding(roles.logits_spec)), targets)

    def costs(stats: Callable[..., Any]) -> Audit:
        def loss(hidden, kernel, targets, g, e):
            log_probs, entropy = stats(hidden, kernel, targets)
            return (g * log_probs + e * entropy).sum()

        gradients = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(hidden.sharding, kernel.sharding))
        return audit(gradients, hidden, kernel, targets, cotangents, cotangents)

    found = {"jaxppo": costs(ours), "plain": costs(plain)}
    # the shapes of the plain version are the whole mesh's, and the compiler shares its products out
    sharers = parallel.data_size * parallel.context_size * roles.tensor_size
    flops = found["plain"].flops
    flops = dataclasses.replace(flops, low=flops.low / sharers, high=flops.high / sharers)
    found["plain"] = dataclasses.replace(found["plain"], flops=flops)
    return found


def table(found: dict[str, Audit]) -> str:
    """The costs of each version in columns."""
    gib = lambda size: f"{size / 2**30:.3f} GiB"  # noqa: E731
    rows = {
        "arguments": [gib(a.argument_bytes) for a in found.values()],
        "results": [gib(a.output_bytes) for a in found.values()],
        "temporaries": [gib(a.temp_bytes) for a in found.values()],
        "head flops": [str(a.flops) for a in found.values()],
    }
    lines = [f"{'per device':<16}" + "".join(f"{name:>20}" for name in found)]
    lines += [f"{what:<16}" + "".join(f"{cell:>20}" for cell in cells) for what, cells in rows.items()]
    for name, a in found.items():
        lines += ["", f"collectives of {name}"]
        counted = Counter(a.collectives)
        for c, times in sorted(counted.items(), key=lambda item: -item[0].bytes):
            over = "unknown axes" if c.axes is None else ", ".join(c.axes)
            each = " each turn of a loop" if c.in_loop else ""
            lines.append(f"  {times} x {c.op} over {over}, {c.bytes / 2**20:.3f} MiB{each}")
        if not counted:
            lines.append("  none")
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
    parser.add_argument("--model", choices=HEADS, help="a known head, instead of its two sizes")
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--tied", action="store_true", help="the kernel is the [V, H] embedding")
    parser.add_argument("--tokens", type=int, default=8192, help="on each data and context shard")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--mesh", default="cp=4,tp=4", help="such as dp=8,cp=8,tp=8; axes dp, fsdp, cp, tp")
    parser.add_argument("--topology", default="v5p:2x2x4", help="such as v5p:8x8x8, v6e:16x16")
    args = parser.parse_args(arguments)
    sizes = (args.hidden_size, args.vocab_size)
    if (args.model is None) == (None in sizes) or (args.model and sizes != (None, None)):
        parser.error("model: expected --model, or --hidden-size and --vocab-size")
    if min(n for n in (*sizes, args.tokens) if n is not None) < 1:
        parser.error(f"sizes: got {(*sizes, args.tokens)}, expected positive numbers")
    head = HEADS[args.model] if args.model else HeadSizes(*sizes, tied=args.tied)
    jax.config.update("jax_platforms", "cpu")  # a real TPU here is not to be taken
    try:
        parallel = described_mesh(args.mesh, args.topology)
        found = plan(head, args.tokens, jnp.dtype(args.dtype), parallel)
    except ModuleNotFoundError:
        print("plan_pod: libtpu is missing, expected `pip install libtpu`", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"plan_pod: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(f"{args.model or head}, {args.tokens} tokens a shard, {args.dtype}, {args.mesh} on {args.topology}")
    chosen = (f"{name} {' '.join(along)}" for name, along in links(parallel.mesh).items() if along)
    print(f"placed along links: {'; '.join(chosen)}\n")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
