"""The matrix products in programs compiled for TPUs and GPUs: their operand dtypes and passes."""

import itertools
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.described_gpu import NO_SEARCH, described_gpus
from jaxppo import (
    PolicyLossConfig,
    RolloutBatch,
    TokenStats,
    log_probs_from_hidden,
    policy_loss,
    policy_loss_from_hidden,
)
from sharding import ParallelMesh
from sharding.audit import audit
from sharding.audit.hlo import parse

T, H, V = 2048, 512, 16384


@cache
def mesh_of(platform):
    if platform == "tpu":
        devices = topologies.get_topology_desc("v5p:2x2x1", platform="tpu").devices
        return ParallelMesh(Mesh(np.array(devices).reshape(2, 2), ("cp", "tp")))
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs takes the extra gpu-aot")
    return ParallelMesh(Mesh(np.array(described_gpus(8)).reshape(2, 4), ("cp", "tp")))


def compiled(platform, way, dtypes, sizes=(T, H, V), **options):
    """The text of the gradients of a policy loss on described devices, and their bytes of temporaries."""
    parallel, (tokens, hidden_size, columns) = mesh_of(platform), sizes

    def put(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(parallel.mesh, spec))

    shape = 1, tokens * parallel.context_size
    ids, x = (put(shape, dtype, parallel.tokens_spec) for dtype in (jnp.int32, jnp.float32))
    batch = RolloutBatch(*[ids] * 4, x, put((1, 1), jnp.int32, P()), advantages=x, old_log_probs=x)
    hidden = put((*shape, hidden_size), dtypes[0], parallel.hidden_spec)
    kernel = put((hidden_size, columns), dtypes[1], parallel.kernel_spec())
    config = PolicyLossConfig(entropy_coef=0.01)

    def loss(hidden, kernel, batch):
        if way == "one pass":
            return policy_loss_from_hidden(hidden, kernel, batch, config, parallel=parallel, **options)[0]
        given = {"parallel": parallel, "entropy": "bonus", "where": batch.loss_mask > 0, **options}
        stats: TokenStats = log_probs_from_hidden(hidden, kernel, batch.targets, **given)
        return policy_loss(stats, batch, config, parallel=parallel)[0]

    gradients = jax.jit(jax.grad(loss, (0, 1)))
    if platform == "tpu":
        found = audit(gradients, hidden, kernel, batch)
        return found.text, found.temp_bytes
    found = gradients.lower(hidden, kernel, batch).compile(compiler_options=NO_SEARCH)
    return found.as_text(), found.memory_analysis().temp_size_in_bytes


def products(text):
    """(lhs, rhs, result, precision) of each product."""

    def dtype(shape):
        return re.match(r"\(?(\w+)\[", shape)[1]

    found = set()
    for computation in parse(text).computations.values():
        for x in computation.values():
            if x.op in ("dot", "convolution") or (x.op == "custom-call" and "gemm" in x.attributes):
                operands = [dtype(computation[name].shape) for name in x.operands[:2]]
                precision = re.search(r'operand_precision(?:=\{|":\[")(\w+)', x.attributes)
                found.add((*operands, dtype(x.shape), precision[1].lower() if precision else "default"))
    return found


BF16, F32 = jnp.bfloat16, jnp.float32
# the compiler may move the cast of one operand into the product, which has the passes of f32
MIXED_EXACT = {(a, b, "f32", "highest") for a, b in (("bf16", "f32"), ("f32", "bf16"), ("f32", "f32"))}
ANY_FAST = {(a, b, "f32", "default") for a in ("bf16", "f32") for b in ("bf16", "f32")}
CASES = {
    "bf16": ((BF16, BF16), {}, {("bf16", "bf16", "f32", "default")}),
    "f32": ((F32, F32), {}, {("f32", "f32", "f32", "highest")}),
    "bf16 hidden states before an f32 kernel": ((BF16, F32), {}, MIXED_EXACT),
    "f32 asked to be fast": ((F32, F32), {"precision": "default"}, ANY_FAST),
    "f32 in three passes": ((F32, F32), {"precision": "high"}, {("f32", "f32", "f32", "high")}),
}


SOME = {("bf16", "tpu", "one pass"), ("f32", "tpu", "two passes")}
ALL = itertools.product(CASES, ("tpu", "gpu"), ("one pass", "two passes"))


@pytest.mark.parametrize(
    ("case", "platform", "way"), [x if x in SOME else pytest.param(*x, marks=pytest.mark.nightly) for x in ALL]
)
def test_operands_and_passes(case, platform, way):
    """bf16 operands in one pass with f32 sums; f32 operands never silently in bf16."""
    dtypes, options, expected = CASES[case]
    found = products(compiled(platform, way, dtypes, **options)[0])
    assert found
    assert found <= expected


def tile_turns(module, name):
    """How often the innermost loops turn, all in all; a loop whose turns depend on data counts once."""
    total = 0
    for x in module.computations[name].values():
        inner = sum(tile_turns(module, called) for names in x.calls.values() for called in names)
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', x.attributes) if x.op == "while" else None
        total += int(known[1]) * max(inner, 1) if known else inner
    return total


@pytest.mark.nightly
def test_a_real_head_on_a_gpu_host():
    """Qwen3-8B's, 8192 tokens per device: temporaries, and all turns of its loops, which are starts of kernels."""
    for way, options, gib, turns in (
        ("two passes", {"where": None}, 0.25, 75),
        ("two passes", {}, 0.3, 30),
        ("one pass", {}, 1.2, 15),  # 0.58 of it are dlogits, kept for the products behind the loop
    ):
        text, temporaries = compiled("gpu", way, (BF16, BF16), (8192, 4096, 151936), **options)
        assert temporaries <= gib * 2**30
        module = parse(text)
        assert tile_turns(module, module.entry) <= turns
        assert products(text) == {("bf16", "bf16", "f32", "default")}
