"""Estimated times of programs that are compiled for described TPUs."""

import dataclasses
import functools
import importlib.metadata
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from examples.planner.pod_head import plain_stats
from jaxppo import log_probs_from_hidden
from sharding import ParallelMesh
from sharding.audit import audit
from sharding.audit.results import Milliseconds
from sharding.devices import device_of, known_device

LATENCY = 0.002  # ms
V5P = {"flops": 459e9, "hbm": 2765e6, "link": 90e6}  # a millisecond


@functools.cache
def devices(name, **how):
    return topologies.get_topology_desc(name, platform="tpu", **how).devices


def on_one(shape, dtype=jnp.bfloat16, name="v5p:2x2x1"):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(devices(name)[0]))


@pytest.mark.parametrize(
    ("name", "chip", "peak"),
    [
        ("v5p:2x2x1", "v5p", 459e9),
        ("v6e:2x2", "v6e", 918e9),
        ("v5e:2x2", "v5e", 197e9),
        ("tpu7x:2x2x1", "tpu7x", 1153.5e9),
    ],
)
def test_a_bare_product_comes_out_below_the_peak_of_its_chip(name, chip, peak):
    rows, inner, columns = 8192, 4096, 32768
    a = on_one((rows, inner), name=name)
    b = on_one((inner, columns), name=name)
    found = audit(jnp.matmul, a, b)
    at_peak = 2 * rows * inner * columns / peak
    assert at_peak <= found.time.products <= at_peak / 0.75
    assert found.time.compute == found.time.products == found.time.least.products
    assert found.time.unknown == ()
    assert found.time.chip == chip
    assert found.time.compiler == f"libtpu {importlib.metadata.version('libtpu')}"
    assert f"time on {chip}, estimated by {found.time.compiler}: compute" in str(found)


def test_a_chip_of_two_devices_is_halved():
    whole, half = (
        device_of(devices("v4:2x2x1", **how)[0]) for how in ({"chip_config_name": "megacore"}, {})
    )
    assert (whole.flops, whole.bandwidth, whole.memory) == (275e12, 1200e9, 32 * 2**30)
    assert (half.flops, half.bandwidth, half.memory) == (275e12 / 2, 1200e9 / 2, 16 * 2**30)
    assert device_of(devices("tpu7x:2x2x1")[0]).flops == 2307e12 / 2
    assert device_of(devices("v5p:2x2x1")[0]).flops == 459e12


@pytest.mark.parametrize(
    ("kind", "name", "gib"),
    [
        ("TPU v4", "v4", 32),
        ("TPU v5", "v5p", 95),
        ("TPU v5p", "v5p", 95),
        ("TPU v5 lite", "v5e", 16),
        ("TPU v5e", "v5e", 16),
        ("TPU v6 lite", "v6e", 32),
        ("TPU7x", "tpu7x", 96),
        ("NVIDIA H100 80GB HBM3", "H100", 80),
        ("NVIDIA H200", "H200", 141),
        ("NVIDIA B200", "B200", 180),
        ("TPU v5x", None, None),
        ("NVIDIA H1000", None, None),
        ("cpu", None, None),
        ("", None, None),
    ],
)
def test_a_device_is_known_by_its_kind(kind, name, gib):
    found = known_device(kind)
    assert (found and found.name, found and found.memory / 2**30) == (name, gib)


def square(a):
    return a @ a


def test_there_is_no_time_without_a_tpu():
    assert audit(square, jnp.ones((8, 8))).time is None
    assert device_of(jax.devices()[0]) is None
    assert device_of(None) is None


def turns(length, first, a):
    """So many products with `a`, one a turn; `length` may be traced."""

    def turn(i, carry):
        return carry @ a

    return lax.fori_loop(0, length, turn, first)


@functools.cache
def one_turn():
    """The product of a loop over matrices of 1024 x 1024, in ms."""
    return timed(seven_turns).products / 7


def seven_turns(a, n):
    return turns(7, a, a)


def timed(fn):
    return audit(fn, on_one((1024, 1024)), on_one((), jnp.int32)).time


def counted(stop, step=1, start=0):
    """A loop with a product a turn; `stop` reads the counter, the argument and the product."""

    def loop(a, n):
        def goes_on(carry):
            i, product = carry
            return stop(i, n, product)

        def turn(carry):
            i, product = carry
            return i + step, product @ a

        return lax.while_loop(goes_on, turn, (start, a))[1]

    return loop


def test_a_turn_takes_what_a_product_may():
    at_peak = 2 * 1024**3 / V5P["flops"]
    assert at_peak <= one_turn() <= at_peak / 0.3  # a small one, and its result is written


def six_steps(a, n):
    """The turns of a scan."""

    def step(carry, _):
        return carry @ a, None

    return lax.scan(step, a, length=6)[0]


def three_times_five(a, n):
    def turn(i, carry):
        return turns(5, carry, a)

    return lax.fori_loop(0, 3, turn, a)


def each_turn_has_one_more(a, n):
    def turn(i, carry):
        return turns(i, carry, a)

    return lax.fori_loop(0, 4, turn, a)


def a_bound_that_is_carried(a, n):
    def goes_on(carry):
        i, _, bound = carry
        return i < bound

    def turn(carry):
        i, product, bound = carry
        return i + 1, product @ a, bound

    return lax.while_loop(goes_on, turn, (0, a, 11))[1]


# Conditions of loops, of the counter i, the argument n and the product c


def up_to_9(i, n, c):
    return i <= 9


def below_9(i, n, c):
    return i < 9


def above_0(i, n, c):
    return i > 0


def below_9_and_n(i, n, c):
    return (i < 9) & (i < n)


def below_n_of_at_most_6(i, n, c):
    return i < jnp.minimum(n, 6)


def below_n(i, n, c):
    return i < n


def below_9_or_while_an_entry_is_positive(i, n, c):
    return (i < 9) | (c[0, 0] > 0)


@pytest.mark.parametrize(
    ("fn", "least", "most"),
    [
        (six_steps, 6, 6),
        (three_times_five, 15, 15),
        (each_turn_has_one_more, 0, 12),
        (counted(up_to_9), 10, 10),
        (counted(below_9, step=2), 5, 5),
        (counted(above_0, step=-1, start=9), 9, 9),
        (counted(below_9_and_n), 0, 9),
        (counted(below_n_of_at_most_6), 0, 6),
        (counted(below_n), 0, math.inf),
        (counted(below_9_or_while_an_entry_is_positive), 9, math.inf),
        (a_bound_that_is_carried, 11, 11),
    ],
)
def test_compiled_loops(fn, least, most):
    found = timed(fn)
    assert found.least.products == pytest.approx(least * one_turn(), rel=0.05)
    assert found.products == pytest.approx(most * one_turn(), rel=0.05)
    assert len(found.unknown) == (most == math.inf)


def test_a_pallas_kernel_takes_what_it_declares():
    N = 1024

    def kernel(a_ref, b_ref, o_ref):
        o_ref[...] = jnp.dot(a_ref[...], b_ref[...], preferred_element_type=jnp.float32).astype(
            o_ref.dtype
        )

    def call(cost):
        tiles = {
            "in_specs": [
                pl.BlockSpec((256, N), lambda i, j: (i, 0)),
                pl.BlockSpec((N, 256), lambda i, j: (0, j)),
            ]
        }
        out = {"out_specs": pl.BlockSpec((256, 256), lambda i, j: (i, j))}
        shape = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)
        return pl.pallas_call(
            kernel, out_shape=shape, grid=(4, 4), cost_estimate=cost, **tiles, **out
        )

    cost = pl.CostEstimate(flops=2 * N**3, bytes_accessed=6 * N * N, transcendentals=0)
    found = audit(call(cost), on_one((N, N)), on_one((N, N)))
    assert found.time.kernels == pytest.approx(
        max(2 * N**3 / (0.93 * V5P["flops"]), 6 * N * N / V5P["hbm"])
    )
    assert found.time.compute == found.time.kernels
    assert found.time.unknown == ()
    assert found.flops.low == found.flops.high == 2 * N**3
    silent = audit(call(None), on_one((N, N)), on_one((N, N)))
    assert silent.time.kernels == pytest.approx(3 * 2 * N * N / V5P["hbm"])
    [unknown] = silent.time.unknown
    assert "it declares nothing" in unknown


def test_a_compiled_fill_takes_its_bytes():
    found = audit(functools.partial(jnp.full, (8192, 4096)), on_one((), jnp.float32))
    assert found.time.compute == pytest.approx(8192 * 4096 * 4 / V5P["hbm"], rel=1e-3)


@functools.cache
def sixteen():
    return Mesh(np.array(devices("v5p:2x2x4")).reshape(4, 4), ("a", "b"))


def on_sixteen(fn, out_specs, *args):
    x = jax.ShapeDtypeStruct(
        (16 * 1024, 1024), jnp.float32, sharding=NamedSharding(sixteen(), P(("a", "b")))
    )
    in_specs = (P(("a", "b")), *(P() for _ in args))
    return audit(
        jax.shard_map(fn, mesh=sixteen(), in_specs=in_specs, out_specs=out_specs), x, *args
    ).time


MIB4 = 1024 * 1024 * 4
# around a ring of four
FORTH = ((0, 1), (1, 2), (2, 3), (3, 0))
BACK = ((1, 0), (2, 1), (3, 2), (0, 3))


def summed_over(axes):
    return functools.partial(lax.psum, axis_name=axes)


def sent(*pairs):
    return functools.partial(lax.ppermute, axis_name="b", perm=pairs)


gathered = functools.partial(lax.all_gather, axis_name="b", axis=0, tiled=True)
exchanged = functools.partial(
    lax.all_to_all, axis_name="b", split_axis=0, concat_axis=1, tiled=True
)


@pytest.mark.parametrize(
    ("fn", "out_specs", "carried"),
    [
        (summed_over(("a", "b")), P(), 2 * 15 / 16 * MIB4 / 3),  # in a box of 2x2x4
        (summed_over("a"), P("b"), 2 * 3 / 4 * MIB4),  # along a line
        (summed_over("b"), P("a"), 2 * 3 / 4 * MIB4 / 2),
        (gathered, P(("a", "b")), 3 / 4 * 4 * MIB4 / 2),
        (exchanged, P(("a", "b")), MIB4 / 2),
        (sent(*FORTH), P(("a", "b")), MIB4),
    ],
)
def test_compiled_collectives(fn, out_specs, carried):
    found = on_sixteen(fn, out_specs)
    assert found.collectives == pytest.approx(carried / V5P["link"] + LATENCY)
    assert (found.overlapped, found.products, found.unknown) == (0, 0, ())


def test_a_compiled_collective_beside_a_product():
    def both(x, a):
        return sent(*FORTH)(x), a @ a

    a = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=NamedSharding(sixteen(), P()))
    found = on_sixteen(both, (P(("a", "b")), P()), a)
    assert found.products >= 2 * 4096**3 / V5P["flops"]
    assert (found.overlapped, found.collectives) == (pytest.approx(MIB4 / V5P["link"] + LATENCY), 0)


def four_by_four(fn, *args, options=None, name="v6e:4x4", dtype=jnp.float32, out_specs=None):
    """The time of a function of a device's `[1024, 1024]` on the mesh a=4, b=4 in the order of
    coordinates.
    """
    ordered = sorted(devices(name), key=lambda d: (d.coords[1], d.coords[0]))
    mesh = Mesh(np.array(ordered).reshape(4, 4), ("a", "b"))
    x = jax.ShapeDtypeStruct((16 * 1024, 1024), dtype, sharding=NamedSharding(mesh, P(("a", "b"))))
    specs = {"in_specs": P(("a", "b")), "out_specs": out_specs or P(("a", "b"))}
    return audit(jax.jit(jax.shard_map(fn, mesh=mesh, **specs), compiler_options=options), x).time


@pytest.mark.parametrize(
    ("permutations", "messages"),
    [
        ([[(0, 1)]], 1),
        ([[(0, 2)]], 1),
        ([[(0, 2), (1, 3)]], 2),
        ([[(0, 1), (1, 0)]], 1),
        ([FORTH], 1),
        ([[(0, 3), (1, 2)]], 2),
        ([FORTH, BACK], 2),
        ([FORTH[:3], BACK[:3]], 1),
    ],
)
def test_compiled_permutations_wait_for_each_other_on_a_link(permutations, messages):
    def all_sent(x):
        return [sent(*pairs)(x) for pairs in permutations]

    found = four_by_four(all_sent, out_specs=[P(("a", "b"))] * len(permutations))
    assert found.collectives == pytest.approx(messages * MIB4 / V5P["link"] + LATENCY, rel=1e-3)


def test_a_compiled_sum_on_sparse_cores():
    """It takes what any sum does, and it is known that nothing was beside it."""
    on_sparse_cores = {
        "xla_tpu_enable_sparse_core_collective_offload_all_reduce": "true",
        "xla_tpu_use_tc_device_shape_on_sc": "true",
    }
    reduced = 2 * 3 / 4 * MIB4 / V5P["link"] + LATENCY
    for options in (on_sparse_cores, {}):
        on = {"name": "v5p:4x4x1", "out_specs": P("a")}
        found = four_by_four(summed_over("b"), options=options, **on)
        assert (found.collectives, found.overlapped) == (pytest.approx(reduced), pytest.approx(0))
        assert found.unknown == ()


def test_a_compiled_gather_in_parts():
    """A v5e sends the parts of a gather beside products; the gather is sent once."""

    def both(x):
        gathered = lax.all_gather(x, "b", axis=0, tiled=True)
        product = x
        for _ in range(4):
            product = jnp.tanh(product @ x)
        return gathered @ product

    found = four_by_four(both, name="v5e:4x4", dtype=jnp.bfloat16)
    assert found.overlapped + found.collectives == pytest.approx(
        3 / 4 * 4 * MIB4 / 2 / 45e6 + LATENCY
    )
    assert found.overlapped > 0


class Watched:
    """A jitted function that counts how often it is compiled, or is answered by a cache."""

    def __init__(self, jitted, is_cached):
        self.jitted, self.is_cached, self.compiled = jitted, is_cached, 0

    def __call__(self, *args):
        return self.jitted(*args)

    def lower(self, *args):
        self.lowered = self.jitted.lower(*args)
        return self

    def trace(self, *args):
        self.jaxpr = self.jitted.trace(*args).jaxpr
        self.lower = functools.partial(Watched.lower, self, *args)
        return self

    def compile(self, options=None):
        self.compiled += 1
        return self.lowered.compile(None if self.is_cached else options)


def test_a_program_is_compiled_once():
    watched = Watched(jax.jit(square), is_cached=False)
    assert audit(watched, on_one((256, 256))).time.products > 0
    assert watched.compiled == 1


def test_a_program_that_a_cache_returned_has_no_time_but_its_text():
    watched = Watched(jax.jit(square), is_cached=True)
    found = audit(watched, on_one((256, 256)))
    assert found.time is None
    assert "ENTRY" in found.text


# A head of Qwen3-8B for 16 chips.

H, V, TOKENS = 4096, 151936, 8192
COLUMNS = V // 4


def head_arguments(mesh, with_where):
    def described(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=mesh.sharding(spec))

    per_token = [jnp.int32, jnp.float32] + [bool] * with_where
    return (
        described((1, 4 * TOKENS, H), jnp.bfloat16, mesh.hidden_spec),
        described((H, V), jnp.bfloat16, mesh.kernel_spec()),
        *(described((1, 4 * TOKENS), dtype, mesh.tokens_spec) for dtype in per_token),
    )


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "peak", "over_tp", "over_cp"),
    # bytes a millisecond: tp is a square of four neighbours, so that sums go around both of its
    # sides at once
    [
        ("v5p:2x2x4", 459e9, 2 * 90e6, 90e6),  # cp is a line of four
        # cp has every second chip of both sides: two rings share each link
        ("v6e:4x4", 918e9, 2 * 90e6, 90e6 / 2),
    ],
)
def test_a_plain_head(name, peak, over_tp, over_cp):
    mesh = ParallelMesh(Mesh(np.array(devices(name)).reshape(4, 4), ("cp", "tp")))

    def loss(hidden, kernel, targets, weights):
        logits = lax.with_sharding_constraint(
            hidden @ kernel, mesh.sharding(mesh.logits_spec)
        ).astype(jnp.float32)
        return (plain_stats(logits, targets)[0] * weights).sum()

    found = audit(jax.value_and_grad(loss, (0, 1)), *head_arguments(mesh, False)).time
    at_peak = 3 * 2 * TOKENS * H * COLUMNS / peak
    assert at_peak <= found.products <= at_peak / 0.75
    gradients = 2 * 3 / 4 * 2 * (TOKENS * H / over_tp + H * COLUMNS / over_cp)  # summed in bf16
    assert gradients <= found.collectives <= 1.05 * gradients
    assert found.compute < 2 * at_peak + 10  # ms of arithmetic on 8192 x 37984 logits
    assert found.least == Milliseconds(*dataclasses.astuple(found)[:7])


@pytest.mark.nightly
def test_a_masked_head_is_timed_at_full_count():
    mesh = ParallelMesh(Mesh(np.array(devices("v5p:2x2x4")).reshape(4, 4), ("cp", "tp")))

    def loss(hidden, kernel, targets, weights, where):
        return (
            log_probs_from_hidden(hidden, kernel, targets, parallel=mesh, where=where).log_probs
            * weights
        ).sum()

    found = audit(jax.value_and_grad(loss, (0, 1)), *head_arguments(mesh, True))
    at_peak = found.flops.high / 459e9
    assert at_peak >= 3 * 2 * TOKENS * H * COLUMNS / 459e9
    assert at_peak <= found.time.products <= at_peak / 0.6
    assert found.time.least.products <= 0.1 * found.time.products
    assert found.flops.low <= 0.1 * found.flops.high
    assert all("sparse cores" in text for text in found.time.unknown)
