"""A search for the best plan: compiles candidates, the likeliest first, until no other can be
among the best.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable
from pathlib import Path

from tqdm import tqdm

from examples.planner.plan_bounds import Bound, Candidate, Work, bound, candidates
from examples.planner.plan_compilers import Compilers, Found, Kept

BEST = 5


class Search:
    """What to compile next, from what has been compiled.

    Candidates are compiled in the order of a guess of their time: `Bound.expected`, times the
    smallest ratio of compiled time to `expected` so far. The ratio is that of plans with the same
    cp, tp and trees, if one was compiled. A candidate is left out if its bound or its guess is
    above the time of the fifth best. Budgets of the head are tried last, on the five best.
    """

    def __init__(self, work: Work, memories: Iterable[float] = ()) -> None:
        self.work = work
        self.memories = tuple(memories)
        bounds = {c: bound(work, c) for c in candidates(work)}
        self.considered = len(bounds)
        self._order = sorted(
            (c for c in bounds if self._may_fit(bounds[c])), key=lambda c: bounds[c].expected
        )
        self._bounds = {c: bounds[c] for c in self._order}
        self.found: dict[Candidate, Found] = {}

    def _may_fit(self, b: Bound) -> bool:
        return b.bytes <= self.work.device.memory

    @property
    def fitting(self) -> int:
        """How many candidates may fit, by their bounds."""
        return len(self._order)

    def bound(self, c: Candidate) -> Bound:
        """The bound of a candidate. The budget of the head does not change it."""
        return self._bounds[_any_memory(c)]

    def add(self, found: Found) -> None:
        """Adds the figures of a candidate; ignored if this search does not consider it."""
        if _any_memory(found.candidate) in self._bounds:
            self.found[found.candidate] = found

    def fits(self, found: Found) -> bool:
        return (
            bool(found.times)
            and found.needed is not None
            and found.needed <= self.work.device.memory
        )

    @property
    def best(self) -> list[Found]:
        """The fastest plans so far, each with the best budget of those tried for its head."""
        fastest: dict[Candidate, Found] = {}
        for f in sorted(filter(self.fits, self.found.values()), key=lambda f: f.ms):
            fastest.setdefault(_any_memory(f.candidate), f)
        return list(fastest.values())[:BEST]

    @property
    def limit(self) -> float:
        """Milliseconds of the fifth best: a candidate must take less."""
        best = self.best
        return best[-1].ms if len(best) == BEST else math.inf

    def open(self) -> tuple[list[Candidate], list[Candidate]]:
        """Candidates that are not compiled: those to compile next, and those that only the guess
        leaves out.
        """
        limit = self.limit
        ratios = self._ratios()
        any_plan = min(ratios.values(), default=1.0)
        left = {
            c: self.bound(c).expected * ratios.get(_shares(c), any_plan)
            for c in self._variants()
            if c not in self.found and self.bound(c).ms < limit
        }
        # meshes first, which matter more
        order = sorted(left, key=lambda c: (c.memory is not None, left[c]))
        likely = [c for c in order if c.memory is not None or left[c] < limit]
        return likely, [c for c in order if c.memory is None and left[c] >= limit]

    def _ratios(self) -> dict[tuple[int, int, bool], float]:
        """The smallest ratio of compiled time to `Bound.expected`, for each cp, tp and trees."""
        found: dict[tuple[int, int, bool], float] = {}
        for f in self.found.values():
            if f.times:
                ratio = f.ms / self.bound(f.candidate).expected
                shares = _shares(f.candidate)
                found[shares] = min(ratio, found.get(shares, math.inf))
        return found

    def _variants(self) -> list[Candidate]:
        return self._order + [
            dataclasses.replace(f.candidate, memory=m) for f in self.best for m in self.memories
        ]


def _any_memory(c: Candidate) -> Candidate:
    return dataclasses.replace(c, memory=None)


def _shares(c: Candidate) -> tuple[int, int, bool]:
    """What determines the shapes of a device's products, except for the number of rows."""
    return c.cp, c.tp, c.trees


def run(search: Search, folder: Path, *, minutes: float = math.inf, workers: int = 1) -> None:
    """Compiles candidates, `workers` at a time, and keeps the figures of each in a file of the
    folder.

    Returns when nothing is left to compile, or after `minutes`. Unfinished compilations are lost.
    """
    end = time.monotonic() + 60 * minutes
    lost: set[Candidate] = set()
    with Kept(folder, search.work) as cache, Compilers(search.work, workers) as compilers:
        for found in cache.read():
            search.add(found)
        with tqdm(initial=len(search.found), desc="plans", unit="plan", dynamic_ncols=True) as bar:
            while (left := end - time.monotonic()) > 0:
                todo = [c for c in search.open()[0] if c not in lost and c not in compilers]
                _show(bar, search, len(todo) + len(compilers))
                compilers.start(todo)
                if not len(compilers):
                    break
                for c, found in compilers.done(left):
                    if isinstance(found, int):
                        lost.add(c)
                        tqdm.write(f"{c}: its compiler ended with {found}")
                    else:
                        search.add(found)
                        cache.add(found)


def _show(bar: tqdm[None], search: Search, left: int) -> None:
    bar.total = len(search.found) + left
    bar.n = len(search.found)
    bar.set_postfix_str(f"best {search.best[0].ms:.0f} ms" if search.best else "")
