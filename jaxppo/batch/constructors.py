"""The constructors of `RolloutBatch`: from samples on the host, from padded arrays, from packed
rows, from packs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack, overload

from jaxtyping import Float, Int

from jaxppo.base.arrays import AnyArray
from jaxppo.batch.extras import PREFIX
from jaxppo.batch.packed import Packing, RowSizes, packed_samples
from jaxppo.batch.packs import Aligned, rows_of_packs
from jaxppo.batch.rows import RowArrays, layout_of, padded_rows, placed_rows
from jaxppo.batch.samples import Sample
from jaxppo.sharding import ParallelMesh


class Constructors:
    """The constructors of `RolloutBatch`, which derives from this class."""

    @classmethod
    def _packed(
        cls, parallel: ParallelMesh | None, arrays: Mapping[str, Any], **static: Any
    ) -> Self:
        """A batch of these arrays, whose rows lie in the mesh's context layout."""
        make: Any = cls
        named = {name: x for name, x in arrays.items() if not name.startswith(PREFIX)}
        extras = {name.removeprefix(PREFIX): x for name, x in arrays.items() if name not in named}
        layout, shards = layout_of(parallel)
        return make(**named, extras=extras, **static, context_layout=layout, context_shards=shards)

    @overload
    @classmethod
    def from_samples(
        cls, samples: Sequence[Sample], *, twin: None = None, **options: Unpack[Packing]
    ) -> Self: ...

    @overload
    @classmethod
    def from_samples(
        cls, samples: Sequence[Sample], *, twin: Sequence[Sample], **options: Unpack[Packing]
    ) -> tuple[Self, Self]: ...

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Sample],
        *,
        row_length: int,
        parallel: ParallelMesh | None = None,
        share_prefixes: bool = False,
        mtp_depths: int = 0,
        twin: Sequence[Sample] | None = None,
        **sizes: Unpack[RowSizes],
    ) -> Self | tuple[Self, Self]:
        """Packs samples into rows in the mesh's context layout, with targets and masks; numpy
        arrays.

        Rows are balanced over devices by the tokens that carry loss. Where the mesh spans several
        processes, each packs its own samples, and all must call this together: they agree on sizes
        and, unless samples have them, on sample ids. `put` then makes global arrays.

        Args:
          samples: at least one sample; an optional value must be given in all of them or in none.
          row_length: T; a multiple of what the context layout needs.
          parallel: the mesh, for its layout and data size.
          share_prefixes: store a prefix that prompts have in common once, as a segment that the
            samples continue. The model's attention must then follow `paths`. No loss, metric or
            gradient changes. Prompts are shared as far as their extras at the input agree too.
            Responses are shared by `jaxppo.batch.token_trees.TokenTrees`.
          mtp_depths: with share_prefixes, the most depths that `mtp_loss` will have.
          twin: for each sample another prompt with the same response, such as a teacher's prompt
            that holds a hint. In the twin's batch each response token is at the same place, on the
            same device, so that log-probs, hidden states and masks of either batch go with the
            other. Padding stands before the shorter prompt, and row_length must hold the longer
            one. The twin's optional values are its own, sample ids are not.
          **sizes: rows, buckets, micro_batches, max_tokens and num_segments, which fix R, K and S:
            see `jaxppo.sharding.pack`.

        Returns:
          The batch, `[R, T]`, or `[K, R, T]` with micro_batches or max_tokens; with twin, the batch
          and its twin.

        Raises:
          ValueError: the errors of `jaxppo.sharding.pack`; a value that only some samples have; a
            sample id of two samples; a group id of two prompts; a twin with other responses or in
            another number, with share_prefixes or in the layout "zigzag_per_segment".

        Example:
          >>> batch = RolloutBatch.from_samples([Sample([5, 6, 7], response_start=1, reward=2.0)], row_length=4)
          >>> batch.targets.tolist(), batch.loss_mask.tolist(), batch.rewards.tolist()
          ([[6, 7, 0, 0]], [[1.0, 1.0, 0.0, 0.0]], [[2.0]])
          >>> hinted = [Sample([1, 2, 5, 6, 7], response_start=3)]
          >>> batch, twin = RolloutBatch.from_samples([Sample([5, 6, 7], response_start=1)], row_length=6, twin=hinted)
          >>> batch.tokens.tolist(), twin.tokens.tolist()
          ([[0, 0, 5, 6, 7, 0]], [[1, 2, 5, 6, 7, 0]])
        """
        packed = packed_samples(
            samples, row_length, sizes, parallel, share_prefixes, mtp_depths, twin
        )
        batches = [cls._packed(parallel, arrays, mtp_depths=mtp_depths) for arrays in packed]
        if twin is None:
            return batches[0]
        return batches[0], batches[1]

    @classmethod
    def from_padded(
        cls,
        prompt_ids: Int[AnyArray, "B P"],
        completion_ids: Int[AnyArray, "B C"],
        completion_mask: Float[AnyArray, "B C"],
        *,
        prompt_mask: Float[AnyArray, "B P"] | None = None,
        attention_mask: Float[AnyArray, "B T"] | None = None,
        pad_id: int | None = None,
        parallel: ParallelMesh | None = None,
        **arrays: Unpack[RowArrays],
    ) -> Self:
        """A batch from prompts and completions padded to `[B, P]` and `[B, C]`, as in Tunix and
        TRL; works under jit.

        Row b holds `concatenate([prompt_ids[b], completion_ids[b]])` as one sequence, and no token
        moves: hidden states of a model that ran on it fit the batch, if the layout of `parallel` is
        contiguous. A token is predicted at the last token before it, across any padding between the
        two. Without `attention_mask`, the tokens are those of `prompt_mask` and the completion up
        to its last token with mask 1; a 0 before that one is a token without loss, such as a tool's
        output. The padding of left-padded completions would count as tokens.

        Args:
          prompt_ids: `i32[B, P]`, padded on either side.
          completion_ids: `i32[B, C]`, right-padded unless there is an `attention_mask`.
          completion_mask: `[B, C]`, 0 or 1, 1 for the tokens to train on.
          prompt_mask: `[B, P]`, 1 on tokens, 0 on padding; by default all are tokens.
          attention_mask: `[B, P + C]`, 1 on tokens; needed if padding lies elsewhere than described
            above.
          pad_id: the padding token. Without `attention_mask`, a completion that begins with it at
            mask 0 and trains later is refused, and so is without `prompt_mask` a prompt that begins
            or ends with it; both make losses NaN under jit. Rows of padding alone are legal.
          parallel: the mesh that the batch is for; B is a multiple of its data size.
          **arrays: the other arrays of the batch, see `RowArrays`: `[B, C]` per token, `[B]` per
            sequence, advantages and loss_weights in either shape.

        Returns:
          A batch with R = B, T = P + C and S = 1. Under jit, a row that would be refused makes
          losses NaN.

        Raises:
          TypeError, ValueError: an array of another dtype or shape, masks that are not 0 or 1,
            padding that `pad_id` shows, a token that trains on padding or without a token before
            it, a row length that the layout cannot divide, the layout "zigzag_per_segment", which
            needs rows that were packed for it.

        Example:
          >>> import jax.numpy as jnp
          >>> prompts, completions = jnp.array([[0, 5, 6]]), jnp.array([[7, 8, 0]])
          >>> mask, values = jnp.array([[1, 1, 0]]), {"advantages": jnp.array([0.5])}
          >>> options = {"prompt_mask": prompts > 0, "pad_id": 0}
          >>> batch = RolloutBatch.from_padded(prompts, completions, mask, **options, **values)
          >>> batch.targets.tolist(), batch.loss_mask.tolist(), batch.positions.tolist()
          ([[0, 6, 7, 8, 0, 0]], [[0.0, 0.0, 1.0, 1.0, 0.0, 0.0]], [[0, 0, 1, 2, 3, 0]])
        """
        padded = {
            "prompt_ids": prompt_ids,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "prompt_mask": prompt_mask,
            "attention_mask": attention_mask,
        }
        return cls._packed(parallel, padded_rows(padded, arrays, pad_id, parallel))

    @classmethod
    def from_token_aligned(
        cls,
        tokens: Int[AnyArray, "R T"],
        segment_ids: Int[AnyArray, "R T"],
        positions: Int[AnyArray, "R T"],
        loss_mask: Float[AnyArray, "R T"],
        *,
        num_segments: int | None = None,
        parallel: ParallelMesh | None = None,
        **arrays: Unpack[RowArrays],
    ) -> Self:
        """A batch from packed rows whose arrays are aligned to tokens, as in Tunix's packed
        batches; works under jit.

        Every per-token array moves to the position that predicts the token: `loss_mask[t]` of the
        result is that of token t + 1 if it is in the same sequence, and 0 at a sequence's last
        position. Nothing predicts the first token of a sequence; its mask and values are dropped.

        Args:
          tokens: `i32[R, T]`, rows in logical order.
          segment_ids: `i32[R, T]`, 0 is padding, 1..S the sequences of that row.
          positions: `i32[R, T]`, the place of a token in its sequence, from 0.
          loss_mask: `[R, T]`, 0 or 1, 1 for the tokens to train on.
          num_segments: S; needed under jit, by default the largest segment id.
          parallel: the mesh that the batch is for; R is a multiple of its data size.
          **arrays: the other arrays of the batch, see `RowArrays`; per-token values are aligned to
            tokens too.

        Returns:
          A batch in the mesh's layout.

        Raises:
          TypeError, ValueError: as `from_padded`; num_segments that is not given under jit,
            sequences that are numbered from 0 and lose a token to train on, or are out of order.

        Example:
          >>> import jax.numpy as jnp
          >>> x, ids = jnp.array([[5, 6, 7, 8]]), jnp.array([[1, 1, 1, 2]])
          >>> batch = RolloutBatch.from_token_aligned(x, ids, jnp.array([[0, 1, 2, 0]]), jnp.array([[0, 1, 1, 1]]))
          >>> batch.targets.tolist(), batch.loss_mask.tolist()
          ([[6, 7, 0, 0]], [[1.0, 1.0, 0.0, 0.0]])
        """
        rows = {
            "tokens": tokens,
            "segment_ids": segment_ids,
            "positions": positions,
            "loss_mask": loss_mask,
        }
        return cls._packed(parallel, placed_rows(rows, arrays, num_segments, parallel))

    @classmethod
    def from_target_aligned(
        cls,
        tokens: Int[AnyArray, "R T"],
        targets: Int[AnyArray, "R T"],
        segment_ids: Int[AnyArray, "R T"],
        positions: Int[AnyArray, "R T"],
        loss_mask: Float[AnyArray, "R T"],
        *,
        num_segments: int | None = None,
        parallel: ParallelMesh | None = None,
        **arrays: Unpack[RowArrays],
    ) -> Self:
        """A batch from packed rows whose targets are already shifted, as in MaxText; works under
        jit.

        Values only move into the mesh's layout. A sequence of n + 1 tokens has n positions here.
        Its last position has a real target too, not among the row's tokens, and may carry loss.

        Args:
          tokens: MaxText's `inputs`; this and what is not listed here: see `from_token_aligned`.
          targets: `i32[R, T]`, the token after `tokens[t]`; its `targets`.
          segment_ids: its `inputs_segmentation`.
          positions: its `inputs_position`.
          loss_mask: `[R, T]`, 0 or 1, 1 where `targets[t]` trains.
          **arrays: see `RowArrays`; a per-token value stands at the position that predicts its
            token.

        Example:
          >>> import jax.numpy as jnp
          >>> x, ids, mask = jnp.array([[5, 6]]), jnp.array([[1, 1]]), jnp.array([[0, 1]])
          >>> RolloutBatch.from_target_aligned(x, x + 1, ids, jnp.array([[0, 1]]), mask).targets.tolist()
          [[6, 7]]
        """
        rows = {
            "tokens": tokens,
            "segment_ids": segment_ids,
            "positions": positions,
            "loss_mask": loss_mask,
        }
        batch = placed_rows(rows | {"targets": targets}, arrays, num_segments, parallel)
        return cls._packed(parallel, batch, real_last_targets=True)

    @classmethod
    def from_cu_seqlens(
        cls,
        tokens: Int[AnyArray, " N"] | Int[AnyArray, "R N"],
        cu_seqlens: Int[AnyArray, " S+1"] | Int[AnyArray, "R S+1"],
        loss_mask: Float[AnyArray, " N"] | Float[AnyArray, "R N"],
        *,
        aligned: Aligned,
        cu_seqlens_padded: Int[AnyArray, " S+1"] | Int[AnyArray, "R S+1"] | None = None,
        targets: Int[AnyArray, " N"] | Int[AnyArray, "R N"] | None = None,
        row_length: int | None = None,
        num_segments: int | None = None,
        parallel: ParallelMesh | None = None,
        **arrays: Unpack[RowArrays],
    ) -> Self:
        """A batch from packs in the thd format of Megatron, Transformer Engine and verl; works
        under jit.

        Sequence i of a pack is `tokens[cu_seqlens[i]:cu_seqlens[i + 1]]`. Each pack becomes one
        row, in which its sequences stand one after another as the mesh's layout wants them. Padding
        between them goes. Give packs before they are split over context shards, and run the model
        on `batch.tokens`.

        Args:
          tokens: `i32[N]`, one pack, or `i32[R, N]`.
          cu_seqlens: `i32[S + 1]` or `i32[R, S + 1]`, 0 and the ends of the sequences. Unused
            entries at the end are -1 or repeat the last one. Tokens behind the last sequence are
            padding.
          loss_mask: shaped as tokens, 0 or 1, 1 where a token trains; 0 outside the sequences.
          aligned: where a per-token value stands: "token", at the token that it is about (verl's
            loss mask), or "target", at the position that predicts that token (Megatron's).
          cu_seqlens_padded: the cumulative lengths with padding, where the pack has padding between
            sequences. Sequence i begins at `cu_seqlens_padded[i]` then, and `cu_seqlens` gives the
            lengths alone.
          targets: shaped as tokens, the token after each, Megatron's `labels`, with
            aligned="target". A last position has a real target then and may carry loss. By default
            targets are the sequences' own next tokens.
          row_length: T, at least what the sequences need; by default N, rounded up to what the
            layout needs.
          num_segments: S of the batch; by default that of `cu_seqlens`.
          parallel: the mesh that the batch is for; R is a multiple of its data size.
          **arrays: see `RowArrays`; per token shaped as tokens, per sequence `[S]` or `[R, S]`.

        Returns:
          A batch `[R, T]` in the mesh's layout. Under jit, cumulative lengths that are out of order
          or do not fit make losses NaN.

        Raises:
          TypeError, ValueError: as `from_padded`; cumulative lengths that are out of order, reach
            behind the pack or leave out a token that trains; sequences that are longer than
            row_length together.

        Example:
          >>> packs = {"tokens": np.array([5, 6, 7, 0, 8, 9, 0, 0]), "loss_mask": np.array([0, 1, 1, 0, 0, 1, 0, 0])}
          >>> packs |= {"cu_seqlens": np.array([0, 3, 5]), "cu_seqlens_padded": np.array([0, 4, 8])}
          >>> batch = RolloutBatch.from_cu_seqlens(**packs, aligned="token", row_length=6)
          >>> batch.tokens.tolist(), batch.segment_ids.tolist(), batch.loss_mask.tolist()
          ([[5, 6, 7, 8, 9, 0]], [[1, 1, 1, 2, 2, 0]], [[1.0, 1.0, 0.0, 1.0, 0.0, 0.0]])
        """
        packs: dict[str, Any] = {"tokens": tokens, "cu_seqlens": cu_seqlens, "loss_mask": loss_mask}
        packs["cu_seqlens_padded"] = cu_seqlens_padded
        if targets is not None:
            packs["targets"] = targets
        rows = rows_of_packs(packs, arrays, aligned, row_length, num_segments, parallel)
        return cls._packed(parallel, rows, real_last_targets=targets is not None)
