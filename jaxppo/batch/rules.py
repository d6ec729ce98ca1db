"""The rules for the values of a batch, in one table.

The host checks all of them; every loss checks the cheap ones.

On the host `RolloutBatch.validate` raises. Under jit nothing can be raised: a broken rule makes the
loss NaN rather than a plausible number, and `explain_broken_rules` reads from a metric which rules
were broken.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import Any

import numpy as np

from jaxppo.base.arrays import IDS, MAX_LOG_PROB, MAX_SAMPLED
from jaxppo.batch.reads import BOUNDS, NUMBERS, OF_MODELS, PER_TOKEN, ValueRule, mass_of
from jaxppo.batch.trees import has_branches, out_of_order, starts


@dataclasses.dataclass(frozen=True)
class View:
    """The arrays that rules read: on the host in logical order, in a loss one device's shards.

    `arrays` are those that exist, by the names of `PER_TOKEN` and of the rules below; "lasts"
    `[R, T]`, the last position of each position's sequence; "normalizer", the counts of the given
    normalizer, "loss_tokens" `[R, S]`, what they should be, and "denominators", its other numbers;
    "alone", the samples that lack their pair; on the host also the rest of the batch, and "lengths"
    `[R, S]`, the positions of each segment.
    """

    arrays: Mapping[str, Any]
    num_segments: int
    real_last_targets: bool  # the last position of a sequence has a real target
    # sequences may continue on other devices, unseen here, because a caller passed its own shards
    cut: bool
    vocab_size: int | None  # None where it is not known
    xp: ModuleType  # numpy or jax.numpy
    adapters: int = 0  # those of the head

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

    def spread(self, name: str) -> Any:
        """`[R, T]`, the value of each position's sequence; anything on padding."""
        index = self.xp.clip(self["segment_ids"], 1, self.num_segments) - 1
        return self.xp.take_along_axis(self[name], index, axis=1)


@dataclasses.dataclass(frozen=True)
class Rule:
    name: str
    expected: str  # the condition in words, for errors and explanations
    # where an array breaks it; None where there is nothing to check
    bad: Callable[[View, Any], Any]
    arrays: tuple[str, ...] = ()  # that it checks; by default the one of its own name
    structural: bool = False  # other rules are meaningful only if this one holds

    def broken(self, view: View, among: Collection[str] | None = None) -> Iterator[tuple[str, Any]]:
        """The names of the checked arrays that exist, of those `among` these, and where they
        break the rule.
        """
        if among is None:
            among = view.arrays
        for name in self.arrays or (self.name,):
            if name not in view.arrays or name not in among:
                continue
            bad = self.bad(view, view[name])
            if bad is not None:
                yield name, bad


def _on_last_position(view: View, mask: Any) -> Any:
    if view.real_last_targets or view.cut:
        return None
    is_last = (view["segment_ids"] > 0) & (view["positions"] == view["lasts"])
    return view.counts & is_last & ~view.xp.isnan(mask)


def _without_rollout(view: View, x: Any) -> Any:
    if "rollout_ids" not in view.arrays:
        return None
    if x is view["loss_mask"]:
        return view.counts & (view["segment_ids"] > 0) & (view.spread("rollout_ids") < 0)
    return (x < 0) & (view["sample_ids"] >= 0)


def _of_another_step(view: View, counted: Any) -> Any:
    loss_tokens = view["loss_tokens"]
    if view.cut:
        differs = loss_tokens > counted
    else:
        differs = loss_tokens != counted
    # a mask of NaN breaks a rule of its own
    return differs & ~view.xp.isnan(loss_tokens)


def _without_sample(view: View, mask: Any) -> Any:
    if "parents" not in view.arrays:
        return None
    return view.counts & (view["segment_ids"] > 0) & (view.spread("sample_ids") < 0)


def _not_finite(view: View, x: Any) -> Any:
    return ~view.xp.isfinite(x)


def _nan(view: View, x: Any) -> Any:
    return view.xp.isnan(x)


def _breaks(rule: ValueRule) -> Callable[[View, Any], Any]:
    return lambda view, x: view.counts & rule.bad(x, view.xp)


def _targets(view: View, x: Any) -> Any:
    if view.vocab_size is None:
        return None
    return view.counts & ((x < 0) | (x >= view.vocab_size))


def _ids(view: View, ids: Any) -> Any:
    ordered = view.xp.sort(ids, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
    bad = (ids < -1).any(axis=-1) | twice.any(axis=-1)
    if view.vocab_size is not None:
        bad |= (ids >= view.vocab_size).any(axis=-1)
    if "ids_of_stats" in view.arrays:
        bad |= (ids != view["ids_of_stats"]).any(axis=-1)
    return view.counts & bad


def _sampled_top_k(view: View, log_probs: Any) -> Any:
    has_id = view["ids"] != -1
    too_much = mass_of(log_probs, has_id, view.xp) > math.exp(MAX_SAMPLED)
    one_is_bad = (has_id & ~(log_probs <= MAX_SAMPLED)).any(axis=-1)
    return view.counts & (one_is_bad | too_much)


def _parents_elsewhere(view: View, parents: Any) -> Any:
    index = np.clip(parents, 1, view.num_segments) - 1
    length_of_parent = np.take_along_axis(view["lengths"], index, axis=1)
    return (parents > 0) & ((length_of_parent == 0) | ~view.present)


def _positions(view: View, positions: Any) -> Any:
    places = np.arange(positions.shape[1], dtype=np.int32)
    expected = places - np.maximum.accumulate(view.starts * places, axis=1)
    if "parents" in view.arrays:
        first = starts(view["parents"], view["lengths"], np)
        index = np.clip(view["segment_ids"], 1, view.num_segments) - 1
        expected += np.take_along_axis(first, index, axis=1)
    return (view["segment_ids"] > 0) & (positions != expected)


def _tokens(view: View, tokens: Any) -> Any:
    """Ids above the vocabulary may stand for what a model embeds in another way, such as an
    image.
    """
    segment_ids = view["segment_ids"]
    is_target = (segment_ids == _before(segment_ids)) & _before(view.counts)
    too_large = is_target & (tokens >= view.vocab_size)
    return (segment_ids > 0) & ((tokens < 0) | too_large)


def _next_token(view: View, targets: Any) -> Any:
    next_segment = np.roll(view["segment_ids"], -1, axis=1)
    next_token = np.roll(view["tokens"], -1, axis=1)
    follows = view["segment_ids"] == next_segment
    follows[:, -1] = False
    return follows & view.counts & (targets != next_token)


def _absent_ids(view: View, ids: Any) -> Any:
    needed = view.present
    if "parents" in view.arrays:
        is_prefix = (view["sample_ids"] < 0) & has_branches(view["parents"], np)
        needed = needed & ~is_prefix
    return needed & (ids < 0)


def _same_ids(view: View, ids: Any) -> Any:
    ids = np.where(view.present, ids, -1)
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    is_first = first[inverse].reshape(-1) == np.arange(ids.size)
    return (ids >= 0) & ~is_first.reshape(ids.shape)


def _before(x: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros_like(x[:, :1]), x[:, :-1]], axis=1)


# The arrays that rules know, beside those of `PER_TOKEN`; what a loss reads under another name is
# "another_array".
KNOWN = {
    *(
        "segment_ids",
        "positions",
        "loss_mask",
        "sample_ids",
        "parents",
        "rollout_ids",
        "normalizer",
        "denominators",
    ),
    *(
        "twice",
        "pair_ids",
        "sample_rewards",
        "alone",
        "targets",
        "nucleus_ids",
        "adapter_ids",
        "temperature",
        "ids",
    ),
    *("ids_of_stats", "id_log_probs", "teacher_log_probs", "rollout_log_probs_of_ids", *PER_TOKEN),
}
_K_LOG_PROBS = "log-probs of K ids, each at most {most}{mass}; -inf is a probability of 0"
# NaN for another reason than its range
_OF_NUMBERS = {"draft_ids": "ids of the policy's vocabulary, each once"}
_MASK = ("loss_mask",)
# Causes stand before their effects, since `broken_rules` names the first ones.
STRUCTURE = (
    Rule(
        "loss_mask_values",
        "0 or 1. NaN marks a row that its constructor refuses outside jit. from_padded: padding"
        " that pad_id shows and no mask does, loss on padding or on a token with none before it."
        " from_cu_seqlens: ends that do not fit the pack. from_token_aligned, from_target_aligned:"
        " loss where segment_ids is 0, sequences out of order",
        lambda view, x: view.counts & (x != 1),
        _MASK,
    ),
    Rule(
        "loss_mask_on_padding",
        "0 where segment_ids is 0",
        # the rule before is about NaN
        lambda view, x: view.counts & (view["segment_ids"] == 0) & ~view.xp.isnan(x),
        _MASK,
    ),
    Rule(
        "loss_mask_on_last_position",
        "0 at the last position of a sequence, since its target is no token of it: arrays that are"
        " aligned to tokens want RolloutBatch.from_token_aligned, and targets that go on past the"
        " tokens from_target_aligned",
        _on_last_position,
        _MASK,
    ),
    Rule(
        "segment_ids_range",
        "0 to {S}",
        lambda view, x: (x < 0) | (x > view.num_segments),
        ("segment_ids",),
        True,
    ),
    Rule(
        "rollout_ids_missing",
        "a rollout id of at least 0 for each sample, and no loss without one",
        _without_rollout,
        ("rollout_ids", *_MASK),
    ),
    Rule(
        "own_ids_of_rollouts",
        'an id of its own for each sample, since "rollout_mean" takes samples of one id for one'
        " rollout; samples that a rollout was cut into have rollout_ids",
        lambda view, twice: twice,
        ("twice",),
    ),
    Rule(
        "normalizer",
        "finite denominators of at least 0",
        lambda view, x: ~(view.xp.isfinite(x) & (x >= 0)),
        ("denominators",),
    ),
    Rule(
        "normalizer_of_another_step",
        "a normalizer that was made of this step, sliced like it: as many loss tokens for each"
        " sequence as it counted",
        _of_another_step,
        ("normalizer",),
    ),
    Rule(
        "pairs",
        "of each pair two samples with one group id and unequal rewards, both with loss tokens and"
        " in one micro-batch, see micro_batches_of_pairs",
        lambda view, alone: alone,
        ("alone",),
    ),
    Rule(
        "parents",
        "0, or the number of a segment of the same row that stands before it, with nothing between"
        " the two but what goes on from that one",
        lambda view, x: out_of_order(x, view.xp),
        structural=True,
    ),
    Rule(
        "loss_without_sample",
        "0 in a shared prefix, which is a segment without a sample: each sample has a loss of its"
        " own. Losses read `batch` of `TokenTrees`, and not its rows",
        _without_sample,
        _MASK,
    ),
)
OF_INPUTS = (
    Rule("targets", "0 to {V} where loss_mask is 1", _targets),
    Rule(
        "nucleus_ids",
        "-1, or 0 to {V}, where loss_mask is 1",
        lambda view, x: view.counts & ((x < -1) | (x >= view.vocab_size)).any(axis=-1),
    ),
    Rule(
        "adapter_ids",
        "-1, or the number of an adapter of the head, for each row with loss",
        lambda view, x: view.counts.any(axis=-1) & ((x < -1) | (x >= view.adapters)),
    ),
    Rule(
        "temperature",
        "finite numbers above 0",
        lambda view, x: view.counts & ~(view.xp.isfinite(x) & (x > 0)),
    ),
    Rule(
        "ids",
        "-1, or 0 to {V}, each id once at a position, and those of the statistics, where loss_mask"
        " is 1",
        _ids,
    ),
    *(
        Rule(name, _OF_NUMBERS.get(name, "a finite number in the range of its field"), _not_finite)
        for name in NUMBERS
    ),
    *(
        Rule(name, "a number in the range of its field, not above the other bound", _nan)
        for name in BOUNDS
    ),
    Rule("another_number", "finite numbers in the fields of your own loss", _not_finite),
    Rule(
        "another_array",
        "finite numbers where loss_mask is 1 in what your own loss reads",
        lambda view, unsound: view.counts & unsound,
    ),
    Rule(
        "sample_rewards",
        "finite rewards of samples with loss, since they say what is desirable",
        lambda view, _: view.counts & ~view.xp.isfinite(view.spread("sample_rewards")),
    ),
    *(Rule(name, rule.expected + more, _breaks(rule)) for name, (rule, more) in PER_TOKEN.items()),
    *(
        Rule(
            name,
            _K_LOG_PROBS.format(
                most=MAX_SAMPLED, mass=", the log of their mass too, over the whole vocabulary"
            ),
            _sampled_top_k,
        )
        for name in ("teacher_log_probs", "rollout_log_probs_of_ids")
    ),
    Rule(
        "id_log_probs",
        _K_LOG_PROBS.format(most=MAX_LOG_PROB, mass="")
        + f"; from the policy: {OF_MODELS}, and ids and targets are in the vocabulary",
        lambda view, x: view.counts & ((view["ids"] != -1) & ~(x <= MAX_LOG_PROB)).any(axis=-1),
    ),
    Rule(
        "loss",
        "a finite loss, and all that it reads is sound. It may be beyond f32, or infinite, as a"
        " divergence is where one of teacher_log_probs and id_log_probs is -inf and the other"
        " is not",
        lambda view, _: None,  # `Broken.metric` counts it
    ),
)
ON_HOST = (
    Rule(
        "parents_elsewhere",
        "the number of a segment that this row holds: a tree lies in one row",
        _parents_elsewhere,
        ("parents",),
        structural=True,
    ),
    Rule(
        "order",
        "each sequence to be contiguous and in order",
        lambda view, x: view.starts & (x <= np.maximum.accumulate(_before(x), axis=1)),
        ("segment_ids",),
        structural=True,
    ),
    Rule(
        "positions",
        "0, 1, ... in each sequence, or on from its parent",
        _positions,
        structural=True,
    ),
    Rule("tokens", "at least 0, and at most {V} where it is a target with loss", _tokens),
    Rule("next_token", "the next token of the sequence", _next_token, ("targets",)),
    Rule("present_ids", "at least 0 for each sequence but a shared prefix", _absent_ids, IDS),
    Rule("own_ids", "an id of its own for each sample", _same_ids, ("sample_ids",)),
    Rule(
        "rewards",
        "a finite number, or NaN for none, for a sequence that is there",
        lambda view, x: view.present & np.isinf(x),
    ),
)
ON_DEVICE = (*STRUCTURE, *OF_INPUTS)  # rule i has the number i + 1 in `broken_rules`
RULES = (*ON_DEVICE, *ON_HOST)
