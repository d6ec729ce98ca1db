"""Distillation over the full vocabulary: divergences between a student's and a teacher's head, without their logits.

For distillation on sampled tokens, by policy gradient, see `advantages.on_policy_distillation`.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401  in the examples
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from jaxppo._sharding import ParallelMesh, ShardAxes, shard_call
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.divergence_rule import DivergenceRule, token_divergence
from jaxppo.log_probs.from_hidden import BLOCK_BYTES, block_sizes
from jaxppo.log_probs.head_placement import HeadPlacement, place_head
from jaxppo.log_probs.hidden_rule import Inputs, Rule
from jaxppo.log_probs.stats import as_temperature, check_floating, check_where
from jaxppo.metrics import Metrics, reduce_metric
from jaxppo.token_losses import aggregate, check_denominators, specs

DIVERGENCES = ("reverse_kl", "forward_kl", "jensen_shannon")


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["hidden", "kernel", "bias"],
    meta_fields=["kernel_layout", "logit_softcap", "kernel_spec", "hidden_spec"],
)
@dataclasses.dataclass(frozen=True)
class HeadStates:
    """A model's final hidden states and its head: logits = softcap(hidden @ kernel + bias), which never exist.

    Args:
      hidden: `[R, T, H]`, f32 or bf16; H may differ between student and teacher.
      kernel: `[H, V]`, or `[V, H]` with `kernel_layout="vh"`.
      bias: `[V]`.
      kernel_layout: "hv" or "vh".
      logit_softcap: logits become cap * tanh(logits / cap).
      kernel_spec: how the kernel is sharded, where it is not `parallel.kernel_spec(kernel_layout)`.
      hidden_spec: how the hidden states are sharded, where it is not `parallel.hidden_spec`.

    Example:
      >>> HeadStates(jnp.ones((1, 2, 3)), jnp.zeros((3, 4))).kernel_layout
      'hv'
    """

    hidden: Float[Array, "R T H"]
    kernel: Float[Array, "H V"]
    bias: Float[Array, " V"] | None = None
    kernel_layout: str = "hv"
    logit_softcap: float | None = None
    kernel_spec: P | None = None
    hidden_spec: P | None = None


def divergence_from_hidden(
    student: HeadStates,
    teacher: HeadStates,
    *,
    divergence: str = "reverse_kl",
    beta: float = 0.5,
    temperature: float | Array = 1.0,
    where: Bool[Array, "R T"] | None = None,
    vocab_size: int | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    block_bytes: int | None = None,
) -> Float[Array, "R T"]:
    """How far the student's next-token distribution p is from the teacher's q, at every position.

        reverse_kl       sum_j p_j (log p_j - log q_j)
        forward_kl       sum_j q_j (log q_j - log p_j)
        jensen_shannon   beta KL(q | m) + (1 - beta) KL(p | m),  m = beta q + (1 - beta) p

    Both vocabularies are walked together in blocks, so that no array has a vocabulary's length for each token. The
    gradient reaches the student's hidden states, kernel and bias; the teacher is a constant.

    Args:
      student: hidden states and head.
      teacher: the same of the teacher, with as many columns, sharded in the same way.
      divergence: which.
      beta: the teacher's share of the mixture, in (0, 1), for "jensen_shannon".
      temperature: positive scalar that divides both models' logits.
      where: `bool[R, T]`, the positions that count: only they meet the kernels. The others read 0.
      vocab_size: columns from here on are padding, with probability 0.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      block_bytes: bytes of the blocks of f32 logits and their gradient, 8 MiB by default.

    Returns:
      `f32[R, T]`, nats.

    Raises:
      TypeError, ValueError: an argument of the wrong dtype, rank, shape, sharding or range, named.

    Example:
      >>> student = HeadStates(jnp.ones((1, 1, 2)), jnp.zeros((2, 4)))
      >>> teacher = HeadStates(jnp.ones((1, 1, 1)), jnp.array([[0.0, 0.0, -100.0, -100.0]]))
      >>> divergence_from_hidden(student, teacher, divergence="forward_kl").round(4)
      Array([[0.6931]], dtype=float32)

    Hinton et al. 2015, https://arxiv.org/abs/1503.02531; Agarwal et al. 2023, GKD, https://arxiv.org/abs/2306.13649
    """
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence: got {divergence!r}, expected one of {', '.join(DIVERGENCES)}")
    if not 0 < beta < 1:
        raise ValueError(f"beta: got {beta}, expected a number in (0, 1)")
    if block_bytes is not None and block_bytes <= 0:
        raise ValueError(f"block_bytes: got {block_bytes}, expected a positive number of bytes")
    placements = [_place(name, head, parallel) for name, head in (("student", student), ("teacher", teacher))]
    _check_pair(student, teacher, placements)
    tokens = placements[0].check_hidden(student.hidden)
    check_where(where, tokens)
    per_shard = partial(
        _per_shard, placements, (student, teacher), divergence, beta, vocab_size, block_bytes or BLOCK_BYTES
    )
    args: dict[str, Any] = {}
    for name, head in (("student", student), ("teacher", teacher)):
        args |= {f"{name}.{field}": getattr(head, field) for field in ("hidden", "kernel", "bias")}
    args |= {"where": where, "temperature": as_temperature(temperature)}

    def to_specs(p: ParallelMesh) -> tuple[list[Any], P]:
        return [s for x in placements for s in x.specs(p)[:3]] + [p.tokens_spec, P()], p.tokens_spec

    return shard_call("divergence_from_hidden", per_shard, parallel, args, to_specs)


def _place(name: str, head: HeadStates, parallel: ParallelMesh | ShardAxes | None) -> HeadPlacement:
    if not isinstance(head, HeadStates):
        raise TypeError(f"{name}: got {type(head).__name__}, expected HeadStates")
    check_floating(f"{name}.hidden", head.hidden, 3, "[R, T, H]")
    check_floating(f"{name}.kernel", head.kernel, 2, "[H, V] or [V, H]")
    if head.logit_softcap is not None and not head.logit_softcap > 0:
        raise ValueError(f"{name}.logit_softcap: got {head.logit_softcap}, expected a positive number or None")
    return place_head(
        parallel, head.hidden, head.kernel, head.kernel_layout, head.bias, head.kernel_spec, head.hidden_spec
    )


def _check_pair(student: HeadStates, teacher: HeadStates, placements: list[HeadPlacement]) -> None:
    tokens = [
        placement.check_hidden(head.hidden) for placement, head in zip(placements, (student, teacher), strict=True)
    ]
    if tokens[0] != tokens[1]:
        raise ValueError(f"teacher.hidden: got [R, T] = {tokens[1]}, expected the student's, {tokens[0]}")
    columns = [h.kernel.shape[1 if h.kernel_layout == "hv" else 0] for h in (student, teacher)]
    if columns[0] != columns[1]:
        raise ValueError(f"teacher.kernel: got {columns[1]} columns, expected the student's {columns[0]}")
    entries = [p.kernel_spec[1 if p.layout == "hv" else 0] for p in placements]
    if entries[0] != entries[1]:
        raise ValueError(
            f"teacher.kernel: got its vocabulary sharded over {entries[1]}, expected {entries[0]}, as the student's"
        )


def _per_shard(placements, heads, divergence, beta, vocab_size, block_bytes, axes: ShardAxes, *arrays) -> jax.Array:  # type: ignore[no-untyped-def]
    *both, where, temperature = arrays
    R, T, _ = both[0].shape
    T = T * axes.size(axes.tensor) if placements[0].sequence_parallel else T
    rules, inputs = [], []
    for placement, states, (hidden, kernel, bias) in zip(placements, heads, (both[:3], both[3:]), strict=True):
        # two blocks of logits, the gradient of one, and what the divergence needs beside them
        block_tokens, block_columns = block_sizes(R * T, block_bytes // 2, masked=where is not None)
        head = placement.head(axes, hidden, kernel, states.logit_softcap, vocab_size, block_columns)
        rules.append(Rule(head, "none", block_tokens, placement.sequence_parallel))
        flat = None if where is None else where.reshape(-1).astype(bool)
        inputs.append(Inputs(hidden, kernel, bias, None, None, flat, temperature))
    return token_divergence(DivergenceRule(rules[0], rules[1], divergence, beta), *inputs).reshape(R, T)


def distillation_loss(
    student: HeadStates,
    teacher: HeadStates,
    batch: RolloutBatch,
    *,
    aggregation: str = "token_mean",
    aggregation_norm: float | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    **options: Any,
) -> tuple[Float[Array, ""], Metrics]:
    """The divergence from the teacher over the loss-carrying tokens: loss = sum over tokens of weight_t * D_t.

    Args:
      student: hidden states and head.
      teacher: the same of the teacher.
      batch: `[R, T]`; its loss mask and its sequences count.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; rows sharded over data, positions over context, vocabularies over tensor.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.
      **options: `divergence`, `beta`, `temperature`, `vocab_size`, `block_bytes` of `divergence_from_hidden`.

    Returns:
      The scalar f32 loss, and the metrics `loss` (adds up over micro-batches) and `divergence` (a mean over tokens).

    Raises:
      TypeError, ValueError: as `divergence_from_hidden`; an unknown aggregation.

    Example:
      >>> ids, one = jnp.array([[1, 1, 0]]), jnp.array([[0]])
      >>> batch = RolloutBatch(ids, ids, ids, ids, jnp.array([[1.0, 1.0, 0.0]]), one, one, one)
      >>> head = HeadStates(jnp.ones((1, 3, 2)), jnp.zeros((2, 4)))
      >>> float(distillation_loss(head, head, batch)[0])
      0.0
    """
    check_denominators(aggregation, aggregation_norm)
    where = batch.loss_mask > 0
    found = divergence_from_hidden(student, teacher, where=where, parallel=parallel, **options)

    def per_shard(
        axes: ShardAxes, found: jax.Array, batch: RolloutBatch, normalizer: Normalizer | None
    ) -> tuple[jax.Array, Metrics]:
        loss, metric, _ = aggregate(axes, found, batch, normalizer, aggregation, aggregation_norm)
        return loss, {"loss": metric, "divergence": reduce_metric(axes, found, batch.loss_mask, "mean")}

    args = {"divergence": found, "batch": batch, "normalizer": normalizer}
    return shard_call("distillation_loss", per_shard, parallel, args, lambda p: specs(p, batch, normalizer))
