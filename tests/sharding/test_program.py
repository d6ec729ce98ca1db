"""The check that no device is left waiting finds programs in which one is."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from sharding import make_parallel_mesh, shard_call
from sharding.audit.program import collectives, hang_risks

PARALLEL = make_parallel_mesh("dp=2,cp=4")


def trace(fn):
    spec = PARALLEL.tokens_spec

    def call(x):
        return shard_call(
            "call", lambda axes, x: fn(x), PARALLEL, {"x": x}, lambda p: ([spec], spec)
        )

    return jax.make_jaxpr(jax.jit(call))(jnp.ones((2, 8)))


def total(x):
    return x + lax.psum(x.sum(), ("dp", "cp"))


def loop(end, body):
    def run(x):
        stop = end(x)
        return lax.while_loop(
            lambda c: c[0] < stop, lambda c: (c[0] + 1, body(c[1])), (jnp.float32(0), x)
        )[1]

    return run


@pytest.mark.parametrize(
    ("fn", "risks"),
    [
        (total, []),
        (lambda x: lax.scan(lambda c, _: (total(c), None), x, length=3)[0], []),
        (loop(lambda x: lax.pmax(x.sum(), ("dp", "cp")), total), []),
        (loop(lambda x: x.sum(), lambda x: x * 2), []),
        (
            loop(lambda x: x.sum(), total),
            ["psum over dp, cp in a while whose end varies over cp, dp"],
        ),
        (
            loop(lambda x: lax.pmax(x.sum(), "cp"), total),
            ["psum over dp, cp in a while whose end varies over dp"],
        ),
        (lambda x: lax.cond(x.sum() > 0, total, lambda x: x, x), ["psum over dp, cp under cond"]),
        (
            lambda x: lax.cond(True, lambda x: lax.ppermute(x, "cp", [(0, 1)]), lambda x: x, x),
            ["ppermute over cp under cond"],
        ),
    ],
)
def test_collectives_that_could_hang(fn, risks):
    found = hang_risks(trace(fn))
    assert [risk.replace("psum_invariant", "psum") for risk in found] == risks


def test_collectives_are_found():
    found = collectives(trace(lambda x: total(lax.all_gather(x, "cp", axis=1, tiled=True)[:, :2])))
    assert sorted(axes for _, axes in found) == [("cp",), ("dp", "cp")]
    gradient = collectives(trace(lambda x: jax.grad(lambda y: total(y * y).sum())(x)))
    assert gradient
    assert collectives(trace(jnp.sin)) == []
