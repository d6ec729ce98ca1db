"""A step sums each gradient of a head's parameters over devices once, in f32, however many micro-batches it has."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from policy_steps import step_of

from examples.planner.pod_head import described_mesh
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
from sharding import one_a_device
from sharding.audit import audit
from sharding.testing import assert_trees_close

K, T, H, V = 4, 12, 16, 256
BATCH = RolloutBatch.from_samples(step_of(0), row_length=T, rows=2, num_segments=4, micro_batches=K)
HIDDEN = jax.random.normal(jax.random.key(0), (K, 2, T, H))
CONFIG = PolicyLossConfig(entropy_coef=0.01)
NORMALIZER = Normalizer.of(CONFIG, BATCH)


def mesh_of(names="dp cp tp", kind=AxisType.Auto):
    mesh = jax.make_mesh((2, 2, 2), tuple(names.split()), axis_types=(kind,) * 3)
    return ParallelMesh(mesh, context=None) if "cp" not in names else ParallelMesh(mesh)


def params_of(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = {"kernel": (H, V), "bias": (V,), "a": (H, 4), "b": (4, V)}

    def draw(key, shape):
        return (jax.random.normal(key, shape) / 4).astype(dtype)

    return {name: draw(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}


def head_of(params, dtype=None):
    def cast(x):
        return x if dtype is None else x.astype(dtype)

    if set(params) == {"kernel"}:
        return Head(cast(params["kernel"]))
    return Head(cast(params["kernel"]), cast(params["bias"]), LoRA(cast(params["a"]), cast(params["b"]), 0.5))


def one_pass(params, part, parallel, dtype=None):
    hidden, batch, normalizer = part
    options = {"parallel": parallel, "normalizer": normalizer}
    return policy_loss_from_hidden(hidden, head_of(params, dtype), batch, CONFIG, **options)


def two_passes(params, part, parallel, dtype=None):
    """A loss whose cotangents depend on the micro-batch twice: by token, and by a common divisor."""
    hidden, batch, _ = part
    options = {"parallel": parallel, "where": batch.loss_mask > 0, "entropy": "bonus"}
    stats = log_probs_from_hidden(hidden, head_of(params, dtype), batch.targets, **options)
    total = (stats.log_probs * batch.advantages).sum() + (stats.log_probs.mean() * stats.entropy).sum()
    return total / jnp.maximum(batch.loss_mask.sum(), 1), {}


def one_by_one(loss_fn, params, micro_batches):
    """The sum without `accumulate_gradients`."""
    gradient = jax.jit(jax.grad(lambda params, part: loss_fn(params, part)[0]))
    parts = [gradient(params, jax.tree.map(lambda x, k=k: x[k], micro_batches)) for k in range(K)]
    return jax.tree.map(lambda *xs: sum(x.astype(jnp.float32) for x in xs).astype(xs[0].dtype), *parts)


def sums(step, params, micro_batches, mesh, over=("dp", "cp")):
    """(operation, bytes) of what crosses data or context axes in the loop, and after it; scalars are left out."""
    found = audit(step, params, micro_batches, mesh=mesh).collectives
    large = [c for c in found if set(c.axes) & set(over) and c.bytes > 64]
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
    parallel, params = mesh_of(kind=kind), params_of(dtype)
    specs = {"kernel": P(None, "tp"), "bias": P("tp"), "a": P(), "b": P(None, "tp")}
    params = jax.device_put(params, {name: parallel.sharding(spec) for name, spec in specs.items()})
    hidden = HIDDEN.astype(narrowed or dtype)
    micro_batches = hidden, BATCH, NORMALIZER
    loss = functools.partial(loss_fn, parallel=parallel, dtype=narrowed)
    step = jax.jit(lambda params, parts: accumulate_gradients(loss, parts)(params)[1])
    inside, behind = sums(step, params, micro_batches, parallel.mesh)
    assert inside == []
    assert {op for op, _ in behind} == {"all-reduce"}
    assert sum(size for _, size in behind) == sizes(params, HALVES)
    # a bf16 gradient is rounded in each micro-batch: on one side before the sum over devices, on the other after it
    rtol, atol = (1e-5, 1e-7) if narrowed is None and dtype == "float32" else (2**-6, 2**-8)
    assert_trees_close(step(params, micro_batches), one_by_one(loss, params, micro_batches), rtol=rtol, atol=atol)


def test_a_narrowed_parameter_keeps_its_gradient_to_16_bits():
    """The sum over the step is not rounded to bf16 once more. Its error was 2^-9, or 1.8e-3, when it was."""
    parallel = mesh_of()
    params, w = {"w": jnp.ones((8, 256))}, 1 + jax.random.uniform(jax.random.key(0), (K, 1, 1, 256))

    def loss_fn(params, w):
        copies = one_a_device(params["w"].astype(jnp.bfloat16), parallel, P(None, "tp"))
        return (copies * w.astype(jnp.bfloat16)).astype(jnp.float32).sum(), {}

    found = jax.jit(lambda p: accumulate_gradients(loss_fn, w)(p)[1]["w"])(params)
    expected = 4 * np.asarray(w.astype(jnp.bfloat16), np.float64).sum(axis=(0, 1))
    np.testing.assert_allclose(found, np.broadcast_to(expected, (8, 256)), rtol=2**-16)


def test_wide_parameters_are_not_rounded():
    """In f32 they would all be rounded to 1.0."""
    parallel = mesh_of()
    with jax.enable_x64(True):
        x = jnp.float64(1) + jnp.float64(2) ** -40 * jnp.arange(8.0)
        copies, back = jax.vjp(lambda x: one_a_device(x, parallel, P()), x)
        assert copies.dtype == jnp.float64
        np.testing.assert_array_equal(copies, np.broadcast_to(x, copies.shape))
        np.testing.assert_array_equal(back(copies)[0], x * len(copies))


def test_an_fsdp_kernel_is_summed_over_data_once():
    """Over fsdp it is scattered in each micro-batch, since each micro-batch gathers it too."""
    parallel, params = mesh_of("dp fsdp tp"), params_of()
    loss = functools.partial(one_pass, parallel=parallel)
    micro_batches = jnp.concatenate([HIDDEN] * 2, 1), *two_batches()
    step = jax.jit(lambda params, parts: accumulate_gradients(loss, parts)(params)[1])
    shards = {"kernel": parallel.kernel_spec(), "bias": P("tp"), "a": P(), "b": P(None, "tp")}
    params = jax.device_put(params, {name: parallel.sharding(spec) for name, spec in shards.items()})
    inside, behind = sums(step, params, micro_batches, parallel.mesh, over=("dp",))
    assert inside == []
    assert sum(size for _, size in behind) == sizes(params, HALVES | {"kernel": 4})
    assert_trees_close(step(params, micro_batches), one_by_one(loss, params, micro_batches), rtol=1e-5, atol=1e-7)


def two_batches():
    batch = RolloutBatch.from_samples(step_of(0), row_length=T, rows=4, num_segments=4, micro_batches=K)
    return batch, Normalizer.of(CONFIG, batch)


def test_a_kernel_used_twice_and_in_a_jitted_loss():
    """Two calls use it as a head: one copy, one sum. XLA sums its gradient as an embedding, on CPUs in the loop."""
    parallel, params = mesh_of(), {"embed": params_of()["kernel"].T}

    @jax.jit
    def loss_fn(params, part):
        _, batch, normalizer = part
        head = Head(params["embed"], layout="vh")
        hidden = params["embed"][batch.tokens]
        loss, metrics = policy_loss_from_hidden(hidden, head, batch, CONFIG, parallel=parallel, normalizer=normalizer)
        stats = log_probs_from_hidden(hidden**2, head, batch.tokens, parallel=parallel)
        return loss + stats.log_probs.sum(), metrics

    micro_batches = HIDDEN, BATCH, NORMALIZER
    step = jax.jit(lambda params, parts: accumulate_gradients(loss_fn, parts)(params)[1])
    assert sums(step, params, micro_batches, parallel.mesh)[1] == [("all-reduce", 4 * V * H // 2)]
    assert_trees_close(step(params, micro_batches), one_by_one(loss_fn, params, micro_batches), rtol=1e-5, atol=1e-6)


def test_a_frozen_head_is_not_summed():
    parallel, params = mesh_of(), params_of()

    def loss_fn(params, part):
        params = {name: jax.lax.stop_gradient(x) if name == "kernel" else x for name, x in params.items()}
        return one_pass(params, part, parallel)

    micro_batches = HIDDEN, BATCH, NORMALIZER
    step = jax.jit(lambda params, parts: accumulate_gradients(loss_fn, parts)(params)[1])
    inside, behind = sums(step, params, micro_batches, parallel.mesh)
    assert inside == []
    assert sum(size for _, size in behind) == sizes(params, HALVES) - 4 * H * V // 2
    found = step(params, micro_batches)
    assert not np.any(found["kernel"])
    assert_trees_close(found, one_by_one(loss_fn, params, micro_batches), rtol=1e-5, atol=1e-7)


def test_keys_of_random_numbers_lie_among_micro_batches():
    """Such keys were once refused, since they are no numbers."""
    keys, x = jax.random.split(jax.random.key(0), K), jnp.arange(4 * K, dtype=jnp.float32).reshape(K, 4)

    def loss_fn(w, part):
        key, x = part
        return jnp.where(jax.random.bernoulli(key, shape=x.shape), w * x, 0).sum(), {}

    _, found = accumulate_gradients(loss_fn, (keys, x))(jnp.ones(4))
    kept = jnp.stack([jax.random.bernoulli(key, shape=(4,)) for key in keys])
    np.testing.assert_array_equal(found, jnp.where(kept, x, 0).sum(axis=0))
    with pytest.raises(ValueError, match=r"micro_batches: got leading dimensions \[\(3,\), \(4,\)\], expected one K"):
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
    assert_trees_close(step(params, micro_batches), before(params, micro_batches), rtol=rtol, atol=atol)


def test_a_term_of_parameters_alone_is_refused_in_a_shard_map():
    """Such a term would count once for each device."""

    def decayed(params, part):
        loss, metrics = model(params, part)
        return loss + (params["layer"] ** 2).sum(), metrics

    params = params_of() | {"layer": jnp.eye(H)}
    step = in_a_shard_map(decayed, parallel=AXES)
    with pytest.raises(ValueError, match=r"loss_fn: got a loss that varies over mesh axes \['dp', 'cp'\], expected"):
        step(params, (HIDDEN, BATCH, NORMALIZER))
    with pytest.raises(TypeError, match="parallel: got ParallelMesh, expected ShardAxes or None"):
        accumulate_gradients(model, HIDDEN, parallel=mesh_of())


@pytest.mark.nightly
@pytest.mark.parametrize("topology", ["v5p:2x2x2", "h100:8"])
@pytest.mark.parametrize("way", [one_pass, pytest.param(two_passes, marks=pytest.mark.nightly)])
def test_on_accelerators(topology, way):
    """The sum stays in f32 although its result is rounded, and no scatter or gather of it is left in the loop."""
    if topology.startswith("h100"):
        pytest.importorskip("jax_cuda12_plugin", reason="compiling for GPUs takes the extra gpu-aot")
    parallel = described_mesh("dp=2,cp=2,tp=2", topology)
    rows, tokens, hidden, columns = 2, 2048, 512, 16384

    def described(shape, dtype, *spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.sharding(P(*spec)))

    ids, x = (described((K, rows, tokens), dtype, None, "dp", "cp") for dtype in (jnp.int32, jnp.float32))
    batch = RolloutBatch(*[ids] * 4, x, described((K, rows, 1), jnp.int32, None, "dp"), advantages=x, old_log_probs=x)
    states = described((K, rows, tokens, hidden), jnp.bfloat16, None, "dp", "cp")
    kernel = described((hidden, columns), jnp.bfloat16, None, "tp")

    def step(kernel, parts):
        hidden, batch = parts
        batch = dataclasses.replace(batch, micro_batches=K)
        normalizer = Normalizer.of(CONFIG, batch, parallel=parallel)

        def loss_fn(kernel, part):
            return way({"kernel": kernel}, part, parallel)

        return accumulate_gradients(loss_fn, (hidden, batch, normalizer))(kernel)[1]

    found = audit(step, kernel, (states, batch))
    large = [(c.op, c.axes, c.in_loop, c.bytes) for c in found.collectives if c.bytes > 64 and c.axes != ("tp",)]
    assert large == [("all-reduce", ("dp", "cp"), False, 4 * hidden * columns // 2)]
    assert not re.search(r"= bf16\[\S+ (all-reduce|reduce-scatter)\(", found.text)
