"""Logits of a published model's folder, sequence by sequence, from packed rows on a mesh."""

import jax
import numpy as np
from flax import nnx

from examples.trainer.attention import context_attention
from examples.trainer.published import load_model, read_config
from jaxppo import RolloutBatch, Sample
from sharding import make_parallel_mesh


def logits_on(folder, mesh, sequences, layout="contiguous", **packing):
    """[T, V] of each sequence. More options are those of the packing, such as share_prefixes."""
    parallel = make_parallel_mesh(mesh, context_layout=layout)
    graphdef, params = load_model(folder, read_config(folder), parallel)
    samples = [Sample(tokens, response_start=1, group_id=i) for i, tokens in enumerate(sequences)]
    packing = {"row_length": 32, "rows": 8, "num_segments": 4} | packing
    batch = RolloutBatch.from_samples(samples, parallel=parallel, **packing).put(parallel)

    @jax.jit
    def run(params, batch):
        model = nnx.merge(graphdef, params)
        return model.logits(
            model(batch.tokens, batch.positions, context_attention(batch.paths, parallel))
        )

    found, segments, positions, samples = jax.device_get(
        (run(params, batch), batch.segment_ids, batch.positions, batch.sample_ids)
    )
    result = []
    for i, length in enumerate(map(len, sequences)):
        row, segment = np.argwhere(samples == i)[0]
        mine = np.flatnonzero(segments[row] == segment + 1)
        ordered = mine[np.argsort(positions[row][mine])]
        assert len(ordered) == length
        result.append(found[row][ordered])
    return result
