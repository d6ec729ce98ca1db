"""Names that are loaded when they are first used: importing jaxppo is fast, and a program loads
what it needs.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any


def late(package: str, places: Mapping[str, list[str]] | None = None) -> Callable[[str], Any]:
    """The `__getattr__` of a package: it finds the package's modules, and the names that
    `places` has by module.
    """
    module_of = {name: module for module, names in (places or {}).items() for name in names}

    def find(name: str) -> Any:
        if name in module_of:
            value = getattr(importlib.import_module(module_of[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{package}.{name}"):
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(sys.modules[package], name, value)
        return value

    return find
