"""Losses of a head's statistics or of hidden states. A loss is a value; two functions compute what it stands for."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxppo.losses.doors import loss_from_hidden, loss_from_stats
    from jaxppo.losses.parts import Part
    from jaxppo.losses.reference_kl import ReferenceKL
    from jaxppo.losses.score_centering import ScoreCentering
    from jaxppo.losses.sft import SFT
    from jaxppo.losses.token_loss import Asks, TokenLoss
    from jaxppo.losses.top_k_distillation import TopKDistillation
    from jaxppo.losses.value import Value
else:
    # each import is run when its name is first used, as in `jaxppo`
    _MODULE_OF = {
        "SFT": "sft",
        "Asks": "token_loss",
        "Part": "parts",
        "ReferenceKL": "reference_kl",
        "ScoreCentering": "score_centering",
        "TokenLoss": "token_loss",
        "TopKDistillation": "top_k_distillation",
        "Value": "value",
        "loss_from_hidden": "doors",
        "loss_from_stats": "doors",
    }

    def __getattr__(name: str) -> Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = found
        return found


__all__ = [
    "SFT",
    "Asks",
    "Part",
    "ReferenceKL",
    "ScoreCentering",
    "TokenLoss",
    "TopKDistillation",
    "Value",
    "loss_from_hidden",
    "loss_from_stats",
]
