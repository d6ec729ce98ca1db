"""Finds the prefixes that prompts share, on the host, and splits samples so that each prefix is stored once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxppo.batch.samples import Piece, Sample
from jaxppo.sharding import ParallelMesh, segment_multiple


@dataclasses.dataclass
class _Node:
    """Tokens of a sample from the parent's `stop` to its own; a leaf is the part that no other sample shares."""

    stop: int
    sample: int
    children: list[_Node] = dataclasses.field(default_factory=list)
    is_leaf: bool = False


@dataclasses.dataclass(frozen=True)
class _Limits:
    """The capacity of a row: the most tokens, with each segment padded to a multiple, and the most segments."""

    row_length: int
    multiple: int
    segments: int

    def places(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple


def shared_pieces(
    samples: Sequence[Sample],
    *,
    row_length: int,
    num_segments: int | None,
    mtp_depths: int,
    parallel: ParallelMesh | None,
) -> list[Piece]:
    """Splits samples into shared prefixes and branches: the segments to pack, one tree after another.

    A prefix is shared as far as the prompts of two samples agree, except for its last 1 + mtp_depths tokens. Each
    branch begins with a copy of those, so that every prediction from there, at any depth, has a position of its own.
    Responses are never shared, since their values belong to one sample.

    Args:
      samples: checked samples.
      row_length: T.
      num_segments: S, None for no limit.
      mtp_depths: the most depths of `mtp_loss`.
      parallel: the mesh; its layout decides what segments are padded to.

    Returns:
      The pieces; those of a tree are neighbours, each after its parent.

    Raises:
      ValueError: a sample that is longer than a row.
    """
    layout, shards = (parallel.context_layout, parallel.context_size) if parallel else ("contiguous", 1)
    limits = _Limits(row_length, segment_multiple(layout, shards), num_segments or len(samples) * 2)
    for i, sample in enumerate(samples):
        if limits.places(len(sample.tokens)) > row_length:
            raise ValueError(
                f"samples: got {len(sample.tokens)} tokens ({limits.places(len(sample.tokens))} with the layout's "
                f"padding) in sample {i}, expected at most row_length={row_length}"
            )
    root = _trie(samples, 1 + mtp_depths)
    _leave_out(root, limits)
    for leaf in _too_far(root, limits):
        root.children.append(leaf)
    _leave_out(root, limits)
    return _laid_out(_split(root, limits))


def _trie(samples: Sequence[Sample], overlap: int) -> _Node:
    """The tree of common prefixes. Prompts are sorted first: the longest common prefix is then with a neighbour."""
    prompts = [np.asarray(sample.tokens, np.int32)[: sample.start] for sample in samples]
    order = sorted(range(len(samples)), key=lambda i: (prompts[i].astype(">i4").tobytes(), i))  # no token is below 0
    root = _Node(0, order[0])
    path, before = [root], prompts[order[0]][:0]
    for i in order:
        depth = max(_common(before, prompts[i]) - overlap, 0)
        while path[-1].stop > depth:
            path.pop()
        if path[-1].stop < depth:
            path[-1].children.append(_Node(depth, i, [path[-1].children.pop()]))
            path.append(path[-1].children[-1])
        path[-1].children.append(_Node(len(samples[i].tokens), i, is_leaf=True))
        before = prompts[i]
    return root


def _common(x: np.ndarray, y: np.ndarray) -> int:
    """The length of the common prefix of two prompts."""
    length = min(len(x), len(y))
    differs = x[:length] != y[:length]
    return int(np.argmax(differs)) if differs.any() else length


def _walk(root: _Node) -> list[tuple[_Node, _Node]]:
    """(node, its parent) for all nodes but the root, parents first; without recursion, since trees may be deep."""
    found, waiting = [], [(child, root) for child in reversed(root.children)]
    while waiting:
        node, parent = waiting.pop()
        found.append((node, parent))
        waiting += [(child, node) for child in reversed(node.children)]
    return found


def _leave_out(root: _Node, limits: _Limits) -> None:
    """Removes shared nodes that save no place: padding may outweigh them, or only one branch is left."""
    for node, parent in reversed(_walk(root)):
        if node.is_leaf:
            continue
        own = node.stop - parent.stop
        lengths = [child.stop - node.stop for child in node.children]
        saved = sum(limits.places(n + own) - limits.places(n) for n in lengths) - limits.places(own)
        if saved <= 0:
            at = next(i for i, child in enumerate(parent.children) if child is node)
            parent.children[at : at + 1] = node.children


def _too_far(root: _Node, limits: _Limits) -> list[_Node]:
    """Removes, and returns, the leaves whose padded path from the root does not fit a row."""
    above, out = {id(root): (0, 0)}, []
    for node, parent in _walk(root):
        places, segments = above[id(parent)]
        above[id(node)] = places + limits.places(node.stop - parent.stop), segments + 1
        if node.is_leaf and (above[id(node)][0] > limits.row_length or segments + 1 > limits.segments):
            parent.children = [child for child in parent.children if child is not node]
            out.append(node)
    return out


@dataclasses.dataclass(frozen=True)
class _Subtree:
    """A node with some of its branches."""

    node: _Node
    places: int
    segments: int
    below: tuple[_Subtree, ...] = ()


def _split(root: _Node, limits: _Limits) -> list[_Subtree]:
    """The trees to pack. A tree that does not fit a row is cut where it costs least.

    Every cut repeats the path above it, so cuts are made as near to the root as possible: branches that fit a row stay
    whole, and as few rows as possible repeat the path above them.
    """
    nodes = _walk(root)
    above = {id(root): (0, 0)}
    for node, parent in nodes:
        places, segments = above[id(parent)]
        above[id(node)] = places + limits.places(node.stop - parent.stop), segments + 1
    subtrees: dict[int, list[_Subtree]] = {}
    for node, parent in reversed(nodes):
        own = limits.places(node.stop - parent.stop)
        below = [subtree for child in node.children for subtree in subtrees.pop(id(child))]
        places, segments = above[id(node)]
        bins = _first_fit(below, limits.row_length - places, limits.segments - segments) if below else [[]]
        subtrees[id(node)] = [
            _Subtree(node, own + sum(x.places for x in held), 1 + sum(x.segments for x in held), tuple(held))
            for held in bins
        ]
    return [subtree for child in root.children for subtree in subtrees[id(child)]]


def _first_fit(subtrees: list[_Subtree], places: int, segments: int) -> list[list[_Subtree]]:
    """Packs subtrees into bins, first-fit-decreasing; a single bin keeps their order."""
    if sum(x.places for x in subtrees) <= places and sum(x.segments for x in subtrees) <= segments:
        return [subtrees]
    bins: list[list[_Subtree]] = []
    free: list[tuple[int, int]] = []
    for subtree in sorted(subtrees, key=lambda x: -x.places):
        at = next((i for i, (p, n) in enumerate(free) if subtree.places <= p and subtree.segments <= n), len(bins))
        if at == len(bins):
            bins.append([])
            free.append((places, segments))
        bins[at].append(subtree)
        free[at] = free[at][0] - subtree.places, free[at][1] - subtree.segments
    return bins


def _laid_out(trees: list[_Subtree]) -> list[Piece]:
    pieces: list[Piece] = []
    for number, tree in enumerate(trees):
        waiting: list[tuple[_Subtree, int | None]] = [(tree, None)]
        while waiting:
            subtree, parent = waiting.pop()
            while len(subtree.below) == 1:  # no other branch in this row shares it
                subtree = subtree.below[0]
            node, start = subtree.node, 0 if parent is None else pieces[parent].stop
            pieces.append(Piece(node.sample, start, node.stop, number, parent, not node.is_leaf))
            waiting += [(below, len(pieces) - 1) for below in reversed(subtree.below)]
    return pieces
