"""The loss layer of LLM reinforcement learning: hidden states or logits to loss, gradients and metrics on any mesh.

What stands here is enough for a first week. Rarer things live in the modules, such as `jaxppo.policy_losses.GMPO` and
`jaxppo.sharding.audit`.
"""

import importlib
from importlib.metadata import version as _version
from typing import TYPE_CHECKING, Any

from jaxppo import kl, policy_losses, sharding
from jaxppo.accumulate import accumulate_gradients
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig
from jaxppo.forward import compute_log_probs
from jaxppo.head import Head, LoRA, TokenStats, log_probs_from_hidden, log_probs_from_logits
from jaxppo.kl import KL
from jaxppo.losses.policy import policy_loss, policy_loss_from_hidden
from jaxppo.losses.sft import sft_loss, sft_loss_from_hidden
from jaxppo.losses.value import value_loss
from jaxppo.metrics import finalize_metrics
from jaxppo.off_policy import OffPolicyConfig, Rejection
from jaxppo.policy_losses import CISPO, GSPO, PPO, SAPO
from jaxppo.rules import explain_broken_rules
from jaxppo.samples import Sample
from jaxppo.sharding import ParallelMesh, ShardAxes, make_parallel_mesh

__version__ = _version("jaxppo")

if TYPE_CHECKING:
    from jaxppo import advantages, covariance, mismatch, nucleus, presets, staleness
    from jaxppo.losses import distillation, mtp
else:
    # A program uses a few of these modules. Each is loaded when it is first named, so that importing jaxppo stays fast.
    _LATE = {
        module.rpartition(".")[2]: module
        for module in (
            "jaxppo.advantages",
            "jaxppo.covariance",
            "jaxppo.losses.distillation",
            "jaxppo.losses.mtp",
            "jaxppo.mismatch",
            "jaxppo.nucleus",
            "jaxppo.presets",
            "jaxppo.staleness",
        )
    }

    def __getattr__(name: str) -> Any:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = importlib.import_module(_LATE[name])
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *_LATE})


__all__ = [  # noqa: RUF022  in the order in which one meets them
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
    # other losses
    "sft_loss",
    "sft_loss_from_hidden",
    "value_loss",
    # meshes
    "ParallelMesh",
    "ShardAxes",
    "make_parallel_mesh",
    # modules: what is rarer lives in them
    "advantages",
    "covariance",
    "distillation",
    "kl",
    "mismatch",
    "mtp",
    "nucleus",
    "policy_losses",
    "presets",
    "sharding",
    "staleness",
]
