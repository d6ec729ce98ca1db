"""Adapters of low rank beside the frozen kernels of a published model: y = x W + alpha / rank * (x
a) b.

Hu et al. 2021, LoRA, https://arxiv.org/abs/2106.09685. The names of targets and the start of `a`
are those of peft. `b` starts at 0, so that the first step has the model as it was published.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from examples.trainer.llama import Projection, in_sharding
from examples.trainer.model import Config
from jaxppo import ParallelMesh


@dataclasses.dataclass(frozen=True)
class LoraConfig:
    """Which projections of which layers have adapters, and of what rank."""

    rank: int
    alpha: float
    """What an adapter adds is multiplied by alpha / rank."""
    targets: tuple[str, ...]
    """Names of projections, such as "q_proj"."""
    layers: int
    """The last so many layers have adapters."""


class Adapter(nnx.Module):
    """What is added to the product with a kernel `[I, O]`: alpha / rank * (x a) b.

    `a` is `[I, rank]`, and its rows are sharded as the kernel's are; `b` is `[rank, O]`, sharded as
    its columns.
    """

    def __init__(
        self, projection: Projection, lora: LoraConfig, parallel: ParallelMesh, rngs: nnx.Rngs
    ):
        def param(init: nnx.Initializer, spec: P, *shape: int) -> nnx.LoRAParam:
            placed = nnx.with_partitioning(init, tuple(spec), mesh=parallel.mesh)
            return nnx.LoRAParam(placed(rngs.params(), shape, jnp.float32))

        rows, columns = projection.kernel.shape
        of_rows, of_columns = projection.spec
        # within 1 / sqrt(I)
        uniform = nnx.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        self.a = param(uniform, P(of_rows, None), rows, lora.rank)
        self.b = param(nnx.initializers.zeros, P(None, of_columns), lora.rank, columns)
        of_rows, of_columns = projection.gathered
        self.gathered_a = self.gathered_b = None
        if projection.gathered_sharding is not None:
            self.gathered_a = parallel.sharding(P(of_rows, None))
            self.gathered_b = parallel.sharding(P(None, of_columns))
        self.scale = lora.alpha / lora.rank

    def __call__(self, x: Float[Array, "R T I"]) -> Float[Array, "R T O"]:
        a = in_sharding(self.a[...].astype(x.dtype), self.gathered_a)
        b = in_sharding(self.b[...].astype(x.dtype), self.gathered_b)
        return self.scale * (x @ a @ b)


def add_adapters(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    config: Config,
    lora: LoraConfig,
    parallel: ParallelMesh,
    seed: int,
) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of the model with adapters, and their parameters, which learn; `params` is the
    rest, and is frozen.

    Args:
      graphdef: the model's structure, without adapters.
      params: its parameters.
      config: its sizes.
      lora: what has adapters.
      parallel: the mesh, on which the adapters are placed.
      seed: of `a`.

    Raises:
      ValueError: the rank is above a side of a kernel, which then has fewer parameters than its
        adapter.
    """
    return _adapt(params, graphdef, config, lora, parallel, seed)


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5))
def _adapt(
    params: nnx.State,
    graphdef: nnx.GraphDef,
    config: Config,
    lora: LoraConfig,
    parallel: ParallelMesh,
    seed: int,
) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of the model with adapters, and their parameters alone, on the mesh; runs of
    one process share the program.
    """
    model = nnx.merge(graphdef, params)
    rngs = nnx.Rngs(seed)
    for layer in list(model.layers)[config.layers - lora.layers :]:
        for path, module in list(nnx.iter_modules(layer)):
            if isinstance(module, Projection) and path[-1] in lora.targets:
                _check_rank(lora.rank, path[-1], min(module.kernel.shape))
                module.adapter = Adapter(module, lora, parallel, rngs)
    adapted, adapters, _ = nnx.split(model, nnx.LoRAParam, ...)
    shardings = jax.tree.map(parallel.sharding, nnx.get_partition_spec(adapters))
    return adapted, lax.with_sharding_constraint(adapters, shardings)


def _check_rank(rank: int, name: Any, side: int) -> None:
    if rank > side:
        raise ValueError(
            f"--lora-rank: got {rank}, expected at most {side}, the smaller side of {name}"
        )
