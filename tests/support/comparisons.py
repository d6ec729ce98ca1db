"""NaN equals NaN in no comparison of the tests, unless the test says so.

numpy's assertions take NaN for equal to NaN, so that two broken functions agree. `equal_nan=True` allows it, in
`np.testing.assert_allclose` and, since numpy's own has no such argument, in `np.testing.assert_array_equal`.
"""

import functools

import numpy as np


def _guarded(assertion, passes_on):
    @functools.wraps(assertion)
    def checked(actual, desired, *args, equal_nan=False, **options):
        __tracebackhide__ = True
        if not equal_nan and _has_nan(desired):
            raise AssertionError(f"desired: got NaN, expected numbers, or equal_nan=True: {desired}")
        options |= {"equal_nan": equal_nan} if passes_on else {}
        return assertion(actual, desired, *args, **options)

    checked.guarded = True
    return checked


def _has_nan(desired):
    """Whether any of the expected numbers is NaN; strings and other objects are not."""
    desired = np.asarray(desired)
    if desired.dtype.kind not in "fcV":  # V: bf16 and other floats that numpy does not know
        return False
    return bool(np.isnan(desired.astype(np.complex128 if desired.dtype.kind == "c" else np.float64)).any())


def forbid_silent_nan():
    """Replaces both assertions for the whole process, once; chex's comparisons of trees call them too."""
    for name, passes_on in (("assert_allclose", True), ("assert_array_equal", False)):
        assertion = getattr(np.testing, name)
        if not hasattr(assertion, "guarded"):
            setattr(np.testing, name, _guarded(assertion, passes_on))
