"""The sizes and the data of the benchmark, drawn once for all versions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.planner.pod_sizes import HeadSizes
from jaxppo import RolloutBatch


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of tokens before one head.

    Args:
      tokens: T.
      sizes: the head.
      dtype: the dtype of hidden states and kernel.
      share: the share of tokens with loss, for versions that have a mask.
    """

    tokens: int
    sizes: HeadSizes
    dtype: str = "float32"
    share: float = 0.2

    @property
    def counted(self) -> int:
        """How many tokens have a loss."""
        return max(1, round(self.share * self.tokens))

    @property
    def flops(self) -> int:
        """The flops of the three matrix products that every version needs."""
        return 6 * self.tokens * self.sizes.hidden_size * self.sizes.vocab_size

    @property
    def least_bytes(self) -> int:
        """Hidden states, kernel and their gradients, each moved once."""
        T = self.tokens
        H = self.sizes.hidden_size
        V = self.sizes.vocab_size
        return 2 * (T * H + H * V) * jnp.dtype(self.dtype).itemsize


# Figures for the second one were published for an H100: three products at 650 TFLOP/s take about
# 100 ms, and a version with full logits takes 133 ms in 25 GiB.
PUBLISHED = (
    Case(8192, HeadSizes(4096, 131072), "bfloat16"),
    Case(32768, HeadSizes(2560, 128256), "bfloat16"),
)


def draw(case: Case, seed: int = 0) -> dict[str, Any]:
    """The arrays of a policy-gradient step, with advantages of both signs.

    `g` and `e` are the cotangents of log-probs and entropies. In `batch` every token is in the loss
    mask. In `part` only `case.counted` of them are, in runs of adjacent tokens as in responses.
    """
    T = case.tokens
    H = case.sizes.hidden_size
    V = case.sizes.vocab_size
    rng = np.random.default_rng(seed)
    kernel_key, hidden_key = jax.random.split(jax.random.key(seed))
    targets = jnp.asarray(rng.integers(0, V, (1, T)), jnp.int32)
    counted = np.zeros((1, T), np.float32)
    runs = np.array_split(np.arange(T), min(8, case.counted))
    each = [len(part) for part in np.array_split(np.arange(case.counted), len(runs))]
    for run, length in zip(runs, each, strict=True):
        counted[0, run[len(run) - length :]] = 1
    advantages = jnp.asarray(rng.normal(size=(1, T)), jnp.float32)
    zeros = jnp.zeros((1, T), jnp.int32)
    one = jnp.zeros((1, 1), jnp.int32)
    batch = RolloutBatch(
        tokens=zeros,
        targets=targets,
        segment_ids=zeros + 1,
        positions=jnp.arange(T, dtype=jnp.int32)[None],
        loss_mask=jnp.ones((1, T)),
        sample_ids=one,
        real_last_targets=True,
        advantages=advantages,
        old_log_probs=jnp.full((1, T), -np.log(V), jnp.float32),
    )
    shape = case.sizes.kernel_shape
    return {
        "hidden": jax.random.normal(hidden_key, (1, T, H)).astype(case.dtype),
        "kernel": (jax.random.normal(kernel_key, shape) / np.sqrt(H)).astype(case.dtype),
        "targets": targets,
        "g": advantages / T,
        "e": jnp.asarray(rng.normal(size=(1, T)) / T, jnp.float32),
        "batch": batch,
        "part": dataclasses.replace(batch, loss_mask=jnp.asarray(counted)),
    }
