"""The loss layer of LLM reinforcement learning: hidden states or logits to loss, gradients and metrics on any mesh."""

from jaxppo import advantages, metrics
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch, Sample
from jaxppo.config import PolicyLossConfig
from jaxppo.kl import adaptive_kl_coef, kl_divergence
from jaxppo.loss import policy_loss
from jaxppo.metrics import Metric
from jaxppo.policy_losses import register_policy_loss
from jaxppo.sft import sft_loss
from jaxppo.value import value_loss

__all__ = [
    "Metric",
    "Normalizer",
    "PolicyLossConfig",
    "RolloutBatch",
    "Sample",
    "adaptive_kl_coef",
    "advantages",
    "kl_divergence",
    "metrics",
    "policy_loss",
    "register_policy_loss",
    "sft_loss",
    "value_loss",
]
