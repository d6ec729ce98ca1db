"""The compiled programs of log-probs: only a chunk of tokens meets all columns, and each
collective is counted.
"""

import dataclasses
import math
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled_flops import compiled_flops
from head_cases import H, R, T, call_head, head_arrays
from jax.extend import core
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import PartitionSpec as P

from jaxppo import log_probs_from_hidden, log_probs_from_logits
from sharding import ParallelMesh, make_parallel_mesh
from sharding.audit import audit
from sharding.audit.program import hang_risks
from sharding.testing import assert_trees_close

MIXED = make_parallel_mesh("dp=2,cp=2,tp=2")
SEQUENCE = make_parallel_mesh("dp=2,cp=2,tp=2", sequence_parallel=True)
FSDP = make_parallel_mesh("fsdp=4,tp=2")
N = R * T // 4  # tokens of a device on each of them
V = 2048  # two blocks of 512 columns on a device
KERNEL_BLOCK = 4 * H * 512
DHIDDEN = 4 * N * H
TOKENS = 4 * N
CHUNK = 5  # tokens, on the device "five"


def described(parallel, arrays, **specs):
    """The shapes and shardings of a call's arrays."""
    specs = {
        "hidden": parallel.hidden_spec,
        "kernel": parallel.kernel_spec(),
        "logits": parallel.logits_spec,
    } | specs

    def sharding(name):
        return parallel.sharding(specs.get(name, parallel.tokens_spec))

    return {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding(k)) for k, x in arrays.items()
    }


def forward_and_backward(call, parallel, wrt, **options):
    """Statistics, and the cotangents of `wrt` for cotangents g of log-probs and, with a bonus, e
    of entropies.
    """

    def run(arrays):
        stats, pull = jax.vjp(
            lambda w: call(parallel, {**arrays, **w}, **options), {n: arrays[n] for n in wrt}
        )
        return (
            stats,
            pull(type(stats)(arrays["g"], None if stats.entropy is None else arrays["e"]))[0],
        )

    return run


def call_logits(parallel, arrays, **options):
    return log_probs_from_logits(arrays["logits"], arrays["targets"], parallel=parallel, **options)


def logits_arrays(columns, dtype=jnp.float32):
    tokens = {
        name: jnp.ones((R, T), kind)
        for name, kind in (("targets", jnp.int32), ("g", dtype), ("e", dtype))
    }
    return {"logits": jax.random.normal(jax.random.key(0), (R, T, columns), dtype), **tokens}


def counted(found):
    """(op, axes, bytes, in a loop) of each collective, with its count."""
    return Counter((c.op, c.axes, c.bytes, c.in_loop) for c in found.collectives)


# Collectives


def of_softmax(sums):
    """One max and one sum of per-token vectors over the tensor axis."""
    return Counter(
        [("all-reduce", ("tp",), TOKENS, False), ("all-reduce", ("tp",), sums * TOKENS, False)]
    )


@pytest.mark.parametrize(("entropy", "sums"), [("none", 2), ("metric", 3), ("bonus", 3)])
@pytest.mark.parametrize("with_where", [False, True])
def test_the_forward_is_one_max_and_one_sum(entropy, sums, with_where):
    arrays = described(MIXED, head_arrays(V, bias=False, with_where=with_where))
    assert counted(audit(lambda a: call_head(MIXED, a, entropy=entropy), arrays)) == of_softmax(
        sums
    )
    arrays = described(MIXED, logits_arrays(64))
    assert counted(audit(lambda a: call_logits(MIXED, a, entropy=entropy), arrays)) == of_softmax(
        sums
    )


BOTH = ("hidden", "kernel")
DKERNEL = ("all-reduce", ("dp", "cp"), KERNEL_BLOCK, True)
DHIDDEN_SUM = ("all-reduce", ("tp",), DHIDDEN, False)
FSDP_KERNEL = 4 * H * 4 * V // FSDP.tensor_size  # bytes of a device's columns, with all features
GATHERED = ("all-gather", ("fsdp",), FSDP_KERNEL, False)
SCATTERED_BLOCK = ("reduce-scatter", ("fsdp",), KERNEL_BLOCK, True)
CASES = {  # (mesh, V, where, gradients): collectives beside those of the softmax
    "both": (MIXED, V, False, BOTH, [DKERNEL, DHIDDEN_SUM]),
    "where": (MIXED, V, True, BOTH, [DKERNEL, DHIDDEN_SUM]),
    "a last block that overlaps": (  # 1025 columns on a device, in three blocks of 384
        MIXED,
        2050,
        False,
        BOTH,
        [("all-reduce", ("dp", "cp"), 4 * H * 384, True), DHIDDEN_SUM],
    ),
    "few columns": (
        MIXED,
        24,
        False,
        BOTH,
        [("all-reduce", ("dp", "cp"), 4 * H * 12, False), DHIDDEN_SUM],
    ),
    "frozen head": (MIXED, V, False, ("hidden",), [DHIDDEN_SUM]),
    "kernel only": (MIXED, V, False, ("kernel",), [DKERNEL]),
    "hidden states gathered once and scattered back": (
        SEQUENCE,
        V,
        False,
        BOTH,
        [
            DKERNEL,
            ("all-gather", ("tp",), DHIDDEN, False),
            ("reduce-scatter", ("tp",), DHIDDEN, False),
        ],
    ),
    "fsdp, gathered once for both passes and scattered back": (
        FSDP,
        4 * V,
        False,
        BOTH,
        [GATHERED, SCATTERED_BLOCK, DHIDDEN_SUM],
    ),
    "frozen fsdp": (FSDP, 4 * V, False, ("hidden",), [GATHERED, DHIDDEN_SUM]),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("case", CASES)
def test_collectives_of_each_mesh(case):
    parallel, columns, with_where, wrt, expected = CASES[case]
    arrays = described(parallel, head_arrays(columns, bias=False, with_where=with_where))
    run = forward_and_backward(call_head, parallel, wrt, entropy="bonus")
    assert counted(audit(run, arrays)) == of_softmax(3) + Counter(expected)


def test_fsdp_over_the_vocabulary():
    """The kernel is gathered once, over fsdp alone if each tensor shard has columns beside one
    another.
    """
    for axes, gathered in ((("tp", "fsdp"), ("fsdp",)), (("fsdp", "tp"), ("fsdp", "tp"))):
        spec = P(None, axes)
        arrays = described(FSDP, head_arrays(4 * V, bias=False), kernel=spec)
        run = forward_and_backward(call_head, FSDP, BOTH, entropy="bonus", spec=spec)
        found = audit(run, arrays)
        assert [(c.axes, c.in_loop) for c in found.collectives if c.op == "all-gather"] == [
            (gathered, False)
        ]
        assert {c.axes for c in found.collectives} <= {("fsdp",), ("tp",), ("fsdp", "tp")}


def test_the_gradient_of_logits_needs_no_collective():
    arrays = described(MIXED, logits_arrays(64))
    run = forward_and_backward(call_logits, MIXED, ("logits",), entropy="bonus")
    assert counted(audit(run, arrays)) == of_softmax(3)


def test_unequal_windows_of_a_replicated_kernel():
    """If the tensor axis does not divide the vocabulary, the whole gradient is summed over all
    axes, once.
    """
    arrays = head_arrays(97, bias=False)
    arrays = described(MIXED, arrays, kernel=P())
    found = audit(forward_and_backward(call_head, MIXED, BOTH, entropy="bonus"), arrays)
    summed = [c for c in found.collectives if c.axes and "dp" in c.axes]
    assert {c.op for c in found.collectives} == {"all-reduce"}
    assert max(c.bytes for c in summed) <= 4 * H * 97
    assert len(summed) <= 2


# Arrays


def equations(jaxpr):
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for value in eqn.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                if isinstance(part, (core.Jaxpr, core.ClosedJaxpr)):
                    yield from equations(part)


def shapes(jaxpr):
    return {
        getattr(v.aval, "shape", ())
        for eqn in equations(jaxpr)
        for v in (*eqn.invars, *eqn.outvars)
    }


def traced(parallel, arrays, wrt=BOTH, **options):
    return jax.make_jaxpr(
        forward_and_backward(call_head, parallel, wrt, entropy="bonus", **options)
    )(arrays)


def over_the_vocabulary(jaxpr, columns, tokens):
    """Shapes of more than so many tokens by all columns, or all of a device, without those of
    parameters.

    A bias is `[1, V]` and a kernel `[H, V]`, with FSDP less. Those of all tensor shards are stacked
    between forward and backward.
    """
    of_parameters = {rows * shards for rows in (1, H // 4, H // 2, H) for shards in (1, 2, 8)}
    vocabulary = {columns, -(-columns // 2), columns // 8}
    wide = {s for s in shapes(jaxpr) if set(s) & vocabulary}
    parameters = {s for s in wide if len(s) <= 2 and set(s) <= vocabulary | of_parameters}
    return {s for s in wide - parameters if math.prod(n for n in s if n not in vocabulary) > tokens}


PROGRAMS = {
    "one device": (None, {}),
    "mixed": (MIXED, {}),
    "sequence parallel": (SEQUENCE, {}),
    "fsdp": (FSDP, {}),
    "where": (MIXED, {"with_where": True}),
    "nucleus": (MIXED, {"nucleus": 3, "with_where": True}),
    "vh": (MIXED, {"layout": "vh"}),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("columns", [2062, 2063, 2 * 17])
def test_no_array_holds_the_vocabulary_of_more_tokens_than_a_chunk(name, columns):
    parallel, of_arrays = PROGRAMS[name]
    arrays = head_arrays(columns, **of_arrays)
    jaxpr = traced(parallel, arrays, layout=of_arrays.get("layout", "hv"), device="five")
    if columns > 1024:
        assert over_the_vocabulary(jaxpr, columns, CHUNK) == set()
    assert hang_risks(jaxpr) == []


@pytest.mark.parametrize("memory", [None, 1_300_000])
def test_devices_that_have_other_numbers_of_tokens(memory):
    """Devices have 0 to 600 tokens that count, in chunks of 256 or fewer, and a kernel that they
    share.
    """
    rng = np.random.default_rng(0)
    parallel = make_parallel_mesh("fsdp=8")
    where = jnp.arange(600)[None] < jnp.asarray([0, 1, 255, 256, 257, 400, 599, 600])[:, None]
    hidden = jnp.where(
        where[..., None], jnp.asarray(rng.normal(size=(8, 600, 16)), jnp.float32), jnp.nan
    )
    kernel = jnp.asarray(rng.normal(size=(16, 1024)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, 1024, (8, 600)), jnp.int32)
    weights = jnp.cos(jnp.arange(600.0))[None]

    def on_devices(hidden, kernel):
        found = log_probs_from_hidden(
            hidden, kernel, targets, where=where, parallel=parallel, memory=memory
        )
        return (found.log_probs * weights).sum()

    def written_out(hidden, kernel):
        z = jnp.matmul(jnp.where(where[..., None], hidden, 0), kernel, precision="highest")
        log_probs = jnp.take_along_axis(jax.nn.log_softmax(z), targets[..., None], 2)[..., 0]
        return (jnp.where(where, log_probs, 0) * weights).sum()

    found = jax.jit(jax.value_and_grad(on_devices, (0, 1)))
    assert hang_risks(found.trace(hidden, kernel).jaxpr) == []
    expected = jax.jit(jax.value_and_grad(written_out, (0, 1)))(hidden, kernel)
    assert_trees_close(found(hidden, kernel), expected, rtol=1e-5, atol=2e-5)


def test_the_search_for_such_arrays_finds_them():
    arrays = head_arrays(2062, bias=False)
    jaxpr = jax.make_jaxpr(lambda a: call_head("reference", a).log_probs)(arrays)
    assert (R, T, 2062) in over_the_vocabulary(jaxpr, 2062, CHUNK)


@pytest.mark.parametrize("columns", [24, V])
def test_gradients_that_nobody_asks_for_leave_no_product(columns):
    """Both forward and backward compute logits; then dhidden and dkernel have one product each,
    if they are needed.
    """
    arrays = described(MIXED, head_arrays(columns, bias=False))
    product = 2 * N * H * (columns // 2)
    for wrt, count in ((BOTH, 4), (("hidden",), 3), (("kernel",), 3)):
        found = audit(forward_and_backward(call_head, MIXED, wrt, entropy="bonus"), arrays)
        assert found.flops.low == found.flops.high == count * product
        assert compiled_flops(found.text) == count * product
        kernel_gradient = f"f32[{H},{min(512, columns // 2)}]"
        made = {
            f"f32[{a}]" for a in re.findall(r"f32\[([\d,]+)\]\S* (?:dot|all-reduce)\(", found.text)
        }
        assert (kernel_gradient in made) == ("kernel" in wrt)


def test_tied_embeddings_are_never_transposed():
    jaxpr = traced(MIXED, head_arrays(V, layout="vh", bias=False), layout="vh")
    assert not [
        e
        for e in equations(jaxpr)
        if e.primitive.name == "transpose" and H in e.outvars[0].aval.shape
    ]
    arrays = described(
        MIXED, head_arrays(V, layout="vh", bias=False), kernel=MIXED.kernel_spec("vh")
    )
    run = forward_and_backward(call_head, MIXED, BOTH, entropy="bonus", layout="vh")
    assert f"f32[{H},{V // 2}]" not in audit(run, arrays).text


# The logits path


@pytest.mark.parametrize("entropy", ["none", "metric", "bonus"])
@pytest.mark.parametrize("parallel", [None, MIXED], ids=str)
def test_logits_keep_nothing_but_themselves(entropy, parallel):
    arrays = logits_arrays(128)
    pull = jax.eval_shape(
        lambda z: jax.vjp(
            lambda z: call_logits(parallel, {**arrays, "logits": z}, entropy=entropy), z
        )[1],
        arrays["logits"],
    )
    large = [x for x in jax.tree.leaves(pull) if math.prod(x.shape) > 8 * R * T]
    assert [(math.prod(x.shape), x.dtype) for x in large] == [(R * T * 128, jnp.float32)]


def gradient_of_logits(entropy, parallel=MIXED):
    def gradient(arrays):
        def loss(logits):
            stats = call_logits(parallel, {**arrays, "logits": logits}, entropy=entropy)
            total = (stats.log_probs * arrays["g"]).sum()
            return (
                total + (stats.entropy * arrays["e"]).sum() if entropy == "bonus" else total
            ), stats

        (loss, stats), dlogits = jax.value_and_grad(loss, has_aux=True)(arrays["logits"])
        return loss, stats, dlogits

    return gradient


def test_temporaries_of_logits():
    """The cotangent is the only array of the logits' size, and it is a result."""
    arrays = described(MIXED, logits_arrays(8192))
    logits_bytes = 4 * N * 4096
    found = {
        entropy: audit(gradient_of_logits(entropy), arrays)
        for entropy in ("none", "metric", "bonus")
    }
    assert found["metric"].temp_bytes - found["none"].temp_bytes <= 0.01 * logits_bytes
    for entropy in found:
        assert found[entropy].temp_bytes <= 0.02 * logits_bytes
        assert found[entropy].output_bytes <= 1.01 * logits_bytes


@pytest.mark.parametrize("path", ["logits", "hidden"])
@pytest.mark.parametrize("parallel", [None, MIXED], ids=str)
def test_entropy_as_a_metric_costs_the_backward_nothing(path, parallel):
    """The same backward program as without entropy, and the same gradients."""
    arrays = logits_arrays(128) if path == "logits" else head_arrays(1032, with_where=True)
    call, wrt = (call_logits, ("logits",)) if path == "logits" else (call_head, BOTH)
    backwards = []
    gradients = []
    for entropy in ("none", "metric"):

        def forward(w, entropy=entropy):
            stats = call(parallel, {**arrays, **w}, entropy=entropy)
            return stats.log_probs, stats.entropy

        pull = jax.vjp(jax.jit(forward), {n: arrays[n] for n in wrt}, has_aux=True)[1]
        jaxpr = jax.make_jaxpr(pull)(arrays["g"]).jaxpr
        # without the zeros that JAX makes for the cotangent of the entropy, which nothing reads
        backwards.append(str(dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[0]))
        gradients.append(jax.jit(pull)(arrays["g"]))
    assert backwards[0] == backwards[1]
    for none, metric in zip(*map(jax.tree.leaves, gradients), strict=True):
        assert np.abs(none - metric).max() <= 1e-7 * np.abs(none).max()


def test_no_device_can_be_left_waiting_at_the_logits():
    for entropy in ("none", "bonus"):
        jaxpr = jax.make_jaxpr(gradient_of_logits(entropy))(logits_arrays(64))
        assert hang_risks(jaxpr) == []


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mesh", ["dp=8", "cp=8", "tp=8", "dp=2,cp=4", "dp=4,tp=2", "fsdp=2,cp=2,tp=2", "fsdp=4,cp=2"]
)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_programs_of_other_meshes(mesh, sequence_parallel):
    parallel = dataclasses.replace(make_parallel_mesh(mesh), sequence_parallel=sequence_parallel)
    assert isinstance(parallel, ParallelMesh)
    for _, of_arrays in PROGRAMS.values():
        arrays = head_arrays(4112, **of_arrays)
        jaxpr = traced(parallel, arrays, layout=of_arrays.get("layout", "hv"), device="five")
        assert hang_risks(jaxpr) == []
        assert over_the_vocabulary(jaxpr, 4112, CHUNK) == set()
