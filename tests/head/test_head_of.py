"""Heads taken from other libraries' modules: a head computes the values and gradients that its
module computes.
"""

import dataclasses
import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tunix_modules as tunix
from flax import linen, nnx
from plain_head import reference_from_logits
from programs import float16_compiles

from jaxppo import Head, LoRA, log_probs_from_hidden
from jaxppo.head import Quantization, QuantizedArray
from jaxppo.head.quantized import quantize
from sharding import make_parallel_mesh
from sharding.testing import assert_trees_close

H, V, RANK = 12, 40, 3
HIDDEN = jax.random.normal(jax.random.key(0), (2, 8, H))
TARGETS = jax.random.randint(jax.random.key(1), (2, 8), 0, V)
CLOSE = {"rtol": 5e-6, "atol": 5e-6}
FAST = nnx.Rngs(0)  # for tests that read no values


def rngs():
    return nnx.Rngs(7)


def noisy_bias(module):
    module.bias[...] = jax.random.normal(jax.random.key(3), module.bias.shape)
    return module


def wide(rank_module):
    """A LoRA whose b is not 0; a new one has b = 0."""
    rank_module.lora_b[...] = jax.random.normal(jax.random.key(4), rank_module.lora_b.shape)
    return rank_module


def lora_linear():
    module = nnx.LoRALinear(H, V, lora_rank=RANK, rngs=rngs())
    wide(module.lora)
    return noisy_bias(module)


def lora_around():
    base = noisy_bias(nnx.Linear(H, V, rngs=rngs()))
    return wide(nnx.LoRA(H, RANK, V, base_module=base, rngs=rngs()))


def qwix_linear():
    return tunix.adapt(noisy_bias(nnx.Linear(H, V, rngs=rngs())), "kernel", RANK, rngs())


def param():
    return nnx.Param(jnp.asarray(np.random.default_rng(0).normal(size=(H, V))))


def table():
    return embed().embedding


def linear(columns=V, **options):
    return nnx.Linear(H, columns, rngs=rngs(), **options)


def linear_with_bias():
    return noisy_bias(linear())


def embed(**options):
    return nnx.Embed(V, H, rngs=rngs(), **options)


def einsum(equation, *shapes):
    return nnx.Einsum(equation, *shapes, rngs=rngs())


def tunix_lm_head(**options):
    return tunix.Einsum("BTD,DV->BTV", (H, V), rngs=rngs(), **options)


def tunix_embedder(**options):
    return tunix.Embedder(V, H, rngs=rngs(), **options)


def gemma_embedder():
    return tunix.GemmaEmbedder(V, H, rngs=rngs())


def qwix_tunix_lm_head():
    return tunix.adapt(tunix_lm_head(), "w", RANK, rngs())


# Logits of modules: by their own call, or of the arrays that they hold


def call(m, x):
    return m(x)


def attend(m, x):
    return m.attend(x)


def decode(m, x):
    return m.decode(x)


def product(p, x):
    return x @ p[...]


def product_of_table(p, x):
    return x @ p[...].T


def adapted_linear(m, x):
    return tunix.adapted(m, "kernel", x, 2.0)


def adapted_lm_head(m, x):
    return tunix.adapted(m, "w", x, 0.5)


NNX = {  # name: (the module, its own logits, options of Head.of)
    "Param": (param, product, {}),
    "Param of a table": (table, product_of_table, {"layout": "vh"}),
    "Linear": (linear_with_bias, call, {}),
    "Linear without bias": (partial(linear, use_bias=False), call, {}),
    "square Linear": (partial(linear, H, use_bias=False), call, {}),
    "Embed": (embed, attend, {}),
    "Einsum": (partial(einsum, "btd,dv->btv", (H, V), (V,)), call, {}),
    "Einsum of a table": (partial(einsum, "...d,vd->...v", (V, H)), call, {}),
    "LoRALinear": (lora_linear, call, {}),
    "LoRA around Linear": (lora_around, call, {}),
    "Qwix on Linear": (qwix_linear, adapted_linear, {"lora_scale": 2.0}),
    "Tunix lm_head": (tunix_lm_head, call, {}),
    "Tunix embedder": (tunix_embedder, decode, {}),
    "Gemma embedder": (gemma_embedder, decode, {}),
    "Qwix on Tunix lm_head": (qwix_tunix_lm_head, adapted_lm_head, {"lora_scale": 0.5}),
}


def loss_of_head(head, hidden, targets):
    return log_probs_from_hidden(hidden, head, targets).log_probs.sum()


def loss_of_logits(logits, targets):
    return reference_from_logits(logits, targets).log_probs.sum()


def values_and_gradients(head_loss, logits_loss, params):
    """Those of both losses, with respect to the module's parameters, by one program."""

    @jax.jit
    def both(*given):
        return [jax.value_and_grad(loss)(*given) for loss in (head_loss, logits_loss)]

    return both(params, HIDDEN, TARGETS)


def assert_same(head_loss, logits_loss, params, tolerance=CLOSE):
    """Compares values, and gradients with respect to the module's parameters, of both."""
    ours, theirs = values_and_gradients(head_loss, logits_loss, params)
    assert_trees_close(ours, theirs, **tolerance)
    assert all(np.any(np.asarray(x) != 0) for x in jax.tree.leaves(ours[1]))


@pytest.mark.every(9)
@pytest.mark.parametrize("name", NNX)
def test_nnx_and_tunix(name):
    make, logits, options = NNX[name]
    graph, params = nnx.split(make())
    columns = H if "square" in name else V

    def of_head(params, hidden, targets):
        head = Head.of(nnx.merge(graph, params), **options)
        return loss_of_head(head, hidden, targets % columns)

    def of_logits(params, hidden, targets):
        return loss_of_logits(logits(nnx.merge(graph, params), hidden), targets % columns)

    assert_same(of_head, of_logits, params)


@pytest.mark.parametrize(
    ("module", "method"),
    [
        (linen.Dense(V), linen.Dense.__call__),
        (linen.Embed(V, H), linen.Embed.attend),
        (
            linen.Dense(
                V, kernel_init=linen.with_partitioning(linen.initializers.normal(), (None, "tp"))
            ),
            None,
        ),
        (
            linen.Dense(
                V,
                kernel_init=linen.with_logical_partitioning(
                    linen.initializers.normal(), ("d", "v")
                ),
            ),
            None,
        ),
    ],
    ids=["Dense", "Embed", "Partitioned", "LogicallyPartitioned"],
)
def test_linen_parameters(module, method):
    method = method or linen.Dense.__call__
    params = module.init(jax.random.key(0), HIDDEN, method=method)["params"]

    def of_head(params, hidden, targets):
        return loss_of_head(Head.of(params), hidden, targets)

    def of_logits(params, hidden, targets):
        return loss_of_logits(module.apply({"params": params}, hidden, method=method), targets)

    assert_same(of_head, of_logits, params)
    box = params.get("kernel", params.get("embedding"))
    alone = Head.of(box, layout="vh" if "embedding" in params else "hv")
    np.testing.assert_array_equal(alone.kernel, Head.of(params).kernel)


def test_a_state_of_nnx_is_a_dictionary_of_parameters():
    linear = noisy_bias(nnx.Linear(H, V, rngs=rngs()))
    assert_trees_close(Head.of(nnx.state(linear)), Head.of(linear), rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["Linear", "Embedding"])
def test_equinox(kind):
    eqx = pytest.importorskip("equinox", reason="Equinox is not installed")
    if kind == "Linear":
        module = eqx.nn.Linear(H, V, key=jax.random.key(0))

        def logits(m, x):
            return jax.vmap(jax.vmap(m))(x)

    else:
        module = eqx.nn.Embedding(V, H, key=jax.random.key(0))

        def logits(m, x):
            return x @ m.weight.T

    assert Head.of(module).layout == "vh"

    def of_head(module, hidden, targets):
        return loss_of_head(Head.of(module), hidden, targets)

    def of_logits(module, hidden, targets):
        return loss_of_logits(logits(module, hidden), targets)

    assert_same(of_head, of_logits, module)


def test_equinox_shared_is_asked_for_what_it_shares():
    eqx = pytest.importorskip("equinox", reason="Equinox is not installed")
    pair = (
        eqx.nn.Embedding(V, H, key=jax.random.key(0)),
        eqx.nn.Linear(H, V, key=jax.random.key(0)),
    )
    shared = eqx.nn.Shared(pair, lambda p: p[1].weight, lambda p: p[0].weight)
    with pytest.raises(
        TypeError, match=r"module: got equinox.*Shared, expected one of the modules that calling it"
    ):
        Head.of(shared)
    np.testing.assert_array_equal(Head.of(shared()[1]).kernel, pair[0].weight)


class Model(nnx.Module):
    """A model for Qwix, which adapts models, not layers."""

    def __init__(self, rngs):
        self.lm_head = nnx.Linear(H, V, rngs=rngs)
        self.einsum = tunix.Einsum("BTD,DV->BTV", (H, V), rngs=rngs)

    def __call__(self, x):
        return self.lm_head(x), self.einsum(x)


@pytest.mark.parametrize(("at", "layer"), enumerate(["lm_head", "einsum"]))
def test_qwix_lora(at, layer):
    qwix = pytest.importorskip("qwix", reason="Qwix is not installed")
    provider = qwix.LoraProvider(module_path=".*", rank=RANK, alpha=6.0)
    model = qwix.apply_lora_to_model(Model(rngs()), provider, HIDDEN, rngs=rngs())

    def moved(x):
        """b begins as 0."""
        return x + np.sin(np.arange(x.size, dtype=np.float32)).reshape(x.shape)

    params = jax.tree.map(moved, nnx.state(model))
    graph = nnx.graphdef(model)

    def of_head(params, hidden, targets):
        module = getattr(nnx.merge(graph, params), layer)
        return loss_of_head(Head.of(module, lora_scale=6.0 / RANK), hidden, targets)

    def of_logits(params, hidden, targets):
        return loss_of_logits(nnx.merge(graph, params)(hidden)[at], targets)

    ours, theirs = values_and_gradients(of_head, of_logits, params)
    assert_trees_close(ours, theirs, **CLOSE)


class Headed(nnx.Module):
    """A model that can be called when Qwix has quantised it, which one with Tunix's Einsum
    cannot.
    """

    def __init__(self, rngs):
        self.lm_head = noisy_bias(nnx.Linear(H, V, rngs=rngs))

    def __call__(self, x):
        return self.lm_head(x)


def quantised_by_qwix(model, **rule):
    """The model with quantised weights, and products if the rule says so."""
    qwix = pytest.importorskip("qwix", reason="Qwix is not installed")
    provider = qwix.PtqProvider([qwix.QuantizationRule(module_path=".*", **rule)])
    with jax.numpy_dtype_promotion("standard"):  # Qwix multiplies sums in i32 by f32
        return qwix.quantize_model(model, provider, HIDDEN)


# Qwix takes 127.5 for the largest number of int8. XLA for CPUs makes e4m3 of f32 by way of f16,
# which moves a few of Qwix's numbers: so its hidden states are compared in int8, and the values of
# its e4m3 weights are taken as they are.
QWIX = {
    "int8 weights": ({"weight_qtype": jnp.int8}, None),
    "e4m3 weights in tiles": ({"weight_qtype": jnp.float8_e4m3fn, "tile_size": 4}, None),
    "int8": (
        {"weight_qtype": jnp.int8, "act_qtype": jnp.int8},
        Quantization("int8", largest=127.5),
    ),
}


@pytest.mark.parametrize("name", QWIX)
def test_qwix_quantised_weights(name):
    """The logits of Qwix's own model."""
    if "e4m3" in name and not float16_compiles():  # e4m3 is converted by way of it
        pytest.skip("XLA converts no e4m3 for this processor")
    rule, quantized = QWIX[name]
    model = quantised_by_qwix(Headed(rngs()), **rule)
    head = Head.of(model.lm_head, quantized=quantized)
    assert isinstance(head.kernel, QuantizedArray)
    assert head.kernel.shape == (H, V)

    @jax.jit
    def of_logits(hidden):
        return loss_of_logits(model(hidden), TARGETS)

    @jax.jit
    def of_head(hidden, head):
        return jax.value_and_grad(loss_of_head, 1)(head, hidden, TARGETS)

    with jax.numpy_dtype_promotion("standard"):
        expected = of_logits(HIDDEN)
    value, gradient = of_head(HIDDEN, head)
    np.testing.assert_allclose(value, expected, **CLOSE)
    if quantized is None:
        plain = Head(head.kernel.dequantized(jnp.float32), bias=head.bias)
        assert_trees_close(gradient, of_head(HIDDEN, plain)[1], **CLOSE)


def test_a_quantised_einsum_of_tunix():
    """Its numbers are those of the weights before, within half a step."""
    before = Model(rngs()).einsum.w[...]
    head = Head.of(quantised_by_qwix(Model(rngs()), weight_qtype=jnp.int8).einsum)
    steps = np.abs(head.kernel.dequantized(jnp.float32) - before) / head.kernel.scale
    assert head.layout == "hv"
    assert steps.max() <= 0.51


def test_a_quantised_array_of_qwix():
    qwix = pytest.importorskip("qwix", reason="Qwix is not installed")
    kernel = jax.random.normal(jax.random.key(5), (V, H))
    array = qwix.quantize(kernel, jnp.int8, channelwise_axes=[0])
    head = Head.of(array, layout="vh")
    np.testing.assert_array_equal(head.kernel.values, array.qvalue)
    assert head.kernel.scale.shape == (V, 1)
    # a dtype wider than 8 bits changes no values
    assert Head.of(array, layout="vh", dtype=jnp.bfloat16).kernel.dtype == jnp.int8
    # what a head would round a kernel of floats to
    found = jax.jit(lambda x: quantize(Quantization("int8", largest=127.5), x, 1))(kernel)
    np.testing.assert_array_equal(found.values, array.qvalue)
    np.testing.assert_allclose(found.scale, array.scale, rtol=2e-7)


def test_what_qwix_quantises_otherwise_is_refused():
    qwix = pytest.importorskip("qwix", reason="Qwix is not installed")
    kernel = jnp.ones((H, V))
    with pytest.raises(
        TypeError, match=r"module: got qwix.*QArray, of int4, expected float8_e4m3fn or int8"
    ):
        Head.of(qwix.quantize(kernel, jnp.int4))
    with pytest.raises(
        TypeError,
        match=r"module: got qwix.*QArray, with a zero point, expected one that is symmetric",
    ):
        Head.of(qwix.quantize(kernel, jnp.int8, calibration_method="minmax"))
    static = {"weight_qtype": jnp.int8, "act_qtype": jnp.int8, "act_static_scale": True}
    with pytest.raises(TypeError, match=r"module: got \w+_scale beside its kernel"):
        Head.of(quantised_by_qwix(Headed(rngs()), **static).lm_head)


@pytest.mark.parametrize(
    "module",
    [
        linear,
        embed,
        tunix_lm_head,
        tunix_embedder,
    ],
    ids=["Linear", "Embed", "Tunix lm_head", "Tunix embedder"],
)
def test_f32_masters_of_a_bf16_module_are_rounded_as_it_rounds_them_and_get_gradients_in_f32(
    module,
):
    graph, params = nnx.split(module(dtype=jnp.bfloat16))
    hidden = HIDDEN.astype(jnp.bfloat16)
    assert Head.of(nnx.merge(graph, params)).kernel.dtype == jnp.bfloat16

    @jax.jit
    @jax.grad
    def gradient_of(params):
        return loss_of_head(Head.of(nnx.merge(graph, params)), hidden, TARGETS)

    gradient = gradient_of(params)
    assert {x.dtype for x in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    # dtype= sets another one, for models whose parameters do not say it
    assert Head.of(nnx.merge(graph, params), dtype=jnp.float32).kernel.dtype == jnp.float32
    assert Head.of(jnp.ones((H, V)), dtype=jnp.bfloat16).kernel.dtype == jnp.bfloat16
    # a dtype wider than the parameter's changes no product, and makes no copy
    assert Head.of(jnp.ones((H, V), jnp.bfloat16), dtype=jnp.float32).kernel.dtype == jnp.bfloat16


def test_options_reach_the_head():
    options = {"softcap": 30.0, "scale": 0.5, "vocab_size": 37, "spec": jax.P(None, None)}
    head = Head.of(nnx.Embed(V, H, rngs=rngs()), **options)
    assert {name: getattr(head, name) for name in options} == options
    assert Head.of(head) is head
    assert Head.of(jnp.ones((H, V))).layout == "hv"


def test_a_module_of_shapes_alone_has_a_head_of_shapes():
    abstract = nnx.eval_shape(partial(linear, dtype=jnp.bfloat16))
    head = Head.of(abstract)
    assert (head.kernel.shape, head.kernel.dtype, head.bias.dtype) == (
        (H, V),
        jnp.bfloat16,
        jnp.bfloat16,
    )


@pytest.mark.parametrize("explicit", [False, True], ids=["Auto", "Explicit"])
def test_adapters_on_a_mesh_as_qwix_shards_them(explicit):
    """Qwix gives an adapter's dimensions the sharding that they have in the kernel: H over fsdp,
    V over tp.
    """
    parallel = make_parallel_mesh("fsdp=4,tp=2", explicit=explicit)

    def put(x, *spec):
        return jax.device_put(x, parallel.sharding(jax.P(*spec)))

    graph, params = nnx.split(qwix_linear())
    specs = {
        "kernel": ("fsdp", "tp"),
        "bias": ("tp",),
        "kernel_lora_a": ("fsdp", None),
        "kernel_lora_b": (None, "tp"),
    }

    def loss(params, hidden, targets, parallel=None):
        head = Head.of(nnx.merge(graph, params), lora_scale=2.0)
        return log_probs_from_hidden(hidden, head, targets, parallel=parallel).log_probs.sum()

    hidden, targets = (jnp.concatenate([x, x]) for x in (HIDDEN, TARGETS))
    expected = jax.jit(jax.value_and_grad(loss))(params, hidden, targets)
    placed = nnx.clone(params)
    for name, spec in specs.items():
        placed[name].set_value(put(params[name].get_value(), *spec))
    with jax.set_mesh(parallel.mesh):
        batch = put(hidden, "fsdp", None, None), put(targets, "fsdp", None)
        got = jax.jit(jax.value_and_grad(partial(loss, parallel=parallel)))(placed, *batch)
    assert_trees_close(got, expected, rtol=1e-5, atol=1e-5)
    if explicit:  # on explicit meshes, a gradient has the sharding of its parameter
        for name, spec in specs.items():
            assert (
                got[1][name]
                .get_value()
                .sharding.is_equivalent_to(parallel.sharding(jax.P(*spec)), len(spec))
            )


class Scaled(nnx.Linear):
    """A subclass whose logits differ from its parent's."""

    def __call__(self, inputs, out_sharding=None):
        return 2 * super().__call__(inputs, out_sharding)


class Extra(tunix.Einsum):
    def __init__(self, **kwargs):
        super().__init__("BTD,DV->BTV", (H, V), **kwargs)
        self.w_dora_m = nnx.Param(jnp.ones(V))


def quantised():
    linear = nnx.Linear(H, V, rngs=FAST)
    linear.kernel = nnx.Param(jnp.ones((H, V), jnp.int8))
    return linear


def half_adapted():
    linear = nnx.Linear(H, V, rngs=FAST)
    linear.kernel_lora_a = nnx.Param(jnp.ones((H, RANK)))
    return linear


def adapted_table():
    embedder = tunix.Embedder(V, H, rngs=FAST)
    embedder.input_embedding_lora_a = nnx.Param(jnp.ones((V, RANK)))
    return embedder


def other_product(*args, **kwargs):
    return jax.lax.dot_general(*args, **kwargs)


REFUSED = {
    "a subclass with logits of its own": (
        partial(Scaled, H, V, rngs=FAST),
        r"Scaled, a Linear with a __call__ of its own",
    ),
    "unknown adapter": (
        partial(Extra, rngs=FAST),
        r"module: got w_dora_m beside its kernel, expected w, w_lora_a",
    ),
    "int8": (quantised, r"module.kernel: got int8, quantised weights, expected float32"),
    "float8 array": (
        partial(np.ones, (H, V), jnp.float8_e4m3fn),
        r"module: got float8_e4m3fn, quantised weights",
    ),
    "half an adapter": (half_adapted, r"got one of kernel_lora_a and kernel_lora_b, expected both"),
    "adapter of a table": (adapted_table, r"module: got input_embedding_lora_a beside its kernel"),
    "another product": (
        partial(nnx.Linear, H, V, dot_general=other_product, rngs=FAST),
        r"module: got flax.nnx.nn.linear.Linear, with dot_general .*other_product",
    ),
    "LoRA around nothing": (
        partial(nnx.LoRA, H, RANK, V, rngs=FAST),
        r"LoRA, around NoneType, expected one around",
    ),
    "einsum": (
        partial(tunix.Einsum, "BTD,DNV->BTNV", (H, 2, V), rngs=FAST),
        r"with einsum 'BTD,DNV->BTNV', expected",
    ),
    "norm": (
        partial(nnx.RMSNorm, H, rngs=FAST),
        r"RMSNorm, expected an array, nnx.Param, nnx.Linear",
    ),
    "Linen module": (
        partial(linen.Dense, V),
        r"Dense, which holds no parameters, expected those of its variables",
    ),
    "other parameters": (
        partial(dict, scale=np.ones(H)),
        r"got a dict with keys 'scale', expected 'kernel' and 'bias'",
    ),
    "variables": (partial(dict, params={}), r"got a dict with keys 'params', expected"),
    "more parameters": (
        partial(dict, kernel=np.ones((H, V)), scale=np.ones(V)),
        r"got scale beside its kernel",
    ),
    "quantised parameters": (
        partial(dict, kernel={"qvalue": 0}),
        r"module\['kernel'\]: got builtins.dict, expected an array",
    ),
    "text": (partial(str, "lm_head"), r"module: got builtins.str, expected an array"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_understood_is_refused_by_name(name):
    make, message = REFUSED[name]
    with pytest.raises(TypeError, match=message):
        Head.of(make())


def test_scales_and_layouts_that_contradict_the_module_are_refused():
    with pytest.raises(
        ValueError,
        match=r"lora_scale: got None for the adapter of the module, expected alpha / rank",
    ):
        Head.of(qwix_linear())
    with pytest.raises(
        ValueError, match=r"lora_scale: got 2.0 for the adapter of the module, expected None"
    ):
        Head.of(lora_linear(), lora_scale=2.0)
    with pytest.raises(
        ValueError, match=r"lora_scale: got 2.0 for a module without an adapter, expected None"
    ):
        Head.of(nnx.Linear(H, V, rngs=FAST), lora_scale=2.0)
    with pytest.raises(ValueError, match=r"layout: got 'hv' for Embed, expected 'vh'"):
        Head.of(nnx.Embed(V, H, rngs=FAST), layout="hv")
    with pytest.raises(ValueError, match=r"module: got a Head and options"):
        Head.of(Head(jnp.ones((H, V))), softcap=1.0)
    with pytest.raises(ValueError, match=r"layout: got None for a kernel \(12, 12\)"):
        Head.of(nnx.Param(jnp.ones((H, H))))


def test_a_frozen_kernel_under_an_adapter_gets_no_gradient_and_the_adapter_does():
    graph, adapters, rest = nnx.split(lora_linear(), nnx.LoRAParam, ...)

    def loss(a):
        return loss_of_head(Head.of(nnx.merge(graph, a, rest)), HIDDEN, TARGETS)

    gradient = jax.jit(jax.grad(loss))(adapters)
    assert len(jax.tree.leaves(gradient)) == 2
    head = Head.of(nnx.merge(graph, adapters, rest))

    def by_hand(a, b):
        adapted = dataclasses.replace(head, lora=LoRA(a, b, 1.0))
        return loss_of_head(adapted, HIDDEN, TARGETS)

    expected = jax.jit(jax.grad(by_hand, (0, 1)))(head.lora.a, head.lora.b)
    assert_trees_close(
        (gradient["lora"]["lora_a"][...], gradient["lora"]["lora_b"][...]), expected, **CLOSE
    )


def test_no_framework_is_imported():
    code = """
import sys, jax.numpy as jnp
from jaxppo import Head
Head.of(jnp.ones((4, 8))), Head.of({"kernel": jnp.ones((4, 8))})
found = {"flax", "equinox", "qwix", "tunix"} & {name.partition(".")[0] for name in sys.modules}
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True)
