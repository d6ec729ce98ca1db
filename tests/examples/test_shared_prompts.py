"""The example's models on rows that are trees: loss, metrics and gradients of the same samples
whole, on any mesh.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llama
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from policy_steps import config_of
from shared_prompts import both, three_levels
from tables import sampled
from toy_decoder import decoder_on

from examples.trainer.arguments import parse
from examples.trainer.attention import attention, context_attention
from examples.trainer.grpo_run import set_up
from examples.trainer.model import ModelConfig
from examples.trainer.published import load_model, read_config
from jaxppo import Head, advantages, finalize_metrics, policy_loss_from_hidden
from sharding import make_parallel_mesh
from sharding.axes import LAYOUTS
from sharding.testing import factorings

SAMPLES = three_levels(0)
LENGTH = 160
SMALL = ModelConfig(
    vocab_size=50, max_length=64, width=16, layers=2, heads=8, head_dim=4, mlp_width=32
)


def model_on(kind, parallel, folder):
    """The structure and the parameters of a model, the same on every mesh."""
    if kind == "decoder":
        return decoder_on(SMALL, parallel, seed=1)
    settings = tiny_llama.GEMMA if kind == "gemma3" else {}
    tiny_llama.write(folder / kind, **settings)
    return load_model(folder / kind, read_config(folder / kind), parallel)


def step(graphdef, params, batch, parallel):
    """Loss, metrics and gradients of a step whose advantages are GAE's and the group's."""
    rewards = advantages.token_rewards(batch.rewards, batch, parallel=parallel)
    by_token, _ = advantages.gae(
        rewards, batch.values, batch, gamma=0.9, lam=0.8, parallel=parallel
    )
    # each part has a reward of its own here, so it counts as a rollout of its own
    by_group = advantages.grpo(batch.rewards, batch.group_ids, parallel=parallel)
    total = by_token + advantages.spread(by_group, batch, parallel=parallel)
    batch = dataclasses.replace(batch, advantages=total)

    def loss_of(params):
        model = nnx.merge(graphdef, params)
        hidden = model(batch.tokens, batch.positions, context_attention(batch.paths, parallel))
        head = Head.of(model.head, vocab_size=50)
        return policy_loss_from_hidden(
            hidden, head, batch, config_of("ppo", "rollout_mean"), parallel=parallel
        )

    (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(params)
    return loss, finalize_metrics(metrics), gradients


def run(kind, mesh, layout, folder, *, trees):
    devices = None if mesh else jax.devices()[:1]
    parallel = make_parallel_mesh(mesh or "dp=1", context_layout=layout, devices=devices)
    graphdef, params = model_on(kind, parallel, folder)
    batch = both(SAMPLES, row_length=LENGTH, parallel=parallel)[trees].put(parallel)
    return jax.device_get(
        jax.jit(functools.partial(step, graphdef, parallel=parallel))(params, batch)
    )


@functools.cache
def expected(kind, folder):
    return run(kind, None, "contiguous", folder, trees=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("model")


CASES = [*itertools.product(("decoder", "qwen3", "gemma3"), factorings(8), LAYOUTS)]
NORMS = {"decoder": 4, "qwen3": 4, "gemma3": 24}  # in all layers, beside those of queries and keys
# tensor shards: they divide the heads of keys and values
MOST = {"decoder": 8, "qwen3": 2, "gemma3": 1}
CASES = [case for case in CASES if int(case[1].rpartition("tp=")[2]) <= MOST[case[0]]]
# by day each layout, over shards of data, context and tensor
DAY = {
    ("decoder", "dp=2,cp=2,tp=2", "zigzag"),
    ("decoder", "dp=1,cp=8,tp=1", "striped"),
    ("decoder", "dp=2,cp=4,tp=1", "zigzag_per_segment"),
    ("decoder", "dp=1,cp=4,tp=2", "contiguous"),
    ("qwen3", "dp=2,cp=2,tp=2", "zigzag"),
    ("gemma3", "dp=2,cp=4,tp=1", "zigzag"),
}
BY_DAY = sampled(CASES, lambda i, case: case in DAY)


@pytest.mark.every(4)
@pytest.mark.parametrize(("kind", "mesh", "layout"), BY_DAY)
def test_same_loss_metrics_and_gradients(kind, mesh, layout, folder):
    loss, metrics, gradients = run(kind, mesh, layout, folder, trees=True)
    wanted, numbers, slopes = expected(kind, folder)
    assert abs(float(wanted)) > 1e-2
    np.testing.assert_allclose(loss, wanted, rtol=2e-6)
    assert metrics.keys() == numbers.keys()
    for name, value in numbers.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=1e-6, err_msg=name)
    for (path, got), want in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(slopes), strict=True
    ):
        allowed = 5e-7 * NORMS[kind] * np.abs(want).max()  # each divides a sum in another order
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=allowed, err_msg=str(path))


def test_there_is_less_to_compute():
    whole, trees = both(SAMPLES, row_length=LENGTH)
    assert (trees.segment_ids > 0).sum() <= 0.72 * (whole.segment_ids > 0).sum()


def arrays(batch, size=16, heads=2):
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(*batch.tokens.shape, heads, size)), jnp.float32)
        for _ in range(3)
    ]


def test_the_mask_of_jax_nn():
    _, batch = both(SAMPLES, row_length=LENGTH)
    q, k, v = arrays(batch)
    mask = batch.paths.attends(batch.paths)[:, None]
    found = jax.nn.dot_product_attention(q, k, v, mask=mask)
    np.testing.assert_allclose(
        found, attention(q, k, v, batch.paths, batch.paths), rtol=2e-5, atol=2e-6
    )


def test_the_mask_of_splash_attention():
    """A mask that is an array is data of the program: rows that are other trees compile nothing."""
    _, batch = both(SAMPLES, row_length=256)
    q, k, v = (jnp.moveaxis(x, 2, 1) for x in arrays(batch, size=128, heads=2))

    def row(q, k, v, mask):
        blocks = splash.BlockSizes(block_q=128, block_kv=128, block_kv_compute=128)
        of_heads = jnp.broadcast_to(mask, (2, *mask.shape))
        kernel = splash.make_splash_mha(
            of_heads, block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=True
        )
        return kernel(q * 128**-0.5, k, v)

    masks = batch.paths.attends(batch.paths)
    found = jnp.stack([row(*each) for each in zip(q, k, v, masks, strict=True)])
    wanted = attention(*(jnp.moveaxis(x, 1, 2) for x in (q, k, v)), batch.paths, batch.paths)
    real = batch.segment_ids > 0
    np.testing.assert_allclose(np.moveaxis(found, 1, 2)[real], wanted[real], rtol=2e-4, atol=2e-5)


def test_a_model_with_a_recurrent_state(tmp_path):
    options = [
        "--width",
        "16",
        "--layers",
        "1",
        "--prompts",
        "4",
        "--samples",
        "4",
        "--held-out",
        "8",
    ]
    made = set_up(parse([*options, "--share-prefixes", "--out", str(tmp_path)]))
    batch = made.pack(made.rollouts.own(SAMPLES[:8]))
    assert batch.parents is not None
    model = nnx.merge(made.learner.graphdef, made.state.params)
    type(model).recurrent = True
    try:
        with pytest.raises(
            ValueError, match="batch: got rows packed as trees for a model with recurrent state"
        ):
            made.learner.token_stats(made.state.variables, batch)
    finally:
        del type(model).recurrent
