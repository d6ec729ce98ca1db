"""A loss that is a sum of parts, each with its own token loss, in one pass of the head."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo._arrays import check_array, needed
from jaxppo._traced import put_arrays, take_arrays
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig
from jaxppo.head.call import HeadCall, HeadOptions, Inputs
from jaxppo.head.gradient import reduce_tokens, stats_of_tokens
from jaxppo.head.head import Head
from jaxppo.head.prepare import prepare_head
from jaxppo.losses.parts import SFT, Part, ReferenceKL, TopKDistillation
from jaxppo.losses.policy import token_loss_of
from jaxppo.losses.policy_checks import check_batch
from jaxppo.losses.token_loss import (
    OfTokens,
    Step,
    TokenLoss,
    batch_specs,
    check_normalizer,
    finish,
    known_before,
)
from jaxppo.losses.top_k_distillation import TopKLoss, ids_and_log_probs
from jaxppo.metrics import Metric, Metrics
from jaxppo.sharding import ParallelMesh, ShardAxes, note, shard_call
from jaxppo.validation import checked

__all__ = ["SFT", "Part", "ReferenceKL", "TopKDistillation", "joint_loss_from_hidden", "joint_normalizers"]

ByPart = Mapping[str, Float[Array, "R T"]]


def joint_loss_from_hidden(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    batch: RolloutBatch,
    parts: Mapping[str, Part],
    *,
    masks: ByPart | None = None,
    weights: ByPart | None = None,
    ids: Int[Array, "R T K"] | None = None,
    teacher_log_probs: Mapping[str, Float[Array, "R T K"]] | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizers: Mapping[str, Normalizer] | None = None,
    temperature: float | Array = 1.0,
    adapter_ids: Int[Array, " R"] | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """Several losses of one batch: loss = sum over parts c of coef_c (1 / N_c) sum over t of w_ct loss_ct.

    Each part has its own tokens, weights, aggregation and denominators. All parts share one pass of the head, with
    three products rather than three for each part. If one part's loss of a token depends on other tokens, all parts
    take two passes.

    Args:
      hidden: `[R, T, H]`, see `policy_loss_from_hidden`.
      head: a `Head`, or its bare kernel `[H, V]`.
      batch: `[R, T]`; each part's arrays must be valid where that part's mask is 1.
      parts: the parts by name.
      masks: for each part by name, `[R, T]`, 0 or 1: its tokens, in its denominators too; by default `batch.loss_mask`.
      weights: for each part by name, `f32[R, T]`, at least 0; by default `batch.loss_weights`. A part's denominators
        are counts of tokens, or with `batch.weighted_denominators` sums of weights.
      ids: `i32[R, T, K]`, -1 padded, the ids whose log-probs every `TopKDistillation` compares. They may be anything
        where none of these parts has loss.
      teacher_log_probs: `[R, T, K]`, of these ids, for each `TopKDistillation` by name.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      normalizers: of the whole step, for one of its micro-batches, see `joint_normalizers`.
      temperature: divides the logits; a number, a traced scalar or `f32[R, T]`, so that rows may have their own.
      adapter_ids: `i32[R]`, which of several adapters of the head each row has, -1 for none; see `LoRA`. A row whose id
        belongs to no adapter gives NaN.
      **options: see `HeadOptions`.

    Returns:
      The scalar f32 loss, and metrics: `loss`, and, as "name/...", the metrics that the loss of each part reports by
      itself, without its coefficient.

    Raises:
      TypeError: parts of another class, arrays of another kind.
      ValueError: no parts; masks, weights or normalizers for unknown parts; shapes that differ; an array that a part
        needs and the batch or the call lacks; separate ids for each part; a teacher's log-probs for a part that does
        not distil; anything that the loss of a part refuses.

    Example:
      >>> from jaxppo.losses.joint import SFT, Part, joint_loss_from_hidden
      >>> sample = Sample([1, 2, 3], response_start=1, advantages=[1.0, 1.0], old_log_probs=[-np.log(4)] * 2)
      >>> batch = RolloutBatch.from_samples([sample], row_length=3)
      >>> parts = {"policy": Part(PolicyLossConfig()), "written": Part(SFT(), coef=0.5)}
      >>> masks = {"policy": jnp.array([[1, 0, 0]]), "written": jnp.array([[0, 1, 0]])}
      >>> loss, metrics = joint_loss_from_hidden(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)), batch, parts, masks=masks)
      >>> round(float(loss), 4), round(float(metrics["written/nll"].value), 4)  # -1 + 0.5 log 4
      (-0.3069, 1.3863)
    """
    batch = checked(batch)
    batches = _batches(batch, parts, masks, weights)
    losses = [_loss_of(name, part, batches[name]) for name, part in parts.items()]
    teachers = _teachers(batch, parts, ids, teacher_log_probs)
    where = functools.reduce(jnp.logical_or, [b.loss_mask > 0 for b in batches.values()])
    prepared = prepare_head(
        hidden,
        head,
        batch.targets,
        parallel=parallel,
        temperature=temperature,
        entropy="bonus" if any(loss.entropy == "bonus" for loss in losses) else "metric",
        logit_stats=[name for loss in losses for name in loss.logit_stats],
        ids=ids,
        where=where,
        adapter_ids=adapter_ids,
        options=options,
    )
    given = dict(normalizers or {})
    _check_names("normalizers", given, parts)
    for normalizer in given.values():
        check_normalizer(normalizer)
    static, traced = zip(*(take_arrays(loss) for loss in losses), strict=True)
    ordered = [(batches[name], given.get(name), teachers.get(name)) for name in parts]
    args = {
        "head": prepared.inputs,
        "parts": ordered,
        "config": list(traced),
        "coefs": [jnp.asarray(part.coef, jnp.float32) for part in parts.values()],
    }

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [prepared.specs, [tuple(batch_specs(p, *of)) for of in ordered], P(), P()], P()

    call = (static, tuple(parts), prepared.call)
    found: tuple[Float[Array, ""], Metrics] = shard_call(
        "joint_loss_from_hidden", _of_parts, parallel, args, specs, call
    )
    return found


def joint_normalizers(
    micro_batches: RolloutBatch,
    parts: Mapping[str, Part],
    *,
    masks: ByPart | None = None,
    weights: ByPart | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
) -> dict[str, Normalizer]:
    """The denominators of each part over a whole step.

    Args:
      micro_batches: a batch, or the step's micro-batches stacked: `[K, R, T]`.
      parts: those of `joint_loss_from_hidden`, by name.
      masks: those of `joint_loss_from_hidden`, stacked like the batch.
      weights: those of `joint_loss_from_hidden`, stacked too.
      parallel: the mesh.

    Returns:
      A `Normalizer` for each part by name, stacked like the micro-batches: slices of it go with slices of them.

    Raises:
      ValueError: as `Normalizer.from_batches`; masks or weights of unknown parts.

    Example:
      >>> from jaxppo.losses.joint import SFT, Part, joint_normalizers
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> masks = {"written": jnp.array([[0, 1, 0]])}
      >>> float(joint_normalizers(batch, {"written": Part(SFT())}, masks=masks)["written"].tokens)
      1.0
    """
    micro_batches = checked(micro_batches, stacked=True, prefix="micro_batches.")
    found = {}
    for name, batch in _batches(micro_batches, parts, masks, weights).items():
        loss = parts[name].loss
        found[name] = Normalizer.from_batches(batch, loss.aggregation, off_policy=loss.off_policy, parallel=parallel)
    return found


def _batches(
    batch: RolloutBatch, parts: Mapping[str, Part], masks: ByPart | None, weights: ByPart | None
) -> dict[str, RolloutBatch]:
    """The batch as each part reads it."""
    if not isinstance(parts, Mapping):
        raise TypeError(f"parts: got {type(parts).__name__}, expected Parts by name")
    if not parts:
        raise ValueError("parts: got none, expected at least one")
    for name, part in parts.items():
        if not isinstance(part, Part):
            raise TypeError(f"parts[{name!r}]: got {type(part).__name__}, expected Part")
    given = {"masks": dict(masks or {}), "weights": dict(weights or {})}
    for what, arrays in given.items():
        _check_names(what, arrays, parts)
        for name, x in arrays.items():
            check_array(f"{what}[{name!r}]", x)
            if x.shape != batch.loss_mask.shape:
                raise ValueError(
                    f"{what}[{name!r}]: got shape {x.shape}, expected the batch's, {batch.loss_mask.shape}"
                )

    found = {}
    for name in parts:
        mask, of_part = given["masks"].get(name, batch.loss_mask), given["weights"].get(name, batch.loss_weights)
        found[name] = dataclasses.replace(
            batch,
            loss_mask=mask.astype(jnp.float32),
            loss_weights=None if of_part is None else of_part.astype(jnp.float32),
        )
    return found


def _check_names(what: str, given: Iterable[str], parts: Mapping[str, Part]) -> None:
    for name in given:
        if name not in parts:
            raise ValueError(f"{what}: got {name!r}, expected some of {sorted(parts)}")


def _teachers(
    batch: RolloutBatch,
    parts: Mapping[str, Part],
    ids: Int[Array, "R T K"] | None,
    teacher_log_probs: Mapping[str, Float[Array, "R T K"]] | None,
) -> dict[str, tuple[Array, Array]]:
    """The ids and the teacher's log-probs of each part that distils."""
    given = dict(teacher_log_probs or {})
    _check_names("teacher_log_probs", given, parts)
    if isinstance(ids, Mapping):
        raise ValueError(f"ids: got some for each of {sorted(ids)}, expected one i32[R, T, K] that all parts share")
    found = {}
    for name, part in parts.items():
        what = f"teacher_log_probs[{name!r}]"
        if not isinstance(part.loss, TopKLoss):
            if name in given:
                raise ValueError(f"{what}: got some for a {type(part.loss).__name__}, expected a TopKDistillation")
            continue
        shared = needed("ids", ids, f"i32[R, T, K] for the part {name!r}")
        found[name] = ids_and_log_probs(shared, needed(what, given.get(name), "f32[R, T, K]"), batch, what)
    return found


def _loss_of(name: str, part: Part, batch: RolloutBatch) -> TokenLoss:
    """The token loss of a part; raises where the batch lacks what it reads."""
    if isinstance(part.loss, PolicyLossConfig):
        check_batch(batch, part.loss, None)
        return token_loss_of(part.loss)
    if isinstance(part.loss, SFT):
        return part.loss.with_coefficients()
    if isinstance(part.loss, ReferenceKL):
        needed("batch.ref_log_probs", batch.ref_log_probs, f"f32[R, T] for the part {name!r}")
    return part.loss


def _of_parts(
    axes: ShardAxes,
    call: tuple[tuple[TokenLoss, ...], tuple[str, ...], HeadCall],
    inputs: Inputs,
    parts: list[tuple[RolloutBatch, Normalizer | None, tuple[Array, Array] | None]],
    traced: list[list[Array]],
    coefs: list[Array],
) -> tuple[Float[Array, ""], Metrics]:
    static, names, head = call
    traced, coefs = lax.stop_gradient((traced, coefs))
    losses = [put_arrays(loss, arrays) for loss, arrays in zip(static, traced, strict=True)]
    batches, normalizers, teachers = zip(*parts, strict=True)
    total = None
    if all(loss.token_local for loss in losses):
        before = [Step.of(axes, x, None, b, n) for x, b, n in zip(losses, batches, normalizers, strict=True)]
        known = [known_before(*x) for x in zip(before, losses, teachers, traced, strict=True)]
        per_token = [(b, w * c, of) for ((b, w, of), _), c in zip(known, coefs, strict=True)]
        total, stats = reduce_tokens(head, inputs, _OfParts(static), per_token, [shared for _, shared in known])
        normalizers = tuple(step.normalizer for step in before)
    else:
        with note("two passes: the loss of a token depends on others"):
            stats = stats_of_tokens(head, inputs)
    steps = [Step.of(axes, x, stats, b, n) for x, b, n in zip(losses, batches, normalizers, strict=True)]
    found = [finish(step, loss, stats, of) for step, loss, of in zip(steps, losses, teachers, strict=True)]
    if total is None:
        total = sum((c * value for c, (value, _) in zip(coefs, found, strict=True)), jnp.float32(0))
    for step in steps:
        total += jnp.where(step.is_broken, jnp.nan, 0)  # also if all weights or coefficients are 0
    metrics: Metrics = {f"{n}/{what}": x for n, (_, its) in zip(names, found, strict=True) for what, x in its.items()}
    return total, metrics | {"loss": Metric(lax.stop_gradient(total), jnp.float32(1), "sum")}


@dataclasses.dataclass(frozen=True)
class _OfParts:
    """The weighted losses of some tokens, summed over the parts, in the form that `reduce_tokens` takes."""

    losses: tuple[TokenLoss, ...]

    def __call__(self, stats: Any, per_token: Any, shared: Any) -> jax.Array:
        found = [OfTokens(loss)(stats, *of) for loss, *of in zip(self.losses, per_token, shared, strict=True)]
        return functools.reduce(jnp.add, found)
