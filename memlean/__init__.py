"""Per-token log-probability and entropy from logits, without keeping anything the size of the vocabulary."""

from memlean.functional import selective_log_softmax
from memlean.integrations._patch import PatchError, PatchReport, is_patched, patch, patched, report, unpatch

__version__ = "0.1.0"

__all__ = [
    "PatchError",
    "PatchReport",
    "__version__",
    "is_patched",
    "patch",
    "patched",
    "report",
    "selective_log_softmax",
    "unpatch",
]
