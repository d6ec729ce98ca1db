"""The losses of docs/frameworks.md for SkyRL-tx, Levanter and EasyDeL, run in models of theirs that
are installed.

Values and gradients are compared with the log-probs that the trainer itself makes of its
activations. None of these packages can be installed beside the test group: SkyRL-tx 0.3.0 needs
transformers below 5 and torch, Levanter's development versions need a stack of their own, and
EasyDeL 0.3.0 needs JAX 0.9.
"""

import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from plain_head import reference_from_logits

import jaxppo
from jaxppo import PolicyLossConfig, RolloutBatch, TokenStats, policy_loss

V, ROWS, LENGTH = 64, 2, 8
DOCS = Path(__file__).parents[2] / "docs" / "frameworks.md"
CONFIG = PolicyLossConfig()


def documented(name, **names):
    """The function that a block of docs/frameworks.md defines, with the `loss_of` of that page."""
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    namespace = {key: getattr(jaxppo, key) for key in jaxppo.__all__} | names

    def loss_of(activations, head, batch, config=CONFIG, parallel=None):
        return jaxppo.policy_loss_from_hidden(activations, head, batch, config, parallel=parallel)[
            0
        ]

    namespace["loss_of"] = loss_of
    exec(next(block for block in blocks if f"def {name}(" in block), namespace)
    return namespace[name]


def ids_and_batch():
    ids = jnp.asarray(np.random.default_rng(0).integers(1, V, (ROWS, LENGTH)), jnp.int32)
    prompts = ids[:, :3]
    completions = ids[:, 3:]
    values = {
        "advantages": jnp.array([1.0, -0.5]),
        "old_log_probs": jnp.full(completions.shape, -4.0),
    }
    return ids, RolloutBatch.from_padded(
        prompts, completions, jnp.ones(completions.shape), **values
    )


def loss_of_log_probs(log_probs, batch):
    return policy_loss(TokenStats(log_probs), batch, CONFIG)[0]


def assert_same(found, expected):
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=2e-6), found[1], expected[1])


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True], ids=["lm_head", "tied"])
def test_skyrl_tx(tied):
    qwen3 = pytest.importorskip("tx.models.qwen3", reason="SkyRL-tx is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    from tx.models.configs import Qwen3Config

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    base = transformers.Qwen3Config(
        **sizes, num_key_value_heads=1, head_dim=8, vocab_size=V, tie_word_embeddings=tied
    )
    config = Qwen3Config(base, max_lora_adapters=2, max_lora_rank=4, shard_attention_heads=False)
    config.rope_theta = 1e4
    kinds = (jax.sharding.AxisType.Auto,) * 3
    with jax.set_mesh(
        jax.make_mesh((1, 1, 1), ("fsdp", "ep", "tp"), kinds, devices=jax.devices()[:1])
    ):
        model = qwen3.Qwen3ForCausalLM(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
        ids, batch = ids_and_batch()
        mask = jnp.ones_like(ids)
        loss = documented("skyrl_loss")
        ours = nnx.jit(nnx.value_and_grad(lambda m: loss(m, ids, mask, batch, None)))(model)

        def plain(m):
            hidden = m(ids, attention_mask=mask).last_hidden_state
            if not tied:
                return loss_of_log_probs(m.compute_logprobs(hidden, batch.targets), batch)
            # the tied head of 0.3.0 holds a copy of the embedding from the model's creation, and
            # has no gradient
            logits = hidden @ m.model.embed_tokens.embedding[...].T
            return loss_of_log_probs(m.logits_to_logprobs(logits, batch.targets), batch)

        assert_same(ours, nnx.jit(nnx.value_and_grad(plain))(model))
        if tied:
            return
        # a head with the adapter of one tenant
        lm_head = model.lm_head
        make = documented("skyrl_head")
        for parameter in (lm_head.lora_A, lm_head.lora_B):
            parameter.set_value(
                0.1
                * jnp.sin(jnp.arange(parameter.size, dtype=jnp.float32)).reshape(parameter.shape)
            )
        hidden = jax.random.normal(jax.random.key(0), (ROWS, LENGTH, 16))
        expected = model.compute_logprobs(hidden, batch.targets, jnp.full(ROWS, 1, jnp.int32))
        found = jaxppo.log_probs_from_hidden(
            hidden, make(model, adapter=1), batch.targets
        ).log_probs
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("tied", [False, True], ids=["lm_head", "tied"])
def test_levanter(tied):
    llama = pytest.importorskip("levanter.models.llama", reason="Levanter is not installed")
    hax = pytest.importorskip("haliax", reason="haliax is not installed")
    import equinox as eqx
    from levanter.layers.attention import AttentionMask

    sizes = {
        "hidden_dim": 16,
        "intermediate_dim": 32,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 1,
    }
    config = llama.LlamaConfig(**sizes, seq_len=LENGTH, tie_word_embeddings=tied)
    model = llama.LlamaLMHeadModel.init(hax.Axis("vocab", V), config, key=jax.random.key(0))
    ids, batch = ids_and_batch()
    tokens = hax.named(ids, (hax.Axis("batch", ROWS), model.Pos.resize(LENGTH)))
    loss = documented("levanter_loss", AttentionMask=AttentionMask)
    ours = eqx.filter_jit(eqx.filter_value_and_grad(lambda m: loss(m, tokens, batch, None)))(model)

    def plain(m):
        logits = (
            m(tokens, AttentionMask.causal()).rearrange(("batch", model.Pos.name, "vocab")).array
        )
        return loss_of_log_probs(reference_from_logits(logits, batch.targets).log_probs, batch)

    assert_same(ours, eqx.filter_jit(eqx.filter_value_and_grad(plain))(model))


@pytest.mark.nightly
def test_easydel():
    easydel = pytest.importorskip("easydel", reason="EasyDeL is not installed")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    config = easydel.Qwen3Config(
        **sizes, num_key_value_heads=1, head_dim=8, vocab_size=V, tie_word_embeddings=False
    )
    model = easydel.Qwen3ForCausalLM(
        config, dtype=jnp.float32, param_dtype=jnp.float32, rngs=nnx.Rngs(0)
    )
    ids, batch = ids_and_batch()
    mask = jnp.ones_like(ids)
    found = documented("easydel_loss")(model, ids, mask, batch, None)
    logits = model(input_ids=ids, attention_mask=mask).logits
    expected = loss_of_log_probs(reference_from_logits(logits, batch.targets).log_probs, batch)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
