"""The loss layer of LLM reinforcement learning: hidden states or logits to loss, gradients and metrics on any mesh."""

from jaxppo import advantages, metrics, presets
from jaxppo.accumulate import accumulate_gradients
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch, Sample
from jaxppo.config import PolicyLossConfig
from jaxppo.covariance import covariance_mask
from jaxppo.distillation import HeadStates, distillation_loss, divergence_from_hidden
from jaxppo.forward import compute_log_probs
from jaxppo.hidden_loss import policy_loss_from_hidden, sft_loss_from_hidden
from jaxppo.kl import adaptive_kl_coef, kl_divergence
from jaxppo.log_probs import TokenStats, log_probs_from_hidden, log_probs_from_logits
from jaxppo.loss import policy_loss
from jaxppo.metrics import Metric
from jaxppo.mismatch import mismatch_metrics
from jaxppo.mtp import mtp_loss, mtp_normalizers, shift_targets
from jaxppo.off_policy import OffPolicyConfig, Rejection
from jaxppo.policy_losses import PolicyLoss, register_policy_loss
from jaxppo.replay import keep_mask, pack_keep_ids
from jaxppo.sft import sft_loss
from jaxppo.value import value_loss

__all__ = [
    "HeadStates",
    "Metric",
    "Normalizer",
    "OffPolicyConfig",
    "PolicyLoss",
    "PolicyLossConfig",
    "Rejection",
    "RolloutBatch",
    "Sample",
    "TokenStats",
    "accumulate_gradients",
    "adaptive_kl_coef",
    "advantages",
    "compute_log_probs",
    "covariance_mask",
    "distillation_loss",
    "divergence_from_hidden",
    "keep_mask",
    "kl_divergence",
    "log_probs_from_hidden",
    "log_probs_from_logits",
    "metrics",
    "mismatch_metrics",
    "mtp_loss",
    "mtp_normalizers",
    "pack_keep_ids",
    "policy_loss",
    "policy_loss_from_hidden",
    "presets",
    "register_policy_loss",
    "sft_loss",
    "sft_loss_from_hidden",
    "shift_targets",
    "value_loss",
]
