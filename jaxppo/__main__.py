"""Facts for a bug report: `python -m jaxppo` prints versions, devices, settings, and what else
is installed.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import jax

import jaxppo

_NEEDED = ("jax", "jaxlib", "jaxtyping", "numpy")
_PLUGINS = ("jax-cuda12-plugin", "jax-cuda13-plugin", "libtpu")
_OPTIONAL = ("equinox", "flax", "google-tunix", "qwix", *_PLUGINS, "optax", "orbax-checkpoint")
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_debug_nans",
)
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_PLATFORMS")


def report() -> dict[str, str]:
    """The lines of the report, by name: the system and its devices, but no host names or
    folders.
    """
    facts = {"jaxppo": jaxppo.__version__}
    facts["python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    versions = {name: _version(name) for name in (*_NEEDED, *_OPTIONAL)}
    facts |= {name: versions[name] or "not installed" for name in _NEEDED}
    facts["also installed"] = (
        ", ".join(f"{name} {versions[name]}" for name in _OPTIONAL if versions[name]) or "nothing"
    )
    facts["not installed"] = (
        ", ".join(name for name in _OPTIONAL if not versions[name]) or "nothing"
    )
    facts |= {name: str(getattr(jax.config, name)) for name in _SETTINGS}
    return (
        facts
        | {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        | {"devices": _devices()}
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _devices() -> str:
    """The number and kind of all devices, of other processes too, or JAX's error if there are
    none.
    """
    try:
        devices = jax.devices()
    except RuntimeError as error:
        return f"none: {error}"
    here = f"{jax.local_device_count()} in this process, of {jax.process_count()}"
    return f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}); {here}"


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser("python -m jaxppo", description=__doc__).parse_args(arguments)
    facts = report()
    width = max(map(len, facts))
    for name, text in facts.items():
        print(f"{name:{width}}  {text}")


if __name__ == "__main__":
    main()
