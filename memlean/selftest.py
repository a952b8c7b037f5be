"""``python -m memlean selftest``: whether this installation computes what the formulas say. Needs nothing but torch."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import memlean
from memlean import _ops, reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VOCAB = 33_001  # two segments of the kernels, the last one short


class NotApplicable(Exception):
    """There is nothing here that the check could look at."""


def run(say: Callable[[str], None] = lambda line: None) -> list[str]:
    """Runs every check, says a line for each, and returns what failed."""
    failures = []
    for check in CHECKS:
        try:
            check()
            say(f"ok      {check.__doc__}")
        except NotApplicable as reason:
            say(f"-       {check.__doc__}: {reason}")
        except Exception as error:
            failures.append(f"{check.__doc__}: {type(error).__name__}: {error}")
            say(f"FAILED  {failures[-1]}")
    return failures


def report() -> int:
    """Prints the checks. Returns 0, or 1 if one failed."""
    started = time.monotonic()
    failures = run(print)
    path = f"C kernels, {_ops.native.isa_active()}" if _ops.native else "generic path"
    result = f"{len(failures)} of {len(CHECKS)} checks FAILED" if failures else "all is well"
    versions = f"memlean {memlean.__version__}, torch {torch.__version__}"
    print(f"{versions}, {path}: {result} ({time.monotonic() - started:.1f} s)")
    return 1 if failures else 0


def _rows(dtype: torch.dtype, vocab: int = VOCAB) -> tuple[Tensor, Tensor]:
    """Logits ``[6, vocab]`` (noise, peaked, far from 0, partly -inf, -inf but one token, flat) and index ``[6]``."""
    logits = 3 * torch.randn(6, vocab, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    logits[1, 7] = 60.0
    logits[2] += 1e4
    logits[3, vocab // 3 : vocab // 2] = -torch.inf
    logits[4, :-1] = -torch.inf
    logits[5] = 0.0
    return logits.to(dtype), torch.tensor([0, 7, vocab // 2, vocab // 3, vocab - 1, vocab - 1])


@contextmanager
def _one_thread() -> Iterator[None]:
    """On a busy machine threads that wait for each other take seconds for what one does in none."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def _formulas(logits: Tensor, index: Tensor, temperature: Tensor | float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """logps, entropy and the gradient of logps.sum() - 2 entropy.sum(), in float64."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    p = log_p.exp()
    p_log_p = torch.special.xlogy(p, p)
    entropy = -p_log_p.sum(-1, keepdim=True)
    chosen = torch.zeros_like(p).scatter_(-1, index.unsqueeze(-1), 1.0)
    gradient = (chosen - p + 2 * (p_log_p + p * entropy)) / temperature
    return log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1), entropy.squeeze(-1), gradient


def _compute(logits: Tensor, index: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What `_formulas` gives, from memlean."""
    leaf = logits.detach().clone().requires_grad_()
    logps, entropy = memlean.selective_log_softmax(leaf, index, return_entropy=True, **options)
    (gradient,) = torch.autograd.grad(logps.sum() - 2 * entropy.sum(), leaf)
    return logps.detach(), entropy.detach(), gradient


def _assert_close(what: str, actual: Tensor, expected: Tensor, relative: float, absolute: float) -> None:
    wrong = ~torch.isclose(actual.double(), expected.double(), rtol=relative, atol=absolute)
    if wrong.any():
        where = wrong.nonzero()[0].tolist()
        got, wanted = actual[tuple(where)].item(), expected[tuple(where)].item()
        raise AssertionError(
            f"{what}{where} is {got!r}, expected {wanted!r} ({actual.dtype}, {int(wrong.sum())} wrong)"
        )


def _assert_as_formulas(logits: Tensor, index: Tensor, divisor: Tensor | float = 1.0, **options: Any) -> None:
    double = logits.dtype == torch.float64
    results, formulas = _compute(logits, index, **options), _formulas(logits, index, divisor)
    for what, actual, expected in zip(("logps", "entropy"), results, formulas, strict=False):
        _assert_close(what, actual, expected, 1e-12 if double else 1e-6, 1e-12 if double else 2e-6)
    rounding = 1e-12 if double else max(torch.finfo(logits.dtype).eps, 2e-5)
    _assert_close("gradient", results[2], formulas[2], rounding, 1e-13 if double else 2e-6)


def check_values() -> None:
    """values, entropy and gradients against formulas in float64, four dtypes"""
    for dtype in DTYPES:
        for vocab in (1, 31, VOCAB):
            logits, index = _rows(dtype, VOCAB)
            _assert_as_formulas(logits[:, -vocab:], index.clamp(max=vocab - 1))


def check_temperature() -> None:
    """a temperature, and one for each row"""
    for dtype in (torch.bfloat16, torch.float64):
        logits, index = _rows(dtype)
        _assert_as_formulas(logits, index, 0.7, temperature=0.7)
        each = torch.linspace(0.5, 2.0, len(logits), dtype=torch.float32)
        _assert_as_formulas(logits, index, each.double().unsqueeze(-1), temperature=each)


def check_skipped_rows() -> None:
    """masked rows and ignored tokens: exact zeros, whatever is in the row"""
    logits, index = _rows(torch.float32)
    logits[0] = torch.nan
    mask, index[1] = torch.tensor([0, 1, 1, 1, 1, 1]), -100
    results = _compute(logits, index, row_mask=mask, ignore_index=-100)
    for what, result in zip(("logps", "entropy", "gradient"), results, strict=True):
        _assert_close(what, result[:2], torch.zeros_like(result[:2]), 0, 0)
    for what, result, alone in zip(("logps", "entropy"), results, _compute(logits[2:], index[2:]), strict=False):
        _assert_close(what, result[2:], alone, 1e-6, 2e-6)


def check_token_stats() -> None:
    """every field of token_stats"""
    logits, index = _rows(torch.float32)
    stats, x = memlean.token_stats(logits, index), logits.double()
    logps, entropy, _ = _formulas(logits, index)
    sum_p2 = x.softmax(-1).square().sum(-1)
    expected = (logps, entropy, x.logsumexp(-1), logits.argmax(-1), logits.amax(-1), sum_p2)
    for what, actual, wanted in zip(stats._fields, stats, expected, strict=True):
        assert actual is not None
        _assert_close(what, actual, wanted, 1e-6, 2e-6)


def check_kept_set() -> None:
    """log-probabilities over kept tokens, as a mask and as lists"""
    logits, index = _rows(torch.float32)
    mask = torch.arange(logits.shape[-1]) % 1000 == 3
    mask = mask.expand(logits.shape).scatter(-1, index.unsqueeze(-1), True)
    lists = mask.nonzero()[:, 1], torch.cat((torch.zeros(1, dtype=torch.int64), mask.sum(-1).cumsum(0)))
    formulas = _formulas(logits.masked_fill(~mask, -torch.inf), index)
    for keep in (mask, lists):
        results = _compute(logits, index, keep=keep, entropy_over="kept")
        for what, actual, expected in zip(("logps", "entropy", "gradient"), results, formulas, strict=True):
            _assert_close(what, actual, expected, 2e-5, 2e-6)


def check_inplace_backward() -> None:
    """the gradient written over the logits"""
    logits, index = _rows(torch.float32)
    leaf = logits.clone().requires_grad_()
    logps, entropy = memlean.selective_log_softmax(leaf * 1.0, index, return_entropy=True, inplace_backward=True)
    (gradient,) = torch.autograd.grad(logps.sum() - 2 * entropy.sum(), leaf)
    _assert_close("gradient", gradient, _compute(logits, index)[2], 0, 0)


def check_instruction_sets() -> None:
    """the same bits from every instruction set of this CPU"""
    if _ops.native is None:
        raise NotApplicable("the C kernels are not in use")
    active = _ops.native.isa_active()
    try:
        for dtype in DTYPES:
            logits, index = _rows(dtype)
            first = None
            for isa in _ops.native.isa_available():
                _ops.native.isa_select(isa)
                results = _compute(logits, index, temperature=0.7)
                first = first or results
                for what, one, other in zip(("logps", "entropy", "gradient"), first, results, strict=True):
                    if not torch.equal(one, other):
                        raise AssertionError(f"{what} of {isa} and of generic differ ({dtype})")
    finally:
        _ops.native.isa_select(active)


def check_generic_path() -> None:
    """the C kernels and the generic path agree"""
    if _ops.native is None:
        raise NotApplicable("the C kernels are not in use")
    for dtype in DTYPES:
        logits, index = _rows(dtype)
        native = _ops.token_logprob_forward(logits, index, True)
        generic = reference.token_logprob_forward(logits, index, True)
        for what, one, other in zip(("logps", "entropy", "statistics"), native, generic, strict=True):
            _assert_close(what, one, other, 2e-6, 2e-6)


def check_errors() -> None:
    """wrong arguments are errors that name them"""
    logits, index = torch.zeros(2, 3), torch.tensor([0, 3])
    wrong: tuple[tuple[type[Exception], str, tuple[Tensor, Tensor], dict[str, Any]], ...] = (
        (IndexError, "index[1] is 3", (logits, index), {}),
        (TypeError, "index must be", (logits, index.float()), {}),
        (ValueError, "index must have shape", (logits, index[:1]), {}),
        (ValueError, "temperature must be", (logits, index - index), {"temperature": 0.0}),
    )
    for kind, text, arguments, options in wrong:
        try:
            memlean.selective_log_softmax(*arguments, **options)
        except kind as error:
            if text not in str(error):
                raise AssertionError(f"{kind.__name__} should say {text!r}, says {str(error)!r}") from None
        else:
            raise AssertionError(f"no {kind.__name__} where {text!r} was expected")


CHECKS = (
    check_values,
    check_temperature,
    check_skipped_rows,
    check_token_stats,
    check_kept_set,
    check_inplace_backward,
    check_instruction_sets,
    check_generic_path,
    check_errors,
)
