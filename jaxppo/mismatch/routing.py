"""The experts that a sampler's router chose: as an extra of a sample, and how far the trainer's
differ from them.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import KINDS, check, check_array, check_count, check_type, needed
from jaxppo.base.metrics import CompositeTerm, Metrics, Term, Terms, means, reduce_metrics, share
from jaxppo.batch.extras import Extra, extra_of
from jaxppo.batch.host import as_integers, from_bytes, scalar
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.reads import LOG_PROBS, SAMPLED
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call


def routed_experts(
    rows: Any, tokens: int, *, layers: int | None = None, top_k: int | None = None
) -> Extra:
    """The experts that a sampler's router chose, as an extra of a sample; they travel with the
    token that was read.

    Give it to `Sample(extras={"routed_experts": ...})`, and `batch.extras["routed_experts"]`,
    `i32[R, T, layers, k]`, to the model in every pass: that of the old log-probs too. The model
    replays the ids alone and weighs these experts by its own current scores, so that the router
    keeps its gradient. Where an id is -1 the model's own router decides:
    padding has no row, nor has the last token of a sample, which nobody reads. Samples share a
    prefix as far as their rows agree; a row of -1, as of tokens that an engine's prefix cache held,
    takes the row of a sample that has one.

    Args:
      rows: `[n - 1, layers, k]` or `[n, layers, k]` integers, prompt included. vLLM's and Tunix's
        `routed_experts`, without padding; or SGLang's `meta_info["routed_experts"]`, base64 of
        int32, or its bytes. Of several turns, those of the last turn, which read all tokens. A row
        without a choice is -1 in all k.
      tokens: n, of prompt and response.
      layers: of base64 and bytes, which have no shape.
      top_k: k, of these too.

    Returns:
      An `Extra` of `i32[n, layers, k]` at the input position, filled with -1.

    Raises:
      TypeError: no integers.
      ValueError: another number of rows, an id below -1 or beyond i32, a row that is -1 in part, or
        has one expert twice, text that is no base64 of int32.

    Example:
      >>> from jaxppo.mismatch.routing import routed_experts
      >>> experts = routed_experts([[[3]], [[1]], [[2]]], tokens=4)
      >>> sample = Sample([5, 6, 7, 8], response_start=2, extras={"routed_experts": experts})
      >>> RolloutBatch.from_samples([sample], row_length=5).extras["routed_experts"][0, :, 0, 0].tolist()
      [3, 1, 2, -1, -1]

    Ma et al. 2025, rollout routing replay, https://arxiv.org/abs/2510.11370
    """
    tokens = scalar(tokens)
    check_count("tokens", tokens, least=1)
    if isinstance(rows, str | bytes):
        rows = _from_bytes(rows, scalar(layers), scalar(top_k))
    experts = as_integers("rows", rows, least=-1, rank=3)
    expected = f"[{tokens - 1}, layers, k] or [{tokens}, layers, k] for {tokens} tokens"
    check("rows", f"shape {experts.shape}", len(experts) in (tokens - 1, tokens), expected)
    absent = experts == -1
    partly = absent.any(axis=-1) & ~absent.all(axis=-1)
    _check_nowhere("-1 in a part of a row", partly)
    ordered = np.sort(experts, axis=-1)
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != -1)
    _check_nowhere("one expert twice", twice.any(axis=-1))
    unread = np.full((tokens - len(experts), *experts.shape[1:]), -1)
    return Extra(np.concatenate([experts, unread]).astype(np.int32), at="input", fill=-1)


def _from_bytes(rows: str | bytes, layers: Any, top_k: Any) -> Any:
    """`[n, layers, k]` from the bytes of int32."""
    check_count("layers", layers, least=1)
    check_count("top_k", top_k, least=1)
    flat = from_bytes("rows", rows)
    good = flat.size % (layers * top_k) == 0
    check("rows", f"{flat.size} numbers", good, f"a multiple of layers * top_k, {(layers, top_k)}")
    return flat.reshape(-1, layers, top_k)


def _check_nowhere(what: str, bad: Any) -> None:
    """Raises where a choice of a token and layer, `bool[n, layers]`, is bad."""
    if bad.any():
        first = tuple(np.argwhere(bad)[0].tolist())
        raise ValueError(f"rows: got {what} at {first}, expected k experts, or -1 in all k")


def routing_metrics(
    own: Int[Array, "R T L k"],
    batch: RolloutBatch,
    *,
    log_probs: Float[Array, "R T"] | None = None,
    replayed_log_probs: Float[Array, "R T"] | None = None,
    name: str = "routed_experts",
    parallel: ParallelMesh | ShardAxes | None = None,
) -> Metrics:
    """How many of the sampler's choices of experts the trainer's router would not have made, and
    what replay repairs.

    Args:
      own: the experts that the trainer's router chooses, the model's extra output of a pass without
        replay.
      batch: with the sampler's choices as an extra, see `routed_experts`.
      log_probs: the trainer's of that pass; with `replayed_log_probs` and `batch.rollout_log_probs`
        for the gaps.
      replayed_log_probs: the trainer's of a pass with replay.
      name: of the extra.
      parallel: the mesh.

    Returns:
      Means over the tokens that were read and have a row: for each layer l
      `layer_{l}_choices_differ`, the share of its choices, and `layer_{l}_tokens_differ`, the share
      of tokens with another set. Over all layers `choices_differ`, and `missing_rows`, the share of
      tokens without a row. With log-probs, over loss tokens: `log_prob_gap`, the mean of |trainer -
      sampler| without replay, `log_prob_gap_replayed` with it, and `gap_explained`, 1 minus their
      ratio:
      the share of the gap that the router's choices explain.

    Raises:
      ValueError: a batch without the extra, shapes that differ, one of the two log-probs, no
        `rollout_log_probs`.

    Example:
      >>> from jaxppo.mismatch.routing import routed_experts, routing_metrics
      >>> experts = routed_experts([[[3, 1]], [[1, 2]]], tokens=3)
      >>> sample = Sample([5, 6, 7], response_start=1, extras={"routed_experts": experts})
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> found = routing_metrics(jnp.array([[[[1, 3]], [[1, 0]], [[0, 0]]]]), batch)
      >>> {name: round(float(x), 2) for name, x in finalize_metrics(found).items()}
      {'choices_differ': 0.25, 'layer_0_choices_differ': 0.25, 'layer_0_tokens_differ': 0.5, 'missing_rows': 0.33}
    """
    batch = checked(batch, reader="routing_metrics")
    check_type("name", name, isinstance(name, str), "the name of an extra")
    sampled = extra_of(batch, name, "i32[R, T, L, k]")
    check_array(f"batch.extras[{name!r}]", sampled, kind=KINDS["ids"])
    check(
        f"batch.extras[{name!r}]", f"shape {sampled.shape}", sampled.ndim == 4, "[R, T, layers, k]"
    )
    check_array("own", own, sampled.shape, f"that of {name!r}", KINDS["ids"])
    both = {"log_probs": log_probs, "replayed_log_probs": replayed_log_probs}
    if log_probs is not None or replayed_log_probs is not None:
        for what, x in both.items():
            array = needed(what, x, "both log-probs, with replay and without")
            check_array(
                what, array, batch.loss_mask.shape, "the batch's [R, T]", KINDS["trainer_log_probs"]
            )
        needed("batch.rollout_log_probs", batch.rollout_log_probs, "f32[R, T] for the gaps")

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [p.tokens_spec, p.tokens_spec, p.tokens_spec, batch.specs(p)], P()

    args = {"own": own, **both, "batch": batch}
    return shard_call("routing_metrics", _per_shard, parallel, args, specs, name)


def _per_shard(
    axes: ShardAxes,
    name: str,
    own: Array,
    log_probs: Array | None,
    replayed: Array | None,
    batch: RolloutBatch,
) -> Metrics:
    sampled = batch.extras[name]
    no_padding = (batch.segment_ids > 0).astype(jnp.float32)
    has_row = jnp.where((sampled != -1).all(axis=-1), no_padding[..., None], 0)  # [R, T, L]
    missed = ~(sampled[..., :, None] == own[..., None, :]).any(axis=-1)  # [R, T, L, k]
    missed_share = missed.astype(jnp.float32).mean(axis=-1)
    terms: Terms = {}
    for layer in range(sampled.shape[2]):
        weight = has_row[..., layer]
        terms[f"layer_{layer}_choices_differ"] = (missed_share[..., layer], weight, "mean")
        terms[f"layer_{layer}_tokens_differ"] = (missed[..., layer, :].any(axis=-1), weight, "mean")
    layers = has_row.sum(axis=-1)
    over_layers = (missed_share * has_row).sum(axis=-1) / jnp.maximum(layers, 1)
    terms["choices_differ"] = (over_layers, layers, "mean")
    terms["missing_rows"] = (layers == 0, no_padding, "mean")
    if log_probs is not None and replayed is not None:
        terms |= _gap_terms(log_probs, replayed, batch)
    return reduce_metrics(axes, terms)


def _gap_terms(log_probs: Array, replayed: Array, batch: RolloutBatch) -> Terms:
    """The distances of the trainer's log-probs from the sampler's, without replay and with it."""
    tokens = LossTokens.of(batch)
    sampler = tokens.read(SAMPLED, batch.rollout_log_probs)
    gap = jnp.abs(tokens.read(LOG_PROBS, log_probs) - sampler)
    replayed_gap = jnp.abs(tokens.read(LOG_PROBS, replayed) - sampler)
    explained: dict[str, Term] = {
        "part": (gap - replayed_gap, tokens.mask, "mean"),
        "whole": (gap, tokens.mask, "mean"),
    }
    terms = means({"log_prob_gap": gap, "log_prob_gap_replayed": replayed_gap}, tokens.mask)
    return terms | {"gap_explained": CompositeTerm(explained, share)}
