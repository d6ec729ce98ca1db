"""Rows in every context layout: the layouts themselves, moving between them, shifts and scans
across shards.
"""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from sharding import (
    ParallelMesh,
    ShardAxes,
    logical_positions,
    make_parallel_mesh,
    physical_places,
    redistribute,
    scan_affine,
    shift_left,
)
from sharding import layouts as layout_module
from sharding.audit import audit
from sharding.axes import LAYOUTS
from sharding.testing import assert_trees_close

R, T, S = 4, 64, 3
# a full row, an empty one, short chunks
LENGTHS = np.array([[16, 13, 0], [0, 0, 0], [64, 0, 0], [1, 20, 7]])
MESHES = ["dp=2,cp=4,tp=1", "dp=1,cp=8,tp=1", "dp=2,cp=2,tp=2"]
ANYWHERE = [(MESHES[0], layout) for layout in LAYOUTS] + [("dp=1,cp=8,tp=1", "zigzag_per_segment")]
EVERYWHERE = [case for case in itertools.product(MESHES, LAYOUTS) if case not in ANYWHERE]
TABLE = [pytest.param(*c) for c in ANYWHERE] + [
    pytest.param(*c, marks=pytest.mark.nightly) for c in EVERYWHERE
]


def order(layout, shards):
    per_segment = LENGTHS if layout == "zigzag_per_segment" else None
    return np.broadcast_to(logical_positions(layout, T, shards, per_segment), (R, T))


def physical(x, layout, shards):
    x = np.asarray(x)
    index = order(layout, shards)
    return np.take_along_axis(x, index.reshape(index.shape + (1,) * (x.ndim - 2)), axis=1)


def logical_segments(shards):
    """Segment ids in logical order, each sequence padded for zigzag_per_segment."""
    ids = np.zeros((R, T), np.int32)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for s, length in enumerate(lengths):
            ids[row, start : start + length] = s + 1
            start += -(-length // (2 * shards)) * 2 * shards
    return ids


def collectives(parallel, fn, *args):
    """(operation, 4-byte elements that a device gets) of each collective, all of them over the
    context axis.
    """
    found = audit(fn, *args, mesh=parallel.mesh).collectives
    assert all(c.axes == parallel.context and not c.in_loop for c in found)
    return sorted((c.op, c.bytes // 4) for c in found)


def test_layouts_are_as_pictured():
    """The functions give what the module's docstring shows."""
    pictures = dict(re.findall(r"^ {4}(\w+) +([\d |]+\d)", layout_module.__doc__, re.MULTILINE))
    assert set(pictures) == set(LAYOUTS)
    for name, picture in pictures.items():
        lengths = np.array([[8, 4, 4]]) if name == "zigzag_per_segment" else None
        expected = [int(n) for n in picture.replace("|", " ").split()]
        assert logical_positions(name, 16, 2, lengths).reshape(-1).tolist() == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 2, 3, 4, 8])
def test_layouts_are_permutations(layout, shards):
    lengths = np.array([[0, 5, 48 - 24], [48, 0, 0]]) if layout == "zigzag_per_segment" else None
    held = logical_positions(layout, 48, shards, lengths)
    places = physical_places(layout, 48, shards, lengths)
    np.testing.assert_array_equal(np.argsort(held, axis=-1), places)
    if shards == 1:
        np.testing.assert_array_equal(held.reshape(-1, 48)[0], np.arange(48))


def test_zigzag_balances_causal_attention():
    """Every shard attends to as many earlier positions, in each sequence too; contiguous shards
    do not.
    """

    def work(held):
        return held.reshape(4, -1).sum(axis=1)

    assert len(set(work(logical_positions("zigzag", T, 4)))) == 1
    one = np.array([[24, 32, 8]])
    starts = np.repeat([0, 24, 56], one[0])
    held = logical_positions("zigzag_per_segment", T, 4, one)[0]
    assert len(set(work(held - starts[held]))) == 1
    assert len(set(work(logical_positions("contiguous", T, 4)))) == 4


def up_to(layout):
    """The layouts up to this one, itself the last: over all of them, each pair comes once.

    Those per segment come behind the others, so that the mesh that has one layout by day has it
    with every other.
    """
    in_order = sorted(LAYOUTS, key=lambda name: LAYOUTS[name].per_segment)
    return in_order[: in_order.index(layout) + 1]


@pytest.mark.parametrize(("mesh", "layout"), TABLE)
def test_redistribute_is_exact_for_every_dtype(mesh, layout):
    """There and back, between this layout and those before it."""
    parallel = make_parallel_mesh(mesh)
    shards = parallel.context_size
    ids = logical_segments(shards)
    rng = np.random.default_rng(0)
    tree = {
        "bf16": jnp.asarray(rng.normal(size=(R, T, 2, 3)), jnp.bfloat16),
        "f32": jnp.asarray(rng.normal(size=(R, T)), jnp.float32).at[0, 0].set(jnp.nan),
        "i8": rng.integers(-9, 9, size=(R, T)).astype(np.int8),
        "bool": rng.integers(0, 2, size=(R, T, 5)).astype(bool),
        "none": None,
    }
    same = functools.partial(np.testing.assert_array_equal, equal_nan=True)
    others = up_to(layout)

    @jax.jit
    def there_and_back(x, ids):
        moved = {}
        back = {}
        for other in others:
            moved[other] = redistribute(x, parallel, layout, other, ids, S)
            moved_ids = redistribute(ids, parallel, layout, other, ids, S)
            back[other] = redistribute(moved[other], parallel, other, layout, moved_ids, S)
        return moved, back

    x = jax.tree.map(functools.partial(physical, layout=layout, shards=shards), tree)
    moved, back = there_and_back(x, physical(ids, layout, shards))
    for other in others:
        expected = jax.tree.map(functools.partial(physical, layout=other, shards=shards), tree)
        jax.tree.map(same, moved[other], expected)
        jax.tree.map(same, back[other], x)
        assert moved[other]["none"] is None
        assert moved[other]["bf16"].dtype == jnp.bfloat16


def with_transpose(fn):
    """A compiled function of x and y: A x, and the transpose of A times y."""

    @jax.jit
    def run(x, y):
        return fn(x), jax.linear_transpose(fn, x)(y)[0]

    return run


@pytest.mark.parametrize(
    ("source", "target"),
    [("contiguous", "zigzag"), ("zigzag", "striped"), ("striped", "zigzag_per_segment")],
)
def test_transpose_of_redistribute_is_exact(source, target):
    """<A x, y> = <x, A' y> bit for bit on integers in f32, and derivatives of both modes."""
    parallel = make_parallel_mesh("dp=2,cp=4")
    ids = physical(logical_segments(4), source, 4)

    def move(x):
        return redistribute(x, parallel, source, target, ids, S)

    rng = np.random.default_rng(1)
    x, y = rng.integers(-99, 99, size=(2, R, T)).astype(np.float32)
    moved, pull = with_transpose(move)(x, y)
    assert np.vdot(moved, y) == np.vdot(x, pull)
    in_row = np.take_along_axis(np.asarray(y), np.argsort(order(target, 4), axis=1), axis=1)
    np.testing.assert_array_equal(pull, np.take_along_axis(in_row, order(source, 4), axis=1))

    @jax.jit
    def nonlinear(x):
        return jnp.sin(move(x)) * y

    check_grads(nonlinear, (x / 99,), order=1, rtol=2e-2)


@pytest.mark.parametrize(("mesh", "source", "target", "expected"), [
    ("dp=2,cp=4", "contiguous", "zigzag", [("collective-permute", R * T // 16)] * 2),
    ("dp=2,cp=4", "zigzag", "contiguous", [("collective-permute", R * T // 16)] * 2),
    ("dp=2,cp=4", "contiguous", "striped", [("all-to-all", R * T // 8)]),
    ("dp=2,cp=4", "zigzag", "striped", [("all-to-all", R * T // 8)]),
    ("dp=2,cp=4", "striped", "zigzag_per_segment", [("all-gather", R * T // 2), ("all-reduce", R * S // 2)]),
    ("dp=8,cp=1", "zigzag", "striped", []),
])  # fmt: skip
def test_bytes_moved_by_redistribute(mesh, source, target, expected):
    parallel = make_parallel_mesh(mesh)
    x = jnp.ones((2 * R, T))
    ids = jnp.ones((2 * R, T), jnp.int32)

    def move(x, ids):
        return redistribute(x, parallel, source, target, ids, S)

    expected = sorted((op, size * 2) for op, size in expected)
    assert collectives(parallel, move, x, ids) == expected

    def transpose(x, ids):
        return jax.linear_transpose(functools.partial(move, ids=ids), x)(x)

    assert collectives(parallel, transpose, x, ids) == expected


def serial_shift(x, ids, by, fill):
    y = np.full_like(x, fill)
    for r, t in np.argwhere(ids > 0):
        if t + by < T and ids[r, t + by] == ids[r, t]:
            y[r, t] = x[r, t + by]
    return y


@pytest.mark.parametrize(("mesh", "layout"), TABLE)
def test_shift_left(mesh, layout):
    """By 0, 1, a few, more than a shard's part of a row, and more than a row; with and without
    segments.
    """
    parallel = make_parallel_mesh(mesh, context_layout=layout)
    shards = parallel.context_size
    ids = logical_segments(shards)
    rng = np.random.default_rng(2)
    tree = {
        "i": rng.integers(0, 99, size=(R, T)),
        "b": rng.integers(0, 2, size=(R, T, 2)).astype(bool),
        "none": None,
    }
    shifts = (0, 1, 3, 14, 2**40)

    @jax.jit
    def shifted(x, ids):
        whole = (
            []
            if layout == "zigzag_per_segment"
            else [shift_left(x["i"], parallel, by, -1) for by in shifts]
        )
        return [shift_left(x, parallel, by, 1, ids, S) for by in shifts], whole

    x = jax.tree.map(functools.partial(physical, layout=layout, shards=shards), tree)
    with_segments, whole = shifted(x, physical(ids, layout, shards))
    for by, got in zip(shifts, with_segments, strict=True):
        for name in ("i", "b"):
            np.testing.assert_array_equal(
                got[name], physical(serial_shift(tree[name], ids, by, 1), layout, shards)
            )
        assert got["none"] is None
    for by, got in zip(shifts, whole, strict=False):
        expected = serial_shift(tree["i"], np.ones((R, T)), by, -1)
        np.testing.assert_array_equal(got, physical(expected, layout, shards))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_transpose_of_shift_left(layout):
    """<A x, y> = <x, A' y>, exactly, integers being summed."""
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    ids = physical(logical_segments(4), layout, 4)
    rng = np.random.default_rng(3)
    x, y = rng.integers(-99, 99, size=(2, R, T)).astype(np.float32)

    def shift(x):
        return shift_left(x, parallel, 2, 0, ids, S)

    shifted, pull = with_transpose(shift)(x, y)
    assert np.vdot(shifted, y) == np.vdot(x, pull)


@pytest.mark.parametrize(("layout", "expected"), [
    ("contiguous", [("collective-permute", 3)] * 2),
    ("zigzag", [("collective-permute", 3)] * 4),
    ("zigzag_per_segment", [("collective-permute", S)] * 6 + [("all-reduce", S)]),
    ("striped", [("all-to-all", T // 4)] * 3 + [("collective-permute", 3)] * 2),
])  # fmt: skip
def test_what_a_shift_by_3_moves(layout, expected):
    """Sizes for x and for the segment ids, for one row: 3 positions each, 2 * 3, 2 * S * 3 (x
    only), and the shard.
    """
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    x = jnp.ones((2, T))
    ids = jnp.ones((2, T), jnp.int32)

    def shift(x, ids):
        return shift_left(x, parallel, 3, 0, ids, S)

    assert collectives(parallel, shift, x, ids) == sorted(expected)


def serial_scan(a, b, ids, reverse):
    y = np.zeros((R, T))
    step = 1 if reverse else -1
    for r in range(R):
        for t in range(T)[::-step]:
            if ids[r, t]:
                linked = 0 <= t + step < T and ids[r, t + step] == ids[r, t]
                y[r, t] = a[r, t] * (y[r, t + step] if linked else 0) + b[r, t]
    return y


@pytest.mark.every(3)
@pytest.mark.parametrize(("mesh", "layout"), TABLE)
def test_scan_affine_is_the_serial_loop(mesh, layout):
    """In f64, in both directions, over segments and over whole rows, with anything at padding."""
    parallel = make_parallel_mesh(mesh, context_layout=layout)
    shards = parallel.context_size
    ids = logical_segments(shards)
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(2, R, T))

    def scans(a, b, whole_a, whole_b, ids):
        whole = layout != "zigzag_per_segment"
        return [
            (
                scan_affine(a, b, parallel, reverse, ids.astype(np.uint8), S),
                scan_affine(whole_a, whole_b, parallel, reverse) if whole else None,
                scan_affine(0.5, b, parallel, reverse, ids, S),
            )
            for reverse in (True, False)
        ]

    dirty = [np.where(ids > 0, x, np.nan) for x in (a, b)]
    with jax.enable_x64(True):
        inputs = [physical(x, layout, shards) for x in (*dirty, a, b, ids)]
        got = jax.jit(scans)(*inputs)
    ones = np.ones((R, T))
    half = np.full((R, T), 0.5)
    for reverse, (packed, whole, halved) in zip((True, False), got, strict=True):
        assert packed.dtype == np.float64
        for y, expected in (
            (packed, serial_scan(a, b, ids, reverse)),
            (whole, serial_scan(a, b, ones, reverse)),
            (halved, serial_scan(half, b, ids, reverse)),
        ):
            if y is not None:
                np.testing.assert_allclose(
                    y, physical(expected, layout, shards), rtol=1e-12, atol=1e-12
                )


@functools.cache
def gradient_of_scan(parallel, reverse):
    """A compiled function of a, b, weights and segment ids."""

    def loss(a, b, weight, ids):
        return jnp.vdot(scan_affine(a, b, parallel, reverse, ids, S), weight)

    return jax.jit(jax.grad(loss, argnums=(0, 1)))


@pytest.mark.every(3)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reverse", [True, False])
def test_gradient_of_scan_affine(layout, reverse):
    """Equal to one device's and to the serial loop's, the scan of the weights the other way; a
    is 0 here and there.
    """
    shards = 4
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    ids = logical_segments(shards)
    rng = np.random.default_rng(5)
    a, b, weight = rng.normal(size=(3, R, T)).astype(np.float32)
    a[rng.random((R, T)) < 0.2] = 0
    there = [physical(x, layout, shards) for x in (a, b, weight, ids)]
    got = gradient_of_scan(parallel, reverse)(*there)
    one = gradient_of_scan(None, reverse)(a, b, weight, ids)
    y = serial_scan(a, b, ids, reverse)
    before_a = np.roll(a, 1 if reverse else -1, axis=1)
    # b_t gets w_t and, through y_t, a_(t-1) of b_(t-1)'s
    of_b = serial_scan(before_a, weight, ids, not reverse)
    way = np.s_[:, :: 1 if reverse else -1]
    of_a = of_b * serial_shift(y[way], ids[way], 1, 0)[way]
    chex.assert_trees_all_close(one, (of_a, of_b), rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(
        got, tuple(physical(x, layout, shards) for x in (of_a, of_b)), rtol=1e-4, atol=1e-5
    )


@functools.cache
def second_derivatives(parallel):
    """A compiled function of a, b and segment ids."""

    def penalty(a, b, ids):
        def loss(a, b):
            return jnp.sin(scan_affine(a, b, parallel, True, ids, S)).sum()

        return sum((g**2).sum() for g in jax.grad(loss, argnums=(0, 1))(a, b))

    return jax.jit(jax.grad(penalty, argnums=(0, 1)))


@pytest.mark.every(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives(layout):
    """A scan and a move in one function: the gradient of its gradient's square is that of one
    device.
    """
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    ids = logical_segments(4)
    rng = np.random.default_rng(7)
    a, b = (rng.normal(size=(2, R, T)) / 2).astype(np.float32)
    there = [physical(x, layout, 4) for x in (a, b, ids)]
    got = second_derivatives(parallel)(*there)
    expected = [physical(x, layout, 4) for x in second_derivatives(None)(a, b, ids)]
    assert_trees_close(list(got), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.every(2)
@pytest.mark.parametrize(("layout", "expected"), [
    ("contiguous", [("all-gather", 4 * 4)]),
    ("zigzag", [("all-gather", 4 * 4 * 2)]),
    ("zigzag_per_segment", [("all-gather", 4 * 2 * 2 * S), ("all-reduce", S)]),
    ("striped", [("all-gather", 4 * 4)] + [("all-to-all", T // 4)] * 4),
])  # fmt: skip
def test_what_a_scan_moves(layout, expected):
    """For one row, from each of 4 shards: a pair a piece and the ids at its ends; pairs only for
    each segment.
    """
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    x = jnp.ones((2, T))
    ids = jnp.ones((2, T), jnp.int32)

    def scan(a, b, ids):
        return scan_affine(a, b, parallel, True, ids, S)

    def scan_whole_rows(a, b):
        return scan_affine(a, b, parallel)

    assert collectives(parallel, scan, x, x, ids) == sorted(expected)
    if layout in ("contiguous", "zigzag"):
        pairs = [("all-gather", 4 * 2 * (2 if layout == "zigzag" else 1))]
        assert collectives(parallel, scan_whole_rows, x, x) == pairs


OF_TWO_AXES = [
    (context, layout) for context in (("fast", "slow"), ("slow", "fast")) for layout in LAYOUTS
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("context", "layout"), OF_TWO_AXES)
def test_context_over_two_axes_explicit_and_inside_shard_map(context, layout):
    """A context axis made of two mesh axes in either order, Explicit ones, and ShardAxes inside a
    shard_map.

    JAX's permutations count devices in the order of the mesh: in the other order a shift brought
    other tokens' values.
    """
    mesh = jax.make_mesh((2, 2, 2), ("rows", "slow", "fast"))
    ids = logical_segments(4)
    x = np.random.default_rng(6).normal(size=(R, T)).astype(np.float32)
    parallel = ParallelMesh(mesh, data="rows", context=context, tensor=None, context_layout=layout)
    targets = {"zigzag_per_segment": "zigzag", "striped": "zigzag_per_segment"}
    target = targets.get(layout, "contiguous" if layout == "zigzag" else "zigzag")

    def everything(parallel, x, ids):
        return (
            scan_affine(0.9, x, parallel, True, ids, S),
            shift_left(x, parallel, 2, 0, ids, S),
            redistribute(x, parallel, layout, target, ids, S),
        )

    there = physical(x, layout, 4), physical(ids, layout, 4)
    got = jax.jit(functools.partial(everything, parallel))(*there)
    axes = ShardAxes(data="rows", context=context, context_layout=layout)
    spec = parallel.tokens_spec
    per_shard = functools.partial(everything, axes)
    inside = jax.shard_map(per_shard, mesh=mesh, in_specs=spec, out_specs=spec)
    placed = [jax.device_put(y, parallel.sharding(spec)) for y in there]
    chex.assert_trees_all_equal(got, jax.jit(inside)(*placed))
    np.testing.assert_array_equal(got[1], physical(serial_shift(x, ids, 2, 0), layout, 4))
    np.testing.assert_array_equal(got[2], physical(x, target, 4))
    expected = serial_scan(np.full((R, T), 0.9), x, ids, True)
    np.testing.assert_allclose(got[0], physical(expected, layout, 4), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("context", [("c", "a", "b"), ("b", "c", "a")])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_context_over_three_axes(context, layout):
    """Orders that are not their own inverse."""
    mesh = jax.make_mesh((2, 1, 4), ("a", "b", "c"))
    parallel = ParallelMesh(mesh, data=None, context=context, tensor=None, context_layout=layout)
    ids = logical_segments(8)
    x = np.random.default_rng(7).normal(size=(R, T)).astype(np.float32)
    there = physical(x, layout, 8), physical(ids, layout, 8)

    @jax.jit
    def shift(x, ids):
        return shift_left(x, parallel, 5, 0, ids, S)

    got = shift(*there)
    np.testing.assert_array_equal(got, physical(serial_shift(x, ids, 5, 0), layout, 8))
