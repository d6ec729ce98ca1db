"""The examples of frameworks: they learn, on a mesh as on one device, and shard their parameters
as they say.
"""

import ast
import functools
import inspect
import logging
import sys

import flax
import jax
import nnx_policy
import numpy as np
import pytest
from flax import linen
from tables import sampled

import jaxppo
from examples import flax_linen
from sharding import make_parallel_mesh


def nnx_head(model):
    return model.tokens.embedding[...] if model.head is None else model.head.kernel[...]


def linen_head(state):
    params = linen.meta.unbox(state.params)
    return params["head"]["kernel"] if "head" in params else params["tokens"]["embedding"]


def equinox_head(model):
    return (model.tokens if model.head is None else model.head).weight


def equinox_model():
    pytest.importorskip("equinox", reason="Equinox is not installed")
    from examples import equinox_model

    return equinox_model


# name: (the example, its head's kernel, that kernel's layout where it is not tied)
EXAMPLES = {
    "nnx": (lambda: nnx_policy, nnx_head, "hv"),
    "linen": (lambda: flax_linen, linen_head, "hv"),
    "equinox": (equinox_model, equinox_head, "vh"),
}
# Linen constrains the parameters in its boxes, which JAX refuses for Explicit axes.
RUNS = [
    (name, tied, explicit)
    for name in EXAMPLES
    for tied in (False, True)
    for explicit in (False, True)
]
RUNS = [run for run in RUNS if run[0] != "linen" or not run[2]]


@functools.cache
def _on_one_device(name, tied):
    parallel = make_parallel_mesh("fsdp=1,tp=1", devices=jax.devices()[:1])
    return EXAMPLES[name][0]().train(parallel, tied=tied, steps=3)[1]


@pytest.fixture
def one_device(name, tied):
    """The losses of three steps on one device."""
    return _on_one_device(name, tied)


@functools.cache
def on_eight_devices(name, tied, explicit):
    """The trained model, its losses, and how many programs of its step were compiled."""
    compiled = []

    class Compiled(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("Compiling jit(step)"):
                compiled.append(record.getMessage())

    handler = Compiled()
    logger = logging.getLogger("jax")
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            parallel = make_parallel_mesh("fsdp=4,tp=2", explicit=explicit)
            trained, losses = EXAMPLES[name][0]().train(parallel, tied=tied)
    finally:
        logger.removeHandler(handler)
    return trained, losses, len(compiled)


@pytest.mark.parametrize(
    ("name", "tied", "explicit"),
    sampled(RUNS, lambda _, run: run[1] == run[2] or run[0] == "linen"),
)
def test_it_learns_on_eight_devices_as_on_one(name, tied, explicit, one_device):
    _, head_of, layout = EXAMPLES[name]
    trained, losses, _ = on_eight_devices(name, tied, explicit)
    # the gain of a policy with every token at its clip: half of the tokens have 1.28, half -0.8
    assert losses[-1] < -0.2, losses
    # other shardings round bf16 activations at other places, by 2^-9 of logits of about 1
    np.testing.assert_allclose(losses[:3], one_device, atol=4e-3)
    kernel = head_of(trained)
    assert kernel.dtype == np.float32
    parallel = make_parallel_mesh("fsdp=4,tp=2", explicit=explicit)
    expected = parallel.sharding(parallel.kernel_spec("vh" if tied else layout))
    assert kernel.sharding.is_equivalent_to(expected, 2), kernel.sharding


def test_parameters_are_sharded_where_another_library_turned_that_off():
    """Importing Tunix turns it off for the whole process."""
    before = flax.config.flax_always_shard_variable
    flax.config.update("flax_always_shard_variable", False)
    try:
        parallel = make_parallel_mesh("fsdp=2,tp=4")  # no program of `on_eight_devices`
        model, _ = nnx_policy.train(parallel, steps=1)
    finally:
        flax.config.update("flax_always_shard_variable", before)
    kernel = nnx_head(model)
    assert kernel.sharding.is_equivalent_to(parallel.sharding(parallel.kernel_spec("hv")), 2)


@pytest.mark.parametrize("name", EXAMPLES)
def test_other_batches_share_a_program(name):
    *_, compiled = on_eight_devices(name, False, False)
    assert compiled == 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_ten_lines_are_of_jaxppo(name):
    example = EXAMPLES[name][0]()
    source = inspect.getsource(sys.modules[example.__name__])
    names = {*jaxppo.__all__} - {"ParallelMesh", "RolloutBatch"}  # in annotations
    used = {
        n.lineno for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Name) and n.id in names
    }
    imports = [line for line in source.splitlines() if line.startswith("from jaxppo")]
    assert 3 <= len(used) + len(imports) <= 10, sorted(used)
