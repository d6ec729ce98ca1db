"""A decoder on rows that share response tokens: loss, metrics and gradients of the same samples
whole, on any mesh.
"""

import functools
import itertools

import jax
import numpy as np
import pytest
from flax import nnx
from forked import V, forked
from policy_steps import config_of
from tables import sampled
from toy_decoder import decoder_on

from examples.trainer.attention import context_attention
from examples.trainer.model import ModelConfig
from jaxppo import (
    Head,
    RolloutBatch,
    finalize_metrics,
    log_probs_from_hidden,
    policy_loss,
    policy_loss_from_hidden,
)
from jaxppo.batch.token_trees import TokenTrees
from sharding import make_parallel_mesh
from sharding.axes import LAYOUTS
from sharding.testing import factorings

SAMPLES = forked(0).samples
LENGTH = 160
SMALL = ModelConfig(
    vocab_size=V, max_length=64, width=16, layers=1, heads=8, head_dim=4, mlp_width=32
)
KINDS = {"ppo": config_of("ppo"), "gspo": config_of("gspo", "rollout_mean")}


def hidden_of(model, batch, parallel):
    return model(batch.tokens, batch.positions, context_attention(batch.paths, parallel))


def whole(config, parallel, graphdef, params, batch):
    model = nnx.merge(graphdef, params)
    head = Head.of(model.head, vocab_size=V)
    return policy_loss_from_hidden(
        hidden_of(model, batch, parallel), head, batch, config, parallel=parallel
    )


def shared(config, parallel, graphdef, params, trees):
    model = nnx.merge(graphdef, params)
    rows = trees.rows
    given = hidden_of(model, rows, parallel), Head.of(model.head, vocab_size=V), rows.targets
    stats = log_probs_from_hidden(
        *given, where=rows.loss_mask > 0, entropy="bonus", parallel=parallel
    )
    return policy_loss(
        trees.to_batch(stats, parallel=parallel), trees.batch, config, parallel=parallel
    )


def run(loss_of, pack, kind, mesh, layout):
    """Loss, metrics and gradients of the samples, packed this way."""
    devices = None if mesh else jax.devices()[:1]
    parallel = make_parallel_mesh(mesh or "dp=1", context_layout=layout, devices=devices)
    graphdef, params = decoder_on(SMALL, parallel, seed=1)
    batch = pack(SAMPLES, row_length=LENGTH, parallel=parallel).put(parallel)
    fn = functools.partial(loss_of, KINDS[kind], parallel, graphdef)
    (loss, metrics), gradients = jax.jit(jax.value_and_grad(fn, has_aux=True))(params, batch)
    return jax.device_get((loss, finalize_metrics(metrics), gradients))


@functools.cache
def expected(kind):
    return run(whole, RolloutBatch.from_samples, kind, None, "contiguous")


MESHES = factorings(8)
CASES = [*itertools.product(["ppo"], MESHES, LAYOUTS)]
CASES += [("gspo", mesh, [*LAYOUTS][(i + 1) % len(LAYOUTS)]) for i, mesh in enumerate(MESHES)]
# by day each kind, over shards of data, context and tensor
DAY = {("ppo", "dp=2,cp=2,tp=2", "zigzag"), ("ppo", "dp=2,cp=4,tp=1", "zigzag_per_segment")}
DAY |= {case for case in CASES if case[:2] == ("gspo", "dp=1,cp=8,tp=1")}
BY_DAY = sampled(CASES, lambda i, case: case in DAY)


@pytest.mark.parametrize(("kind", "mesh", "layout"), BY_DAY)
def test_same_loss_metrics_and_gradients(kind, mesh, layout):
    loss, metrics, gradients = run(shared, TokenTrees.from_samples, kind, mesh, layout)
    wanted, numbers, slopes = expected(kind)
    assert abs(float(wanted)) > 1e-3
    np.testing.assert_allclose(loss, wanted, rtol=2e-5, atol=1e-7)
    assert metrics.keys() == numbers.keys()
    for name, value in numbers.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    for (path, got), want in zip(
        jax.tree.leaves_with_path(gradients), jax.tree.leaves(slopes), strict=True
    ):
        np.testing.assert_allclose(
            got, want, rtol=1e-4, atol=4e-6 * np.abs(want).max(), err_msg=str(path)
        )
