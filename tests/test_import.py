"""What happens at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def python(code, *paths):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=paths[0])


FOREIGN = """
import sharding
import jaxppo
assert sharding.mine == 1, sharding
mesh = jaxppo._sharding.make_parallel_mesh("dp=1")
assert jaxppo.batch.ParallelMesh is type(mesh)
import sys
assert sys.modules["sharding"] is sharding
for _ in range(2):
    samples = [jaxppo.Sample([1, 2, 3], response_start=1)]
    assert jaxppo.RolloutBatch.from_samples(samples, row_length=4, parallel=mesh).tokens.shape == (1, 4)
print("fine")
"""


@pytest.mark.parametrize("order", ["import jaxppo, sharding", "import sharding, jaxppo"])
@pytest.mark.parametrize("name", ["sharding.py", "sharding/__init__.py"])
def test_a_project_may_have_a_module_named_sharding(tmp_path, name, order):
    foreign = tmp_path / name
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("mine = 1\n")
    done = python(order + FOREIGN, tmp_path, ROOT)
    assert done.stdout == "fine\n", done.stderr


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
