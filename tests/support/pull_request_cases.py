"""What the tests of docs/pull_requests share: gradients of two functions, compared on meshes
like their trainers'.
"""

import jax
import numpy as np

GIB = 2**30


def value_and_gradients(function, weights, *args):
    """The sum has weights, so that no two gradients are equal."""

    def weighted(*args):
        found = jax.tree.leaves(function(*args))
        return sum((weight * x).sum() for weight, x in zip(weights, found, strict=True)), found

    return jax.jit(jax.value_and_grad(weighted, tuple(range(len(args))), has_aux=True))(*args)


def assert_same(found, expected, atol, rtol=2e-5):
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), found, expected
    )


def mesh_of(shape, names, devices):
    kinds = (jax.sharding.AxisType.Auto,) * len(shape)
    return jax.sharding.Mesh(np.array(devices).reshape(shape), names, axis_types=kinds)
