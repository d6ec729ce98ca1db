"""Meshes, axis roles, sequence layouts, packing, collectives and audits: the package `sharding`
that comes with jaxppo.

Import it from here. It is loaded once: as `sharding` if that is what `import sharding` finds, and
under a private name in a project with a module `sharding` of its own. This module only repeats its
public names.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sharding import *  # noqa: F403

    # where a type checker takes the project's own `sharding` for this one
    def __getattr__(name: str) -> Any: ...


_FOLDER = Path(__file__).resolve().parent.parent.parent / "sharding"
_PRIVATE = "jaxppo_sharding"


def _load() -> ModuleType:
    try:
        installed = importlib.util.find_spec("sharding")
    except ValueError:  # a module that was made by hand
        installed = None
    if (
        installed
        and installed.origin
        and Path(installed.origin).resolve() == _FOLDER / "__init__.py"
    ):
        return importlib.import_module("sharding")
    if _PRIVATE in sys.modules:
        return sys.modules[_PRIVATE]
    spec = importlib.util.spec_from_file_location(_PRIVATE, _FOLDER / "__init__.py")
    if spec is None or spec.loader is None or not (_FOLDER / "mesh.py").is_file():
        raise ImportError(
            f"sharding: got no package at {_FOLDER}, expected the one that is installed with jaxppo"
        )
    module = sys.modules[_PRIVATE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _submodule(name: str) -> ModuleType:
    """A module of the package, however the package was loaded."""
    return importlib.import_module(f"{_package.__name__}.{name}")


_package = _load()
__all__ = list(_package.__all__)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_package, name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
