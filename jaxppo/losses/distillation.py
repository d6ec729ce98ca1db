"""Distillation over the full vocabulary: divergences between a student's and a teacher's head,
without their logits.

From a teacher's top-k see `TopKDistillation`, by policy gradient
`advantages.on_policy_distillation`.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, Unpack

from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import Aggregation, check, check_choice, is_number
from jaxppo.base.metrics import Metrics, Terms, means
from jaxppo.base.pytree import PyTree
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.validation import checked
from jaxppo.head.arguments import prepare_pair
from jaxppo.head.call import HeadOptions
from jaxppo.head.divergence import DivergenceCall, divergences_of_tokens
from jaxppo.head.head import Head
from jaxppo.losses.doors import from_stats
from jaxppo.losses.recorded_top_k import check_top_k
from jaxppo.losses.token_loss import Asks, Losses, Reads, TokenLoss, WeighedBatch
from jaxppo.losses.top_k_divergence import top_k_divergence
from jaxppo.sharding import ParallelMesh, Segments, ShardAxes, shard_call
from jaxppo.step.aggregation import Normalizer

__all__ = ["check_top_k", "distillation_loss", "divergence_from_hidden", "top_k_divergence"]

Divergence = Literal["reverse_kl", "forward_kl", "jensen_shannon"]


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
    teacher_hidden_spec: P | None = None,
    **options: Unpack[HeadOptions],
) -> Float[Array, "R T"]:
    """The divergence of a student's next-token distribution p from a teacher's q, `f32[R, T]` in
    nats.

    With m = beta q + (1 - beta) p:

        reverse_kl       sum_j p_j log(p_j / q_j)
        forward_kl       sum_j q_j log(q_j / p_j)
        jensen_shannon   beta KL(q || m) + (1 - beta) KL(p || m)

    Three passes go over both vocabularies together, block by block. The teacher is a constant.

    Args:
      hidden: `[R, T, H]`, the student's final hidden states.
      head: the student's `Head`, or its kernel `[H, V]`.
      parallel: the mesh; rows sharded over data, positions over context, vocabularies over tensor.
      **options: how the head works, see `HeadOptions`: `memory`, `precision`, `follow_mask` and
        others.
      teacher_hidden: `[R, T, G]`, the teacher's; G may be another size.
      teacher_head: the teacher's head, with the same vocabulary and shards. Its layout may be
        another, and so may its number of columns if both heads have one `vocab_size`: the columns
        from there on are padding.
      divergence: one of the three above.
      beta: the teacher's share of the mixture, in (0, 1), for "jensen_shannon".
      temperature: divides both models' logits; a positive scalar or `[R, T]`. Nothing is multiplied
        by its square.
      where: `bool[R, T]`, the positions that count: only they meet the kernels. The others read 0.
      teacher_hidden_spec: how the teacher's hidden states are sharded, see
        `HeadOptions.hidden_spec`.

    Raises:
      TypeError, ValueError: an argument of the wrong dtype, rank, shape, sharding or range, named.

    Example:
      >>> kernel, teacher_kernel = jnp.zeros((2, 4)), jnp.array([[0.0, 0.0, -100.0, -100.0]])
      >>> states = jnp.ones((1, 1, 2)), kernel, jnp.ones((1, 1, 1)), teacher_kernel
      >>> divergence_from_hidden(*states, divergence="forward_kl").round(4)
      Array([[0.6931]], dtype=float32)

    Hinton et al. 2015, https://arxiv.org/abs/1503.02531; Agarwal et al. 2023, GKD,
    https://arxiv.org/abs/2306.13649
    """
    check_choice("divergence", divergence, Divergence)
    check("beta", repr(beta), is_number(beta) and 0 < beta < 1, "a number in (0, 1)")
    student, teacher = prepare_pair(
        (hidden, head),
        (teacher_hidden, teacher_head),
        names=("student", "teacher"),
        second_spec=teacher_hidden_spec,
        options=options,
        parallel=parallel,
        temperature=temperature,
        where=where,
    )
    divergences: tuple[Float[Array, "R T"]] = shard_call(
        "divergence_from_hidden",
        divergences_of_tokens,
        parallel,
        {"student": student.inputs, "teacher": teacher.inputs},
        lambda p: ([student.specs, teacher.specs], p.tokens_spec),
        DivergenceCall(student.call, teacher.call, (divergence,), beta),
    )
    return divergences[0]


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
    teacher_hidden_spec: P | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, ""], Metrics]:
    """The divergence from the teacher over the loss-carrying tokens: loss = sum over tokens of
    weight_t * D_t.

    Args:
      batch: `[R, T]`; only its sequences, loss mask and loss weights are read.
      aggregation, aggregation_norm: the denominators, see `token_weights`.
      parallel: the mesh; rows sharded over data, positions over context, vocabularies over tensor.
      normalizer: `Normalizer.of(SFT(aggregation=...), batches)` of the whole step, if the batch is
        one of its micro-batches.
      hidden, teacher_hidden: `[R, T, H]` and `[R, T, G]`, the final hidden states of student and
        teacher.
      head, teacher_head: their heads, of one vocabulary; with padding, `vocab_size` of both says
        where it begins.
      **options: how the head works, see `HeadOptions`: `memory`, `precision`, `follow_mask` and
        others.
      others: see `divergence_from_hidden`.

    Returns:
      The scalar f32 loss, and metrics: `loss` (adds up over micro-batches), `divergence` (a mean)
      and `broken_rules`.

    Raises:
      TypeError, ValueError: as `divergence_from_hidden`; an unknown aggregation.

    Example:
      >>> batch = RolloutBatch.from_samples([Sample([1, 2, 3], response_start=1)], row_length=3)
      >>> states = jnp.ones((1, 3, 2)), jnp.zeros((2, 4))
      >>> float(distillation_loss(*states, *states, batch)[0])
      0.0
    """
    batch = checked(batch, reader="distillation_loss")
    loss = DivergenceLoss(aggregation, aggregation_norm)
    divergences = divergence_from_hidden(
        hidden,
        head,
        teacher_hidden,
        teacher_head,
        divergence=divergence,
        beta=beta,
        temperature=temperature,
        where=batch.loss_mask > 0,
        parallel=parallel,
        teacher_hidden_spec=teacher_hidden_spec,
        **options,
    )
    return from_stats("distillation_loss", divergences, batch, loss, parallel, normalizer)


@dataclasses.dataclass(frozen=True)
class DivergenceLoss(TokenLoss[Float[Array, "R T"]]):
    """The token loss of distillation: the token's divergence."""

    of_head: ClassVar[bool] = False
    aggregation: Aggregation
    aggregation_norm: float | None = None
    asks = Asks()

    def reads(
        self, stats: Float[Array, "R T"] | None, batch: RolloutBatch, segments: Segments
    ) -> Reads:
        return {"divergence": stats}

    def terms(
        self, stats: Float[Array, "R T"], batch: RolloutBatch, constants: PyTree, segments: Segments
    ) -> Losses:
        return {"divergence": stats}

    def metrics(
        self, stats: Float[Array, "R T"], weighed: WeighedBatch, constants: PyTree
    ) -> Terms:
        return means({"divergence": stats}, weighed.batch.loss_mask)
