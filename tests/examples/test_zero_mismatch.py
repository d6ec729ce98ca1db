"""Zero mismatch: a sampler with a cache and a trainer of packed rows give a log-prob the same
bits, in bfloat16.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llama
import tiny_runs

from examples.trainer.arguments import parse
from examples.trainer.attention import attention, ordered_attention
from examples.trainer.grpo_run import grpo_step, set_up, supervised
from examples.trainer.learner import Learner
from examples.trainer.published import load_model, read_config
from examples.trainer.sampler import make_sampler
from jaxppo import PolicyLossConfig, RolloutBatch, Sample, make_parallel_mesh
from jaxppo.batch.trees import Paths

PROMPT, RESPONSE = 9, 14
SLOTS = PROMPT + RESPONSE
ENDS = tuple(range(250, 261))
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
SIZES = {**HEADS, "hidden_size": 256, "intermediate_size": 768, "tie_word_embeddings": False}
ROUNDED = {"dtype": "bfloat16", "logits_dtype": "bfloat16", "slots": SLOTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen 3 whose weights are f32, so that its products round them."""
    path = tmp_path_factory.mktemp("model")
    tiny_llama.write(path, **SIZES)
    return path


def mesh_of(mesh, layout="contiguous"):
    devices = jax.devices()[:1] if mesh == "dp=1" else None
    return make_parallel_mesh(mesh, context_layout=layout, devices=devices)


def model_on(folder, parallel, **changes):
    config = dataclasses.replace(read_config(folder).with_tokens(261, SLOTS), **changes)
    return config, *load_model(folder, config, parallel)


@functools.cache
def sampled(folder, mesh, count, copies=1, common=0, **changes):
    """Samples of so many prompts, and of as many rows that are decoded together as there are
    copies of them.
    """
    parallel = mesh_of(mesh)
    config, graphdef, params = model_on(folder, parallel, **ROUNDED | changes)
    sample = make_sampler(graphdef, config, parallel, PROMPT, RESPONSE, ENDS, common)
    rng = np.random.default_rng(count)
    prompts = rng.integers(0, 250, (count, PROMPT)).astype(np.int32)
    prompts[:, :common] = prompts[0, :common]
    lengths = rng.integers(common + 1, PROMPT + 1, count).astype(np.int32)
    found = jax.device_get(
        sample((params,), prompts, lengths, jax.random.key(count), np.float32(1), copies)
    )
    samples = []
    for i, (tokens, log_probs, on) in enumerate(zip(*found, strict=True)):
        prompt = prompts[i // copies][: lengths[i // copies]]
        samples.append(
            Sample(
                [*prompt, *tokens[on]], response_start=len(prompt), rollout_log_probs=log_probs[on]
            )
        )
    return samples


def log_probs(folder, mesh, layout, samples, packing, **changes):
    """The log-probs of all response tokens, the trainer's and the sampler's."""
    parallel = mesh_of(mesh, layout)
    config, graphdef, params = model_on(folder, parallel, **ROUNDED | changes)
    batch = RolloutBatch.from_samples(samples, parallel=parallel, **packing).put(parallel)
    learner = Learner(graphdef, config, parallel, PolicyLossConfig(), None, 1)
    trained = np.asarray(jax.jit(learner.token_stats)((params,), batch).log_probs)
    counts = np.asarray(batch.loss_mask) > 0
    assert counts.sum() == sum(len(sample.tokens) - sample.response_start for sample in samples)
    return trained[counts], np.asarray(batch.rollout_log_probs)[counts]


def assert_no_mismatch(trained, rollout):
    assert len(np.unique(trained)) > 0.9 * len(trained) > 50
    assert int((trained != rollout).sum()) == 0, f"of {len(trained)} log-probs differ"


# meshes with the number of prompts that are read at once: batch sizes differ, and so does tp
SAMPLERS = {"dp=2,tp=4": 8, "dp=1": 9, "dp=8": 24, "dp=4,tp=2": 16, "tp=8": 11}
TRAINERS = [
    ("dp=2,cp=2,tp=2", "zigzag", {"row_length": 96}),
    ("dp=1", "contiguous", {"row_length": 24}),
    ("dp=8", "contiguous", {"row_length": 48}),
    ("fsdp=4,tp=2", "contiguous", {"row_length": 64}),
    ("cp=2,tp=4", "striped", {"row_length": 72}),
    ("tp=8", "contiguous", {"row_length": 240}),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_cached_decoding_and_packed_rows(folder, dtype):
    """On other meshes, in other shapes: 8 tokens at once beside rows of 96.

    In f32 no rounding hides another order.
    """
    dtypes = {"dtype": dtype, "logits_dtype": dtype}
    samples = sampled(folder, "dp=2,tp=4", SAMPLERS["dp=2,tp=4"], **dtypes)
    mesh, layout, packing = TRAINERS[0]
    assert_no_mismatch(*log_probs(folder, mesh, layout, samples, packing, **dtypes))


@pytest.mark.nightly
@pytest.mark.parametrize(("mesh", "layout", "packing"), TRAINERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_sampler_beside_every_trainer(folder, dtype, mesh, layout, packing):
    """tp = 1, 2, 4 and 8 on both sides, five batch sizes and six packings."""
    dtypes = {"dtype": dtype, "logits_dtype": dtype}
    samples = [
        sample
        for name, count in SAMPLERS.items()
        for sample in sampled(folder, name, count, **dtypes)
    ]
    assert_no_mismatch(*log_probs(folder, mesh, layout, samples, packing, **dtypes))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_packed_as_trees(folder, dtype):
    """Prompts are read once for four copies, and their common start once for all; rows hold them
    once.
    """
    dtypes = {"dtype": dtype, "logits_dtype": dtype}
    samples = sampled(folder, "dp=2,tp=4", 4, copies=4, common=3, **dtypes)
    packing = {"row_length": 96, "share_prefixes": True}
    assert_no_mismatch(*log_probs(folder, "dp=2,tp=4", "contiguous", samples, packing, **dtypes))


def test_without_chunks_bits_differ(folder):
    """A sixth of them, by up to 0.04: logits between 4 and 8 have steps of 1/32 in bfloat16."""
    samples = sampled(folder, "dp=1", 9, slots=None)
    trained, rollout = log_probs(
        folder, "dp=1", "contiguous", samples, {"row_length": 96}, slots=None
    )
    distance = np.abs(trained - rollout)
    assert (distance > 0).mean() > 0.05
    assert 0.01 < distance.max() < 0.1


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("gemma", marks=pytest.mark.nightly)])
def test_values_and_gradients_are_those_of_all_tokens_at_once(tmp_path, kind):
    """In f32, to its rounding. Gemma's windows are shorter than the samples."""
    of_kind = {"qwen3": {**SIZES, "num_hidden_layers": 1}, "gemma": tiny_llama.GEMMA}
    tiny_llama.write(tmp_path, **of_kind[kind])
    parallel = mesh_of("dp=4,cp=2", "zigzag")
    rng = np.random.default_rng(0)
    samples = [
        Sample(rng.integers(0, 250, n), response_start=2) for n in rng.integers(5, SLOTS, 12)
    ]
    batch = RolloutBatch.from_samples(samples, parallel=parallel, row_length=48).put(parallel)
    weights = jnp.asarray(rng.normal(size=batch.tokens.shape), jnp.float32)

    def values_and_gradients(slots):
        config, graphdef, params = model_on(tmp_path, parallel, slots=slots)
        learner = Learner(graphdef, config, parallel, PolicyLossConfig(), None, 1)

        def loss(params):
            found = learner.token_stats((params,), batch).log_probs
            return (found * weights).sum(), found

        (_, found), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return jax.device_get((found, jax.tree.leaves(gradients)))

    for got, want in zip(
        *map(jax.tree.leaves, (values_and_gradients(SLOTS), values_and_gradients(None))),
        strict=True,
    ):
        assert np.abs(want).max() > 0
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_query_of_more_keys_than_slots_is_nan():
    """A sample of 19 tokens with 16 slots: the last three have none left.

    Padding has no such limit.
    """
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 40, 2, 4)).astype(np.float32)
    places = np.tile(np.arange(40, dtype=np.int32), (2, 1))
    paths = Paths((places < 19).astype(np.int32), places % 19)
    mesh = make_parallel_mesh("dp=2,tp=4")

    @jax.jit
    def in_order(q, k, v, paths):
        return ordered_attention(paths, paths, 16, mesh)(q, k, v)

    found = np.asarray(in_order(q, k, v, paths))
    whole = np.asarray(jax.jit(attention)(q, k, v, paths, paths))
    assert np.isnan(found[:, 16:19]).all()
    np.testing.assert_allclose(found[:, :16], whole[:, :16], rtol=0, atol=1e-6)
    assert np.isfinite(found[:, 19:]).all()


BFLOAT16 = {"dtype": tiny_llama.BFLOAT16}
RUNS = {
    "the small model": None,
    "qwen3": {**BFLOAT16, "num_hidden_layers": 1},
    "qwen3 with adapters": BFLOAT16,
    "gemma": {**BFLOAT16, **tiny_llama.GEMMA},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
def test_a_run_reports_a_mismatch_of_zero(tmp_path, name):
    """After updates too, which take weights off the numbers that bfloat16 has."""
    options = ["--same-bits", "--logits-dtype", "bfloat16", "--sft-steps", "1", "--updates", "1"]
    if RUNS[name] is not None:
        tiny_llama.write(tmp_path / "model", **RUNS[name])
        options += ["--model", str(tmp_path / "model")]
    if name == "qwen3 with adapters":
        options += ["--lora-rank", "2", "--train-layers", "1"]
    args = parse([*tiny_runs.TINY, *options, "--out", str(tmp_path / "run")])
    run = set_up(args)
    supervised(run, args)
    for numbers in (grpo_step(run, args) for _ in range(2)):
        assert numbers["mismatch_log_prob_abs_diff"] == 0
        assert numbers["mismatch_weight_min"] == numbers["mismatch_weight_max"] == 1
        assert numbers["skipped"] == 0
