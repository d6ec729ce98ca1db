"""jaxppo in Tunix: its GRPO learner, models, adapters and packed batches, with Tunix's loss and with jaxppo's.

`make nightly` installs it, the extra `tunix`, beside the others. Its main branch is tested from a checkout on the path:
PYTHONPATH=.../tunix python -m pytest tests/integrations/test_tunix.py --nightly
"""

import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxppo import KL, PPO, PolicyLossConfig
from jaxppo.integrations import tunix as ours
from sharding import ParallelMesh
from sharding.audit import audit

need = functools.partial(pytest.importorskip, reason="Tunix is not installed: the extra tunix")
common, registry = need("tunix.rl.common"), need("tunix.rl.function_registry")
clusters, grpo_learner = need("tunix.rl.rl_cluster"), need("tunix.rl.grpo.grpo_learner")
base_rollout, qwen3 = need("tunix.rl.rollout.base_rollout"), need("tunix.models.qwen3.model")
LossOutput = getattr(need("tunix.sft.utils"), "LossOutput", ())  # the main branch has it; () stands for no class

pytestmark = pytest.mark.nightly
V, PAD, EOS = 64, 0, 1


class Words:
    """A tokenizer of numbers."""

    def encode(self, text, **_):
        return [int(word) for word in text.split()]

    def decode(self, ids, **_):
        return " ".join(map(str, ids))

    def bos_id(self):
        return 2

    def eos_id(self):
        return EOS

    def pad_id(self):
        return PAD


def qwen(seed=0, **options):
    sizes = {"num_layers": 2, "vocab_size": V, "embed_dim": 16, "hidden_dim": 32, "num_heads": 2, "head_dim": 8}
    sizes |= {"num_kv_heads": 1, "rope_theta": 10_000, "norm_eps": 1e-6} | options
    return qwen3.Qwen3(qwen3.ModelConfig(**sizes), rngs=nnx.Rngs(seed))


def mesh_of(*shape):
    kinds = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh(shape, ("fsdp", "tp"), kinds, devices=jax.devices()[: shape[0] * shape[1]])


def rewards(completions, **_):
    return [sum(int(word) % 2 for word in c.split()) for c in completions]


def settings_of(mesh, steps, temperature, **training):
    roles = clusters.Role.ACTOR, clusters.Role.REFERENCE, clusters.Role.ROLLOUT
    training |= {"actor_optimizer": optax.sgd(0.02), "eval_every_n_steps": 100, "max_steps": steps}
    training = clusters.RLTrainingConfig(**training)
    sampler = {"max_tokens_to_generate": 6, "max_prompt_length": 8, "kv_cache_size": 32, "temperature": temperature}
    sampler |= {"return_logprobs": True}
    return clusters.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, mesh),
        rollout_engine="vanilla",
        training_config=training,
        rollout_config=base_rollout.RolloutConfig(**sampler),
    )


def cluster_of(cluster_class, mesh, steps=3, temperature=0.9, **training):
    settings = settings_of(mesh, steps, temperature, **training)
    # the reference is another model, so that the divergence from it is not 0
    return cluster_class(actor=qwen(), reference=qwen(1), tokenizer=Words(), cluster_config=settings)


def train(cluster_class, mesh, steps=3, temperature=0.9, training=(), **config):
    """The losses and gradient norms of steps of Tunix's learner, and the trained parameters."""
    with mesh:
        cluster = cluster_of(cluster_class, mesh, steps, temperature, **dict(training))
        logged = []
        trainer = cluster.actor_trainer
        kept = trainer._buffer_metrics

        def note(buffer, loss, step, additional_metrics=None):
            value = loss.compute() if hasattr(loss, "compute") else loss
            logged.append((float(value), float(additional_metrics["grad_norm"][0])))
            return kept(buffer, loss, step, additional_metrics)

        trainer._buffer_metrics = note
        learner = grpo_learner.GRPOLearner(cluster, grpo_learner.GRPOConfig(num_generations=4, **config), rewards)
        learner.train([{"prompts": np.array(["3 4 5", "6 7"])}, {"prompts": np.array(["8 9 10 11", "12"])}] * steps)
    return np.array(logged), nnx.state(trainer.model, nnx.Param)


def test_the_learner_takes_the_same_steps_with_and_without_logits():
    mesh = mesh_of(1, 1)
    config = {"beta": 0.04, "epsilon": 0.2, "kl_loss_mode": "low_var_kl"}
    theirs, parameters = train(clusters.RLCluster, mesh, **config)
    name = ours.register(PolicyLossConfig(PPO(), kl=KL(0.04, "k3"), aggregation="sequence_mean_token_mean"))
    found, trained = train(ours.rl_cluster(), mesh, policy_loss_fn=name, **config)
    assert len(theirs) == 3
    assert np.ptp(theirs[:, 1]) > 0
    np.testing.assert_allclose(found, theirs, rtol=1e-5, atol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), trained, parameters)


def test_the_example_of_the_docs_trains():
    page = (Path(__file__).parents[2] / "docs" / "frameworks.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [block] = [block for block in blocks if "jaxppo_tunix.rl_cluster()" in block]
    mesh, actor = mesh_of(1, 1), qwen()
    with mesh:
        names = {"mesh": mesh, "actor": actor, "reference": qwen(1), "tokenizer": Words(), "reward_fns": rewards}
        names |= {"cluster_config": settings_of(mesh, steps=1, temperature=0.9)}
        names |= {"GRPOLearner": grpo_learner.GRPOLearner, "GRPOConfig": grpo_learner.GRPOConfig}
        before = jax.tree.map(np.array, nnx.state(actor, nnx.Param))
        exec(block, names)
        names["learner"].train([{"prompts": np.array(["3 4 5", "6 7"])}])
    after = nnx.state(names["cluster"].actor_trainer.model, nnx.Param)
    assert any(jax.tree.leaves(jax.tree.map(lambda x, y: bool((x != y).any()), before, after)))


def test_old_log_probs_of_several_iterations_have_no_logits_either():
    """At temperature 1: at another, those of Tunix 0.1.7 are of temperature 1 and its policy's are not.

    Its main branch takes the sampler's, which a rollout returns with what it drew.
    """
    config = {"beta": 0.0, "num_iterations": 2, "loss_agg_mode": "token-mean"}
    theirs, parameters = train(clusters.RLCluster, mesh_of(1, 1), steps=4, temperature=1.0, **config)
    name = ours.register()
    found, trained = train(ours.rl_cluster(), mesh_of(1, 1), steps=4, temperature=1.0, policy_loss_fn=name, **config)
    np.testing.assert_allclose(found, theirs, rtol=2e-5, atol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), trained, parameters)


def test_micro_batches_of_a_step_add_up_as_theirs():
    """Tunix 0.1.7 takes the mean of their means, its main branch sums over counts: with its `LossOutput`, so do we."""
    options = {"training": {"mini_batch_size": 2, "train_micro_batch_size": 1}, "loss_agg_mode": "token-mean"}
    theirs, parameters = train(clusters.RLCluster, mesh_of(1, 1), steps=2, **options)
    found, trained = train(ours.rl_cluster(), mesh_of(1, 1), steps=2, policy_loss_fn=ours.register(), **options)
    assert len(theirs) == 4
    np.testing.assert_allclose(found, theirs, rtol=2e-5, atol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), trained, parameters)


SIZES = {"num_layers": 2, "embed_dim": 16, "hidden_dim": 32, "num_heads": 2, "head_dim": 8, "num_kv_heads": 1}
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
    options = {"final_logit_softcap": 3.0, "use_post_attn_norm": True, "use_post_ffw_norm": True, "num_embed": V}
    config = module.ModelConfig(**SIZES, **options, attention_types=kinds, sliding_window_size=8)
    return module.Gemma(config, rngs=nnx.Rngs(0))


def gemma3():
    module = need("tunix.models.gemma3.model")
    options = {"num_embed": V, "sliding_window_size": 8, "param_dtype": jnp.float32}
    return module.Gemma3(module.ModelConfig(**SIZES, **options), rngs=nnx.Rngs(0))


def gemma4():
    module = need("tunix.models.gemma4.model")
    options = {"num_embed": V, "sliding_window_size": 8, "global_key_size": 8, "final_logit_softcap": 3.0}
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


def example(rows=4, prompt=5, completion=7, shortest=0, **arrays):
    """A padded batch: prompts padded on the left, completions on the right, some of them short or empty."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, V, (rows, prompt)) * (np.arange(prompt) >= np.arange(rows)[:, None] % prompt)
    lengths = np.maximum(np.arange(rows)[:, None] * 2 % (completion + 1), shortest)
    completions = rng.integers(2, V, (rows, completion)) * (np.arange(completion) < lengths)
    given = {"advantages": rng.normal(size=rows), "ref_per_token_logps": -4 + 0.3 * rng.normal(size=completions.shape)}
    given |= {"old_per_token_logps": -4.2 + 0.2 * rng.normal(size=completions.shape)} | arrays
    given = {name: x if x is None else jnp.asarray(x, jnp.float32) for name, x in given.items()}
    ids = {"prompt_ids": jnp.asarray(prompts, jnp.int32), "completion_ids": jnp.asarray(completions, jnp.int32)}
    masks = {"prompt_mask": ids["prompt_ids"] != PAD, "completion_mask": ids["completion_ids"] != PAD}
    return grpo_learner.TrainExample(**ids, **masks, **given)


def grpo(**options):
    config = grpo_learner.GRPOConfig(**options)
    config.temperature = 0.7
    return config


def loss_and_metrics(name):
    """A registered loss as a number, with its metrics. The main branch returns sums, which are divided here."""
    loss_fn = registry.get_policy_loss_fn(name)

    def called(*args):
        found = loss_fn(*args)
        if not isinstance(found, LossOutput):
            return found
        metrics = {name: x.compute() if hasattr(x, "compute") else x for name, x in found.aux_metrics.items()}
        return found.primary_loss.compute(), metrics

    return called


def losses(model, name, algo_config, train_example, wrt=nnx.Param):
    """((loss, aux), gradient) of a registered loss, as Tunix's trainer takes them."""

    @nnx.jit
    def step(model, train_example):
        grad = nnx.value_and_grad(loss_and_metrics(name), argnums=nnx.DiffState(0, wrt), has_aux=True)
        return grad(model, train_example, algo_config, PAD, EOS)

    return step(model, train_example)


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
    model, config = MODELS[name](), grpo()
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
    model, config = qwen(), grpo(**options)
    ref = None if config.beta == 0 else example().ref_per_token_logps
    # its main branch counts rows without a completion in the norm of a padded batch, and not in that of a packed one
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
        assert_same(found, expected, atol=5e-6)  # sums over devices: one of 1024 is 3e-6 off on (4, 1)


def test_packed_rows_are_the_padded_ones():
    """Two rows of 24 tokens. Tunix's own packed loss needs flash attention: without it, it attends to everything."""
    batch, model, config = example(), qwen(), grpo(loss_agg_mode="token-mean")
    pack = need("tunix.rl.utils").pack_sequences
    count = {"sequences_per_update": 4} if "sequences_per_update" in inspect.signature(pack).parameters else {}
    packed = pack(iter([[batch]]), max_token_budget=24, pad_id=PAD, **count)
    rows = [row for part in packed for row in part]
    assert len(rows) == 2
    whole = jax.tree.map(lambda *x: jnp.concatenate(x), *rows)
    expected = losses(model, "grpo", config, batch)
    assert_same(losses(model, ours.register(), config, whole), expected)
    sequences = grpo(loss_agg_mode="sequence-mean-token-mean")  # where Tunix 0.1.7 takes the mean of a row for one
    assert_same(losses(model, ours.register(), sequences, whole), losses(model, "grpo", sequences, batch))


@pytest.mark.parametrize("name", ["Qwen 3", "Llama 3", "Gemma 2"])
def test_log_probs_of_a_pass(name):
    model, batch = MODELS[name](), example()
    expected = common.compute_per_token_logps(
        *nnx.split(model), batch.prompt_ids, batch.completion_ids, PAD, EOS, temperature=0.7
    )
    found = ours.log_probs(model, batch.prompt_ids, batch.completion_ids, pad_id=PAD, temperature=0.7)
    np.testing.assert_allclose(found, jnp.where(batch.completion_mask, expected, 0), rtol=1e-5, atol=1e-6)


def test_log_probs_of_the_actor_at_the_start_of_a_step():
    """Its agentic learner asks in micro-batches, and for the reference's too."""
    batch, mesh, found = example(), mesh_of(1, 1), []
    with mesh:
        for cluster_class in (clusters.RLCluster, ours.rl_cluster()):
            cluster = cluster_of(cluster_class, mesh)
            args = batch.prompt_ids, batch.completion_ids, PAD, EOS
            actor = cluster.get_actor_per_token_logps(*args, micro_batch_size=2)
            found.append(
                [jnp.where(batch.completion_mask, x, 0) for x in (actor, cluster.get_ref_per_token_logps(*args))]
            )
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)
    assert np.abs(found[1][0] - found[1][1]).max() > 1e-3


@pytest.mark.parametrize("module_path", [".*q_proj", ".*q_proj|lm_head"], ids=["frozen head", "adapted head"])
def test_adapters(module_path):
    qwix = need("qwix")
    provider = qwix.LoraProvider(module_path=module_path, rank=4, alpha=6.0)
    base = qwen()
    inputs = {"input_tokens": jnp.ones((2, 8), jnp.int32), "positions": jnp.ones((2, 8), jnp.int32), "cache": None}
    inputs["attention_mask"] = jnp.ones((2, 8, 8), bool)
    model = qwix.apply_lora_to_model(base, provider, **inputs, rngs=nnx.Rngs(0))

    # an adapter begins as 0
    def shake(x):
        return x + 0.1 * jnp.sin(jnp.arange(x.size)).reshape(x.shape)

    nnx.update(model, jax.tree.map(shake, nnx.state(model, nnx.LoRAParam)))
    name = ours.register(lora_scale=6.0 / 4)
    found = losses(model, name, grpo(), example(), nnx.LoRAParam)
    assert len(jax.tree.leaves(found[1])) == 4 + 2 * ("lm_head" in module_path)
    assert_same(found, losses(model, "grpo", grpo(), example(), nnx.LoRAParam))


def test_what_contradicts_the_learner_is_refused_by_name():
    name = ours.register(PolicyLossConfig(kl=KL(0.01)))
    with pytest.raises(ValueError, match=r"beta: got 0.04 in GRPOConfig, expected 0.01, the coefficient of config.kl"):
        losses(qwen(), name, grpo(), example())
    with pytest.raises(ValueError, match=r"batch.ref_log_probs: got None"):
        losses(qwen(), name, grpo(beta=0.01), example(ref_per_token_logps=None))
    weighted = example().replace(sampler_is_weights=jnp.ones((4, 7)))
    with pytest.raises(NotImplementedError, match=r"sampler_is_weights: got weights"):
        losses(qwen(), ours.register(), grpo(), weighted)
    with pytest.raises(TypeError, match=r"config: got str, expected PolicyLossConfig or None"):
        ours.register("grpo")
    with pytest.raises(ValueError, match=r"kl_clamp_value: got 5.0 with 'kl'"):
        ours.config_of(grpo(kl_clamp_value=5.0))


def described(mesh, batch, prompt, completion):
    """The arguments of a GRPO loss of a Qwen3 with two layers and a vocabulary of 151936, on a described mesh."""
    sizes = {"vocab_size": 151936, "embed_dim": 1024, "hidden_dim": 3072, "num_heads": 16, "num_kv_heads": 8}
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
    """64 rows of 1024 tokens on a described v5p of 16 chips; the figures stand in docs/frameworks.md."""
    topologies = need("jax.experimental.topologies")
    pytest.importorskip("libtpu", reason="libtpu is not installed: the extra aot")
    kinds = (jax.sharding.AxisType.Auto,) * 2
    devices = np.array(topologies.get_topology_desc("v5p:2x2x4", platform="tpu").devices).reshape(4, 4)
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
