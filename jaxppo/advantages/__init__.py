"""Advantage estimators, by their published names."""

from jaxppo.advantages.filters import accepted_samples, drop_equal_groups, overlong_penalty
from jaxppo.advantages.gigpo import gigpo, state_groups, step_returns
from jaxppo.advantages.groups import dr_grpo, gpg, grpo, opo, pass_at_k, remax, rloo
from jaxppo.advantages.optimal_baseline import optimal_token_baseline
from jaxppo.advantages.pass_rates import pass_rates
from jaxppo.advantages.returns import (
    discounted_returns,
    gae,
    last_values,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    token_rewards,
)
from jaxppo.advantages.scaled import gdpo, maxrl, standardize
from jaxppo.advantages.spans import on_policy_distillation
from jaxppo.advantages.token_statistics import explained_variance, spread, whiten

__all__ = [
    "accepted_samples",
    "discounted_returns",
    "dr_grpo",
    "drop_equal_groups",
    "explained_variance",
    "gae",
    "gdpo",
    "gigpo",
    "gpg",
    "grpo",
    "last_values",
    "maxrl",
    "on_policy_distillation",
    "opo",
    "optimal_token_baseline",
    "overlong_penalty",
    "pass_at_k",
    "pass_rates",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "spread",
    "standardize",
    "state_groups",
    "step_returns",
    "token_rewards",
    "whiten",
]
