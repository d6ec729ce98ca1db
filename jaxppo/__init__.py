"""The loss layer of LLM reinforcement learning: hidden states or logits to loss, gradients and metrics on any mesh."""

from importlib.metadata import version as _version

from jaxppo import advantages, metrics, policy_losses, presets
from jaxppo._sharding import (
    Packed,
    ParallelMesh,
    Segments,
    ShardAxes,
    audit,
    make_parallel_mesh,
    pack,
    redistribute,
    scan_affine,
    segment_sum,
    shift_left,
    unpack,
)
from jaxppo.accumulate import accumulate_gradients
from jaxppo.aggregation import Normalizer
from jaxppo.batch import RolloutBatch
from jaxppo.config import PolicyLossConfig
from jaxppo.covariance import covariance_mask
from jaxppo.forward import compute_log_probs
from jaxppo.head import Head, HeadOptions, LoRA, TokenStats, log_probs_from_hidden, log_probs_from_logits
from jaxppo.kl import KL, adaptive_kl_coef, kl_divergence
from jaxppo.losses.distillation import distillation_loss, divergence_from_hidden
from jaxppo.losses.mtp import mtp_loss, mtp_normalizers, shift_targets
from jaxppo.losses.policy import policy_loss, policy_loss_from_hidden
from jaxppo.losses.sft import sft_loss, sft_loss_from_hidden
from jaxppo.losses.value import value_loss
from jaxppo.metrics import Metric
from jaxppo.mismatch import mismatch_metrics
from jaxppo.nucleus import nucleus_mask, pack_nucleus_ids
from jaxppo.off_policy import OffPolicyConfig, Rejection
from jaxppo.policy_losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GPG,
    GSPO,
    PPO,
    SAPO,
    ClipCov,
    KLCov,
    PolicyLoss,
    Reinforce,
)
from jaxppo.samples import Sample
from jaxppo.staleness import proximal_log_probs, staleness_metrics, staleness_weights

__version__ = _version("jaxppo")

__all__ = [
    "CISPO",
    "DPPO",
    "DRO",
    "GMPO",
    "GPG",
    "GSPO",
    "KL",
    "PPO",
    "SAPO",
    "ClipCov",
    "Head",
    "HeadOptions",
    "KLCov",
    "LoRA",
    "Metric",
    "Normalizer",
    "OffPolicyConfig",
    "Packed",
    "ParallelMesh",
    "PolicyLoss",
    "PolicyLossConfig",
    "Reinforce",
    "Rejection",
    "RolloutBatch",
    "Sample",
    "Segments",
    "ShardAxes",
    "TokenStats",
    "__version__",
    "accumulate_gradients",
    "adaptive_kl_coef",
    "advantages",
    "audit",
    "compute_log_probs",
    "covariance_mask",
    "distillation_loss",
    "divergence_from_hidden",
    "kl_divergence",
    "log_probs_from_hidden",
    "log_probs_from_logits",
    "make_parallel_mesh",
    "metrics",
    "mismatch_metrics",
    "mtp_loss",
    "mtp_normalizers",
    "nucleus_mask",
    "pack",
    "pack_nucleus_ids",
    "policy_loss",
    "policy_loss_from_hidden",
    "policy_losses",
    "presets",
    "proximal_log_probs",
    "redistribute",
    "scan_affine",
    "segment_sum",
    "sft_loss",
    "sft_loss_from_hidden",
    "shift_left",
    "shift_targets",
    "staleness_metrics",
    "staleness_weights",
    "unpack",
    "value_loss",
]
