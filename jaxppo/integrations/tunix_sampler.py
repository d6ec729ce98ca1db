"""Tunix's options against a sampler that differs from the trainer: who applies them, and what they
are here.

Learners of Tunix apply them before the loss, as weights and a smaller mask, or leave them to the
loss: a batch of the main branch says which, `sampler_agreement_applied`. Source,
https://github.com/google/tunix: `grpo_loss_fn` of tunix/rl/algo_core.py and
`compute_sampler_trainer_agreement_jax` of tunix/rl/common.py, September 2026.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jaxppo.base.arrays import check, is_number
from jaxppo.batch.rollout_batch import RolloutBatch
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy.off_policy import OffPolicyConfig, Rejection, Statistic
from jaxppo.policy.unusable import Unusable
from jaxppo.policy_losses import CISPO, GSPO, PPO, Reinforce

_THRESHOLD = "seq_logprob_error_threshold"
_STATISTICS: dict[str, Statistic] = {"token": "token_k1", "geometric": "seq_mean_k1"}
# losses that a weight times the advantage multiplies
_OF_SCALED_ADVANTAGES = (PPO, GSPO, CISPO, Reinforce)


def asked_for(algo_config: Any) -> dict[str, Any]:
    """The corrections that a config of Tunix asks for, by the names of its options."""
    options = {
        name: getattr(algo_config, name, None) for name in ("sampler_is", "sampler_rs", _THRESHOLD)
    }
    return {name: value for name, value in options.items() if value is not None}


def left_to_loss(algo_config: Any, train_example: Any) -> dict[str, Any]:
    """Those of `asked_for` that the learner has not applied to this batch.

    Raises:
      TypeError: a traced `sampler_agreement_applied`.
      ValueError: the loss would have to apply one, and the batch has no log-probs of the sampler.
    """
    asked = asked_for(algo_config)
    applied = getattr(train_example, "sampler_agreement_applied", False)
    if isinstance(applied, jax.core.Tracer):
        raise TypeError(
            "sampler_agreement_applied: got a traced value, expected True or False, outside the"
            " arrays"
        )
    if applied:
        return {}
    # they hold both gates, and never the threshold
    if getattr(train_example, "sampler_is_weights", None) is not None:
        asked = {name: value for name, value in asked.items() if name == _THRESHOLD}
    for name, value in asked.items():
        if train_example.old_per_token_logps is None or not getattr(
            algo_config, "use_rollout_logps", False
        ):
            raise ValueError(
                f"{name}: got {value!r} in {type(algo_config).__name__}, expected None for a batch"
                " without log-probs of the sampler, which use_rollout_logps=True and"
                " RolloutConfig(return_logprobs=True) hand over"
            )
    return asked


def with_options(
    config: PolicyLossConfig, algo_config: Any, asked: dict[str, Any]
) -> PolicyLossConfig:
    """The config with these corrections of Tunix's, and with a ratio of 1 where Tunix has one.

    Beside a correction in the loss the ratio is 1, since its weight is over the current policy.
    Tunix keeps the denominators and the penalties of tokens that the gates drop, as
    `OffPolicyConfig` does, and of tokens without a finite log-prob.
    """
    if asked:
        off_policy = _correction(algo_config, asked)
        return dataclasses.replace(
            config, ratio_to="current", off_policy=off_policy, unusable=Unusable.of("tunix")
        )
    if getattr(algo_config, "force_on_policy_ratio", False):
        return dataclasses.replace(config, ratio_to="current")
    return config


def check_options_of(config: PolicyLossConfig, algo_config: Any, asked: dict[str, Any]) -> None:
    """Raises ValueError if the caller's own config does not do what Tunix's asks the loss for.

    What it does with unusable tokens is its own choice: it has no option in Tunix.
    """
    wanted = dataclasses.replace(with_options(config, algo_config, asked), unusable=config.unusable)
    if wanted == config:
        return
    name = next(iter(asked), "force_on_policy_ratio")
    got = (
        f"got {getattr(algo_config, name)!r} in {type(algo_config).__name__} beside a config that"
        " does not have it"
    )
    correction = f" and off_policy={wanted.off_policy}" if asked else ""
    raise ValueError(
        f"{name}: {got}, expected None or False there, or a config with"
        f" ratio_to='current'{correction}"
    )


def _correction(algo_config: Any, asked: dict[str, Any]) -> OffPolicyConfig:
    name = type(algo_config).__name__
    if _THRESHOLD in asked:
        raise ValueError(
            f"{_THRESHOLD}: got {asked[_THRESHOLD]} in {name}, expected None where the loss has to"
            " apply it: it takes sequences out of the denominators before the loss is computed;"
            " Rejection('seq_mean_error', high=) of a config of yours keeps the denominators"
        )
    gates: tuple[Rejection, ...] = ()
    if "sampler_rs" in asked:
        gates = (_gate(algo_config, asked["sampler_rs"]),)
    if "sampler_is" not in asked:
        return OffPolicyConfig(rejections=gates)
    check(
        "sampler_is", repr(asked["sampler_is"]), asked["sampler_is"] == "token", "'token' or None"
    )
    high = getattr(algo_config, "sampler_is_threshold", 2.0)
    check(
        "sampler_is_threshold",
        repr(high),
        high is None or (is_number(high) and high > 0),
        "a number above 0, None",
    )
    high = math.inf if high is None else float(high)
    return OffPolicyConfig("token", 0.0, high, rejections=gates, compares="current/rollout")


def _gate(algo_config: Any, kind: Any) -> Rejection:
    """Keeps trainer / sampler ratios within Tunix's band; the bounds of a `Rejection` are those
    of the inverse.
    """
    check("sampler_rs", repr(kind), kind in _STATISTICS, f"None or one of {', '.join(_STATISTICS)}")
    low: Any = getattr(algo_config, "sampler_rs_min", None)
    high: Any = getattr(algo_config, "sampler_rs_max", None)
    good = is_number(low) and is_number(high) and 0 <= low < high
    check(
        "sampler_rs_min, sampler_rs_max",
        f"{low!r}, {high!r}",
        good,
        "two numbers with 0 <= min < max",
    )
    largest = 1 / low if low else math.inf
    return Rejection(_STATISTICS[kind], 1 / high, largest, compares="current/rollout")


def check_weights(config: PolicyLossConfig, train_example: Any) -> None:
    """Raises ValueError if the learner's weights, which multiply the advantages, would not be
    those of the loss.
    """
    if getattr(train_example, "sampler_is_weights", None) is None:
        return
    kinds = ", ".join(kind.__name__ for kind in _OF_SCALED_ADVANTAGES)
    got = "got weights of Tunix's sampler correction"
    if type(config.loss) not in _OF_SCALED_ADVANTAGES:
        raise ValueError(
            f"sampler_is_weights: {got} beside {type(config.loss).__name__}, expected one of"
            f" {kinds}"
        )
    if config.off_policy is not None:
        expected = "off_policy=None, or sampler_is=None and sampler_rs=None in Tunix's config"
        raise ValueError(
            f"sampler_is_weights: {got} beside {config.off_policy}, expected {expected}"
        )


def with_sampler_log_probs(
    batch: RolloutBatch, config: PolicyLossConfig, algo_config: Any, asked: dict[str, Any]
) -> RolloutBatch:
    """The batch with the sampler's log-probs, if the config reads them and Tunix hands them over as
    old ones.

    With `use_rollout_logps` its old log-probs are the sampler's, until the learner has applied a
    correction: then they are the trainer's own.
    """
    are_samplers = getattr(algo_config, "use_rollout_logps", False) and (
        asked or not asked_for(algo_config)
    )
    if batch.rollout_log_probs is not None or "rollout" not in config.policies or not are_samplers:
        return batch
    return dataclasses.replace(batch, rollout_log_probs=batch.old_log_probs)


def check_served(config: PolicyLossConfig, agentic: bool) -> None:
    """Raises ValueError for a config that reads what no batch of that learner of the installed
    Tunix has.
    """
    from tunix.rl import common
    from tunix.rl.grpo import grpo_learner

    if config.loss.selects is not None:
        got = f"got {type(config.loss).__name__}, which reads the covariance_mask of a step"
        raise ValueError(
            f"config.loss: {got}, expected another: learners of Tunix do not compute it"
        )
    if "rollout" not in config.policies:
        return
    got = "got a config that reads log-probs of the sampler (ratio_to, off_policy or kl)"
    plain = {field.name for field in dataclasses.fields(grpo_learner.GRPOConfig)}
    if not agentic and "use_rollout_logps" not in plain:
        expected = (
            "ratio_to='old' or 'current' and no correction: the GRPOLearner of this Tunix hands"
            " over none"
        )
        raise ValueError(
            f"config: {got}, expected {expected}; the agentic one does, register(..., agentic=True)"
        )
    fields = {field.name for field in dataclasses.fields(common.TrainExample)}
    if "old" in config.policies and "rollout_per_token_logps" not in fields:
        expected = (
            "a comparison with one of them, such as 'current/rollout': Tunix hands over either"
            " these or those"
        )
        raise ValueError(f"config: {got} and of the old policy, expected {expected}")
