"""Meshes, axis roles, sequence layouts, packing, collectives and audits: the package `sharding` that comes with jaxppo.

Import it from here: `from jaxppo.sharding import audit`, `from jaxppo.sharding.testing import assert_mesh_invariant`.
A project may hold a module `sharding` of its own, and that module stays what `import sharding` gives there.

There is one copy of every class. If the package beside jaxppo is what `import sharding` finds, it is loaded as
`sharding`. If it is not, it is loaded under a private name. This module only repeats its public names.
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

    def __getattr__(name: str) -> Any: ...  # where a type checker takes the project's own `sharding` for this one


_FOLDER = Path(__file__).resolve().parent.parent.parent / "sharding"
_PRIVATE = "jaxppo_sharding"


def _found() -> Path | None:
    """The folder of the package that `import sharding` finds, None where that is no package."""
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
