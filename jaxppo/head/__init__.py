"""Log-probs of targets and entropies, from logits or from hidden states, with the vocabulary sharded or not."""

from jaxppo.head.api import log_probs_from_hidden
from jaxppo.head.head import Head, LoRA
from jaxppo.head.logits import log_probs_from_logits
from jaxppo.head.prepare import HeadOptions
from jaxppo.head.types import TokenStats

__all__ = ["Head", "HeadOptions", "LoRA", "TokenStats", "log_probs_from_hidden", "log_probs_from_logits"]
