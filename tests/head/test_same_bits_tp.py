"""deterministic=True: a token's log-prob and entropy have the same bits on tp = 1, 2, 4 and 8."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import check_head, head_arrays, tiles_of
from jax.experimental import topologies
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxppo import (
    PPO,
    Head,
    LoRA,
    PolicyLossConfig,
    RolloutBatch,
    finalize_metrics,
    log_probs_from_hidden,
    policy_loss_from_hidden,
)
from sharding import ParallelMesh, make_parallel_mesh
from sharding.audit import audit
from sharding.audit.hlo import dimensions, parse
from sharding.audit.program import notes

H, V, R, T = 48, 1536, 8, 75
MESHES = (None, "dp=4,tp=2", "dp=2,tp=4", "tp=8")


def arrays(dtype, columns=V, layout="hv", lora=False, bias=False, **fields):
    """Hidden states, a head with these fields, targets and a mask."""
    keys = jax.random.split(jax.random.key(0), 7)
    shapes = (R, T, H), (H, columns), (H, 3), (3, columns), (columns,)
    normal = [
        jax.random.normal(k, shape).astype(dtype) for k, shape in zip(keys, shapes, strict=False)
    ]
    hidden = normal[0]
    kernel = normal[1] / H**0.5
    fields["lora"] = LoRA(normal[2], normal[3], 0.1) if lora else None
    fields["bias"] = normal[4] if bias else None
    head = Head(kernel if layout == "hv" else kernel.T, layout=layout, **fields)
    targets = jax.random.randint(keys[5], (R, T), 0, fields.get("vocab_size", columns))
    return hidden, head, targets, jax.random.uniform(keys[6], (R, T)) < 0.6


@partial(jax.jit, static_argnames=("mesh", "device"))
def run(hidden, head, targets, where, mesh, device):
    options = {"temperature": 0.7, "entropy": "metric", "where": where, "deterministic": True}
    with tiles_of(device):
        parallel = mesh and make_parallel_mesh(mesh)
        found = log_probs_from_hidden(hidden, head, targets, parallel=parallel, **options)
    return jnp.stack([found.log_probs, found.entropy])


def assert_same_bits(*args, meshes=MESHES, device="cpu"):
    first, *others = (np.asarray(run(*args, mesh=mesh, device=device)) for mesh in meshes)
    assert np.isfinite(first).all()
    changed = [(first != x).sum(axis=(1, 2)).tolist() for x in others]
    assert changed == [[0, 0]] * len(others), "log-probs and entropies that changed, on each mesh"


FIELDS = {
    "kernel": {},
    "layout": {"layout": "vh"},
    # two of eight parts hold columns that do not exist, one holds nothing else
    "padding": {"vocab_size": 1300},
    "all": {
        "lora": True,
        "bias": True,
        "softcap": 5.0,
        "scale": 1.3,
        "vocab_size": 1500,
        "logits_dtype": "bfloat16",
    },
    "several blocks a part": {"columns": 8 * 600},  # the last one overlaps the one before
}


def test_on_tp_4():
    assert_same_bits(*arrays("bfloat16"), meshes=(None, "dp=2,tp=4"))


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["cpu", "wide"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", FIELDS)
def test_on_any_tensor_axis(name, dtype, device):
    *args, where = arrays(dtype, **FIELDS[name])
    assert_same_bits(*args, where if dtype == "bfloat16" else None, device=device)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", ["fsdp=4,tp=2", "fsdp=2,tp=4", "cp=2,tp=4"])
@pytest.mark.parametrize("device", ["cpu", "wide"])
def test_beside_other_axes(device, mesh):
    """A kernel gathered over its rows, and rows of 76 tokens that context shards divide."""
    hidden, head, targets, where = jax.tree.map(jnp.asarray, arrays("bfloat16"))
    hidden, targets, where = (
        jnp.pad(x, ((0, 0), (0, 1), (0, 0))[: x.ndim]) for x in (hidden, targets, where)
    )
    assert_same_bits(hidden, head, targets, where, meshes=(None, mesh), device=device)


@pytest.mark.nightly
def test_a_kernel_that_every_device_holds():
    hidden, head, targets, where = arrays("bfloat16")
    whole = Head(head.kernel, spec=P())
    found = [run(hidden, x, targets, where, mesh="dp=2,tp=4", device="cpu") for x in (head, whole)]
    np.testing.assert_array_equal(*found)


def test_which_vocabularies():
    """Eighths of the vocabulary, or the sums are those of each device's columns; a note says
    which.
    """

    def in_eighths(columns, mesh, **options):
        hidden, head, targets, _ = jax.eval_shape(lambda: arrays("float32", columns))
        parallel = make_parallel_mesh(mesh)
        call = partial(log_probs_from_hidden, parallel=parallel, **options)
        return "eighths of the vocabulary" in str(
            notes(jax.make_jaxpr(call)(hidden, head, targets))
        )

    assert in_eighths(1536, "dp=4,tp=2", deterministic=True)
    assert not in_eighths(1536, "dp=4,tp=2")
    assert not in_eighths(1500, "dp=2,tp=4", deterministic=True)


@pytest.mark.nightly
@pytest.mark.parametrize("device", ["cpu", "wide"])
def test_the_ratio_to_an_old_pass_on_another_tensor_axis_is_1(device):
    """By one pass too, which accelerators take."""
    hidden, head, targets, where = arrays("bfloat16")
    ids = jnp.ones((R, T), jnp.int32)
    mask = where.astype(jnp.float32).at[:, -1].set(0)
    old = run(hidden, head, targets, None, mesh=None, device=device)[0]
    positions = jnp.broadcast_to(jnp.arange(T), (R, T))
    batch = RolloutBatch(
        ids,
        targets,
        ids,
        positions,
        mask,
        jnp.arange(R)[:, None],
        advantages=mask,
        old_log_probs=old,
    )
    parallel = make_parallel_mesh("dp=2,tp=4")

    def loss(hidden, head, batch):
        options = {"parallel": parallel, "temperature": 0.7, "deterministic": True}
        return policy_loss_from_hidden(hidden, head, batch, PolicyLossConfig(PPO()), **options)

    with tiles_of(device):
        found = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, head, batch)[0][1]
    metrics = finalize_metrics(found)
    assert (metrics["ratio_max"], metrics["ratio_min"]) == (1, 1)


EVERYTHING = {
    "logit_stats": ("log_z", "mean_logit", "accuracy", "sum_p2"),
    "top_k": 3,
    "softcap": 40.0,
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("device", "options"),
    [("small", EVERYTHING), ("wide", EVERYTHING), ("wide", {"memory": 2**30})],
)
def test_values_and_gradients(device, options):
    """Against float64: all statistics, with a nucleus, ids, a mask and a vocabulary that ends
    within a part.

    Logits are up to 70 here. Their rounding in f32, 2^-18, is the relative error of a probability
    and of its gradients.
    """
    given = head_arrays(
        8 * 515, nucleus=5, ids=4, lora=True, with_where=True, temperatures=True, last=4000
    )
    meshes = [make_parallel_mesh("dp=2,tp=4")]
    options = options | {
        "entropy": "bonus",
        "vocab_size": 4000,
        "device": device,
        "deterministic": True,
    }
    check_head(meshes, given, rtol=2**-18, **options)


def products_and_collectives(tp):
    """A forward compiled for 8 TPUs: dimensions of products' operands and results, and what
    crosses the network.
    """
    devices = topologies.get_topology_desc("v5p:2x2x2", platform="tpu").devices
    parallel = ParallelMesh(Mesh(np.array(devices).reshape(8 // tp, tp), ("dp", "tp")))

    def described(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=parallel.sharding(spec))

    rows = 8 // tp
    columns = 8192
    features = 512
    args = (
        described((rows, 2048, features), jnp.bfloat16, parallel.hidden_spec),
        described((features, columns), jnp.bfloat16, parallel.kernel_spec()),
        described((rows, 2048), jnp.int32, parallel.tokens_spec),
    )
    options = {"parallel": parallel, "entropy": "metric", "deterministic": True}
    found = audit(partial(log_probs_from_hidden, **options), *args)
    products = [
        (
            sorted(tuple(dimensions(of[name].shape)) for name in x.operands[:2]),
            tuple(dimensions(x.shape)),
        )
        for of in parse(found.text).computations.values()
        for x in of.values()
        if x.op in ("dot", "convolution")
    ]
    return products, [(c.op, c.axes, c.bytes) for c in found.collectives]


@pytest.mark.nightly
def test_the_order_on_tpus():
    """Chunks of 1024 tokens meet 1024 of 8192 columns on any tensor axis; four sums of each
    token are gathered.
    """
    for tp in (1, 2, 4, 8):
        products, collectives = products_and_collectives(tp)
        assert products == [([(512, 1024), (1024, 512)], (1024, 1024))], tp
        assert {(op, axes) for op, axes, _ in collectives} == (
            {("all-gather", ("tp",))} if tp > 1 else set()
        ), tp
        assert sum(size for *_, size in collectives) == tp * 4 * 2048 * 4 * (tp > 1), tp
