"""Small heads with all options of a call, and their values and gradients in float64."""

import contextlib
import dataclasses
import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain_head import reference_from_hidden

from jaxppo import Head, LoRA, log_probs_from_hidden
from jaxppo.head import HeadOptions, profiles
from sharding.testing import assert_trees_close

R, T, H = 8, 8, 12
PARAMETERS = ("hidden", "kernel", "bias", "lora_a", "lora_b")
HEAD_OPTIONS = ("layout", "softcap", "scale", "vocab_size", "spec", "quantized")
RANK = 3
OF_THE_WORK = ("spec", "device", *HeadOptions.__annotations__)
F32 = {"rtol": 2e-6, "atol": 2e-6}
# a gradient in bf16 is rounded once; its terms are products of bf16 numbers
BF16 = {"rtol": 2**-8, "atol": 2**-8}


# Devices whose chunks are small enough for a test to have many: of 16, 8 or 5 tokens. A block of
# the second pass has 512 columns on CPUs, and 128 on accelerators.
CPU = dataclasses.replace(profiles.CPU, memory=2**30)
DEVICES = {
    "small": dataclasses.replace(CPU, chunk_tokens=16, tile_tokens=64),
    "five": dataclasses.replace(CPU, chunk_tokens=5, tile_tokens=20),
    "wide": profiles.Profile(
        2**30, forward_bytes=2**30, chunk_tokens=8, block_width=128, tile_tokens=32, ring=4
    ),
}
# several groups of 48 tokens above 100
DEVICES["groups"] = dataclasses.replace(DEVICES["wide"], group_tokens=100)
DEVICES["like a GPU"] = dataclasses.replace(
    DEVICES["wide"], ring=0, block_width_with_mask=256, gathers=True, rounding_products=True
)

profiles.PROFILES = {**DEVICES, **profiles.PROFILES}


@contextlib.contextmanager
def tiles_of(device):
    """Within the block, calls choose tiles as on that device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiles, "device_kind", lambda *_: device)
        yield


def head_arrays(
    V,
    *,
    dtype="float32",
    layout="hv",
    with_where=False,
    nucleus=0,
    ids=0,
    bias=True,
    lora=False,
    temperatures=False,
    scale=1.0,
    last=None,
):
    """The arrays of a call by argument name, and the weights g, e, i of log-probs, entropy and ids
    in a loss.

    The second id repeats the first, and the third is often the target. Some slots of ids are empty,
    for some tokens all of them. Masked rows of hidden states are NaN, with targets of -100. Two
    tokens have no weight. Targets are below `last`.
    """
    rng = np.random.default_rng(V)
    kernel = rng.normal(size=(H, V)) * scale
    arrays = {
        "hidden": rng.normal(size=(R, T, H)),
        "kernel": kernel if layout == "hv" else kernel.T,
        "targets": rng.integers(0, last or V, (R, T)),
        "g": rng.normal(size=(R, T)),
        "e": rng.normal(size=(R, T)),
    }
    arrays["g"][0, :2] = 0
    arrays["e"][0, 1:3] = 0
    if bias:
        arrays["bias"] = rng.normal(size=V)
    if temperatures:
        arrays["temperature"] = rng.uniform(0.5, 2, (R, T))
    if lora:
        arrays["lora_a"] = rng.normal(size=(H, RANK)) * scale
        arrays["lora_b"] = rng.normal(size=(RANK, V))
    if with_where:
        where = rng.random((R, T)) < 0.4
        # so that some devices have no token at all, however the tokens are split
        where[3] = False
        where[:, 5] = False
        arrays["where"] = where
        arrays["hidden"][~where] = np.nan
        arrays["targets"][~where] = -100
        if temperatures:
            arrays["temperature"][~where] = np.nan
    if nucleus:
        arrays["nucleus_ids"] = rng.integers(-1, last or V, (R, T, nucleus))
    if ids:
        asked = rng.integers(-1, last or V, (R, T, ids))
        asked[..., 1] = asked[..., 0]
        asked[::2, :, 2] = arrays["targets"][::2]
        asked[0] = -1
        arrays["ids"] = np.where(rng.random((R, T, 1)) < 0.9, asked, -1)
        arrays["i"] = rng.normal(size=(R, T, ids))
    return {name: on_a_device(name, x, dtype) for name, x in arrays.items()}


def on_a_device(name, x, dtype):
    """An array of a call, in the dtype of its kind."""
    if x.dtype.kind == "i":
        return jnp.asarray(x, jnp.int32)
    if x.dtype.kind == "b":
        return jnp.asarray(x)
    return jnp.asarray(x, dtype if name in PARAMETERS else jnp.float32)


def head_of(arrays, **options):
    """The head of a call's arrays."""
    lora = LoRA(arrays["lora_a"], arrays["lora_b"], 0.5) if "lora_a" in arrays else None
    return Head(arrays["kernel"], bias=arrays.get("bias"), lora=lora, **options)


def call_head(parallel, arrays, **options):
    """`log_probs_from_hidden`, or with parallel="reference" the reference."""
    of_head = {name: options.pop(name) for name in HEAD_OPTIONS if name in options}
    options |= {
        name: arrays[name]
        for name in ("where", "nucleus_ids", "ids", "temperature")
        if name in arrays
    }
    args = arrays["hidden"], head_of(arrays, **of_head), arrays["targets"]
    if parallel == "reference":
        return reference_from_hidden(*args, **options)
    with tiles_of(options.pop("device", os.environ.get("HEAD_DEVICE", "small"))):
        return log_probs_from_hidden(*args, parallel=parallel, **options)


def with_gradients(call, parallel, arrays, wrt=PARAMETERS, **options):
    """The statistics of a call, and the gradients of a weighted sum of them with respect to the
    arrays in `wrt`.
    """

    def weighted(wanted):
        given = {**arrays, **wanted}
        stats = call(parallel, given, **options)
        total = (stats.log_probs * given["g"]).sum()
        total += (stats.entropy * given["e"]).sum() if options.get("entropy") == "bonus" else 0
        if "ids" in given:
            total += jnp.where(
                jnp.isinf(stats.id_log_probs), 0, stats.id_log_probs * given["i"]
            ).sum()
        return total, stats

    gradients, stats = jax.grad(weighted, has_aux=True)({n: arrays[n] for n in wrt if n in arrays})
    return stats, gradients


@functools.lru_cache(maxsize=64)  # a night has hundreds
def reference_program(call, wrt, options):
    """`with_gradients` of the reference, compiled once for cases whose numbers or meshes alone
    differ.
    """
    return jax.jit(lambda arrays: with_gradients(call, "reference", arrays, wrt, **dict(options)))


def truth(call, arrays, wrt=PARAMETERS, **options):
    """`with_gradients` of the reference in float64."""
    of_the_values = {k: v for k, v in options.items() if k not in OF_THE_WORK}
    program = reference_program(call, wrt, tuple(sorted(of_the_values.items())))
    with jax.enable_x64(True):
        wide = {
            k: jnp.asarray(np.asarray(x, np.float64) if x.dtype.kind in "fV" else x)
            for k, x in arrays.items()
        }
        return jax.tree.map(np.asarray, program(wide))


def logit_rounding(arrays, options):
    """The rounding error of the largest logits: sqrt(n) u sum |terms| of n terms, in whatever order
    a processor adds.

    Errors of either sign add up to sqrt(n), not n (Higham and Mary 2019,
    https://doi.org/10.1137/18M1226312). A soft-cap lets no more through than its own size.
    """
    wide = {name: np.abs(np.nan_to_num(np.asarray(x, np.float64))) for name, x in arrays.items()}
    # logits are given, and rounded where they are divided by a temperature
    if "kernel" not in wide:
        return F32["atol"] * (1 / min(1, options.get("temperature", 1)) - 1)
    kernel = wide["kernel"] if options.get("layout", "hv") == "hv" else wide["kernel"].T
    terms = wide["hidden"] @ kernel + wide.get("bias", 0.0)
    count = len(kernel) + ("bias" in wide)
    if "lora_a" in wide:
        terms += wide["hidden"] @ wide["lora_a"] @ wide["lora_b"] / 2  # the adapters' scale
        count += RANK
    largest = min(terms.max() * options.get("scale", 1.0), options.get("softcap") or np.inf)
    temperature = wide.get("temperature", np.asarray(options.get("temperature", 1.0)))
    coldest = temperature[temperature > 0].min()  # 0: what was NaN, where nothing counts
    return np.sqrt(count) * 2.0**-24 * largest / coldest


def check_head(
    meshes, arrays, wrt=PARAMETERS, rtol=F32["rtol"], atol=F32["atol"], call=call_head, **options
):
    """Values within f32 rounding of float64 and gradients within the tolerances, on each mesh;
    returns the truth.

    With adapters in bf16 values have those tolerances too, since hidden @ a is rounded. Gradients
    have twice those tolerances: the gradient of hidden @ a is rounded, and so are the two gradients
    of the hidden states before they are added. The rounding error of a logit is the relative error
    of its probability, and so of its gradient.
    """
    rounded = "lora_a" in arrays and arrays["lora_a"].dtype == jnp.bfloat16
    of_values = {"rtol": rtol, "atol": atol} if rounded else F32
    rtol, atol = (2 * rtol, 2 * atol) if rounded else (rtol, atol)
    atol += logit_rounding(arrays, options)
    stats, gradients = truth(call, arrays, wrt, **options)
    for mesh in meshes:
        got_stats, got = jax.jit(lambda a, p=mesh: with_gradients(call, p, a, wrt, **options))(
            arrays
        )
        assert_trees_close(got_stats, stats, **of_values, context=f"values on {mesh}")
        assert {k: x.dtype for k, x in got.items()} == {k: arrays[k].dtype for k in got}
        assert_trees_close(got, gradients, rtol, atol, context=f"gradients on {mesh}")
    return stats, gradients


OPTIONS = {
    "plain": ({}, {}),
    "temperature": ({}, {"temperature": 0.3}),
    "softcap": ({}, {"softcap": 2.0, "temperature": 1.7}),
    "no bias": ({"bias": False}, {}),
    "vh": ({"layout": "vh"}, {"layout": "vh"}),
    "where": ({"with_where": True}, {}),
    "where, several token blocks": ({"with_where": True}, {"device": "five"}),
    "where, all computed": ({"with_where": True}, {"device": "five", "follow_mask": False}),
    "several token blocks": ({}, {"device": "five"}),
    "nucleus": ({"nucleus": 5}, {}),
    "keep, where": ({"nucleus": 5, "with_where": True}, {"device": "five"}),
    "ids": ({"ids": 7}, {"softcap": 2.0}),
    "ids, where": (
        {"ids": 7, "with_where": True, "temperatures": True, "last": 600},
        {"vocab_size": 600},
    ),
    "ids, nucleus": (
        {"ids": 7, "nucleus": 5, "lora": True, "with_where": True},
        {"device": "five"},
    ),
    "statistics": (
        {"lora": True, "nucleus": 5, "with_where": True, "temperatures": True, "last": 600},
        {
            "vocab_size": 600,
            "softcap": 40.0,
            "logit_stats": ("log_z", "mean_logit", "accuracy", "sum_p2"),
            "top_k": 3,
        },
    ),
    "padding": ({"last": 600}, {"vocab_size": 600}),
    "lora": ({"lora": True, "with_where": True}, {"device": "five"}),
    "lora, vh": ({"lora": True, "layout": "vh", "last": 600}, {"layout": "vh", "vocab_size": 600}),
    "scale": ({"lora": True}, {"scale": 0.25, "softcap": 2.0}),
    "temperatures": (
        {"temperatures": True, "with_where": True},
        {"softcap": 2.0, "device": "five"},
    ),
}
