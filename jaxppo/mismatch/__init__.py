"""Compares sampler and trainer: metrics of a step, and a report from
`python -m jaxppo.mismatch TRAINER SAMPLER`.
"""

from jaxppo.mismatch.metrics import mismatch_metrics, packing_metrics
from jaxppo.mismatch.report import MismatchReport, mismatch_report
from jaxppo.mismatch.tokens import TokenMismatch, token_mismatch

__all__ = [
    "MismatchReport",
    "TokenMismatch",
    "mismatch_metrics",
    "mismatch_report",
    "packing_metrics",
]
__all__ += ["token_mismatch"]
