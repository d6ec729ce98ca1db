"""Chat templates are programs of strangers: they run in a process of their own, with limits of
time and memory.
"""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from examples.trainer.chat_template import Renderer

NUMBERS = "{% for i in range(99999) %}"
HOSTILE = {
    "nested loops": (NUMBERS * 3 + "{% endfor %}" * 3, "more than its time of the processor"),
    "a power in the source": ("{{ 9 ** (9 ** 9) }}", "more than its time of the processor"),
    "a wide number": ("{{ '%999999999d' % 1 }}", "more than 512 MiB of memory"),
    "a long text": ("{{ 'a' * n * n * n * n * n }}", "more than 512 MiB of memory"),
    "many texts": (
        "{% set a = namespace(x=['a' * 999999]) %}"
        + NUMBERS
        + "{% set a.x = a.x + [a.x[0] ~ i] %}{% endfor %}",
        "more than 512 MiB of memory",
    ),
    "a long prompt": (
        "{{ 'a' * 2000000 }}",
        "a text of 2000000 characters, expected at most 1048576",
    ),
    "an error without words": ("{{ raise_exception('') }}", "TemplateError"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_takes_too_much_is_refused(name):
    template, message = HOSTILE[name]
    with pytest.raises(ValueError, match=message):
        Renderer(template, seconds=1)(messages=[{"role": "user", "content": "2 + 2 = ?"}], n=99999)


def test_one_process_renders_all_prompts_and_ends_with_the_renderer():
    render = Renderer("{{ messages[0].content }} {{ n }}")
    process = render._process
    texts = [render(messages=[{"content": f"a\n{i}"}], n=i) for i in range(3000)]
    assert texts == [f"a\n{i} {i}" for i in range(3000)]
    assert process.poll() is None
    del render
    gc.collect()
    assert process.poll() == -signal.SIGKILL


def test_time_is_counted_for_each_rendering():
    """Many that each take some of it are no reason to end."""
    render = Renderer(
        "{% for i in range(n) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{{ n }}",
        seconds=1,
    )
    assert [render(n=40) for _ in range(14)] == ["40"] * 14


def test_a_process_that_is_gone_is_an_error_and_no_wait():
    render = Renderer("{{ n }}")
    os.kill(render._process.pid, signal.SIGKILL)
    render._process.wait()
    for _ in range(2):
        with pytest.raises(ValueError, match="its process was killed"):
            render(n=1)


ORPHAN = """
import os
from examples.trainer.chat_template import Renderer
print(Renderer("{{ n }}")._process.pid, flush=True)
os._exit(1)
"""


def test_it_ends_with_the_process_that_started_it():
    command = [sys.executable, "-c", ORPHAN]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)
    worker = Path("/proc") / done.stdout.strip()
    if not worker.parent.is_dir():
        pytest.skip("this system lists no processes in /proc")
    for _ in range(1000):
        if not worker.exists() or "Z" in (worker / "stat").read_text().split()[2]:
            return
        signal.sigtimedwait([], 0.02)
    raise AssertionError(f"process {worker.name} still runs")
