"""Sets of token ids of unequal sizes, one for each token, such as the nuclei that samplers
record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxppo.base.arrays import check
from jaxppo.batch.host import as_integers


@dataclasses.dataclass(frozen=True)
class TokenSets:
    """One set of token ids for each of n tokens, in a flat i64 array: set j is
    `token_ids[offsets[j]:offsets[j + 1]]`.

    Example:
      >>> TokenSets.of("nucleus", [[5, 6], [], [7]]).offsets.tolist()
      [0, 2, 2, 3]
    """

    token_ids: Int[np.ndarray, " I"]
    offsets: Int[np.ndarray, " n+1"]

    @classmethod
    def of(cls, name: str, sets: Any) -> TokenSets:
        """Reads a sequence of sequences, or a mapping or an object that has it as `token_ids`
        (vLLM's SamplingMask).

        With `offsets`, `token_ids` are flat.

        Raises:
          TypeError: something else; ids that are not integers.
          ValueError: offsets that do not rise from 0 to the number of ids.
        """
        if isinstance(sets, TokenSets):
            return sets
        if isinstance(sets, jax.core.Tracer):
            raise TypeError(
                f"{name}: got a traced array, expected a sequence of sets, outside of jit"
            )
        if isinstance(sets, Mapping):
            token_ids = sets.get("token_ids")
            offsets = sets.get("offsets")
        else:
            token_ids = getattr(sets, "token_ids", None)
            offsets = getattr(sets, "offsets", None)
        if token_ids is not None and offsets is not None:
            return cls.flat(name, token_ids, offsets)
        if token_ids is not None:
            sets = token_ids
        return cls._ragged(name, sets)

    @classmethod
    def _ragged(cls, name: str, sets: Any) -> TokenSets:
        """Reads a sequence of sequences."""
        if isinstance(sets, (str, bytes, Mapping)) or not isinstance(sets, Iterable):
            got = type(sets).__name__
            raise TypeError(
                f"{name}: got {got}, expected a sequence of sets, or token_ids and offsets"
            )
        sets = list(sets)
        try:
            sizes = np.fromiter(map(len, sets), np.int64, len(sets))
        except TypeError:
            raise TypeError(
                f"{name}: got something without a length among the sets, expected sequences of ids,"
                " or offsets"
            ) from None
        if any(isinstance(x, np.ndarray) for x in sets):
            ids = np.concatenate([as_integers(name, x) for x in sets])
        else:
            ids = as_integers(name, list(chain.from_iterable(sets)))
        return cls(ids, np.concatenate([[0], np.cumsum(sizes)]))

    @classmethod
    def flat(cls, name: str, token_ids: Any, offsets: Any) -> TokenSets:
        """Reads flat arrays, and checks them."""
        token_ids = as_integers(name, token_ids)
        offsets = as_integers(name, offsets)
        size = token_ids.size
        last = int(offsets[-1]) if offsets.size else None
        rises = last == size and offsets[0] == 0 and bool((np.diff(offsets) >= 0).all())
        got = f"{offsets.size} offsets to {last} for {size} ids"
        check(name, got, rises, f"offsets that rise from 0 to {size}")
        return cls(token_ids, offsets)

    @classmethod
    def join(cls, several: Iterable[TokenSets]) -> TokenSets:
        """The sets of all the given `TokenSets`, in order."""
        several = list(several)
        token_ids = np.concatenate([each.token_ids for each in several])
        sizes = np.concatenate([np.zeros(1, np.int64), *(each.sizes for each in several)])
        return cls(token_ids, np.cumsum(sizes))

    @classmethod
    def empty(cls, count: int) -> TokenSets:
        """`count` empty sets."""
        return cls(np.zeros(0, np.int64), np.zeros(count + 1, np.int64))

    @property
    def sizes(self) -> Int[np.ndarray, " n"]:
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return self.offsets.size - 1

    def tolist(self) -> list[list[int]]:
        """The sets as lists."""
        if not len(self):
            return []
        return [ids.tolist() for ids in np.split(self.token_ids, self.offsets[1:-1])]

    def padded(self, width: int) -> Int[np.ndarray, "n width"]:
        """`i32[n, width]`, padded with -1."""
        out = np.full((len(self), width), -1, np.int32)
        sizes = self.sizes
        token = np.repeat(np.arange(len(self)), sizes)
        place = np.arange(token.size) - np.repeat(self.offsets[:-1], sizes)
        out[token, place] = self.token_ids
        return out

    def without_negative(self) -> TokenSets:
        """The sets without the negative ids that pad them."""
        if not self.token_ids.size or self.token_ids.min() >= 0:
            return self
        real = self.token_ids >= 0
        before = np.concatenate([[0], np.cumsum(real)])
        return TokenSets(self.token_ids[real], before[self.offsets])
