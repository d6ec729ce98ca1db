"""A policy loss beside its formula: its config and its off-policy corrections."""

from typing import TYPE_CHECKING

from jaxppo.base.late import late

if not TYPE_CHECKING:
    __getattr__ = late(__name__)
