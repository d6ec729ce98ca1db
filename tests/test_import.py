"""What happens at import."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python(code, *paths):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=paths[0])


def test_a_foreign_sharding_is_named(tmp_path):
    foreign = tmp_path / "sharding.py"
    foreign.write_text("def shard(): ...\n")
    done = python("import jaxppo", tmp_path, ROOT)
    assert done.returncode == 1
    assert f"ImportError: sharding: got {foreign}, expected the package installed with jaxppo" in done.stderr


def test_sharding_knows_nothing_of_jaxppo():
    done = python("import sharding, sys; print([m for m in sys.modules if m.startswith('jaxppo')])", ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_all_is_the_table_of_contents():
    import jaxppo

    assert sorted(jaxppo.__all__) == list(jaxppo.__all__)
    for name in jaxppo.__all__:
        assert getattr(jaxppo, name).__doc__, name
