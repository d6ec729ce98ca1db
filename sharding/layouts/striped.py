"""Position t on shard t mod C: Transformer Engine's striped load balancing of packed ring attention."""

from __future__ import annotations

from typing import Any

from .base import Layout, Row


class Striped(Layout):
    name = "striped"

    def position_at(self, places: Any, row: Row) -> Any:
        return places % row.local * row.shards + places // row.local

    def place_of(self, positions: Any, row: Row) -> Any:
        return positions % row.shards * row.local + positions // row.shards
