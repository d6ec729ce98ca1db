"""Finds the prefixes that prompts share, on the host, and splits samples so that each prefix is stored once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxppo.base.arrays import check
from jaxppo.batch.samples import Piece, Sample
from jaxppo.batch.shared_rows import in_common, in_order, prompts_of
from jaxppo.sharding import ParallelMesh, check_row_length, segment_multiple


@dataclasses.dataclass(eq=False)
class _Node:
    """Tokens of a sample from the parent's `stop` to its own; a leaf is the part that no other sample shares.

    `_split` gives the `places` and the `segments` of a row that the node takes with its children.
    """

    stop: int
    sample: int
    children: list[_Node] = dataclasses.field(default_factory=list)
    is_leaf: bool = False
    places: int = 0
    segments: int = 1


class _Limits(NamedTuple):
    """The capacity of a row: the most tokens, with each segment padded to a multiple, and the most segments."""

    row_length: int
    multiple: int
    segments: int

    def places(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple


def shared_pieces(
    samples: Sequence[Sample], row_length: int, num_segments: int | None, mtp_depths: int, parallel: ParallelMesh | None
) -> list[Piece]:
    """Splits samples into shared prefixes and branches: the segments to pack, one tree after another.

    A prefix is shared as far as the prompts of two samples agree, in tokens and in extras at the input, except for its
    last 1 + mtp_depths tokens. Each branch begins with a copy of those, so that every prediction from there, at any
    depth, has a position of its own. Responses are never shared, since their values belong to one sample. The pieces of
    a tree are neighbours, each after its parent.
    """
    layout, shards = (parallel.context_layout, parallel.context_size) if parallel else ("contiguous", 1)
    check_row_length(row_length, layout, shards)
    limits = _Limits(row_length, segment_multiple(layout, shards), num_segments or len(samples) * 2)
    for i, sample in enumerate(samples):
        count, places = len(sample.tokens), limits.places(len(sample.tokens))
        got = f"{count} tokens ({places} with the layout's padding) in sample {i}"
        check("samples", got, places <= row_length, f"at most row_length={row_length}")
    root = _trie(samples, 1 + mtp_depths)
    _leave_out(root, limits)
    above = _above(root, limits)
    for leaf, parent in _walk(root):
        if leaf.is_leaf and (above[leaf][0] > row_length or above[leaf][1] > limits.segments):  # its path fits no row
            parent.children.remove(leaf)
            root.children.append(leaf)
    _leave_out(root, limits)
    return _laid_out(_split(root, limits))


def _trie(samples: Sequence[Sample], overlap: int) -> _Node:
    """The tree of common prefixes, of tokens with equal extras at the input."""
    prompts = prompts_of(samples).codes
    order = in_order(prompts)
    root = _Node(0, order[0])
    path, before = [root], prompts[order[0]][:0]
    for i in order:
        depth = max(in_common(before, prompts[i]) - overlap, 0)
        while path[-1].stop > depth:
            path.pop()
        if path[-1].stop < depth:
            path[-1].children.append(_Node(depth, i, [path[-1].children.pop()]))
            path.append(path[-1].children[-1])
        path[-1].children.append(_Node(len(samples[i].tokens), i, is_leaf=True))
        before = prompts[i]
    return root


def _walk(root: _Node) -> list[tuple[_Node, _Node]]:
    """(node, its parent) for all nodes but the root, parents first; without recursion, since trees may be deep."""
    found, waiting = [], [(child, root) for child in reversed(root.children)]
    while waiting:
        node, parent = waiting.pop()
        found.append((node, parent))
        waiting += [(child, node) for child in reversed(node.children)]
    return found


def _above(root: _Node, limits: _Limits) -> dict[_Node, tuple[int, int]]:
    """The places and the segments of each node's path from the root, its own among them."""
    above = {root: (0, 0)}
    for node, parent in _walk(root):
        places, segments = above[parent]
        above[node] = places + limits.places(node.stop - parent.stop), segments + 1
    return above


def _leave_out(root: _Node, limits: _Limits) -> None:
    """Removes shared nodes that save no place: padding may outweigh them, or only one branch is left."""
    for node, parent in reversed(_walk(root)):
        if node.is_leaf:
            continue
        own = node.stop - parent.stop
        lengths = [child.stop - node.stop for child in node.children]
        saved = sum(limits.places(n + own) - limits.places(n) for n in lengths) - limits.places(own)
        if saved <= 0:
            at = parent.children.index(node)
            parent.children[at : at + 1] = node.children


def _split(root: _Node, limits: _Limits) -> list[_Node]:
    """The trees to pack. A tree that does not fit a row is cut where it costs least.

    Every cut repeats the path above it, so cuts are made as near to the root as possible: branches that fit a row stay
    whole, and as few rows as possible repeat the path above them.
    """
    above = _above(root, limits)
    parts: dict[_Node, list[_Node]] = {}
    for node, parent in reversed(_walk(root)):
        own = limits.places(node.stop - parent.stop)
        below = [part for child in node.children for part in parts.pop(child)]
        places, segments = above[node]
        bins = _first_fit(below, limits.row_length - places, limits.segments - segments)
        parts[node] = [
            dataclasses.replace(
                node,
                children=held,
                places=own + sum(x.places for x in held),
                segments=1 + sum(x.segments for x in held),
            )
            for held in bins
        ]
    return [part for child in root.children for part in parts[child]]


def _first_fit(trees: list[_Node], places: int, segments: int) -> list[list[_Node]]:
    """Packs trees into bins, first-fit-decreasing; a single bin keeps their order."""
    if sum(x.places for x in trees) <= places and sum(x.segments for x in trees) <= segments:
        return [trees]
    bins: list[list[_Node]] = []
    free: list[tuple[int, int]] = []
    for tree in sorted(trees, key=lambda x: -x.places):
        at = next((i for i, (p, n) in enumerate(free) if tree.places <= p and tree.segments <= n), len(bins))
        if at == len(bins):
            bins.append([])
            free.append((places, segments))
        bins[at].append(tree)
        free[at] = free[at][0] - tree.places, free[at][1] - tree.segments
    return bins


def _laid_out(trees: list[_Node]) -> list[Piece]:
    pieces: list[Piece] = []
    for number, tree in enumerate(trees):
        waiting: list[tuple[_Node, int | None]] = [(tree, None)]
        while waiting:
            node, parent = waiting.pop()
            while len(node.children) == 1:  # no other branch in this row shares it
                node = node.children[0]
            start = 0 if parent is None else pieces[parent].stop
            pieces.append(Piece(node.sample, start, node.stop, number, parent, not node.is_leaf))
            waiting += [(child, len(pieces) - 1) for child in reversed(node.children)]
    return pieces
