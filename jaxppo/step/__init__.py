"""What a whole step needs: denominators, accumulated gradients, forward passes, masks,
entropies, staleness.
"""

from typing import TYPE_CHECKING

from jaxppo.base.late import late

if not TYPE_CHECKING:
    __getattr__ = late(__name__)
