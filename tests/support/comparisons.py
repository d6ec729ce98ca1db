"""NaN equals NaN in no comparison of the tests, unless the test says so.

numpy's assertions take NaN for equal to NaN, so that two broken functions agree. `equal_nan=True`
allows it, in `np.testing.assert_allclose` and, since numpy's own has no such argument, in
`np.testing.assert_array_equal`.
"""

import functools

import numpy as np


def _guarded(assertion, passes_on):
    @functools.wraps(assertion)
    def checked(actual, desired, *args, equal_nan=False, **options):
        __tracebackhide__ = True
        if not equal_nan and _has_nan(desired):
            raise AssertionError(
                f"desired: got NaN, expected numbers, or equal_nan=True: {desired}"
            )
        if passes_on:
            options["equal_nan"] = equal_nan
        elif equal_nan:  # numpy takes NaN for equal to NaN, but only in dtypes that it knows
            actual = _in_known_dtype(actual)
            desired = _in_known_dtype(desired)
        return assertion(actual, desired, *args, **options)

    checked.guarded = True
    return checked


def _has_nan(desired):
    """Whether any of the expected numbers is NaN; strings and other objects are not."""
    desired = _in_known_dtype(desired)
    return desired.dtype.kind in "fc" and bool(np.isnan(desired).any())


def _in_known_dtype(array):
    """The array; one of bf16, or of another float that numpy does not know, in float64."""
    array = np.asarray(array)
    if array.dtype.kind == "V":
        return array.astype(np.float64)
    return array


def forbid_silent_nan():
    """Replaces both assertions for the whole process, once; chex's comparisons of trees call
    them too.
    """
    for name, passes_on in (("assert_allclose", True), ("assert_array_equal", False)):
        assertion = getattr(np.testing, name)
        if not hasattr(assertion, "guarded"):
            setattr(np.testing, name, _guarded(assertion, passes_on))
