"""What losses read, by name: arrays of tokens, each of a kind, and numbers.

`rules` makes a rule of each.

A `TokenLoss` says in `reads` which of these it reads, and gives the arrays. Its rules follow from
that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jaxppo.base.arrays import MAX_LOG_PROB, MAX_SAMPLED


class ValueRule(NamedTuple):
    """What the values of an array may be."""

    expected: str  # in words
    bad: Callable[[Any, Any], Any]  # where x breaks it, of (x, numpy or jax.numpy)


LOG_PROBS = ValueRule(
    f"finite log-probs of at most {MAX_LOG_PROB} where loss_mask is 1",
    lambda x, xp: ~(xp.isfinite(x) & (x <= MAX_LOG_PROB)),
)
SAMPLED = ValueRule(
    f"finite log-probs of at most {MAX_SAMPLED} where loss_mask is 1",
    lambda x, xp: ~(xp.isfinite(x) & (x <= MAX_SAMPLED)),
)
ENTROPIES = ValueRule(
    f"finite entropies of at least -{MAX_LOG_PROB}, which log-probs are not, where loss_mask is 1",
    lambda x, xp: ~(xp.isfinite(x) & (x >= -MAX_LOG_PROB)),
)
FINITE = ValueRule("finite numbers where loss_mask is 1", lambda x, xp: ~xp.isfinite(x))
WEIGHTS = ValueRule(
    "finite weights of at least 0 where loss_mask is 1", lambda x, xp: ~(xp.isfinite(x) & (x >= 0))
)
FLAGS = ValueRule("0 or 1 where loss_mask is 1", lambda x, xp: (x != 0) & (x != 1))

_UNUSABLE = "For tokens without a finite log-prob see PolicyLossConfig.unusable"
OF_MODELS = "hidden states, heads and the temperature hold no NaN or inf"

# Arrays of tokens, [R, T]: the kind of each, and more words for some.
PER_TOKEN: dict[str, tuple[ValueRule, str]] = {
    "advantages": (FINITE, ""),
    "returns": (FINITE, "; those of a sample without a reward, None, are NaN"),
    "values": (FINITE, ""),
    "teacher_target_log_probs": (
        SAMPLED,
        ", the teacher's of the targets; those above 0 count as 0",
    ),
    "loss_weights": (WEIGHTS, ""),
    "selected": (FLAGS, ", as covariance_mask gives them"),
    "old_log_probs": (LOG_PROBS, f". {_UNUSABLE}"),
    "ref_log_probs": (LOG_PROBS, ""),
    "rollout_log_probs": (SAMPLED, f"; those above 0 count as 0. {_UNUSABLE}"),
    "log_probs": (
        LOG_PROBS,
        (
            f", from the policy: {OF_MODELS}, and targets are in the vocabulary, as are"
            f" nucleus_ids. {_UNUSABLE}"
        ),
    ),
    "entropy": (ENTROPIES, f", from the policy: {OF_MODELS}"),
    "log_z": (FINITE, f", from the policy: {OF_MODELS}"),
    "mean_logit": (FINITE, f", from the policy: {OF_MODELS}"),
    "new_values": (FINITE, ", the critic's new values"),
    "scores": (FINITE, ", from the reward model, at the last position of each sequence"),
    "divergence": (FINITE, f", from two models: {OF_MODELS}"),
}

# The numbers of losses that may be traced: the names of fields and arguments. `check_field` makes
# those NaN that are out of their range. A number of another name, as a loss of your own may have,
# is "another_number".
NUMBERS = (
    *(
        "aggregation_norm",
        "beta",
        "centring",
        "clip",
        "clip_high",
        "clip_low",
        "coef",
        "desirable_weight",
    ),
    *(
        "draft_ids",
        "dual_clip",
        "entropy_coef",
        "eta",
        "factor",
        "high",
        "huber_delta",
        "k_negative",
        "k_positive",
    ),
    *(
        "kl.coef",
        "label_smoothing",
        "lambda_negative",
        "lambda_positive",
        "low",
        "margin",
        "nll_coef",
    ),
    *(
        "off_policy.opsm_delta",
        "off_policy.veto",
        "part.coef",
        "pull",
        "ratio_cap",
        "reference_point",
        "share",
    ),
    *("tau", "tau_negative", "tau_positive", "undesirable_weight", "z_loss"),
)
# Bounds, which may be infinite.
BOUNDS = (
    "off_policy.high",
    "off_policy.low",
    "off_policy.rejections.high",
    "off_policy.rejections.low",
)


def rule_of(name: str) -> str:
    """The rule for a number of a loss by its path: "clip_low" for "positive.clip_low", the bound
    of any rejection.
    """
    words = [word for word in name.split(".") if not word.isdigit()]
    for known in (".".join(words), words[-1]):
        if known in NUMBERS or known in BOUNDS:
            return known
    return "another_number"


def at_most_zero(log_probs: Float[Array, "..."]) -> Float[Array, "..."]:
    """A sampler's log-probs without what rounding adds: those above 0 are 0, unless they break a
    rule.
    """
    return jnp.where(log_probs <= MAX_SAMPLED, jnp.minimum(log_probs, 0), log_probs)


def mass_of(log_probs: Any, has_id: Any, xp: Any = jnp) -> Any:
    """The probability of all ids together, each of at most 1: `[..., K]` to `[...]`."""
    log_probs = xp.minimum(xp.where(has_id, log_probs, 0), 0)
    return xp.where(has_id, xp.exp(log_probs), 0).sum(axis=-1)


def at_most_one(
    log_probs: Float[Array, "*batch K"], has_id: Bool[Array, "*batch K"]
) -> Float[Array, "*batch K"]:
    """A sampler's or teacher's log-probs of K ids without what rounding adds: none above 0, their
    mass at most 1.

    A mass that no rounding explains stays as it is.
    """
    mass = mass_of(log_probs, has_id)[..., None]
    is_rounding = (mass > 1) & (mass <= math.exp(MAX_SAMPLED))
    excess = jnp.where(is_rounding, jnp.log(mass), 0)
    return at_most_zero(log_probs) - excess


def was_above_one(
    log_probs: Float[Array, "*batch K"], has_id: Bool[Array, "*batch K"]
) -> Bool[Array, "*batch"]:
    """Where `at_most_one` changes log-probs by more than f32 rounds them."""
    one_is_above = (has_id & (log_probs > 0)).any(axis=-1)
    return one_is_above | (mass_of(log_probs, has_id) > 1 + MAX_LOG_PROB)
