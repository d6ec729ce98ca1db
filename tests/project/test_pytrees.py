"""Classes as pytrees: constructors run where a user calls them, and functions of them can be
exported and stored.
"""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stored
from jax import export

import jaxppo
from jaxppo import Head, LoRA, OffPolicyConfig, Rejection, TokenStats
from jaxppo.base.metrics import Metric
from jaxppo.base.pytree import from_bytes, to_bytes
from jaxppo.head import Quantization, QuantizedArray

ONES = jnp.ones((8, 4))
OBJECTS = [
    Metric(jnp.array(6.0), jnp.array(2.0), "sum"),
    LoRA(ONES[:, :2], ONES[:2], scale=0.5),
    Head(ONES, lora=LoRA(ONES[:, :2], ONES[:2], 1.0), softcap=3.0, logits_dtype=jnp.bfloat16),
    Head(QuantizedArray(ONES, ONES[:1]), quantized=Quantization("int8", 2)),
    TokenStats(ONES, ONES, entropy_mode="metric"),
]


@pytest.mark.parametrize("given", OBJECTS, ids=lambda x: type(x).__name__)
def test_a_tree_is_put_together_without_its_constructor(monkeypatch, given):
    cls = type(given)
    calls = []
    monkeypatch.setattr(cls, "__post_init__", lambda self: calls.append(self))
    found = jax.jit(lambda x: jax.tree.map(lambda leaf: 2 * leaf, x))(given)
    assert type(found) is cls
    assert calls == []
    # static fields are the same too
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(2 * x, y), given, found)
    assert jax.tree.structure(given) == jax.tree.structure(found)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(given)]
    assert names[0] in (".total", ".a", ".kernel", ".kernel.values", ".log_probs")


def test_static_fields_tell_trees_apart():
    one = Metric(1.0, 1.0, "sum")
    other = Metric(1.0, 1.0, "mean")
    assert jax.tree.structure(one) != jax.tree.structure(other)
    with pytest.raises(ValueError, match="reduce"):
        Metric(1.0, 1.0, "median")


def test_only_one_file_registers_pytrees():
    """So that no class is forgotten where functions of it are stored."""
    folder = Path(jaxppo.__file__).parent
    found = {x.name for x in folder.rglob("*.py") if "tree_util.register" in x.read_text()}
    assert found == {"pytree.py"}


@pytest.fixture(scope="module")
def other_process(tmp_path_factory):
    """The folder with what another process found, and what this one does; by mesh."""
    folder = tmp_path_factory.mktemp("stored")
    expected = {}
    for mesh, axes in stored.MESHES.items():
        parallel, given = stored.arguments(axes)
        step = jax.jit(stored.step(parallel))
        (folder / mesh).write_bytes(export.export(step)(*given).serialize())
        expected[mesh] = stored.numbers(step(*given))
    command = [sys.executable, stored.__file__]
    paths = {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])}
    environment = os.environ | paths
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, expected


@pytest.mark.parametrize("mesh", stored.MESHES)
def test_a_function_of_them_is_stored_and_runs_in_another_process(other_process, mesh):
    folder, of_meshes = other_process
    expected = of_meshes[mesh]
    found = np.load(folder / f"{mesh}.npz")
    assert len(expected) > 70
    assert set(found) == set(expected)
    for name, x in expected.items():
        np.testing.assert_allclose(
            found[name].astype(np.float64), x.astype(np.float64), 1e-6, 1e-6, err_msg=name
        )


STATIC = (
    None,
    True,
    3,
    0.1,
    float("inf"),
    "hv",
    ("a", (1,)),
    jax.P(None, ("fsdp", "dp")),
    np.float32(0.3),
)
STATIC += (Quantization("int8", block=128, largest=127.5),)
STATIC += (OffPolicyConfig(rejections=(Rejection("seq_mean_k1", 0.97, 1.02),)), jaxppo.policy_loss)


def test_static_fields_are_stored_as_they_are():
    assert from_bytes(to_bytes(STATIC)) == STATIC


@pytest.mark.parametrize(
    "value",
    [lambda x: x, np.mean, Path(), object(), {1: 2}],
    ids=lambda value: type(value).__name__,
)
def test_other_static_fields_are_named_when_they_are_stored(value):
    with pytest.raises(
        TypeError, match=r"jax.export: got .* in a static field, expected numbers, text or"
    ):
        to_bytes((value,))


def test_no_other_packages_functions_are_found():
    with pytest.raises(ValueError, match=r"got os.system, expected a name of jaxppo"):
        from_bytes(b'{"name": ["os", "system"]}')
