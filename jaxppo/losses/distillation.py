"""Distillation over the full vocabulary: divergences between a student's and a teacher's head, without their logits.

For distillation on sampled tokens, by policy gradient, see `advantages.on_policy_distillation`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from jaxppo._arrays import Aggregation, check_aggregation, check_choice, check_floating, masked
from jaxppo._sharding import ParallelMesh, Segments, ShardAxes, shard_call
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.head.from_hidden import BLOCK_BYTES, block_sizes, features_and_parameters, head_arrays, static_head
from jaxppo.head.head import Head, as_head
from jaxppo.head.hidden_rule import Inputs, Rule
from jaxppo.head.pair import DivergenceRule, token_divergence
from jaxppo.head.placement import HeadPlacement, place_head
from jaxppo.head.stats import TokenStats, as_temperature, check_where
from jaxppo.losses.token_loss import TokenLoss, Values, loss_of_stats
from jaxppo.metrics import Metrics, Term

Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon"]
_ARRAYS = ("hidden", "kernel", "bias", "lora_a", "lora_b")


def divergence_from_hidden(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    teacher_hidden: Float[Array, "R T G"],
    teacher_head: Head | Float[Array, "G V"],
    *,
    divergence: Divergence = "reverse_kl",
    beta: float = 0.5,
    temperature: float | Array = 1.0,
    where: Bool[Array, "R T"] | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    hidden_spec: P | None = None,
    teacher_hidden_spec: P | None = None,
    block_bytes: int | None = None,
) -> Float[Array, "R T"]:
    """The divergence of a student's next-token distribution p from a teacher's q, at each token.

    With m = beta q + (1 - beta) p:

        reverse_kl       sum_j p_j log(p_j / q_j)
        forward_kl       sum_j q_j log(q_j / p_j)
        jensen_shannon   beta KL(q || m) + (1 - beta) KL(p || m)

    Both vocabularies are walked together in blocks, three times: for the softmax statistics, for the divergence, and in
    the backward. The gradient reaches the student's hidden states and head; the teacher is a constant.

    Args:
      hidden: `[R, T, H]`, the student's, see `log_probs_from_hidden`.
      head: the student's `Head`, or its bare kernel `[H, V]`.
      teacher_hidden: `[R, T, G]`, the teacher's; G may be another size.
      teacher_head: the teacher's, with as many columns, sharded in the same way.
      divergence: which.
      beta: the teacher's share of the mixture, in (0, 1), for "jensen_shannon".
      temperature: divides both models' logits; a positive scalar or `[R, T]`.
      where: `bool[R, T]`, the positions that count: only they meet the kernels. The others read 0.
      parallel: the mesh; `ShardAxes` inside the caller's own `shard_map`; None on one device.
      hidden_spec: how the student's hidden states are sharded, where it is not `parallel.hidden_spec`.
      teacher_hidden_spec: the same of the teacher's.
      block_bytes: bytes of the blocks of f32 logits and their gradient, 8 MiB by default.

    Returns:
      `f32[R, T]`, nats.

    Raises:
      TypeError, ValueError: an argument of the wrong dtype, rank, shape, sharding or range, named.

    Example:
      >>> kernel, teacher_kernel = jnp.zeros((2, 4)), jnp.array([[0.0, 0.0, -100.0, -100.0]])
      >>> states = jnp.ones((1, 1, 2)), kernel, jnp.ones((1, 1, 1)), teacher_kernel
      >>> divergence_from_hidden(*states, divergence="forward_kl").round(4)
      Array([[0.6931]], dtype=float32)

    Hinton et al. 2015, https://arxiv.org/abs/1503.02531; Agarwal et al. 2023, GKD, https://arxiv.org/abs/2306.13649
    """
    check_choice("divergence", divergence, Divergence)
    if not 0 < beta < 1:
        raise ValueError(f"beta: got {beta}, expected a number in (0, 1)")
    if block_bytes is not None and block_bytes <= 0:
        raise ValueError(f"block_bytes: got {block_bytes}, expected a positive number of bytes")
    check_floating("hidden", hidden, 3, "[R, T, H]")
    check_floating("teacher_hidden", teacher_hidden, 3, "[R, T, G]")
    heads = as_head("head", head), as_head("teacher_head", teacher_head)
    placements = (
        place_head(parallel, "head", hidden, heads[0], hidden_spec),
        place_head(parallel, "teacher_head", teacher_hidden, heads[1], teacher_hidden_spec),
    )
    tokens = _check_pair((hidden, teacher_hidden), heads, placements)
    check_where(where, tokens)
    args: dict[str, Any] = head_arrays(hidden, heads[0])
    args |= {f"teacher_{name}": x for name, x in head_arrays(teacher_hidden, heads[1]).items()}
    args |= {"where": where, "temperature": as_temperature(temperature, tokens)}

    def specs(p: ParallelMesh) -> tuple[list[Any], P]:
        of_heads = [placement.specs(p)[name] for placement in placements for name in _ARRAYS]
        return [*of_heads, p.tokens_spec, p.tokens_spec if args["temperature"].ndim else P()], p.tokens_spec

    of_heads = tuple(static_head(head) for head in heads)
    static = _Call(placements, of_heads, divergence, beta, block_bytes or BLOCK_BYTES)  # type: ignore[arg-type]
    found: Float[Array, "R T"] = shard_call("divergence_from_hidden", _per_shard, parallel, args, specs, static)
    return found


@dataclasses.dataclass(frozen=True)
class _Call:
    """What is static about one call: of the student and of the teacher, and the divergence."""

    placements: tuple[HeadPlacement, HeadPlacement]
    heads: tuple[Head, Head]
    divergence: Divergence
    beta: float
    block_bytes: int


def _check_pair(hidden: Any, heads: tuple[Head, Head], placements: tuple[HeadPlacement, HeadPlacement]) -> Any:
    """[R, T], equal for student and teacher; raises where they or their vocabularies differ."""
    tokens = [placement.check_hidden(x) for placement, x in zip(placements, hidden, strict=True)]
    if tokens[0] != tokens[1]:
        raise ValueError(f"teacher_hidden: got [R, T] = {tokens[1]}, expected the student's, {tokens[0]}")
    columns = [head.kernel.shape[head.v_dim] for head in heads]
    if columns[0] != columns[1]:
        raise ValueError(f"teacher_head.kernel: got {columns[1]} columns, expected the student's {columns[0]}")
    if (heads[0].vocab_size or columns[0]) != (heads[1].vocab_size or columns[1]):
        raise ValueError(
            f"teacher_head.vocab_size: got {heads[1].vocab_size}, expected the student's, {heads[0].vocab_size}"
        )
    entries = [p.kernel_spec[head.v_dim] for p, head in zip(placements, heads, strict=True)]
    if entries[0] != entries[1]:
        raise ValueError(
            f"teacher_head.kernel: got its vocabulary over {entries[1]}, expected over {entries[0]}, as the student's"
        )
    return tokens[0]


def _per_shard(axes: ShardAxes, call: _Call, *arrays: Any) -> jax.Array:
    *both, where, temperature = arrays
    R, T, _ = both[0].shape
    T = T * axes.size(axes.tensor) if call.placements[0].sequence_parallel else T
    flat = lambda x: x.reshape(R * T)  # noqa: E731
    where = None if where is None else flat(where).astype(bool)
    temperature = flat(temperature) if temperature.ndim else temperature
    rules, inputs = [], []
    # two blocks of logits, the gradient of one, and what the divergence needs beside them
    block_tokens, block_columns = block_sizes(R * T, call.block_bytes // 2, masked=where is not None)
    given = both[: len(_ARRAYS)], both[len(_ARRAYS) :]
    for placement, head, values in zip(call.placements, call.heads, given, strict=True):
        named = dict(zip(_ARRAYS, values, strict=True))
        columns = placement.columns(axes, head, named["kernel"], block_columns)
        rules.append(Rule(columns, "none", block_tokens, placement.sequence_parallel))
        features, parameters = features_and_parameters(head, named)
        inputs.append(Inputs(features, parameters, None, None, where, temperature))
    return token_divergence(DivergenceRule(rules[0], rules[1], call.divergence, call.beta), *inputs).reshape(R, T)


def distillation_loss(
    hidden: Float[Array, "R T H"],
    head: Head | Float[Array, "H V"],
    teacher_hidden: Float[Array, "R T G"],
    teacher_head: Head | Float[Array, "G V"],
    batch: RolloutBatch,
    *,
    divergence: Divergence = "reverse_kl",
    beta: float = 0.5,
    temperature: float | Array = 1.0,
    aggregation: Aggregation = "token_mean",
    aggregation_norm: float | None = None,
    parallel: ParallelMesh | ShardAxes | None = None,
    normalizer: Normalizer | None = None,
    hidden_spec: P | None = None,
    teacher_hidden_spec: P | None = None,
    block_bytes: int | None = None,
) -> tuple[Float[Array, ""], Metrics]:
    """The divergence from the teacher over the loss-carrying tokens: loss = sum over tokens of weight_t * D_t.

    Args:
      hidden: `[R, T, H]`, the student's.
      head: the student's.
      teacher_hidden: `[R, T, G]`, the teacher's.
      teacher_head: the teacher's.
      batch: `[R, T]`; its loss mask and its sequences count.
      divergence: see `divergence_from_hidden`; likewise beta, temperature and the specs.
      beta: for "jensen_shannon".
      temperature: divides both models' logits.
      aggregation: the denominators, see `token_weights`.
      aggregation_norm: the constant length of "sequence_mean_token_sum_norm".
      parallel: the mesh; rows sharded over data, positions over context, vocabularies over tensor.
      normalizer: the denominators of the whole step where the batch is one of its micro-batches.
      hidden_spec: of the student's hidden states.
      teacher_hidden_spec: of the teacher's.
      block_bytes: see `divergence_from_hidden`.

    Returns:
      The scalar f32 loss, and the metrics `loss` (adds up over micro-batches), `divergence` (a mean over tokens) and
      `broken_rules` (see `policy_loss`).

    Raises:
      TypeError, ValueError: as `divergence_from_hidden`; an unknown aggregation.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> states = jnp.ones((1, 3, 2)), jnp.zeros((2, 4))
      >>> float(distillation_loss(*states, *states, batch)[0])
      0.0
    """
    loss = DivergenceLoss(aggregation, aggregation_norm)
    found = divergence_from_hidden(
        hidden,
        head,
        teacher_hidden,
        teacher_head,
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        where=batch.loss_mask > 0,
        parallel=parallel,
        hidden_spec=hidden_spec,
        teacher_hidden_spec=teacher_hidden_spec,
        block_bytes=block_bytes,
    )
    # the divergence takes the place of log-probs
    return loss_of_stats("distillation_loss", loss, TokenStats(found), batch, parallel, normalizer)


@dataclasses.dataclass(frozen=True)
class DivergenceLoss(TokenLoss):
    """The divergence itself."""

    aggregation: Aggregation
    aggregation_norm: float | None

    def __post_init__(self) -> None:
        check_aggregation(self.aggregation, self.aggregation_norm)

    @property
    def token_local(self) -> bool:
        return True

    def ruled(self, stats: TokenStats | None, batch: RolloutBatch) -> dict[str, Any]:
        return {"new_values": stats and stats.log_probs}

    def per_token(
        self, stats: TokenStats, batch: RolloutBatch, constants: Any, segments: Segments
    ) -> tuple[Float[Array, "R T"], Values]:
        divergence = masked(stats.log_probs, batch.loss_mask)
        return divergence, {"divergence": divergence}

    def terms(self, values: Values, weights: Float[Array, "R T"], mask: Float[Array, "R T"]) -> dict[str, Term]:
        return {"divergence": (values["divergence"], mask, "mean")}
