"""Position t on shard t mod C: Transformer Engine's striped load balancing of packed ring attention."""

from __future__ import annotations

from .base import Layout, Points, Row


class Striped(Layout):
    name = "striped"

    def position_at(self, places: Points, row: Row) -> Points:
        return places % row.local * row.shards + places // row.local

    def place_of(self, positions: Points, row: Row) -> Points:
        return positions % row.shards * row.local + positions // row.shards
