"""A policy loss beside its formula: its config, off-policy corrections, the readers of other systems."""

from typing import TYPE_CHECKING

from jaxppo.base.late import late

if not TYPE_CHECKING:
    __getattr__ = late(__name__)
