"""The hidden states of every example's model do not depend on how its samples are packed."""

from functools import partial

import jax
import jax.numpy as jnp
import nnx_policy
import pytest
import tiny_llama
import tiny_runs
from flax import nnx
from toy_decoder import decoder_on

from examples import flax_linen
from examples.flax_linen import VOCAB
from examples.trainer import grpo_run, learner
from examples.trainer.arguments import parse
from examples.trainer.attention import context_attention
from examples.trainer.model import ModelConfig
from examples.trainer.published import load_model, read_config
from jaxppo import assert_packing_invariant
from jaxppo.sharding import LAYOUTS, make_parallel_mesh

SMALL = ModelConfig(vocab_size=29, max_length=64, width=16, layers=1, mlp_width=32)
MESHES = [None, *(("dp=2,cp=2,tp=2", layout) for layout in LAYOUTS)]


def mesh_of(case):
    if case is None:  # rows in the order of every layout, on one device
        return make_parallel_mesh("dp=1", devices=jax.devices()[:1]), None
    parallel = make_parallel_mesh(case[0], context_layout=case[1])
    return parallel, parallel


def with_attention(graphdef, parallel):
    @jax.jit
    def hidden(params, batch):
        attend = context_attention(batch.paths, parallel)
        return nnx.merge(graphdef, params)(batch.tokens, batch.positions, attend)

    return hidden


@pytest.mark.parametrize("case", MESHES, ids=str)
def test_the_decoder(case):
    parallel, given = mesh_of(case)
    graphdef, params = decoder_on(SMALL, parallel, seed=0)
    assert_packing_invariant(
        with_attention(graphdef, parallel), params, vocab_size=29, parallel=given
    )


@pytest.mark.parametrize("case", MESHES, ids=str)
def test_qwen3(case, tmp_path):
    parallel, given = mesh_of(case)
    tiny_llama.write(tmp_path, num_hidden_layers=1)
    graphdef, params = load_model(tmp_path, read_config(tmp_path), parallel)
    assert_packing_invariant(
        with_attention(graphdef, parallel), params, vocab_size=257, parallel=given
    )


def test_the_decoder_without_its_mask_fails():
    """Each layer attends to all that lies before it in memory."""
    parallel, _ = mesh_of(None)
    graphdef, params = decoder_on(SMALL, parallel, seed=0)

    def blind(params, batch):
        def attend(q, k, v):
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)

        return nnx.merge(graphdef, params)(batch.tokens, batch.positions, attend)

    with pytest.raises(AssertionError, match="depend on what is packed beside it"):
        assert_packing_invariant(jax.jit(blind), params, vocab_size=29)


def test_a_run_checks_its_model(tmp_path, monkeypatch):
    """With the model's own attention, before anything is learned; a run whose attention is blind
    ends there.
    """
    arguments = [
        *tiny_runs.TINY,
        "--mesh",
        "dp=2,cp=4,tp=1",
        "--out",
        str(tmp_path / "run"),
        "--sft-steps",
        "0",
        "--steps",
        "1",
    ]
    run = grpo_run.set_up(parse(arguments))
    run.learner.check_packing(run.state.variables)

    def blind(paths, parallel):
        return partial(jax.nn.dot_product_attention, is_causal=True)

    monkeypatch.setattr(learner, "context_attention", blind)
    with pytest.raises(AssertionError, match="depend on what is packed beside it"):
        grpo_run.one_process(parse([*arguments, "--overwrite"]))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def of_nnx():
    parallel = make_parallel_mesh("fsdp=1,tp=1", devices=jax.devices()[:1])
    with jax.set_mesh(parallel.mesh):
        model = nnx_policy.Policy(parallel, tied=True, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    return lambda params, batch: nnx.merge(graphdef, params)(batch.tokens), params


def of_linen():
    parallel = make_parallel_mesh("fsdp=1,tp=1", devices=jax.devices()[:1])
    model = flax_linen.Policy(parallel, tied=True)
    params = model.init(jax.random.key(0), jnp.zeros((1, 8), int), method="logits")["params"]
    return lambda params, batch: model.apply({"params": params}, batch.tokens), params


def of_equinox():
    pytest.importorskip("equinox", reason="Equinox is not installed")
    from examples import equinox_model

    parallel = make_parallel_mesh("fsdp=1,tp=1", devices=jax.devices()[:1])
    model = equinox_model.Policy(tied=True, key=jax.random.key(0))
    return lambda model, batch: equinox_model.hidden_states(model, batch.tokens, parallel), model


@pytest.mark.parametrize("make", [of_nnx, of_linen, of_equinox], ids=lambda make: make.__name__)
def test_the_examples_of_frameworks(make):
    fn, params = make()
    assert_packing_invariant(jax.jit(fn), params, vocab_size=VOCAB)
