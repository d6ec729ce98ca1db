"""A step of micro-batches on a mesh: the gradients of a head's parameters, and of a model in a
caller's `shard_map`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from policy_steps import step_of

from jaxppo import (
    Head,
    LoRA,
    Normalizer,
    ParallelMesh,
    PolicyLossConfig,
    RolloutBatch,
    ShardAxes,
    accumulate_gradients,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from sharding.audit import audit
from sharding.testing import assert_trees_close

K, T, H, V = 4, 12, 16, 256
BATCH = RolloutBatch.from_samples(step_of(0), row_length=T, rows=2, num_segments=4, micro_batches=K)
HIDDEN = jax.random.normal(jax.random.key(0), (K, 2, T, H))
CONFIG = PolicyLossConfig(entropy_coef=0.01)
NORMALIZER = Normalizer.of(CONFIG, BATCH)


def mesh_of(kind=AxisType.Auto):
    return ParallelMesh(jax.make_mesh((2, 2, 2), ("dp", "cp", "tp"), axis_types=(kind,) * 3))


def params_of(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = {"kernel": (H, V), "bias": (V,), "a": (H, 4), "b": (4, V)}

    def draw(key, shape):
        return (jax.random.normal(key, shape) / 4).astype(dtype)

    return {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def head_of(params, dtype=None):
    def cast(x):
        return x if dtype is None else x.astype(dtype)

    return Head(
        cast(params["kernel"]),
        cast(params["bias"]),
        LoRA(cast(params["a"]), cast(params["b"]), 0.5),
    )


def one_pass(params, part, parallel, dtype=None):
    hidden, batch, normalizer = part
    options = {"parallel": parallel, "normalizer": normalizer}
    return policy_loss_from_hidden(hidden, head_of(params, dtype), batch, CONFIG, **options)


def two_passes(params, part, parallel, dtype=None):
    """A loss whose cotangents depend on the micro-batch twice: by token, and by a common
    divisor.
    """
    hidden, batch, _ = part
    options = {"parallel": parallel, "where": batch.loss_mask > 0, "entropy": "bonus"}
    stats = log_probs_from_hidden(hidden, head_of(params, dtype), batch.targets, **options)
    total = (stats.log_probs * batch.advantages).sum() + (
        stats.log_probs.mean() * stats.entropy
    ).sum()
    return total / jnp.maximum(batch.loss_mask.sum(), 1), {}


def one_by_one(loss_fn, params, micro_batches):
    """The sum without `accumulate_gradients`."""
    gradient = jax.jit(jax.grad(lambda params, part: loss_fn(params, part)[0]))
    parts = [gradient(params, jax.tree.map(lambda x, k=k: x[k], micro_batches)) for k in range(K)]

    def total(*xs):
        return sum(np.asarray(x, np.float32) for x in xs).astype(xs[0].dtype)

    return jax.tree.map(total, *parts)


def sums(step, params, micro_batches, mesh):
    """(operation, bytes) of what crosses data or context axes in the loop, and after it; scalars
    are left out.
    """
    found = audit(step, params, micro_batches, mesh=mesh).collectives
    large = [c for c in found if set(c.axes) & {"dp", "cp"} and c.bytes > 64]
    return [[(c.op, c.bytes) for c in large if c.in_loop is inside] for inside in (True, False)]


def sizes(params, shards):
    """The f32 bytes of the sums of all gradients."""
    return sum(4 * x.size // shards.get(name, 1) for name, x in params.items())


HALVES = {"kernel": 2, "bias": 2, "b": 2}  # on a device of two along tp
CASES = {  # loss, mesh axes, dtype of parameters, of products
    "one pass": (one_pass, AxisType.Auto, "float32", None),
    "one pass, explicit": (one_pass, AxisType.Explicit, "bfloat16", None),
    "two passes": (two_passes, AxisType.Auto, "bfloat16", None),
    "two passes, explicit": (two_passes, AxisType.Explicit, "float32", None),
    "narrowed": (one_pass, AxisType.Auto, "float32", "bfloat16"),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("case", CASES)
def test_a_head_on_a_mesh(case):
    loss_fn, kind, dtype, narrowed = CASES[case]
    parallel = mesh_of(kind=kind)
    params = params_of(dtype)
    specs = {"kernel": P(None, "tp"), "bias": P("tp"), "a": P(), "b": P(None, "tp")}
    params = jax.device_put(params, {name: parallel.sharding(spec) for name, spec in specs.items()})
    hidden = HIDDEN.astype(narrowed or dtype)
    micro_batches = hidden, BATCH, NORMALIZER
    loss = functools.partial(loss_fn, parallel=parallel, dtype=narrowed)
    step = jax.jit(lambda params, parts: accumulate_gradients(loss, parts)(params)[1])
    # a bf16 gradient is rounded in each micro-batch
    rtol, atol = (1e-5, 1e-7) if narrowed is None and dtype == "float32" else (2**-6, 2**-8)
    assert_trees_close(
        step(params, micro_batches), one_by_one(loss, params, micro_batches), rtol=rtol, atol=atol
    )


def test_a_kernel_used_twice_and_in_a_jitted_loss():
    """Two calls use it as a head, and the model as an embedding."""
    parallel = mesh_of()
    params = {"embed": params_of()["kernel"].T}

    @jax.jit
    def loss_fn(params, part):
        _, batch, normalizer = part
        head = Head(params["embed"], layout="vh")
        hidden = params["embed"][batch.tokens]
        loss, metrics = policy_loss_from_hidden(
            hidden, head, batch, CONFIG, parallel=parallel, normalizer=normalizer
        )
        stats = log_probs_from_hidden(hidden**2, head, batch.tokens, parallel=parallel)
        return loss + stats.log_probs.sum(), metrics

    micro_batches = HIDDEN, BATCH, NORMALIZER
    step = jax.jit(lambda params, parts: accumulate_gradients(loss_fn, parts)(params)[1])
    assert_trees_close(
        step(params, micro_batches),
        one_by_one(loss_fn, params, micro_batches),
        rtol=1e-5,
        atol=1e-6,
    )


def test_keys_of_random_numbers_lie_among_micro_batches():
    """Such keys were once refused, since they are no numbers."""
    keys = jax.random.split(jax.random.key(0), K)
    x = jnp.arange(4 * K, dtype=jnp.float32).reshape(K, 4)

    def loss_fn(w, part):
        key, x = part
        return jnp.where(jax.random.bernoulli(key, shape=x.shape), w * x, 0).sum(), {}

    _, found = accumulate_gradients(loss_fn, (keys, x))(jnp.ones(4))
    kept = jnp.stack([jax.random.bernoulli(key, shape=(4,)) for key in keys])
    np.testing.assert_array_equal(found, jnp.where(kept, x, 0).sum(axis=0))
    with pytest.raises(
        ValueError,
        match=r"micro_batches: got leading dimensions \[\(3,\), \(4,\)\], expected one K",
    ):
        accumulate_gradients(loss_fn, (keys[:3], x))


AXES = ShardAxes("dp", "cp", "tp")
SPECS = {"kernel": P(None, "tp"), "bias": P("tp"), "a": P(), "b": P(None, "tp"), "layer": P()}


def in_a_shard_map(loss_fn, **options):
    parallel = mesh_of()
    parts = P(None, "dp", "cp"), BATCH.specs(parallel), NORMALIZER.specs(parallel)

    def run(params, parts):
        return accumulate_gradients(loss_fn, parts, **options)(params)[1]

    return jax.jit(jax.shard_map(run, mesh=parallel.mesh, in_specs=(SPECS, parts), out_specs=SPECS))


def model(params, part):
    """The user's own layer before the head."""
    return one_pass(params, (jnp.tanh(part[0] @ params["layer"]), *part[1:]), AXES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_parameters_of_a_model_in_a_shard_map(dtype):
    parallel = mesh_of()
    params = params_of(dtype) | {"layer": jnp.eye(H, dtype=dtype)}
    micro_batches = HIDDEN.astype(dtype), BATCH, NORMALIZER
    step = in_a_shard_map(model, parallel=AXES)
    inside, behind = sums(step, params, micro_batches, parallel.mesh)
    assert inside == []
    assert sum(size for _, size in behind) == sizes(params, HALVES)
    before = in_a_shard_map(model)
    assert sums(before, params, micro_batches, parallel.mesh)[1] == []  # all of them in the loop
    rtol, atol = (1e-5, 1e-7) if dtype == "float32" else (2**-6, 2**-8)
    assert_trees_close(
        step(params, micro_batches), before(params, micro_batches), rtol=rtol, atol=atol
    )


def test_a_term_of_parameters_alone_is_refused_in_a_shard_map():
    """Such a term would count once for each device."""

    def decayed(params, part):
        loss, metrics = model(params, part)
        return loss + (params["layer"] ** 2).sum(), metrics

    params = params_of() | {"layer": jnp.eye(H)}
    step = in_a_shard_map(decayed, parallel=AXES)
    with pytest.raises(
        ValueError, match=r"loss_fn: got a loss that varies over mesh axes \['dp', 'cp'\], expected"
    ):
        step(params, (HIDDEN, BATCH, NORMALIZER))
    with pytest.raises(TypeError, match="parallel: got ParallelMesh, expected ShardAxes or None"):
        accumulate_gradients(model, HIDDEN, parallel=mesh_of())
