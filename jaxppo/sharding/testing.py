"""`sharding/testing.py` under the name that users import, and the assertion about packing, which knows batches."""

import functools
from typing import TYPE_CHECKING, Any

from jaxppo.batch.packing_check import assert_packing_invariant
from jaxppo.sharding import _submodule

if TYPE_CHECKING:
    from sharding.testing import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...

else:
    __getattr__ = functools.partial(getattr, _submodule("testing"))


__all__ = [  # noqa: F405  the star is for type checkers
    "assert_mesh_invariant",
    "assert_packing_invariant",
    "assert_trees_close",
    "emulate_devices",
    "factorings",
]
