"""Logits that wait in the memory of the gradient: the same gradients from fewer products, in no more memory."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import pytest
from head_cases import check_head, head_arrays
from test_from_hidden import OPTIONS

from jaxppo import Head, RolloutBatch, log_probs_from_hidden
from jaxppo.head import tiles
from jaxppo.losses.mtp import mtp_loss
from sharding import make_parallel_mesh
from sharding.flops import count_flops

N, H, V = 1024, 256, 16384
PRODUCT = 2 * N * H * V


@contextlib.contextmanager
def keeping(keep):
    """Calls within leave logits in the gradient's memory, or do not."""
    with pytest.MonkeyPatch.context() as patch:
        make = tiles.Budget
        patch.setattr(tiles, "Budget", lambda *args: dataclasses.replace(make(*args), keep=keep and make(*args).keep))
        yield


SOME = ("plain", "softcap", "no bias", "vh", "where", "nucleus", "padding", "lora")


@pytest.mark.parametrize("name", [n if n in SOME else pytest.param(n, marks=pytest.mark.nightly) for n in OPTIONS])
def test_options(name):
    of_arrays, options = OPTIONS[name]
    meshes = [None, make_parallel_mesh("tp=8"), make_parallel_mesh("dp=2,cp=2,tp=2")]
    check_head(meshes, head_arrays(1026, **of_arrays), entropy="bonus", **options)


@pytest.mark.parametrize("V", [97, 1000, 1024, 4097])
@pytest.mark.parametrize("keep", [False, True])
def test_vocabularies_that_blocks_do_not_divide(V, keep):
    meshes = [None, make_parallel_mesh("tp=8")]
    with keeping(keep):
        check_head(meshes, head_arrays(V, with_where=True), device="five")


def step(layout="hv", where=None, wrt=(0, 1), dtype=jnp.float32, parallel=None, **options):
    """The gradients of a head as a jitted function, and what it takes."""

    def loss(hidden, kernel, targets):
        head = Head(kernel, layout=layout)
        found = log_probs_from_hidden(hidden, head, targets, where=where, parallel=parallel, **options)
        return found.log_probs.sum()

    kernel = jax.ShapeDtypeStruct((H, V) if layout == "hv" else (V, H), dtype)
    hidden, targets = jax.ShapeDtypeStruct((1, N, H), dtype), jax.ShapeDtypeStruct((1, N), jnp.int32)
    return jax.jit(jax.grad(loss, wrt)), (hidden, kernel, targets)


def products(*args, **options):
    """How many times all tokens meet the whole kernel, at most."""
    f, arrays = step(*args, **options)
    return count_flops(f.trace(*arrays).jaxpr).high / PRODUCT


@pytest.mark.parametrize("layout", ["hv", "vh"])
@pytest.mark.parametrize("where", [None, jnp.ones((1, N), bool)])
def test_a_quarter_of_the_tokens_is_computed_once(layout, where):
    with keeping(False):
        assert products(layout, where) == 4
    assert products(layout, where) == 4 - H / N


def test_only_where_the_memory_is_there():
    assert products(wrt=0) == 3  # a frozen head has no gradient to lend its memory
    assert products(dtype=jnp.bfloat16) == 4
    assert products(parallel=make_parallel_mesh("dp=1,tp=8")) == (4 - H / N) / 8
    assert products(parallel=make_parallel_mesh("cp=8")) == 4 / 8  # a sum over devices


def test_several_heads_keep_none():
    ids, one, x = (jax.ShapeDtypeStruct((1, n), t) for n, t in ((N, jnp.int32), (1, jnp.int32), (N, jnp.float32)))
    batch = RolloutBatch(ids, ids, ids, ids, x, one)
    kernel, hidden = jax.ShapeDtypeStruct((H, V), jnp.float32), jax.ShapeDtypeStruct((2, 1, N, H), jnp.float32)

    loss = lambda *args: mtp_loss(*args)[0]  # noqa: E731
    flops = count_flops(jax.jit(jax.grad(loss, (0, 1))).trace(hidden, kernel, batch).jaxpr)
    assert flops.high / PRODUCT == 2 * 4


@pytest.mark.parametrize("layout", ["hv", "vh"])
def test_it_takes_no_memory(layout):
    """But for a block of the stored logits, beside which those of the other tokens are put, and a number a token."""
    sizes = {}
    for keep in (False, True):
        with keeping(keep):
            f, arrays = step(layout)
            sizes[keep] = f.lower(*arrays).compile().memory_analysis().temp_size_in_bytes
    assert sizes[True] < sizes[False] + 4 * H * V / 8 + 4 * N, sizes
