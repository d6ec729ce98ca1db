"""Advantage estimators, by their published names."""

from jaxppo.advantages.groups import dr_grpo, gpg, grpo, opo, pass_at_k, remax, rloo
from jaxppo.advantages.tokens import spread, whiten

__all__ = ["dr_grpo", "gpg", "grpo", "opo", "pass_at_k", "remax", "rloo", "spread", "whiten"]
