"""Per-token log-probability and entropy from logits, without keeping anything the size of the vocabulary."""

from memlean.functional import selective_log_softmax

__version__ = "0.1.0"

__all__ = ["__version__", "selective_log_softmax"]
