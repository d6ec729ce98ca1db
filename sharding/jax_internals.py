"""The one name of JAX that this package uses although it is not public."""

from __future__ import annotations

from typing import Any

import jax

COORDINATOR = ("key_value_delete", "key_value_dir_get_bytes", "key_value_set_bytes", "wait_at_barrier")


def coordinator() -> Any:
    """This process's client of JAX's coordinator, None before `jax.distributed.initialize`.

    JAX's own `multihost_utils` send arrays through devices, and so wait for a running step; the client does not.

    Raises:
      RuntimeError: a JAX that has the client no more, or another one.

    Example:
      >>> coordinator() is None
      True
    """
    try:
        from jax._src import distributed

        client = distributed.global_state.client
    except (ImportError, AttributeError):
        raise _other_jax("jax._src.distributed.global_state.client") from None
    missing = [name for name in COORDINATOR if client is not None and not hasattr(client, name)]
    if missing:
        raise _other_jax(f"{missing[0]} of its coordinator's client")
    return client


def _other_jax(missing: str) -> RuntimeError:
    return RuntimeError(
        f"jax: got version {jax.__version__} without {missing}, expected one that docs/versions.md lists"
    )
