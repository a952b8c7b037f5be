"""The user's functions, and the torch.autograd.Function around the operators."""

import math
import sys
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from memlean import _ops, reference

_LOGITS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)

_ForwardOutputs = tuple[Tensor, Tensor, Tensor]


class _Keywords(TypedDict, total=False):
    """The options of :func:`selective_log_softmax`, for the overloads that tell a type checker what it returns."""

    temperature: float | Tensor | None
    row_mask: Tensor | None
    ignore_index: int | None
    keep: Tensor | tuple[Tensor, Tensor] | None
    entropy_over: Literal["kept", "full"] | None
    out_dtype: Literal["input"] | None
    inplace_backward: bool
    chunk_bytes: int | None


@overload
def selective_log_softmax(
    logits: Tensor, index: Tensor, return_entropy: Literal[False] = False, **options: Unpack[_Keywords]
) -> Tensor: ...


@overload
def selective_log_softmax(
    logits: Tensor, index: Tensor, return_entropy: Literal[True], **options: Unpack[_Keywords]
) -> tuple[Tensor, Tensor]: ...


@overload
def selective_log_softmax(
    logits: Tensor, index: Tensor, return_entropy: bool, **options: Unpack[_Keywords]
) -> Tensor | tuple[Tensor, Tensor]: ...


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    return_entropy: bool = False,
    *,
    temperature: float | Tensor | None = None,
    row_mask: Tensor | None = None,
    ignore_index: int | None = None,
    keep: Tensor | tuple[Tensor, Tensor] | None = None,
    entropy_over: Literal["kept", "full"] | None = None,
    out_dtype: Literal["input"] | None = None,
    inplace_backward: bool = False,
    chunk_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of chosen tokens, and optionally the entropy, keeping nothing the size of the vocabulary.

    Equivalent to::

        x = logits.float() / temperature
        logps = x.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        p = x.softmax(-1)
        entropy = -torch.special.xlogy(p, p).sum(-1)

    (with ``double()`` for float64 logits) but with one read of the logits in forward, one read and one write in
    backward, and only ``logits`` itself, ``index`` and three numbers a row saved between the two.

    Args:
        logits: ``[..., vocab]``, float16, bfloat16, float32 or float64, any strides. Never written to, unless
            ``inplace_backward`` says so.
        index: the chosen tokens, ``[...]``, or ``[..., K]`` for K candidates per row (duplicates add their gradients);
            int64, int32, int16, int8 or uint8, in ``[0, vocab)``.
        return_entropy: also return the entropy of each row, in nats, ``0 <= entropy <= log(vocab)``.
        temperature: divides the logits: a number, or a tensor that broadcasts to one number per row; finite and
            positive. It costs no copy of the logits, and no gradient flows to it.
        row_mask: ``[...]``; rows where it is 0 (False) have logps and entropy 0 and a gradient of exact zeros, whatever
            they hold; the kernels do not read them.
        ignore_index: a token (usually -100) whose logps and gradients are 0; a row with no other token is not read.
        keep: the tokens that a sampler could have drawn (top-p, top-k): logps are those of the softmax over them. A
            bool mask that broadcasts to ``[..., vocab]``, or ``(ids, offsets)``: row i, of the rows one after the
            other, keeps ``ids[offsets[i]:offsets[i + 1]]``, in any order. The chosen tokens of a row are always kept.
            A logit that is not kept has a gradient of exact 0, whatever it holds. Nothing vocabulary-sized is made.
        entropy_over: with ``keep`` and ``return_entropy``, say which entropy: ``"kept"``, of the softmax over the kept
            tokens, or ``"full"``, over the vocabulary, for which the logits are read a second time.
        out_dtype: None for results in float32 (float64 for float64 logits), ``"input"`` to round to the logits' dtype.
        inplace_backward: write the gradient over the logits in backward, which then needs no memory of their size. The
            logits are lost: they may not be a leaf or a view, and whoever else saved them gets autograd's error in
            backward. At most 64 candidates per row, eager mode only.
        chunk_bytes: byte limit for each temporary on devices without a kernel, at least one row; default
            ``MEMLEAN_CHUNK_BYTES``, or 64 MiB, or 32 MiB with entropy. Ignored where a kernel runs.

    Returns:
        ``logps`` of index's shape, or ``(logps, entropy)`` with entropy of shape ``logits.shape[:-1]``; both
        differentiable. A row that holds a NaN or +inf, or nothing but -inf, gives NaN; a chosen -inf gives -inf.

    Raises:
        TypeError: logits, index or an option of another type, dtype or layout, a DTensor among them.
        ValueError: shapes that do not fit, different devices, an empty vocabulary, a temperature that is not finite and
            positive, offsets of ``keep`` that do not rise from 0 to the number of ids, logits that ``inplace_backward``
            may not overwrite.
        IndexError: an index or an id of ``keep`` outside the vocabulary, on the CPU. Elsewhere, where raising would
            have to wait for the device, that token's logp is NaN, so are the rows of a bad temperature, and a bad id
            keeps nothing.
        RuntimeError: a second backward with ``inplace_backward``.

    Formulas: with m = max x, S = sum exp(x - m), W = sum (x - m) exp(x - m): logp_y = (x_y - m) - log S and
    entropy = log S - W / S (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867, for
    the one-pass sums).
    """
    _check(logits, index)
    if out_dtype not in (None, "input"):
        raise ValueError(f"out_dtype must be None or 'input', got {out_dtype!r}")
    if inplace_backward:
        _check_inplace(logits, index)
    return_entropy = bool(return_entropy)
    full_entropy = return_entropy and _entropy_over(entropy_over, keep, inplace_backward) == "full"
    options = _Options(
        None if temperature is None else _temperature_per_row(temperature, logits, index),
        None if row_mask is None else _row_mask(row_mask, logits),
        _ignore_index(ignore_index),
        *((None, None) if keep is None else _keep(keep, logits)),
    )
    # A Function costs more than a small call itself.
    if _transforms_active():
        function = _TransformedTokenLogprob.apply
    elif (logits.requires_grad and torch.is_grad_enabled()) or forward_ad._current_level >= 0:
        function = _TokenLogprob.apply
    else:
        function = _run
    chunk_bytes = _chunk_bytes(chunk_bytes)
    logps, entropy, _ = function(
        logits, index, return_entropy and not full_entropy, *options, bool(inplace_backward), chunk_bytes
    )
    if full_entropy:
        everything = options._replace(keep=None, keep_offsets=None)
        _, entropy, _ = function(logits, index, True, *everything, False, chunk_bytes)
    if out_dtype == "input":
        logps, entropy = logps.to(logits.dtype), entropy.to(logits.dtype)
    return (logps, entropy) if return_entropy else logps


class TokenStats(NamedTuple):
    """What :func:`token_stats` returns: float32 (float64 for float64 logits) but for argmax; None where not wanted.

    Attributes:
        logp: of index's shape, log-probability of the chosen tokens, in nats.
        entropy: ``[...]``, as all that follow; in nats.
        logsumexp: of the logits divided by the temperature.
        argmax: int64, the first of several maxima; -1 for a skipped row and one without a maximum.
        max: the largest logit, not divided by the temperature.
        sum_p2: sum of the squared probabilities.

    Example::

        stats = memlean.token_stats(logits, index, want=("logp", "entropy"))
        loss = -(stats.logp + 0.01 * stats.entropy).mean()
        assert stats.argmax is None  # not wanted
    """

    logp: Tensor | None = None
    entropy: Tensor | None = None
    logsumexp: Tensor | None = None
    argmax: Tensor | None = None
    max: Tensor | None = None
    sum_p2: Tensor | None = None


def token_stats(
    logits: Tensor,
    index: Tensor | None = None,
    *,
    want: Sequence[str] = TokenStats._fields,
    temperature: float | Tensor | None = None,
    row_mask: Tensor | None = None,
    ignore_index: int | None = None,
    chunk_bytes: int | None = None,
) -> TokenStats:
    """Everything that one read of the logits gives, per row, keeping nothing the size of the vocabulary.

    Equivalent to::

        x = logits.float() / temperature
        p = x.softmax(-1)
        logp = x.log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        entropy = -torch.special.xlogy(p, p).sum(-1)
        logsumexp = x.logsumexp(-1)
        argmax, max = logits.argmax(-1), logits.float().amax(-1)
        sum_p2 = p.square().sum(-1)

    ``logp``, ``entropy`` and ``logsumexp`` are differentiable; ``argmax`` (int64, the first of several), ``max`` and
    ``sum_p2`` (the probability that two draws agree) are not.

    Args:
        logits: ``[..., vocab]``, as in :func:`selective_log_softmax`.
        index: the chosen tokens, ``[...]`` or ``[..., K]``; None for no ``logp``.
        want: the fields to compute, any of ``"logp", "entropy", "logsumexp", "argmax", "max", "sum_p2"``. ``argmax``
            and ``sum_p2`` cost more than the others.
        temperature, row_mask, ignore_index, chunk_bytes: as in :func:`selective_log_softmax`. A skipped row has 0 in
            every field, and argmax -1.

    Returns:
        A :class:`TokenStats`, float32 (float64 for float64 logits) of shape ``logits.shape[:-1]``, ``logp`` of index's
        shape; None for fields not wanted. A row with a NaN or +inf has NaN and argmax -1; so has a row of nothing but
        -inf, with ``max`` and ``logsumexp`` -inf.

    Raises:
        TypeError, ValueError, IndexError: as :func:`selective_log_softmax`; ValueError also for an unknown field.
    """
    for name in want:
        if name not in TokenStats._fields:
            raise ValueError(f"want must name fields among {', '.join(TokenStats._fields)}, got {name!r}")
    if index is None:
        want = [name for name in want if name != "logp"]
        index = _no_candidates(logits)
    _check(logits, index)
    *fields, _ = _TokenStats.apply(
        logits,
        index,
        "entropy" in want,
        "argmax" in want or "sum_p2" in want,
        None if temperature is None else _temperature_per_row(temperature, logits, index),
        None if row_mask is None else _row_mask(row_mask, logits),
        _ignore_index(ignore_index),
        _chunk_bytes(chunk_bytes),
    )
    fields = zip(TokenStats._fields, fields, strict=True)
    return TokenStats(*[field if name in want else None for name, field in fields])


def entropy_from_logits(
    logits: Tensor,
    *,
    temperature: float | Tensor | None = None,
    row_mask: Tensor | None = None,
    chunk_bytes: int | None = None,
) -> Tensor:
    """The entropy of each row of logits, keeping nothing the size of the vocabulary.

    Equivalent to::

        p = (logits.float() / temperature).softmax(-1)
        entropy = -torch.special.xlogy(p, p).sum(-1)

    Args:
        logits: ``[..., vocab]``, as in :func:`selective_log_softmax`.
        temperature, row_mask, chunk_bytes: as in :func:`selective_log_softmax`.

    Returns:
        ``[...]``, in nats, float32 (float64 for float64 logits), differentiable.

    Raises:
        TypeError, ValueError: as :func:`selective_log_softmax`.
    """
    options: _Keywords = {"temperature": temperature, "row_mask": row_mask, "chunk_bytes": chunk_bytes}
    return selective_log_softmax(logits, _no_candidates(logits), return_entropy=True, **options)[1]


def _no_candidates(logits: Tensor) -> Tensor:
    """An index of shape ``[..., 0]``; what is no tensor of rows is left to the checks."""
    rows = getattr(logits, "shape", ())[:-1]
    return torch.empty((*rows, 0), dtype=torch.int64, device=getattr(logits, "device", None))


class _Options(NamedTuple):
    temperature: Tensor | None  # [] or [...], of the results' dtype
    row_mask: Tensor | None  # [...], bool
    ignore_index: int | None
    keep: Tensor | None  # bool, of logits' shape; or int64, the kept columns of all rows
    keep_offsets: Tensor | None  # [rows + 1], int64, with the latter


def _check(logits: Tensor, index: Tensor) -> None:
    for name, tensor in (("logits", logits), ("index", index)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
        if type(tensor) is not Tensor and _is_dtensor(tensor):
            raise TypeError(
                f"{name} must be a plain tensor, got a DTensor, whose shard is not the whole vocabulary: "
                "pass the result of .full_tensor(), or of .to_local() if the vocabulary is not sharded"
            )
        if tensor.layout is not torch.strided or tensor.is_nested:
            kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
            raise TypeError(f"{name} must be a dense (strided) tensor, got {kind}")
    if logits.dtype not in _LOGITS_DTYPES:
        raise TypeError(f"logits must be float16, bfloat16, float32 or float64, got {logits.dtype}")
    if index.dtype not in _INDEX_DTYPES:
        raise TypeError(f"index must be int64, int32, int16, int8 or uint8, got {index.dtype}")
    if logits.device != index.device:
        raise ValueError(f"logits and index must be on one device, got {logits.device} and {index.device}")
    if logits.dim() == 0:
        raise ValueError("logits must have shape [..., vocab], got a tensor without dimensions")
    if logits.shape[-1] == 0:
        raise ValueError(f"logits must have a vocabulary of at least one token, got shape {list(logits.shape)}")
    rows = logits.shape[:-1]
    if index.shape != rows and (index.dim() != logits.dim() or index.shape[:-1] != rows):
        raise ValueError(
            f"index must have shape {list(rows)} or {[*rows, 'K']} for logits of shape {list(logits.shape)}, "
            f"got {list(index.shape)}"
        )


def _is_dtensor(tensor: Tensor) -> bool:
    # A DTensor can exist only if its module has been imported.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _check_inplace(logits: Tensor, index: Tensor) -> None:
    if torch.compiler.is_compiling():
        raise ValueError("inplace_backward works in eager mode only, not under torch.compile")
    if logits.requires_grad and logits.is_leaf:
        raise ValueError("inplace_backward would overwrite logits, which are a leaf (a parameter or an input) here")
    if logits._is_view() or (logits.numel() > 0 and not logits.is_contiguous()):
        raise ValueError(
            "inplace_backward needs logits that own their memory and are contiguous, got a view or strides "
            f"{list(logits.stride())} for shape {list(logits.shape)}"
        )
    if index.dim() == logits.dim() and index.shape[-1] > 64:
        raise ValueError(f"inplace_backward takes at most 64 candidates per row, got {index.shape[-1]}")


def _temperature_per_row(temperature: float | Tensor, logits: Tensor, index: Tensor) -> Tensor | None:
    real, rows = reference.real_dtype(logits.dtype), logits.shape[:-1]
    if not isinstance(temperature, Tensor):
        if isinstance(temperature, bool) or not isinstance(temperature, int | float):
            raise TypeError(f"temperature must be a number or a tensor, got {type(temperature).__name__}")
        range_of = torch.finfo(real)
        if not (range_of.tiny * range_of.eps <= temperature <= range_of.max):
            outside = f" in {str(real).removeprefix('torch.')}" if 0 < temperature < math.inf else ""
            raise ValueError(f"temperature must be finite and positive{outside}, got {temperature}")
        return None if temperature == 1 else logits.new_full((), temperature, dtype=real)
    if temperature.is_complex() or temperature.dtype == torch.bool:
        raise TypeError(f"temperature must be a real number or tensor, got {temperature.dtype}")
    if temperature.requires_grad:
        raise ValueError("temperature must not require grad: no gradient flows to it")
    if temperature.dim() > 0 and temperature.device != logits.device:
        raise ValueError(f"logits and temperature must be on one device, got {logits.device} and {temperature.device}")
    shape = temperature.shape
    if temperature.dim() == index.dim() == logits.dim() and shape[-1] == 1:
        temperature = temperature.squeeze(-1)  # one number per row, written against an index with candidates
    try:
        temperature = temperature.to(logits.device, real).expand(rows)
    except RuntimeError:
        raise ValueError(f"temperature must broadcast to the rows {list(rows)}, got shape {list(shape)}") from None
    return temperature.contiguous()


def _row_mask(row_mask: Tensor, logits: Tensor) -> Tensor:
    rows = logits.shape[:-1]
    if not isinstance(row_mask, Tensor):
        raise TypeError(f"row_mask must be a torch.Tensor, got {type(row_mask).__name__}")
    if row_mask.shape != rows:
        raise ValueError(f"row_mask must have the shape of the rows, {list(rows)}, got {list(row_mask.shape)}")
    if row_mask.device != logits.device:
        raise ValueError(f"logits and row_mask must be on one device, got {logits.device} and {row_mask.device}")
    return (row_mask if row_mask.dtype == torch.bool else row_mask != 0).contiguous()


def _keep(keep: Tensor | tuple[Tensor, Tensor], logits: Tensor) -> tuple[Tensor, Tensor | None]:
    if isinstance(keep, Tensor):
        if keep.dtype != torch.bool:
            raise TypeError(f"keep must be a bool mask or (ids, offsets), got a tensor of {keep.dtype}")
        if keep.device != logits.device:
            raise ValueError(f"logits and keep must be on one device, got {logits.device} and {keep.device}")
        try:
            return keep.expand(logits.shape), None
        except RuntimeError:
            raise ValueError(
                f"keep must broadcast to logits' shape {list(logits.shape)}, got {list(keep.shape)}"
            ) from None
    if not isinstance(keep, tuple | list) or len(keep) != 2:
        raise TypeError(f"keep must be a bool mask or (ids, offsets), got {type(keep).__name__}")
    rows = logits.shape[:-1].numel()
    for name, tensor in zip(("ids", "offsets"), keep, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"keep: {name} must be a torch.Tensor, got {type(tensor).__name__}")
        if tensor.dtype not in _INDEX_DTYPES:
            raise TypeError(f"keep: {name} must be int64, int32, int16, int8 or uint8, got {tensor.dtype}")
        if tensor.device != logits.device:
            raise ValueError(f"logits and keep: {name} must be on one device, got {logits.device} and {tensor.device}")
        if tensor.dim() != 1 or (name == "offsets" and tensor.shape[0] != rows + 1):
            expected = f"[{rows + 1}], one more than there are rows" if name == "offsets" else "[count]"
            raise ValueError(f"keep: {name} must have shape {expected}, got {list(tensor.shape)}")
    ids, offsets = keep
    return _as_int64(ids), _as_int64(offsets)


def _entropy_over(entropy_over: str | None, keep: object, inplace_backward: bool) -> str | None:
    if entropy_over not in (None, "kept", "full"):
        raise ValueError(f"entropy_over must be 'kept' or 'full', got {entropy_over!r}")
    if keep is None:
        return None
    if entropy_over is None:
        raise ValueError("entropy_over must be 'kept' or 'full' where both keep and return_entropy are given, got None")
    if entropy_over == "full" and inplace_backward:
        raise ValueError("inplace_backward takes entropy_over='kept' only: the full entropy is a second read of logits")
    return entropy_over


def _ignore_index(ignore_index: int | None) -> int | None:
    if ignore_index is not None and (isinstance(ignore_index, bool) or not isinstance(ignore_index, int)):
        raise TypeError(f"ignore_index must be an int or None, got {type(ignore_index).__name__}")
    if ignore_index is not None and not -(2**63) <= ignore_index < 2**63:
        raise ValueError(f"ignore_index must be within int64, got {ignore_index}")
    return ignore_index


def _chunk_bytes(chunk_bytes: int | None) -> int:
    """0 stands for the default."""
    if chunk_bytes is None:
        return 0
    if isinstance(chunk_bytes, bool) or not isinstance(chunk_bytes, int) or chunk_bytes <= 0:
        raise ValueError(f"chunk_bytes must be a positive number of bytes or None, got {chunk_bytes!r}")
    return min(chunk_bytes, 2**63 - 1)


def _saveable(*tensors: Tensor | None) -> Sequence[Tensor | None]:
    """Copies of those that come from inference_mode, as rollouts do: autograd would refuse to save them."""
    if torch.compiler.is_compiling():  # which cannot ask, and does not save by itself
        return tensors
    return [x.clone() if x is not None and x.is_inference() else x for x in tensors]


def _as_int64(index: Tensor) -> Tensor:
    return index.to(torch.int64).contiguous()


def _transforms_active() -> bool:
    """Whether torch.func's grad or vmap is at work; the compiler traces the plain Function."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> _ForwardOutputs:
        outputs = _run(*inputs)
        _save(ctx, inputs, outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        rest = (None,) * 9
        if not ctx.return_entropy:
            grad_entropy = None  # compiled code passes an empty tensor for the output without elements
        if grad_logp is None and grad_entropy is None:
            return None, *rest
        if ctx.inplace_backward and ctx.logits_overwritten:
            raise RuntimeError(
                "inplace_backward: this is a second backward, but the first has overwritten the logits; "
                "call selective_log_softmax without inplace_backward to keep them"
            )
        logits, index, statistics, temperature, row_mask, keep, keep_offsets = ctx.saved_tensors
        index = _as_int64(index)
        grad_logp, grad_entropy = (
            None if grad is None else grad.to(statistics.dtype).contiguous() for grad in (grad_logp, grad_entropy)
        )
        options = (temperature, row_mask, ctx.ignore_index)
        kept = {"keep": keep, "keep_offsets": keep_offsets}
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            return reference.differentiable_gradient(logits, index, grad_logp, grad_entropy, *options, **kept), *rest
        if ctx.inplace_backward:
            ctx.logits_overwritten = True
            _ops.token_logprob_backward_(logits, index, statistics, grad_logp, grad_entropy, *options, **kept)
            # Autograd then refuses to use the logits as a value that somebody else has saved.
            torch.autograd.graph.increment_version(logits)
            return logits.detach(), *rest
        return _ops.token_logprob_backward(
            logits, index, statistics, grad_logp, grad_entropy, *options, **kept, chunk_bytes=ctx.chunk_bytes
        ), *rest


class _TransformedTokenLogprob(_TokenLogprob):
    """The form that torch.func asks for; binding its arguments costs more than a small call itself."""

    @staticmethod
    def forward(*inputs: Any) -> _ForwardOutputs:  # without ctx: torch.func sets that up
        return _run(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: _ForwardOutputs) -> None:
        _save(ctx, inputs, output)

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        logits: Tensor,
        index: Tensor,
        return_entropy: bool,
        temperature: Tensor | None,
        row_mask: Tensor | None,
        ignore_index: int | None,
        keep: Tensor | None,
        keep_offsets: Tensor | None,
        *rest: Any,
    ) -> tuple[_ForwardOutputs, tuple[int | None, ...]]:
        if keep_offsets is not None:
            raise ValueError("keep must be a mask under vmap, got (ids, offsets)")

        def batch_first(x: Any, dim: int | None) -> Any:
            """The batch dimension first; what has none is repeated, except a single temperature for all."""
            if x is None or (dim is None and temperature is not None and x is temperature and x.numel() == 1):
                return x
            return x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)

        dims = (in_dims[0], in_dims[1], in_dims[3], in_dims[4], in_dims[6])
        tensors = zip((logits, index, temperature, row_mask, keep), dims, strict=True)
        logits, index, temperature, row_mask, keep = (batch_first(x, dim) for x, dim in tensors)
        if temperature is not None:
            temperature = temperature.contiguous()
        if row_mask is not None:
            row_mask = row_mask.contiguous()
        options = _Options(temperature, row_mask, ignore_index, keep, None)
        outputs = _TransformedTokenLogprob.apply(logits, index, return_entropy, *options, *rest)
        return outputs, (0, 0 if return_entropy else None, 0)


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        index: Tensor,
        return_entropy: bool,
        extras: bool,
        temperature: Tensor | None,
        row_mask: Tensor | None,
        ignore_index: int | None,
        chunk_bytes: int,
    ) -> tuple[Tensor, ...]:
        logp, entropy, statistics, logsumexp, highest, sum_p2, argmax = _ops.token_stats_forward(
            logits,
            _as_int64(index),
            return_entropy,
            extras,
            temperature,
            row_mask,
            ignore_index,
            chunk_bytes=chunk_bytes,
        )
        ctx.return_entropy, ctx.ignore_index, ctx.chunk_bytes = return_entropy, ignore_index, chunk_bytes
        ctx.set_materialize_grads(False)
        without_gradient = (argmax, highest, sum_p2, statistics)
        ctx.mark_non_differentiable(*without_gradient, *(() if return_entropy else (entropy,)))
        ctx.save_for_backward(logits, *_saveable(index, statistics, temperature, row_mask))
        return logp, entropy, logsumexp, argmax, highest, sum_p2, statistics

    @staticmethod
    def backward(
        ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None, grad_logsumexp: Tensor | None, *_: Any
    ) -> tuple[Tensor | None, ...]:
        rest = (None,) * 7
        if not ctx.return_entropy:  # compiled code passes an empty tensor for an output without elements
            grad_entropy = None
        if grad_logp is None and grad_entropy is None and grad_logsumexp is None:
            return None, *rest
        logits, index, statistics, temperature, row_mask = ctx.saved_tensors
        index = _as_int64(index)
        grad_logp, grad_entropy, grad_logsumexp = (
            None if grad is None else grad.to(statistics.dtype).contiguous()
            for grad in (grad_logp, grad_entropy, grad_logsumexp)
        )
        options = (temperature, row_mask, ctx.ignore_index)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            gradient = reference.differentiable_gradient(
                logits, index, grad_logp, grad_entropy, *options, grad_logsumexp=grad_logsumexp
            )
            return gradient, *rest
        limit = 0
        if grad_logsumexp is not None:
            limit = logits.shape[-1] + 1
            index, grad_logp, row_mask = _with_logsumexp(logits, index, grad_logp, grad_logsumexp, *options[1:])
            options = (temperature, row_mask, None)
        return _ops.token_logprob_backward(
            logits,
            index,
            statistics,
            grad_logp,
            grad_entropy,
            *options,
            index_limit=limit,
            chunk_bytes=ctx.chunk_bytes,
        ), *rest


def _with_logsumexp(
    logits: Tensor,
    index: Tensor,
    grad_logp: Tensor | None,
    grad_logsumexp: Tensor,
    row_mask: Tensor | None,
    ignore_index: int | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """index, grad_logp and row_mask with one more candidate a row, whose gradient is that of logsumexp.

    logp of a token y is x_y / T - logsumexp. For a token beyond the vocabulary the first term moves no logit, and what
    is left, with the sign turned, is logsumexp.
    """
    beyond = logits.shape[-1]
    rows = logits.shape[:-1]
    tokens = index if index.dim() == logits.dim() else index.unsqueeze(-1)
    upstream = grad_logsumexp.new_zeros(tokens.shape) if grad_logp is None else grad_logp.view(tokens.shape)
    if ignore_index is not None:
        ignored = tokens == ignore_index
        if tokens.shape[-1] > 0:
            read = ~ignored.all(-1)
            row_mask = read if row_mask is None else row_mask & read
        tokens, upstream = tokens.masked_fill(ignored, beyond), upstream.masked_fill(ignored, 0.0)
    tokens = torch.cat((tokens, tokens.new_full((*rows, 1), beyond)), -1)
    return tokens, torch.cat((upstream, -grad_logsumexp.unsqueeze(-1)), -1), row_mask


def _run(
    logits: Tensor,
    index: Tensor,
    return_entropy: bool,
    temperature: Tensor | None,
    row_mask: Tensor | None,
    ignore_index: int | None,
    keep: Tensor | None,
    keep_offsets: Tensor | None,
    inplace_backward: bool,
    chunk_bytes: int,
) -> _ForwardOutputs:
    return _ops.token_logprob_forward(
        logits,
        _as_int64(index),
        return_entropy,
        temperature,
        row_mask,
        ignore_index,
        keep=keep,
        keep_offsets=keep_offsets,
        chunk_bytes=chunk_bytes,
    )


def _save(ctx: Any, inputs: tuple[Any, ...], outputs: _ForwardOutputs) -> None:
    logits, index, ctx.return_entropy, temperature, row_mask, ctx.ignore_index, keep, offsets, *options = inputs
    ctx.inplace_backward, ctx.chunk_bytes = options
    _, entropy, statistics = outputs
    ctx.logits_overwritten = False
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*((statistics,) if ctx.return_entropy else (entropy, statistics)))
    ctx.save_for_backward(logits, *_saveable(index, statistics, temperature, row_mask, keep, offsets))
