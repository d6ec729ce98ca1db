"""What a loss does with each token: its terms, its share of the loss, and why it has no
gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import check, check_array, check_type, masked
from jaxppo.base.metrics import CompositeTerm
from jaxppo.base.pytree import PyTree, register
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.head.head import TokenStats
from jaxppo.losses.compute import Numbers, Static, weighed_batch
from jaxppo.losses.doors import from_stats
from jaxppo.losses.hooks import constants_of, flags_of, metrics_of, name_of, terms_of
from jaxppo.losses.parts import ALONE, AnyLoss
from jaxppo.losses.token_loss import Losses, WeighedBatch
from jaxppo.sharding import ShardAxes, segment_sum
from jaxppo.step.aggregation import Normalizer, Parallel


@register(static=["reasons"])
@dataclasses.dataclass(frozen=True)
class ExplainedTokens:
    """What a loss does with each token, as `explain_tokens` returns it.

    Args:
      arrays: `f32[R, T]` by name, 0 where the loss mask is 0:

        - "log_probs", "advantages", and by its metric's name each value that the loss reports as a
          mean or a sum over tokens, such as "ratio", "clip_fraction", "kl" and "tis";
        - "weight" in the loss, and "loss/NAME", the terms before they are weighted, such as
          "loss/policy";
        - "contribution", the weight times the sum of the terms: the sum over tokens is the loss;
        - "gradient", the derivative of the loss by the token's log-prob.
      reason: `i32[R, T]`, the index in `reasons` of the reason why the loss does not train the
        token; 0 for none.
      reasons: "", "padding", "masked", "unusable" (a log-prob is not finite, see `Unusable`), "no
        weight", those of the loss, "no gradient" (none of these, and the derivative by all
        statistics is 0).
      targets, loss_mask: `[R, T]`, those of the explained batch, by which `write_tokens` knows it;
        None of none known.

    Example:
      >>> ExplainedTokens({}, jnp.array([[0, 1]]), ("", "padding")).reason_names()
      [['', 'padding']]
    """

    arrays: dict[str, Float[Array, "R T"]]
    reason: Int[Array, "R T"]
    reasons: tuple[str, ...]
    targets: Int[Array, "R T"] | None = None
    loss_mask: Float[Array, "R T"] | None = None

    def reason_names(self) -> list[list[str]]:
        """The reasons themselves, as lists of the shape of `reason`."""
        return np.asarray(self.reasons, object)[np.asarray(self.reason)].tolist()


def explain_tokens(
    stats: PyTree,
    batch: RolloutBatch,
    loss: AnyLoss,
    *,
    parallel: Parallel = None,
    normalizer: Normalizer | Mapping[str, Normalizer] | None = None,
) -> Any:
    """What the loss does with each token: the terms of `loss_from_stats`, `[R, T]`, whose weighted
    sum is the loss.

    From hidden states, compute the statistics first:
    `log_probs_from_hidden(..., entropy=config.entropy_mode)`. The reasons of a policy loss are
    about its policy term: a token that is clipped may still be moved by the KL penalty, as its
    "gradient" shows. In the order of precedence they are "unusable" (not where the token has a
    ratio of 1 instead), "rejected by STATISTIC of POLICIES", "vetoed", "off-policy sequence",
    "weight outside its bounds", "advantage 0", "selected" (`ClipCov`), "dual clip", "clipped above"
    (A > 0) and "clipped below" (A < 0).

    Args:
      stats: `TokenStats` of `log_probs_from_hidden` or `log_probs_from_logits`; a critic's values
        `f32[R, T]`.
      batch: `[R, T]`, with the arrays that the loss reads.
      loss: a `PolicyLossConfig`, or a bare policy loss for a config of it; `SFT`, `Value`, a loss
        of `losses.preference` or another `TokenLoss`; or several of these by name, for their sum.
      parallel: the mesh; rows sharded over data, positions over context. `ShardAxes` inside the
        caller's own `shard_map`, None on one device.
      normalizer: `Normalizer.of(loss, micro_batches)` of the whole step, if the batch is one of its
        micro-batches; for a sum of parts one for each by name.

    Returns:
      `ExplainedTokens`; for a sum of parts one for each by name, whose contributions have the
      part's coefficient.

    Raises:
      TypeError, ValueError: what `loss_from_stats` raises.

    Example:
      >>> sample = Sample([1, 2, 3], response_start=1, advantages=[1.0, 1.0], old_log_probs=[-2.0, -2.0])
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> found = explain_tokens(TokenStats(jnp.array([[-2.0, -1.0, 0.0]])), batch, PPO())
      >>> [round(x, 2) for x in found.arrays["contribution"][0].tolist()], found.reason_names()
      ([-0.5, -0.6, 0.0], [['', 'clipped above', 'masked']])
    """
    explained = from_stats(
        "explain_tokens", stats, batch, loss, parallel, normalizer, fn=_per_shard
    )
    return explained.get(ALONE, explained)


def _per_shard(
    axes: ShardAxes,
    call: Static,
    stats: PyTree,
    batch: RolloutBatch,
    normalizers: Sequence[Normalizer | None],
    numbers: Sequence[Numbers],
) -> dict[str, ExplainedTokens]:
    stats, numbers = lax.stop_gradient((stats, numbers))
    names, parts, _ = call
    explained = {}
    for name, part, normalizer, own in zip(names, parts, normalizers, numbers, strict=True):
        weighed = weighed_batch(axes, part, normalizer, own, batch, stats)
        explained[name] = _explained(weighed, stats, own, batch)
    return explained


def _explained(
    weighed: WeighedBatch, stats: PyTree, numbers: Numbers, batch: RolloutBatch
) -> ExplainedTokens:
    loss = weighed.loss
    mask = weighed.batch.loss_mask
    weights = weighed.weights * numbers.get("part.coef", 1)
    constants = constants_of(loss, stats, weighed)
    seen = loss.seen(stats, mask)

    def contributed(stats: PyTree) -> tuple[Array, Losses]:
        terms = terms_of(loss, loss.seen(stats, mask), weighed.batch, constants, weighed.segments)
        total = functools.reduce(jnp.add, terms.values())
        return jnp.where(mask > 0, total, 0) * weights, terms

    contribution, pull, terms = jax.vjp(contributed, stats, has_aux=True)
    by_stats = jax.tree.leaves(pull(jnp.ones_like(contribution)))
    slopes = [x for x in by_stats if x.dtype != jax.dtypes.float0]  # of integers, such as ids
    metrics = metrics_of(loss, seen, weighed, constants)
    reported = {
        name: x
        for name, x in metrics.items()
        if not isinstance(x, CompositeTerm) and x[2] in ("mean", "sum")
    }
    arrays: dict[str, Array] = {name.removesuffix("_mean"): x[0] for name, x in reported.items()}
    if isinstance(stats, TokenStats):
        arrays["log_probs"] = seen.log_probs
    if weighed.batch.advantages is not None:
        arrays["advantages"] = weighed.batch.advantages
    arrays |= {"weight": weights, "contribution": contribution} | {
        f"loss/{name}": x for name, x in terms.items()
    }
    arrays["gradient"] = slopes[0]  # the log-probs are the first of a head's statistics
    still = functools.reduce(
        jnp.logical_and, [(x == 0).reshape(*mask.shape, -1).all(axis=-1) for x in slopes]
    )
    left_out = jnp.zeros(mask.shape, bool) if weighed.left_out is None else weighed.left_out
    own = flags_of(f"{name_of(loss)}.reasons", loss.reasons(seen, weighed, constants), mask.shape)
    unusable = left_out | own.pop("unusable", False)
    reasons = {
        "padding": weighed.batch.segment_ids <= 0,
        "masked": ~((mask > 0) | left_out),
        "unusable": unusable,
    }
    reasons |= {"no weight": weights == 0, **own, "no gradient": still}
    # the first that holds
    reason = jnp.select([*reasons.values()], [*range(1, len(reasons) + 1)], 0)
    brought = {name: masked(x, mask) for name, x in arrays.items()}
    return ExplainedTokens(
        brought, reason.astype(jnp.int32), ("", *reasons), batch.targets, batch.loss_mask
    )


def by_sample(
    explained: ExplainedTokens, batch: RolloutBatch, *, parallel: Parallel = None
) -> dict[str, Float[Array, "R S"]]:
    """Sums over the tokens of each sample of everything that `explain_tokens` found.

    Args:
      explained: of one loss.
      batch, parallel: the batch that it explains, and the mesh.

    Returns:
      `f32[R, S]` by name: the sums of `explained.arrays`; "tokens", how many have a loss; and by
      the name of each reason, "trained" for "", how many tokens have it.

    Raises:
      TypeError, ValueError: something else than `ExplainedTokens`, a batch of another shape.

    Example:
      >>> sample = Sample([1, 2, 3], response_start=1, advantages=[1.0, 1.0], old_log_probs=[-2.0, -2.0])
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> found = by_sample(explain_tokens(TokenStats(jnp.array([[-2.0, -1.0, 0.0]])), batch, PPO()), batch)
      >>> round(float(found["contribution"][0, 0]), 2), float(found["clipped above"][0, 0])
      (-1.1, 1.0)
    """
    _check_pair(explained, batch)
    counted = {name or "trained": explained.reason == i for i, name in enumerate(explained.reasons)}
    counted.pop("padding", None)
    tokens = LossTokens.of(batch)
    arrays = {**explained.arrays, "tokens": tokens.see(tokens.mask), **counted}
    sums = {}
    for name, x in arrays.items():
        values = jnp.asarray(x, jnp.float32)
        sums[name] = segment_sum(values, batch.segment_ids, batch.num_segments, parallel)
    return sums


def write_tokens(
    path: str | os.PathLike[str], explained: ExplainedTokens, batch: RolloutBatch, **fields: Any
) -> int:
    """Appends a line of JSON for each sample to a file, on the host.

    Numbers that are not finite become null.

    Each line has `fields`, the sample's "sample_id" and, where the batch has them, "group_id",
    "rollout_id" and "reward", and lists in the order of its positions: "tokens" (the targets that
    are predicted), "loss_mask", "reason", and each of `explained.arrays`.

    Args:
      path: the file; it is made if it is not there.
      explained, batch: of one loss, and the batch that it explains; this process must hold the
        arrays of both. A batch with the same targets and loss mask, but other ids or rewards, is
        not seen to be another: no loss reads them token by token, and lines get those of the batch
        that is given here.
      **fields: of your own for each line, such as step=7.

    Returns:
      The number of lines.

    Raises:
      TypeError, ValueError: something else than `ExplainedTokens`; those of another batch, as
        shape, padding, targets or loss mask show.

    Example:
      >>> import os, tempfile
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> found = explain_tokens(TokenStats(jnp.array([[-2.0, -1.0, 0.0]])), batch, SFT())
      >>> write_tokens(os.path.join(tempfile.mkdtemp(), "tokens.jsonl"), found, batch, step=7)
      1
    """
    check_type("path", path, isinstance(path, (str, os.PathLike)), "the path of a file")
    _check_pair(explained, batch)
    batch = jax.tree.map(np.asarray, batch)
    arrays = jax.tree.map(np.asarray, explained.arrays)
    padding = np.asarray(explained.reason) == explained.reasons.index("padding")
    same = np.array_equal(padding, batch.segment_ids <= 0)
    expected = "what explain_tokens found for this batch"
    check("explained", "another batch's padding", same, expected)
    for name in ("targets", "loss_mask"):
        theirs = getattr(explained, name)
        own = getattr(batch, name)
        same = theirs is None or np.array_equal(theirs, own, equal_nan=name == "loss_mask")
        check("explained", f"another batch's {name}", same, expected)
    reasons = np.asarray(explained.reason_names(), object)
    by_token = {"tokens": batch.targets, "loss_mask": batch.loss_mask, "reason": reasons, **arrays}
    by_slot = {
        name: getattr(batch, f"{name}s")
        for name in ("sample_id", "group_id", "rollout_id", "reward")
    }
    places = list(zip(*np.nonzero(batch.sample_ids >= 0), strict=True))
    with open(path, "a") as file:
        for row, slot in places:
            (at,) = np.nonzero(batch.segment_ids[row] == slot + 1)
            at = at[np.argsort(batch.positions[row, at])]
            ids = {name: _plain(x[row, slot]) for name, x in by_slot.items() if x is not None}
            lists = {name: [_plain(y) for y in x[row, at]] for name, x in by_token.items()}
            file.write(json.dumps({**fields, **ids, **lists}) + "\n")
    return len(places)


def _check_pair(explained: ExplainedTokens, batch: RolloutBatch) -> None:
    """Raises where the batch is not one that was explained, as far as shapes show it."""
    check_type(
        "explained",
        explained,
        isinstance(explained, ExplainedTokens),
        "ExplainedTokens, of explain_tokens",
    )
    check_type("batch", batch, isinstance(batch, RolloutBatch), "RolloutBatch")
    check_array(
        "batch.segment_ids", batch.segment_ids, explained.reason.shape, "that of explained.reason"
    )


def _plain(x: object) -> object:
    if isinstance(x, np.generic):
        x = x.item()
    if isinstance(x, float) and not math.isfinite(x):
        return None
    return x
