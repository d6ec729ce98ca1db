"""The rules for the values of a batch, in one table. The host checks all of them; every loss checks the cheap ones.

On the host `RolloutBatch.validate` raises at the first entry that breaks a rule. Under jit nothing can be raised: a
broken rule makes the loss NaN rather than a plausible number. The metric `broken_rules` tells which rules were broken,
as a bit set that `explain_broken_rules` reads.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxppo._arrays import LOG_PROBS, PER_SEGMENT
from jaxppo.pairs import Pairs
from jaxppo.sharding import Segments
from jaxppo.trees import has_branches, out_of_order, starts

MAX_LOG_PROB = 1e-3  # rounding may bring a log-prob of 0 up to this
Broken = Iterator[tuple[str, Any]]


@dataclasses.dataclass(frozen=True)
class View:
    """The arrays that rules read: on the host in logical order, in a loss one device's shards.

    Args:
      arrays: those of the batch; "log_probs", the loss's own; "normalizer", the counts of the given normalizer;
        "alone", the samples that lack their pair; on the host "lengths", the number of positions of each segment. Only
        those that exist.
      num_segments: S.
      lasts: `[R, T]`, the last position of the sequence of each position.
      loss_tokens: `[R, S]`, the number of loss tokens of each sequence; None without "normalizer".
      real_last_targets: the last position of a sequence has a real target.
      cut: sequences may continue on other devices, unseen here, because a caller passed its own shards.
      vocab_size: None where it is not known.
      xp: numpy or jax.numpy.
    """

    arrays: Mapping[str, Any]
    num_segments: int
    lasts: Any
    loss_tokens: Any
    real_last_targets: bool
    cut: bool
    vocab_size: int | None
    xp: ModuleType

    def __getitem__(self, name: str) -> Any:
        return self.arrays[name]

    @functools.cached_property
    def counts(self) -> Any:
        """The positions with loss; a NaN in the mask counts as loss."""
        return self["loss_mask"] != 0

    @functools.cached_property
    def starts(self) -> Any:
        """The first position of each sequence; on the host only."""
        segments = self["segment_ids"]
        return (segments != _before(segments)) & (segments > 0)

    @property
    def present(self) -> Any:
        """`[R, S]`, the segments that a row has; on the host only."""
        return self["lengths"] > 0

    def neighbour(self, name: str) -> Any:
        """Each position's successor in the row; on the host only."""
        return np.concatenate([self[name][:, 1:], self[name][:, :1]], axis=1)

    def of_segments(self, name: str) -> Any:
        """`[R, T]`, the value of each position's sequence; anything on padding."""
        inside = self.xp.clip(self["segment_ids"], 1, self.num_segments) - 1
        return self.xp.take_along_axis(self[name], inside, axis=1)

    def existing(self, *names: str) -> Iterator[tuple[str, Any]]:
        return ((name, self[name]) for name in names if name in self.arrays)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One rule.

    Args:
      name: the name of the rule in explanations.
      expected: the condition in words, for errors and explanations.
      broken: yields pairs (array name, where it breaks the rule).
      on_device: whether losses check the rule too.
      structural: whether other rules are meaningful only if this one holds.
      of_rows: whether each row can be checked alone.
    """

    name: str
    expected: str
    broken: Callable[[View], Broken]
    on_device: bool = True
    structural: bool = False
    of_rows: bool = True


def _mask_values(v: View) -> Broken:
    yield "loss_mask", v.counts & (v["loss_mask"] != 1)


def _mask_on_padding(v: View) -> Broken:
    yield "loss_mask", v.counts & (v["segment_ids"] == 0)


def _mask_on_last_position(v: View) -> Broken:
    if not v.real_last_targets and not v.cut:
        yield "loss_mask", v.counts & (v["segment_ids"] > 0) & (v["positions"] == v.lasts)


def _segment_range(v: View) -> Broken:
    yield "segment_ids", (v["segment_ids"] < 0) | (v["segment_ids"] > v.num_segments)


def _log_probs_above_zero(v: View) -> Broken:
    for name, x in v.existing("log_probs", *LOG_PROBS):
        yield name, v.counts & (x > MAX_LOG_PROB)


def _log_probs_not_finite(v: View) -> Broken:
    for name, x in v.existing("log_probs", *LOG_PROBS):
        yield name, v.counts & ~v.xp.isfinite(x)


def _values_not_finite(v: View) -> Broken:
    for name, x in v.existing("advantages", "values", "returns", "new_values"):
        yield name, v.counts & ~v.xp.isfinite(x)
    for name, _ in v.existing("sample_rewards"):
        yield name, v.counts & ~v.xp.isfinite(v.of_segments(name))


def _loss_weights(v: View) -> Broken:
    for name, x in v.existing("loss_weights"):
        yield name, v.counts & ~(v.xp.isfinite(x) & (x >= 0))


def _rollout_missing(v: View) -> Broken:
    for name, x in v.existing("rollout_ids"):
        yield name, (x < 0) & (v["sample_ids"] >= 0)


def _normalizer_of_another_step(v: View) -> Broken:
    for name, x in v.existing("normalizer"):
        differs = v.loss_tokens > x if v.cut else v.loss_tokens != x
        yield name, differs & ~v.xp.isnan(v.loss_tokens)  # a mask of NaN breaks a rule of its own


def _alone(v: View) -> Broken:
    yield from v.existing("alone")


def _parents(v: View) -> Broken:
    for name, x in v.existing("parents"):
        yield name, out_of_order(x, v.xp)


def _mask_without_sample(v: View) -> Broken:
    if "parents" in v.arrays:
        yield "loss_mask", v.counts & (v["segment_ids"] > 0) & (v.of_segments("sample_ids") < 0)


def _parents_elsewhere(v: View) -> Broken:
    for name, x in v.existing("parents"):
        held = np.take_along_axis(v["lengths"], np.clip(x, 1, v.num_segments) - 1, axis=1)
        yield name, (x > 0) & ((held == 0) | ~v.present)


def _order(v: View) -> Broken:
    segments = v["segment_ids"]
    yield "segment_ids", v.starts & (segments <= np.maximum.accumulate(_before(segments), axis=1))


def _positions(v: View) -> Broken:
    places = np.arange(v["segment_ids"].shape[1], dtype=np.int32)
    first = np.maximum.accumulate(v.starts * places, axis=1)
    expected = places - first
    if "parents" in v.arrays:
        begins = starts(v["parents"], v["lengths"], np)
        expected += np.take_along_axis(begins, np.clip(v["segment_ids"], 1, v.num_segments) - 1, axis=1)
    yield "positions", (v["segment_ids"] > 0) & (v["positions"] != expected)


def _vocabulary(v: View) -> Broken:
    if v.vocab_size is not None:
        yield "tokens", (v["segment_ids"] > 0) & ((v["tokens"] < 0) | (v["tokens"] >= v.vocab_size))
        yield "targets", v.counts & ((v["targets"] < 0) | (v["targets"] >= v.vocab_size))


def _next_token(v: View) -> Broken:
    segments = v["segment_ids"]
    follows = (segments == v.neighbour("segment_ids")) & (np.arange(segments.shape[1]) < segments.shape[1] - 1)
    yield "targets", follows & v.counts & (v["targets"] != v.neighbour("tokens"))


def _present_ids(v: View) -> Broken:
    needed = v.present
    if "parents" in v.arrays:
        needed = needed & ((v["sample_ids"] >= 0) | ~has_branches(v["parents"], np))
    for name, x in v.existing("sample_ids", "group_ids", "rollout_ids"):
        yield name, needed & (x < 0)


def _own_ids(v: View) -> Broken:
    ids = np.where(v.present, v["sample_ids"], -1)
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    is_first = first[inverse].reshape(ids.shape) == np.arange(ids.size).reshape(ids.shape)
    yield "sample_ids", (ids >= 0) & ~is_first


def _rewards(v: View) -> Broken:
    for name, x in v.existing("rewards"):
        yield name, v.present & ~np.isfinite(x)


def _before(x: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


# Bit i of `broken_rules` is rule i, so add a new rule after the last one that losses check.
RULES = (
    Rule(
        "loss_mask_values",
        "0 or 1; NaN where a token to train on is predicted by nothing, or by padding, see the batch's constructor",
        _mask_values,
    ),
    Rule("loss_mask_on_padding", "0 where segment_ids is 0", _mask_on_padding),
    Rule(
        "loss_mask_on_last_position",
        "0 at the last position of a sequence, since its target is no token of it: arrays that are aligned to tokens "
        "want RolloutBatch.from_token_aligned, and targets that go on past the tokens from_target_aligned",
        _mask_on_last_position,
    ),
    Rule("segment_ids_range", "0 to {S}", _segment_range, structural=True),
    Rule("log_probs_above_zero", f"log-probs of at most {MAX_LOG_PROB} where loss_mask is 1", _log_probs_above_zero),
    Rule(
        "log_probs_not_finite",
        "finite log-probs where loss_mask is 1; those of the policy are not where a target is outside the vocabulary, "
        "or hidden states or head hold NaN. For tokens that a policy finds impossible, -inf, see "
        "PolicyLossConfig.impossible_tokens",
        _log_probs_not_finite,
    ),
    Rule(
        "values_not_finite",
        "finite advantages, values and returns where loss_mask is 1, and rewards where they say what is desirable",
        _values_not_finite,
    ),
    Rule("rollout_ids_missing", "a rollout id of at least 0 for each sample", _rollout_missing),
    Rule(
        "normalizer_of_another_step",
        "a normalizer that was made of this step, sliced like it: as many loss tokens for each sequence as it counted",
        _normalizer_of_another_step,
    ),
    Rule(
        "pairs",
        "of each pair two samples with one group id and unequal rewards, both with loss tokens and in one micro-batch, "
        "see micro_batches_of_pairs",
        _alone,
    ),
    Rule(
        "parents",
        "0, or the number of a segment of the same row that stands before it, with nothing between the two but what "
        "goes on from that one",
        _parents,
        structural=True,
    ),
    Rule(
        "loss_without_sample",
        "0 in a shared prefix, which is a segment without a sample: each sample has a loss of its own",
        _mask_without_sample,
    ),
    Rule("loss_weights", "finite weights of at least 0 where loss_mask is 1", _loss_weights),
    Rule(
        "parents_elsewhere",
        "the number of a segment that this row holds: a tree lies in one row",
        _parents_elsewhere,
        on_device=False,
        structural=True,
    ),
    Rule("order", "each sequence to be contiguous and in order", _order, on_device=False, structural=True),
    Rule(
        "positions", "0, 1, ... in each sequence, or on from its parent", _positions, on_device=False, structural=True
    ),
    Rule("vocabulary", "0 to {V}", _vocabulary, on_device=False),
    Rule("next_token", "the next token of the sequence", _next_token, on_device=False),
    Rule("present_ids", "at least 0 for each sequence but a shared prefix", _present_ids, on_device=False),
    Rule("own_ids", "an id of its own for each sample", _own_ids, on_device=False, of_rows=False),
    Rule("rewards", "a finite number for a sequence that is there", _rewards, on_device=False),
)
ON_DEVICE = tuple(rule for rule in RULES if rule.on_device)
RULES_OF_ROWS = tuple(rule for rule in RULES if rule.of_rows)
RULES_OF_STEPS = tuple(rule for rule in RULES if not rule.of_rows)


def count_broken(
    arrays: Mapping[str, Array | None], segments: Segments, real_last_targets: bool
) -> Float[Array, " rules"]:
    """Per-shard: for each rule of `ON_DEVICE`, the number of this device's entries that break it.

    Args:
      arrays: as in `View`; None for absent ones.
      segments: the sequences of the rows.
      real_last_targets: see `View`.
    """
    existing = {name: x for name, x in arrays.items() if x is not None}
    if "pair_ids" in existing:
        of_samples = segments.sum(existing["loss_mask"])
        pairs = Pairs.of(segments.axes, existing["pair_ids"], existing["pair_rewards"], of_samples)
        existing["alone"] = pairs.alone
    lengths = segments.sum(jnp.ones_like(segments.segment_ids))
    behind = lengths if existing.get("parents") is None else lengths + starts(existing["parents"], lengths, jnp)
    loss_tokens = segments.sum(existing["loss_mask"]) if "normalizer" in existing else None
    cut = bool(segments.axes.unknown(segments.segment_ids))
    lasts = segments.spread(behind) - 1
    view = View(existing, segments.num_segments, lasts, loss_tokens, real_last_targets, cut, None, jnp)
    found = ([bad.sum(dtype=jnp.float32) for _, bad in rule.broken(view)] for rule in ON_DEVICE)
    return jnp.stack([functools.reduce(jnp.add, counts, jnp.float32(0)) for counts in found])


def broken_log_probs(log_probs: Float[Array, "..."], loss_mask: Float[Array, "..."]) -> Bool[Array, "..."]:
    """The tokens whose log-probs break a rule; for code that sees only some of the tokens."""
    view = View({"log_probs": log_probs, "loss_mask": loss_mask}, 0, None, None, True, False, None, jnp)
    found = [bad for rule in (_log_probs_above_zero, _log_probs_not_finite) for _, bad in rule(view)]
    return found[0] | found[1]


def as_bits(counts: Float[Array, " rules"]) -> Int[Array, ""]:
    """Bit i is set if rule i of `ON_DEVICE` was broken."""
    return ((counts > 0).astype(jnp.int32) << jnp.arange(len(ON_DEVICE), dtype=jnp.int32)).sum(dtype=jnp.int32)


def explain_broken_rules(bits: int | Array) -> list[str]:
    """Explains the bits of the metric `broken_rules`.

    Args:
      bits: the metric's value.

    Returns:
      A line for each broken rule; an empty list for 0.

    Raises:
      ValueError: a number that has other bits.

    Example:
      >>> explain_broken_rules(2)
      ['loss_mask_on_padding: expected 0 where segment_ids is 0']
    """
    number = int(bits)
    if not 0 <= number < 1 << len(ON_DEVICE):
        raise ValueError(f"bits: got {number}, expected 0 to {(1 << len(ON_DEVICE)) - 1}")
    return [
        f"{rule.name}: expected {rule.expected.format(S='S', V='V - 1')}"
        for i, rule in enumerate(ON_DEVICE)
        if number >> i & 1
    ]


def raise_first(view: View, rules: tuple[Rule, ...] = RULES) -> None:
    """Raises ValueError at the first entry that breaks one of them, with its row and logical position, or segment."""
    for rule in sorted(rules, key=lambda rule: not rule.structural):
        for name, bad in rule.broken(view):
            if bad.any():
                row, place = (int(i) for i in np.argwhere(bad)[0])
                where = "segment" if name in (*PER_SEGMENT, "normalizer") else "position"
                expected = rule.expected.format(S=view.num_segments, V=(view.vocab_size or 0) - 1)
                got = f"{view[name][row, place]} at row {row}, {where} {place}"
                raise ValueError(f"{name}: got {got}, expected {expected}")
