"""A head of 8 bits beside plain JAX that multiplies the dequantised numbers, for described chips.

    python -m benchmarks.quantized
    python -m benchmarks.quantized --chips h100:2      # needs the extra gpu-aot

Each device of a chip has all columns and tokens of its own. Computing is the compiler's estimate,
or on GPUs that of a roofline; nothing runs.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from examples.planner.pod_head import CONFIG, Step, described_devices, plain_stats
from examples.planner.pod_sizes import HeadSizes
from jaxppo import Head, TokenStats, make_parallel_mesh, policy_loss
from jaxppo.head import Quantization
from jaxppo.head.quantized import quantize
from jaxppo.sharding import Audit, audit

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


def costs(step: QuantizedStep) -> Iterator[tuple[str, Audit]]:
    """The costs of each version, by name."""
    plain = Step(step.sizes, step.tokens, step.dtype, step.parallel)
    programs: dict[str, Callable[[], Audit]] = {
        "forward, 8 bits": lambda: step.cost(step.forward),
        "forward, dequantised": lambda: audit(jax.jit(step.dequantized_forward), *step.arguments),
        "forward, bf16": lambda: plain.cost(plain.forward),
        "gradients, 8 bits, one pass": lambda: step.cost(step.one_pass),
        "gradients, 8 bits, two passes": lambda: step.cost(step.two_passes),
        "gradients, dequantised": lambda: step.cost(step.dequantized_loss),
        "gradients, bf16, one pass": lambda: plain.cost(plain.one_pass),
    }
    for name, cost in programs.items():
        yield name, cost()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", default=["tpu7x:2x2x1", "v6e:2x2"], choices=DTYPES)
    parser.add_argument("--tokens", type=int, default=8192, help="of each device")
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--vocab-size", type=int, default=151936)
    args = parser.parse_args(arguments)
    print("| chip, dtype | version | ms | GiB |\n|---|---|---|---|")
    sizes = HeadSizes(args.hidden_size, args.vocab_size)
    for chip in args.chips:
        devices = described_devices(chip)
        parallel = make_parallel_mesh(f"cp={len(devices)}", devices=devices)
        rule = Quantization(DTYPES[chip])
        step = QuantizedStep(sizes, args.tokens, jnp.bfloat16, parallel, rule)
        for name, cost in costs(step):
            assert cost.time is not None
            gib = cost.temp_bytes / 2**30
            print(f"| {chip}, {rule.dtype} | {name} | {cost.time.compute:.1f} | {gib:.2f} |")


if __name__ == "__main__":
    main()
