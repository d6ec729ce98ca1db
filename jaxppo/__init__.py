"""A loss layer for LLM reinforcement learning: hidden states or logits to loss, gradients and metrics on any mesh.

The names here are enough to start with. Rarer ones are in the modules, such as `jaxppo.policy_losses.GMPO` and
`jaxppo.sharding.audit`.
"""

import importlib
import importlib.util
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

# Not loaded late: what these two add to JAX, and find in it, must not depend on what the program does first.
from jaxppo import _stacked  # noqa: F401
from jaxppo.integrations import modules as _modules  # noqa: F401

__version__ = _version("jaxppo")

if TYPE_CHECKING:
    from jaxppo import advantages, covariance, kl, mismatch, nucleus, policy_losses, presets, sharding, staleness
    from jaxppo.accumulate import accumulate_gradients
    from jaxppo.aggregation import Normalizer
    from jaxppo.batch import RolloutBatch
    from jaxppo.broken_rules import explain_broken_rules
    from jaxppo.config import PolicyLossConfig
    from jaxppo.forward import compute_log_probs
    from jaxppo.head import Head, LoRA, TokenStats, log_probs_from_hidden, log_probs_from_logits
    from jaxppo.kl import KL
    from jaxppo.losses import SFT, TokenLoss, Value, loss_from_hidden, loss_from_stats
    from jaxppo.losses.policy import policy_loss, policy_loss_from_hidden
    from jaxppo.metrics import finalize_metrics
    from jaxppo.off_policy import OffPolicyConfig, Rejection
    from jaxppo.policy_losses import CISPO, GSPO, PPO, SAPO
    from jaxppo.samples import Sample
    from jaxppo.sharding import ParallelMesh, ShardAxes, make_parallel_mesh
else:
    # The same imports, each run when its name is first used: importing jaxppo is fast, a program loads what it needs.
    _LATE = {
        "jaxppo.accumulate": ["accumulate_gradients"],
        "jaxppo.aggregation": ["Normalizer"],
        "jaxppo.batch": ["RolloutBatch"],
        "jaxppo.config": ["PolicyLossConfig"],
        "jaxppo.forward": ["compute_log_probs"],
        "jaxppo.head": ["Head", "LoRA", "TokenStats", "log_probs_from_hidden", "log_probs_from_logits"],
        "jaxppo.kl": ["KL"],
        "jaxppo.losses.policy": ["policy_loss", "policy_loss_from_hidden"],
        "jaxppo.losses": ["SFT", "TokenLoss", "Value", "loss_from_hidden", "loss_from_stats"],
        "jaxppo.metrics": ["finalize_metrics"],
        "jaxppo.off_policy": ["OffPolicyConfig", "Rejection"],
        "jaxppo.policy_losses": ["CISPO", "GSPO", "PPO", "SAPO"],
        "jaxppo.broken_rules": ["explain_broken_rules"],
        "jaxppo.samples": ["Sample"],
        "jaxppo.sharding": ["ParallelMesh", "ShardAxes", "make_parallel_mesh"],
    }
    _MODULE_OF = {name: module for module, names in _LATE.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            found = getattr(__import__(_MODULE_OF[name], fromlist=[name]), name)
        elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
            found = importlib.import_module(f"{__name__}.{name}")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [  # noqa: RUF022  in the order of use
    # the head
    "Head",
    "LoRA",
    "TokenStats",
    "log_probs_from_hidden",
    "log_probs_from_logits",
    "compute_log_probs",
    # batches and steps
    "Sample",
    "RolloutBatch",
    "Normalizer",
    "accumulate_gradients",
    "finalize_metrics",
    "explain_broken_rules",
    # policy losses
    "PolicyLossConfig",
    "PPO",
    "GSPO",
    "CISPO",
    "SAPO",
    "KL",
    "OffPolicyConfig",
    "Rejection",
    "policy_loss",
    "policy_loss_from_hidden",
    # losses as values
    "loss_from_hidden",
    "loss_from_stats",
    "TokenLoss",
    "SFT",
    "Value",
    # meshes
    "ParallelMesh",
    "ShardAxes",
    "make_parallel_mesh",
    # modules with rarer names
    "advantages",
    "covariance",
    "kl",
    "mismatch",
    "nucleus",
    "policy_losses",
    "presets",
    "sharding",
    "staleness",
]
