"""Advantage estimators, by their published names."""

from jaxppo.advantages.distillation import importance_weighted_distillation, on_policy_distillation
from jaxppo.advantages.filters import accepted_samples, drop_equal_groups, overlong_penalty
from jaxppo.advantages.groups import dr_grpo, gpg, grpo, opo, pass_at_k, pass_rates, remax, rloo
from jaxppo.advantages.optimal_baseline import optimal_token_baseline
from jaxppo.advantages.returns import (
    discounted_returns,
    gae,
    last_values,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    token_rewards,
)
from jaxppo.advantages.scaled import gdpo, maxrl, standardize
from jaxppo.advantages.token_statistics import explained_variance, spread, whiten

# before an estimator; estimators by samples; by tokens; numbers on tokens
__all__ = ["accepted_samples", "drop_equal_groups", "overlong_penalty", "pass_rates"]
__all__ += [
    "dr_grpo",
    "gdpo",
    "gpg",
    "grpo",
    "maxrl",
    "opo",
    "pass_at_k",
    "remax",
    "rloo",
    "standardize",
]
__all__ += [
    "discounted_returns",
    "gae",
    "last_values",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
]
__all__ += [
    "importance_weighted_distillation",
    "on_policy_distillation",
    "optimal_token_baseline",
    "token_rewards",
]
__all__ += ["explained_variance", "spread", "whiten"]
