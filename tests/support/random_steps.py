"""Random steps for the search: which samples, their numbers, and their places in a batch.

Numbers come from a seed. All per-token arrays of a sample are aligned to predicting positions,
`[tokens]`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from oracle import OracleSample
from policy_steps import with_garbage
from programs import float16_compiles

from jaxppo import RolloutBatch, Sample
from sharding import ParallelMesh, make_parallel_mesh
from sharding.testing import factorings

LAYOUTS = ("contiguous", "zigzag", "zigzag_per_segment", "striped")
MESHES = factorings(8)
FLOATS = ("float32", "bfloat16", *(("float16",) if float16_compiles() else ()))
LONGEST, MOST = 16, 8  # tokens of a sample, samples of a step
IDS = (7, 9, 0, 2**31 - 1, 123456789)
VALUES = ("advantages", "old_log_probs", "ref_log_probs", "rollout_log_probs", "values", "returns")


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One sample: how many tokens its prompt has, the loss mask of its response, its ids."""

    prompt: int
    mask: tuple[int, ...]
    sample: int
    group: int
    rollout: int


@dataclasses.dataclass(frozen=True)
class Step:
    """A step: its samples in their order of packing, and how its numbers are drawn.

    `spread` is how far policies are apart, nats; `garbage` fills float arrays at positions without
    loss. `floats` hold the advantages, the critic's values and the returns, `masks` the loss mask,
    `integers` the rows' structure.
    """

    samples: tuple[Drawn, ...]
    seed: int
    spread: float
    advantages: str
    garbage: float
    floats: str = "float32"
    masks: str = "float32"
    integers: str = "int32"

    def rng(self, *more: int) -> np.random.Generator:
        return np.random.default_rng((self.seed, *more))


@st.composite
def drawn_samples(draw) -> Drawn:
    kind = draw(st.sampled_from(["holes", "all", "none", "empty"]))
    size = 0 if kind == "empty" else draw(st.integers(1, LONGEST - 4))
    bits = {"all": st.just((1,) * size), "none": st.just((0,) * size)}
    mask = draw(
        bits.get(kind, st.lists(st.integers(0, 1), min_size=size, max_size=size).map(tuple))
    )
    ids = {name: draw(st.sampled_from(IDS)) for name in ("group", "rollout")}
    return Drawn(draw(st.integers(min(size, 1), 4)), mask, draw(st.integers(0, 2**31 - 1)), **ids)


def many_samples(count: int, seed: int) -> tuple[Drawn, ...]:
    """Many short samples: two in each rollout, four in each group; every eighth mask is empty."""
    rng = np.random.default_rng(seed)
    masks = [
        tuple(int(x) for x in rng.random(rng.integers(1, 6)) < 0.7 * (i % 8 > 0))
        for i in range(count)
    ]
    ids = rng.permutation(10 * count)
    return tuple(
        Drawn(int(rng.integers(1, 4)), m, int(ids[i]), i // 4, i // 2) for i, m in enumerate(masks)
    )


def of_samples(samples: st.SearchStrategy[tuple[Drawn, ...]]) -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        samples,
        st.integers(0, 2**32 - 1),
        st.sampled_from([0.3, 0.0, 1e-3, 3.0, 30.0]),
        st.sampled_from(["by token", "by sample", "some 0"]),
        st.sampled_from([0.0, np.nan, -np.inf, 1e30]),
        st.sampled_from(FLOATS),
        st.sampled_from(["float32", "bool", "int8", "bfloat16"]),
        st.sampled_from(["int32", "int16", "uint16"]),
    ).filter(lambda step: step.seed > 0)  # hypothesis tries 0 first, with all else at its simplest


steps = of_samples(
    st.lists(drawn_samples(), min_size=1, max_size=MOST, unique_by=lambda s: s.sample).map(tuple)
)
# Steps as large as those of training, for errors that only many sequences show.
large_steps = of_samples(st.builds(many_samples, st.integers(100, 400), st.integers(0, 2**32 - 1)))


def f32(x: Any) -> np.ndarray:
    """Rounds to f32 and returns float64: numbers that jaxppo and the oracle both read exactly."""
    return np.asarray(x, np.float32).astype(np.float64)


def in_dtype(x: Any, dtype: str) -> np.ndarray:
    """Rounds to that dtype and returns float64."""
    return np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float64)


def step_samples(
    step: Step,
    log_probs: list[np.ndarray] | None = None,
    rollouts: bool = True,
    unusable: bool = False,
) -> list[OracleSample]:
    """The samples of a step with their numbers.

    If the policy's log-probs are given, those of others are near them.

    With `unusable`, some log-probs are not finite: -inf of the policy itself, and NaN, inf or -inf
    of others.
    """
    found = []
    for i, s in enumerate(step.samples):
        rng = step.rng(i)
        n = s.prompt + len(s.mask)
        mask = np.zeros(n)
        mask[max(s.prompt - 1, 0) : max(n - 1, 0)] = s.mask
        own = -0.05 - rng.exponential(2.0, n) if log_probs is None else log_probs[i]

        def near(rng=rng, own=own, n=n):
            return f32(np.minimum(own + step.spread * rng.normal(size=n), -0.01))

        advantages = (
            rng.normal(size=n) if step.advantages == "by token" else np.full(n, rng.normal())
        )
        if step.advantages == "some 0":
            advantages = advantages * (rng.random(n) < 0.5)
        old = f32(own) if step.spread == 0 else near()
        found.append(
            OracleSample(
                mask,
                log_probs=f32(own),
                entropy=f32(rng.exponential(size=n)),
                old_log_probs=old,
                ref_log_probs=near(),
                rollout_log_probs=old if rng.random() < 0.2 else near(),
                advantages=in_dtype(f32(advantages), step.floats),
                values=in_dtype(f32(rng.normal(size=n)), step.floats),
                returns=in_dtype(f32(rng.normal(size=n)), step.floats),
                new_values=f32(rng.normal(size=n)),
                reward=float(np.float32(rng.choice([0.0, 1.0, 0.1, rng.normal()]))),
                sample_id=s.sample,
                group_id=s.group,
                rollout_id=s.rollout if rollouts else s.sample,
            )
        )
    if unusable:
        names = (
            "old_log_probs",
            "rollout_log_probs",
            *(("log_probs",) if log_probs is None else ()),
        )
        for i, s in enumerate(found):
            rng = step.rng(2, i)
            for name in names:
                spoilt = rng.random(len(s.mask)) < 0.1
                values = [-np.inf] if name == "log_probs" else [np.nan, np.inf, -np.inf]
                setattr(
                    s, name, np.where(spoilt, rng.choice(values, len(s.mask)), getattr(s, name))
                )
    return found


def with_weights(step: Step, samples: list[OracleSample]) -> list[OracleSample]:
    """The samples with loss weights, which are all 0 for some of them."""
    found = []
    for i, s in enumerate(samples):
        rng = step.rng(4, i)
        weights = rng.choice([0.0, 0.25, 1.0, 1.5], len(s.mask)) * (rng.random() < 0.8)
        found.append(dataclasses.replace(s, loss_weights=weights))
    return found


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a step is placed: the mesh, its layout, the rows."""

    mesh: str | None
    explicit: bool
    layout: str
    sequence_parallel: bool
    length: int
    rows: int
    segments: int
    micro_batches: int | None

    @property
    def parallel(self) -> ParallelMesh | None:
        if self.mesh is None:
            return None
        options = {"explicit": self.explicit, "sequence_parallel": self.sequence_parallel}
        return make_parallel_mesh(self.mesh, context_layout=self.layout, **options)


@st.composite
def places(
    draw, meshes=(None, *MESHES), micro_batches=(None, 1, 2, 3), sequence_parallel=False
) -> Place:
    """Any place that has room for the samples of any step; a large step gets more rows."""
    mesh = draw(st.sampled_from(meshes))
    sizes = dict(part.split("=") for part in (mesh or "dp=1").split(","))
    data = int(sizes.get("dp", 1)) * int(sizes.get("fsdp", 1))
    context = int(sizes.get("cp", 1))
    tensor = int(sizes.get("tp", 1))
    layout = draw(st.sampled_from(LAYOUTS)) if context > 1 else "contiguous"
    by_position = sequence_parallel and tensor > 1 and draw(st.booleans())
    count = draw(st.sampled_from(micro_batches))
    length = draw(st.sampled_from([LONGEST, 2 * LONGEST]))
    enough = [
        r
        for r in (1, 2, 3, 4, 8)
        if r % data == 0 and r * (count or 1) * (length // LONGEST) >= MOST
    ]
    rows = draw(st.sampled_from(enough))
    segments = draw(st.sampled_from([2, 5, 8]))
    explicit = mesh is not None and draw(st.booleans())
    return Place(mesh, explicit, layout, by_position, length, rows, segments, count)


def given_samples(
    step: Step, samples: list[OracleSample], lacking: tuple[str, ...] = ()
) -> list[Sample]:
    """The samples to pack, without the values that the batch shall lack."""
    given = []
    for s, drawn in zip(samples, step.samples, strict=True):
        n = len(s.mask)
        start = drawn.prompt
        loss_mask = np.concatenate([[0.0], s.mask[:-1]])[:n]
        there = [k for k in VALUES if k not in lacking] + ["loss_weights"] * (
            s.loss_weights is not None
        )
        of_response = {k: getattr(s, k)[max(start - 1, 0) : max(n - 1, 0)] for k in there}
        ids = {"group_id": s.group_id, "sample_id": s.sample_id, "rollout_id": s.rollout_id}
        ids = {k: v for k, v in ids.items() if k not in lacking}
        tokens = (
            step.rng(drawn.sample).integers(0, 1000, n)
            if s.targets is None
            else tokens_of(s.targets)
        )
        tokens[:start] = s.group_id % 1000  # the samples of a group have one prompt
        given.append(Sample(tokens, start, loss_mask, reward=s.reward, **ids, **of_response))
    return given


def batch_of(
    step: Step, samples: list[OracleSample], where: Place, lacking: tuple[str, ...] = ()
) -> RolloutBatch:
    """The step as a batch: rows in a random order, garbage where there is no loss, without the
    values it shall lack.
    """
    rows = where.rows * -(-len(samples) // MOST)  # a place has rows for MOST samples
    batch = RolloutBatch.from_samples(
        given_samples(step, samples, lacking),
        row_length=where.length,
        parallel=where.parallel,
        rows=rows,
        num_segments=where.segments,
        micro_batches=where.micro_batches,
    )
    return disordered(step, batch, step.rng(1).permutation(rows * (where.micro_batches or 1)))


def disordered(step: Step, batch: RolloutBatch, order: np.ndarray) -> RolloutBatch:
    """The batch with its rows in this order, garbage at positions without loss, and arrays in
    the step's dtypes.
    """
    batch = jax.tree.map(lambda x: x.reshape(-1, x.shape[-1])[order].reshape(x.shape), batch)
    batch = with_garbage(batch, step.garbage)
    dtypes = dict.fromkeys(("advantages", "values", "returns"), step.floats) | {
        "loss_mask": step.masks
    }
    dtypes |= dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), step.integers)
    with np.errstate(over="ignore", invalid="ignore"):  # garbage may overflow
        there = {
            k: x.astype(jnp.dtype(v))
            for k, v in dtypes.items()
            if (x := getattr(batch, k)) is not None
        }
    return dataclasses.replace(batch, **there)


def tokens_of(targets: np.ndarray) -> np.ndarray:
    """Tokens with these targets; the last target is not one of them."""
    return np.concatenate([[0], targets[:-1]])[: len(targets)].astype(int)


def _entries(
    batch: RolloutBatch, samples: list[OracleSample]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The rows and columns of each sample's positions, in order.

    Micro-batches count as more rows.
    """
    segments, positions, ids = (
        np.asarray(x).reshape(-1, x.shape[-1])
        for x in (batch.segment_ids, batch.positions, batch.sample_ids)
    )
    rows, columns = np.nonzero(segments)
    owners = ids[rows, segments[rows, columns] - 1]
    found = []
    for s in samples:
        mine = owners == s.sample_id
        order = np.argsort(positions[rows[mine], columns[mine]])
        found.append((rows[mine][order], columns[mine][order]))
    return found


def to_rows(
    batch: RolloutBatch, samples: list[OracleSample], arrays: list[Any], fill: Any, dtype=np.float32
) -> Any:
    """`[R, T, ...]`, or `[K, R, T, ...]`: arrays `[tokens, ...]` of the samples; `fill`
    elsewhere and without loss.
    """
    shape = batch.segment_ids.shape
    out = np.full((int(np.prod(shape[:-1])), shape[-1], *np.shape(arrays[0])[1:]), fill, dtype)
    for (rows, columns), s, x in zip(_entries(batch, samples), samples, arrays, strict=True):
        out[rows[s.here], columns[s.here]] = np.asarray(x)[s.here]
    return out.reshape(*shape, *out.shape[2:])


def to_samples(batch: RolloutBatch, samples: list[OracleSample], x: Any) -> list[np.ndarray]:
    """The inverse; raises if x is not 0 outside of all sequences."""
    x = np.asarray(x, np.float64).reshape(
        -1, batch.segment_ids.shape[-1], *np.shape(x)[batch.segment_ids.ndim :]
    )
    found = [x[rows, columns] for rows, columns in _entries(batch, samples)]
    outside = x[(np.asarray(batch.segment_ids) == 0).reshape(x.shape[:2])]
    assert not np.any(outside), f"got {np.max(np.abs(outside))} on padding, expected 0"
    return found


def of_each(batch: RolloutBatch, samples: list[OracleSample], x: Any) -> np.ndarray:
    """`[samples]` from an array `[R, S]` or `[K, R, S]`; raises if it is not 0 where there is no
    sample.
    """
    x = np.asarray(x, np.float64).reshape(-1)
    ids = np.asarray(batch.sample_ids).reshape(-1)
    assert not np.any(x[ids < 0]), f"got {x[ids < 0]} where no sample is, expected 0"
    return np.array([x[ids == s.sample_id][0] for s in samples])


def agree(
    name: str, got: Any, expected: Any, size: Any, rtol: float = 1e-5, share: float = 0.2
) -> None:
    """Raises if a number is further from the expected one than rounding explains: rtol * (|number|
    + share * size).

    Args:
      name: the name in the error.
      got: an array.
      expected: the expected array, in float64.
      size: the size of the terms whose sum a number is.
      rtol: the relative tolerance.
      share: the share of the size that is tolerated.
    """
    got = np.asarray(got, np.float64)
    expected = np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{name}: got shape {got.shape}, expected {expected.shape}"
    exact = got == expected  # true for equal infinities too
    with np.errstate(invalid="ignore"):
        bad = ~exact & ~(
            np.abs(got - expected)
            <= rtol * (np.abs(expected) + share * np.asarray(size, np.float64))
        )
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"{name}: got {got[at]}, expected {expected[at]} at {at}, {int(bad.sum())} of"
            f" {bad.size} differ"
        )
