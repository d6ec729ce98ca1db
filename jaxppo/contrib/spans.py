"""Distillation from a teacher with another tokenizer, by spans of text that both share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from jaxppo.base.arrays import KINDS, check, needed
from jaxppo.batch.host import as_integers, as_numbers, finite_number, shown

__all__ = ["align_spans", "span_distillation"]


def align_spans(
    ends: Sequence[int], teacher_ends: Sequence[int]
) -> tuple[Int[np.ndarray, " m"], Int[np.ndarray, " n"]]:
    """The shortest spans of a text whose borders are borders of tokens in both tokenizations.

    Args:
      ends: for each token of the student where it ends in the text, in bytes (a token may hold a
        part of a character), never less than the one before; see the offset mapping of a fast
        tokenizer of Hugging Face.
      teacher_ends: the same for the teacher's tokens of the same text.

    Returns:
      For each token of either the number of its span, -1 where there is none: tokens after the last
      common border, and those that hold no text there.

    Raises:
      TypeError, ValueError: ends that go back or are not integers; pairs, of which an end is the
        second.

    Example:
      >>> from jaxppo.contrib.spans import align_spans
      >>> [x.tolist() for x in align_spans([1, 3, 5, 6], [3, 4, 6, 8])]
      [[0, 0, 1, 1], [0, 1, 1, -1]]
    """
    student = as_integers("ends", ends, least=0)
    teacher = as_integers("teacher_ends", teacher_ends, least=0)
    for name, x in (("ends", student), ("teacher_ends", teacher)):
        in_order = bool((np.diff(x, prepend=0) >= 0).all())
        check(name, shown(x.tolist()), in_order, "ends that do not go back")
    borders = np.intersect1d(student, teacher)
    borders = borders[borders > 0]

    def spans_of(x: np.ndarray) -> np.ndarray:
        spans = np.searchsorted(borders, x)
        in_a_span = (spans < len(borders)) & (x > 0)  # the end is 0 for a token before all text
        return np.where(in_a_span, spans, -1).astype(np.int32)

    return spans_of(student), spans_of(teacher)


def span_distillation(
    log_probs: Sequence[float] | Float[np.ndarray, " m"],
    teacher_log_probs: Sequence[float] | Float[np.ndarray, " n"],
    spans: Int[np.ndarray, " m"],
    teacher_spans: Int[np.ndarray, " n"],
    *,
    coef: float = 1.0,
) -> Float[np.ndarray, " m"]:
    """Advantages that pull to a teacher with another tokenizer: the teacher's log-prob of a span
    less the student's.

        D_c = sum of the teacher's log-probs over span c - sum of the student's,   A_t = coef D_c / n_c

    n_c is the number of the student's tokens in the span. For equal tokenizers this is
    `on_policy_distillation` of advantages of 0. Give the result to `Sample(advantages=)`, or add it
    to other advantages.

    Args:
      log_probs: of the student's response tokens, under the policy that sampled.
      teacher_log_probs: of the teacher's tokens of the same text.
      spans, teacher_spans: the spans of these tokens, see `align_spans`.
      coef: the weight of the teacher.

    Returns:
      `f32[m]`, 0 for tokens in no span, and in spans that have no token on one side.

    Raises:
      TypeError, ValueError: arrays of unequal lengths, spans that are not integers of at least -1,
        log-probs in a span that are not finite, or above 0 by more than rounding explains: 0.001,
        the teacher's 0.125.

    Example:
      >>> from jaxppo.contrib.spans import align_spans, span_distillation
      >>> student, teacher = align_spans([1, 3], [3])
      >>> span_distillation(np.log([0.5, 0.4]), np.log([0.3]), student, teacher).round(4).tolist()
      [0.20270000398159027, 0.20270000398159027]

    The alignment: GOLD, https://huggingface.co/spaces/HuggingFaceH4/on-policy-distillation; sums
    over aligned chunks:
    2026, https://arxiv.org/abs/2606.09456, https://github.com/inclusionAI/AReaL/pull/1452
    """
    coef = finite_number("coef", coef, "a finite number")
    own_spans = as_integers("spans", spans, least=-1)
    their_spans = as_integers("teacher_spans", teacher_spans, least=-1)
    size = 1 + max(int(own_spans.max(initial=-1)), int(their_spans.max(initial=-1)))
    own_sums, own_counts = _span_sums("log_probs", log_probs, own_spans, size)
    their_sums, their_counts = _span_sums("teacher_log_probs", teacher_log_probs, their_spans, size)
    has_both = (own_counts > 0) & (their_counts > 0)
    differences = np.where(has_both, their_sums - own_sums, 0)
    advantages = coef * differences / np.maximum(own_counts, 1)
    of_tokens = np.append(advantages, 0)[own_spans]  # the 0 is for a batch without spans
    return np.where(own_spans >= 0, of_tokens, 0).astype(np.float32)


def _span_sums(
    name: str, log_probs: object, spans: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The sum of the log-probs of each span, and its number of tokens."""
    as_numbers(name, log_probs, "log-probs")
    x = np.asarray(log_probs, np.float64)
    check(
        name,
        f"shape {x.shape}",
        x.shape == spans.shape,
        f"{spans.shape}, one for each token of its spans",
    )
    x = x[spans >= 0]
    spans = spans[spans >= 0]
    most = needed(name, KINDS[name].most)
    bad = x[~(np.isfinite(x) & (x <= most))]
    check(name, bad[:1].tolist(), bad.size == 0, f"finite log-probs of at most {most}")
    return np.bincount(spans, x, minlength=size), np.bincount(spans, minlength=size)
