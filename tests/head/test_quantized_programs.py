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

T, H, V = 2048, 512, 16384  # of a device, of a model
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


def arguments(parallel):
    """Hidden states, a kernel and a batch, in bf16."""

    def put(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.sharding(spec))

    shape = (1, T * parallel.context_size)
    ids, x = (put(shape, dtype, parallel.tokens_spec) for dtype in (jnp.int32, jnp.float32))
    batch = RolloutBatch(
        *[ids] * 4, x, put((1, 1), jnp.int32, jax.P()), advantages=x, old_log_probs=x
    )
    hidden = put((*shape, H), jnp.bfloat16, parallel.hidden_spec)
    return hidden, put((H, V), jnp.bfloat16, parallel.kernel_spec()), batch


def program(parallel, rule):
    """The gradients of a policy loss in one pass."""

    def loss(hidden, kernel, batch):
        head = Head(kernel, quantized=rule)
        return policy_loss_from_hidden(
            hidden, head, batch, PolicyLossConfig(), parallel=parallel, memory=2**30
        )[0]

    return jax.jit(jax.grad(loss, (0, 1)))


def compiled(chips, rule):
    parallel = mesh_of(chips)
    call = program(parallel, rule)
    if chips != "H100":
        return audit(call, *arguments(parallel)).text
    return call.lower(*arguments(parallel)).compile(compiler_options=NO_SEARCH).as_text()


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
    columns = V // 2
    copies = [
        x for x in written_arrays(text) if re.fullmatch(rf"f32\[({H},{columns}|{columns},{H})\]", x)
    ]
    assert copies == []


def test_a_forward_multiplies_8_bits_alone():
    """On a v6e, whose int8 products take half the time of those of bf16."""
    parallel = mesh_of("v6e:2x2")
    hidden, kernel, batch = arguments(parallel)

    def forward(hidden, kernel, targets):
        head = Head(kernel, quantized=RULES["int8"])
        return log_probs_from_hidden(hidden, head, targets, parallel=parallel).log_probs

    found = audit(forward, hidden, kernel, batch.targets)
    assert {product[:3] for product in products(found.text)} == {("s8", "s8", "s32")}
