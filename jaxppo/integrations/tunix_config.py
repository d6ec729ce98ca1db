"""The policy loss that a learner's config of Tunix's asks for, and what of it a loss of jaxppo's must agree with."""

from __future__ import annotations

from typing import Any

from jaxppo.base.arrays import Aggregation
from jaxppo.base.kl import KL, Estimator
from jaxppo.policy.config import PolicyLossConfig
from jaxppo.policy_losses import GSPO, PPO, PolicyLoss

_AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": "token_mean",
    "sequence-mean-token-mean": "sequence_mean_token_mean",
    "seq-mean-token-sum": "sequence_mean_token_sum",
    "sequence-mean-token-sum-norm": "sequence_mean_token_sum",  # its norm is the number of sequences
    "sequence-mean-token-scale": "sequence_mean_token_sum_norm",  # and here the length of the completions
}
_ESTIMATORS: dict[str, Estimator] = {"kl": "k1", "mse_kl": "k2", "low_var_kl": "k3"}
# options of newer branches that change their loss or its metrics
_UNREAD = ["overlong_loss_masking", "seq_logprob_error_threshold", "truncated_importance_sampling_type"]
_UNREAD += ["sampler_is_length_buckets"]


def config_of(algo_config: Any, completion_length: int | None = None) -> PolicyLossConfig:
    """The policy loss of a Tunix `GRPOConfig`, or of one that derives from it (DAPO, Dr. GRPO).

    Args:
      algo_config: has epsilon, epsilon_high, epsilon_c, beta, kl_loss_mode, kl_clamp_value, loss_algo, loss_agg_mode.
      completion_length: C, the denominator of "sequence-mean-token-scale".

    Returns:
      The config. Its entropy is a metric, as in Tunix.

    Raises:
      ValueError: a value without an equivalent here, or a PPOConfig: pass its loss to `register` as a config.

    Example:
      >>> from types import SimpleNamespace
      >>> grpo = SimpleNamespace(epsilon=0.2, epsilon_high=0.28, beta=0.0, loss_algo="grpo", loss_agg_mode="token-mean")
      >>> config_of(grpo).loss
      PPO(clip_low=0.2, clip_high=0.28, dual_clip=None)
    """
    _check_options(algo_config)
    algorithm = getattr(algo_config, "loss_algo", None)
    if algorithm not in ("grpo", "gspo-token"):
        raise ValueError(
            f"algo_config: got {type(algo_config).__name__} with loss_algo={algorithm!r}, expected 'grpo' or "
            "'gspo-token'; for another loss pass a config"
        )
    mode = _known("loss_agg_mode", algo_config.loss_agg_mode, _AGGREGATIONS)
    norm = float(completion_length) if mode == "sequence_mean_token_sum_norm" and completion_length else None
    high = getattr(algo_config, "epsilon_high", None)
    bounds = (algo_config.epsilon, algo_config.epsilon if high is None else high)
    dual = getattr(algo_config, "epsilon_c", None)
    loss: PolicyLoss = PPO(*bounds, dual) if algorithm == "grpo" else GSPO(*bounds, dual, "token")
    return PolicyLossConfig(loss, kl=_kl(algo_config), aggregation=mode, aggregation_norm=norm)


def _known(name: str, value: Any, table: dict[str, Any]) -> Any:
    if value not in table:
        raise ValueError(f"{name}: got {value!r}, expected one of {', '.join(table)}")
    return table[value]


def _kl(algo_config: Any) -> KL | None:
    if not algo_config.beta:
        return None
    mode, clamp = algo_config.kl_loss_mode, getattr(algo_config, "kl_clamp_value", None)
    estimator = _known("kl_loss_mode", mode, _ESTIMATORS)
    if clamp is None:
        return KL(algo_config.beta, estimator)
    if (mode, float(clamp)) == ("low_var_kl", 10.0):
        return KL(algo_config.beta, "low_var_kl")
    raise ValueError(f"kl_clamp_value: got {clamp} with {mode!r}, expected None, or 10 with 'low_var_kl'")


def _check_options(algo_config: Any) -> None:
    for name in _UNREAD:
        value = getattr(algo_config, name, None)
        if value is not None and value is not False:
            raise ValueError(
                f"{name}: got {value} in {type(algo_config).__name__}, expected None or False: the losses of "
                "jaxppo.integrations.tunix do not read it; PolicyLossConfig(off_policy=...) drops and weighs sequences"
            )


def agreed(config: PolicyLossConfig, algo_config: Any) -> PolicyLossConfig:
    """The config, if the learner computes what the config needs, has the same penalty and asks for nothing else."""
    _check_options(algo_config)
    beta, mine = getattr(algo_config, "beta", None), 0.0 if config.kl is None else config.kl.coef
    if beta is not None and hasattr(algo_config, "loss_algo") and isinstance(mine, (int, float)) and beta != mine:
        raise ValueError(
            f"beta: got {beta} in {type(algo_config).__name__}, expected {mine}, the coefficient of config.kl; with "
            "beta=0 Tunix computes no reference log-probs"
        )
    return config
