"""The reference vectors: cases by upstream function, and their ragged or padded arrays as packed
`RolloutBatch`es.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from jaxppo import RolloutBatch

PER_TOKEN = (
    "advantages",
    "old_log_probs",
    "ref_log_probs",
    "rollout_log_probs",
    "values",
    "returns",
)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an upstream function: its config in upstream's words, its input and output
    arrays by key.
    """

    system: str
    name: str
    function: str
    config: dict[str, Any]
    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]

    @property
    def metrics(self) -> dict[str, float]:
        return {
            k.removeprefix("metric/"): float(v)
            for k, v in self.outputs.items()
            if k.startswith("metric/")
        }


def load_cases(folder: str | Path, system: str) -> list[Case]:
    """All cases of "slime" or "verl" under the folder of `--golden`."""
    described = json.loads((Path(folder) / f"{system}.json").read_text())["cases"]
    with np.load(Path(folder) / f"{system}.npz") as arrays:
        cases = []
        for case in described:
            found: dict[str, dict[str, np.ndarray]] = {}
            for side in ("in", "out"):
                prefix = f"{case['name']}/{side}/"
                found[side] = {
                    k.removeprefix(prefix): arrays[k] for k in arrays.files if k.startswith(prefix)
                }
            cases.append(
                Case(
                    system,
                    case["name"],
                    case["function"],
                    case["config"],
                    found["in"],
                    found["out"],
                )
            )
    return cases


def parametrize_cases(metafunc, argument: str, system: str, function: str) -> None:
    """Parametrizes a test with the cases whose upstream function contains `function`; for
    `pytest_generate_tests`.
    """
    if argument in metafunc.fixturenames:
        cases = [
            c
            for c in load_cases(metafunc.config.getoption("golden"), system)
            if function in c.function
        ]
        metafunc.parametrize(argument, cases, ids=[c.name for c in cases])


@dataclasses.dataclass(frozen=True)
class Packing:
    """Samples of the given lengths one after another in `[rows, length]`, sample i in row i %
    rows.
    """

    lengths: tuple[int, ...]
    rows: int = 2
    multiple: int = 8

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Row, start and segment id of each sample."""
        filled = [0] * self.rows
        count = [0] * self.rows
        places = []
        for i, length in enumerate(self.lengths):
            row = i % self.rows
            count[row] += 1
            places.append((row, filled[row], count[row]))
            filled[row] += length
        return places

    @property
    def shape(self) -> tuple[int, int]:
        last = [
            start + length for (_, start, _), length in zip(self.places, self.lengths, strict=True)
        ]
        return self.rows, -(-max(last) // self.multiple) * self.multiple

    @property
    def segments(self) -> int:
        return -(-len(self.lengths) // self.rows)

    def pack(self, samples: list[np.ndarray], fill: Any = 0) -> np.ndarray:
        """`[rows, length, ...]` with `fill` as padding; each sample has its length as first
        dimension.
        """
        out = np.full((*self.shape, *samples[0].shape[1:]), fill, samples[0].dtype)
        for (row, start, _), sample, length in zip(self.places, samples, self.lengths, strict=True):
            out[row, start : start + length] = sample[:length]
        return out

    def unpack(self, packed: Any) -> list[np.ndarray]:
        packed = np.asarray(packed)
        return [
            packed[row, start : start + n]
            for (row, start, _), n in zip(self.places, self.lengths, strict=True)
        ]

    def per_sample(self, values: Any, fill: Any = -1) -> np.ndarray:
        """`[rows, segments]` from one value per sample."""
        values = np.asarray(values)
        out = np.full((self.rows, self.segments), fill, values.dtype)
        for (row, _, segment), value in zip(self.places, values, strict=True):
            out[row, segment - 1] = value
        return out

    def batch(
        self,
        loss_mask: list[np.ndarray],
        *,
        tokens: list[np.ndarray] | None = None,
        group_ids: Any = None,
        rollout_ids: Any = None,
        rewards: Any = None,
        **per_token: list[np.ndarray] | None,
    ) -> RolloutBatch:
        """A packed batch.

        Float arrays are NaN on padding, so that a result that reads padding is NaN.
        """
        count = len(self.lengths)
        if tokens is None:
            tokens = [np.zeros(n, np.int32) for n in self.lengths]
        ids = np.arange(count, dtype=np.int32)

        def as_ids(x):
            return self.per_sample(ids if x is None else np.asarray(x, np.int32))

        return RolloutBatch(
            tokens=self.pack([t.astype(np.int32) for t in tokens]),
            targets=self.pack([np.append(t[1:], 0).astype(np.int32) for t in tokens]),
            segment_ids=self.pack(
                [
                    np.full(n, s, np.int32)
                    for (*_, s), n in zip(self.places, self.lengths, strict=True)
                ]
            ),
            positions=self.pack([np.arange(n, dtype=np.int32) for n in self.lengths]),
            loss_mask=self.pack([m.astype(np.float32) for m in loss_mask]),
            sample_ids=as_ids(None),
            group_ids=as_ids(group_ids),
            rollout_ids=as_ids(rollout_ids),
            rewards=(
                None if rewards is None else self.per_sample(np.asarray(rewards, np.float32), 0)
            ),
            **{
                k: None if v is None else self.pack([x.astype(np.float32) for x in v], np.nan)
                for k, v in per_token.items()
            },
        )


@dataclasses.dataclass(frozen=True)
class Ragged:
    """slime's arrays: samples concatenated; responses stand at the positions that predict them."""

    total_lengths: tuple[int, ...]
    response_lengths: tuple[int, ...]

    @classmethod
    def of(cls, case: Case) -> Ragged:
        responses = tuple(map(int, case.inputs["response_lengths"]))
        return cls(tuple(map(int, case.inputs.get("total_lengths", responses))), responses)

    @property
    def packing(self) -> Packing:
        return Packing(self.total_lengths)

    def split(self, flat: np.ndarray) -> list[np.ndarray]:
        """Arrays over all tokens, by sample."""
        return np.split(flat, np.cumsum(self.total_lengths)[:-1])

    def spread(self, flat: np.ndarray, fill: float = 0.0) -> list[np.ndarray]:
        """Arrays over response tokens, by sample, at the predicting positions of all its tokens."""
        out = []
        parts = np.split(flat, np.cumsum(self.response_lengths)[:-1])
        for part, total, response in zip(
            parts, self.total_lengths, self.response_lengths, strict=True
        ):
            sample = np.full((total, *flat.shape[1:]), fill, flat.dtype)
            sample[total - response - 1 : total - 1] = part
            out.append(sample)
        return out

    def gather(self, packed: Any) -> np.ndarray:
        """The inverse of packing `spread`: the response parts, concatenated."""
        samples = self.packing.unpack(packed)
        sizes = zip(samples, self.total_lengths, self.response_lengths, strict=True)
        return np.concatenate([s[total - response - 1 : total - 1] for s, total, response in sizes])

    def batch(self, case: Case, **kwargs: Any) -> RolloutBatch:
        """The packed batch of a case's `tokens`, `loss_mask` and per-token arrays; NaN in
        prompts.
        """
        arrays = {k: self.spread(case.inputs[k], np.nan) for k in PER_TOKEN if k in case.inputs}
        tokens = self.split(case.inputs["tokens"]) if "tokens" in case.inputs else None
        return self.packing.batch(
            self.spread(case.inputs["loss_mask"]), tokens=tokens, **arrays | kwargs
        )


@dataclasses.dataclass(frozen=True)
class Padded:
    """verl's arrays: `[B, L]` responses, whose loss masks may have holes."""

    loss_mask: np.ndarray

    @classmethod
    def of(cls, case: Case) -> Padded:
        return cls(case.inputs["loss_mask"])

    @property
    def packing(self) -> Packing:
        """Every sample up to its last loss token, one position at least."""
        return Packing(
            tuple(max(1, int(np.max(np.nonzero(m)[0], initial=-1)) + 1) for m in self.loss_mask)
        )

    def pack(self, padded: np.ndarray, fill: float = np.nan) -> np.ndarray:
        return self.packing.pack(list(padded), fill)

    def pad(self, packed: Any) -> np.ndarray:
        """`[B, L]` again, 0 after the last loss token."""
        out = np.zeros(self.loss_mask.shape, np.float32)
        for row, sample in zip(out, self.packing.unpack(packed), strict=True):
            row[: len(sample)] = sample
        return out

    def batch(self, case: Case, **kwargs: Any) -> RolloutBatch:
        """The packed batch.

        Each value belongs to the target of its position, at the last position too.
        """
        arrays = {k: list(case.inputs[k]) for k in PER_TOKEN if k in case.inputs}
        return dataclasses.replace(
            self.packing.batch(list(self.loss_mask), **arrays | kwargs), real_last_targets=True
        )
