"""The links that collectives take: between neighbouring chips of a slice of TPUs, or between GPUs and their switch."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence

import jax
import numpy as np

from ..devices import Device
from .hlo import Groups

Link = Hashable


class Switch:
    """GPUs whose links all lead to one switch, as within a host."""

    def route(self, source: int, target: int) -> Iterator[Link]:
        """The links of a message from one device to another."""
        if source != target:
            yield source, "out"
            yield target, "in"

    def shares(self, op: str, groups: Groups) -> dict[Link, float]:
        """How many times a collective's bytes each link carries; see `Transfer`."""
        n = max(map(len, groups))
        if op == "collective-permute":
            return self._loads(groups, 1)
        if op in ("all-to-all", "ragged-all-to-all"):
            return self._loads((pair for group in groups for pair in itertools.permutations(group, 2)), 1 / n)
        return self._rings(groups, (2 if op == "all-reduce" else 1) * (n - 1) / n)

    def _loads(self, pairs: Iterable[Sequence[int]], each: float) -> dict[Link, float]:
        counts = Counter(link for source, target in pairs for link in self.route(source, target))
        return {link: each * count for link, count in counts.items()}

    def _rings(self, groups: Groups, turns: float) -> dict[Link, float]:
        """Rings in the order of the groups, half of the bytes each way around."""
        pairs = [pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)]
        return self._loads([*pairs, *(pair[::-1] for pair in pairs)], turns / 2)


class Torus(Switch):
    """A slice of TPUs. A message passes the dimensions one after another, the shorter way where one is a ring.

    Args:
      places: the coordinates of each device: x, y and z of its chip, and its core on the chip.
      sizes: those of the slice.
      chip: one of the devices.
    """

    def __init__(self, places: Sequence[Sequence[int]], sizes: Sequence[int], chip: Device) -> None:
        self.places, self.sizes = places, sizes
        # where four chips are a ring, an optical switch closes it, around whole cubes alone
        closes = chip.wraps and (chip.wraps > 4 or all(size % 4 == 0 for size in sizes[:3]))
        self.rings = [bool(closes) and size >= chip.wraps for size in sizes[:3]] + [False]

    @classmethod
    def of(cls, devices: Sequence[jax.Device], chip: Device) -> Torus:
        """The slice of these devices, real or described."""
        places, everywhere = (
            np.array([(*d.coords, getattr(d, "core_on_chip", None) or 0) for d in found])
            for found in (devices, devices[0].client.devices())
        )
        low = everywhere.min(0)
        return cls((places - low).tolist(), (everywhere.max(0) - low + 1).tolist(), chip)

    def route(self, source: int, target: int) -> Iterator[Link]:
        """See `Switch`. Where both ways around a ring are equally long, chips at even places go up."""
        at = list(self.places[source])
        for d, (size, is_ring) in enumerate(zip(self.sizes, self.rings, strict=True)):
            way = self.places[target][d] - at[d]
            if is_ring and (2 * abs(way) > size or (2 * abs(way) == size and (way > 0) == at[d] % 2)):
                way -= size if way > 0 else -size
            step = 1 if way > 0 else -1
            for _ in range(abs(way)):
                yield *at[:3], d, step
                at[d] = (at[d] + step) % size

    def _rings(self, groups: Groups, turns: float) -> dict[Link, float]:
        """Rings along all dimensions of boxes of neighbours at once, each with a part of the bytes, as XLA has them.

        Around a ring there are two ways, and along a line one, as its last chip has one link. Where a group is no box,
        rings are in the order of the groups.
        """
        found: defaultdict[Link, float] = defaultdict(float)
        for group in groups:
            places = np.array([self.places[device] for device in group])
            extent = np.ptp(places, axis=0) + 1
            if not len(group) == len(np.unique(places, axis=0)) == np.prod(extent):
                return super()._rings(groups, turns)
            dims = [d for d in range(3) if extent[d] > 1] or [3]
            closed = [self.rings[d] and extent[d] == self.sizes[d] for d in range(4)]
            lanes = sum(2 if closed[d] else 1 for d in dims)
            low, high = places.min(0), places.max(0)
            for place, d, step in itertools.product(np.unique(places[:, :3], axis=0).tolist(), dims, (1, -1)):
                if d == 3 or closed[d] or low[d] <= place[d] + step <= high[d]:
                    found[(*place, d, step)] += turns / lanes
        return found
