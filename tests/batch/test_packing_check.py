"""Models with one fault each, which are found and named, and what such a fault does to a
gradient.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import (
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    assert_packing_invariant,
    finalize_metrics,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from jaxppo.sharding import make_parallel_mesh

V, H, MOST = 40, 16, 512


@functools.cache
def parameters():
    keys = jax.random.split(jax.random.key(0), 6)
    shapes = {
        "tokens": (V, H),
        "places": (MOST, H),
        "q": (H, H),
        "k": (H, H),
        "v": (H, H),
        "head": (H, V),
    }
    scales = {"tokens": 1.0, "places": 0.5}
    return {
        name: scales.get(name, H**-0.5) * jax.random.normal(key, shape)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def attention(params, tokens, positions, seen):
    """Final hidden states of one layer."""
    x = params["tokens"][tokens] + params["places"][positions]
    scores = jnp.einsum("rqh,rkh->rqk", x @ params["q"], x @ params["k"]) / H**0.5
    y = x + jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1) @ (x @ params["v"])
    return y / jnp.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)


def right(params, batch):
    """The mask that the pages show."""
    same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
    seen = same & (batch.positions[:, :, None] >= batch.positions[:, None, :])
    return attention(params, batch.tokens, batch.positions, seen)


def along_paths(params, batch):
    return attention(params, batch.tokens, batch.positions, batch.paths.attends(batch.paths))


def blind(params, batch):
    """A plain causal mask, with positions 0 to T - 1."""
    places = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1])[None], batch.tokens.shape)
    return attention(params, batch.tokens, places, places[:, :, None] >= places[:, None, :])


def places_of_the_row(params, batch):
    """The logical place in a contiguous row, where the sequence's own is wanted."""
    seen = batch.paths.attends(batch.paths)
    start = jnp.where(batch.positions == 0, jnp.arange(batch.tokens.shape[1])[None], 0)
    first = jnp.where(seen, start[:, None, :], 0).max(-1)
    places = batch.positions + first if batch.context_layout == "contiguous" else batch.positions
    return attention(params, batch.tokens, places, seen)


def stretched_to_the_row(params, batch):
    """As rotary positions that are scaled by the length of the row."""
    seen = batch.paths.attends(batch.paths)
    return attention(params, batch.tokens, batch.positions * batch.tokens.shape[1] // 16, seen)


def in_physical_order(params, batch):
    """Causality from the order in memory, which a context layout changes."""
    same = batch.segment_ids[:, :, None] == batch.segment_ids[:, None, :]
    return attention(
        params, batch.tokens, batch.positions, same & jnp.tril(jnp.ones((1, *same.shape[1:]), bool))
    )


def sees_padding(params, batch):
    seen = batch.paths.attends(batch.paths) | (batch.segment_ids == 0)[:, None, :]
    return attention(params, batch.tokens, batch.positions, seen)


def of_all_rows(params, batch):
    """A statistic of the whole batch, as of a norm over rows or of experts with a capacity."""
    own = right(params, batch)
    real = (batch.segment_ids > 0)[..., None]
    return own * (1 + jnp.where(real, own, 0).sum() / jnp.where(real, 1.0, 0.0).sum())


def of_the_next_row(params, batch):
    """What leaks between rows alone, as from a batch that was reshaped in another order."""
    own = right(params, batch)
    real = (batch.segment_ids > 0)[..., None]
    means = jnp.where(real, own, 0).sum(1, keepdims=True) / real.astype(own.dtype).sum(
        1, keepdims=True
    )
    return own + jnp.roll(means, -1, axis=0)


LAYOUTS = ("zigzag", "zigzag_per_segment", "striped")
OF_LAYOUTS = {f"the context layout '{layout}'" for layout in LAYOUTS}
FAULTS = {
    blind: {"what is packed beside it", "its place in the row", "padding", *OF_LAYOUTS},
    places_of_the_row: {"its place in the row", *OF_LAYOUTS},
    stretched_to_the_row: {"the row length"},
    in_physical_order: OF_LAYOUTS,
    of_all_rows: {"what is packed beside it"},
    of_the_next_row: {"what is packed beside it"},
}


@functools.cache
def compiled(fn, dtype=jnp.float32):
    def run(params, batch):
        return fn(params, batch).astype(dtype)

    return jax.jit(run)


@pytest.mark.parametrize("fn", [right, along_paths], ids=lambda fn: fn.__name__)
@pytest.mark.parametrize("mesh", [None, "dp=2,cp=4", "dp=1,cp=2", "dp=8"])
@pytest.mark.parametrize("layout", ["zigzag", "zigzag_per_segment", "striped", "contiguous"])
def test_a_model_that_follows_segments_passes(fn, mesh, layout):
    count = int(np.prod([int(n) for n in re.findall(r"\d+", mesh or "1")]))
    parallel = mesh and make_parallel_mesh(
        mesh, context_layout=layout, devices=jax.devices()[:count]
    )
    options = {"vocab_size": V, "parallel": parallel}
    found = assert_packing_invariant(compiled(fn), parameters(), **options)
    assert max(found.values()) < 1e-5
    assert_packing_invariant(compiled(fn, jnp.bfloat16), parameters(), **options)


def named(message):
    listed = message.partition("depend on ")[2].partition(", expected")[0]
    return {re.sub(r" \([\d.e-]+ of the largest\)", "", part) for part in listed.split(", ")}


@pytest.mark.parametrize("fn", FAULTS, ids=lambda fn: fn.__name__)
def test_each_fault_is_named(fn):
    with pytest.raises(AssertionError, match="hidden_fn: got hidden states") as found:
        assert_packing_invariant(jax.jit(fn), parameters(), vocab_size=V)
    assert named(str(found.value)) == FAULTS[fn]


def test_a_model_that_sees_padding():
    """More or less padding is a row of another length too, and lies elsewhere for each place in
    the row.
    """
    with pytest.raises(AssertionError, match="hidden_fn: got hidden states") as found:
        assert_packing_invariant(jax.jit(sees_padding), parameters(), vocab_size=V)
    assert {"padding", "the row length"} <= named(str(found.value))


@pytest.mark.parametrize("layout", ["zigzag", "zigzag_per_segment", "striped"])
def test_order_in_memory_on_a_mesh(layout):
    """A mesh has one layout; there the place in the row decides which tokens lie before which."""
    parallel = make_parallel_mesh("dp=2,cp=4", context_layout=layout)
    with pytest.raises(AssertionError, match=r"its place in the row|what is packed beside it"):
        assert_packing_invariant(jax.jit(blind), parameters(), vocab_size=V, parallel=parallel)


def test_what_is_no_hidden_state_is_refused():
    with pytest.raises(
        ValueError, match=r"hidden_fn: got shape \(2, 16\), expected \(2, 16\) and the hidden size"
    ):
        assert_packing_invariant(lambda params, batch: batch.tokens, None, vocab_size=V)
    with pytest.raises(ValueError, match="hidden_fn: got hidden states that are not finite"):
        assert_packing_invariant(
            lambda params, batch: right(params, batch) * jnp.nan, parameters(), vocab_size=V
        )
    with pytest.raises(TypeError, match="parallel: got str"):
        assert_packing_invariant(right, parameters(), vocab_size=V, parallel="dp=8")


SAMPLES = 8


def samples():
    rng = np.random.default_rng(3)
    found = []
    for i in range(SAMPLES):
        prompt = int(rng.integers(2, 5))
        n = int(rng.integers(4, 9))
        tokens = rng.integers(0, V, prompt + n)
        value = rng.normal()
        values = {"advantages": [value] * n, "old_log_probs": -np.ones(n)}
        found.append(Sample(tokens, response_start=prompt, sample_id=i, **values))
    return found


def gradient_by_hand(params):
    """Each sample alone, from its logits: the gradient of -mean(A * log p) over response tokens,
    where ratios are 1.
    """

    def loss(params):
        total = count = 0
        for s in samples():
            places = jnp.arange(len(s.tokens))[None]
            seen = places[:, :, None] >= places[:, None, :]
            hidden = attention(params, jnp.asarray(s.tokens)[None], places, seen)[0]
            log_p = jax.nn.log_softmax(hidden @ params["head"])
            chosen = log_p[places[0, s.start - 1 : -1], jnp.asarray(s.tokens[s.start :])]
            total = total - s.advantages[0] * chosen.sum()
            count = count + chosen.size
        return total / count

    return jax.grad(loss)(params)


def step(fn, params):
    """The loss's gradient and metrics on fresh samples, whose old log-probs the same model
    gives.
    """
    batch = RolloutBatch.from_samples(samples(), row_length=32, rows=4)
    old = log_probs_from_hidden(fn(params, batch), params["head"], batch.targets).log_probs

    def loss(params, batch):
        return policy_loss_from_hidden(fn(params, batch), params["head"], batch, PolicyLossConfig())

    fresh = dataclasses.replace(batch, old_log_probs=old)
    gradient, metrics = jax.jit(jax.grad(loss, has_aux=True))(params, fresh)
    return gradient, finalize_metrics(metrics)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fn", "off"), [(right, (0, 1e-5)), (blind, (0.7, 0.8))], ids=["right", "blind"]
)
def test_a_blind_model_has_the_metrics_of_a_right_one(fn, off):
    """Its gradient is off by 77%; ppo_kl is 0, ratio_mean is 1 and no rule is broken, as of a
    right one.
    """
    params = parameters()
    expected = gradient_by_hand(params)
    found, metrics = step(fn, params)
    errors, sizes = (
        sum(float((x * x).sum()) for x in jax.tree.leaves(tree)) ** 0.5
        for tree in (jax.tree.map(lambda a, b: a - b, found, expected), expected)
    )
    assert off[0] <= errors / sizes <= off[1], errors / sizes
    assert abs(metrics["ppo_kl"]) < 1e-5
    assert abs(metrics["ratio_mean"] - 1) < 1e-5
    assert metrics["broken_rules"] == 0
