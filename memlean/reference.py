"""Token log-probability on plain PyTorch operators: any device, rows chunked by a byte budget, no graph inside.

Same definitions as the C kernels (``csrc/kernels``): with m the maximum of a row, S the sum of exp(x - m) and W the sum
of (x - m) exp(x - m), ``logp_k = (x[y_k] - m) - log S`` and ``entropy = log S - W / S`` (x - m divided by the
temperature throughout). S is kept as S - 1, the sum without the
maximum's own term, which keeps all digits of log S for a peaked row.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from memlean import _env

STATISTICS = 3  # per row: m, S - 1, W / S

# The arguments of `_flatten` from temperature on.
_Options = tuple[Tensor | None, Tensor | None, int | None, int, int, Tensor | None, Tensor | None]


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


def check_index(index: Tensor, vocab: int, ignore_index: int | None = None) -> None:
    """IndexError for the first index outside [0, vocab); only where looking at the values costs no synchronisation."""
    if index.device.type != "cpu" or index.numel() == 0:
        return
    bad = (index < 0) | (index >= vocab)
    if ignore_index is not None:
        bad &= index != ignore_index
    if not bad.any():
        return
    position = tuple(bad.nonzero()[0].tolist())
    value = index[position].item()
    where = f"index[{', '.join(map(str, position))}]" if position else "index"
    hint = "; -100 marks ignored labels: pass ignore_index=-100 to mask them" if value == -100 else ""
    raise IndexError(f"memlean: {where} is {value}, expected 0 <= index < {vocab} (the vocabulary){hint}")


def _check_temperature(temperature: Tensor | None) -> None:
    if temperature is None or temperature.device.type != "cpu":
        return
    bad = ~((temperature > 0) & temperature.isfinite())
    if bad.any():
        position = tuple(bad.nonzero()[0].tolist())
        where = f"temperature[{', '.join(map(str, position))}]" if position else "temperature"
        raise ValueError(f"memlean: {where} must be finite and positive, got {temperature[position].item():g}")


def _check_kept(ids: Tensor, offsets: Tensor, vocab: int) -> None:
    if ids.device.type != "cpu":
        return
    count = ids.numel()
    wrong = (offsets < 0) | (offsets > count) | (offsets.diff(prepend=offsets[:1]) < 0)
    wrong[0] = offsets[0] != 0
    wrong[-1] |= offsets[-1] != count
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise ValueError(
            f"memlean: keep: offsets[{i}] is {offsets[i]}, expected offsets that rise from 0 to {count} "
            "(the number of ids)"
        )
    wrong = (ids < 0) | (ids >= vocab)
    if wrong.any():
        i = int(wrong.nonzero()[0])
        raise IndexError(f"memlean: keep: ids[{i}] is {ids[i]}, expected 0 <= id < {vocab} (the vocabulary)")


def _kept_mask(shape: torch.Size, keep: Tensor, offsets: Tensor | None, first: int, rows: int) -> Tensor:
    """The kept columns of the rows [first, first + rows): bool ``[rows, vocab]``, a tensor of its own."""
    vocab = shape[-1]
    if offsets is None:
        where = torch.arange(first, first + rows, device=keep.device)
        return keep.unsqueeze(0)[torch.unravel_index(where, (1, *shape[:-1]))]
    # All ids, those of other rows into a last element that is cut off: their place would be a synchronisation.
    row = torch.searchsorted(offsets, torch.arange(keep.numel(), device=keep.device), right=True) - 1 - first
    here = (row >= 0) & (row < rows) & (keep >= 0) & (keep < vocab)
    mask = keep.new_zeros(rows * vocab + 1, dtype=torch.bool)
    mask.index_fill_(0, torch.where(here, row * vocab + keep, rows * vocab), True)
    return mask[:-1].view(rows, vocab)


@dataclass
class _Rows:
    """The row-wise arguments of both passes, flattened to [rows, ...]; `part` cuts a chunk out of them."""

    shape: torch.Size  # that of logits
    first: int  # the first row here among those of `shape`
    index: Tensor  # [rows, K], in this shard's columns
    known: Tensor  # [rows, K], tokens that this shard holds
    ignored: Tensor | None  # [rows, K]
    skipped: Tensor | None  # [rows, 1]
    inverse_temperature: Tensor | None  # [rows, 1] or [1, 1]
    keep: Tensor | None  # of all rows, as the operators take it
    keep_offsets: Tensor | None

    def part(self, first: int, rows: int) -> "_Rows":
        cut = slice(first, first + rows)
        inverse = self.inverse_temperature
        return replace(
            self,
            first=self.first + first,
            index=self.index[cut],
            known=self.known[cut],
            ignored=None if self.ignored is None else self.ignored[cut],
            skipped=None if self.skipped is None else self.skipped[cut],
            inverse_temperature=inverse if inverse is None or inverse.shape[0] == 1 else inverse[cut],
        )

    def counted(self) -> Tensor:
        """[rows, K]: the tokens that have a log-probability and a gradient here."""
        return self.known if self.ignored is None else self.known & ~self.ignored

    def drop_columns(self, x: Tensor) -> Tensor:
        """-inf, in place, in the columns of ``x`` that are neither kept nor chosen."""
        if self.keep is None:
            return x
        kept = _kept_mask(self.shape, self.keep, self.keep_offsets, self.first, x.shape[0])
        counted = self.counted()
        for k in range(self.index.shape[1]):
            column = self.index[:, k : k + 1]
            kept.scatter_(-1, column, kept.gather(-1, column) | counted[:, k : k + 1])
        return x.masked_fill_(kept.logical_not_(), -torch.inf)


def _flatten(
    logits: Tensor,
    index: Tensor,
    temperature: Tensor | None,
    row_mask: Tensor | None,
    ignore_index: int | None,
    first_token: int = 0,
    index_limit: int = 0,
    keep: Tensor | None = None,
    keep_offsets: Tensor | None = None,
) -> _Rows:
    vocab, rows = logits.shape[-1], logits.shape[:-1].numel()
    limit = index_limit or vocab
    check_index(index, limit, ignore_index)
    _check_temperature(temperature)
    if keep is not None and keep_offsets is not None:
        _check_kept(keep, keep_offsets, vocab)
    tokens = index.reshape(rows, -1) if index.numel() else index.reshape(rows, 0 if index.dim() == logits.dim() else 1)
    columns = tokens - first_token
    ignored = None if ignore_index is None else tokens == ignore_index
    skipped = None if row_mask is None else ~row_mask.reshape(rows, 1)
    if ignored is not None and tokens.shape[1] > 0:
        all_ignored = ignored.all(-1, keepdim=True)
        skipped = all_ignored if skipped is None else skipped | all_ignored
    # On other devices a bad index or temperature gives NaN instead of an exception, which would need a synchronisation.
    inverse = None
    if temperature is not None:
        valid = (temperature > 0) & temperature.isfinite()
        # At most the largest finite number, so that 0 times it is 0.
        inverse = (1 / temperature).clamp(max=torch.finfo(temperature.dtype).max)
        inverse = torch.where(valid, inverse, torch.nan).reshape(-1, 1)
    known = (columns >= 0) & (columns < vocab)
    columns = columns.clamp(0, vocab - 1)
    return _Rows(logits.shape, 0, columns, known, ignored, skipped, inverse, keep, keep_offsets)


def _zero_where(skipped: Tensor | None) -> Callable[[Tensor], Tensor]:
    return lambda t: t if skipped is None else t.masked_fill(skipped, 0)


def _forward(
    logits: Tensor, index: Tensor, return_entropy: bool, extras: bool, options: _Options, chunk_bytes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    vocab, real = logits.shape[-1], real_dtype(logits.dtype)
    flat = _flatten(logits, index, *options)
    rows = logits.shape[:-1]
    logp = logits.new_empty(index.shape, dtype=real)
    entropy = logits.new_empty(rows if return_entropy else (0,), dtype=real)
    statistics = logits.new_empty((*rows, STATISTICS), dtype=real)
    sum_p2 = logits.new_empty(rows if extras else (0,), dtype=real)
    argmax = logits.new_empty(rows if extras else (0,), dtype=torch.int64)
    if logits.numel() == 0:
        return logp, entropy, statistics, sum_p2, argmax
    flat_statistics = statistics.view(-1, STATISTICS)
    flat_logp, flat_entropy = logp.view(flat.index.shape), entropy.view(-1, 1)
    for first, chunk in _row_chunks(logits, _rows_per_chunk(logits, real, return_entropy, chunk_bytes)):
        part = slice(first, first + chunk.shape[0])
        row = flat.part(first, chunk.shape[0])
        x = row.drop_columns(chunk.to(real, copy=True, memory_format=torch.contiguous_format))
        top, where_top = x.max(-1, keepdim=True)
        chosen = x.gather(-1, row.index)
        x.sub_(top)
        if row.inverse_temperature is None:
            distance = chosen - top
        else:
            # By halves: the temperature may bring a difference beyond the largest number back.
            distance = (chosen * 0.5 - top * 0.5) * row.inverse_temperature * 2
            x.mul_(row.inverse_temperature)
        mean_shift = torch.zeros_like(top)
        if return_entropy:
            x.clamp_(min=_lowest(real))
            e = x.exp()
            shifted = x.mul_(e).sum(-1, keepdim=True)
            x = e
        else:
            x.exp_()
        # The maximum's own term is 1. Only a finite maximum makes a distribution; S is 0 for nothing but -inf.
        excess = x.scatter_(-1, where_top, 0.0).sum(-1, keepdim=True)
        nothing = torch.where(top.isneginf(), -1.0, torch.nan)
        excess = torch.where(top.isfinite(), excess, nothing)
        valid = excess >= 0
        log_sum = torch.where(valid, excess, torch.nan).log1p()
        result = torch.where(row.known, distance - log_sum, torch.nan)
        if row.ignored is not None:
            result = result.masked_fill(row.ignored, 0.0)
        zero = _zero_where(row.skipped)
        flat_logp[part] = zero(result)
        if return_entropy:
            mean_shift = shifted / (1 + excess)
            flat_entropy[part] = zero((log_sum - mean_shift).clamp(max=math.log(vocab)))
        if extras:
            squares = 1 + x.square_().sum(-1, keepdim=True)
            sum_p2.view(-1, 1)[part] = zero(torch.where(valid, squares / (1 + excess).square(), torch.nan))
            nowhere = ~valid if row.skipped is None else ~valid | row.skipped
            argmax.view(-1, 1)[part] = where_top.masked_fill(nowhere, -1)
        flat_statistics[part] = zero(torch.cat((top, excess, mean_shift), -1))
    return logp, entropy, statistics, sum_p2, argmax


@torch.no_grad()
def token_logprob_forward(
    logits: Tensor,
    index: Tensor,
    return_entropy: bool,
    temperature: Tensor | None = None,
    row_mask: Tensor | None = None,
    ignore_index: int | None = None,
    first_token: int = 0,
    index_limit: int = 0,
    keep: Tensor | None = None,
    keep_offsets: Tensor | None = None,
    chunk_bytes: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (temperature, row_mask, ignore_index, first_token, index_limit, keep, keep_offsets)
    return _forward(logits, index, return_entropy, False, options, chunk_bytes)[:3]


@torch.no_grad()
def token_stats_forward(
    logits: Tensor,
    index: Tensor,
    return_entropy: bool,
    extras: bool,
    temperature: Tensor | None = None,
    row_mask: Tensor | None = None,
    ignore_index: int | None = None,
    chunk_bytes: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = (temperature, row_mask, ignore_index, 0, 0, None, None)
    logp, entropy, statistics, sum_p2, argmax = _forward(logits, index, return_entropy, extras, options, chunk_bytes)
    top, excess, _ = statistics.unbind(-1)
    highest = torch.where(excess.isnan(), torch.nan, top)
    scaled = highest if temperature is None else highest / temperature.expand(top.shape)
    return logp, entropy, statistics, scaled + excess.log1p(), highest, sum_p2, argmax


def _backward(
    logits: Tensor,
    index: Tensor,
    statistics: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    options: _Options,
    chunk_bytes: int,
    destination: Tensor | None,
) -> None:
    """Writes the gradient chunk by chunk: into `destination` ([rows, vocab]), or over the logits themselves if None."""
    real = real_dtype(logits.dtype)
    flat = _flatten(logits, index, *options)
    if logits.numel() == 0:
        return
    rows = flat.index.shape[0]
    flat_statistics = statistics.reshape(rows, STATISTICS)
    flat_logp = None if grad_logp is None else grad_logp.reshape(flat.index.shape)
    flat_entropy = None if grad_entropy is None else grad_entropy.reshape(rows, 1)
    for first, chunk in _row_chunks(logits, _rows_per_chunk(logits, real, grad_entropy is not None, chunk_bytes)):
        part = slice(first, first + chunk.shape[0])
        row = flat.part(first, chunk.shape[0])
        top, excess, mean_shift = flat_statistics[part].split(1, -1)
        g = statistics.new_zeros(row.index.shape) if flat_logp is None else flat_logp[part]
        h = statistics.new_zeros(top.shape) if flat_entropy is None else flat_entropy[part]
        if row.ignored is not None:
            g = g.masked_fill(row.ignored, 0.0)
        total = g.sum(-1, keepdim=True)
        unused = (g == 0).all(-1, keepdim=True) & (h == 0)
        if row.skipped is not None:
            unused = unused | row.skipped

        x = row.drop_columns(chunk.to(real, copy=True, memory_format=torch.contiguous_format)).sub_(top)
        if row.inverse_temperature is not None:
            x.mul_(row.inverse_temperature)
        x.clamp_(min=_lowest(real))
        t = x.gather(-1, row.index)
        inverse_sum = torch.where(excess >= 0, 1 / (1 + excess), torch.nan)
        factor = inverse_sum * (h * mean_shift - total)
        if flat_entropy is None:
            x.exp_().mul_(factor)
        else:
            e = x.exp()
            x.mul_(-inverse_sum * h).add_(factor).mul_(e)
        # The chosen columns anew: near p = 1, 1 - p loses all digits where -expm1(logp) keeps them. Candidates at one
        # column write the same sum, so no accumulating scatter is needed; a token outside the shard, or ignored, writes
        # what its column gets without it.
        here = row.counted()
        own, others = torch.zeros_like(t), torch.zeros_like(t)
        for k in range(row.index.shape[1]):
            same = (row.index == row.index[:, k : k + 1]) & here[:, k : k + 1]
            own += same * g[:, k : k + 1]
            others += ~same * g[:, k : k + 1]  # total - own would keep the rounding of both sums
        logp = t - excess.log1p()
        x.scatter_(-1, row.index, -logp.expm1() * own - logp.exp() * (others + h * (t - mean_shift)))
        if row.inverse_temperature is not None:
            x.mul_(row.inverse_temperature)
        (chunk if destination is None else destination[part]).copy_(x.masked_fill_(unused, 0.0))


@torch.no_grad()
def token_logprob_backward(
    logits: Tensor,
    index: Tensor,
    statistics: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: Tensor | None = None,
    row_mask: Tensor | None = None,
    ignore_index: int | None = None,
    first_token: int = 0,
    index_limit: int = 0,
    keep: Tensor | None = None,
    keep_offsets: Tensor | None = None,
    chunk_bytes: int = 0,
) -> Tensor:
    gradient = logits.new_empty(logits.shape)
    options = (temperature, row_mask, ignore_index, first_token, index_limit, keep, keep_offsets)
    destination = gradient.view(logits.shape[:-1].numel(), logits.shape[-1])
    _backward(logits, index, statistics, grad_logp, grad_entropy, options, chunk_bytes, destination)
    return gradient


@torch.no_grad()
def token_logprob_backward_(
    logits: Tensor,
    index: Tensor,
    statistics: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: Tensor | None = None,
    row_mask: Tensor | None = None,
    ignore_index: int | None = None,
    first_token: int = 0,
    index_limit: int = 0,
    keep: Tensor | None = None,
    keep_offsets: Tensor | None = None,
) -> None:
    options = (temperature, row_mask, ignore_index, first_token, index_limit, keep, keep_offsets)
    _backward(logits, index, statistics, grad_logp, grad_entropy, options, 0, None)


def differentiable_gradient(
    logits: Tensor,
    index: Tensor,
    grad_logp: Tensor | None,
    grad_entropy: Tensor | None,
    temperature: Tensor | None = None,
    row_mask: Tensor | None = None,
    ignore_index: int | None = None,
    keep: Tensor | None = None,
    keep_offsets: Tensor | None = None,
    grad_logsumexp: Tensor | None = None,
) -> Tensor:
    """The same gradient as an expression that autograd can differentiate again; keeps tensors of the logits' size."""
    one_each = index.dim() == logits.dim() - 1
    chosen = index.unsqueeze(-1) if one_each else index
    g = grad_logp if grad_logp is None or not one_each else grad_logp.unsqueeze(-1)
    h, z = (None if grad is None else grad.unsqueeze(-1) for grad in (grad_entropy, grad_logsumexp))
    if ignore_index is not None:
        ignored = chosen == ignore_index
        chosen = chosen.masked_fill(ignored, 0)
        g = None if g is None else g.masked_fill(ignored, 0.0)
        if chosen.shape[-1] > 0:
            read = ~ignored.all(-1)
            row_mask = read if row_mask is None else row_mask & read
    if row_mask is not None:
        g, h, z = (None if grad is None else grad.masked_fill(~row_mask.unsqueeze(-1), 0.0) for grad in (g, h, z))
    # Rows without an upstream gradient get exact zeros, also where they hold a NaN. Elsewhere 0 times a number is 0
    # already, and keeps the derivative with respect to the upstream gradient.
    unused = (torch.cat([upstream for upstream in (g, h, z) if upstream is not None], -1) == 0).all(-1, keepdim=True)
    x = logits.to(real_dtype(logits.dtype))
    if keep is not None:
        rows = _flatten(logits, index, None, None, ignore_index, keep=keep, keep_offsets=keep_offsets)
        dropped = rows.drop_columns(x.new_zeros(rows.index.shape[0], x.shape[-1])).view(x.shape).isneginf()
        x = x.masked_fill(dropped, -torch.inf)
    inverse = 1.0 if temperature is None else (1 / temperature.unsqueeze(-1)).clamp(max=torch.finfo(x.dtype).max)
    x = x.masked_fill(unused & x.log_softmax(-1).isnan().any(-1, keepdim=True), 0.0)
    # As in the lean passes: no quotient of a low temperature overflows, and p near 1 keeps the digits of 1 - p.
    where_top = x.argmax(-1, keepdim=True)
    shifted = (x - x.gather(-1, where_top)) * inverse
    log_p = shifted - shifted.exp().scatter(-1, where_top, 0.0).sum(-1, keepdim=True).log1p()
    p = log_p.exp()
    gradient = torch.zeros_like(p)
    if g is not None:
        own = gradient.scatter_add(-1, chosen, g)
        gradient = -log_p.expm1() * own - p * (g.sum(-1, keepdim=True) - own)
    if h is not None:
        log_p = log_p.masked_fill(log_p.isneginf(), 0.0)  # 0 log 0 = 0
        entropy = -(p * log_p).sum(-1, keepdim=True)
        gradient = gradient - h * p * (log_p + entropy)
    if z is not None:
        gradient = gradient + z * p
    return (gradient * inverse).to(logits.dtype)
