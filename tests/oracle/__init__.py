"""An independent reference: every formula again, in float64 numpy, sharing no code with the
package.

Nothing here knows of packing, rows, layouts, meshes, micro-batches, blocks or float32: a step is a
list of samples, and a sum over tokens is a sum over tokens. Formulas are written from the papers
that their docstrings name. What each gradient holds constant (`held`) is written out, so that
finite differences can check every gradient.

    sample = OracleSample([0, 1, 1], log_probs=x, old_log_probs=y, advantages=a, rollout_id=7)
    loss, by_log_probs, by_entropy, metrics = policy_loss([sample], {"loss": {"name": "ppo", "clip_high": 0.28}})

Configs are plain dicts, see `step.CONFIG` and `off_policy.OPTIONS`; hyperparameters are the
arguments of the loss.

    samples         OracleSample; what a token counts for under each aggregation
    head            logits, log-probs, entropy, moments, and their gradients by hidden states and head parameters
    policy_losses   one function a published loss, on the loss tokens of one sequence
    kl              the estimators of the divergence to a reference
    off_policy      importance weights, rejections, veto, sequence masking
    step            policy_loss: all of it together, with gradients and metrics; covariance and its selection
    other_losses    value, SFT, multi-token prediction, distillation, mismatch metrics
    mismatch        two policies at the same tokens, over the vocabulary and from samples
    advantages      token rewards, returns, GAE, whitening, and the estimators over groups
"""

from . import advantages, head, kl, mismatch, off_policy, other_losses, policy_losses, samples, step
from .head import OracleHead
from .samples import OracleSample
from .step import policy_loss, policy_loss_from_hidden

__all__ = [
    "OracleHead",
    "OracleSample",
    "advantages",
    "head",
    "kl",
    "mismatch",
    "off_policy",
    "other_losses",
    "policy_loss",
    "policy_loss_from_hidden",
    "policy_losses",
    "samples",
    "step",
]
