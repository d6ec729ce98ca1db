"""Questions to sampled and scored responses, and samples to batches of one static shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from examples.sampler import Sampler, rows_spec
from examples.tasks import Question, Task, Tokenizer
from jaxppo import RolloutBatch, Sample
from sharding import ParallelMesh

GREEDY = 0.0
_SEQUENCES_PER_ROW = 4


@dataclasses.dataclass(frozen=True)
class Rollouts:
    """Samples `batch_size` responses at a time and has the task's verifier score them.

    Raises:
      ValueError: a batch size that data and context shards do not divide.
    """

    task: Task
    sampler: Sampler
    parallel: ParallelMesh
    batch_size: int

    def __post_init__(self) -> None:
        shards = self.parallel.data_size * self.parallel.context_size
        if self.batch_size % shards:
            raise ValueError(
                f"prompts * samples: got {self.batch_size}, expected a multiple of the {shards} data and context shards"
            )

    def sample(
        self, params: nnx.State, questions: Sequence[Question], copies: int, key: jax.Array, temperature: Any
    ) -> list[Sample]:
        """`copies` scored responses to each question, each question's a group of its own."""
        asked = [question for question in questions for _ in range(copies)]
        width = self.task.prompt_length
        prompts = np.array([q.prompt + [Tokenizer.pad] * (width - len(q.prompt)) for q in asked], np.int32)
        lengths = np.array([len(q.prompt) for q in asked], np.int32)
        rows, everywhere = self.parallel.sharding(rows_spec(self.parallel)), self.parallel.sharding(P())
        placed = jax.device_put((prompts, lengths, key, np.float32(temperature)), (rows, rows, everywhere, everywhere))
        responses = jax.device_get(self.sampler(params, *placed))
        return [
            Sample(
                [*question.prompt, *tokens[mask]],
                response_start=len(question.prompt),
                reward=self.task.reward(question, tokens[mask]),
                group_id=i // copies,
                rollout_log_probs=log_probs[mask],
            )
            for i, (question, tokens, log_probs, mask) in enumerate(zip(asked, *responses, strict=True))
        ]

    def held_out_accuracy(self, params: nnx.State) -> float:
        """The share of held-out questions whose most likely response the verifier gives full marks."""
        questions = self.task.held_out
        right = 0
        for start in range(0, len(questions), self.batch_size):
            some = questions[start : start + self.batch_size]
            padded = [*some, *[some[0]] * (self.batch_size - len(some))]
            samples = self.sample(params, padded, 1, jax.random.key(0), GREEDY)
            right += sum(sample.reward == 1 for sample in samples[: len(some)])
        return right / len(questions)


def answers(questions: Sequence[Question]) -> list[Sample]:
    """The right answers, to imitate."""
    return [Sample([*q.prompt, *q.answer], response_start=len(q.prompt)) for q in questions]


@dataclasses.dataclass(frozen=True)
class Packer:
    """Packs `batch_size` samples of at most `longest` tokens into rows whose number and length never change."""

    parallel: ParallelMesh
    batch_size: int
    longest: int

    def __call__(self, samples: Sequence[Sample]) -> RolloutBatch:
        multiple = 2 * self.parallel.context_size  # divides what every context layout asks of a row or a sequence
        row_length = _SEQUENCES_PER_ROW * _round_up(self.longest, multiple)
        rows = _round_up(-(-self.batch_size // _SEQUENCES_PER_ROW), self.parallel.data_size)
        shape = {"row_length": row_length, "rows": rows, "num_segments": _SEQUENCES_PER_ROW}
        return RolloutBatch.from_samples(samples, parallel=self.parallel, **shape).put(self.parallel)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
