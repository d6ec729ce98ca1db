"""Steps whose samples share tokens of responses: branches of a search, and turns; with a model of a
table of prefixes.

The hidden state of a token is the row of the table that its prefix has: equal prefixes have equal
hidden states, as in any causal model. Samples that share a token differ in all else, also in their
loss masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from oracle import OracleSample
from oracle.head import log_softmax

from jaxppo import RolloutBatch, Sample
from jaxppo.batch.extras import Extra

V, H = 24, 6
VALUES = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "loss_weights")


@dataclasses.dataclass(frozen=True)
class Step:
    """Samples, and the model's parameters: the table `[prefixes, H]` and the head's kernel
    `[H, V]`.
    """

    samples: list[Sample]
    numbers: dict[tuple[int, ...], int]  # the row of the table of each prefix
    table: np.ndarray
    kernel: np.ndarray

    @property
    def params(self) -> dict[str, np.ndarray]:
        return {"table": self.table, "kernel": self.kernel}

    def predicting(self, sample: Sample) -> list[int]:
        """The rows of the table that predict the tokens of the response."""
        tokens = np.asarray(sample.tokens).tolist()
        return [self.numbers[tuple(tokens[:t])] for t in range(sample.start, len(tokens))]

    def in_oracle(self) -> list[OracleSample]:
        """The samples, with the hidden states that predict their responses."""
        found = []
        for s in self.samples:
            values = {name: getattr(s, name) for name in VALUES}
            ids: dict[str, Any] = {
                "sample_id": s.sample_id,
                "group_id": s.group_id,
                "rollout_id": s.rollout_id,
            }
            hidden = self.table[self.predicting(s)].astype(np.float64).reshape(-1, H)
            targets = np.asarray(s.tokens)[s.start :]
            found.append(
                OracleSample(s.mask[s.start :], hidden=hidden, targets=targets, **values, **ids)
            )
        return found

    def by_table(self, by_hidden: list[np.ndarray]) -> np.ndarray:
        """The gradient of the table, from those of the hidden states of each sample."""
        total = np.zeros(self.table.shape)
        for s, own in zip(self.samples, by_hidden, strict=True):
            np.add.at(total, self.predicting(s), own)
        return total


def grown(rng: np.random.Generator, tokens: list[int], levels: int) -> Iterator[list[int]]:
    """The leaves of a tree: parts of 1 to 3 tokens, each of which ends in 1 to 3 others."""
    if levels == 0:
        yield tokens
        return
    for _ in range(rng.integers(1, 4)):
        yield from grown(
            rng, [*tokens, *rng.integers(0, V, rng.integers(1, 4)).tolist()], levels - 1
        )


def drawn(rng: np.random.Generator, groups: int) -> list[dict[str, Any]]:
    """Tokens, prompt and ids of samples: the leaves of each group, one of them twice, and a turn
    that goes on from it.

    The last group has one sample, without loss.
    """
    found: list[dict[str, Any]] = []
    for group in range(groups):
        prompt = [group, *rng.integers(0, V, rng.integers(1, 4)).tolist()]
        leaves = [*grown(rng, prompt, 3)]
        for tokens in (*leaves, leaves[0]):
            found.append({"tokens": tokens, "response_start": len(prompt), "group_id": group})
        later = [*leaves[0], *rng.integers(0, V, 2).tolist()]
        found.append({"tokens": [*later, 1, 2], "response_start": len(later), "group_id": group})
    found.append(
        {"tokens": [groups, 1, 2], "response_start": 1, "group_id": groups, "loss_mask": [0, 0, 0]}
    )
    return found


def forked(seed: int, groups: int = 2) -> Step:
    """A step in which each policy is near the one that the model has."""
    rng = np.random.default_rng(seed)
    of_samples = drawn(rng, groups)
    numbers: dict[tuple[int, ...], int] = {}
    for own in of_samples:
        for end in range(1, len(own["tokens"]) + 1):
            numbers.setdefault(tuple(own["tokens"][:end]), len(numbers))
    table = rng.normal(size=(len(numbers), H)).astype(np.float32)
    kernel = rng.normal(size=(H, V)).astype(np.float32)
    step = Step([], numbers, table, kernel)
    for i, own in enumerate(of_samples):
        start = own["response_start"]
        count = len(own["tokens"]) - own["response_start"]
        mask = [*[0] * start, *(rng.random(count) < 0.8).astype(int).tolist()]
        bare = Sample(own["tokens"], start)
        log_p = log_softmax(table[step.predicting(bare)].astype(np.float64) @ kernel)
        log_probs = log_p[np.arange(count), own["tokens"][start:]]

        def near(scale, log_probs=log_probs, count=count):
            return np.minimum(log_probs + scale * rng.normal(size=count), -0.01).astype(np.float32)

        fields = {
            "loss_mask": mask,
            "reward": float(rng.normal()),
            "rollout_id": int(rng.integers(0, 5)),
            "advantages": rng.normal(size=count).astype(np.float32),
            "old_log_probs": near(0.3),
            "ref_log_probs": near(0.3),
            "rollout_log_probs": near(0.2),
            "loss_weights": rng.uniform(0.5, 1, count).astype(np.float32),
            "extras": {"number": Extra(np.arange(count) + 100 * i)},
        }
        step.samples.append(Sample(**{"sample_id": i} | fields | own))
    return step


def prefixes_of(batch: RolloutBatch, numbers: dict[tuple[int, ...], int]) -> np.ndarray:
    """The number of each token's prefix, from segments, parents and positions alone; 0 on padding.

    New ones are added.

    The prefix of a token in a tree holds the tokens of its segment up to it, and those of the
    segments above.
    """
    tokens, segments, positions, ids = (
        np.asarray(x).reshape(-1, x.shape[-1])
        for x in (batch.tokens, batch.segment_ids, batch.positions, batch.sample_ids)
    )
    parents = np.zeros_like(ids)
    if batch.parents is not None:
        parents = np.asarray(batch.parents).reshape(ids.shape)
    found = np.zeros(tokens.shape, np.int32)
    for row in range(len(tokens)):
        texts: list[tuple[int, ...]] = [()]
        for number in range(1, ids.shape[1] + 1):
            text = texts[parents[row, number - 1]]
            places = np.flatnonzero(segments[row] == number)
            for place in places[np.argsort(positions[row, places])].tolist():
                text = (*text, int(tokens[row, place]))
                assert positions[row, place] == len(text) - 1
                found[row, place] = numbers.setdefault(text, len(numbers))
            texts.append(text)
    return found.reshape(np.shape(batch.tokens))
