"""jaxppo's loss beside simply's own, in simply's model and training step.

simply needs Python 3.12 and is on no package index. This file ran on version 0.3.9 (commit
e14c061):
NPROC=64 PYTHONPATH=.../simply python -m pytest tests/integrations/test_simply.py --nightly
NPROC is the number of XLA's threads. By default there are eight for eight devices, and a device may
wait with two of them for others that then have none; XLA ends the process after 40 seconds.
"""

import dataclasses
import functools
import inspect
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simply_batches import V, fields

from jaxppo import KL, PPO, ParallelMesh, PolicyLossConfig
from jaxppo.integrations import simply as ours

need = functools.partial(
    pytest.importorskip, reason="simply is not installed: a checkout of it is on no path"
)
model_lib = need("simply.model_lib")
rl_lib = need("simply.rl_lib")
configs = need("simply.config_lib")
data_lib = need("simply.data_lib")
evaluations = need("simply.utils.evaluation_lib")
optimizers = need("simply.utils.optimizers")
shardings = need("simply.utils.sharding")
replay_buffers = need("simply.utils.replay_buffers")
tokenization = need("simply.utils.tokenization")

pytestmark = pytest.mark.nightly
BATCH = rl_lib.RLTrainingExampleBatch(**fields())
GRPO = {"use_grpo": True, "kl_coeff": 0.1, "ppo_clip_eps_high": 0.28}


@pytest.fixture(autouse=True)
def one_device():
    """The mesh that simply's functions find, if a test sets no other."""
    names = configs.lm_test().sharding_config.mesh_axis_names
    kinds = (jax.sharding.AxisType.Auto,) * len(names)
    with jax.sharding.set_mesh(jax.make_mesh((1, 1, 1), names, kinds, devices=jax.devices()[:1])):
        yield


def made(**options):
    config = dataclasses.replace(
        configs.lm_test(), vocab_size=V, activation_dtype_name="float32", **options
    )
    model, _ = model_lib.create_model(config, config.sharding_config)
    params = model.init(jax.random.key(0))
    # a bias begins as 0
    return model, jax.tree.map(
        lambda x: x + 0.3 * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params
    )


def both(model, params, batch, mine, theirs):
    """((loss, metrics), gradient) of both losses."""
    losses = functools.partial(rl_lib.compute_ppo_loss, **theirs), mine

    def of(loss):
        program = jax.jit(jax.value_and_grad(lambda p, b: loss(model, p, b), has_aux=True))
        # two programs at a time may wait for each other, where devices are threads
        return jax.block_until_ready(program(params, batch))

    return of(losses[0]), of(losses[1])


def assert_same(theirs, found):
    ((value, metrics), gradient), ((mine, logged), my_gradient) = theirs, found
    # with 1e-2 instead of 1e-5 beside the deviation of rewards the loss is 0.4% off
    np.testing.assert_allclose(mine, value, rtol=2e-5, atol=1e-6)
    names = {"entropy": "entropy", "loss_weight": "loss_weight", "ratio_max": "policy_ratio/max"}
    for name, of_theirs in (names | {"kl": "kl_divergence"} if "kl" in logged else names).items():
        if name != "ratio_max" or metrics[of_theirs] < 1.4:  # theirs is after its cap
            np.testing.assert_allclose(logged[name], metrics[of_theirs], rtol=2e-5, atol=1e-6)
    assert logged["broken_rules_max"] == 0
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), my_gradient, gradient)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) > 1e-2


def test_rewards_differ():
    assert np.ptp(BATCH.reward[BATCH.is_valid_for_training]) > 1e-3


def test_options_and_their_defaults_are_those_of_its_loss():
    """Its loop calls the loss with these names."""
    functions = rl_lib.compute_ppo_loss, ours.config_of, ours.advantages_of
    names = [inspect.signature(f).parameters.values() for f in functions]
    defaults = [{p.name: p.default for p in found if p.default is not p.empty} for found in names]
    assert defaults[0] == defaults[1] | defaults[2]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_tied_embedding": False},
        {"output_layer_use_bias": False, "output_logits_soft_cap": -1.0},
        {"use_scan": False, "output_logits_soft_cap": 2.0},
    ],
    ids=["tied", "untied", "no bias, no soft-cap", "soft-cap of 2"],
)
def test_heads(options):
    model, params = made(**options)
    mine = functools.partial(ours.loss_fn(), **GRPO)
    assert_same(*both(model, params, BATCH, mine, GRPO))


@pytest.mark.parametrize(
    "theirs",
    [
        {"gamma": 0.9},
        {"normalize_advantage": False},
        {"max_abs_advantage": 0.5},
        {"policy_ratio_cap": 1.5},
        {"policy_ratio_cap": None},
        {"use_policy_logp_as_sampler_logp": True},
        {"use_grpo": False, "kl_coeff": 0.0, "gamma": 0.9},
    ],
    ids=lambda theirs: ", ".join(theirs),
)
def test_options_of_its_loss(theirs):
    model, params = made()
    mine = functools.partial(ours.loss_fn(), **(GRPO | theirs))
    assert_same(*both(model, params, BATCH, mine, GRPO | theirs))


def test_a_config_of_ours():
    model, params = made()
    config = PolicyLossConfig(
        PPO(clip_high=0.28, dual_clip=10.0), kl=KL(0.1, "k3"), ratio_to="rollout"
    )
    assert_same(*both(model, params, BATCH, ours.loss_fn(config), GRPO))


def test_without_a_reference_the_sampler_is_one():
    model, params = made()
    batch = dataclasses.replace(BATCH, ref_logprobs=None)
    assert_same(*both(model, params, batch, functools.partial(ours.loss_fn(), **GRPO), GRPO))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_training_step(parts):
    """Its micro-batches have three samples each, with 6 and 5 tokens that train."""
    model, params = made()
    state = optimizers.SGD().init(params)
    step = functools.partial(
        model_lib.train_one_step, model=model, opt=optimizers.SGD(), lr=0.1, grad_accum_steps=parts
    )
    found = []
    for loss in (rl_lib.compute_ppo_loss, ours.loss_fn()):
        custom = functools.partial(loss, **GRPO)
        value, after, _ = jax.jit(functools.partial(step, custom_loss_fn=custom))(state, BATCH)
        found.append((value, after["params"]))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), found[1], found[0])
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), found[1][1], params)
    assert max(jax.tree.leaves(moved)) > 1e-3


THREADS = pytest.mark.skipif(
    int(os.environ.get("NPROC", 0)) < 32, reason="XLA has few threads: set NPROC=64"
)


@THREADS
def test_on_its_meshes():
    names = configs.lm_test().sharding_config.mesh_axis_names
    mesh = shardings.create_mesh((2, 2, 2), axis_names=names)
    with jax.sharding.set_mesh(mesh):
        model, params = made()
        batch = jax.tree.map(lambda x: np.concatenate([x, x[:2]]), BATCH)
        parallel = ParallelMesh(mesh, data="replica", fsdp="data")
        mine = functools.partial(ours.loss_fn(parallel=parallel), **GRPO)
        assert_same(*both(model, params, batch, mine, GRPO))


@data_lib.DataSourceRegistry.register
@dataclasses.dataclass(frozen=True)
class Questions:
    name: str = "questions"

    def __len__(self):
        return 64

    def __getitem__(self, i):
        return {"question": "ab"[i % 2]}


@evaluations.EvaluationRegistry.register
@dataclasses.dataclass(frozen=True)
class OddLetters(evaluations.Evaluation):
    def get_messages(self, example):
        return [{"role": "user", "content": example["question"]}]

    def evaluate(self, example, response):
        reward = sum(ord(letter) % 2 for letter in response) / 8
        return {"correct": reward > 0.5, "reward": reward}


def loop_config():
    """Four steps of its smallest configuration, two on each batch of samples, in two
    micro-batches each.
    """
    options = {
        "vocab_name": "Bytes",
        "vocab_size": 304,
        "lm_format_name": "Pretrain",
        "extra_eos_tokens": (),
    }
    options |= {
        "batch_size": 4,
        "num_samples_per_example": 4,
        "train_batch_size": 16,
        "num_train_steps_per_batch": 2,
    }
    options |= {"train_max_seq_len": 12, "sampling_max_input_len": 4, "sampling_prefill_size": 4}
    options |= {
        "mesh_shape": (2, 2, 2),
        "decoding_mesh_shape": (2, 2, 2),
        "num_train_steps": 3,
        "early_stop": None,
    }
    options |= {
        "lr": optimizers.LinearWarmupConstant(value=1e-2, warmup_steps=1),
        "evaluation": OddLetters(),
    }
    source = data_lib.DatasetConfig(
        source=Questions(), packing=data_lib.PACKING_NONE, lm_format_name=None
    )
    return dataclasses.replace(configs.lm_rl_test(), dataset=source, **options)


@THREADS
def test_its_loop(monkeypatch):
    """Samples are drawn and put in order by the same numbers, so they differ as soon as the
    parameters do.
    """
    tokenization.TokenizerRegistry.register(tokenization.ByteVocab, "Bytes")
    buffer = replay_buffers.ReplayBuffer
    step = model_lib.train_one_step
    found = []
    monkeypatch.setattr(replay_buffers, "ReplayBuffer", lambda size: buffer(size, seed=0))
    mesh = shardings.create_mesh(
        (2, 2, 2), axis_names=configs.lm_test().sharding_config.mesh_axis_names
    )
    parallel = ParallelMesh(mesh, data="replica", fsdp="data")
    for loss in (rl_lib.compute_ppo_loss, ours.loss_fn(parallel=parallel)):
        logged = []

        def noted(*args, logged=logged, **kwargs):
            made = step(*args, **kwargs)
            jax.debug.callback(
                lambda *x: logged.append([float(y) for y in x]), made[0], made[2]["entropy"]
            )
            return made

        monkeypatch.setattr(model_lib, "train_one_step", noted)
        monkeypatch.setattr(rl_lib, "compute_ppo_loss", loss)
        rl_lib.run_experiment(loop_config())
        jax.effects_barrier()
        found.append(logged)
    assert np.shape(found) == (2, 4, 2)
    assert np.ptp(found, axis=1).min() > 1e-3
    np.testing.assert_allclose(found[1], found[0], rtol=2e-5, atol=1e-6)
