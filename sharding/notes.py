"""Remarks that a function leaves in the names of its operations."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager

import jax


def note(text: str) -> AbstractContextManager[None]:
    """A context whose operations carry a note for `audit` in their names, which costs nothing.

    A note that begins with "rarely" marks a `cond` that almost always takes its shorter branch:
    flops and time count that branch alone.

    Example:
      >>> def double(x):
      ...     with note("the short way"):
      ...         return x * 2
      >>> from sharding.audit.program import notes
      >>> notes(jax.make_jaxpr(double)(1.0))
      ('the short way',)
    """
    return jax.named_scope(f"<{text}>")


def is_rare(name: str) -> bool:
    """Whether the innermost note in an operation's name begins with "rarely"."""
    return "".join(notes_in(name)[-1:]).startswith("rarely")


def notes_in(name: str) -> list[str]:
    """The notes in an operation's name, the innermost last."""
    return re.findall(r"<([^<>]*)>", name)
