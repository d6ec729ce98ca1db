"""The sampler of the example and the trainer: one head, the same bits for the same hidden state."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from examples.trainer.learner import Learner
from examples.trainer.sampler import make_sampler
from jaxppo import PolicyLossConfig, RolloutBatch, Sample, make_parallel_mesh

WIDTH, VOCAB, PADDED, B, PROMPT, RESPONSE, END = 48, 1411, 1416, 8, 5, 12, 7


@dataclasses.dataclass(frozen=True)
class TableConfig:
    """A model without layers: what is left of sampler and trainer is the head."""

    vocab_size = VOCAB
    padded_vocab = PADDED
    layers = 0
    kv_heads = 1
    head_dim = 1
    dtype = "float32"
    logits_dtype = "float32"
    slots = None


class Table(nnx.Module):
    """Hidden states that are looked up, in the dtype of the head."""

    def __init__(self, parallel, dtype, tied, rngs):
        def init(scale, spec):
            return nnx.with_partitioning(
                nnx.initializers.normal(scale), tuple(spec), mesh=parallel.mesh
            )

        self.tokens = nnx.Embed(
            PADDED, WIDTH, embedding_init=init(1.0, P()), param_dtype=dtype, rngs=rngs
        )
        of_head = init(0.3, parallel.kernel_spec("vh" if tied else "hv"))
        if tied:
            self.head = nnx.Embed(
                PADDED, WIDTH, embedding_init=of_head, param_dtype=dtype, rngs=rngs
            )
        else:
            self.head = nnx.Linear(
                WIDTH, PADDED, use_bias=False, kernel_init=of_head, param_dtype=dtype, rngs=rngs
            )

    def __call__(self, tokens, positions, attend):
        return self.tokens(tokens)

    def logits(self, hidden):
        kernel = (
            self.head.embedding[...].T
            if isinstance(self.head, nnx.Embed)
            else self.head.kernel[...]
        )
        return jnp.matmul(hidden, kernel, preferred_element_type=jnp.float32)


@pytest.mark.parametrize(
    ("mesh", "layout", "dtype", "tied"),
    [
        ("dp=2,cp=2,tp=2", "zigzag", "float32", False),
        ("dp=1,cp=2,tp=4", "striped", "bfloat16", True),
        ("dp=8", "contiguous", "bfloat16", False),
    ],
)
def test_log_probs_of_sampler_and_trainer_are_equal_to_the_bit(mesh, layout, dtype, tied):
    """A log-softmax of the sampler's own logits has other bits for a fifth to a half of the
    tokens, 1e-6 apart.
    """
    parallel = make_parallel_mesh(mesh, context_layout=layout)
    model = Table(parallel, jnp.dtype(dtype), tied, nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    sample = make_sampler(graphdef, TableConfig(), parallel, PROMPT, RESPONSE, (END, END + 1))
    rng = np.random.default_rng(0)
    prompts = rng.integers(10, VOCAB, (B, PROMPT))
    lengths = rng.integers(1, PROMPT + 1, B)
    arrays = (jnp.asarray(x, jnp.int32) for x in (prompts, lengths))
    tokens, log_probs, mask = map(
        np.asarray, sample((params,), *arrays, jax.random.key(1), np.float32(1.0), 1)
    )
    assert mask.sum() > 80
    sampled = zip(prompts, lengths, tokens, log_probs, mask, strict=True)
    samples = [
        Sample([*prompt[:n], *these[on]], response_start=int(n), rollout_log_probs=theirs[on])
        for prompt, n, these, theirs, on in sampled
    ]
    batch = RolloutBatch.from_samples(samples, row_length=24, rows=8, parallel=parallel).put(
        parallel
    )
    learner = Learner(graphdef, TableConfig(), parallel, PolicyLossConfig(), None, 1)
    trained = np.asarray(jax.jit(learner.token_stats)((params,), batch).log_probs)
    counts = np.asarray(batch.loss_mask) > 0
    assert counts.sum() == mask.sum()
    np.testing.assert_array_equal(trained[counts], np.asarray(batch.rollout_log_probs)[counts])
    assert (trained[counts] < -0.5).any()
