"""The one name of JAX that this package uses although it is not public."""

from __future__ import annotations

from typing import Any

import jax

_OF_CLIENT = (
    "key_value_delete",
    "key_value_dir_get_bytes",
    "key_value_set_bytes",
    "wait_at_barrier",
)


def coordinator() -> Any:
    """This process's client of JAX's coordinator, None before `jax.distributed.initialize`.

    JAX's own `multihost_utils` send arrays through devices, and so wait for a running step; the
    client does not.
    """
    try:
        from jax._src import distributed

        client = distributed.global_state.client
        missing = [
            f"{name} of its coordinator's client"
            for name in _OF_CLIENT
            if client and not hasattr(client, name)
        ]
    except (ImportError, AttributeError):
        missing = ["jax._src.distributed.global_state.client"]
    if missing:
        version = f"version {jax.__version__} without {missing[0]}"
        raise RuntimeError(f"jax: got {version}, expected one that docs/versions.md lists")
    return client
