"""The links that collectives take: between neighbouring chips of a slice of TPUs, or between
GPUs and their switch.
"""

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
            pairs = [pair for group in groups for pair in itertools.permutations(group, 2)]
            return self._loads(pairs, 1 / n)
        once_around = (n - 1) / n
        if op == "all-reduce":
            return self._rings(groups, 2 * once_around)
        return self._rings(groups, once_around)

    def _loads(self, pairs: Iterable[Sequence[int]], each: float) -> dict[Link, float]:
        counts = Counter(link for source, target in pairs for link in self.route(source, target))
        return {link: each * count for link, count in counts.items()}

    def _rings(self, groups: Groups, turns: float) -> dict[Link, float]:
        """Rings in the order of the groups, half of the bytes each way around."""
        up = [pair for group in groups for pair in zip(group, (*group[1:], group[0]), strict=True)]
        down = [(target, source) for source, target in up]
        return self._loads([*up, *down], turns / 2)


class Torus(Switch):
    """A slice of TPUs.

    A message passes the dimensions one after another, the shorter way where one is a ring.

    Args:
      places: the coordinates of each device: x, y and z of its chip, and its core on the chip.
      sizes: those of the slice.
      chip: one of the devices.
    """

    def __init__(self, places: Sequence[Sequence[int]], sizes: Sequence[int], chip: Device) -> None:
        self.places = places
        self.sizes = sizes
        # where four chips are a ring, an optical switch closes it, around whole cubes alone
        closes = chip.wraps and (chip.wraps > 4 or all(size % 4 == 0 for size in sizes[:3]))
        self.rings = [bool(closes) and size >= chip.wraps for size in sizes[:3]] + [False]

    @classmethod
    def of(cls, devices: Sequence[jax.Device], chip: Device) -> Torus:
        """The slice of these devices, real or described."""
        places = _coordinates(devices)
        slice_places = _coordinates(devices[0].client.devices())
        low = slice_places.min(0)
        sizes = slice_places.max(0) - low + 1
        return cls((places - low).tolist(), sizes.tolist(), chip)

    def route(self, source: int, target: int) -> Iterator[Link]:
        """See `Switch`.

        Where both ways around a ring are equally long, chips at even places go up.
        """
        at = list(self.places[source])
        for d, (size, is_ring) in enumerate(zip(self.sizes, self.rings, strict=True)):
            way = self.places[target][d] - at[d]
            if is_ring:
                way = _shorter_way(way, size, at[d])
            step = 1 if way > 0 else -1
            for _ in range(abs(way)):
                yield *at[:3], d, step
                at[d] = (at[d] + step) % size

    def _rings(self, groups: Groups, turns: float) -> dict[Link, float]:
        """Rings along all dimensions of boxes of neighbours at once, each with a part of the bytes,
        as XLA has them.

        Around a ring there are two ways, and along a line one, as its last chip has one link. Where
        a group is no box, rings are in the order of the groups.
        """
        loads: defaultdict[Link, float] = defaultdict(float)
        for group in groups:
            places = np.array([self.places[device] for device in group])
            extent = np.ptp(places, axis=0) + 1
            if not len(group) == len(np.unique(places, axis=0)) == np.prod(extent):
                return super()._rings(groups, turns)
            dims = [d for d in range(3) if extent[d] > 1] or [3]
            closed = [self.rings[d] and extent[d] == self.sizes[d] for d in range(4)]
            lanes = len(dims) + sum(closed[d] for d in dims)
            low = places.min(0)
            high = places.max(0)
            chips = np.unique(places[:, :3], axis=0).tolist()
            for place, d, step in itertools.product(chips, dims, (1, -1)):
                if d == 3 or closed[d] or low[d] <= place[d] + step <= high[d]:
                    loads[(*place, d, step)] += turns / lanes
        return loads


def _coordinates(devices: Sequence[jax.Device]) -> np.ndarray:
    """`[devices, 4]`: x, y and z of each chip, and the core on it."""
    return np.array(
        [(*device.coords, getattr(device, "core_on_chip", None) or 0) for device in devices]
    )


def _shorter_way(way: int, size: int, start: int) -> int:
    """`way` steps along a ring of `size` chips, or the steps the other way around where these
    are fewer.
    """
    is_tie = 2 * abs(way) == size
    if 2 * abs(way) < size or (is_tie and (way > 0) != start % 2):
        return way
    if way > 0:
        return way - size
    return way + size
