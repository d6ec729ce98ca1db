"""What all of jaxppo stands on: arrays and their checks, pytrees, metrics, KL divergences."""

from typing import TYPE_CHECKING

from jaxppo.base.late import late

if not TYPE_CHECKING:
    __getattr__ = late(__name__)
