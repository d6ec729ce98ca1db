"""A step as a list of samples, and what the loss of each token counts for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray


@dataclass
class OracleSample:
    """One sequence. Its arrays have one length m and one alignment, which is the caller's choice.

    Entry i of every array speaks of the same token: the i-th of the response, or the one that
    position i predicts. Only entries with `mask` 1 are ever read, so the others may hold anything,
    NaN included. Results are `[m]` too, 0 there.
    """

    mask: Any  # [m], 1 where the token carries loss
    log_probs: Any = None  # [m], of the policy that is trained, as the next ones
    entropy: Any = None
    old_log_probs: Any = None
    ref_log_probs: Any = None
    rollout_log_probs: Any = None
    advantages: Any = None
    values: Any = None  # the critic's at the start of the step
    returns: Any = None
    new_values: Any = None  # the critic's that is trained
    # log-sum-exp and mean of the logits, and whether the target is a likeliest token
    log_z: Any = None
    mean_logit: Any = None
    likeliest: Any = None
    loss_weights: Any = None  # [m], what the token's whole loss is multiplied by; None for 1
    selected: Any = None  # bool [m], the tokens that clip_cov takes out or kl_cov penalises
    # [m, H], for what starts from hidden states; targets [m] and nucleus ids [m, K] with it
    hidden: Any = None
    targets: Any = None
    nucleus_ids: Any = None
    temperature: Any = 1.0  # a number or [m]
    reward: float | None = None
    # by default the sample's place in the step, as for group and rollout
    sample_id: int | None = None
    group_id: int | None = None
    rollout_id: int | None = None

    @property
    def here(self) -> Array:
        """bool `[m]`: where the tokens with loss are."""
        return np.asarray(self.mask) > 0

    @property
    def count(self) -> int:
        """How many tokens carry loss."""
        return int(self.here.sum())

    @property
    def weights(self) -> Array:
        """`loss_weights` on the tokens with loss, `[n]`."""
        return np.ones(self.count) if self.loss_weights is None else self.at("loss_weights")

    def at(self, name: str) -> Array:
        """The field of that name on the tokens with loss, float64 `[n, ...]`."""
        field = getattr(self, name)
        if field is None:
            raise ValueError(f"{name}: got None, expected [m]")
        return np.asarray(field, np.float64)[self.here]

    def scatter(self, x: Array) -> Array:
        """`[n, ...]` on the tokens with loss to `[m, ...]`, 0 elsewhere."""
        out = np.zeros((len(self.here), *np.shape(x)[1:]))
        out[self.here] = x
        return out


def ids(samples: Sequence[OracleSample], name: str) -> list[int]:
    """`sample_id`, `group_id` or `rollout_id` of each sample, by default its place."""
    found = [getattr(s, name) for s in samples]
    return [i if x is None else x for i, x in enumerate(found)]


def sample_weights(
    samples: Sequence[OracleSample],
    aggregation: str = "token_mean",
    norm: float | None = None,
    weighted: bool | None = False,
) -> Array:
    """`[samples]`: what each loss token of a sample counts for, so that loss = sum over tokens of
    weight * token loss.

    N loss tokens are in the step, n_s in the sample, n_r in all samples of its rollout; B samples
    and B_r rollouts have any: token_mean 1 / N, token_sum 1, sequence_mean_token_sum 1 / B,
    sequence_mean_token_mean 1 / (n_s B), sequence_mean_token_sum_norm 1 / (norm B), rollout_mean 1
    / (n_r B_r). Weighted: a token is as many as its weight.
    """
    n = np.array([np.sum(s.weights) if weighted else s.count for s in samples], np.float64)
    rollouts = ids(samples, "rollout_id")
    n_r = np.array(
        [sum(m for m, other in zip(n, rollouts, strict=True) if other == r) for r in rollouts]
    )
    present = float(np.sum(n > 0)) or 1.0
    present_rollouts = float(len({r for m, r in zip(n, rollouts, strict=True) if m > 0})) or 1.0
    one = np.ones(len(samples))

    def some(x):
        return np.where(x == 0, 1.0, x)

    if aggregation == "sequence_mean_token_sum_norm" and norm is None:
        raise ValueError("aggregation_norm: got None, expected the constant length")
    return {
        "token_mean": one / some(n.sum()),
        "token_sum": one,
        "sequence_mean_token_sum": one / present,
        "sequence_mean_token_mean": one / (some(n) * present),
        "sequence_mean_token_sum_norm": one / ((norm or 1.0) * present),
        "rollout_mean": one / (some(n_r) * present_rollouts),
    }[aggregation]


def weighted_sum(weights: Array, values: Sequence[Array]) -> float:
    """Sum over samples of weight * the sum of the values on its loss tokens."""
    return float(sum(w * np.sum(v) for w, v in zip(weights, values, strict=True)))


def token_mean(values: Sequence[Array]) -> float:
    """The mean over the loss tokens of the step, 0 where there is none."""
    return float(sum(np.sum(v) for v in values)) / max(sum(len(v) for v in values), 1)
