"""`python -m jaxppo`, whose output begins a bug report."""

import subprocess
import sys
from importlib.metadata import version

import jax
import pytest

import jaxppo
from jaxppo import __main__ as door


def test_it_prints_versions_devices_and_what_is_installed(capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_something=1")
    monkeypatch.setattr(door, "_OPTIONAL", ("flax", "no-such-package"))
    door.main([])
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.splitlines())
    lines = {name: text.strip() for name, text in lines.items()}
    assert (lines["jaxppo"], lines["jax"], lines["jaxlib"]) == (
        jaxppo.__version__,
        jax.__version__,
        version("jaxlib"),
    )
    assert lines["also installed"] == f"flax {version('flax')}"
    assert lines["not installed"] == "no-such-package"
    assert (
        lines["devices"]
        == f"{jax.device_count()} x cpu (cpu); {jax.device_count()} in this process, of 1"
    )
    assert lines["XLA_FLAGS"] == "--xla_something=1"


def test_devices_that_do_not_start_are_a_line(monkeypatch):
    """The report is needed most when nothing else runs."""

    def none():
        raise RuntimeError("Unable to initialize backend 'tpu'")

    monkeypatch.setattr(jax, "devices", none)
    assert door.report()["devices"] == "none: Unable to initialize backend 'tpu'"


@pytest.mark.parametrize(
    ("arguments", "code", "says"), [(["--help"], 0, "versions, devices"), (["--fast"], 2, "--fast")]
)
def test_help_starts_no_device(arguments, code, says):
    """In a process whose platform does not exist, so that any use of a device fails."""
    environment = {"JAX_PLATFORMS": "nowhere", "PYTHONPATH": ":".join(filter(None, sys.path))}
    command = [sys.executable, "-m", "jaxppo", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr
    done = subprocess.run(command[:3], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "none: " in done.stdout
