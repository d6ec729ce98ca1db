"""LoRA in the loop: adapters beside a frozen model, as the flags --lora-rank, --lora-alpha and
--lora-targets ask.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llama
from flax import nnx
from safetensors.numpy import load_file, save_file

from examples.real import larger
from examples.trainer.arguments import LORA_TARGETS, parse
from examples.trainer.attention import context_attention
from examples.trainer.grpo_run import grpo_step, set_up
from examples.trainer.lora import LoraConfig, add_adapters
from examples.trainer.published import load_model, read_config
from examples.trainer.train_grpo import main
from jaxppo import RolloutBatch, Sample, make_parallel_mesh

LORA = LoraConfig(rank=3, alpha=6.0, targets=LORA_TARGETS, layers=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.write(folder, model_type="qwen2", head_dim=6, tie_word_embeddings=True)
    return folder


@functools.cache
def models(folder, mesh):
    """The mesh, the model of the folder and that with adapters: structures and parameters."""
    parallel = make_parallel_mesh(mesh, context_layout="zigzag")
    config = read_config(folder)
    graphdef, params = load_model(folder, config, parallel)
    adapted, adapters = add_adapters(graphdef, params, config, LORA, parallel, seed=0)
    return parallel, (graphdef, params), (adapted, adapters)


def batch_on(parallel):
    rng = np.random.default_rng(0)
    samples = [Sample(rng.integers(0, 256, n), response_start=1) for n in (9, 14, 6, 11)]
    return RolloutBatch.from_samples(samples, row_length=16, rows=8, parallel=parallel).put(
        parallel
    )


def hidden_of(graphdef, batch, parallel, *variables):
    model = nnx.merge(graphdef, *variables)
    return model(batch.tokens, batch.positions, context_attention(batch.paths, parallel))


def named(tree):
    """{"layers.0.mlp.up_proj.adapter.a": [I, R]} of a tree of parameters, or of their gradients."""
    found = {}
    for path, x in jax.tree.leaves_with_path(tree):
        found[".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))] = (
            np.asarray(x)
        )
    return found


def projections(adapters):
    """The names of the projections that have adapters."""
    return sorted(
        {name.removesuffix(".adapter.a") for name in named(adapters) if name.endswith(".adapter.a")}
    )


@pytest.mark.parametrize(
    "mesh", ["fsdp=2,cp=2,tp=2", pytest.param("dp=8", marks=pytest.mark.nightly)]
)
def test_the_first_step_has_the_model_as_it_was_published(folder, mesh):
    parallel, (graphdef, params), (adapted, adapters) = models(folder, mesh)
    batch = batch_on(parallel)
    run = jax.jit(hidden_of, static_argnums=(0, 2))
    before = run(graphdef, batch, parallel, params)
    np.testing.assert_array_equal(run(adapted, batch, parallel, adapters, params), before)
    assert np.asarray(before).any()
    for name, x in named(adapters).items():
        if name.endswith("b"):
            assert not x.any(), name
        else:
            bound = x.shape[0] ** -0.5
            assert 0.6 * bound < np.abs(x).max() <= bound, name  # 72 numbers or more, spread evenly


@pytest.mark.parametrize(
    "mesh", ["fsdp=2,cp=2,tp=2", pytest.param("dp=8", marks=pytest.mark.nightly)]
)
def test_gradients_of_adapters_follow_from_those_of_whole_kernels(folder, mesh):
    """With W' = W + s a b: the model of W' is the same, da = s dW' b^T, db = s a^T dW'.

    The products are in float64.
    """
    parallel, (graphdef, params), (adapted, adapters) = models(folder, mesh)
    batch = batch_on(parallel)
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda x: jax.device_put(jnp.float32(rng.normal(0, 0.1, x.shape)), x.sharding), adapters
    )
    weights = jnp.float32(rng.normal(size=(*batch.tokens.shape, 24)))
    weights = jax.device_put(weights, parallel.sharding(parallel.hidden_spec))
    mine = {name: np.float64(x) for name, x in named(adapters).items()}
    scale = LORA.alpha / LORA.rank
    assert len(projections(adapters)) == 2 * len(LORA_TARGETS)

    def merged(path, kernel):
        name = ".".join(str(key.key) for key in path if isinstance(key, jax.tree_util.DictKey))
        name = name.removesuffix(".kernel")
        if name not in projections(adapters):
            return kernel
        whole = np.float64(kernel) + scale * mine[f"{name}.adapter.a"] @ mine[f"{name}.adapter.b"]
        return jax.device_put(jnp.float32(whole), kernel.sharding)

    def total(learn, graphdef, rest, batch):
        hidden = hidden_of(graphdef, batch, parallel, learn, *rest)
        return jnp.where(batch.segment_ids[..., None] > 0, hidden * weights, 0).sum()

    run = jax.jit(jax.value_and_grad(total), static_argnums=1)
    value, of_adapters = run(adapters, adapted, (params,), batch)
    want, of_kernels = run(jax.tree.map_with_path(merged, params), graphdef, (), batch)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert abs(value - run(params, graphdef, (), batch)[0]) > 0.01 * abs(value)
    got = named(of_adapters)
    of_kernels = named(of_kernels)
    for name in projections(adapters):
        dense = scale * np.float64(of_kernels[f"{name}.kernel"])
        chained = {
            "a": dense @ mine[f"{name}.adapter.b"].T,
            "b": mine[f"{name}.adapter.a"].T @ dense,
        }
        for part, x in chained.items():
            tolerance = 2e-5 * np.abs(x).max()
            np.testing.assert_allclose(
                got[f"{name}.adapter.{part}"], x, rtol=0, atol=tolerance, err_msg=name
            )


RUN = [
    "--task",
    larger.__file__,
    "--shots",
    "1",
    "--prompts",
    "4",
    "--samples",
    "4",
    "--held-out",
    "16",
]
RUN += [
    "--sft-steps",
    "0",
    "--updates",
    "1",
    "--share-prefixes",
    "--entropy-coef",
    "0.5",
    "--devices",
    "1",
]
RUN += ["--learning-rate", "0.01", "--explain", "0", "--lora-rank", "2"]


def size(tree):
    return sum(x.size for x in jax.tree.leaves(tree))


def test_adapters_alone_learn_are_saved_and_are_loaded(tmp_path):
    """The penalty is to the model without adapters: there is none at first, and no second copy
    of the weights.
    """
    model = tmp_path / "model"
    tiny_llama.write(model, model_type="qwen2", head_dim=6)
    options = [
        *RUN,
        "--model",
        str(model),
        "--out",
        str(tmp_path),
        "--kl-coef",
        "0.1",
        "--lora-alpha",
        "4",
    ]
    run = set_up(parse(options))
    base = jax.device_get(run.state.frozen)
    # sides of 24 + 24 (twice), 24 + 12 (twice), 24 + 32 (three times), in two layers, rank 2
    assert size(run.state.params) == size(run.state.reference) == 2 * 2 * (2 * 48 + 2 * 36 + 3 * 56)
    # two moments of each, and counts
    assert size(run.state.optimizer) - 2 * size(run.state.params) <= 2
    steps = [grpo_step(run, parse(options)) for _ in range(3)]
    # the sampler has the adapters too
    assert max(step["mismatch_log_prob_abs_diff"] for step in steps) < 1e-5
    assert not any(step["skipped"] for step in steps)
    assert abs(steps[0]["kl"]) < 1e-10
    assert steps[-1]["kl"] > 1e-6
    for x, y in zip(jax.tree.leaves(base), jax.tree.leaves(run.state.frozen), strict=True):
        np.testing.assert_array_equal(x, y)
    for name, x in named(run.state.params).items():
        assert np.abs(x).max() > 1e-2, name
    for name, x in named(run.state.reference).items():
        assert name.endswith("a") or not x.any(), name
    run.save()
    run.checkpoints.wait()
    again = set_up(parse([*options, "--resume"]))
    for x, y in zip(jax.tree.leaves(run.state), jax.tree.leaves(again.state), strict=True):
        np.testing.assert_array_equal(x, y)
    with pytest.raises(ValueError, match=r"another model or run, lora_alpha=4.0, expected 2.0"):
        set_up(parse([*options, "--resume", "--lora-alpha", "2"]))
    found = load_file(model / "model.safetensors")
    found["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    save_file(found, model / "model.safetensors")
    with pytest.raises(ValueError, match="another model or run, frozen="):
        set_up(parse([*options, "--resume"]))


def test_adapters_of_the_last_layers_and_of_some_projections(folder, tmp_path):
    options = [*RUN, "--model", str(folder), "--out", str(tmp_path), "--train-layers", "1"]
    run = set_up(parse([*options, "--lora-targets", "v_proj", "q_proj"]))
    assert projections(run.state.params) == [
        "layers.1.self_attn.q_proj",
        "layers.1.self_attn.v_proj",
    ]
    assert size(run.state.params) == 2 * (48 + 36)


REFUSED = {
    "no model": (
        ["--lora-rank", "2"],
        "--lora-rank: got 2 without --model, expected the folder of a model to adapt",
    ),
    "alpha alone": (
        ["--lora-alpha", "2"],
        "--lora-alpha: got it without --lora-rank, expected both",
    ),
    "targets alone": (
        ["--lora-targets", "q_proj"],
        "--lora-targets: got it without --lora-rank, expected both",
    ),
    "a strange target": (
        ["--lora-targets", "lm_head"],
        "argument --lora-targets: invalid choice: 'lm_head'",
    ),
    "no rank": (
        ["--lora-rank", "0"],
        "argument --lora-rank: got '0', expected an integer of at least 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_flags_that_do_not_fit(capsys, name):
    options, message = REFUSED[name]
    with pytest.raises(SystemExit):
        parse(options)
    assert message in capsys.readouterr().err


def test_a_rank_above_a_side_of_a_kernel(folder, tmp_path, capsys):
    options = [*RUN, "--model", str(folder), "--out", str(tmp_path), "--lora-rank", "13"]
    assert main(options) == 2
    assert (
        "--lora-rank: got 13, expected at most 12, the smaller side of k_proj"
        in capsys.readouterr().err
    )
