"""Batches: samples to packed rows, their rules and checks, prompt trees, nuclei, extras."""

from typing import TYPE_CHECKING

from jaxppo.base.late import late

if not TYPE_CHECKING:
    __getattr__ = late(__name__)
