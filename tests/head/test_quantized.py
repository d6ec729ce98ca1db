"""Heads of 8 bits: values and gradients of the plain float64 head of the numbers that the oracle
reads.
"""

import dataclasses
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from head_cases import (
    F32,
    OPTIONS,
    PARAMETERS,
    H,
    R,
    T,
    call_head,
    head_arrays,
    logit_rounding,
    tiles_of,
    truth,
)
from head_cases import with_gradients as gradients_of
from hidden_loss_cases import BATCH, HIDDEN, KERNEL
from jax.sharding import PartitionSpec as P
from oracle import quantized as oracle
from oracle.head import logit_gradient, logits, token_stats
from programs import float16_compiles

from jaxppo import GSPO, Head, PolicyLossConfig, log_probs_from_hidden, policy_loss_from_hidden
from jaxppo.head import Quantization, QuantizedArray
from jaxppo.head.quantized import nearest, quantize
from jaxppo.losses.distillation import divergence_from_hidden
from jaxppo.mismatch import token_mismatch
from sharding import make_parallel_mesh
from sharding.audit import audit
from sharding.audit.program import notes
from sharding.testing import assert_trees_close


@pytest.fixture(autouse=True)
def converts(request):
    """Skips cases of e4m3, which XLA for CPUs converts by way of float16."""
    if not float16_compiles() and "int8" not in request.node.name:
        pytest.skip("XLA converts no e4m3 for this processor")


MIXED = "dp=2,cp=2,tp=2"
RULES = {
    "e4m3": Quantization(),
    "e4m3 in blocks": Quantization(block=4),
    "int8": Quantization("int8"),
    "int8 in blocks, as Qwix": Quantization("int8", block=6, largest=127.5),
    "e4m3 kernels": Quantization(hidden=False),
    "int8 kernels in blocks": Quantization("int8", block=3, hidden=False),
    "e4m3 by powers of two": Quantization(block=6, powers_of_two=True),
}


def meshes(*names, **options):
    return [name and make_parallel_mesh(name, **options) for name in names]


def how(rule):
    fields = ("dtype", "block", "largest", "powers_of_two")
    return {name: getattr(rule, name) for name in fields}


def read_kernel(kernel, rule, layout="hv"):
    """The kernel as a head reads it, float64."""
    return oracle.rounded(np.asarray(kernel, np.float32), 0 if layout == "hv" else 1, **how(rule))


def read_hidden(hidden, rule):
    """The hidden states as a head reads them, float64; 0 where they are NaN, which no token that
    counts is.
    """
    hidden = np.nan_to_num(np.asarray(hidden, np.float32))
    if not rule.hidden:
        return hidden.astype(np.float64)
    return oracle.rounded(hidden.reshape(-1, hidden.shape[-1]), 1, **how(rule)).reshape(
        hidden.shape
    )


def as_read(arrays, rule, layout="hv"):
    """The arrays of a call with hidden states and kernel as a head of this rule reads them, in
    float64.
    """
    read = {
        "hidden": read_hidden(arrays["hidden"], rule),
        "kernel": read_kernel(arrays["kernel"], rule, layout),
    }
    return {**arrays, **read}


def check(parallels, arrays, rule, wrt=PARAMETERS, tolerance=F32, plain=None, **options):
    """A head of this rule has the values and gradients of a plain one of the numbers that it
    reads, on each mesh.
    """
    plain = as_read(arrays, rule, options.get("layout", "hv")) if plain is None else plain
    stats, gradients = truth(call_head, plain, wrt, **options)
    rounding = logit_rounding(plain, options)
    for mesh in parallels:
        got_stats, got = jax.jit(
            lambda a, p=mesh: gradients_of(call_head, p, a, wrt, quantized=rule, **options),
        )(arrays)
        assert_trees_close(
            got_stats, stats, F32["rtol"], F32["atol"] + rounding, context=f"values on {mesh}"
        )
        assert {k: x.dtype for k, x in got.items()} == {k: arrays[k].dtype for k in got}
        close = (tolerance["rtol"], tolerance["atol"] + rounding)
        assert_trees_close(got, gradients, *close, context=f"gradients on {mesh}")


# The oracle


def test_e4m3_is_that_of_ml_dtypes():
    """All numbers of the format, those in the middle of two, and others, some below the
    smallest, some too large.
    """
    of_format = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    of_format = np.sort(of_format[np.isfinite(of_format)])
    middles = (of_format[1:] + of_format[:-1]) / 2
    others = np.random.default_rng(0).normal(size=10000) * 10.0 ** np.linspace(-5, 3, 10000)
    numbers = np.concatenate([of_format, middles, others]).astype(np.float32)
    expected = np.clip(numbers, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    np.testing.assert_array_equal(oracle.to_e4m3(numbers), expected)
    found = jax.jit(lambda x: nearest("float8_e4m3fn", x))(numbers)
    np.testing.assert_array_equal(np.asarray(found).astype(np.float64), expected)


def test_numbers_by_hand():
    """0.3 of 1 is 134.4 of 448, between 128 and 144; 84.67 of 127 is 85."""
    np.testing.assert_allclose(
        oracle.rounded([[1, 0.3]], 1, "float8_e4m3fn"), [[1, 128 / 448]], rtol=2e-7
    )
    np.testing.assert_allclose(
        oracle.rounded([[3.0], [2.0]], 0, "int8"), [[3], [3 * 85 / 127]], rtol=2e-7
    )
    hidden = jnp.array([[[1, 0.3]]])
    kernel = jnp.array([[3.0, 0.0], [2.0, 0.0]])
    targets = jnp.zeros((1, 1), jnp.int32)
    z = 3 + 128 / 448 * (3 * 288 / 448)  # 2 of 3 is 298.67 of 448, between 288 and 320
    found = log_probs_from_hidden(
        hidden, Head(kernel, layout="hv", quantized=Quantization()), targets
    ).log_probs
    # the rounding of a sum of 1.03
    np.testing.assert_allclose(found, -np.log1p(np.exp(-z)), atol=2e-7)


def test_values_and_scales():
    """As in a program, where XLA may divide in other ways than numpy.

    A column of zeros stays so.
    """
    numbers = np.random.default_rng(0).normal(size=(24, 500)).astype(np.float32)
    numbers[:, 7] = 0
    cases = [
        (rule, dim)
        for rule in RULES.values()
        for dim in (0, 1)
        if not rule.block or numbers.shape[dim] % rule.block == 0
    ]

    @jax.jit
    def of_each(numbers):
        quantised = [quantize(rule, numbers, dim) for rule, dim in cases]
        return [(x, x.dequantized(jnp.float32)) for x in quantised]

    for (rule, dim), (found, read) in zip(cases, of_each(numbers), strict=True):
        values, scale = oracle.quantized(numbers, dim, **how(rule))
        assert found.values.dtype.name == rule.dtype
        np.testing.assert_array_equal(np.asarray(found.values).astype(np.float64), values)
        np.testing.assert_array_equal(np.asarray(found.scale, np.float64), scale)
        np.testing.assert_allclose(read, oracle.dequantized(values, scale), rtol=2e-7)


# Values and gradients


@pytest.mark.parametrize("name", RULES)
def test_rules(name):
    check(
        meshes(MIXED), head_arrays(97, with_where=True), RULES[name], entropy="bonus", device="five"
    )


@pytest.mark.every(5)
@pytest.mark.parametrize("rule", ["e4m3 in blocks", "int8"])
@pytest.mark.parametrize(
    "name",
    [
        "softcap",
        "vh",
        "where",
        "nucleus",
        "ids",
        "ids, where",
        "padding",
        "temperatures",
        "no bias",
    ],
)
def test_options(name, rule):
    of_arrays, options = OPTIONS[name]
    check(meshes(MIXED), head_arrays(1026, **of_arrays), RULES[rule], entropy="bonus", **options)


@pytest.mark.every(2)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("mesh", ["tp=8", "fsdp=4,tp=2", "fsdp=2,cp=2,tp=2"])
def test_meshes(mesh, kept):
    """The largest number of a column is that of all rows that FSDP holds."""
    options = {
        "logit_stats": ("log_z", "accuracy"),
        "top_k": 2,
        "vocab_size": 1020,
        "device": "wide",
    }
    if kept:
        options["memory"] = 2**30
    check(meshes(mesh), head_arrays(1026, last=1020), RULES["e4m3"], entropy="bonus", **options)


@pytest.mark.every(2)
@pytest.mark.parametrize("explicit", [True, False])
def test_sequence_parallel(explicit):
    parallel = meshes(MIXED, sequence_parallel=True, explicit=explicit)
    check(parallel, head_arrays(104, with_where=True), RULES["int8"], entropy="bonus")


@pytest.mark.every(4)
@pytest.mark.parametrize("device", ["wide", "small", "like a GPU"])
@pytest.mark.parametrize("rule", ["e4m3", "int8 kernels in blocks"])
def test_bf16(rule, device):
    """A gradient's factors are each rounded once, the dequantised one too, and so is the
    gradient.
    """
    arrays = head_arrays(1026, dtype="bfloat16", bias=False)
    tolerance = {"rtol": 1.5 * 2**-8, "atol": 1.5 * 2**-8}
    check(meshes(MIXED), arrays, RULES[rule], tolerance=tolerance, entropy="bonus", device=device)


def test_an_f32_kernel_under_bf16_hidden_states():
    """Gradients are multiplied in bf16, and that of the kernel is f32."""
    arrays = head_arrays(97, bias=False)
    arrays["hidden"] = arrays["hidden"].astype(jnp.bfloat16)
    tolerance = {"rtol": 1.5 * 2**-8, "atol": 1.5 * 2**-8}
    check(meshes(None), arrays, RULES["e4m3"], tolerance=tolerance, entropy="bonus")


@pytest.mark.every(3)
@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("mesh", [None, MIXED])
def test_adapters_multiply_hidden_states_as_they_are(mesh, layout):
    rule = RULES["e4m3 in blocks"]
    parallel = meshes(mesh)[0]
    arrays = head_arrays(104, layout=layout, lora=True, last=97)
    options = {
        "layout": layout,
        "softcap": 5.0,
        "vocab_size": 97,
        "temperature": 0.7,
        "entropy": "bonus",
    }
    stats, got = jax.jit(lambda a: gradients_of(call_head, parallel, a, quantized=rule, **options))(
        arrays
    )
    wide = {name: np.asarray(x, np.float64) for name, x in arrays.items() if name != "targets"}
    kernel = wide["kernel"] if layout == "hv" else wide["kernel"].T
    adapters = {"a": wide["lora_a"], "b": wide["lora_b"], "lora_scale": 0.5}
    fields = {"softcap": 5.0, "vocab_size": 97, "dtype": rule.dtype, "block": rule.block}
    head = oracle.QuantizedHead(kernel, wide["bias"], **adapters, **fields)
    hidden = wide["hidden"].reshape(-1, H)
    targets = np.asarray(arrays["targets"]).reshape(-1)
    z = logits(hidden, head, 0.7)
    dz = logit_gradient(z, targets, wide["g"].reshape(-1), wide["e"].reshape(-1))
    dhidden, gradient = oracle.head_gradient(hidden, head, dz, 0.7)
    dkernel = gradient.kernel if layout == "hv" else gradient.kernel.T
    expected = (dhidden.reshape(R, T, H), dkernel, gradient.bias, gradient.a, gradient.b)
    assert_trees_close(stats.log_probs.reshape(-1), token_stats(z, targets).log_probs, **F32)
    for name, x in zip(PARAMETERS, expected, strict=True):
        assert_trees_close(got[name], x, rtol=5e-6, atol=5e-6, context=name)


# Kernels that are quantised already


def quantized_kernel(kind, columns=104, layout="hv"):
    """A kernel of random values with scales of a kind, and the numbers that it stands for."""
    rng = np.random.default_rng(3)
    dtype, shape = {
        "by column": ("int8", (1, columns)),
        "in blocks": ("float8_e4m3fn", (3, columns)),
        "one scale": ("float8_e4m3fn", (1, 1)),
        "blocks of both": ("int8", (3, columns // 8)),
    }[kind]
    values = rng.normal(size=(H, columns)) * 40
    values = oracle.to_int8(values) if dtype == "int8" else oracle.to_e4m3(values)
    scale = rng.uniform(0.01, 0.03, shape).astype(np.float32)
    if layout == "vh":
        values = values.T
        scale = scale.T
    return QuantizedArray(jnp.asarray(values, dtype), jnp.asarray(scale)), oracle.dequantized(
        values, scale
    )


KINDS = ("by column", "in blocks", "one scale", "blocks of both")


@pytest.mark.every(7)
@pytest.mark.parametrize("mesh", [None, MIXED, "fsdp=4,tp=2", "cp=8"])
@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_is_quantised_already(kind, rounds, mesh):
    kernel, numbers = quantized_kernel(kind, layout="vh")
    arrays = {**head_arrays(104, layout="vh"), "kernel": kernel}
    block = H // kernel.scale.shape[1]
    rule = Quantization(kernel.values.dtype, block, hidden=rounds)
    plain = {**arrays, "kernel": numbers, "hidden": read_hidden(arrays["hidden"], rule)}
    given = rule if rounds else None
    wrt = ("hidden", "bias")
    check(meshes(mesh), arrays, given, wrt, plain=plain, layout="vh", entropy="bonus")


def test_a_vocabulary_that_the_tensor_axis_does_not_divide():
    kernel, numbers = quantized_kernel("in blocks", columns=97)
    arrays = {**head_arrays(97), "kernel": kernel}
    check(
        meshes(MIXED),
        arrays,
        None,
        ("hidden",),
        plain={**arrays, "kernel": numbers},
        entropy="bonus",
    )


def test_no_gradient_flows_to_a_quantised_kernel():
    """Nor does it cost a product: as a kernel that does not learn."""
    kernel, numbers = quantized_kernel("in blocks")
    arrays = head_arrays(104)

    def loss(head):
        stats = log_probs_from_hidden(arrays["hidden"], head, arrays["targets"])
        return (stats.log_probs * arrays["g"]).sum()

    found = jax.jit(jax.grad(loss))(Head(kernel, bias=arrays["bias"]))
    assert not np.asarray(found.kernel.values).astype(np.float32).any()
    assert not np.asarray(found.kernel.scale).any()
    assert np.asarray(found.bias).any()

    def of_hidden(hidden, kernel, **options):
        stats = log_probs_from_hidden(hidden, Head(kernel, **options), arrays["targets"])
        return (stats.log_probs * arrays["g"]).sum()

    quantised = audit(jax.grad(of_hidden), arrays["hidden"], kernel)
    plain = audit(jax.grad(of_hidden), arrays["hidden"], jnp.asarray(numbers, jnp.float32))
    assert quantised.flops == plain.flops


# Schedules, losses and comparisons

WAYS = {
    "one pass": ("wide", {"memory": 2**30}, PolicyLossConfig()),
    "groups": ("groups", {"memory": 2**30}, PolicyLossConfig()),
    "two passes": ("wide", {"memory": 2**17}, PolicyLossConfig()),
    "kept logits": ("wide", {"memory": 2**30}, PolicyLossConfig(GSPO())),
    "deterministic": ("small", {"deterministic": True}, PolicyLossConfig()),
}


def policy_loss(hidden, kernel, config, rule=None, **options):
    return policy_loss_from_hidden(hidden, Head(kernel, quantized=rule), BATCH, config, **options)[
        0
    ]


@cache
def plain_policy_loss(config):
    """A compiled function of hidden states and a kernel that are as a head reads them."""
    return jax.jit(jax.value_and_grad(partial(policy_loss, config=config), (0, 1)))


@pytest.mark.every(7)
@pytest.mark.parametrize("mesh", [None, MIXED, "fsdp=4,tp=2"])
@pytest.mark.parametrize(
    "rule", [Quantization(block=8), Quantization("int8")], ids=["e4m3 in blocks", "int8"]
)
@pytest.mark.parametrize("way", WAYS)
def test_ways(way, rule, mesh):
    device, options, config = WAYS[way]
    hidden = read_hidden(HIDDEN, rule).astype(np.float32)
    kernel = read_kernel(KERNEL, rule).astype(np.float32)
    expected = plain_policy_loss(config)(hidden, kernel)
    options = {"parallel": meshes(mesh)[0], **options}
    with tiles_of(device):
        run = jax.jit(
            jax.value_and_grad(lambda h, k: policy_loss(h, k, config, rule, **options), (0, 1))
        )
        found = notes(run.trace(HIDDEN, KERNEL).jaxpr)
        got = run(HIDDEN, KERNEL)
    assert ("groups of" in str(found)) == (way == "groups")
    assert ("kept logits" in str(found)) == (way == "kept logits")
    assert ("one pass," in str(found)) == (way in ("one pass", "groups"))
    assert_trees_close(got, expected, rtol=2e-5, atol=5e-6)


@pytest.mark.every(2)
@pytest.mark.parametrize("way", ["one pass", "groups", "kept logits", "two passes"])
def test_a_quantised_kernel_by_each_way(way):
    device, options, config = WAYS[way]
    rule = Quantization(hidden=False)
    values, scale = oracle.quantized(np.asarray(KERNEL), 0, **how(rule))
    kernel = QuantizedArray(jnp.asarray(values, jnp.float8_e4m3fn), jnp.asarray(scale, jnp.float32))
    plain = jnp.asarray(oracle.dequantized(values, scale), jnp.float32)
    expected = jax.jit(jax.value_and_grad(lambda h: policy_loss(h, plain, config)))(HIDDEN)
    with tiles_of(device):
        parallel = make_parallel_mesh(MIXED)
        run = jax.value_and_grad(
            lambda h: policy_loss(h, kernel, config, parallel=parallel, **options)
        )
        got = jax.jit(run)(HIDDEN)
    assert_trees_close(got, expected, rtol=2e-5, atol=5e-6)


@pytest.mark.every(2)
@pytest.mark.parametrize("mesh", [MIXED, None])
def test_divergences_and_mismatch_of_two_heads(mesh):
    """A student of e4m3 and a teacher of int8; and what a sampler's rounding alone does to its
    policy.
    """
    student = RULES["e4m3"]
    teacher = RULES["int8"]
    one = head_arrays(104)
    other = head_arrays(97)
    teacher_kernel = head_arrays(104, scale=0.5)["kernel"] * jnp.sin(jnp.arange(104.0))[None]
    given = (one["hidden"], one["kernel"], other["hidden"], teacher_kernel)
    read = (read_hidden(given[0], student), read_kernel(given[1], student))
    read += (read_hidden(given[2], teacher), read_kernel(given[3], teacher))
    read = [jnp.asarray(x, jnp.float32) for x in read]
    parallel = meshes(mesh)[0]

    def loss(hidden, kernel, teacher_hidden, teacher_kernel, rules=(None, None), parallel=None):
        heads = (Head(kernel, quantized=rules[0]), Head(teacher_kernel, quantized=rules[1]))
        options = {"divergence": "jensen_shannon", "parallel": parallel}
        found = divergence_from_hidden(hidden, heads[0], teacher_hidden, heads[1], **options)
        return (found * one["g"]).sum()

    expected = jax.jit(jax.value_and_grad(loss, (0, 1)))(*read)
    rules = (student, teacher)
    got = jax.jit(jax.value_and_grad(lambda *x: loss(*x, rules, parallel), (0, 1)))(*given)
    assert_trees_close(got, expected, rtol=5e-6, atol=1e-5)

    def mismatch(hidden, kernel, rollout_hidden, rollout_kernel, rule=None, parallel=None):
        sampler = Head(rollout_kernel, quantized=rule)
        found = token_mismatch(
            hidden, Head(kernel), rollout_hidden, sampler, one["targets"], parallel=parallel
        )
        return dataclasses.replace(found, rounding=None)

    expected = jax.jit(mismatch)(one["hidden"], one["kernel"], read[0], read[1])
    call = jax.jit(lambda *x: mismatch(*x, student, parallel))
    got = call(one["hidden"], one["kernel"], one["hidden"], one["kernel"])
    assert np.asarray(got.kl).min() > 1e-5
    assert_trees_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_same_bits_on_any_tensor_axis():
    """Scales are of whole columns and whole tokens, whatever the axis."""
    arrays = head_arrays(1536, bias=False)

    def run(mesh):
        head = Head(arrays["kernel"], quantized=Quantization(block=6))
        call = jax.jit(
            lambda h: log_probs_from_hidden(
                h, head, arrays["targets"], entropy="metric", deterministic=True, parallel=mesh
            )
        )
        found = call(arrays["hidden"])
        return np.asarray(found.log_probs), np.asarray(found.entropy)

    first, *others = map(run, meshes(None, "dp=4,tp=2", "tp=8"))
    for other in others:
        np.testing.assert_array_equal(other, first)


# In a shard_map, and what is refused


def test_in_a_shard_map():
    kernel, numbers = quantized_kernel("in blocks")
    arrays = head_arrays(104, bias=False)
    parallel = make_parallel_mesh("fsdp=4,tp=2")
    axes = parallel.axes

    def local(scale_spec):
        def run(hidden, values, scale, targets):
            return log_probs_from_hidden(
                hidden, Head(QuantizedArray(values, scale)), targets, parallel=axes
            ).log_probs

        specs = (parallel.hidden_spec, parallel.kernel_spec(), scale_spec, parallel.tokens_spec)
        return jax.jit(
            jax.shard_map(run, mesh=parallel.mesh, in_specs=specs, out_specs=parallel.tokens_spec)
        )

    args = (arrays["hidden"], kernel.values, kernel.scale, arrays["targets"])
    expected, _ = truth(call_head, {**arrays, "kernel": numbers}, ("hidden",), entropy="none")
    assert_trees_close(
        local(P(None, "tp"))(*args).reshape(R, T), expected.log_probs, rtol=5e-6, atol=5e-6
    )
    # 16 features, so that FSDP can shard a scale of 4 blocks
    hidden = jnp.pad(arrays["hidden"], ((0, 0), (0, 0), (0, 4)))
    values = jnp.concatenate([kernel.values, kernel.values[:4]])
    scale = jnp.concatenate([kernel.scale, kernel.scale[:1]])
    with pytest.raises(
        ValueError,
        match=r"head.kernel.scale: got one that differs over \('fsdp',\), expected that of",
    ):
        local(P("fsdp", "tp"))(hidden, values, scale, arrays["targets"])


def of_head(**fields):
    kernel = fields.pop("kernel", jnp.ones((H, 20)))
    return log_probs_from_hidden(
        jnp.ones((1, 2, H)), Head(kernel, **fields), jnp.zeros((1, 2), jnp.int32)
    )


def of_quantized(values, scale, **fields):
    """With arrays of numpy made arrays of JAX, which a kernel holds."""
    kernel = QuantizedArray(jnp.asarray(values), jnp.asarray(scale))
    return of_head(kernel=kernel, **fields)


INT8 = np.ones((H, 20), np.int8)
ONES = np.ones((1, 20), np.float32)
REFUSED = {
    "dtype": (
        partial(Quantization, "float8_e5m2"),
        ValueError,
        "dtype: got 'float8_e5m2', expected one of 'float8_e4",
    ),
    "block": (
        partial(Quantization, block=0),
        ValueError,
        "block: got 0, expected a whole number of at least 1",
    ),
    "powers": (
        partial(Quantization, powers_of_two=2),
        ValueError,
        "powers_of_two: got 2, expected True or False",
    ),
    "hidden": (
        partial(Quantization, hidden="no"),
        ValueError,
        "hidden: got 'no', expected True or False",
    ),
    "largest": (
        partial(Quantization, "int8", largest=200),
        ValueError,
        "largest: got 200, expected a finite number",
    ),
    "no rule": (
        partial(Head, ONES, quantized="int8"),
        TypeError,
        "quantized: got str, expected a Quantization or None",
    ),
    "a block that does not divide H": (
        partial(of_head, quantized=Quantization(block=5)),
        ValueError,
        "head.quantized: got block=5, expected a divisor of H = 12",
    ),
    "a kernel of 8 bits without a scale": (
        partial(of_head, kernel=INT8),
        TypeError,
        "head.kernel: got dtype int8, expected float32, bfloat16 or float16",
    ),
    "values of 16 bits": (
        partial(of_quantized, INT8.astype(np.int16), ONES),
        TypeError,
        "head.kernel.values: got int16, expected an array of float8_e4m3fn or int8",
    ),
    "scales that do not divide": (
        partial(of_quantized, INT8, np.ones((5, 20), np.float32)),
        ValueError,
        r"head.kernel.scale: got shape \(5, 20\), expected divisors of \(12, 20\)",
    ),
    "a scale of one dimension": (
        partial(of_quantized, INT8, ONES[0]),
        ValueError,
        r"head.kernel.scale: got shape \(20,\), expected \[blocks, V\]",
    ),
    "a rule of another kernel": (
        partial(of_quantized, INT8, ONES, quantized=Quantization()),
        ValueError,
        (
            r"head.quantized: got Quantization\(dtype='float8.*expected dtype='int8' and block=12,"
            r" those of the kernel"
        ),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()
