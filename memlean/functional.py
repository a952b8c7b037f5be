"""The user's functions, and the torch.autograd.Function around the operators."""

import sys
from typing import Literal

import torch
from torch import Tensor

from memlean import _ops, reference

_LOGITS_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INDEX_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def selective_log_softmax(
    logits: Tensor,
    index: Tensor,
    return_entropy: bool = False,
    *,
    out_dtype: Literal["input"] | None = None,
    chunk_bytes: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Log-probability of chosen tokens, and optionally the entropy, keeping nothing the size of the vocabulary.

    Equivalent to::

        logps = logits.float().log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)
        p = logits.float().softmax(-1)
        entropy = -torch.special.xlogy(p, p).sum(-1)

    (with ``double()`` for float64 logits) but with one read of the logits in forward, one read and one write in backward,
    and only ``logits`` itself, ``index`` and three numbers a row saved between the two.

    Args:
        logits: ``[..., vocab]``, float16, bfloat16, float32 or float64, any strides. Never written to.
        index: the chosen tokens, ``[...]``, or ``[..., K]`` for K candidates per row (duplicates add their gradients);
            int64, int32, int16, int8 or uint8, in ``[0, vocab)``.
        return_entropy: also return the entropy of each row, in nats, ``0 <= entropy <= log(vocab)``.
        out_dtype: None for results in float32 (float64 for float64 logits), ``"input"`` to round them to the logits' dtype.
        chunk_bytes: byte limit for each temporary on devices without a kernel, at least one row; default
            ``MEMLEAN_CHUNK_BYTES``, or 64 MiB, or 32 MiB with entropy. Ignored where a kernel runs.

    Returns:
        ``logps`` of index's shape, or ``(logps, entropy)`` with entropy of shape ``logits.shape[:-1]``; both differentiable.
        A row that holds a NaN or +inf, or nothing but -inf, gives NaN; a chosen -inf gives -inf.

    Raises:
        TypeError: logits or index of another type, dtype or layout, a DTensor among them.
        ValueError: shapes that do not fit, different devices, an empty vocabulary, an unknown option.
        IndexError: an index outside the vocabulary, on the CPU. Elsewhere, where raising would have to wait for the device,
            that token's logp is NaN.

    Formulas: with m = max x, S = sum exp(x - m), W = sum (x - m) exp(x - m): logp_y = (x_y - m) - log S and
    entropy = log S - W / S (Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv:1805.02867, for
    the one-pass sums).
    """
    _check(logits, index)
    if out_dtype not in (None, "input"):
        raise ValueError(f"out_dtype must be None or 'input', got {out_dtype!r}")
    if chunk_bytes is not None and (not isinstance(chunk_bytes, int) or chunk_bytes <= 0):
        raise ValueError(f"chunk_bytes must be a positive number of bytes or None, got {chunk_bytes!r}")
    return_entropy = bool(return_entropy)
    # Always through the Function: under vmap and forward-mode AD it is not visible here whether anything needs a gradient.
    # Where nothing does, nothing is saved.
    logps, entropy, _ = _TokenLogprob.apply(logits, index, return_entropy, chunk_bytes or 0)
    if out_dtype == "input":
        logps, entropy = logps.to(logits.dtype), entropy.to(logits.dtype)
    return (logps, entropy) if return_entropy else logps


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


def _as_int64(index: Tensor) -> Tensor:
    return index.to(torch.int64).contiguous()


class _TokenLogprob(torch.autograd.Function):
    @staticmethod
    def forward(logits: Tensor, index: Tensor, return_entropy: bool, chunk_bytes: int):
        return _ops.token_logprob_forward(logits, _as_int64(index), return_entropy, chunk_bytes)

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, index, return_entropy, chunk_bytes = inputs
        _, entropy, statistics = output
        ctx.return_entropy, ctx.chunk_bytes = return_entropy, chunk_bytes
        ctx.set_materialize_grads(False)
        if return_entropy:
            ctx.mark_non_differentiable(statistics)
        else:
            ctx.mark_non_differentiable(entropy, statistics)
        ctx.save_for_backward(logits, index, statistics)

    @staticmethod
    def backward(ctx, grad_logp: Tensor | None, grad_entropy: Tensor | None, _):
        if not ctx.return_entropy:
            grad_entropy = None  # compiled code passes an empty tensor for the output without elements
        if grad_logp is None and grad_entropy is None:
            return None, None, None, None
        logits, index, statistics = ctx.saved_tensors
        index = _as_int64(index)
        grad_logp, grad_entropy = (
            None if grad is None else grad.to(statistics.dtype).contiguous() for grad in (grad_logp, grad_entropy)
        )
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():  # create_graph=True
            gradient = reference.differentiable_gradient(logits, index, grad_logp, grad_entropy)
        else:
            gradient = _ops.token_logprob_backward(logits, index, statistics, grad_logp, grad_entropy, ctx.chunk_bytes)
        return gradient, None, None, None

    @staticmethod
    def vmap(info, in_dims, logits, index, return_entropy, chunk_bytes):
        logits, index = (
            x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            for x, dim in zip((logits, index), in_dims[:2], strict=True)
        )
        outputs = _TokenLogprob.apply(logits, index, return_entropy, chunk_bytes)
        return outputs, (0, 0 if return_entropy else None, 0)
