"""Trains multi-token prediction heads as a draft model, towards the policy that will accept or
reject their tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxppo.base.arrays import Aggregation, AnyArray, Coefficient, check, check_floating, check_type
from jaxppo.base.metrics import Metric, Metrics, reduce_metric
from jaxppo.batch.loss_tokens import LossTokens
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.contrib.draft_ids import as_draft_ids, inputs_of_columns, sound_ids
from jaxppo.head.arguments import Pair, prepare_head, prepare_pair
from jaxppo.head.call import Asked, HeadOptions, Inputs, Prepared
from jaxppo.head.divergence import DivergenceCall, divergences_of_tokens
from jaxppo.head.gradient import stats_of_inputs
from jaxppo.head.head import Head, as_head
from jaxppo.head.quantized import QuantizedArray
from jaxppo.losses.distillation import DivergenceLoss
from jaxppo.losses.mtp import (
    Heads,
    OfDepths,
    States,
    heads_of,
    shift_targets,
    shift_temperature,
    sum_of_depths,
)
from jaxppo.mismatch.heads import F32_UNIT, comparison_of_tokens
from jaxppo.policy_losses.base import choice, number
from jaxppo.sharding import ParallelMesh, ShardAxes, shard_call, shift_left
from jaxppo.step.aggregation import Normalizer, Parallel

__all__ = ["Draft", "draft_loss", "draft_metrics"]

Objective = Literal["soft_cross_entropy", "total_variation", "end_to_end", "likelihood"]
# beside the total variation
DIVERGENCES = {"soft_cross_entropy": ("cross_entropy",), "likelihood": ("forward_kl",)}


@dataclasses.dataclass(frozen=True)
class Draft(OfDepths):
    """The options of `draft_loss`.

    Args:
      depths, aggregation: see `MTP`.
      objective: one of the four of `draft_loss`.
      eta: how quickly "likelihood" changes from the divergence to the total variation as acceptance
        grows.
      coef: the factor of the mean, or of the single loss of "end_to_end".
      decay: depth k weighs decay^(k - 1) in the mean over depths; not read by "end_to_end".

    Raises:
      TypeError, ValueError: an option of another type or out of its range; an aggregation by a
        constant length.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3, 4], response_start=1)], row_length=4)
      >>> [float(n.tokens) for n in Normalizer.of(Draft(depths=2), batch)]
      [2.0, 1.0]
    """

    objective: Objective = choice("soft_cross_entropy", Objective)
    eta: Coefficient = number(3.0, least=0)
    coef: float | Array = number(0.1)
    decay: float = number(1.0, above=0, most=1)
    aggregation: Aggregation = "token_mean"

    @property
    def losses(self) -> int:
        if self.objective == "end_to_end":
            return 1
        return super().losses

    def shifted(self, batch: RolloutBatch, k: int, parallel: Parallel) -> RolloutBatch:
        """The batch with loss mask 1 where the masks of t and t + k are both 1."""
        later = shift_targets(batch, k, parallel)
        return dataclasses.replace(later, loss_mask=later.loss_mask * batch.loss_mask)


def draft_loss(
    hidden: States,
    head: Heads,
    policy_hidden: Float[Array, "R T G"],
    policy_head: Head | Float[Array, "G V"],
    batch: RolloutBatch,
    loss: Draft | None = None,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizers: Sequence[Normalizer] | None = None,
    temperature: float | Array = 1.0,
    draft_ids: Int[AnyArray, " D"] | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """coef / W * sum over depths k of decay^(k - 1) * distance of the draft d_k from the policy p,
    k places later.

    W is the sum of decay^(k - 1). At depth k, position t of the draft predicts what the policy
    predicts at t + k of the same sequence, where both carry loss. The acceptance a_k = sum over the
    vocabulary of min(p, d_k) is the chance that rejection sampling accepts a token drawn from d_k,
    and 1 - a_k is their total variation:

        soft_cross_entropy   -sum p log d_k
        total_variation      1 - a_k
        likelihood           l KL(p || d_k) + (1 - l) (1 - a_k),   l = exp(-eta a_k), a constant
        end_to_end           1 - (1 / K_t) sum over j of a_1 ... a_j, the K_t depths of token t; one loss for all depths

    With `draft_ids` the draft's head has fewer columns than the policy's. Its probabilities are of
    these ids, the policy's of its whole vocabulary, so a_k counts what the draft can never draw.
    -sum p log d_k and KL, the sum of p log(p / d_k) - p + d_k, are over the draft's ids.

    The policy and its head are constants: a head that both share gets a gradient through the draft
    only.

    Args:
      hidden, head, parallel, normalizers, **options: the draft's, see `mtp_loss`.
      policy_hidden: `[R, T, G]`, the policy's final hidden states.
      policy_head: the policy's head, with the same columns and sharding, or with all ids of
        `draft_ids`.
      batch: `[R, T]`; only its sequences, loss mask and loss weights are read.
      loss: the objective and other options; by default `Draft()`.
      temperature: divides both models' logits; where it is an array, see `mtp_loss`.
      draft_ids: `i32[D]`, the id of each column of the draft's heads in the policy's vocabulary, in
        any order, as `contrib.draft_ids` makes it. None if both have the same columns.

    Returns:
      The scalar f32 loss, and metrics: `draft_loss` (adds up over micro-batches), for each depth k
      `draft_{k}_acceptance`, the mean of a_k, and `draft_{k}_broken_rules` (see `policy_loss`).

    Raises:
      TypeError, ValueError: as `mtp_loss`; states or heads that do not fit each other; ids outside
        the vocabulary, or an id twice. Under `jit` such ids make the loss NaN.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3, 4], response_start=1)], row_length=4)
      >>> states = jnp.zeros((1, 1, 4, 2)), jnp.zeros((2, 8)), jnp.ones((1, 4, 2)), jnp.zeros((2, 8))
      >>> round(float(draft_loss(*states, batch, Draft(coef=1.0))[0]), 4)  # log 8
      2.0794

    Total variation: Bebop 2026, https://arxiv.org/abs/2606.12370; likelihood: 2026,
    https://arxiv.org/abs/2602.23881. Decay: SpecForge, 0.8, as a sum that is not divided by W:
    times W in coef; Automodel divides. Soft cross-entropy is in SkyRL and NeMo-RL, the others in
    pull requests of Megatron and speculators.
    """
    if loss is None:
        loss = Draft()
    check_type("loss", loss, isinstance(loss, Draft), "Draft")
    call = {"parallel": parallel, "temperature": temperature, "options": options}
    depths = _depths(
        loss, normalizers, (hidden, head), (policy_hidden, policy_head), batch, draft_ids, **call
    )
    if loss.objective == "end_to_end":
        losses = [(_end_to_end(depths), depths[0].batch)]
    else:
        losses = [(_of_depth(depth, loss), depth.batch) for depth in depths]
    numbers: dict[str, Any] = {"coef": loss.coef}
    if loss.objective == "likelihood":
        numbers["eta"] = loss.eta
    if draft_ids is not None:
        numbers["draft_ids"] = depths[0].sound
    total, metrics = sum_of_depths(
        "draft",
        ("broken_rules",),
        DivergenceLoss(loss.aggregation),
        losses,
        numbers,
        parallel,
        normalizers,
        loss.decay,
    )
    for k, depth in enumerate(depths, 1):
        metrics[f"draft_{k}_acceptance"] = _mean(1 - depth.apart, depth.batch, parallel)
    return total, metrics


def draft_metrics(
    hidden: States,
    head: Heads,
    policy_hidden: Float[Array, "R T G"],
    policy_head: Head | Float[Array, "G V"],
    batch: RolloutBatch,
    *,
    parallel: ParallelMesh | ShardAxes | None = None,
    temperature: float | Array = 1.0,
    draft_ids: Int[AnyArray, " D"] | None = None,
    **options: Unpack[HeadOptions],
) -> Metrics:
    """Metrics of a draft, forward only: its expected acceptance, and how often draft and policy
    agree on the top token.

    Args and errors are those of `draft_loss`. The policy's top token is the one of its whole
    vocabulary.

    Returns:
      For each depth k the means over its tokens `draft_{k}_acceptance`, of sum min(p, d_k), and
      `draft_{k}_agreement`, the acceptance under greedy decoding. Megatron's `acceptance_rate` is
      how often the top token is the sampled one.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3, 4], response_start=1)], row_length=4)
      >>> states = jnp.ones((1, 1, 4, 1)), jnp.array([[0.0, 100.0]]), jnp.ones((1, 4, 1)), jnp.array([[0.0, 0.1]])
      >>> found = finalize_metrics(draft_metrics(*states, batch))
      >>> {name: round(float(x), 4) for name, x in found.items()}
      {'draft_1_acceptance': 0.525, 'draft_1_agreement': 1.0}
    """
    call = {"parallel": parallel, "temperature": temperature, "options": options}
    depths = _depths(
        None, None, (hidden, head), (policy_hidden, policy_head), batch, draft_ids, **call
    )
    metrics: Metrics = {}
    for k, depth in enumerate(depths, 1):
        metrics[f"draft_{k}_acceptance"] = _mean(1 - depth.apart, depth.batch, parallel)
        metrics[f"draft_{k}_agreement"] = _mean(depth.other, depth.batch, parallel)
    return metrics


class Depth(NamedTuple):
    """One depth: the batch with its mask, the total variation, and what else was asked for."""

    batch: RolloutBatch
    sound: Any  # 0 where `draft_ids` are different ids of the vocabulary, else NaN
    apart: Float[Array, "R T"]
    # the divergence that the objective reads; of metrics, whether the top tokens are the same
    other: Any = None


def _depths(
    loss: Draft | None,
    normalizers: Any,
    draft: Pair,
    policy: Pair,
    batch: RolloutBatch,
    ids: Any,
    **call: Any,
) -> list[Depth]:
    """Each depth k: the draft beside the policy k places later; without a loss also whether they
    agree on the top.
    """
    batch = checked(batch, reader="draft_loss" if loss else "draft_metrics")
    options = loss or Draft()
    parallel = call["parallel"]
    heads = heads_of(*draft, normalizers, options)
    states, kernel = policy
    check_floating("policy_hidden", states, 3, "[R, T, H]")
    shape = states.shape
    tokens = batch.loss_mask.shape
    check("policy_hidden", f"shape {shape}", shape[:2] == tokens, f"{tokens} and H")
    policy_head = as_head("policy_head", kernel)
    policy_head = policy_head.checked("policy_head", shape[-1])
    states, policy_head = lax.stop_gradient((states, policy_head))
    depths = []
    for k, head in enumerate(heads, 1):
        shifted = options.shifted(batch, k, parallel)
        later = shift_left(states, parallel, k, 0, batch.segment_ids, batch.num_segments)
        temperature = shift_temperature(call["temperature"], batch, k, parallel)
        of_depth = {**call, "temperature": temperature, "where": shifted.loss_mask > 0}
        pair = ((draft[0][k - 1], head), (later, policy_head))
        if ids is None:
            depths.append(_of_equal_columns(loss, pair, shifted, **of_depth))
        else:
            depths.append(_of_fewer_columns(loss, pair, shifted, ids, **of_depth))
    return depths


def _of_equal_columns(
    loss: Draft | None, pair: tuple[Pair, Pair], batch: RolloutBatch, **call: Any
) -> Depth:
    """One depth of a draft whose head has the policy's columns."""
    spec = call["options"].get("hidden_spec")
    draft, policy = prepare_pair(*pair, names=("draft", "policy"), second_spec=spec, **call)
    fn = divergences_of_tokens if loss else _compare
    apart, *others = _per_token(loss, fn, draft, policy, {}, call["parallel"])
    return Depth(batch, None, apart, *others)


def _of_fewer_columns(
    loss: Draft | None, pair: tuple[Pair, Pair], batch: RolloutBatch, ids: Any, **call: Any
) -> Depth:
    """One depth of a draft whose head has these ids of the policy's vocabulary."""
    kernel = pair[1][1].kernel
    good = not isinstance(kernel, QuantizedArray)
    check_type(
        "policy_head.kernel",
        kernel,
        good,
        "an array of floats, since a draft's columns are taken from it",
    )
    options: dict[str, Any] = {"entropy": "none", "heads": 2, "top_k": 0 if loss else 1, **call}
    targets = None if loss else jnp.zeros_like(batch.targets)
    draft = prepare_head(*pair[0], targets, **options)
    policy = prepare_head(
        *pair[1], batch.targets, name="policy_head", logit_stats=("log_z",), **options
    )
    ids = as_draft_ids(ids, policy.call.vocab_size)
    columns = draft.call.vocab_size
    check(
        "draft_ids", ids.shape[0], ids.shape[0] == columns, f"{columns}, the columns of the draft"
    )
    sound = sound_ids(jnp.asarray(ids), policy.call.vocab_size)
    apart, *others = _per_token(
        loss, _of_columns, draft, policy, {"draft_ids": ids}, call["parallel"]
    )
    apart += jnp.where(batch.loss_mask > 0, sound, 0)
    return Depth(batch, sound, apart, *others)


def _per_token(
    loss: Draft | None,
    fn: Any,
    draft: Prepared,
    policy: Prepared,
    ids: dict[str, Any],
    parallel: Parallel,
) -> Any:
    """The results of the per-shard `fn`, `[R, T]` each: the total variation, and what else the
    objective reads.
    """
    kinds: tuple[str, ...] = ("total_variation",)
    if loss:
        kinds += DIVERGENCES.get(loss.objective, ())

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [draft.specs, policy.specs, *[P()] * len(ids)], p.tokens_spec

    return shard_call(
        "draft_loss" if loss else "draft_metrics",
        fn,
        parallel,
        {"hidden": draft.inputs, "policy_hidden": policy.inputs, **ids},
        specs,
        DivergenceCall(draft.call, policy.call, kinds, 0.5),
    )


def _compare(
    axes: ShardAxes, call: DivergenceCall, draft: Inputs, policy: Inputs
) -> tuple[jax.Array, jax.Array]:
    comparison = comparison_of_tokens(call, F32_UNIT, draft, policy)
    return comparison.total_variation, comparison.same_top


def _of_columns(
    axes: ShardAxes, call: DivergenceCall, draft: Inputs, policy: Inputs, ids: Array
) -> tuple[Array, ...]:
    """The divergences of a draft with fewer columns, and with `top_k` whether the top tokens are
    the same.
    """
    of_policy = stats_of_inputs(axes, call.teacher, policy)
    student = dataclasses.replace(call.student, asked=Asked())
    teacher, columns = inputs_of_columns(call.teacher, policy, ids, student, draft)
    pair = dataclasses.replace(call, student=student, teacher=teacher)
    without_targets = draft._replace(tokens=draft.tokens._replace(targets=None))
    divergences = divergences_of_tokens(axes, pair, without_targets, columns, of_policy.log_z)
    if not call.student.asked.top_k:
        return divergences
    of_draft = stats_of_inputs(axes, call.student, draft)
    draft_top = ids[of_draft.top_ids[..., 0]]
    policy_top = of_policy.top_ids[..., 0]
    return *divergences, (draft_top == policy_top).astype(jnp.float32)


def _of_depth(depth: Depth, loss: Draft) -> Float[Array, "R T"]:
    if loss.objective == "total_variation":
        return depth.apart
    if loss.objective == "soft_cross_entropy":
        return depth.other
    share = lax.stop_gradient(jnp.exp(-loss.eta * (1 - depth.apart)))
    return share * depth.other + (1 - share) * depth.apart


def _end_to_end(depths: Sequence[Depth]) -> Float[Array, "R T"]:
    """1 minus the mean over a token's depths of the chance that all drafts up to that depth are
    accepted.
    """
    accepted = jnp.ones_like(depths[0].apart)
    counts = jnp.ones(accepted.shape, bool)
    total = jnp.zeros_like(accepted)
    number = jnp.zeros_like(accepted)
    for depth in depths:
        counts &= depth.batch.loss_mask > 0  # no depth beyond a gap can be reached
        accepted = accepted * jnp.where(counts, 1 - depth.apart, 1)
        total = total + jnp.where(counts, accepted, 0)
        number = number + counts.astype(jnp.float32)
    return jnp.where(number > 0, 1 - total / jnp.maximum(number, 1), 0)


def _mean(x: Float[Array, "R T"], batch: RolloutBatch, parallel: Parallel) -> Metric:
    tokens = LossTokens.of(batch)
    arguments = {"x": tokens.see(x), "mask": tokens.mask}

    def specs(p: ParallelMesh) -> tuple[list[P], P]:
        return [p.tokens_spec, p.tokens_spec], P()

    return shard_call("draft_metrics", reduce_metric, parallel, arguments, specs)
