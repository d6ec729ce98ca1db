"""Methods of one paper or one system, a module each: `jaxppo.contrib.gigpo`, `jaxppo.contrib.draft`
and others.

They are tested as everything else is. Promised are their numbers, not their names: a module may
move or be renamed when more systems have the method.
"""

from typing import TYPE_CHECKING

from jaxppo.base.late import late

if not TYPE_CHECKING:
    __getattr__ = late(__name__)
