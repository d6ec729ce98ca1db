"""A search of draft losses over random heads, depths, meshes, packings and micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import oracle.draft as truth
from hypothesis import strategies as st
from jax import lax
from oracle import OracleSample
from oracle.head import log_softmax, logits
from oracle.samples import sample_weights
from random_heads import HeadShape, HeadStep, head_of, head_step, heads
from random_losses import between
from random_steps import MESHES, Place, Step, agree, batch_of, places, steps
from search_checks import (
    BF16,
    F32,
    accumulated,
    check_found,
    check_head,
    check_rows,
    hidden_rows,
    simple,
)
from searches import search

from jaxppo import Normalizer
from jaxppo.contrib.draft import Draft, draft_loss

OPTIONS = {
    "objective": st.sampled_from(
        ["soft_cross_entropy", "total_variation", "likelihood", "end_to_end"]
    ),
    "eta": between(0, 5),
    "coef": between(0.0625, 1),
    "decay": between(0.5, 1),
    "aggregation": st.sampled_from(
        ["token_mean", "token_sum", "sequence_mean_token_mean", "rollout_mean"]
    ),
}


def test_draft_loss():
    given = st.integers(1, 3), st.booleans(), places((None, *MESHES), (None, None, 2))
    shape = heads.map(lambda s: simple(s, nucleus=False))
    search("draft", 0.02, st.fixed_dictionaries(OPTIONS), *given, shape, steps, st.none())(
        check_draft_loss
    )


def test_draft_loss_of_a_part_of_the_vocabulary():
    """The policy has more columns than the draft, or the same ones in another order."""
    given = st.integers(1, 2), st.booleans(), places((None, *MESHES), (None, None, 2))
    shape = heads.map(lambda s: simple(s, nucleus=False))
    more = st.sampled_from([0, 1, 8, 300])
    search("draft of a part", 0.02, st.fixed_dictionaries(OPTIONS), *given, shape, steps, more)(
        check_draft_loss
    )


def near_ties(
    samples: list[OracleSample], drafts: list[HeadStep], policy: HeadStep, T: float, ids: Any
) -> bool:
    """Whether two probabilities are so near that rounding decides which is smaller, and with it
    a gradient.
    """
    for k, draft in enumerate(drafts, 1):
        for s, own, its in zip(samples, draft.samples, policy.samples, strict=True):
            here = np.nonzero(truth.shared_mask(s.mask, k))[0]
            of_draft = logits(own.hidden[here], draft.head, T)
            of_policy = logits(its.hidden[here + k], policy.head, T)
            d = log_softmax(of_draft)
            p = np.log(truth.probabilities(of_policy, ids))
            if np.any((np.abs(d - p) < 1e-5) & (d > np.log(1e-5))):
                return True
    return False


def check_draft_loss(
    options: dict,
    depths: int,
    own_heads: bool,
    where: Place,
    shape: HeadShape,
    step: Step,
    more: int | None,
):
    """Checks one example.

    The depths have a head each or share one; the policy has its own, with `more` columns.
    """
    parallel = where.parallel
    T = 0.75 if shape.temperature == "number" else 1.0
    plain = dataclasses.replace(shape, bias=False, lora=False, frozen=False, dtype="float32")
    plain = dataclasses.replace(plain, columns=shape.columns + (more or 0))
    ids = (
        None
        if more is None
        else step.rng(9).permutation(plain.vocab_size)[: shape.vocab_size].astype(np.int32)
    )
    drafts = [
        head_step(dataclasses.replace(step, seed=step.seed + k), shape) for k in range(depths)
    ]
    policy = head_step(dataclasses.replace(step, seed=step.seed + depths), plain)
    if not own_heads:
        drafts = [HeadStep(x.samples, drafts[0].head, drafts[0].arrays) for x in drafts]
    samples = drafts[0].samples
    if near_ties(samples, drafts, policy, T, ids):
        return
    batch = batch_of(step, samples, where)
    given = drafts if own_heads else drafts[:1]

    def loss_of(p: Any, batch: Any, normalizers: Any) -> Any:
        mine = [head_of(shape, arrays) for arrays in p["heads"]]
        theirs = lax.stop_gradient((p["policy"], head_of(plain, p["policy_head"])))
        hidden = [p[f"hidden {k}"] for k in range(depths)]
        of = {"parallel": parallel, "temperature": T, "normalizers": normalizers, "draft_ids": ids}
        return draft_loss(
            hidden, mine if own_heads else mine[0], *theirs, batch, Draft(**options), **of
        )

    def normalizers_of(b: Any) -> Any:
        return Normalizer.of(Draft(depths, **options), b, parallel=parallel)

    rows = {f"hidden {k}": hidden_rows(step, x, batch, shape, False) for k, x in enumerate(drafts)}
    rows |= {"policy": hidden_rows(step, policy, batch, plain, False)}
    params = {"rows": rows, "heads": [x.arrays for x in given], "policy_head": policy.arrays}
    loss, gradient, found = accumulated(loss_of, where, normalizers_of)(params, batch)

    states = [[s.hidden for s in x.samples] for x in drafts]
    expected, by_hidden, by_heads, known = truth.draft_loss(
        samples,
        states,
        [x.head for x in drafts],
        [s.hidden for s in policy.samples],
        policy.head,
        **options,
        temperature=T,
        ids=ids,
    )
    agree("loss", loss, expected, 0.1, 3e-5)
    check_found(found, known, 3e-5)
    allowed = BF16 if shape.dtype == "bfloat16" else F32
    floor = 10 * options["coef"] * np.max(sample_weights(samples, options["aggregation"]))
    for k in range(depths):
        check_rows(
            f"hidden {k}",
            batch,
            samples,
            gradient["rows"][f"hidden {k}"],
            by_hidden[k],
            floor,
            **allowed,
        )
    if own_heads:
        for parts, slopes in zip(gradient["heads"], by_heads, strict=True):
            check_head(parts, slopes, shape, floor, **allowed)
        return
    sums = type(by_heads[0])(
        *(None if x[0] is None else np.sum(x, axis=0) for x in zip(*by_heads, strict=True))
    )
    # each depth's gradient is rounded to the dtype of the parameter before they are summed
    check_head(
        gradient["heads"][0], sums, shape, floor, **(allowed | {"share": allowed["share"] * depths})
    )
