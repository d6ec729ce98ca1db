"""A loss layer for LLM reinforcement learning: hidden states or logits to loss, gradients and
metrics on any mesh.

The names here are enough to start with. Rarer ones are in the modules, such as
`jaxppo.policy_losses.GMPO` and `jaxppo.sharding.audit`.
"""

from importlib.metadata import version as _version
from typing import TYPE_CHECKING

# Not loaded late: what these two add to JAX, and find in it, must not depend on what the program
# does first.
from jaxppo.base import modules as _modules  # noqa: F401
from jaxppo.base import stacked as _stacked  # noqa: F401
from jaxppo.base.late import late as _late

__version__ = _version("jaxppo")

if TYPE_CHECKING:
    from jaxppo import advantages, mismatch, policy_losses, presets, sharding
    from jaxppo.base.kl import KL
    from jaxppo.base.metrics import finalize_metrics
    from jaxppo.batch.broken_rules import explain_broken_rules
    from jaxppo.batch.packing_check import assert_packing_invariant
    from jaxppo.batch.rollout_batch import RolloutBatch
    from jaxppo.batch.samples import Sample
    from jaxppo.head import Head, LoRA, TokenStats, log_probs_from_hidden, log_probs_from_logits
    from jaxppo.losses import SFT, TokenLoss, Value, loss_from_hidden, loss_from_stats
    from jaxppo.losses.doors import policy_loss, policy_loss_from_hidden
    from jaxppo.policy.config import PolicyLossConfig
    from jaxppo.policy.off_policy import OffPolicyConfig, Rejection
    from jaxppo.policy.unusable import Unusable
    from jaxppo.policy_losses import CISPO, GSPO, PPO, SAPO
    from jaxppo.sharding import ParallelMesh, ShardAxes, make_parallel_mesh
    from jaxppo.step.accumulate import accumulate_gradients, compute_log_probs
    from jaxppo.step.advice import advise
    from jaxppo.step.aggregation import Normalizer
else:
    __getattr__ = _late(  # the same imports, each run when its name is first used
        __name__,
        {
            "jaxppo.base.kl": ["KL"],
            "jaxppo.base.metrics": ["finalize_metrics"],
            "jaxppo.batch.broken_rules": ["explain_broken_rules"],
            "jaxppo.batch.packing_check": ["assert_packing_invariant"],
            "jaxppo.batch.rollout_batch": ["RolloutBatch"],
            "jaxppo.batch.samples": ["Sample"],
            "jaxppo.head": [
                "Head",
                "LoRA",
                "TokenStats",
                "log_probs_from_hidden",
                "log_probs_from_logits",
            ],
            "jaxppo.losses": ["SFT", "TokenLoss", "Value", "loss_from_hidden", "loss_from_stats"],
            "jaxppo.losses.doors": ["policy_loss", "policy_loss_from_hidden"],
            "jaxppo.policy.config": ["PolicyLossConfig"],
            "jaxppo.policy.off_policy": ["OffPolicyConfig", "Rejection"],
            "jaxppo.policy.unusable": ["Unusable"],
            "jaxppo.policy_losses": ["CISPO", "GSPO", "PPO", "SAPO"],
            "jaxppo.sharding": ["ParallelMesh", "ShardAxes", "make_parallel_mesh"],
            "jaxppo.step.accumulate": ["accumulate_gradients", "compute_log_probs"],
            "jaxppo.step.advice": ["advise"],
            "jaxppo.step.aggregation": ["Normalizer"],
        },
    )

    def __dir__() -> list[str]:
        return sorted([*__all__, "__all__", "__version__"])


# in the order of use: the head, batches and steps, policy losses, losses as values, meshes, modules
# with rarer names
__all__ = [
    "Head",
    "LoRA",
    "TokenStats",
    "compute_log_probs",
    "log_probs_from_hidden",
    "log_probs_from_logits",
]
__all__ += [
    "Normalizer",
    "RolloutBatch",
    "Sample",
    "accumulate_gradients",
    "explain_broken_rules",
    "finalize_metrics",
]
__all__ += [
    "CISPO",
    "GSPO",
    "KL",
    "PPO",
    "SAPO",
    "OffPolicyConfig",
    "PolicyLossConfig",
    "Rejection",
    "Unusable",
]
__all__ += ["policy_loss", "policy_loss_from_hidden"]
__all__ += ["SFT", "TokenLoss", "Value", "loss_from_hidden", "loss_from_stats"]
__all__ += ["ParallelMesh", "ShardAxes", "advise", "assert_packing_invariant", "make_parallel_mesh"]
__all__ += ["advantages", "mismatch", "policy_losses", "presets", "sharding"]
