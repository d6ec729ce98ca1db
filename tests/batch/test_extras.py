"""Arrays of one's own in a batch: each value lies where the named arrays say that its token is."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import (
    SFT,
    Normalizer,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    TokenStats,
    advantages,
    policy_loss,
)
from jaxppo.batch.extras import Extra
from jaxppo.losses.mtp import shift_targets
from sharding import make_parallel_mesh

LAYOUTS = ["contiguous", "zigzag", "zigzag_per_segment", "striped"]
T = 16


def samples(count=6):
    """`returns` are never 0, so that they tell where the value of a token lies; `tokens` are
    never 0 either.
    """
    found = []
    rng = np.random.default_rng(0)
    for i in range(count):
        prompt = [3, 4, 5, 6][: 2 + i % 3]
        response = int(rng.integers(1, 6))
        tokens = np.array([*prompt, *rng.integers(10, 90, response)])
        returns = rng.uniform(1, 2, response).astype(np.float32)
        extras = {
            "pair": Extra(np.stack([returns, 10 * returns], -1), fill=-7),
            "mark": returns > 1.5,
            "router": Extra(np.stack([tokens, tokens + 1], -1), at="input", fill=-1),
        }
        found.append(
            Sample(tokens, len(prompt), returns=returns, reward=1.0, group_id=i % 3, extras=extras)
        )
    return found


def check(batch, fill=-7, pads=True):
    named = np.asarray(batch.returns)
    pair, mark, router = (np.asarray(batch.extras[name]) for name in ("pair", "mark", "router"))
    expected = np.where(named[..., None] != 0, np.stack([named, 10 * named], -1), fill)
    np.testing.assert_allclose(pair, expected, rtol=1e-6)
    np.testing.assert_array_equal(mark, named > 1.5)
    tokens = np.asarray(batch.tokens)[..., None] + np.arange(2)
    real = np.asarray(batch.segment_ids)[..., None] > 0
    np.testing.assert_array_equal(np.where(real, router, 0), np.where(real, tokens, 0))
    assert not pads or (router[np.broadcast_to(~real, router.shape)] == -1).all()
    assert (pair.dtype, router.dtype) == (np.float32, np.int32)


@pytest.mark.parametrize(
    "packing", [{}, {"micro_batches": 3}, {"share_prefixes": True}, {"max_tokens": 2 * T}]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_samples(layout, packing):
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout=layout)
    batch = RolloutBatch.from_samples(samples(), row_length=T, parallel=parallel, **packing)
    check(batch)
    if packing.get("share_prefixes"):
        # prefixes are shared
        assert (np.asarray(batch.sample_ids)[np.asarray(batch.parents) == 0] == -1).any()
    placed = batch.put(parallel)
    check(placed)
    lies = placed.loss_mask.sharding.spec
    assert all(placed.extras[name].sharding.spec == lies for name in batch.extras)
    batch.validate(100)


@pytest.mark.parametrize("packing", [{}, {"micro_batches": 3}, {"share_prefixes": True}])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_that_come_later(layout, packing):
    """`place` brings a sample's arrays to where the constructor would have put them."""
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout=layout)
    given = [dataclasses.replace(s, sample_id=7 * i) for i, s in enumerate(samples())]
    batch = RolloutBatch.from_samples(given, row_length=T, parallel=parallel, **packing)
    for name, fill in (("pair", -7), ("mark", 0), ("router", -1)):
        values = {s.sample_id: s.extras[name].values for s in given}
        for of in (batch, batch.put(parallel)):
            found = of.place(values, at="input" if name == "router" else "predicting", fill=fill)
            np.testing.assert_array_equal(found, batch.extras[name])
            assert found.dtype == batch.extras[name].dtype


def test_arrays_that_do_not_fit_are_refused():
    batch = RolloutBatch.from_samples(
        [Sample([1, 2, 3], 1, sample_id=4), Sample([1, 2], 1, sample_id=5)], row_length=8
    )
    given = {4: [1.0, 2.0], 5: [3.0]}
    for values, error in (
        ([[1.0], [2.0]], "values: got list, expected arrays by sample id"),
        ({4: [1.0, 2.0]}, r"values: got no array for \[5\]"),
        (given | {6: [1.0]}, r"values: got arrays for \[6\]"),
        (given | {5: [3.0, 4.0]}, r"values\[5\]: got 2, expected 1"),
        (given | {5: 3.0}, r"values\[5\]: got shape"),
        (given | {5: ["a"]}, r"values\[5\]: got <U1, \['a'\], expected numbers"),
        (given | {5: [[3.0]]}, r"values: got \[\(\), \(1,\)\] for each token"),
    ):
        with pytest.raises((TypeError, ValueError), match=error):
            batch.place(values)
    with pytest.raises(ValueError, match=r"values\[4\]: got 2, expected 3"):
        batch.place(given, at="input")
    with pytest.raises(ValueError, match="at: got 'target'"):
        batch.place(given, at="target")
    with pytest.raises(TypeError, match="batch: got traced arrays"):
        jax.jit(lambda b: b.place(given))(batch)
    np.testing.assert_array_equal(batch.place(given | {4: [2.0]})[0, :2], [0, 2])


def rows(batch):
    """The batch as arrays at tokens, the value of token t + 1 moved from t to t + 1."""
    right = np.asarray(batch.segment_ids)[:, 1:] == np.asarray(batch.segment_ids)[:, :-1]

    def at_token(x):
        out = np.full_like(x, 99)
        out[:, 1:] = np.where(right.reshape(*right.shape, *(1,) * (x.ndim - 2)), x[:, :-1], 99)
        return out

    moved = {name: at_token(np.asarray(getattr(batch, name))) for name in ("returns", "loss_mask")}
    moved["loss_mask"] = np.where(moved["loss_mask"] == 99, 0, moved["loss_mask"])
    extras = {name: at_token(x) for name, x in batch.extras.items() if name != "router"}
    return moved, extras | {"router": Extra(batch.extras["router"], at="input")}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_rows_and_packs(layout, jitted):
    parallel = make_parallel_mesh("dp=2,cp=2,tp=2", context_layout=layout)
    plain = RolloutBatch.from_samples(samples(), row_length=T, rows=4)
    moved, extras = rows(plain)
    extras = extras | {"pair": Extra(extras["pair"], fill=-7)}
    arrays = {
        name: np.asarray(getattr(plain, name)) for name in ("tokens", "segment_ids", "positions")
    } | moved
    run = jax.jit if jitted else lambda fn: fn

    def given(values):
        return {name: dataclasses.replace(extras[name], values=x) if name in ("pair", "router") else x
                for name, x in values.items()}  # fmt: skip

    def token_aligned(arrays, values):
        return RolloutBatch.from_token_aligned(
            **arrays, num_segments=plain.num_segments, parallel=parallel, extras=given(values)
        )

    values = {name: x.values if isinstance(x, Extra) else x for name, x in extras.items()}
    check(run(token_aligned)(arrays, values), pads=False)

    def target_aligned(arrays, values):
        return RolloutBatch.from_target_aligned(
            **arrays, num_segments=plain.num_segments, parallel=parallel, extras=values
        )

    names = ("tokens", "targets", "segment_ids", "positions", "returns", "loss_mask")
    as_is = {name: np.asarray(getattr(plain, name)) for name in names}
    check(run(target_aligned)(as_is, plain.extras))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packs(layout, jitted):
    parallel = make_parallel_mesh("dp=1,cp=2", context_layout=layout, devices=jax.devices()[:2])
    found = []
    pads = 3  # padding between sequences
    for s in samples(3):
        n = len(s.tokens)
        at = np.arange(s.start, len(s.tokens))
        wide = {
            "returns": np.zeros(n, np.float32),
            "pair": np.full((n, 2), 99, np.float32),
            "mark": np.zeros(n, bool),
        }
        wide["returns"][at], wide["pair"][at], wide["mark"][at] = (
            s.returns,
            s.extras["pair"].values,
            s.extras["mark"].values,
        )
        wide |= {"tokens": s.tokens, "router": s.extras["router"].values, "loss_mask": s.mask}
        found.append(
            {name: np.pad(x, ((0, pads), *((0, 0),) * (x.ndim - 1))) for name, x in wide.items()}
        )
    pack = {name: np.concatenate([x[name] for x in found]) for name in found[0]}
    # the prompt has values too: those of returns, 0, say nothing about them
    pack["pair"] = np.where(pack["pair"] == 99, -7, pack["pair"])
    lengths = [len(s.tokens) for s in samples(3)]
    ends = np.cumsum([0, *lengths]), np.cumsum([0, *(n + pads for n in lengths)])

    def make(pack):
        extras = {"pair": Extra(pack["pair"], fill=-7), "mark": pack["mark"]}
        extras["router"] = Extra(pack["router"], at="input", fill=-1)
        arrays = {name: pack[name] for name in ("returns",)}
        return RolloutBatch.from_cu_seqlens(
            pack["tokens"], ends[0], pack["loss_mask"], cu_seqlens_padded=ends[1], aligned="token", row_length=48,
            parallel=parallel, extras=extras, **arrays
        )  # fmt: skip

    check((jax.jit(make) if jitted else make)(pack))


def test_padded_rows():
    prompts = np.array([[0, 5, 6], [7, 8, 9]])
    completions = np.array([[11, 12, 0], [21, 0, 0]])
    mask = np.array([[1, 1, 0], [1, 0, 0]])
    returns = np.array([[1.2, 1.7, 0], [1.6, 0, 0]], np.float32)
    whole = np.concatenate([prompts, completions], 1)
    extras = {
        "pair": Extra(
            np.stack([returns, 10 * returns], -1) - 7 * (returns == 0)[..., None], fill=-7
        )
    }
    extras |= {"mark": returns > 1.5, "router": Extra(np.stack([whole, whole + 1], -1), at="input")}
    parallel = make_parallel_mesh("dp=2,cp=2", context_layout="striped", devices=jax.devices()[:4])
    for mesh in (None, parallel):
        wider = np.pad(prompts, ((0, 0), (2, 0)))
        there = np.arange(5)[None] >= np.array([[3], [2]])
        more = {
            **extras,
            "router": Extra(np.pad(extras["router"].values, ((0, 0), (2, 0), (0, 0))), at="input"),
        }
        batch = RolloutBatch.from_padded(
            wider, completions, mask, prompt_mask=there, returns=returns, extras=more, parallel=mesh
        )
        check(batch, pads=False)


def test_functions_of_whole_steps_take_batches_with_extras():
    """Their per-shard functions reshape all arrays of a stacked step, and extras have more
    dimensions.
    """
    batch = RolloutBatch.from_samples(samples(), row_length=T, micro_batches=2)
    bare = dataclasses.replace(batch, extras={})
    for fn in (
        lambda b: Normalizer.of(SFT(aggregation="rollout_mean"), b),
        lambda b: advantages.spread(b.rewards, b),
        lambda b: advantages.discounted_returns(b.returns, b),
        lambda b: advantages.token_rewards(b.rewards, b),
    ):
        jax.tree.map(np.testing.assert_array_equal, fn(batch), fn(bare))
    assert shift_targets(batch, 1).extras.keys() == batch.extras.keys()


def test_values_that_no_loss_reads_may_be_anything():
    batch = RolloutBatch.from_samples(samples(), row_length=T)
    batch = dataclasses.replace(
        batch, advantages=batch.returns, extras={"nan": jnp.full((*batch.tokens.shape, 3), jnp.nan)}
    )
    config = PolicyLossConfig(ratio_to="current")
    loss, _ = policy_loss(TokenStats(jnp.full(batch.tokens.shape, -1.0)), batch, config)
    assert np.isfinite(loss)


BAD = [
    (
        partial(Sample, [1, 2], 1, extras=[1]),
        TypeError,
        "extras: got list, expected arrays by name",
    ),
    (
        partial(Sample, [1, 2], 1, extras={1: [1.0]}),
        TypeError,
        "extras: got the name 1, expected a string",
    ),
    (
        partial(Sample, [1, 2, 3], 1, extras={"a": [1.0]}),
        ValueError,
        r"extras\['a'\]: got shape \(1,\), expected 2 and",
    ),
    (
        partial(Sample, [1, 2], 1, extras={"a": ["x"]}),
        TypeError,
        r"extras\['a'\]: got <U1, \['x'\], expected numbers",
    ),
    (
        partial(Sample, [1, 2, 3], 1, extras={"a": [[1], [1, 2]]}),
        ValueError,
        r"extras\['a'\]: got .*, of one shape",
    ),
    (
        partial(Extra, [1], at="token"),
        ValueError,
        "at: got 'token', expected one of 'predicting', 'input'",
    ),
    (partial(Extra, [1], fill=None), ValueError, "fill: got None, expected a finite number"),
    (partial(Extra, [1], fill=float("nan")), ValueError, "fill: got nan, expected a finite number"),
    (
        partial(
            RolloutBatch.from_samples,
            [Sample([1, 2], 1, extras={"a": [1]}), Sample([1, 2], 1)],
            row_length=4,
        ),
        ValueError,
        "extras: got no 'a' in sample 1, expected one in all samples or in none",
    ),
    (
        partial(
            RolloutBatch.from_samples,
            [Sample([1, 2], 1, extras={"a": [1]}), Sample([1, 2], 1, extras={"a": [[1]]})],
            row_length=4,
        ),
        ValueError,
        (
            r"extras\['a'\]: got \('predicting', 0, \(1,\)\) in sample 1, expected the \(at, fill,"
            r" shape of a value\) of"
        ),
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_input(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_bad_arrays_of_a_batch():
    batch = RolloutBatch.from_samples(samples(), row_length=T)
    stats = TokenStats(jnp.full(batch.tokens.shape, -1.0))
    for extras, error, message in [
        (
            {"a": jnp.ones(3)},
            ValueError,
            r"batch.extras\['a'\]: got shape \(3,\), expected \(\d+, 16\) and more",
        ),
        ({"a": [1.0]}, TypeError, r"batch.extras\['a'\]: got list, expected an array of numbers"),
        ([1], TypeError, "extras: got list, expected arrays by name"),
    ]:
        with pytest.raises(error, match=message):
            policy_loss(stats, dataclasses.replace(batch, extras=extras), PolicyLossConfig())
    ids = np.ones((4, 4), int)
    with pytest.raises(
        ValueError, match=r"extras\.a: got shape \(3,\), expected \(4, 4\) and more"
    ):
        RolloutBatch.from_token_aligned(ids, ids, ids, ids, extras={"a": np.ones(3)})
