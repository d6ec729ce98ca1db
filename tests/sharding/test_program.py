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

    def per_shard(axes, x):
        return fn(x)

    def specs(p):
        return [spec], spec

    def call(x):
        return shard_call("call", per_shard, PARALLEL, {"x": x}, specs)

    return jax.make_jaxpr(jax.jit(call))(jnp.ones((2, 8)))


def total(x):
    return x + lax.psum(x.sum(), ("dp", "cp"))


def loop(end, body):
    def run(x):
        stop = end(x)

        def goes_on(carry):
            return carry[0] < stop

        def turn(carry):
            i, array = carry
            return i + 1, body(array)

        return lax.while_loop(goes_on, turn, (jnp.float32(0), x))[1]

    return run


def repeated(x):
    def turn(carry, _):
        return total(carry), None

    return lax.scan(turn, x, length=3)[0]


def own_sum(x):
    return x.sum()


def largest_sum(x):
    """The same number on all devices."""
    return lax.pmax(x.sum(), ("dp", "cp"))


def largest_sum_of_context(x):
    return lax.pmax(x.sum(), "cp")


def itself(x):
    return x


def sent(x):
    return lax.ppermute(x, "cp", [(0, 1)])


def total_if_positive(x):
    return lax.cond(x.sum() > 0, total, itself, x)


def always_sent(x):
    """Under a condition all the same."""
    return lax.cond(True, sent, itself, x)


@pytest.mark.parametrize(
    ("fn", "risks"),
    [
        (total, []),
        (repeated, []),
        (loop(largest_sum, total), []),
        (loop(own_sum, jnp.sin), []),
        (
            loop(own_sum, total),
            ["psum over dp, cp in a while whose end varies over cp, dp"],
        ),
        (
            loop(largest_sum_of_context, total),
            ["psum over dp, cp in a while whose end varies over dp"],
        ),
        (total_if_positive, ["psum over dp, cp under cond"]),
        (always_sent, ["ppermute over cp under cond"]),
    ],
)
def test_collectives_that_could_hang(fn, risks):
    found = hang_risks(trace(fn))
    assert [risk.replace("psum_invariant", "psum") for risk in found] == risks


def test_collectives_are_found():
    def gathered(x):
        return total(lax.all_gather(x, "cp", axis=1, tiled=True)[:, :2])

    def of_squares(x):
        return total(x * x).sum()

    found = collectives(trace(gathered))
    assert sorted(axes for _, axes in found) == [("cp",), ("dp", "cp")]
    assert collectives(trace(jax.grad(of_squares)))
    assert collectives(trace(jnp.sin)) == []
