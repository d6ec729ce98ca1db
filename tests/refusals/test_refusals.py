"""Calls that once ended in an error of Python's or JAX's own: each names the argument, what
came, what was expected.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from padded_batches import aligned, padded, shifted

from jaxppo import (
    PPO,
    Head,
    PolicyLossConfig,
    RolloutBatch,
    Sample,
    ShardAxes,
    accumulate_gradients,
    advantages,
    log_probs_from_hidden,
    make_parallel_mesh,
)
from jaxppo.base.metrics import Metric
from jaxppo.sharding import audit, pack, shift_left

MESH = make_parallel_mesh("dp=4,tp=2")
SAMPLES = [Sample([5, 6, 7], response_start=1) for _ in range(8)]
BATCH = RolloutBatch.from_samples(SAMPLES, row_length=4, parallel=MESH)
ROWS = np.ones((8, 4), np.float32)
LISTS = [[1, 1, 1, 1]]


def summed(w, x):
    return jnp.sum(w * x), {"largest": Metric(x.max(), jnp.float32(1), "max")}


def scalar_alone(w, x):
    return (w * x).sum()


def loss_of_each(w, x):
    return w * x, {}


def text_for_loss(w, x):
    return "a", {}


def metrics_of_numbers(w, x):
    return (w * x).sum(), {"a": x}


def list_for_metrics(w, x):
    return (w * x).sum(), [x]


def one_metric(w, x):
    return jnp.sum(w * x), Metric(x.max(), jnp.float32(1), "max")


PARAMS = np.ones(3, np.float32)
MICRO_BATCHES = np.ones((2, 3), np.float32)


def accumulated(loss_fn=summed, micro_batches=MICRO_BATCHES, params=PARAMS):
    return accumulate_gradients(loss_fn, micro_batches)(params)


def inside(parallel, over):
    """A function of a mesh in the caller's own `shard_map` over some of its axes."""
    spec = P("dp") if "dp" in over else P()
    options = {"mesh": MESH.mesh, "in_specs": spec, "out_specs": spec, "axis_names": set(over)}
    run = jax.shard_map(partial(shift_left, parallel=parallel), **options)
    return jax.jit(run)(ROWS)


def mapped(parallel):
    return jax.pmap(partial(shift_left, parallel=parallel), axis_name="i")(
        np.ones((8, 8, 4), np.float32)
    )


KERNEL = np.ones((6, 16), np.float32)


def head(**options):
    hidden = np.ones((1, 2, 6), np.float32)
    targets = np.zeros((1, 2), np.int32)
    return log_probs_from_hidden(hidden, KERNEL, targets, **options)


NEEDS = "expected axes of the shard_map around this call"
REFUSED = {
    # a mesh and its roles
    "put on a mesh": (
        partial(BATCH.put, MESH.mesh),
        r"parallel: got Mesh, .*; ParallelMesh\(mesh\) gives its axes",
    ),
    "put on nothing": (partial(BATCH.put, None), "parallel: got None, expected ParallelMesh$"),
    "put on roles": (
        partial(BATCH.put, MESH.axes),
        "parallel: got ShardAxes, expected ParallelMesh$",
    ),
    "pack for a mesh": (
        partial(pack, LISTS, row_length=4, parallel=MESH.mesh),
        "parallel: got Mesh, expected",
    ),
    "samples for a mesh": (
        partial(RolloutBatch.from_samples, SAMPLES, row_length=4, parallel=MESH.mesh),
        "parallel: got Mesh, expected ParallelMesh or None",
    ),
    "padded for roles": (
        partial(padded, parallel=MESH.axes),
        "parallel: got ShardAxes, expected ParallelMesh or None",
    ),
    "a shift on a mesh": (
        partial(shift_left, ROWS, MESH.mesh),
        "parallel: got Mesh, expected ParallelMesh, ShardAxes",
    ),
    "a size that is no digit": (partial(make_parallel_mesh, "dp=²"), "mesh: got 'dp=²'"),
    "a mesh in a part of it": (
        partial(inside, MESH, ["dp"]),
        r"parallel: got ParallelMesh in shift_left .*\('dp',\)",
    ),
    "a mesh in all of it": (
        partial(inside, MESH, ["dp", "tp"]),
        "parallel: got ParallelMesh in shift_left inside",
    ),
    "roles in a part of the mesh": (
        partial(inside, MESH.axes, ["dp"]),
        f"parallel: got mesh axis 'tp' .*{NEEDS}",
    ),
    "roles outside": (
        partial(shift_left, ROWS, ShardAxes(data="dp")),
        f"parallel: got mesh axis 'dp' .*{NEEDS}",
    ),
    "a mesh in a pmap": (
        partial(mapped, MESH),
        "parallel: got ParallelMesh in shift_left inside a shard_map or pmap",
    ),
    "roles in a pmap": (
        partial(mapped, ShardAxes(data="i")),
        "shard_map around this call: got .* use a shard_map$",
    ),
    # arrays
    "prompts of lists": (partial(padded, prompt_ids=LISTS), "prompt_ids: got list"),
    "completions of lists": (partial(padded, completion_ids=LISTS), "completion_ids: got list"),
    "no completions": (partial(padded, completion_ids=None), "completion_ids: got None"),
    "a mask of lists": (partial(padded, completion_mask=LISTS), "completion_mask: got list"),
    "no completion mask": (partial(padded, completion_mask=None), "completion_mask: got None"),
    "an attention mask of lists": (
        partial(padded, attention_mask=[[1] * 8]),
        "attention_mask: got list",
    ),
    "advantages of lists": (partial(padded, advantages=[1.0]), "advantages: got list"),
    "segments of lists": (partial(aligned, segment_ids=LISTS), "segment_ids: got list"),
    "no segments": (partial(aligned, segment_ids=None), "segment_ids: got None"),
    "no positions": (partial(aligned, positions=None), "positions: got None"),
    "no loss mask": (partial(aligned, loss_mask=None), "loss_mask: got None"),
    # a batch of others' targets, once
    "no targets": (partial(shifted, targets=None), "targets: got None"),
    "no vocabulary": (BATCH.validate, "vocab_size: got None"),
    # numbers
    "no discount": (partial(advantages.gae, ROWS, ROWS, BATCH, gamma=None), "gamma: got None"),
    "a length of no tokens": (
        partial(advantages.gae, ROWS, ROWS, BATCH, length_alpha=0),
        "length_alpha: got 0",
    ),
    "a lambda of text": (partial(advantages.gae, ROWS, ROWS, BATCH, lam="1"), "lam: got '1'"),
    "a discount that is an array": (
        partial(advantages.discounted_returns, ROWS, BATCH, gamma=jax.device_put(np.ones(4))),
        r"gamma: got Array",
    ),
    # micro-batches
    "integer parameters": (partial(accumulated, params=np.ones(3, int)), "params: got dtype int64"),
    "parameters of numbers": (partial(accumulated, params={"w": 1.0}), r"params\['w'\]: got float"),
    "a loss alone": (
        partial(accumulated, scalar_alone),
        r"loss_fn: got an array of shape \(\)",
    ),
    "a loss of each": (
        partial(accumulated, loss_of_each),
        r"loss_fn: got a loss of shape \(3,\)",
    ),
    "a loss of text": (partial(accumulated, text_for_loss), "loss_fn: got str"),
    "metrics of numbers": (
        partial(accumulated, metrics_of_numbers),
        "loss_fn: got .* metric 'a'",
    ),
    "metrics of lists": (
        partial(accumulated, list_for_metrics),
        "loss_fn: got list for metric",
    ),
    "no loss": (partial(accumulated, "loss"), "loss_fn: got str"),
    "micro-batches of lists": (
        partial(accumulated, micro_batches=[[1.0]]),
        r"micro_batches\[0\]\[0\]: got float",
    ),
    "no micro-batches": (
        partial(accumulated, micro_batches=None),
        "micro_batches: got leading dimensions",
    ),
    # audits
    "an audit of text": (partial(audit, "f"), "fn: got str"),
    "an audit on roles": (partial(audit, jnp.sin, ROWS, mesh=MESH), "mesh: got ParallelMesh"),
    # options that live elsewhere
    "a temperature of a loss": (
        partial(PolicyLossConfig, temperature=1.0),
        "temperature: got 1.0 .*log_probs_from_hid",
    ),
    "a clip of a config": (
        partial(PolicyLossConfig, clip_high=0.28),
        r"clip_high: got 0.28 .*loss=PPO\(clip_high=",
    ),
    "a KL's estimator": (
        partial(PolicyLossConfig, estimator="k3"),
        r"estimator: got 'k3' .*kl=KL\(estimator=",
    ),
    "a correction's veto": (
        partial(PolicyLossConfig, veto=0.1),
        r"veto: got 0.1 .*off_policy=OffPolicyConfig\(veto=",
    ),
    "an unknown option": (
        partial(PolicyLossConfig, size=0.1),
        "size: got 0.1 .*expected one of loss, kl, ",
    ),
    # a head's options
    "a precision of no name": (partial(head, precision="lowest"), "precision: got 'lowest'"),
    "a precision of each": (partial(head, precision=("high", "high")), "precision: got"),
    "logits in another dtype": (
        partial(Head, KERNEL, logits_dtype=jnp.float16),
        "logits_dtype: got 'float16'",
    ),
    "logits in no dtype": (partial(Head, KERNEL, logits_dtype=None), "logits_dtype: got None"),
    "a flag of text": (partial(head, deterministic="no"), "deterministic: got 'no'"),
    "a mask's flag of text": (partial(head, follow_mask="no"), "follow_mask: got 'no'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, pattern = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) in (ValueError, TypeError)  # and none of JAX's own
    assert re.match(pattern, message, re.DOTALL), message
    assert re.search(r": got .*, expected ", message, re.DOTALL), message


def test_what_a_message_advises_is_taken():
    """Roles within a `shard_map` over the whole mesh, and options where the message puts them."""
    np.testing.assert_array_equal(inside(MESH.axes, ["dp", "tp"]), shift_left(ROWS))
    (_, largest), _ = accumulated(one_metric)
    assert largest.value == 1  # one metric, without a name
    assert PolicyLossConfig(loss=PPO(clip_high=0.28)).loss.clip_high == 0.28


def test_advice_under_pmap_is_not_what_the_next_error_forbids():

    def whitened(x):
        return advantages.whiten(x, x)

    with pytest.raises(
        ValueError,
        match=r"got no role for mesh axis 'i' .* in a shard_map with check_vma=True in its",
    ):
        jax.pmap(whitened, axis_name="i")(np.ones((8, 8, 4), np.float32))
