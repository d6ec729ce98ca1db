"""A teacher's top-k as it was recorded, checked on the host before a step."""

from __future__ import annotations

import numpy as np
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import KINDS, MAX_SAMPLED, check_array, check_count
from jaxppo.batch.host import as_array
from jaxppo.batch.reads import mass_of


def check_top_k(
    ids: Int[Array | np.ndarray, "*batch K"],
    log_probs: Float[Array | np.ndarray, "*batch K"],
    vocab_size: int,
) -> None:
    """Raises at the first invalid entry of a teacher's top-k; on the host, before a step.

    Args:
      ids: `[..., K]`, -1 or in `[0, vocab_size)`, none twice at a position.
      log_probs: `[..., K]`, within the bounds of `top_k_divergence` where there is an id, and so is
        their mass.
      vocab_size: V.

    Raises:
      ValueError: shapes that differ, or an entry, with its place.

    Example:
      >>> check_top_k(np.array([[5, 5]]), np.log([[0.5, 0.25]]), vocab_size=10)
      Traceback (most recent call last):
      ...
      ValueError: ids: got 5 at (0, 1), expected each id once at a position
    """
    check_count("vocab_size", vocab_size, least=1)
    ids = as_array("ids", ids, "an array of integers")
    log_probs = as_array("log_probs", log_probs, "an array of floats")
    check_array("ids", ids)
    check_array("log_probs", log_probs, ids.shape, "that of ids", KINDS["teacher_log_probs"])
    log_probs = log_probs.astype(np.float64)
    has_id = ids != -1
    order = np.argsort(ids, axis=-1, kind="stable")
    twice = np.zeros_like(has_id)
    again = np.diff(np.take_along_axis(ids, order, axis=-1), axis=-1, prepend=-1) == 0
    np.put_along_axis(twice, order, again, axis=-1)
    mass = mass_of(log_probs, has_id, np)[..., None]
    rules = (
        ("ids", ids, (ids < -1) | (ids >= vocab_size), f"-1 or 0 to {vocab_size - 1}"),
        ("ids", ids, twice & has_id, "each id once at a position"),
        (
            "log_probs",
            log_probs,
            has_id & ~(log_probs <= MAX_SAMPLED),
            f"log-probs of at most {MAX_SAMPLED}",
        ),
        ("the mass of log_probs", mass, mass > np.exp(MAX_SAMPLED), "at most 1"),
    )
    for name, x, bad, expected in rules:
        if bad.any():
            place = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"{name}: got {x[place]} at {place}, expected {expected}")
