"""Loads a published model from its folder: Llama, Qwen 2, Qwen 3 and Gemma 3."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from examples.trainer import gemma_config, llama_config
from examples.trainer.gemma import Gemma
from examples.trainer.gemma_config import GemmaConfig
from examples.trainer.llama import Llama
from examples.trainer.llama_config import LlamaConfig, Settings
from examples.trainer.model_folder import Weights, read_json
from jaxppo import ParallelMesh
from jaxppo.sharding import multihost

PublishedConfig = LlamaConfig | GemmaConfig


def read_config(folder: Path) -> PublishedConfig:
    """Reads config.json.

    Every column of the head counts as a token until `with_tokens` says how many there are.

    Raises:
      ValueError: no config.json, one of another architecture, or one that lacks a setting.
    """
    path = folder / "config.json"
    kind = Settings(path, read_json(path)).choice(
        "model_type", (*llama_config.KINDS, gemma_config.KIND)
    )
    if kind == gemma_config.KIND:
        return GemmaConfig.read(folder)
    return LlamaConfig.read(folder)


@functools.cache
def describe_model(
    config: PublishedConfig, parallel: ParallelMesh
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and its parameters' shapes; no array is made.

    Made once, so that runs of one process have equal structures, and share programs.
    """

    def make() -> tuple[nnx.GraphDef, nnx.State]:
        rngs = nnx.Rngs(0)
        if isinstance(config, GemmaConfig):
            return nnx.split(Gemma(config, parallel, rngs))
        return nnx.split(Llama(config, parallel, rngs))

    return jax.eval_shape(make)


def load_model(
    folder: Path, config: PublishedConfig, parallel: ParallelMesh
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and the folder's parameters, each placed on the mesh by its partition
    spec.

    Raises:
      ValueError: tensors that are missing, of another shape, not finite, or of a model with more
        parts; a mesh that does not divide the model.
    """
    if config.kv_heads % parallel.tensor_size:
        raise ValueError(
            f"mesh: got {parallel.tensor_size} tensor shards, expected a divisor of the"
            f" {config.kv_heads} key-value heads"
        )
    weights = Weights(folder)
    layers = {name.split(".")[2] for name in weights.shapes if name.startswith("model.layers.")}
    if config.layers != len(layers):  # checked first, since describing many layers takes time
        raise ValueError(
            f"--model: got num_hidden_layers {config.layers} in config.json, expected"
            f" {len(layers)}, the layers of the tensors"
        )
    graphdef, abstract = describe_model(config, parallel)
    shardings = jax.tree.map(parallel.sharding, nnx.get_partition_spec(abstract))
    leaves, structure = jax.tree.flatten_with_path(abstract)
    names = [_published_name(path) for path, _ in leaves]
    expected = {
        name: leaf.shape[::-1] if transposed else leaf.shape
        for (name, transposed), (_, leaf) in zip(names, leaves, strict=True)
    }
    # early folders hold the rates of the positions, which config.json says too
    ignored = {name for name in weights.shapes if name.endswith(".rotary_emb.inv_freq")}
    if config.tied:
        ignored.add("lm_head.weight")
    _check_shapes(weights.shapes, expected, ignored)
    placed = list(zip(names, leaves, jax.tree.leaves(shardings), strict=True))
    for (name, _), (_, leaf), sharding in placed:
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError:
            raise ValueError(
                f"mesh: got {dict(parallel.mesh.shape)}, expected sizes that divide {name}"
                f" {leaf.shape} as {sharding.spec}"
            ) from None
    with multihost.together(parallel):  # each process reads its own part of the weights
        arrays = [
            weights.place(name, sharding, transposed) for (name, transposed), _, sharding in placed
        ]
    return graphdef, jax.tree.unflatten(structure, arrays)


def _published_name(path: tuple[Any, ...]) -> tuple[str, bool]:
    """A parameter's name in the files, and whether the file holds it transposed."""
    *modules, kind = [str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey)]
    name = ".".join([*modules, "bias" if kind == "bias" else "weight"])
    if modules[0] != "lm_head":
        name = f"model.{name}"
    return name, kind == "kernel"


def _check_shapes(
    got: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], ignored: set[str]
) -> None:
    def some(names: list[str]) -> str:
        listed = ", ".join(names[:3])
        if len(names) > 3:
            listed += f" and {len(names) - 3} more"
        return listed

    if missing := [name for name in expected if name not in got]:
        raise ValueError(f"--model: got no tensor {some(missing)}, which config.json asks for")
    if strange := [name for name in got if name not in expected and name not in ignored]:
        raise ValueError(
            f"--model: got tensors {some(strange)}, which the model of config.json does not have"
        )
    for name, shape in expected.items():
        if got[name] != shape:
            raise ValueError(
                f"--model: got {name} of shape {list(got[name])}, expected {list(shape)}"
            )
