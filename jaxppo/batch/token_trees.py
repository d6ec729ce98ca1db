"""Samples that share tokens, responses too: a model computes a shared token once, and losses read
it for each sample.

Two samples may give one token other advantages, and a loss may clip one of them and not the other.
A loss of summed advantages is therefore not the sum of losses. So each response is kept apart
beside the trees, and what is shared are the statistics of a token: a loss reads one number at as
many places as there are samples, and gradients of all of them meet at the one position of the
model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar, Unpack

import jax
from jax import lax
from jaxtyping import Array, Int

from jaxppo.base.arrays import check, check_type, is_array, spec_of
from jaxppo.base.pytree import PyTree, register
from jaxppo.batch.packed import RowSizes
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.batch.rows import taken
from jaxppo.batch.samples import Sample
from jaxppo.batch.tree_packing import packed_trees
from jaxppo.sharding import ParallelMesh, ShardAxes, multihost, shard_call, vary

__all__ = ["TokenTrees"]

Statistics = TypeVar("Statistics")


@register()
@dataclasses.dataclass(frozen=True)
class TokenTrees:
    """Samples in rows that hold each shared token once, and beside them the response of each
    sample; a pytree.

    With p(s, t) the place in `rows` that predicts the token t of sample s, a loss is

        loss = sum over samples s and tokens t of w_st loss_st(log_prob[p(s, t)])

    and its gradient at a place is the sum over all samples that read it: the loss and the gradient
    of samples that are packed whole, for every loss of tokens or of sequences, every aggregation,
    correction and metric.

    Args:
      rows: `[R, T]`, what the model and the head read. Its attention must follow `rows.paths`. The
        loss mask is 1 where a token of any sample trains. No loss reads these rows: a loss of
        shared tokens is NaN.
      batch: `[R, U]`, what losses, advantages and normalizers read: of every sample its response,
        behind the last token of its prompt. Row r has the samples of row r of `rows`. U is not T.
      places: `i32[R, U]`, for each position of `batch` its place in the same row of `rows`;
        anything on padding.

    Example:
      >>> from jaxppo.batch.token_trees import TokenTrees
      >>> of_tokens = {"old_log_probs": [-1.0] * 3}
      >>> samples = [Sample([1, 2, 3, 4, 5 + i], 2, advantages=1.0 - 2 * i, **of_tokens) for i in range(2)]
      >>> trees = TokenTrees.from_samples(samples, row_length=8)
      >>> trees.rows.tokens.tolist(), trees.rows.loss_mask.astype(int).tolist()
      ([[1, 2, 3, 4, 5, 4, 6, 0]], [[0, 1, 1, 1, 0, 1, 0, 0]])
      >>> trees.batch.tokens[0, :8].tolist(), trees.places[0, :8].tolist()
      ([2, 3, 4, 5, 2, 3, 4, 6], [1, 2, 3, 4, 1, 2, 5, 6])
      >>> def loss(log_probs):
      ...     return policy_loss(trees.to_batch(TokenStats(log_probs)), trees.batch, PolicyLossConfig())[0]
      >>> log_probs = jnp.array([[0.0, -0.5, -1.0, -1.0, 0.0, -1.0, 0.0, 0.0]])
      >>> (6 * jax.grad(loss)(log_probs)).round(2)  # the first shared token is clipped for one of the two samples
      Array([[ 0.  ,  1.65,  0.  , -1.  ,  0.  ,  1.  ,  0.  ,  0.  ]], dtype=float32)
    """

    rows: RolloutBatch
    batch: RolloutBatch
    places: Int[Array, "R U"]

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Sample],
        *,
        row_length: int,
        batch_row_length: int | None = None,
        parallel: ParallelMesh | None = None,
        head_extras: Sequence[str] = (),
        **sizes: Unpack[RowSizes],
    ) -> TokenTrees:
        """Packs samples as `RolloutBatch.from_samples` does, with any prefix that samples have in
        common stored once.

        Tokens are shared as far as they agree, with their extras at the input, whether prompt or
        response: branches of a search, turns whose prompts hold the turns before, or samples that
        begin alike. Rows are balanced by the tokens that the head computes.

        Args:
          samples: at least one; see `RolloutBatch.from_samples`. The optional values belong to each
            sample. Extras at the "input" are in `rows`, the others in `batch`.
          row_length: T; a multiple of what the context layout needs. A tree that is longer is cut.
          batch_row_length: U, which must hold the responses of any row; by default row_length,
            halved or doubled until it does. Give one so that all steps share a compiled program.
          parallel: the mesh, for its layout and data size.
          head_extras: the names of extras at "predicting" that the head reads by token, such as a
            teacher's ids, a nucleus or a temperature. `rows.extras` then holds them too, and a
            token that two samples train on is shared only while they agree.
          **sizes: rows, buckets, micro_batches, max_tokens and num_segments, which fix R, K and S
            of both batches: see `jaxppo.sharding.pack`. A shared part of a tree takes a segment
            too.

        Returns:
          The trees, of numpy arrays; `[K, R, T]` and `[K, R, U]` with micro_batches or max_tokens.

        Raises:
          TypeError, ValueError: as `RolloutBatch.from_samples`; a batch_row_length that does not
            hold the responses of a row, or is row_length; head_extras that the samples lack.

        Example:
          >>> from jaxppo.batch.token_trees import TokenTrees
          >>> turns = [Sample([1, 5, 6], 1), Sample([1, 5, 6, 2, 7], 4)]  # the second prompt holds the first response
          >>> TokenTrees.from_samples(turns, row_length=8).rows.tokens.tolist()
          [[1, 5, 6, 6, 2, 7, 0, 0]]
        """
        packed = packed_trees(samples, row_length, batch_row_length, sizes, parallel, head_extras)
        rows = RolloutBatch._packed(parallel, packed.rows)
        batch = RolloutBatch._packed(parallel, packed.batch)
        places: Any = packed.places
        return cls(rows, batch, places)

    def to_batch(
        self, stats: Statistics, *, parallel: ParallelMesh | ShardAxes | None = None
    ) -> Statistics:
        """The statistics of each token of `batch`, from those of `rows`: y[r, u] = x[r, places[r,
        u]].

        The gradient of x is the sum over the places that read it. Over context shards the rows of x
        are gathered: a number for each token and statistic, and no hidden states.

        Args:
          stats: `TokenStats` of `rows`, a critic's values, or another pytree of arrays
            `[R, T, ...]`; see `log_probs_from_hidden`, with `rows.targets` and
            where=`rows.loss_mask > 0`.
          parallel: the mesh; rows sharded over data, positions over context. `ShardAxes` inside the
            caller's own `shard_map`, None on one device.

        Returns:
          The same pytree, `[R, U, ...]`, in the dtypes of `stats`.

        Raises:
          TypeError: something else than arrays.
          ValueError: arrays of another shape than `rows`; rows in another context layout than the
            mesh's.

        Example:
          >>> from jaxppo.batch.token_trees import TokenTrees
          >>> trees = TokenTrees.from_samples([Sample([1, 2, 3], 1), Sample([1, 2, 4], 1)], row_length=5)
          >>> trees.to_batch(jnp.arange(5)[None]).tolist()
          [[0, 1, 2, 0, 3, 4, 0, 0, 0, 0]]
        """
        self.rows.check_layout(parallel)
        shape = self.rows.loss_mask.shape
        for path, x in jax.tree.leaves_with_path(stats):
            what = f"stats{jax.tree_util.keystr(path)}"
            check_type(what, x, is_array(x), "an array [R, T, ...] of the rows")
            good = x.shape[: len(shape)] == shape
            check(what, f"shape {x.shape}", good, f"{shape} and more, that of rows")

        def specs(p: ParallelMesh) -> tuple[list[Any], Any]:
            spec = spec_of(p.tokens_spec, self.places)
            return [spec, spec], spec

        args = {"stats": stats, "places": self.places}
        return shard_call("TokenTrees.to_batch", _to_batch, parallel, args, specs)

    def put(self, parallel: ParallelMesh) -> TokenTrees:
        """The trees on the devices of a mesh, see `RolloutBatch.put`."""
        rows = self.rows.put(parallel)
        batch = self.batch.put(parallel)
        places = multihost.to_global(
            self.places, spec_of(parallel.tokens_spec, self.places), parallel
        )
        return TokenTrees(rows, batch, places)

    def specs(self, parallel: ParallelMesh) -> TokenTrees:
        """The PartitionSpec of each array: rows over data, positions over context.

        None where the array is None.
        """
        places: Any = spec_of(parallel.tokens_spec, self.places)
        return TokenTrees(self.rows.specs(parallel), self.batch.specs(parallel), places)


def _to_batch(axes: ShardAxes, stats: PyTree, places: Array) -> PyTree:
    """Per-shard: see `TokenTrees.to_batch`."""
    stacked = places.ndim - 2
    of_rows = places.reshape(-1, places.shape[-1])

    def read(x: Array) -> Array:
        x = x.reshape(-1, *x.shape[stacked + 1 :])
        if axes.size(axes.context) > 1:
            x = lax.all_gather(vary(x, axes.tokens), axes.context, axis=1, tiled=True)
        values = taken(x, of_rows)
        return values.reshape(*places.shape, *values.shape[2:])

    return jax.tree.map(read, stats)
