"""The roofline of compiled GPU programs, against kernels whose bytes and products can be counted
by hand.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from examples.planner.described_gpu import described_gpus
from sharding.audit import audit
from sharding.audit.clock import roofline
from sharding.devices import known_device

# A ms is 1e12 flops of bf16, 1e9 bytes of memory or of links.
ROUND = dataclasses.replace(known_device("H100"), flops=1e15, bandwidth=1e12, link=1e12)
BIG = "f32[1000,250000]{1,0}"  # 1e9 bytes


def time_of(body, computations="", inputs=f"%x = {BIG} parameter(0)"):
    header = f"HloModule m, num_partitions=8\n\n{computations}\n"
    return roofline(f"{header}ENTRY %main () -> f32[] {{\n  {inputs}\n{body}}}\n", ROUND)


def spent(time):
    """The kinds of time that are not 0, in ms."""
    return {
        k: round(v, 6) for k, v in dataclasses.asdict(time).items() if isinstance(v, float) and v
    }


def test_bytes_of_a_kernel():
    assert spent(time_of(f"  %y = {BIG} add(%x, %x)\n")) == {"elementwise": 2}
    assert spent(time_of(f"  %y = {BIG} copy(%x)\n")) == {"copies": 2}


def test_what_starts_no_kernel_is_free():
    allocated = f'  %y = {BIG} custom-call(), custom_call_target="AllocateBuffer"\n'
    assert spent(time_of(allocated + f"  %z = {BIG} bitcast(%x)\n")) == {}


M, K, N = 10_000, 5_000, 10_000  # 1e12 flops


def product(dtype, attributes=""):
    lhs = f"{dtype}[{M},{K}]{{1,0}}"
    rhs = f"{dtype}[{K},{N}]{{1,0}}"
    inside = f"%p = {lhs} parameter(0)\n  %q = {rhs} parameter(1)\n"
    dims = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    fused = f"%gemm (p: {lhs}, q: {rhs}) -> bf16[{M},{N}] {{\n  {inside}"
    fused += f"  ROOT %d = bf16[{M},{N}]{{1,0}} dot(%p, %q), {dims}{attributes}\n}}\n"
    inputs = f"%a = {lhs} parameter(0)\n  %b = {rhs} parameter(1)"
    return time_of(
        f"  %y = bf16[{M},{N}]{{1,0}} fusion(%a, %b), kind=kCustom, calls=%gemm\n", fused, inputs
    )


@pytest.mark.parametrize(
    ("dtype", "attributes", "ms"),
    [("bf16", "", 1), ("f32", "", 2), ("f32", ", operand_precision={highest,highest}", 16)],
)
def test_a_product_runs_at_the_peak_of_its_dtype(dtype, attributes, ms):
    assert spent(product(dtype, attributes)) == {"products": ms}


@pytest.mark.parametrize(("config", "ms"), [("DEFAULT", 2), ("HIGHEST", 16)])
def test_a_librarys_product(config, ms):
    inputs = f"%a = f32[{M},{K}]{{1,0}} parameter(0)\n  %b = f32[{K},{N}]{{1,0}} parameter(1)"
    config = f'backend_config={{"operand_precision":["{config}","{config}"]}}'
    call = (
        f"  %y = (f32[{M},{N}]{{1,0}}, s8[8]{{0}}) custom-call(%a, %b),"
        f' custom_call_target="__cublas$gemm", {config}\n'
    )
    assert spent(time_of(call, inputs=inputs)) == {"products": ms}


LOOP = f"""%clipped (p: s32[]) -> (s32[], s32[]) {{
  %p = s32[] parameter(0)
  %zero = s32[] constant(0)
  %four = s32[] constant(4)
  %up = s32[] maximum(%zero, %p)
  %clip = s32[] minimum(%four, %up)
  ROOT %both = (s32[], s32[]) tuple(%clip, %clip)
}}

%body (c: (s32[], s32[], {BIG})) -> (s32[], s32[], {BIG}) {{
  %c = (s32[], s32[], {BIG}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=1
  %v = {BIG} get-tuple-element(%c), index=2
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %sum = {BIG} add(%v, %v)
  ROOT %t = (s32[], s32[], {BIG}) tuple(%next, %n, %sum)
}}

%condition (c: (s32[], s32[], {BIG})) -> pred[] {{
  %c = (s32[], s32[], {BIG}) parameter(0)
  %i = s32[] get-tuple-element(%c), index=0
  %n = s32[] get-tuple-element(%c), index=1
  ROOT %more = pred[] compare(%i, %n), direction=LT
}}
"""


def test_turns_whose_bound_comes_from_a_kernel_of_several_results():
    inputs = f"%x = {BIG} parameter(0)\n  %k = s32[] parameter(1)"
    body = f"""  %start = s32[] constant(0)
  %bounds = (s32[], s32[]) fusion(%k), kind=kLoop, calls=%clipped
  %n = s32[] get-tuple-element(%bounds), index=1
  %c = (s32[], s32[], {BIG}) tuple(%start, %n, %x)
  %w = (s32[], s32[], {BIG}) while(%c), condition=%condition, body=%body
"""
    found = time_of(body, LOOP, inputs)
    assert (found.least.elementwise, found.elementwise, found.unknown) == (0, 8, ())


@pytest.mark.parametrize(
    ("op", "ms"), [("all-reduce", 2 * 7 / 8), ("all-gather", 7 / 8), ("all-to-all", 7 / 8)]
)
def test_collectives_cross_a_switch(op, ms):
    found = time_of(
        f"  %y = {BIG} {op}(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%add\n"
    )
    assert found.collectives == pytest.approx(ms, abs=0.01)


def test_audit_of_a_described_gpu():
    pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs takes the extra gpu-aot")
    mesh = Mesh(np.array(described_gpus(1)), ("dp",))
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16, sharding=NamedSharding(mesh, P()))
    time = audit(lambda x: jnp.exp(x @ x), x).time
    assert (time.chip, time.compiler) == ("H100", "a roofline")
    assert time.products >= 1e3 * 2 * 8192**3 / 989e12
    assert time.compute < 2 * time.products
