"""jaxppo's loss in Tunix's experimental trainer: batches of its adapter, its `with_loss_fn`, its
worker.

Tunix's releases have no experimental path in August 2026. This file ran on its main branch (commit
c7d8950):
PYTHONPATH=.../tunix python -m pytest tests/integrations/test_tunix_experimental.py --nightly
"""

import functools
import pickle
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tunix_steps import EOS, PAD, V, mesh_of, need, qwen

from jaxppo import KL, PPO, PolicyLossConfig
from jaxppo.integrations import tunix as ours
from sharding import ParallelMesh

need = functools.partial(
    need, reason="this Tunix has no experimental path: a checkout of its main branch has one"
)
adapters = need("tunix.experimental.orchestrator.algorithm_adapter")
assembly = need("tunix.experimental.orchestrator.batch_assembly")
datatypes = need("tunix.experimental.common.datatypes")
trainers = need("tunix.experimental.train.peft_trainer_v2")
workers = need("tunix.experimental.worker.trainer_worker")
cloudpickle = need("cloudpickle")

pytestmark = pytest.mark.nightly
P, C = 5, 7
CONFIG = PolicyLossConfig(PPO(), kl=KL(0.04, "k2"), aggregation="sequence_mean_token_mean")


def algo_config(**options):
    """As the example math_gsm8k_dist of Tunix makes it."""
    defaults = {
        "beta": 0.04,
        "epsilon": 0.2,
        "loss_algo": "grpo",
        "loss_agg_mode": "sequence-mean-token-mean",
    }
    defaults |= {"temperature": 0.7, "kl_loss_mode": "mse_kl", "kl_clamp_value": None}
    return SimpleNamespace(**(defaults | options))


def payloads(adapter):
    """Two groups of three samples: prompts and completions of several lengths, with a tool's
    tokens in some of them.
    """
    rng = np.random.default_rng(0)
    found = []
    for group in range(2):
        prompt = rng.integers(2, V, 2 + 2 * group)
        items = []
        for i in range(3):
            item = datatypes.TrajectoryItem(
                pair_index=i, group_id=str(group), start_step=0, traj=None
            )
            item.prompt_tokens, item.completion_tokens = prompt, rng.integers(2, V, 3 + i + group)
            item.action_mask = np.arange(3 + i + group) != 1 + i
            items.append(item)
        refs = [rng.normal(-4, 0.3, len(item.completion_tokens)) for item in items]
        made = adapter.create_trainer_payloads(items, rewards=rng.normal(size=3), ref_logps=refs)
        for payload in made:
            payload.old_per_token_logps = rng.normal(-4.1, 0.2, len(payload.completion_ids))
        found += made
    return found


def micro_batches(rows):
    """The batches of an adapter. Rows that the samples do not fill are padding."""
    adapter = adapters.GRPOAdapter(group_size=3)
    shape = {"max_prompt_length": P, "max_response_length": C, "pad_id": PAD}
    found = assembly.GRPOTrainExampleAssembler(batch_size=rows, **shape).pack(payloads(adapter))
    for batch in found:
        assert np.ptp(batch.advantages[batch.completion_mask > 0]) > 1e-3
    return found


def value_and_gradient(loss_fn, model, batch, config):
    """((loss, metrics), gradient), divided as the trainer divides them."""

    @nnx.jit
    def step(model, batch):
        def loss(model):
            found = loss_fn(model, batch, config, PAD, EOS)
            return found.primary_loss.compute(), found.aux_metrics

        return nnx.value_and_grad(loss, has_aux=True)(model)

    (loss, metrics), gradient = step(model, jax.tree.map(jnp.asarray, batch))
    return (
        loss,
        {k: m.compute() if hasattr(m, "compute") else m for k, m in metrics.items()},
        gradient,
    )


@pytest.mark.parametrize("aggregation", ["sequence-mean-token-mean", "token-mean"])
@pytest.mark.parametrize("given", [True, False], ids=["a config of ours", "theirs"])
def test_loss_gradient_and_metrics_beside_their_adapters(given, aggregation):
    [batch], model, config = micro_batches(6), qwen(), algo_config(loss_agg_mode=aggregation)
    mine = (
        PolicyLossConfig(PPO(), kl=KL(0.04, "k2"), aggregation=aggregation.replace("-", "_"))
        if given
        else None
    )
    expected = value_and_gradient(adapters.GRPOAdapter().loss_fn(), model, batch, config)
    loss, metrics, gradient = value_and_gradient(ours.loss_fn(mine), model, batch, config)
    # with all advantages at their mean the loss is 0.24 off, at temperature 1 it is 0.11 off
    np.testing.assert_allclose(loss, expected[0], rtol=2e-5, atol=1e-6)
    for name in ("kl", "pg_clipfrac"):
        np.testing.assert_allclose(metrics[name], expected[1][name], rtol=2e-5, atol=1e-6)
    assert 0 < metrics["pg_clipfrac"] < 1
    assert metrics["kl"] > 1e-3
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), gradient, expected[2])


def model_input(train_example, config):
    return {"train_example": train_example, "algo_config": config, "pad_id": PAD, "eos_id": EOS}


def trained(loss_fn, mesh=None):
    """The losses, gradient norms and parameters of two steps of two micro-batches, of four
    samples and of two.
    """
    options = {"eval_every_n_steps": 100, "gradient_accumulation_steps": 2}
    parts = {"optimizer": optax.sgd(0.02), "training_config": trainers.TrainingConfig(**options)}
    model = qwen(num_heads=4, num_kv_heads=4)
    if mesh is not None:
        graph, state = nnx.split(model)
        specs = nnx.get_partition_spec(state)
        model = nnx.merge(
            graph,
            jax.tree.map(lambda x, s: jax.device_put(x, jax.NamedSharding(mesh, s)), state, specs),
        )
    made = []
    worker = workers.TrainerWorker(
        lambda: made.append(trainers.PeftTrainer(model, **parts)) or made[0]
    )
    worker.with_loss_fn(loss_fn, has_aux=True)
    worker.with_gen_model_input_fn(functools.partial(model_input, config=algo_config()))
    logged = []
    for _ in range(2):
        for batch in micro_batches(4):
            worker.fwd_bwd(batch)
        losses = list(made[0]._buffered_train_metrics.losses)
        worker.update()
        logged.append([float(x) for x in (*losses, made[0]._last_update_grad_norm)])
    return np.array(logged), nnx.state(made[0].model, nnx.Param)


def test_steps_of_their_worker_with_a_loss_that_was_sent_to_it():
    theirs, parameters = trained(adapters.GRPOAdapter().loss_fn())
    found, mine = trained(cloudpickle.loads(cloudpickle.dumps(ours.loss_fn(CONFIG))))
    assert theirs.shape == (2, 3)
    assert np.ptp(theirs[:, 2]) > 1e-5
    np.testing.assert_allclose(found, theirs, rtol=2e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), mine, parameters)


def mesh_here():
    return ParallelMesh(mesh_of(2, 2))


def test_steps_on_a_mesh_that_is_made_where_the_loss_runs():
    sent = pickle.loads(pickle.dumps(ours.loss_fn(CONFIG, mesh_here)))
    with mesh_of(2, 2) as mesh:
        theirs, parameters = trained(adapters.GRPOAdapter().loss_fn(), mesh)
        found, mine = trained(sent, mesh)
    np.testing.assert_allclose(found, theirs, rtol=2e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-6), mine, parameters)


@pytest.mark.parametrize(
    "assembler", [assembly.PaddedBatchAssembler, assembly.SequencePackedBatchAssembler]
)
def test_payloads_of_whole_sequences_are_refused(assembler):
    """Tunix's own losses do not read them either: they look for prompts and completions."""
    payload, *_ = assembler(pad_id=PAD).pack(payloads(adapters.GRPOAdapter(group_size=3)))
    with pytest.raises(
        TypeError, match=r"train_example: got RLTrainerPayload without completion_ids, expected"
    ):
        ours.loss_fn(CONFIG)(qwen(), payload, algo_config(), PAD, EOS)
