"""Log-probs of targets and entropies, from logits or from hidden states, with the vocabulary sharded or not."""

from jaxppo.head.api import HeadOptions, log_probs_from_hidden
from jaxppo.head.from_logits import log_probs_from_logits
from jaxppo.head.head import Head, LoRA
from jaxppo.head.stats import TokenStats

__all__ = ["Head", "HeadOptions", "LoRA", "TokenStats", "log_probs_from_hidden", "log_probs_from_logits"]
