"""Refuses, at import, another module of the name `sharding` that comes first on the path."""

import importlib.util
from pathlib import Path

_spec = importlib.util.find_spec("sharding")
_folder = Path((_spec.origin if _spec and _spec.origin else None) or ".").parent
if not (_folder / "mesh.py").is_file() or not (_folder / "segments.py").is_file():
    _got = "no module" if _spec is None else _spec.origin or list(_spec.submodule_search_locations or [])
    raise ImportError(
        f"sharding: got {_got}, expected the package installed with jaxppo; something on sys.path shadows it"
    )
