"""The rules for the values of a batch, in one table. The host checks all of them; every loss checks the cheap ones.

On the host `RolloutBatch.validate` raises at the first entry that breaks a rule. Under jit nothing can be raised: a
broken rule makes the loss NaN rather than a plausible number. The metric `broken_rules` tells which rules were broken,
as a number that `explain_broken_rules` reads.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from jaxppo.base.arrays import MAX_LOG_PROB, MAX_SAMPLED
from jaxppo.batch.reads import NUMBERS, OF_MODELS, PER_TOKEN, Kind, mass_of
from jaxppo.batch.trees import has_branches, out_of_order, starts

Broken = Iterator[tuple[str, Any]]


@dataclasses.dataclass(frozen=True)
class View:
    """The arrays that rules read: on the host in logical order, in a loss one device's shards.

    Args:
      arrays: those that a loss reads, by the names of `PER_TOKEN` and of the rules below; "normalizer", the counts of
        the given normalizer, and "denominators", its other numbers; "alone", the samples that lack their pair; on the
        host those of the batch, and "lengths", the number of positions of each segment. Only those that exist.
      num_segments: S.
      lasts: `[R, T]`, the last position of the sequence of each position.
      loss_tokens: `[R, S]`, the number of loss tokens of each sequence; None without "normalizer".
      real_last_targets: the last position of a sequence has a real target.
      cut: sequences may continue on other devices, unseen here, because a caller passed its own shards.
      vocab_size: None where it is not known.
      adapters: the number of the head's adapters.
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
    adapters: int = 0

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


def _of_kind(name: str, kind: Kind) -> Callable[[View], Broken]:
    def broken(v: View) -> Broken:
        for _, x in v.existing(name):
            yield name, v.counts & kind.bad(x, v.xp)

    return broken


def _not_finite(name: str) -> Callable[[View], Broken]:
    def broken(v: View) -> Broken:
        for _, x in v.existing(name):
            yield name, ~v.xp.isfinite(x)

    return broken


def _rewards_of_samples(v: View) -> Broken:
    for name, _ in v.existing("sample_rewards"):
        yield name, v.counts & ~v.xp.isfinite(v.of_segments(name))


def _denominators(v: View) -> Broken:
    for name, x in v.existing("denominators"):
        yield name, ~(v.xp.isfinite(x) & (x >= 0))


def _targets(v: View) -> Broken:
    for name, x in v.existing("targets"):
        if v.vocab_size is not None:
            yield name, v.counts & ((x < 0) | (x >= v.vocab_size))


def _nucleus_ids(v: View) -> Broken:
    for name, x in v.existing("nucleus_ids"):
        yield name, v.counts & ((x < -1) | (x >= v.vocab_size)).any(axis=-1)


def _adapter_ids(v: View) -> Broken:
    for name, x in v.existing("adapter_ids"):
        yield name, v.counts.any(axis=-1) & ((x < -1) | (x >= v.adapters))


def _temperature(v: View) -> Broken:
    for name, x in v.existing("temperature"):
        yield name, v.counts & ~(v.xp.isfinite(x) & (x > 0))


def _ids(v: View) -> Broken:
    for name, ids in v.existing("ids"):
        ordered = v.xp.sort(ids, axis=-1)
        twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
        bad = (ids < -1).any(axis=-1) | twice.any(axis=-1)
        if v.vocab_size is not None:
            bad |= (ids >= v.vocab_size).any(axis=-1)
        for _, others in v.existing("ids_of_stats"):
            bad |= (ids != others).any(axis=-1)
        yield name, v.counts & bad


def _id_log_probs(v: View) -> Broken:
    for name, x in v.existing("id_log_probs"):
        yield name, v.counts & ((v["ids"] != -1) & ~(x <= MAX_LOG_PROB)).any(axis=-1)


def _sampled_top_k(name: str) -> Callable[[View], Broken]:
    def broken(v: View) -> Broken:
        for _, x in v.existing(name):
            has_id = v["ids"] != -1
            too_much = mass_of(x, has_id, v.xp) > math.exp(MAX_SAMPLED)
            yield name, v.counts & ((has_id & ~(x <= MAX_SAMPLED)).any(axis=-1) | too_much)

    return broken


def _other_arrays(v: View) -> Broken:
    for name, bad in v.existing("another_array"):
        yield name, v.counts & bad


def _never(v: View) -> Broken:
    yield from ()


def _rollout_missing(v: View) -> Broken:
    for name, x in v.existing("rollout_ids"):
        yield name, (x < 0) & (v["sample_ids"] >= 0)
        yield "loss_mask", v.counts & (v["segment_ids"] > 0) & (v.of_segments(name) < 0)


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


def _tokens(v: View) -> Broken:
    yield "tokens", (v["segment_ids"] > 0) & ((v["tokens"] < 0) | (v["tokens"] >= v.vocab_size))


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
        yield name, v.present & np.isinf(x)


def _before(x: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


_K_LOG_PROBS = "log-probs of K ids, each at most {most}{mass}; -inf is a probability of 0"
# Causes stand before their effects, since `broken_rules` names the first ones.
# The arrays that rules know, beside those of `PER_TOKEN`; what a loss reads under another name is "another_array".
KNOWN = {
    *("segment_ids", "positions", "loss_mask", "sample_ids", "parents", "rollout_ids", "normalizer", "denominators"),
    *("pair_ids", "sample_rewards", "alone", "targets", "nucleus_ids", "adapter_ids", "temperature", "ids"),
    *("ids_of_stats", "id_log_probs", "teacher_log_probs", "rollout_log_probs_of_ids", *PER_TOKEN),
}
FINITE_NUMBER = "a finite number in the range of its field"
# of `NUMBERS`, what is NaN for another reason
EXPECTED = {"draft_ids": "ids of the policy's vocabulary, each once"}
STRUCTURE = (
    Rule(
        "loss_mask_values",
        "0 or 1; NaN where a token to train on is predicted by nothing, or by padding, or where cu_seqlens do not fit "
        "their pack, see the batch's constructor",
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
    Rule(
        "rollout_ids_missing", "a rollout id of at least 0 for each sample, and no loss without one", _rollout_missing
    ),
    Rule("normalizer", "finite denominators of at least 0", _denominators),
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
)
OF_INPUTS = (
    Rule("targets", "0 to {V} where loss_mask is 1", _targets),
    Rule("nucleus_ids", "-1, or 0 to {V}, where loss_mask is 1", _nucleus_ids),
    Rule("adapter_ids", "-1, or the number of an adapter of the head, for each row with loss", _adapter_ids),
    Rule("temperature", "finite numbers above 0", _temperature),
    Rule(
        "ids",
        "-1, or 0 to {V}, each id once at a position, and those of the statistics, where loss_mask is 1",
        _ids,
    ),
    *(Rule(name, EXPECTED.get(name, FINITE_NUMBER), _not_finite(name)) for name in NUMBERS),
    Rule("another_number", "finite numbers in the fields of your own loss", _not_finite("another_number")),
    Rule("another_array", "finite numbers where loss_mask is 1 in what your own loss reads", _other_arrays),
    Rule(
        "sample_rewards", "finite rewards of samples with loss, since they say what is desirable", _rewards_of_samples
    ),
    *(Rule(name, kind.expected + more, _of_kind(name, kind)) for name, (kind, more) in PER_TOKEN.items()),
    *(
        Rule(
            name,
            _K_LOG_PROBS.format(most=MAX_SAMPLED, mass=", the log of their mass too, over the whole vocabulary"),
            _sampled_top_k(name),
        )
        for name in ("teacher_log_probs", "rollout_log_probs_of_ids")
    ),
    Rule(
        "id_log_probs",
        _K_LOG_PROBS.format(most=MAX_LOG_PROB, mass="")
        + f"; from the policy: {OF_MODELS}, and ids and targets are in the vocabulary",
        _id_log_probs,
    ),
    Rule(
        "loss",
        "a finite loss, and all that it reads is sound. It may be beyond f32, or infinite, as a divergence is where "
        "one of teacher_log_probs and id_log_probs is -inf and the other is not",
        _never,
    ),
)
ON_HOST = (
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
    Rule("tokens", "0 to {V}", _tokens, on_device=False),
    Rule("next_token", "the next token of the sequence", _next_token, on_device=False),
    Rule("present_ids", "at least 0 for each sequence but a shared prefix", _present_ids, on_device=False),
    Rule("own_ids", "an id of its own for each sample", _own_ids, on_device=False, of_rows=False),
    Rule("rewards", "a finite number, or NaN for none, for a sequence that is there", _rewards, on_device=False),
)
ON_DEVICE = (*STRUCTURE, *OF_INPUTS)  # rule i has the number i + 1 in `broken_rules`
RULES = (*ON_DEVICE, *ON_HOST)
RULES_OF_ROWS = tuple(rule for rule in RULES if rule.of_rows)
RULES_OF_STEPS = tuple(rule for rule in RULES if not rule.of_rows)
