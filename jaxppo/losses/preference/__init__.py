"""Preference losses: they learn from responses that people or a judge found better or worse,
without sampling.

Two samples with one `group_id` are a pair, wherever they lie in the step; the one with the higher
`reward` is chosen.
"""

from jaxppo.losses.preference.base import PairLoss, PreferenceLoss, Responses
from jaxppo.losses.preference.dpo import AOT, DPO, IPO, ORPO, BradleyTerry, SimPO
from jaxppo.losses.preference.kto import KTO, kto_reference_point
from jaxppo.losses.preference.samples import (
    micro_batches_of_pairs,
    mismatched_samples,
    samples_of_pairs,
)

__all__ = [
    "AOT",
    "DPO",
    "IPO",
    "KTO",
    "ORPO",
    "BradleyTerry",
    "PairLoss",
    "PreferenceLoss",
    "Responses",
    "SimPO",
]
__all__ += [
    "kto_reference_point",
    "micro_batches_of_pairs",
    "mismatched_samples",
    "samples_of_pairs",
]
