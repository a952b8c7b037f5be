"""The torch operators: schemas, the generic path for every device, fakes for the compiler, and the native library.

``memlean::token_logprob_forward(logits, index, ...) -> (logp, entropy, statistics)``
``memlean::token_logprob_backward(logits, index, statistics, grad_logp, grad_entropy, ...) -> grad_logits``
``memlean::token_logprob_backward_``: the same, written over the logits
``memlean::token_stats_forward(logits, index, ...) -> (logp, entropy, statistics, logsumexp, max, sum_p2, argmax)``

``index`` is contiguous int64. ``statistics`` is ``[..., 3]``: row maximum m, S - 1 and W / S, with S the sum of
exp((x - m) / T) and W the sum of (x - m) / T exp((x - m) / T). ``entropy`` has no elements unless asked for, nor
have ``sum_p2`` and ``argmax`` (together ``extras``).
``temperature`` has one element or one a row, of the results' dtype; ``row_mask`` is bool, one a row. ``first_token``
and ``index_limit`` place a shard of the vocabulary in the whole (0 and 0: it is the whole). ``keep`` is a bool mask of
logits' shape, or, with ``keep_offsets`` (``[rows + 1]``), the kept columns of all rows one after the other, both int64.
``chunk_bytes`` (0: the default) is for the generic path alone. The operators carry no autograd formula: the Functions
around them do.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memlean import _native, reference

_library = torch.library.Library("memlean", "DEF")


def _keep_at_exit(library: torch.library.Library) -> None:
    """Its finalizer would run at exit as well, and take the schemas away under a daemon thread inside an operator.

    That ends in a segmentation fault. torch keeps the schemas of its own operators.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):  # no public way leads to it
        alive = finalizer.peek()
        if alive is not None and alive[0] is library:
            finalizer.atexit = False


_keep_at_exit(_library)


def _define(schema: str, generic: Callable[..., Any]) -> None:
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # Every device without a kernel of its own, the CPU included when the native library is missing.
    _library.impl(schema.partition("(")[0], generic, "CompositeExplicitAutograd")


_OPTIONS = "Tensor? temperature=None, Tensor? row_mask=None, int? ignore_index=None"
_SHARD = "int first_token=0, int index_limit=0"
_KEEP = "Tensor? keep=None, Tensor? keep_offsets=None"
_UPSTREAM = "Tensor index, Tensor statistics, Tensor? grad_logp, Tensor? grad_entropy"

_define(
    f"token_logprob_forward(Tensor logits, Tensor index, bool return_entropy, {_OPTIONS}, {_SHARD}, {_KEEP},"
    " int chunk_bytes=0) -> (Tensor, Tensor, Tensor)",
    reference.token_logprob_forward,
)
_define(
    f"token_logprob_backward(Tensor logits, {_UPSTREAM}, {_OPTIONS}, {_SHARD}, {_KEEP}, int chunk_bytes=0) -> Tensor",
    reference.token_logprob_backward,
)
_define(
    f"token_logprob_backward_(Tensor(a!) logits, {_UPSTREAM}, {_OPTIONS}, {_SHARD}, {_KEEP}) -> ()",
    reference.token_logprob_backward_,
)
_define(
    f"token_stats_forward(Tensor logits, Tensor index, bool return_entropy, bool extras, {_OPTIONS},"
    " int chunk_bytes=0) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference.token_stats_forward,
)


@torch.library.register_fake("memlean::token_logprob_forward", lib=_library)
def _forward_fake(logits: Tensor, index: Tensor, return_entropy: bool, *_: Any, **options: Any) -> tuple[Tensor, ...]:
    real, rows = reference.real_dtype(logits.dtype), logits.shape[:-1]
    return (
        logits.new_empty(index.shape, dtype=real),
        logits.new_empty(rows if return_entropy else (0,), dtype=real),
        logits.new_empty((*rows, reference.STATISTICS), dtype=real),
    )


@torch.library.register_fake("memlean::token_logprob_backward", lib=_library)
def _(logits: Tensor, *others: Any, **more: Any) -> Tensor:
    return logits.new_empty(logits.shape)


@torch.library.register_fake("memlean::token_logprob_backward_", lib=_library)
def _(logits: Tensor, *others: Any, **more: Any) -> None:
    return None


@torch.library.register_fake("memlean::token_stats_forward", lib=_library)
def _(logits: Tensor, index: Tensor, return_entropy: bool, extras: bool, *_: Any, **options: Any) -> tuple[Tensor, ...]:
    real, rows = reference.real_dtype(logits.dtype), logits.shape[:-1]
    return (
        *_forward_fake(logits, index, return_entropy),
        logits.new_empty(rows, dtype=real),
        logits.new_empty(rows, dtype=real),
        logits.new_empty(rows if extras else (0,), dtype=real),
        logits.new_empty(rows if extras else (0,), dtype=torch.int64),
    )


native, native_problem = _native.load()

token_logprob_forward = torch.ops.memlean.token_logprob_forward.default
token_logprob_backward = torch.ops.memlean.token_logprob_backward.default
token_logprob_backward_ = torch.ops.memlean.token_logprob_backward_.default
token_stats_forward = torch.ops.memlean.token_stats_forward.default
