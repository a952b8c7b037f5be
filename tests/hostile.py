"""Rows of logits that break careless arithmetic, by name."""

import math

import torch
from torch import Tensor

FLT_MAX = torch.finfo(torch.float32).max
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

# Around one chunk of 32 columns, a block of 2048 and a segment of 32768; then three segments, the last one short.
VOCABS = [1, 2, 3, 31, 32, 33, 70, 2047, 2048, 2049, 32768, 32769, 70_001]


def _noise(vocab: int, scale: float = 3.0) -> Tensor:
    return torch.randn(vocab, dtype=torch.float64) * scale


def _with(row: Tensor, where, value: float) -> Tensor:
    row[where] = value
    return row


ROWS = {
    "noise": lambda v: _noise(v),
    "flat": lambda v: torch.zeros(v),
    "ascending": lambda v: torch.linspace(-50, 50, v),
    "descending": lambda v: torch.linspace(50, -50, v),
    "steep": lambda v: torch.arange(v) * -1.0,
    "peaked first": lambda v: _with(_noise(v), 0, 60.0),
    "peaked last": lambda v: _with(_noise(v), -1, 110.0),
    "nearly certain": lambda v: _with(_noise(v, 0.5), v // 2, 14.0 + math.log(v)),
    "two maxima": lambda v: _with(_noise(v), [0, -1], 40.0),
    "offset 1e4": lambda v: _noise(v) + 1e4,
    "offset -1e4": lambda v: _noise(v) - 1e4,
    "wide": lambda v: _noise(v, 1e4),
    "-inf block": lambda v: _with(_noise(v), slice(v // 3, 2 * v // 3), -math.inf),
    "-inf first": lambda v: _with(_noise(v), slice(0, v // 2), -math.inf),
    "-inf but last": lambda v: _with(_noise(v), slice(0, v - 1), -math.inf),
    "mask -1e4": lambda v: _with(_noise(v), slice(1, None, 2), -1e4),
    "mask -1e30": lambda v: _with(_noise(v), slice(1, None, 2), -1e30),
    "mask -FLT_MAX": lambda v: _with(_noise(v), slice(1, None, 2), -FLT_MAX),
    "all -FLT_MAX": lambda v: torch.full((v,), -FLT_MAX),
    "both ends": lambda v: _with(torch.full((v,), -FLT_MAX), 0, FLT_MAX),
    "tiny": lambda v: _noise(v, 1e-40),
}


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, with its largest finite value, not inf, for what is beyond: +inf is another test."""
    return x.where(x.isinf(), x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)).to(dtype)


def row(name: str, vocab: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(vocab)
    return narrowed(ROWS[name](vocab).double(), dtype)


def rows(vocab: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([row(name, vocab, dtype) for name in ROWS])


def telling_index(logits: Tensor) -> Tensor:
    """Candidates ``[rows, 5]``: first, last and a middle token, the most likely and the least likely one."""
    vocab = logits.shape[-1]
    fixed = torch.tensor([0, vocab - 1, vocab // 2]).expand(*logits.shape[:-1], 3)
    return torch.cat([fixed, logits.argmax(-1, keepdim=True), logits.argmin(-1, keepdim=True)], -1)
