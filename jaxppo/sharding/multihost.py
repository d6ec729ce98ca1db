"""`sharding/multihost.py` under the name that users import."""

import sys
from typing import TYPE_CHECKING, Any

from jaxppo.sharding import _submodule

if TYPE_CHECKING:
    from sharding.multihost import *  # noqa: F403

    def __getattr__(name: str) -> Any: ...


sys.modules[__name__] = _submodule("multihost")
