"""Token log-probability on plain PyTorch operators: any device, rows chunked by a byte budget, no graph inside.

Same definitions as the C kernels (``csrc/kernels``): with m the maximum of a row, S the sum of exp(x - m) and W the sum of
(x - m) exp(x - m), ``logp_k = (x[y_k] - m) - log S`` and ``entropy = log S - W / S``. S is kept as S - 1, the sum without the
maximum's own term, which keeps all digits of log S for a peaked row.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from memlean import _env

STATISTICS = 3  # per row: m, S - 1, W / S


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of arithmetic and results for logits of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _lowest(dtype: torch.dtype) -> float:
    """Where x - m is clamped: exp is 0 there, and so is its product with x - m, which -inf would make NaN."""
    return -760.0 if dtype == torch.float64 else -110.0


def _row_chunks(logits: Tensor, rows: int) -> Iterator[tuple[int, Tensor]]:
    """(first row, ``[<= rows, vocab]`` view) over all leading dimensions, without a copy for any strides."""
    if logits.numel() == 0:
        return
    try:
        flat = logits.view(-1, logits.shape[-1])
    except RuntimeError:  # leading dimensions that no single stride describes
        rows_each = logits[0].numel() // logits.shape[-1]
        for i, part in enumerate(logits.unbind(0)):
            for first, chunk in _row_chunks(part, rows):
                yield i * rows_each + first, chunk
        return
    for first in range(0, flat.shape[0], rows):
        yield first, flat[first : first + rows]


def _rows_per_chunk(logits: Tensor, real: torch.dtype, return_entropy: bool, chunk_bytes: int) -> int:
    budget = chunk_bytes or _env.chunk_bytes(return_entropy)
    return max(1, budget // (logits.shape[-1] * real.itemsize))


def check_index(index: Tensor, vocab: int) -> None:
    """IndexError for the first index outside [0, vocab); only where looking at the values costs no synchronisation."""
    if index.device.type != "cpu" or index.numel() == 0:
        return
    bad = (index < 0) | (index >= vocab)
    if not bad.any():
        return
    position = tuple(bad.nonzero()[0].tolist())
    value = index[position].item()
    where = f"index[{', '.join(map(str, position))}]" if position else "index"
    hint = "; -100 marks ignored labels: replace it by a valid token and mask the result" if value == -100 else ""
    raise IndexError(f"memlean: {where} is {value}, expected 0 <= index < {vocab} (the vocabulary){hint}")


@torch.no_grad()
def token_logprob_forward(
    logits: Tensor, index: Tensor, return_entropy: bool, chunk_bytes: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    vocab, real = logits.shape[-1], real_dtype(logits.dtype)
    check_index(index, vocab)
    rows = logits.shape[:-1]
    logp = logits.new_empty(index.shape, dtype=real)
    entropy = logits.new_empty(rows if return_entropy else (0,), dtype=real)
    statistics = logits.new_empty((*rows, STATISTICS), dtype=real)
    if logits.numel() == 0:
        return logp, entropy, statistics
    index_rows, flat_statistics = index.reshape(rows.numel(), -1), statistics.view(-1, STATISTICS)
    flat_logp, flat_entropy = logp.view(index_rows.shape), entropy.view(-1)
    for first, chunk in _row_chunks(logits, _rows_per_chunk(logits, real, return_entropy, chunk_bytes)):
        part = slice(first, first + chunk.shape[0])
        # On other devices a bad index gives NaN instead of an exception, which would need a synchronisation.
        chosen = index_rows[part].clamp(0, vocab - 1)
        x = chunk.to(real, copy=True, memory_format=torch.contiguous_format)
        top, where_top = x.max(-1, keepdim=True)
        distance = x.gather(-1, chosen) - top
        x.sub_(top)
        mean_shift = torch.zeros_like(top)
        if return_entropy:
            x.clamp_(min=_lowest(real))
            e = x.exp()
            shifted = x.mul_(e).sum(-1, keepdim=True)
            x = e
        else:
            x.exp_()
        # The maximum's own term is 1. Only a finite maximum makes a distribution.
        excess = x.scatter_(-1, where_top, 0.0).sum(-1, keepdim=True)
        excess = torch.where(top.isfinite(), excess, torch.nan)
        log_sum = excess.log1p()
        flat_logp[part] = torch.where(chosen == index_rows[part], distance - log_sum, torch.nan)
        if return_entropy:
            mean_shift = shifted / (1 + excess)
            flat_entropy[part] = (log_sum - mean_shift).squeeze(-1)
        flat_statistics[part] = torch.cat((top, excess, mean_shift), -1)
    return logp, entropy, statistics


@torch.no_grad()
def token_logprob_backward(
    logits: Tensor,
    index: Tensor,
    statistics: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    chunk_bytes: int = 0,
) -> Tensor:
    vocab, real = logits.shape[-1], real_dtype(logits.dtype)
    check_index(index, vocab)
    rows = logits.shape[:-1].numel()
    grad_logits = logits.new_empty(logits.shape)
    if logits.numel() == 0:
        return grad_logits
    index_rows, flat_statistics = index.reshape(rows, -1), statistics.reshape(rows, STATISTICS)
    flat_logp = None if grad_logp is None else grad_logp.reshape(index_rows.shape)
    flat_entropy = None if grad_entropy is None else grad_entropy.reshape(rows, 1)
    flat_gradient = grad_logits.view(rows, vocab)
    for first, chunk in _row_chunks(logits, _rows_per_chunk(logits, real, grad_entropy is not None, chunk_bytes)):
        part = slice(first, first + chunk.shape[0])
        chosen = index_rows[part].clamp(0, vocab - 1)
        top, excess, mean_shift = flat_statistics[part].split(1, -1)
        g = statistics.new_zeros(chosen.shape) if flat_logp is None else flat_logp[part]
        h = statistics.new_zeros(top.shape) if flat_entropy is None else flat_entropy[part]
        total = g.sum(-1, keepdim=True)
        unused = (g == 0).all(-1, keepdim=True) & (h == 0)

        x = chunk.to(real, copy=True, memory_format=torch.contiguous_format).sub_(top).clamp_(min=_lowest(real))
        t = x.gather(-1, chosen)
        inverse_sum = 1 / (1 + excess)
        factor = inverse_sum * (h * mean_shift - total)
        if flat_entropy is None:
            x.exp_().mul_(factor)
        else:
            e = x.exp()
            x.mul_(-inverse_sum * h).add_(factor).mul_(e)
        # The chosen columns anew: near p = 1, 1 - p loses all digits where -expm1(logp) keeps them. Candidates at one
        # column write the same sum, so no accumulating scatter is needed.
        own = sum((chosen == chosen[:, k : k + 1]) * g[:, k : k + 1] for k in range(chosen.shape[1]))
        logp = t - excess.log1p()
        x.scatter_(-1, chosen, -logp.expm1() * own - logp.exp() * ((total - own) + h * (t - mean_shift)))
        flat_gradient[part] = x.masked_fill_(unused, 0.0)
    return grad_logits


def differentiable_gradient(
    logits: Tensor, index: Tensor, grad_logp: Tensor | None, grad_entropy: Tensor | None
) -> Tensor:
    """The same gradient as an expression that autograd can differentiate again; keeps tensors of the logits' size."""
    one_each = index.dim() == logits.dim() - 1
    chosen = index.unsqueeze(-1) if one_each else index
    g = grad_logp if grad_logp is None or not one_each else grad_logp.unsqueeze(-1)
    h = None if grad_entropy is None else grad_entropy.unsqueeze(-1)
    # Rows without an upstream gradient get exact zeros, also where they hold a NaN. Elsewhere 0 times a number is 0
    # already, and keeps the derivative with respect to the upstream gradient.
    unused = (torch.cat([upstream for upstream in (g, h) if upstream is not None], -1) == 0).all(-1, keepdim=True)
    x = logits.to(real_dtype(logits.dtype))
    log_p = x.masked_fill(unused & x.log_softmax(-1).isnan().any(-1, keepdim=True), 0.0).log_softmax(-1)
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    if g is not None:
        gradient = gradient.scatter_add(-1, chosen, g) - p * g.sum(-1, keepdim=True)
    if h is not None:
        log_p = log_p.masked_fill(log_p.isneginf(), 0.0)  # 0 log 0 = 0
        entropy = -(p * log_p).sum(-1, keepdim=True)
        gradient = gradient - h * p * (log_p + entropy)
    return gradient.to(logits.dtype)
