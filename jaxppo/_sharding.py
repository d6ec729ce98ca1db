"""The package `sharding` that came with jaxppo, whatever else goes by that name where it is imported.

A project may hold a module `sharding` of its own. Then the package beside jaxppo is loaded under a private name, and
the project's module stays what `import sharding` gives. Everywhere else this is `sharding` itself, so that there is one
copy of its classes. Only the package's own names are to be had here: a module of it imported by another path would be
a second copy.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sharding import *  # noqa: F403

_FOLDER = Path(__file__).resolve().parent.parent / "sharding"
_PRIVATE = "jaxppo_sharding"


def _found() -> Path | None:
    """The folder of what `import sharding` gives, None where that is no package."""
    try:
        spec = importlib.util.find_spec("sharding")
    except ValueError:  # a module that was made by hand
        return None
    return Path(spec.origin).resolve().parent if spec and spec.origin and spec.submodule_search_locations else None


def _load() -> ModuleType:
    if _found() == _FOLDER:
        return importlib.import_module("sharding")
    if _PRIVATE in sys.modules:
        return sys.modules[_PRIVATE]
    spec = importlib.util.spec_from_file_location(
        _PRIVATE, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
    )
    if spec is None or spec.loader is None or not (_FOLDER / "mesh.py").is_file():
        raise ImportError(f"sharding: got no package at {_FOLDER}, expected the one that is installed with jaxppo")
    module = sys.modules[_PRIVATE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_package = _load()
__all__ = list(_package.__all__)
globals().update({name: getattr(_package, name) for name in __all__})
