"""A NaN or an infinity in one packed sequence reaches the results of that sequence that depend
on it, and no others.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import sampled

from jaxppo import RolloutBatch, advantages
from sharding import (
    Segments,
    logical_positions,
    make_parallel_mesh,
    scan_affine,
    segment_multiple,
    segment_sum,
    shard_call,
    shift_left,
)

LAYOUTS = ["contiguous", "zigzag", "zigzag_per_segment", "striped"]
R, T, S = 2, 64, 3
LENGTHS = np.array([[16, 13, 5], [1, 40, 0]])  # one ends where a shard does, 40 spans several
CASES = [
    (shards, layout)
    for shards in (1, 2, 4, 8)
    for layout in LAYOUTS
    if shards > 1 or layout == "contiguous"
]
EVERYWHERE = pytest.mark.parametrize(("shards", "layout"), CASES)
SOME = {(1, "contiguous"), (2, "striped"), (4, "zigzag"), (8, "zigzag_per_segment")}
SAMPLED = pytest.mark.parametrize(
    ("shards", "layout"), sampled(CASES, lambda _, case: case in SOME)
)


def assert_same_at(places, got, expected):
    chex.assert_trees_all_equal(
        *(jax.tree.map(lambda x: np.asarray(x)[places], tree) for tree in (got, expected))
    )


def on(shards, layout):
    """The mesh, segment ids in logical order with the padding that the layout needs, and logical
    -> physical.
    """
    parallel = make_parallel_mesh(
        f"cp={shards}", context_layout=layout, devices=jax.devices()[:shards]
    )
    multiple = segment_multiple(layout, shards)
    ids = np.zeros((R, T), np.int32)
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for s, length in enumerate(lengths):
            ids[row, start : start + length] = s + 1
            start += -(-length // multiple) * multiple
    order = np.broadcast_to(logical_positions(layout, T, shards, LENGTHS), (R, T))
    return parallel, ids, lambda x: np.take_along_axis(np.asarray(x), order, axis=1)


def poisons(ids):
    """(row, first, last, place) for the first, a middle and the last place of every sequence."""
    for row in range(R):
        for s in range(1, S + 1):
            where = np.flatnonzero(ids[row] == s)
            for place in (
                sorted({where[0], where[where.size // 2], where[-1]}) if where.size else ()
            ):
                yield row, where[0], where[-1], place


def spoiled(x, row, place, value):
    x = np.array(x)
    x[row, place] = value
    return x


def assert_spoiled_only(got, clean, row, dependent, value, context):
    """Raises unless all of `dependent` (a slice or places of the row) is NaN, and all else has
    the clean run's bits.
    """
    mask = np.zeros((R, T), bool)
    mask[row, dependent] = True
    np.testing.assert_array_equal(got[~mask], clean[~mask], err_msg=f"{context}")
    if np.isnan(value):
        assert np.isnan(got[mask]).all(), context


@pytest.mark.every(9)
@pytest.mark.parametrize(
    ("shards", "layout", "reverse"),
    sampled(
        [(*case, back) for case in CASES for back in (True, False)], lambda i, _: (i // 2 + i) % 2
    ),
)
def test_scan_affine(shards, layout, reverse):
    """Values and gradients depend on a and b as the recurrence says, and on nothing else.

    y_t depends on b from t on and on a from t to the last place but one, the gradient for b_t on a
    before t, and that for a_t on both, through y_(t+1) and the gradient for b_t.
    """
    parallel, ids, physical = on(shards, layout)
    rng = np.random.default_rng(0)
    a, b, weights = rng.normal(size=(3, R, T)).astype(np.float32)
    a[rng.random((R, T)) < 0.2] = 0

    @jax.jit
    def run(a, b):
        def loss(a, b):
            y = scan_affine(a, b, parallel, reverse, physical(ids), S)
            return jnp.vdot(y, physical(weights)), y

        (of_a, of_b), y = jax.grad(loss, argnums=(0, 1), has_aux=True)(a, b)
        return y, of_a, of_b

    def logical(a, b):
        return [np.asarray(x)[inverse] for x in run(physical(a), physical(b))]

    places = physical(np.broadcast_to(np.arange(T), (R, T)))
    inverse = np.arange(R)[:, None], np.argsort(places, axis=1)
    clean = logical(a, b)
    assert all(np.isfinite(x).all() for x in clean)
    for value in (np.nan, np.inf):
        for row, first, last, p in poisons(ids):
            # how far from the end that the recurrence starts at; `span` turns such distances into
            # places
            end, sign = (last, -1) if reverse else (first, 1)
            at = abs(end - p)
            far = last - first

            def span(start, stop, end=end, sign=sign):
                return end + sign * np.arange(start, stop)

            of_b = span(at, far + 1), span(at + 1, far + 1), span(0, 0)
            of_a = span(at, far + 1), np.setdiff1d(span(1, far + 1), p), span(0, at)
            none = (span(0, 0),) * 3  # a at the end
            for name, inputs, dependents in (
                ("b", (a, spoiled(b, row, p, value)), of_b),
                ("a", (spoiled(a, row, p, value), b), of_a if at else none),
            ):
                results = zip(("y", "da", "db"), logical(*inputs), clean, dependents, strict=True)
                for what, got, before, dependent in results:
                    context = f"{what} where {name}[{row}, {p}] is {value}"
                    assert_spoiled_only(got, before, row, dependent, value, context)


@pytest.mark.every(5)
@EVERYWHERE
def test_an_infinite_addend_is_not_made_nan(shards, layout):
    """With positive coefficients all that depends on it is infinite, across shards too."""
    parallel, ids, physical = on(shards, layout)
    a, b = np.random.default_rng(8).uniform(0.5, 1, size=(2, R, T)).astype(np.float32)
    scan = jax.jit(lambda b: scan_affine(physical(a), b, parallel, True, physical(ids), S))
    for row, first, _, p in poisons(ids):
        depends = np.zeros((R, T), bool)
        depends[row, first : p + 1] = True
        got = scan(physical(spoiled(b, row, p, np.inf)))
        np.testing.assert_array_equal(np.isposinf(got), physical(depends))
        assert not np.isnan(got).any()


@pytest.mark.every(7)
@SAMPLED
def test_spoiled_tangents_and_cotangents_stay_in_their_sequence(shards, layout):
    parallel, ids, physical = on(shards, layout)
    a, b, *weights = np.random.default_rng(1).normal(size=(4, R, T)).astype(np.float32)

    @jax.jit
    def derivatives(b, *weights):
        def scan(a, b):
            return scan_affine(a, b, parallel, True, physical(ids), S)

        def shift(b):
            return shift_left(b, parallel, 3, 0, physical(ids), S)

        pulled = [*jax.vjp(scan, physical(a), b)[1](weights[0]), *jax.vjp(shift, b)[1](weights[0])]
        return (
            *pulled,
            jax.jvp(scan, (physical(a), b), weights)[1],
            jax.jvp(shift, (b,), weights[:1])[1],
        )

    clean = derivatives(*map(physical, (b, *weights)))
    for row, first, _, p in poisons(ids):
        others = physical((ids != ids[row, first]) | (np.arange(R)[:, None] != row))
        for i in range(3):
            inputs = [
                spoiled(x, row, p, np.nan) if i == j else x for j, x in enumerate((b, *weights))
            ]
            assert_same_at(others, derivatives(*map(physical, inputs)), clean)


@pytest.mark.every(7)
@SAMPLED
def test_padding_and_what_is_behind_the_end_may_hold_anything(shards, layout):
    """Padding in a and b, and a at the end of each sequence, where y is b alone."""
    parallel, ids, physical = on(shards, layout)
    a, b = np.random.default_rng(2).normal(size=(2, R, T)).astype(np.float32)
    is_end = (ids != np.roll(ids, -1, axis=1)) | (np.arange(T) == T - 1)

    @jax.jit
    def run(a, b):
        def scan(a, b):
            return scan_affine(a, b, parallel, True, physical(ids), S)

        return scan(a, b), jax.grad(lambda a, b: (scan(a, b) ** 2).sum(), argnums=(0, 1))(a, b)

    clean = run(physical(a), physical(b))
    for value in (np.nan, np.inf):
        dirty = np.where(is_end | (ids == 0), value, a), np.where(ids == 0, value, b)
        jax.tree.map(np.testing.assert_array_equal, run(*map(physical, dirty)), clean)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("reverse", [True, False])
def test_rows_without_segments(layout, reverse):
    """A row is one sequence then, and ends where it ends."""
    parallel, _, physical = on(4, layout)
    a, b = np.random.default_rng(3).normal(size=(2, R, T)).astype(np.float32)
    scan = jax.jit(lambda a, b: scan_affine(a, b, parallel, reverse))
    clean = scan(physical(a), physical(b))
    end = T - 1 if reverse else 0
    np.testing.assert_array_equal(scan(physical(spoiled(a, 0, end, np.nan)), physical(b)), clean)
    got = scan(physical(a), physical(spoiled(b, 0, T // 2, np.nan)))
    spoils = np.zeros((R, T), bool)
    spoils[0, : T // 2 + 1] = reverse
    spoils[0, T // 2 :] |= not reverse
    np.testing.assert_array_equal(np.isnan(got), physical(spoils))
    np.testing.assert_array_equal(got[1], clean[1])


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_ids_that_come_again_are_other_sequences(layout):
    """Each change of the id starts a new sequence, at the borders of shards too; padding links
    no sequences.
    """
    parallel, _, physical = on(4, layout)
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(2, R, T)).astype(np.float32)
    scan = jax.jit(lambda ids: scan_affine(physical(a), physical(b), parallel, True, ids, S))
    for _ in range(10):
        ids = np.repeat(rng.integers(0, 3, size=(R, T)), rng.integers(1, 30, size=T), axis=1)[:, :T]
        y = np.zeros((R, T + 1))
        for t in range(T)[::-1]:
            linked = ids[:, t] == (ids[:, t + 1] if t + 1 < T else -1)
            y[:, t] = np.where(
                ids[:, t] > 0, b[:, t] + np.where(linked, a[:, t] * y[:, t + 1], 0), 0
            )
        np.testing.assert_allclose(scan(physical(ids)), physical(y[:, :T]), rtol=1e-4, atol=1e-5)


@pytest.mark.every(5)
@EVERYWHERE
def test_shift_left(shards, layout):
    parallel, ids, physical = on(shards, layout)
    x = np.random.default_rng(5).normal(size=(R, T)).astype(np.float32)

    @jax.jit
    def run(x):
        def shift(x):
            return shift_left(x, parallel, 3, 0, physical(ids), S)

        return shift(x), jax.grad(lambda x: (shift(x) ** 2).sum())(x)

    clean = run(physical(x))
    for row, first, _, p in poisons(ids):
        others = physical((ids != ids[row, first]) | (np.arange(R)[:, None] != row))
        assert_same_at(others, run(physical(spoiled(x, row, p, np.nan))), clean)


@pytest.mark.parametrize("shards", [1, 4])
def test_segment_reductions(shards):
    """Sums, means and extremes, spread back: each sequence and its gradient by itself, NaN on
    padding left out.
    """
    parallel, ids, _ = on(shards, "contiguous")
    x = np.random.default_rng(6).normal(size=(R, T)).astype(np.float32)
    mask = (ids > 0).astype(np.float32)

    @jax.jit
    def run(x):
        def per_shard(axes, ids, x, mask):
            segments = Segments(ids, S, axes)
            return [
                segments.spread(y)
                for y in (segments.sum(x), segments.mean(x, mask), segments.max(x, mask))
            ]

        def reductions(x):
            args = {"ids": ids, "x": x, "mask": mask}
            specs = parallel.tokens_spec
            return shard_call(
                "segments", per_shard, parallel, args, lambda p: ([specs] * 3, [specs] * 3)
            )

        values = reductions(x)

        def squares(x):
            return sum((y**2 * mask).sum() for y in reductions(x)[:2])

        sums = segment_sum(x, ids, S, parallel)
        return *values, jax.grad(squares)(x), Segments(jnp.asarray(ids), S).spread(sums)

    clean = run(x)
    jax.tree.map(np.testing.assert_array_equal, run(np.where(ids > 0, x, np.nan)), clean)
    for row, first, _, p in poisons(ids):
        others = (ids != ids[row, first]) | (np.arange(R)[:, None] != row)
        assert_same_at(others, run(spoiled(x, row, p, np.nan)), clean)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("shards", "layout"), [(1, "contiguous"), *((4, layout) for layout in LAYOUTS)]
)
def test_returns_and_advantages(shards, layout):
    """One NaN reward or value costs its own sequence alone, whatever it shares a row with."""
    parallel, ids, physical = on(shards, layout)
    rewards, values = np.random.default_rng(7).normal(size=(2, R, T)).astype(np.float32)
    mask = ((ids > 0) & (np.arange(T) % 5 > 0)).astype(np.float32)
    there = physical(ids)
    numbers = np.arange(R * S).reshape(R, S)
    packed = {"context_layout": layout, "context_shards": shards}
    batch = RolloutBatch(*[there] * 4, loss_mask=physical(mask), sample_ids=numbers, **packed)

    @jax.jit
    def run(rewards, values, batch):
        options = {"gamma": 0.9, "parallel": parallel}
        advantage, returns = advantages.gae(rewards, values, batch, lam=0.8, **options)
        return advantage, returns, advantages.discounted_returns(rewards, batch, **options)

    clean = run(physical(rewards), physical(values), batch)
    for row, first, _, p in poisons(ids):
        others = physical((ids != ids[row, first]) | (np.arange(R)[:, None] != row))
        for value in (np.nan, np.inf):
            for inputs in (
                (spoiled(rewards, row, p, value), values),
                (rewards, spoiled(values, row, p, value)),
            ):
                assert_same_at(others, run(*map(physical, inputs), batch), clean)
