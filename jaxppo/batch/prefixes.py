"""Finds the prefixes that samples share, on the host, and splits samples so that each prefix is
stored once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxppo.base.arrays import check
from jaxppo.batch.rows import layout_of
from jaxppo.batch.samples import Piece, Sample
from jaxppo.batch.shared_rows import Codes, in_common, in_order
from jaxppo.sharding import ParallelMesh, check_row_length, segment_multiple


@dataclasses.dataclass(eq=False)
class _Node:
    """Tokens of a sample from the parent's `stop` to its own; a leaf is the part that no other
    sample shares.

    `_split` gives the `places` and the `segments` of a row that the node takes with its children.
    """

    stop: int
    sample: int
    children: list[_Node] = dataclasses.field(default_factory=list)
    is_leaf: bool = False
    places: int = 0
    segments: int = 1


class _Limits(NamedTuple):
    """The capacity of a row: the most tokens, with each segment padded to a multiple, and the
    most segments.
    """

    row_length: int
    multiple: int
    segments: int

    def places(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple


def shared_pieces(
    samples: Sequence[Sample],
    codes: Sequence[Codes],
    row_length: int,
    num_segments: int | None,
    mtp_depths: int,
    parallel: ParallelMesh | None,
) -> list[Piece]:
    """Splits samples into shared prefixes and branches: the segments to pack, one tree after
    another.

    A prefix is shared as far as the codes of two samples agree, see `shared_rows`, except for its
    last 1 + mtp_depths tokens. Each branch begins with a copy of those, so that every prediction
    from there, at any depth, has a position of its own. The codes are those of prompts where the
    rows hold the values of samples, which belong to one sample each. The pieces of a tree are
    neighbours, each after its parent.
    """
    layout, shards = layout_of(parallel)
    check_row_length(row_length, layout, shards)
    limits = _Limits(row_length, segment_multiple(layout, shards), num_segments or len(samples) * 2)
    for i, sample in enumerate(samples):
        count = len(sample.tokens)
        places = limits.places(count)
        got = f"{count} tokens ({places} with the layout's padding) in sample {i}"
        check("samples", got, places <= row_length, f"at most row_length={row_length}")
    root = _trie(samples, codes, 1 + mtp_depths)
    _leave_out(root, limits)
    above = _above(root, limits)
    for node, parent in _walk(root):
        places, segments = above[node]
        fits = places <= row_length and segments <= limits.segments
        if node.is_leaf and not fits:  # its path is too long for a row
            parent.children.remove(node)
            root.children.append(node)
    _leave_out(root, limits)
    return _laid_out(_split(root, limits))


def _trie(samples: Sequence[Sample], codes: Sequence[Codes], overlap: int) -> _Node:
    """The tree of common prefixes, of tokens with equal codes."""
    order = in_order(codes)
    root = _Node(0, order[0])
    path = [root]
    before = codes[order[0]][:0]
    for i in order:
        depth = max(in_common(before, codes[i]) - overlap, 0)
        while path[-1].stop > depth:
            path.pop()
        if path[-1].stop < depth:
            last = path[-1].children.pop()
            prefix = _Node(depth, i, [last])
            path[-1].children.append(prefix)
            path.append(prefix)
        path[-1].children.append(_Node(len(samples[i].tokens), i, is_leaf=True))
        before = codes[i]
    return root


def _walk(root: _Node) -> list[tuple[_Node, _Node]]:
    """(node, its parent) for all nodes but the root, parents first; without recursion, since
    trees may be deep.
    """
    nodes = []
    waiting = [(child, root) for child in reversed(root.children)]
    while waiting:
        node, parent = waiting.pop()
        nodes.append((node, parent))
        waiting += [(child, node) for child in reversed(node.children)]
    return nodes


def _above(root: _Node, limits: _Limits) -> dict[_Node, tuple[int, int]]:
    """The places and the segments of each node's path from the root, its own among them."""
    above = {root: (0, 0)}
    for node, parent in _walk(root):
        places, segments = above[parent]
        above[node] = places + limits.places(node.stop - parent.stop), segments + 1
    return above


def _leave_out(root: _Node, limits: _Limits) -> None:
    """Removes shared nodes that save no place: padding may outweigh them, or only one branch is
    left.
    """
    for node, parent in reversed(_walk(root)):
        if node.is_leaf:
            continue
        own = node.stop - parent.stop
        apart = 0
        together = limits.places(own)
        for child in node.children:
            length = child.stop - node.stop
            apart += limits.places(length + own)
            together += limits.places(length)
        if apart <= together:
            i = parent.children.index(node)
            parent.children[i : i + 1] = node.children


def _split(root: _Node, limits: _Limits) -> list[_Node]:
    """The trees to pack. A tree that does not fit a row is cut where it costs least.

    Every cut repeats the path above it, so cuts are made as near to the root as possible: branches
    that fit a row stay whole, and as few rows as possible repeat the path above them.
    """
    above = _above(root, limits)
    trees: dict[_Node, list[_Node]] = {}  # into which each node and what is below it was cut
    for node, parent in reversed(_walk(root)):
        own = limits.places(node.stop - parent.stop)
        below = [tree for child in node.children for tree in trees.pop(child)]
        places, segments = above[node]
        trees[node] = []
        for children in _first_fit(below, limits.row_length - places, limits.segments - segments):
            all_places = own + sum(child.places for child in children)
            all_segments = 1 + sum(child.segments for child in children)
            tree = dataclasses.replace(
                node, children=children, places=all_places, segments=all_segments
            )
            trees[node].append(tree)
    return [tree for child in root.children for tree in trees[child]]


def _first_fit(trees: list[_Node], places: int, segments: int) -> list[list[_Node]]:
    """Packs trees into bins, first-fit-decreasing; a single bin keeps their order."""
    if sum(x.places for x in trees) <= places and sum(x.segments for x in trees) <= segments:
        return [trees]
    bins: list[list[_Node]] = []
    free: list[tuple[int, int]] = []
    for tree in sorted(trees, key=lambda x: -x.places):
        fitting = (
            i
            for i, (left, count) in enumerate(free)
            if tree.places <= left and tree.segments <= count
        )
        k = next(fitting, len(bins))
        if k == len(bins):
            bins.append([])
            free.append((places, segments))
        bins[k].append(tree)
        left, count = free[k]
        free[k] = (left - tree.places, count - tree.segments)
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
