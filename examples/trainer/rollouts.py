"""Questions to sampled and scored responses, and samples to batches of one static shape."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.trainer.sampler import Sampler, rows_spec
from examples.trainer.tasks import Question, Task, Tokenizer
from jaxppo import ParallelMesh, RolloutBatch, Sample
from jaxppo.sharding import multihost

if TYPE_CHECKING:
    from examples.trainer.model_folder import FolderTokenizer

GREEDY = 0.0
_SEQUENCES_PER_ROW = 4
# tokens of a row of trees, if two groups are not longer: attention takes the square of it
_ROW = 1024
_READABLE = 4  # samples of each step that are kept as text


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
                f"prompts * samples: got {self.batch_size}, expected a multiple of the {shards}"
                " data and context shards"
            )

    def sample(
        self,
        variables: tuple[nnx.State, ...],
        questions: Sequence[Question],
        copies: int,
        key: jax.Array,
        temperature: Any,
    ) -> list[Sample]:
        """`copies` scored responses to each question; those of one question are a group."""
        asked = [question for question in questions for _ in range(copies)]
        width = self.task.prompt_length
        # a prompt is read once, or as often as it takes for the shards to divide the prompts
        shards = self.parallel.data_size * self.parallel.context_size
        reads = shards // math.gcd(shards, len(questions))
        read = [question for question in questions for _ in range(reads)]
        prompts = np.array(
            [q.prompt + [Tokenizer.pad] * (width - len(q.prompt)) for q in read], np.int32
        )
        lengths = np.array([len(q.prompt) for q in read], np.int32)
        rows = self.parallel.sharding(rows_spec(self.parallel))
        everywhere = self.parallel.sharding(P())
        placed = _place((prompts, lengths, np.float32(temperature)), (rows, rows, everywhere))
        key = jax.device_put(key, everywhere)
        sampled = self.sampler(variables, *placed[:2], key, placed[2], copies // reads)
        responses = multihost.to_local(sampled, self.parallel)
        return [
            Sample(
                [*asked[i].prompt, *tokens[mask]],
                response_start=len(asked[i].prompt),
                reward=self.task.reward(asked[i], tokens[mask]),
                sample_id=i,
                group_id=i // copies,
                rollout_log_probs=log_probs[mask],
            )
            for i, tokens, log_probs, mask in zip(
                self.own(range(len(asked))), *responses, strict=True
            )
        ]

    def own(self, everything: Sequence[Any]) -> list[Any]:
        """This process's part of a batch: that of each of its data shards."""
        each = len(everything) // self.parallel.data_size
        shards = multihost.local_data_shards(self.parallel)
        return [x for shard in shards for x in everything[shard * each : (shard + 1) * each]]

    def held_out_accuracy(self, variables: tuple[nnx.State, ...]) -> float:
        """The share of held-out questions whose most likely response has a reward of 1."""
        questions = self.task.held_out
        right = 0
        for start in range(0, len(questions), self.batch_size):
            some = questions[start : start + self.batch_size]
            padded = [*some, *[some[0]] * (self.batch_size - len(some))]
            unused = _any_key(self.parallel)
            rewards, _ = scores(self.sample(variables, padded, 1, unused, GREEDY))
            right += int((rewards[: len(some)] == 1).sum())
        return right / len(questions)


@functools.cache
def _any_key(parallel: ParallelMesh) -> jax.Array:
    """A key for sampling that draws nothing."""
    return jax.jit(lambda: jax.random.key(0), out_shardings=parallel.sharding(P()))()


def scores(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Rewards and lengths of the samples of every process, in order of their ids; all must call
    this.
    """
    mine = np.array(
        [(sample.sample_id, sample.reward, len(sample.tokens)) for sample in samples], np.float64
    )
    everyone = np.concatenate(multihost.gather(mine))
    # processes that share a data shard report the same samples
    _, first = np.unique(everyone[:, 0], return_index=True)
    return everyone[first, 1], everyone[first, 2]


def readable(
    samples: Sequence[Sample], tokenizer: Tokenizer | FolderTokenizer
) -> list[dict[str, Any]]:
    """A few of the samples as text, evenly spaced, with their rewards."""
    some = samples[:: max(len(samples) // _READABLE, 1)][:_READABLE]
    return [
        {
            "prompt": tokenizer.decode(sample.tokens[: sample.response_start]),
            "completion": tokenizer.decode(
                t for t in sample.tokens[sample.response_start :] if t not in tokenizer.ends
            ),
            "reward": sample.reward if np.isfinite(sample.reward) else None,  # JSON has no NaN
        }
        for sample in some
    ]


def _place(
    arrays: tuple[np.ndarray, ...], shardings: tuple[NamedSharding, ...]
) -> tuple[jax.Array, ...]:
    """Puts arrays that every process has onto the devices of all."""

    def put(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    # JAX counts its own callbacks as such transfers
    with jax.transfer_guard_host_to_device("allow"):
        return tuple(map(put, arrays, shardings))


def answers(questions: Sequence[Question]) -> list[Sample]:
    """The right answers as samples, for supervised steps."""
    return [
        Sample([*q.prompt, *q.answer], response_start=len(q.prompt), sample_id=i)
        for i, q in enumerate(questions)
    ]


@dataclasses.dataclass(frozen=True)
class Packer:
    """Packs samples of a task into rows whose number and length never change.

    All processes together have `batch_size` samples; each process packs those of its data shards.
    With `copies`, so many samples share a prompt, which a row then holds once, and a step has one
    of a few numbers of rows.
    """

    parallel: ParallelMesh
    batch_size: int
    task: Task
    copies: int | None = None

    def __call__(self, samples: Sequence[Sample]) -> RolloutBatch:
        if self.copies is not None:
            return self._trees(samples, self.copies)
        # a multiple of what any context layout needs of a row or a sequence
        multiple = 2 * self.parallel.context_size
        row_length = _SEQUENCES_PER_ROW * _round_up(
            self.task.prompt_length + self.task.response_length, multiple
        )
        rows = _round_up(-(-self.batch_size // _SEQUENCES_PER_ROW), self.parallel.data_size)
        rows = rows // self.parallel.data_size * len(multihost.local_data_shards(self.parallel))
        shape = {"row_length": row_length, "rows": rows, "num_segments": _SEQUENCES_PER_ROW}
        return RolloutBatch.from_samples(samples, parallel=self.parallel, **shape).put(
            self.parallel
        )

    def _trees(self, samples: Sequence[Sample], copies: int) -> RolloutBatch:
        """A row has room for whole groups: as many as there are, or as `_ROW` holds, and two at
        least.
        """
        task = self.task
        each = self.batch_size // self.parallel.data_size  # samples of a shard
        common, prompt, response = (
            _round_up(n, 2 * self.parallel.context_size)  # the layout may pad every segment
            for n in (task.common, task.prompt_length - task.common + 1, task.response_length + 1)
        )
        group = prompt + copies * response  # a branch begins with a copy of the token before it
        groups = max(min(-(-each // copies), (_ROW - common) // group), 2)
        row_length = _round_up(
            max(common + groups * group, task.prompt_length + response),
            2 * self.parallel.context_size,
        )
        local = len(multihost.local_data_shards(self.parallel))
        shape = {
            "row_length": row_length,
            "buckets": [local << i for i in range(each.bit_length() + 1)],
        }
        # a tree of so many samples has no more: they, and the places where they part
        shape |= {"num_segments": 2 * each, "share_prefixes": True}
        return RolloutBatch.from_samples(samples, parallel=self.parallel, **shape).put(
            self.parallel
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
