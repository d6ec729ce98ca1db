"""jaxppo's losses and log-probs beside Tunix's, in its models, adapters, meshes and packed batches.

`make nightly` installs Tunix, see `test_tunix`.
"""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tunix_steps import (
    EOS,
    PAD,
    V,
    example,
    grpo,
    loss_and_metrics,
    losses,
    mesh_of,
    need,
    qwen,
    qwen3,
)

from jaxppo.integrations import tunix as ours
from sharding import ParallelMesh
from sharding.audit import audit

common = need("tunix.rl.common")

pytestmark = pytest.mark.nightly
SIZES = {
    "num_layers": 2,
    "embed_dim": 16,
    "hidden_dim": 32,
    "num_heads": 2,
    "head_dim": 8,
    "num_kv_heads": 1,
}
ROPE = {"vocab_size": V, "rope_theta": 10_000, "norm_eps": 1e-6}


def llama(**options):
    llama3 = need("tunix.models.llama3.model")
    return llama3.Llama3(llama3.ModelConfig(**SIZES, **ROPE, **options), rngs=nnx.Rngs(0))


def qwen2(**options):
    module = need("tunix.models.qwen2.model")
    return module.Qwen2(module.ModelConfig(**SIZES, **ROPE, **options), rngs=nnx.Rngs(0))


def gemma2():
    module = need("tunix.models.gemma.model")
    kinds = [module.AttentionType.LOCAL_SLIDING, module.AttentionType.GLOBAL]
    options = {
        "final_logit_softcap": 3.0,
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "num_embed": V,
    }
    config = module.ModelConfig(**SIZES, **options, attention_types=kinds, sliding_window_size=8)
    return module.Gemma(config, rngs=nnx.Rngs(0))


def gemma3():
    module = need("tunix.models.gemma3.model")
    options = {"num_embed": V, "sliding_window_size": 8, "param_dtype": jnp.float32}
    return module.Gemma3(module.ModelConfig(**SIZES, **options), rngs=nnx.Rngs(0))


def gemma4():
    module = need("tunix.models.gemma4.model")
    options = {
        "num_embed": V,
        "sliding_window_size": 8,
        "global_key_size": 8,
        "final_logit_softcap": 3.0,
    }
    return module.Gemma4(module.ModelConfig(**SIZES, **options), rngs=nnx.Rngs(0))


MODELS = {
    "Qwen 3": qwen,
    "Qwen 3, tied": functools.partial(qwen, use_tied_embedding=True),
    "Qwen 2": qwen2,
    "Llama 3": llama,
    "Llama 3, tied": functools.partial(llama, weight_tying=True),
    "Gemma 2": gemma2,
    "Gemma 3": gemma3,
    "Gemma 4": gemma4,
}


def assert_same(found, expected, atol=2e-6):
    (loss, aux), gradient = found
    (their_loss, their_aux), their_gradient = expected
    np.testing.assert_allclose(loss, their_loss, rtol=2e-5, atol=1e-6)
    for name in ("kl", "pg_clipfrac"):
        np.testing.assert_allclose(aux[name], their_aux[name], rtol=2e-5, atol=1e-6)

    def close(x, y):
        return np.testing.assert_allclose(x, y, rtol=2e-4, atol=atol)

    jax.tree.map(close, gradient, their_gradient)


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_of_each_model(name):
    model = MODELS[name]()
    config = grpo()
    expected = losses(model, "grpo", config, example())
    assert_same(losses(model, ours.register(), config, example()), expected)
    # the loss leaves nothing in the model
    assert not jax.tree.leaves(nnx.state(model, nnx.Intermediate))


@pytest.mark.parametrize(
    "options",
    [
        {"loss_algo": "gspo-token", "epsilon": 3e-3},
        {"loss_agg_mode": "token-mean", "kl_loss_mode": "mse_kl"},
        {"loss_agg_mode": "seq-mean-token-sum", "kl_loss_mode": "low_var_kl"},
        {"loss_agg_mode": "sequence-mean-token-sum-norm", "beta": 0.0},
        {"loss_agg_mode": "sequence-mean-token-scale", "beta": 0.0},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_each_option_of_their_config(options):
    model = qwen()
    config = grpo(**options)
    ref = None if config.beta == 0 else example().ref_per_token_logps
    # its main branch counts rows without a completion in the norm of a padded batch, and not in
    # that of a packed one
    batch = example(ref_per_token_logps=ref, shortest=int("norm" in config.loss_agg_mode))
    assert_same(losses(model, ours.register(), config, batch), losses(model, "grpo", config, batch))


@pytest.mark.parametrize("shape", [(4, 1), (2, 2), (1, 4)], ids=str)
def test_on_their_meshes(shape):
    mesh = mesh_of(*shape)
    with mesh:
        graph, state = nnx.split(qwen(num_heads=4, num_kv_heads=4))
        specs = nnx.get_partition_spec(state)

        def put(x, spec):
            return jax.device_put(x, jax.NamedSharding(mesh, spec))

        model = nnx.merge(graph, jax.tree.map(put, state, specs))
        expected = losses(model, "grpo", grpo(), example())
        found = losses(model, ours.register(parallel=ParallelMesh(mesh)), grpo(), example())
        # sums over devices: one of 1024 is 3e-6 off on (4, 1)
        assert_same(found, expected, atol=5e-6)


def test_packed_rows_are_the_padded_ones():
    """Two rows of 24 tokens.

    Tunix's own packed loss needs flash attention: without it, it attends to everything.
    """
    batch = example()
    model = qwen()
    config = grpo(loss_agg_mode="token-mean")
    pack = need("tunix.rl.utils").pack_sequences
    count = (
        {"sequences_per_update": 4}
        if "sequences_per_update" in inspect.signature(pack).parameters
        else {}
    )
    packed = pack(iter([[batch]]), max_token_budget=24, pad_id=PAD, **count)
    rows = [row for part in packed for row in part]
    assert len(rows) == 2
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
    expected = losses(model, "grpo", config, batch)
    assert_same(losses(model, ours.register(), config, whole), expected)
    # where Tunix 0.1.7 takes the mean of a row for one
    sequences = grpo(loss_agg_mode="sequence-mean-token-mean")
    assert_same(
        losses(model, ours.register(), sequences, whole), losses(model, "grpo", sequences, batch)
    )


@pytest.mark.parametrize("name", ["Qwen 3", "Llama 3", "Gemma 2"])
def test_log_probs_of_a_pass(name):
    model = MODELS[name]()
    batch = example()
    expected = common.compute_per_token_logps(
        *nnx.split(model), batch.prompt_ids, batch.completion_ids, PAD, EOS, temperature=0.7
    )
    found = ours.log_probs(
        model, batch.prompt_ids, batch.completion_ids, pad_id=PAD, temperature=0.7
    )
    np.testing.assert_allclose(
        found, jnp.where(batch.completion_mask, expected, 0), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "module_path", [".*q_proj", ".*q_proj|lm_head"], ids=["frozen head", "adapted head"]
)
def test_adapters(module_path):
    qwix = need("qwix")
    provider = qwix.LoraProvider(module_path=module_path, rank=4, alpha=6.0)
    base = qwen()
    inputs = {
        "input_tokens": jnp.ones((2, 8), jnp.int32),
        "positions": jnp.ones((2, 8), jnp.int32),
        "cache": None,
    }
    inputs["attention_mask"] = jnp.ones((2, 8, 8), bool)
    model = qwix.apply_lora_to_model(base, provider, **inputs, rngs=nnx.Rngs(0))

    # an adapter begins as 0
    def shake(x):
        return x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape)

    nnx.update(model, jax.tree.map(shake, nnx.state(model, nnx.LoRAParam)))
    lora_scale = None  # of a head without an adapter
    if "lm_head" in module_path:
        lora_scale = 6.0 / 4
    name = ours.register(lora_scale=lora_scale)
    found = losses(model, name, grpo(), example(), nnx.LoRAParam)
    assert len(jax.tree.leaves(found[1])) == 4 + 2 * ("lm_head" in module_path)
    assert_same(found, losses(model, "grpo", grpo(), example(), nnx.LoRAParam))


def described(mesh, batch, prompt, completion):
    """The arguments of a GRPO loss of a Qwen3 with two layers and a vocabulary of 151936, on a
    described mesh.
    """
    sizes = {
        "vocab_size": 151936,
        "embed_dim": 1024,
        "hidden_dim": 3072,
        "num_heads": 16,
        "num_kv_heads": 8,
    }
    sizes |= {"head_dim": 64, "dtype": jnp.bfloat16, "remat_config": qwen3.RematConfig.BLOCK}
    graph, state = nnx.split(nnx.eval_shape(lambda: qwen(**sizes)))

    def put(x, spec):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, spec))

    shapes = jax.eval_shape(lambda: example(batch, prompt, completion))

    def by_row(x):
        return put(x, jax.P("fsdp", *[None] * (x.ndim - 1)))

    state = jax.tree.map(put, state, nnx.get_partition_spec(state))
    return graph, state, jax.tree.map(by_row, shapes)


def test_peak_temporaries_of_both():
    """64 rows of 1024 tokens on a described v5p of 16 chips; the figures stand in
    docs/frameworks.md.
    """
    topologies = need("jax.experimental.topologies")
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra aot")
    kinds = (jax.sharding.AxisType.Auto,) * 2
    devices = np.array(topologies.get_topology_desc("v5p:2x2x4", platform="tpu").devices).reshape(
        4, 4
    )
    mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"), axis_types=kinds)
    found = {}
    with mesh:
        graph, *args = described(mesh, 64, 256, 768)
        for name in ("grpo", ours.register(parallel=ParallelMesh(mesh))):
            loss_fn = loss_and_metrics(name)

            def step(state, train_example, loss_fn=loss_fn):
                def loss(s):
                    return loss_fn(nnx.merge(graph, s), train_example, grpo(), PAD, EOS)[0]

                return jax.value_and_grad(loss)(state)

            found[name] = audit(step, *args).temp_bytes
    print({name: f"{b / 2**30:.2f} GiB" for name, b in found.items()})
    assert found["jaxppo"] < 0.5 * found["grpo"], found
