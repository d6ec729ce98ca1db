"""`sharding/testing.py` under the name that users import."""

import functools
from typing import TYPE_CHECKING, Any

from jaxppo.sharding import _submodule

if TYPE_CHECKING:
    from sharding.testing import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...

else:
    __getattr__ = functools.partial(getattr, _submodule("testing"))


__all__ = [  # noqa: F405  the star is for type checkers
    "assert_mesh_invariant",
    "assert_trees_close",
    "emulate_devices",
    "factorings",
]
