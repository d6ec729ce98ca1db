"""Losses of a head's statistics or of hidden states.

A loss is a value; two functions compute what it stands for.
"""

from typing import TYPE_CHECKING

from jaxppo.base.late import late

if TYPE_CHECKING:
    from jaxppo.losses.doors import loss_from_hidden, loss_from_stats
    from jaxppo.losses.explain import explain_tokens
    from jaxppo.losses.parts import Part, by_row
    from jaxppo.losses.policy_tokens import ReferenceKL
    from jaxppo.losses.sft import SFT
    from jaxppo.losses.token_loss import Asks, TokenLoss
    from jaxppo.losses.top_k_divergence import TopKDistillation
    from jaxppo.losses.value import Value
else:
    __getattr__ = late(  # the same imports, each run when its name is first used
        __name__,
        {
            "jaxppo.losses.doors": ["loss_from_hidden", "loss_from_stats"],
            "jaxppo.losses.explain": ["explain_tokens"],
            "jaxppo.losses.parts": ["Part", "by_row"],
            "jaxppo.losses.policy_tokens": ["ReferenceKL"],
            "jaxppo.losses.sft": ["SFT"],
            "jaxppo.losses.token_loss": ["Asks", "TokenLoss"],
            "jaxppo.losses.top_k_divergence": ["TopKDistillation"],
            "jaxppo.losses.value": ["Value"],
        },
    )

__all__ = ["SFT", "Asks", "Part", "ReferenceKL", "TokenLoss", "TopKDistillation", "Value"]
__all__ += ["by_row", "explain_tokens", "loss_from_hidden", "loss_from_stats"]
