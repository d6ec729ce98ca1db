"""deterministic=True: a token's log-prob and entropy have the same bits whatever else is in the
batch.
"""

import dataclasses
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxppo import (
    PPO,
    Head,
    LoRA,
    PolicyLossConfig,
    RolloutBatch,
    finalize_metrics,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from jaxppo.head import Quantization
from sharding import make_parallel_mesh

H, V = 48, 1500
DTYPES = ["float32", "bfloat16"]


def arrays(dtype, tokens, seed=0):
    """Hidden states, a kernel and targets, of numpy: its indexing compiles nothing."""
    rng = np.random.default_rng(seed)
    hidden = rng.normal(size=(tokens, H)).astype(jnp.dtype(dtype))
    kernel = (rng.normal(size=(H, V)) / H**0.5).astype(jnp.dtype(dtype))
    return hidden, kernel, rng.integers(0, V, tokens, dtype=np.int32)


@partial(jax.jit, static_argnums=4)
def run(hidden, kernel, targets, where, parallel):
    options = {"temperature": 0.7, "entropy": "metric", "where": where, "parallel": parallel}
    return log_probs_from_hidden(
        hidden, Head(kernel, softcap=5.0), targets, deterministic=True, **options
    )


def stats(hidden, kernel, targets, where=None, parallel=None):
    """Log-probs and entropy of tokens `[R, T]`."""
    found = run(hidden, kernel, targets, where, parallel)
    return np.asarray(found.log_probs), np.asarray(found.entropy)


@pytest.fixture(scope="module", params=DTYPES)
def alone(request):
    """600 tokens in one row, and their statistics."""
    hidden, kernel, targets = arrays(request.param, 600)
    return hidden, kernel, targets, [x[0] for x in stats(hidden[None], kernel, targets[None])]


@settings(max_examples=8)
@given(data=st.data())
def check_any_batch(alone, data):
    hidden, kernel, targets, expected = alone
    shape = data.draw(st.sampled_from([(1, 24), (3, 8), (2, 300), (4, 200), (1, 257)]))
    count = shape[0] * shape[1]
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    chosen = rng.integers(0, 600, count)
    where = (
        rng.random(shape) < data.draw(st.sampled_from([0.1, 0.5, 1.0]))
        if data.draw(st.booleans())
        else None
    )
    got = stats(hidden[chosen].reshape(*shape, H), kernel, targets[chosen].reshape(shape), where)
    kept = np.ones(count, bool) if where is None else where.reshape(-1)
    for found, truth in zip(got, expected, strict=True):
        np.testing.assert_array_equal(found.reshape(-1)[kept], truth[chosen][kept])


@pytest.mark.every(2)
def test_in_any_batch(alone):
    """Any tokens in any places beside any others, few or many, with any mask."""
    check_any_batch(alone)


@pytest.mark.parametrize("mesh", ["dp=8", "cp=8", "dp=2,cp=4", "fsdp=4,cp=2"])
def test_on_any_mesh_of_the_same_tensor_axis(alone, mesh):
    """The kernel is whole on each device: data and context axes change no bit."""
    hidden, kernel, targets, expected = alone
    parallel = make_parallel_mesh(mesh)
    order = np.random.default_rng(1).permutation(600)[:512]
    got = stats(
        hidden[order].reshape(8, 64, H), kernel, targets[order].reshape(8, 64), None, parallel
    )
    for found, truth in zip(got, expected, strict=True):
        np.testing.assert_array_equal(found.reshape(-1), truth[order])


@pytest.mark.parametrize("parallel", [None, "dp=2,cp=2,tp=2"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoding_step_is_one_of_packed_rows(dtype, parallel):
    """A head at `[B, 1, H]`, in a step of a scan as a sampler has it or by itself, and on packed
    rows with a mask.
    """
    hidden, kernel, targets = arrays(dtype, 480)
    parallel = parallel and make_parallel_mesh(parallel)
    by_row = parallel and dataclasses.replace(parallel, data=("dp", "cp"), context=None)
    where = np.random.default_rng(2).random((4, 120)) < 0.7
    packed = stats(hidden.reshape(4, 120, H), kernel, targets.reshape(4, 120), where, parallel)
    by_step = hidden.reshape(40, 12, H).swapaxes(0, 1), targets.reshape(40, 12).T

    @jax.jit
    def decode(kernel, hidden, targets):
        def step(carry, x):
            # stands for the model: hidden states are results in the program, not arguments
            found = run(
                jnp.roll(x[0], 1, axis=0)[:, None] * carry,
                kernel,
                jnp.roll(x[1], 1)[:, None],
                None,
                by_row,
            )
            return carry, (found.log_probs[:, 0], found.entropy[:, 0])

        return jax.lax.scan(step, jnp.ones((), dtype), (hidden, targets))[1]

    decoded = decode(kernel, *by_step)
    alone = stats(hidden[:40][:, None], kernel, targets[:40][:, None], None, by_row)
    for whole, step, one in zip(packed, decoded, alone, strict=True):
        found = np.roll(np.asarray(step), -1, axis=1).T.reshape(4, 120)
        np.testing.assert_array_equal(found[where], whole[where])
        first = where.reshape(-1)[:40]
        np.testing.assert_array_equal(one[first, 0], whole.reshape(-1)[:40][first])


# A head with each of its fields

OF_HEADS = {
    "kernel": {},
    "bias": {"bias": True},
    "lora": {"lora": 8},
    "lora of rank 1": {"lora": 1},
    "layout": {"layout": "vh"},
    "logits_dtype": {"logits_dtype": "bfloat16"},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.3},
    "vocab_size": {"vocab_size": 1411},
    "spec": {"spec": ("fsdp", "tp")},
    "quantized": {"quantized": Quantization("int8", block=16)},
    "all": {
        "bias": True,
        "lora": 3,
        "layout": "vh",
        "logits_dtype": "bfloat16",
        "softcap": 9.0,
        "scale": 1.5,
    }
    | {"vocab_size": 1411, "spec": ("tp", "fsdp")},
}


def test_every_field_of_a_head_has_a_case():
    assert {f.name for f in dataclasses.fields(Head)} <= set(OF_HEADS)


def head_with(kernel, bias=False, lora=None, layout="hv", **fields):
    rng = np.random.default_rng(7)

    def normal(*shape):
        return rng.normal(size=shape).astype(kernel.dtype)

    fields["bias"] = normal(V) if bias else None
    fields["lora"] = LoRA(normal(H, lora), normal(lora, V), scale=0.5) if lora else None
    return Head(kernel if layout == "hv" else kernel.T, layout=layout, **fields)


TODAY = [
    ("lora", "bfloat16", None),
    ("lora", "float32", "sequence"),
    ("spec", "float32", "fsdp=2,tp=4"),
]
TODAY += [(name, "float32", None) for name in OF_HEADS if name != "spec"]


@pytest.mark.every(14)
@pytest.mark.parametrize(
    ("name", "dtype", "parallel"),
    [
        case if case in TODAY else pytest.param(*case, marks=pytest.mark.nightly)
        for case in itertools.product(OF_HEADS, DTYPES, (None, "fsdp=2,tp=4", "sequence"))
    ],
)
def test_heads_with_every_field(name, dtype, parallel):
    """When the LoRA's product was one over all tokens, bits changed in batches of one token or
    seven.
    """
    fields = dict(OF_HEADS[name])
    spec = fields.pop("spec", None)
    if parallel == "fsdp=2,tp=4":
        parallel = make_parallel_mesh(parallel)
        fields |= {"spec": P(*spec)} if spec else {}
    elif parallel is not None:
        parallel = make_parallel_mesh("dp=2,cp=2,tp=2", sequence_parallel=True)
    hidden, kernel, targets = arrays(dtype, 800)
    targets %= fields.get("vocab_size", V)
    head = head_with(kernel, **fields)
    call = jax.jit(
        partial(log_probs_from_hidden, parallel=parallel, entropy="metric", deterministic=True)
    )

    def get(*args, **how):
        found = call(*args, **how)
        return np.stack([found.log_probs, found.entropy], -1)

    expected = get(hidden.reshape(8, 100, H), head, targets.reshape(8, 100)).reshape(800, 2)
    assert np.isfinite(expected).all()
    rng = np.random.default_rng(1)
    few = [((1, 1), 1.0), ((1, 7), 1.0)] * 10 if parallel is None else [((2, 12), 1.0)]
    for shape, share in (*few, ((2, 300), 0.4)):
        chosen = rng.integers(0, 800, shape)
        where = rng.random(shape) < share
        got = get(hidden[chosen], head, targets[chosen], where=where)
        changed = (got != expected[chosen]).any(-1) & where
        assert not changed.any(), (shape, int(changed.sum()))


SOME = [
    (None, 2**30, "float32"),
    (None, 2**21, "bfloat16"),
    ("dp=4,cp=2", 2**30, "bfloat16"),
    ("dp=2,cp=2,tp=2", 2**21, "float32"),
]
MESHES = (None, "dp=4,cp=2", "dp=2,cp=2,tp=2")
MEMORIES = (2**30, 2**21)


@pytest.mark.parametrize(
    ("mesh", "memory", "dtype"),
    [
        case if case in SOME else pytest.param(*case, marks=pytest.mark.nightly)
        for case in itertools.product(MESHES, MEMORIES, DTYPES)
    ],
)
def test_the_ratio_to_an_old_pass_of_the_same_policy_is_1(mesh, memory, dtype):
    """With memory for one pass and without.

    The old pass had other neighbours: no mask, other rows.
    """
    parallel = mesh and make_parallel_mesh(mesh)
    hidden, kernel, targets = arrays(dtype, 640)
    hidden = hidden.reshape(4, 160, H)
    targets = targets.reshape(4, 160)
    options = {"parallel": parallel, "deterministic": True, "memory": memory}
    old = jax.jit(lambda h, k: log_probs_from_hidden(h, k, targets[::-1], **options).log_probs)(
        hidden[::-1], kernel
    )
    ids = np.ones((4, 160), np.int32)
    mask = (np.random.default_rng(3).random((4, 160)) < 0.7).astype(np.float32)
    mask[:, -1] = 0
    positions = np.broadcast_to(np.arange(160, dtype=np.int32), (4, 160))
    batch = RolloutBatch(
        ids,
        targets,
        ids,
        positions,
        mask,
        np.arange(4, dtype=np.int32)[:, None],
        advantages=mask,
        old_log_probs=np.asarray(old)[::-1],
    )
    config = PolicyLossConfig(PPO())

    @jax.jit
    def step(hidden, kernel, batch):
        def loss(hidden, kernel):
            return policy_loss_from_hidden(hidden, kernel, batch, config, **options)

        (_, metrics), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, kernel)
        return finalize_metrics(metrics), gradients

    found, _ = step(hidden, kernel, batch)
    assert (found["ratio_max"], found["ratio_min"]) == (1, 1)
