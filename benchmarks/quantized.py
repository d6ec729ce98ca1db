"""A head of 8 bits beside plain JAX that multiplies the dequantised numbers, for described chips.

    python -m benchmarks.quantized
    python -m benchmarks.quantized --chips h100:2      # needs the extra gpu-aot
    python -m benchmarks.quantized --here              # times on this device

Each device of a chip has all columns and tokens of its own. Computing is the compiler's estimate,
or on GPUs that of a roofline, and nothing runs; with --here it is the median time of some rounds.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.cases import Case, draw
from benchmarks.measure import in_turns, temporaries
from examples.planner.pod_head import CONFIG, Step, described_devices, plain_stats
from examples.planner.pod_sizes import HeadSizes
from jaxppo import Head, TokenStats, make_parallel_mesh, policy_loss
from jaxppo.head import Quantization
from jaxppo.head.quantized import quantize
from jaxppo.sharding import audit

DTYPES = {"tpu7x:2x2x1": "float8_e4m3fn", "v6e:2x2": "int8", "h100:2": "float8_e4m3fn"}


@dataclasses.dataclass(frozen=True)
class QuantizedStep(Step):
    """A step whose head rounds by a rule."""

    rule: Quantization = dataclasses.field(default_factory=Quantization)

    def head(self, kernel: jax.Array) -> Head:
        return dataclasses.replace(super().head(kernel), quantized=self.rule)

    def dequantized(self, array: jax.Array, dim: int) -> jax.Array:
        """The array as the head reads it; the gradient goes straight through."""
        rounded = quantize(self.rule, array, dim).dequantized(array.dtype)
        return array + lax.stop_gradient(rounded - array)

    def dequantized_stats(self, hidden: Any, kernel: Any, batch: Any) -> TokenStats:
        """Log-probs and entropy of f32 logits in memory."""
        features = self.dequantized(hidden.reshape(-1, hidden.shape[2]), 1).reshape(hidden.shape)
        columns = self.dequantized(kernel, 0)
        logits = jnp.einsum("rth,hv->rtv", features, columns, preferred_element_type=jnp.float32)
        return TokenStats(*plain_stats(logits, batch.targets))

    def dequantized_loss(self, hidden: Any, kernel: Any, batch: Any) -> jax.Array:
        stats = self.dequantized_stats(hidden, kernel, batch)
        return policy_loss(stats, batch, CONFIG, parallel=self.parallel)[0]

    def dequantized_forward(self, hidden: Any, kernel: Any, batch: Any) -> Any:
        stats = self.dequantized_stats(hidden, kernel, batch)
        return stats.log_probs, stats.entropy


def programs(step: QuantizedStep) -> dict[str, Any]:
    """Jitted functions of `step.arguments` by version."""
    plain = Step(step.sizes, step.tokens, step.dtype, step.parallel)
    return {
        "forward, 8 bits": step.program(step.forward),
        "forward, dequantised": jax.jit(step.dequantized_forward),
        "forward, bf16": plain.program(plain.forward),
        "gradients, 8 bits, one pass": step.program(step.one_pass),
        "gradients, 8 bits, two passes": step.program(step.two_passes),
        "gradients, dequantised": step.program(step.dequantized_loss),
        "gradients, bf16, one pass": plain.program(plain.one_pass),
    }


def drawn(step: Step) -> tuple[Any, ...]:
    """`step.arguments` with numbers in them, as `cases.draw` has them."""
    _, _, batch = step.arguments
    data = draw(Case(step.tokens, step.sizes, jnp.dtype(step.dtype).name))
    layout = {"context_layout": batch.context_layout, "context_shards": batch.context_shards}
    arguments = data["hidden"], data["kernel"], dataclasses.replace(data["batch"], **layout)
    return jax.device_put(arguments, step.parallel.mesh.devices.flat[0])


def estimated(step: QuantizedStep) -> Iterator[tuple[str, float, int]]:
    """The estimated milliseconds and the temporaries of each version."""
    for name, program in programs(step).items():
        cost = audit(program, *step.arguments)
        assert cost.time is not None
        yield name, cost.time.compute, cost.temp_bytes


def timed(step: QuantizedStep, rounds: int) -> Iterator[tuple[str, float, int]]:
    """The median milliseconds on this device and the temporaries of each version."""
    arguments = drawn(step)
    compiled = {
        name: program.lower(*arguments).compile() for name, program in programs(step).items()
    }
    runs = {name: functools.partial(program, *arguments) for name, program in compiled.items()}
    for name, seconds in in_turns(runs, rounds).items():
        yield name, 1e3 * seconds, temporaries(compiled[name])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", default=["tpu7x:2x2x1", "v6e:2x2"], choices=DTYPES)
    parser.add_argument("--here", action="store_true", help="times on this device")
    parser.add_argument("--dtype", default="float8_e4m3fn", help="of the numbers, with --here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=8192, help="of each device")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=151936)
    args = parser.parse_args(arguments)
    print("| chip, dtype | version | ms | GiB |\n|---|---|---|---|")
    sizes = HeadSizes(args.hidden_size, args.vocab_size)

    def step_on(devices: Sequence[Any], dtype: str) -> QuantizedStep:
        parallel = make_parallel_mesh(f"cp={len(devices)}", devices=devices)
        return QuantizedStep(sizes, args.tokens, jnp.bfloat16, parallel, Quantization(dtype))

    tables = {}
    if args.here:
        device = jax.devices()[0]
        tables[device.device_kind, args.dtype] = timed(step_on([device], args.dtype), args.rounds)
    else:
        for chip in args.chips:
            step = step_on(described_devices(chip), DTYPES[chip])
            tables[chip, DTYPES[chip]] = estimated(step)
    for (chip, dtype), rows in tables.items():
        for name, milliseconds, temporary_bytes in rows:
            gib = temporary_bytes / 2**30
            print(f"| {chip}, {dtype} | {name} | {milliseconds:.1f} | {gib:.2f} |", flush=True)


if __name__ == "__main__":
    main()
