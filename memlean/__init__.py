"""Per-token log-probability and entropy from logits, without keeping anything the size of the vocabulary."""

from memlean.functional import TokenStats, entropy_from_logits, selective_log_softmax, token_stats
from memlean.integrations._patch import PatchError, PatchReport, is_patched, patch, patched, report, unpatch

__version__ = "0.1.0"

__all__ = [
    "PatchError",
    "PatchReport",
    "TokenStats",
    "__version__",
    "entropy_from_logits",
    "is_patched",
    "patch",
    "patched",
    "report",
    "selective_log_softmax",
    "token_stats",
    "unpatch",
]
