"""The smallest function of a mesh: a sum over tokens."""

from jax.sharding import PartitionSpec as P

from sharding import shard_call


def total(parallel, x):
    """A sum over all tokens, with each device's share of it."""

    def per_shard(axes, x):
        return axes.psum(x.sum(), axes.tokens)

    return shard_call("total", per_shard, parallel, {"x": x}, lambda p: ([p.tokens_spec], P()))
