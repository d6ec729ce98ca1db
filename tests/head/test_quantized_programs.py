"""Programs of quantised heads for described chips: operands of products, and what lies in
memory.
"""

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_products import products, written_arrays
from jax.experimental import topologies
from jax.sharding import Mesh

from examples.planner.described_gpu import NO_SEARCH, described_gpus
from jaxppo import (
    Head,
    PolicyLossConfig,
    RolloutBatch,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from jaxppo.head import Quantization
from sharding import ParallelMesh
from sharding.audit import audit

# Tokens of a device, features and columns. A TPU's compiler takes longer for larger arrays; two
# blocks of a second pass are left to each device, and no two sizes are equal.
SIZES = {"tpu": (512, 256, 8192), "gpu": (2048, 512, 16384)}
RULES = {
    "e4m3": Quantization(),
    "int8": Quantization("int8"),
    "e4m3 in blocks": Quantization(block=128),
}
# the operands of the product of hidden states and kernel
OPERANDS = {
    ("v6e:2x2", "e4m3"): "f8e4m3fn",
    ("v6e:2x2", "int8"): "s8",
    ("tpu7x:2x2x1", "e4m3"): "f8e4m3fn",
    ("tpu7x:2x2x1", "e4m3 in blocks"): "f8e4m3fn",
    ("H100", "e4m3"): "f8e4m3fn",
    ("H100", "int8"): "s8",
}


@cache
def mesh_of(chips):
    if chips == "H100":
        pytest.importorskip(
            "jax_cuda12_plugin", reason="compiling for GPUs takes the extra gpu-aot"
        )
        # of one tensor axis: a sum over devices would be of gradients in f32
        devices = described_gpus(2)
    else:
        devices = topologies.get_topology_desc(chips, platform="tpu").devices
    return ParallelMesh(Mesh(np.array(devices).reshape(-1, 2), ("cp", "tp")))


def sizes_of(chips):
    return SIZES["gpu" if chips == "H100" else "tpu"]


def arguments(chips):
    """Hidden states, a kernel and a batch, in bf16."""
    parallel = mesh_of(chips)
    tokens, hidden_size, columns = sizes_of(chips)

    def put(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.sharding(spec))

    shape = (1, tokens * parallel.context_size)
    ids, x = (put(shape, dtype, parallel.tokens_spec) for dtype in (jnp.int32, jnp.float32))
    batch = RolloutBatch(
        *[ids] * 4, x, put((1, 1), jnp.int32, jax.P()), advantages=x, old_log_probs=x
    )
    hidden = put((*shape, hidden_size), jnp.bfloat16, parallel.hidden_spec)
    kernel = put((hidden_size, columns), jnp.bfloat16, parallel.kernel_spec())
    return hidden, kernel, batch


def program(parallel, rule):
    """The gradients of a policy loss in one pass."""

    def loss(hidden, kernel, batch):
        head = Head(kernel, quantized=rule)
        return policy_loss_from_hidden(
            hidden, head, batch, PolicyLossConfig(), parallel=parallel, memory=2**30
        )[0]

    return jax.jit(jax.grad(loss, (0, 1)))


def compiled(chips, rule):
    call = program(mesh_of(chips), rule)
    given = arguments(chips)
    if chips != "H100":
        return audit(call, *given).text
    return call.lower(*given).compile(compiler_options=NO_SEARCH).as_text()


BY_DAY = ("tpu7x:2x2x1", "e4m3")


@pytest.mark.parametrize(
    ("chips", "name"),
    [x if x == BY_DAY else pytest.param(*x, marks=pytest.mark.nightly) for x in OPERANDS],
)
def test_operands_have_8_bits_and_no_kernel_is_copied_to_f32(chips, name):
    """Gradients are multiplied in bf16."""
    text = compiled(chips, RULES[name])
    of_8_bits = {
        (lhs, rhs) for lhs, rhs, *_ in products(text) if lhs == rhs == OPERANDS[chips, name]
    }
    assert of_8_bits, products(text)
    of_gradients = {product[:2] for product in products(text)} - of_8_bits
    assert of_gradients <= {("bf16", "bf16")}
    _, rows, columns = sizes_of(chips)
    columns //= mesh_of(chips).tensor_size
    of_kernel = rf"f32\[({rows},{columns}|{columns},{rows})\]"
    assert [x for x in written_arrays(text) if re.fullmatch(of_kernel, x)] == []


def test_a_forward_multiplies_8_bits_alone():
    """On a v6e, whose int8 products take half the time of those of bf16."""
    chips = "v6e:2x2"
    parallel = mesh_of(chips)
    hidden, kernel, batch = arguments(chips)

    def forward(hidden, kernel, targets):
        head = Head(kernel, quantized=RULES["int8"])
        return log_probs_from_hidden(hidden, head, targets, parallel=parallel).log_probs

    found = audit(forward, hidden, kernel, batch.targets)
    assert {product[:3] for product in products(found.text)} == {("s8", "s8", "s32")}
