"""What happens at import."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def python(code, *paths):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=paths[0])


def test_one_copy_of_every_class_where_there_is_no_such_module():
    import jaxppo
    import sharding

    assert jaxppo._sharding.ParallelMesh is sharding.ParallelMesh
    done = python("import jaxppo, sys; print([m for m in sys.modules if m.startswith('jaxppo_sharding')])", ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_sharding_knows_nothing_of_jaxppo():
    done = python("import sharding, sys; print([m for m in sys.modules if m.startswith('jaxppo')])", ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_all_is_the_table_of_contents():
    import jaxppo

    assert len(set(jaxppo.__all__)) == len(jaxppo.__all__)
    for name in jaxppo.__all__:
        assert getattr(jaxppo, name).__doc__, name
    assert jaxppo.__version__[0].isdigit()


def test_it_imports_what_it_asks_for_and_no_framework():
    """Where flax, optax and the like are installed, too."""
    names = "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    needed = python(f"import jax, jaxtyping, numpy, sys; {names}", ROOT)
    done = python(f"import jaxppo, sys; {names}", ROOT)
    assert set(done.stdout.split()) - set(needed.stdout.split()) == {"jaxppo", "sharding"}, done.stderr
