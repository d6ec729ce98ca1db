"""What a whole step needs: denominators, accumulated gradients, masks, entropies, staleness, forward passes."""

from typing import TYPE_CHECKING

from jaxppo.base.late import late

if not TYPE_CHECKING:
    __getattr__ = late(__name__)
