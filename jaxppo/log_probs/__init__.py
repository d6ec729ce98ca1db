"""Log-probs of targets and entropies, from logits or from hidden states, with the vocabulary sharded or not."""

from jaxppo.log_probs.from_hidden import log_probs_from_hidden
from jaxppo.log_probs.from_logits import log_probs_from_logits
from jaxppo.log_probs.stats import TokenStats

__all__ = ["TokenStats", "log_probs_from_hidden", "log_probs_from_logits"]
