"""The loss layer of LLM reinforcement learning: from hidden states or logits to loss, gradients and metrics on any mesh."""

from jaxppo import advantages
from jaxppo.batch import RolloutBatch

__all__ = ["RolloutBatch", "advantages"]
