"""jaxppo's loss beside simply's own, in simply's model and training step.

simply needs Python 3.12 and is on no package index. This file ran on version 0.3.9 (commit e14c061):
PYTHONPATH=.../simply python -m pytest tests/integrations/test_simply.py --nightly
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from simply_batches import V, fields

from jaxppo import KL, PPO, ParallelMesh, PolicyLossConfig
from jaxppo.integrations import simply as ours

need = functools.partial(pytest.importorskip, reason="simply is not installed: a checkout of it is on no path")
model_lib, rl_lib, configs = need("simply.model_lib"), need("simply.rl_lib"), need("simply.config_lib")
optimizers, shardings = need("simply.utils.optimizers"), need("simply.utils.sharding")

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
    config = dataclasses.replace(configs.lm_test(), vocab_size=V, activation_dtype_name="float32", **options)
    model, _ = model_lib.create_model(config, config.sharding_config)
    params = model.init(jax.random.key(0))
    # a bias begins as 0
    return model, jax.tree.map(lambda x: x + 0.3 * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)


def both(model, params, batch, mine, theirs):
    """((loss, metrics), gradient) of both losses."""
    losses = functools.partial(rl_lib.compute_ppo_loss, **theirs), mine

    def of(loss):
        return jax.jit(jax.value_and_grad(lambda p, b: loss(model, p, b), has_aux=True))(params, batch)

    return of(losses[0]), of(losses[1])


def assert_same(theirs, found):
    ((value, metrics), gradient), ((mine, logged), my_gradient) = theirs, found
    # with 1e-2 instead of 1e-5 beside the deviation of rewards the loss is 0.4% off
    np.testing.assert_allclose(mine, value, rtol=2e-5, atol=1e-6)
    for name, of_theirs in {"entropy": "entropy", "kl": "kl_divergence", "loss_weight": "loss_weight"}.items():
        if name in logged:
            np.testing.assert_allclose(logged[name], metrics[of_theirs], rtol=2e-5, atol=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-6), my_gradient, gradient)
    assert max(float(jnp.abs(x).max()) for x in jax.tree.leaves(gradient)) > 1e-2


def test_rewards_differ():
    assert np.ptp(BATCH.reward[BATCH.is_valid_for_training]) > 1e-3


def test_options_and_their_defaults_are_those_of_its_loss():
    """Its loop calls the loss with these names."""
    theirs, mine = (inspect.signature(f).parameters.values() for f in (rl_lib.compute_ppo_loss, ours.loss_fn()))
    defaults = [{p.name: p.default for p in found if p.default is not p.empty} for found in (theirs, mine)]
    assert defaults[0] == defaults[1] | ours._OF_LOSS


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
    config = PolicyLossConfig(PPO(clip_high=0.28, dual_clip=10.0), kl=KL(0.1, "k3"), ratio_to="rollout")
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
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6), found[1], found[0])
    moved = jax.tree.map(lambda x, y: float(jnp.abs(x - y).max()), found[1][1], params)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_on_its_meshes():
    names = configs.lm_test().sharding_config.mesh_axis_names
    mesh = shardings.create_mesh((2, 2, 2), axis_names=names)
    with jax.sharding.set_mesh(mesh):
        model, params = made()
        batch = jax.tree.map(lambda x: np.concatenate([x, x[:2]]), BATCH)
        parallel = ParallelMesh(mesh, data="replica", fsdp="data")
        mine = functools.partial(ours.loss_fn(parallel=parallel), **GRPO)
        assert_same(*both(model, params, batch, mine, GRPO))
