"""The name of JAX that is not public is used in one place, and works in this JAX; at night in
the newest, too.
"""

import re
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from sharding import jax_internals

ROOT = Path(__file__).parents[2]
ALONE = """
import jax
from sharding import jax_internals, multihost

assert jax_internals.coordinator() is None
jax.distributed.initialize("127.0.0.1:{port}", 1, 0)
client = jax_internals.coordinator()
client.key_value_set_bytes("here/0", b"1")
client.wait_at_barrier("all", 1000)
assert client.key_value_dir_get_bytes("here") == [("here/0", b"1")]
client.key_value_delete("here/0")
jax.distributed.shutdown()
print("fine")
"""


def test_internals_of_jax_are_used_in_one_place():
    uses = re.compile(r"^\s*(from|import) jax\._src\b", re.MULTILINE)
    files = [
        path
        for name in ("jaxppo", "sharding", "examples", "benchmarks", "tests")
        for path in ROOT.glob(f"{name}/**/*.py")
    ]
    assert {path.name for path in files if uses.search(path.read_text())} <= {
        "jax_internals.py",
        Path(__file__).name,
    }


def test_the_coordinator_answers():
    """By the calls that `exchange` makes, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", ALONE.format(port=port)], capture_output=True, text=True
    )
    assert done.stdout == "fine\n", done.stderr[-2000:]


def test_a_jax_without_it_is_named(monkeypatch):
    from jax._src import distributed

    for state, missing in (
        (object(), "jax._src.distributed"),
        (type("State", (), {"client": object()}), "key_value_"),
    ):
        monkeypatch.setattr(distributed, "global_state", state)
        with pytest.raises(
            RuntimeError, match=rf"jax: got version {jax.__version__} without {missing}"
        ):
            jax_internals.coordinator()
