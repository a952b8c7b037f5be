"""A vocabulary split over the ranks of a process group: one small collective in forward, none in backward."""

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor

from memlean import _ops, functional, reference

# What a rank says of itself: first token, last token + 1; then what is the same on all: the numbers it sends (gloo
# delivers a shorter message without a complaint), whether entropy is wanted, a checksum of the index.
_HEADER = 5
_SHARED = ("the shape of index", "return_entropy", "index")
_EXACT = 2**24  # whole numbers up to here survive in float32
_ANY_TOKEN = 2**63 - 1  # the index has been checked in forward

# Its name from torch 2.13 on, which warns about the older one.
_all_gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor


class _Keywords(TypedDict, total=False):
    """The options, for the overloads that tell a type checker what is returned."""

    temperature: float | Tensor | None
    row_mask: Tensor | None
    ignore_index: int | None
    vocab_range: tuple[int, int] | None


@overload
def vocab_parallel_selective_log_softmax(
    logits_shard: Tensor,
    index: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    return_entropy: Literal[False] = False,
    **options: Unpack[_Keywords],
) -> Tensor: ...


@overload
def vocab_parallel_selective_log_softmax(
    logits_shard: Tensor,
    index: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    return_entropy: Literal[True],
    **options: Unpack[_Keywords],
) -> tuple[Tensor, Tensor]: ...


@overload
def vocab_parallel_selective_log_softmax(
    logits_shard: Tensor,
    index: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    return_entropy: bool,
    **options: Unpack[_Keywords],
) -> Tensor | tuple[Tensor, Tensor]: ...


def vocab_parallel_selective_log_softmax(
    logits_shard: Tensor,
    index: Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    return_entropy: bool = False,
    temperature: float | Tensor | None = None,
    row_mask: Tensor | None = None,
    ignore_index: int | None = None,
    vocab_range: tuple[int, int] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``memlean.selective_log_softmax`` where each rank holds some columns of the logits.

    Every rank of ``group`` calls it with its own shard and otherwise equal arguments, and gets equal results, bit for
    bit.

    Equivalent to::

        shards = [torch.empty_like(logits_shard) for _ in range(dist.get_world_size(group))]
        dist.all_gather(shards, logits_shard, group)
        logits = torch.cat(shards, -1)
        logps, entropy = memlean.selective_log_softmax(logits, index, return_entropy=True)

    but differentiable, and with far less to send: each call gathers three numbers a row, and one for each candidate,
    from every rank in a single collective. Backward gives each rank the gradient of its own shard without
    communication, for upstream gradients that are equal on all ranks, as they are where every rank computes the same
    loss. Kept in between are ``logits_shard``, ``index`` and three numbers a row.

    Args:
        logits_shard: ``[..., vocab of this rank]``, float16, bfloat16, float32 or float64, any strides.
        index: the chosen tokens, numbered over the whole vocabulary, ``[...]`` or ``[..., K]``, of any integer dtype.
        group: the ranks that share the vocabulary; None for the default group.
        return_entropy: also return the entropy over the whole vocabulary, which is differentiable.
        temperature, row_mask, ignore_index: as in :func:`memlean.selective_log_softmax`.
        vocab_range: ``(begin, end)``, the tokens of this rank, for shards of unequal size or in another order than the
            ranks; together the ranges cover the vocabulary once. Default: equal shards, in the order of the ranks.

    Returns:
        ``logps`` of index's shape, or ``(logps, entropy)``, float32 (float64 for float64 logits). A row with a NaN or
        +inf on any rank, or nothing but -inf on all of them, gives NaN; a shard of nothing but -inf does no harm.

    Raises:
        TypeError, ValueError: before the collective, as in :func:`memlean.selective_log_softmax`. On the CPU also after
            it, on every rank: ranges with a gap or overlap, ranks that disagree about index or return_entropy.
        IndexError: after the collective, on every rank: an index outside the whole vocabulary, on the CPU. On other
            devices, where raising would have to wait for the device, the results concerned are NaN.
        RuntimeError: a second derivative. From the backend: ranks whose shapes differ, a rank that has failed, or one
            that does not call within the group's timeout.

    Formulas: with m_i, S_i, W_i the statistics of rank i, M = max m_i and d_i = (m_i - M) / T: S = sum exp(d_i) S_i and
    W = sum exp(d_i) (W_i + d_i S_i), merged in float64 in the order of the ranks (Milakov and Gimelshein,
    arXiv:1805.02867, section 3.1).
    """
    if isinstance(logits_shard, Tensor) and functional._is_dtensor(logits_shard):
        raise TypeError("logits_shard must be a plain tensor, got a DTensor: pass its .to_local(), this rank's shard")
    functional._check(logits_shard, index)
    ranks = dist.get_world_size(group)
    if ranks < 1:
        raise ValueError("group must contain this rank, which it does not")
    begin, end = _vocab_range(vocab_range, logits_shard.shape[-1], dist.get_rank(group))
    logps, entropy, _ = _VocabParallelTokenLogprob.apply(
        logits_shard,
        index,
        bool(return_entropy),
        None if temperature is None else functional._temperature_per_row(temperature, logits_shard, index),
        None if row_mask is None else functional._row_mask(row_mask, logits_shard),
        functional._ignore_index(ignore_index),
        group,
        begin,
        end,
    )
    return (logps, entropy) if return_entropy else logps


def _vocab_range(vocab_range: tuple[int, int] | None, size: int, rank: int) -> tuple[int, int]:
    begin, end = (rank * size, (rank + 1) * size) if vocab_range is None else vocab_range
    if begin < 0 or end - begin != size:
        raise ValueError(
            f"vocab_range must be (begin, end) with 0 <= begin and end - begin = {size}, the size of logits_shard, "
            f"got ({begin}, {end})"
        )
    if end > _EXACT:
        raise ValueError(f"vocab_range must end at {_EXACT} or below, got {end}")
    return begin, end


class _VocabParallelTokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        index: Tensor,
        return_entropy: bool,
        temperature: Tensor | None,
        row_mask: Tensor | None,
        ignore_index: int | None,
        group: dist.ProcessGroup | None,
        begin: int,
        end: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = functional._as_int64(index)
        ignored = None if ignore_index is None else tokens == ignore_index
        row_mask = _rows_to_read(row_mask, ignored, logits.dim())
        gathered = _gather(logits, tokens, return_entropy, temperature, row_mask, group, begin, end)
        statistics, chosen, vocab, agreed = _merge(*gathered, temperature)
        if logits.device.type == "cpu":
            reference.check_index(index, int(vocab), ignore_index)

        top, excess, mean_shift = statistics.unbind(-1)
        log_sum = excess.log1p()
        distance = chosen - top.unsqueeze(-1)
        if temperature is not None:
            distance = distance / _per_row(temperature, top).unsqueeze(-1)
        logps = (distance - log_sum.unsqueeze(-1)).reshape(index.shape)
        logps = logps.where((tokens >= 0) & (tokens < vocab) & agreed, torch.nan)
        entropy = (log_sum - mean_shift).minimum(vocab.log()).where(agreed, torch.nan)
        if ignored is not None:
            logps = logps.masked_fill(ignored, 0.0)
        if row_mask is not None:
            entropy = entropy.masked_fill(~row_mask, 0.0)
            logps = logps.masked_fill(~(row_mask if index.dim() < logits.dim() else row_mask.unsqueeze(-1)), 0.0)
        real = reference.real_dtype(logits.dtype)
        logps, statistics = logps.to(real), statistics.to(real).where(agreed, torch.nan)
        entropy = entropy.to(real) if return_entropy else logps.new_empty(0)

        ctx.return_entropy, ctx.ignore_index, ctx.first_token = return_entropy, ignore_index, begin
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*((statistics,) if return_entropy else (entropy, statistics)))
        ctx.save_for_backward(logits, *functional._saveable(index, statistics, temperature, row_mask))
        return logps, entropy, statistics

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        rest = (None,) * 8
        if not ctx.return_entropy:
            grad_entropy = None
        if grad_logp is None and grad_entropy is None:
            return None, *rest
        if torch.is_grad_enabled():  # create_graph=True, and the statistics carry no graph
            raise RuntimeError("vocab_parallel_selective_log_softmax has no second derivative (create_graph=True)")
        logits, index, statistics, temperature, row_mask = ctx.saved_tensors
        upstream = (None if g is None else g.to(statistics.dtype).contiguous() for g in (grad_logp, grad_entropy))
        return _ops.token_logprob_backward(
            logits,
            functional._as_int64(index),
            statistics,
            *upstream,
            temperature,
            row_mask,
            ctx.ignore_index,
            ctx.first_token,
            _ANY_TOKEN,
        ), *rest


def _rows_to_read(row_mask: Tensor | None, ignored: Tensor | None, dims: int) -> Tensor | None:
    if ignored is None or (ignored.dim() == dims and ignored.shape[-1] == 0):
        return row_mask
    read = ~(ignored if ignored.dim() < dims else ignored.all(-1))
    return read if row_mask is None else row_mask & read


def _per_row(temperature: Tensor, rows: Tensor) -> Tensor:
    return temperature.to(rows.dtype).expand(rows.shape)


def _gather(
    logits: Tensor,
    tokens: Tensor,
    return_entropy: bool,
    temperature: Tensor | None,
    row_mask: Tensor | None,
    group: dist.ProcessGroup | None,
    begin: int,
    end: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Headers ``[ranks, 5]``, statistics ``[ranks, ..., 3]`` and chosen logits ``[ranks, ..., K]`` of all ranks."""
    rows = logits.shape[:-1]
    no_tokens = tokens.new_empty((*rows, 0))
    _, _, statistics = _ops.token_logprob_forward(logits, no_tokens, return_entropy, temperature, row_mask)
    candidates = tokens.reshape(*rows, -1) if tokens.numel() else tokens.new_empty((*rows, 0))
    columns = candidates - begin
    here = (columns >= 0) & (columns < end - begin)
    # 0 from every rank but the owner, so that the sum over the ranks is the owner's logit, exactly.
    chosen = logits.gather(-1, columns.clamp(0, end - begin - 1)).where(here, 0).to(statistics.dtype)

    size = _HEADER + statistics.numel() + chosen.numel()
    position = torch.arange(1, tokens.numel() + 1, device=tokens.device)
    checksum = (tokens.flatten() * position).sum().remainder(_EXACT)
    header = statistics.new_empty(_HEADER)
    for i, value in enumerate((begin, end, size % _EXACT, return_entropy, checksum)):
        header[i] = value
    packed = torch.cat((header, statistics.flatten(), chosen.flatten()))
    ranks = dist.get_world_size(group)
    gathered = packed.new_empty(ranks * packed.numel())
    _all_gather(gathered, packed, group=group)
    headers, statistics, chosen = (
        gathered.view(ranks, -1).double().split((_HEADER, statistics.numel(), chosen.numel()), -1)
    )
    return headers, statistics.reshape(ranks, *rows, reference.STATISTICS), chosen.reshape(ranks, *candidates.shape)


def _merge(
    headers: Tensor, statistics: Tensor, chosen: Tensor, temperature: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The statistics of the whole rows, their chosen logits, the vocabulary's size, and whether the ranks fit together.

    In float64. On the CPU, ranks that do not fit together raise.
    """
    begins, order = headers[:, 0].sort()
    ends = headers[order, 1]
    covered = (begins[0] == 0) & (begins[1:] == ends[:-1]).all()
    equal = (headers[:, 2:] == headers[:1, 2:]).all(0)
    agreed = covered & equal.all()
    if headers.device.type == "cpu" and not agreed:
        _refuse(headers, equal.tolist())

    top, excess, mean_shift = statistics.unbind(-1)
    # A shard of nothing but -inf has S = 0; its maximum and W / S mean nothing.
    nothing = excess == -1
    top = top.masked_fill(nothing, -torch.inf)
    mean_shift = mean_shift.masked_fill(nothing, 0.0)
    highest = top.amax(0)
    # Finite, so that the difference to a shard without a maximum is -inf, not NaN; and with W it must not be -inf.
    shift = top - highest.clamp(min=torch.finfo(top.dtype).min)
    if temperature is not None:
        shift = shift / _per_row(temperature, top)
    weight = shift.exp()
    part = weight * (1 + excess)
    # The maximum's own 1 stays out of the sum, where it would hide what the rest is near certainty.
    where_top = top.argmax(0, keepdim=True)
    merged = part.scatter(0, where_top, excess.gather(0, where_top)).sum(0)
    merged = merged.masked_fill(merged == -1, torch.nan)
    lowest = reference._lowest(torch.float64)
    mean = (part * (mean_shift + shift.clamp(min=lowest))).sum(0) / (1 + merged)
    return torch.stack((highest, merged, mean), -1), chosen.sum(0), headers[:, 1].max(), agreed


def _refuse(headers: Tensor, equal: list[bool]) -> None:
    for name, same in zip(_SHARED, equal, strict=True):
        if not same:
            raise ValueError(f"memlean: {name} must be the same on every rank of the group, which it is not")
    ranges = headers[:, :2].long().tolist()
    held = ", ".join(f"rank {rank} [{begin}, {end})" for rank, (begin, end) in enumerate(ranges))
    raise ValueError(
        f"memlean: the ranks' shards must cover the vocabulary from 0 without gap or overlap, got {held}; "
        "for shards of unequal size pass vocab_range=(begin, end)"
    )
