"""Bad arguments of log-probs are refused at trace time, by name, with what was got and what was
expected.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxppo import Head, LoRA, log_probs_from_hidden, log_probs_from_logits
from sharding import make_parallel_mesh

R, T, H, V = 2, 4, 3, 10
HIDDEN = np.ones((R, T, H), np.float32)
KERNEL = np.ones((H, V), np.float32)
TARGETS = np.zeros((R, T), np.int32)
LOGITS = np.ones((R, T, V), np.float32)

OF_BOTH = [
    (
        {"targets": np.zeros((R, T), np.float32)},
        TypeError,
        "targets: got dtype float32, expected integers",
    ),
    ({"targets": TARGETS[:, :3]}, ValueError, r"targets: got shape \(2, 3\), expected \(2, 4\)"),
    ({"targets": TARGETS[0]}, ValueError, r"targets: got shape \(4,\), expected \(2, 4\)"),
    (
        {"where": np.ones((R, 3), bool)},
        ValueError,
        r"where: got shape \(2, 3\), expected \(2, 4\)",
    ),
    (
        {"entropy": "yes"},
        ValueError,
        "entropy: got 'yes', expected one of 'none', 'metric', 'bonus'",
    ),
    ({"entropy": True}, ValueError, "entropy: got True, expected one of"),
    ({"temperature": 0.0}, ValueError, "temperature: got 0.0, expected a finite number above 0"),
    ({"temperature": -1}, ValueError, "temperature: got -1, expected a finite number above 0"),
    (
        {"temperature": float("nan")},
        ValueError,
        "temperature: got nan, expected a finite number above 0",
    ),
    (
        {"temperature": np.ones(2, np.float32)},
        ValueError,
        r"temperature: got shape \(2,\), expected a scalar or \(2, 4\)",
    ),
    ({"vocab_size": 0}, ValueError, "vocab_size: got 0, expected a whole number of at least 1"),
    ({"vocab_size": 11}, ValueError, "vocab_size: got 11, expected 1 to 10"),
    (
        {"parallel": "dp=8"},
        TypeError,
        "parallel: got str, expected ParallelMesh, ShardAxes or None",
    ),
    (
        {"ids": np.zeros((R, T), np.int32)},
        ValueError,
        r"ids: got shape \(2, 4\), expected \[R, T, K\] with .*\(2, 4\)",
    ),
    (
        {"ids": np.zeros((R, T, 0), np.int32)},
        ValueError,
        r"ids: got shape \(2, 4, 0\), expected \[R, T, K\]",
    ),
    (
        {"ids": np.zeros((R, T, 2), np.float32)},
        TypeError,
        "ids: got dtype float32, expected integers",
    ),
    ({"ids": [[[1]]]}, TypeError, "ids: got list, expected an array of integers"),
]
OF_LOGITS = [
    (
        {"logits": np.ones((R, T, V), np.int32)},
        TypeError,
        "logits: got dtype int32, expected float32, bfloat16 or float16",
    ),
    ({"logits": LOGITS[0]}, ValueError, r"logits: got shape \(4, 10\), expected \[R, T, V\]"),
    (
        {"nucleus_ids": np.ones((R, 3, 2), np.int32)},
        ValueError,
        r"nucleus_ids: got shape \(2, 3, 2\), expected \[R, T, K\]",
    ),
    (
        {"nucleus_ids": np.ones((R, T, 2), np.float32)},
        TypeError,
        "nucleus_ids: got dtype float32, expected integers",
    ),
]
OF_HIDDEN = [
    (
        {"hidden": np.ones((R, T, H), np.int32)},
        TypeError,
        "hidden: got dtype int32, expected float32, bfloat16 or float16",
    ),
    (
        {"hidden": HIDDEN.astype(jnp.float8_e4m3fn)},
        TypeError,
        "hidden: got dtype float8_e4m3fn, expected float32",
    ),
    (
        {"hidden": HIDDEN[:, :0]},
        ValueError,
        r"hidden: got shape \(2, 0, 3\), expected \[R, T, H\], each at least 1",
    ),
    (
        {"hidden": HIDDEN[:0]},
        ValueError,
        r"hidden: got shape \(0, 4, 3\), expected \[R, T, H\], each at least 1",
    ),
    (
        {"hidden": HIDDEN[..., :0]},
        ValueError,
        r"hidden: got shape \(2, 4, 0\), expected .* each at least 1",
    ),
    (
        {"kernel": KERNEL[:, :0]},
        ValueError,
        r"head.kernel: got shape \(3, 0\), expected .* each at least 1",
    ),
    (
        {"kernel": [[1.0]]},
        TypeError,
        r"head: got list, expected a jaxppo.Head or a bare \[H, V\] array",
    ),
    (
        {"kernel": Head(KERNEL), "head": True},
        TypeError,
        r"head.kernel: got Head, expected an array",
    ),
    (
        {"kernel": np.ones((3, 3), np.float32)},
        ValueError,
        r"layout: got None for a kernel \(3, 3\), expected 'hv'",
    ),
    ({"lora": {"a": 1}}, TypeError, "head.lora: got dict, expected LoRA or None"),
    (
        {"lora": LoRA(np.ones((4, 2), np.float32), np.ones((2, V), np.float32), 1.0)},
        ValueError,
        r"head.lora.a: got shape \(4, 2\), .* H = 3",
    ),
    (
        {"lora": LoRA(np.ones((3, 2), np.float32), np.ones((3, V), np.float32), 1.0)},
        ValueError,
        r"head.lora.b: got shape \(3, 10\), .*\(2, 10\)",
    ),
    (
        {"lora": LoRA(np.ones((3, 2), np.float32), np.ones((2, V), np.int32), 1.0)},
        TypeError,
        "head.lora.b: got dtype int32, expected float",
    ),
    ({"scale": float("inf")}, ValueError, "scale: got inf, expected a finite number"),
    ({"hidden": HIDDEN[0]}, ValueError, r"hidden: got shape \(4, 3\), expected \[R, T, H\]"),
    (
        {"kernel": KERNEL[None]},
        ValueError,
        r"kernel: got shape \(1, 3, 10\), expected \[H, V\] or \[V, H\]",
    ),
    (
        {"kernel": KERNEL.astype(np.int32)},
        TypeError,
        "head.kernel: got dtype int32, expected float32",
    ),
    (
        {"kernel": np.ones((4, V), np.float32)},
        ValueError,
        r"kernel: got shape \(4, 10\) with layout 'hv', expected 3 rows of H",
    ),
    (
        {"layout": "vh"},
        ValueError,
        r"kernel: got shape \(3, 10\) with layout 'vh', expected 3 rows of H",
    ),
    ({"layout": "VH"}, ValueError, "layout: got 'VH', expected one of 'hv', 'vh'"),
    ({"bias": np.ones(9, np.float32)}, ValueError, r"bias: got shape \(9,\), expected \(10,\)"),
    (
        {"bias": np.ones((1, V), np.float32)},
        ValueError,
        r"head.bias: got shape \(1, 10\), expected \[V\]",
    ),
    ({"bias": np.ones(V, np.int32)}, TypeError, "head.bias: got dtype int32, expected float32"),
    ({"softcap": 0.0}, ValueError, "softcap: got 0.0, expected a finite number above 0"),
    ({"softcap": -30.0}, ValueError, "softcap: got -30.0, expected a finite number above 0"),
    ({"memory": 0}, ValueError, "memory: got 0, expected a whole number of at least 1"),
    ({"memory": True}, ValueError, "memory: got True, expected a whole number of at least 1"),
    (
        {"nucleus_ids": np.zeros((R, T), np.int32)},
        ValueError,
        r"nucleus_ids: got shape \(2, 4\), expected \[R, T, K\]",
    ),
    (
        {"nucleus_ids": np.zeros((R, 3, 2), np.int32)},
        ValueError,
        r"nucleus_ids: got shape \(2, 3, 2\), expected",
    ),
    (
        {"nucleus_ids": np.zeros((R, T, 2), np.float32)},
        TypeError,
        "nucleus_ids: got dtype float32, expected integers",
    ),
]


def from_logits(logits=LOGITS, targets=TARGETS, **options):
    return log_probs_from_logits(logits, targets, **options)


def from_hidden(hidden=HIDDEN, kernel=KERNEL, targets=TARGETS, **options):
    of_head = {
        n: options.pop(n)
        for n in ("bias", "lora", "layout", "softcap", "scale", "vocab_size")
        if n in options
    }
    head = Head(kernel, **of_head) if of_head or options.pop("head", False) else kernel
    return log_probs_from_hidden(hidden, head, targets, **options)


def test_a_layout_in_the_place_of_a_bias():
    with pytest.raises(
        TypeError, match=r"bias: got 'vh', expected \[V\] or None; a layout is given as layout="
    ):
        Head(KERNEL, "vh")


@pytest.mark.parametrize(("arguments", "error", "message"), OF_BOTH + OF_LOGITS)
def test_of_logits(arguments, error, message):
    with pytest.raises(error, match=message):
        from_logits(**arguments)


@pytest.mark.parametrize(("arguments", "error", "message"), OF_BOTH + OF_HIDDEN)
def test_of_hidden_states(arguments, error, message):
    with pytest.raises(error, match=message):
        from_hidden(**arguments)


@pytest.mark.parametrize("call", [from_logits, from_hidden])
def test_while_tracing(call):
    """Shapes and dtypes are refused under jit too; a temperature's value cannot be, and gives
    NaN.
    """
    run = jax.jit(call)
    with pytest.raises(ValueError, match="targets: got shape"):
        run(targets=TARGETS[:, :3])
    assert np.isnan(run(temperature=-1.0).log_probs).all()
    temperatures = np.ones((R, T), np.float32)
    temperatures[1, 2] = 0
    found = np.isnan(call(temperature=temperatures).log_probs)
    assert found.sum() == 1
    assert found[1, 2]


@pytest.mark.parametrize("call", [from_logits, from_hidden])
def test_what_the_mesh_does_not_divide(call):
    with pytest.raises(
        ValueError, match=r"got shape \(2, 4, .* expected dimension 0 to be a multiple of 8"
    ):
        call(parallel=make_parallel_mesh("dp=8"))
    with pytest.raises(
        ValueError, match=r"got shape \(2, 4, .* expected dimension 1 to be a multiple of 8"
    ):
        call(parallel=make_parallel_mesh("cp=8"))


@pytest.mark.parametrize("call", [from_logits, from_hidden])
def test_vmap_over_a_mesh(call):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    targets = rng.integers(0, V, (3, R, T))
    if call is from_logits:
        arrays = {"logits": normal(R, T, V)}
    else:
        arrays = {"hidden": normal(R, T, H), "kernel": normal(H, V)}

    def run(parallel):
        def log_probs(targets):
            return call(targets=targets, parallel=parallel, **arrays).log_probs

        return jax.vmap(log_probs)(targets)

    on_mesh = run(make_parallel_mesh("dp=2,cp=4"))
    np.testing.assert_allclose(on_mesh, run(None), rtol=1e-5, atol=1e-6)


@functools.cache
def of_a_large_vocabulary(call):
    """Arrays of 70000 columns, targets, and their log-probs."""
    rng = np.random.default_rng(0)
    columns = 70000
    targets = jnp.asarray(rng.integers(0, 200, (R, T)), jnp.int32)
    if call is from_hidden:
        kernel = rng.normal(size=(H, columns)).astype(np.float32)
        arrays = {"hidden": HIDDEN, "kernel": kernel}
    else:
        arrays = {"logits": rng.normal(size=(R, T, columns)).astype(np.float32)}
    return arrays, targets, call(targets=targets, **arrays).log_probs


@pytest.mark.parametrize("call", [from_logits, from_hidden])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "uint32", "int32"])
def test_integers_of_any_width(call, dtype):
    """Narrow ids cannot name all columns of a large vocabulary, but those that they name are
    found.
    """
    arrays, targets, expected = of_a_large_vocabulary(call)
    assert np.isfinite(expected).all()
    found = call(targets=targets.astype(dtype), **arrays).log_probs
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("call", [from_logits, from_hidden])
def test_wide_integers_do_not_wrap(call):
    with jax.enable_x64(True):
        targets = jnp.full((R, T), 2**32 + 3, jnp.int64)
        assert jnp.isnan(call(targets=targets).log_probs).all()
        assert jnp.isfinite(call(targets=targets - 2**32).log_probs).all()
    wide = np.full((R, T), 2**32 + 3)  # of numpy, which JAX would cut to i32 itself
    assert jnp.isnan(call(targets=wide).log_probs).all()
    assert jnp.isfinite(call(targets=wide - 2**32).log_probs).all()
    ids = np.stack([wide - 2**32, wide], axis=-1)
    found = call(targets=wide - 2**32, ids=ids).id_log_probs
    assert jnp.isfinite(found[..., 0]).all()
    assert jnp.isnan(found[..., 1]).all()
    high = jnp.full((R, T), 2**32 - 7, jnp.uint32)
    assert jnp.isnan(call(targets=high).log_probs).all()
