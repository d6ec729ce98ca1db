"""A few samples of each step, and what the loss does with each of their tokens: the lines of
tokens.jsonl.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from examples.trainer.tasks import Tokenizer
from jaxppo import ParallelMesh, RolloutBatch
from jaxppo.losses.explain import ExplainedTokens

if TYPE_CHECKING:
    from examples.trainer.model_folder import FolderTokenizer

_DIGITS = 6  # of each number in the file: those of an f32, nearly
_OF_TOKENS = ("tokens", "targets", "segment_ids", "positions")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chosen:
    """Rows that hold the chosen samples, one for each, the same on every device and process.

    Args:
      found: the explanation of these rows, `[N, T]`.
      batch: their ids, tokens, mask and rewards. Samples that were not chosen have the id -1.
    """

    found: ExplainedTokens
    batch: RolloutBatch


def choose(
    found: ExplainedTokens, batch: RolloutBatch, count: int, step: Any, parallel: ParallelMesh
) -> Chosen:
    """`count` samples, evenly spaced among those of a step; each step begins with the next one.

    Within a jit.
    """
    total = jnp.sum(batch.sample_ids >= 0)
    ids = (jnp.arange(count) * total // count + step) % total
    rows = jnp.argmax((batch.sample_ids == ids[:, None, None]).any(axis=-1), axis=-1)

    def take(arrays: Mapping[str, Any]) -> dict[str, jax.Array]:
        # together, as every array of its own would be one more collective
        some = jnp.take(jnp.stack(list(arrays.values())), rows, axis=1)
        return dict(
            zip(arrays, lax.with_sharding_constraint(some, parallel.sharding(P())), strict=True)
        )

    whole = take({"reason": found.reason} | {name: getattr(batch, name) for name in _OF_TOKENS})
    floats = take({"loss_mask": batch.loss_mask.astype(jnp.float32)} | found.arrays)
    of_samples = take({"sample_ids": batch.sample_ids, "group_ids": batch.group_ids})
    of_samples["sample_ids"] = jnp.where(of_samples["sample_ids"] == ids[:, None], ids[:, None], -1)
    rewards = take({"rewards": batch.rewards})
    found = ExplainedTokens(
        {name: floats[name] for name in found.arrays}, whole.pop("reason"), found.reasons
    )
    return Chosen(
        found, RolloutBatch(**whole, **of_samples, **rewards, loss_mask=floats["loss_mask"])
    )


def records(
    chosen: Chosen | None, step: int, tokenizer: Tokenizer | FolderTokenizer
) -> list[dict[str, Any]]:
    """A record of each chosen sample, for JSON, on the host; none for None.

    The names are those of `jaxppo.losses.explain.write_tokens`. "text" has the text of each of
    "tokens", and "before" that of the token before the first of them.
    """
    if chosen is None:
        return []
    found, batch = jax.device_get((chosen.found, chosen.batch))
    reasons = np.asarray(found.reasons, object)[found.reason]
    made = []
    for row, slot in zip(*np.nonzero(batch.sample_ids >= 0), strict=True):
        (at,) = np.nonzero(batch.segment_ids[row] == slot + 1)
        at = at[np.argsort(batch.positions[row, at])]
        at, first = at[:-1], at[0]  # nothing follows a sample's last token
        tokens = batch.targets[row, at].tolist()
        made.append(
            {
                "step": step,
                "sample_id": int(batch.sample_ids[row, slot]),
                "group_id": int(batch.group_ids[row, slot]),
                "reward": _plain(batch.rewards[row, slot]),
                "before": tokenizer.decode([int(batch.tokens[row, first])]),
                "text": [tokenizer.decode([token]) for token in tokens],
                "tokens": tokens,
                "loss_mask": batch.loss_mask[row, at].astype(int).tolist(),
                "reason": reasons[row, at].tolist(),
                **{name: _plain_all(x[row, at]) for name, x in found.arrays.items()},
            }
        )
    return made


def _plain_all(numbers: Sequence[Any]) -> list[float | None]:
    return [_plain(x) for x in numbers]


def _plain(x: Any) -> float | None:
    return float(f"{x:.{_DIGITS}g}") if math.isfinite(x) else None  # JSON has no NaN
