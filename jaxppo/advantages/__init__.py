"""Advantage estimators, by their published names."""

from jaxppo.advantages.groups import dr_grpo, gpg, grpo, opo, pass_at_k, remax, rloo
from jaxppo.advantages.returns import (
    discounted_returns,
    gae,
    on_policy_distillation,
    reinforce_plus_plus,
    reinforce_plus_plus_baseline,
    token_rewards,
)
from jaxppo.advantages.tokens import spread, whiten

__all__ = [
    "discounted_returns",
    "dr_grpo",
    "gae",
    "gpg",
    "grpo",
    "on_policy_distillation",
    "opo",
    "pass_at_k",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "spread",
    "token_rewards",
    "whiten",
]
