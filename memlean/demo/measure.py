"""The three methods, and what is measured of each."""

import contextlib
import ctypes
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memlean import selective_log_softmax

Outputs = tuple[Tensor, ...]  # (logps,) or (logps, entropy)
Method = Callable[[Tensor, Tensor, bool], Outputs]
T = TypeVar("T")

MASKED = 64  # columns at the end of the vocabulary that a padded model masks with -inf


def row_loop(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
    """What trainers do: one sequence at a time; log_softmax in half precision, gather - logsumexp in float32."""
    index = index.unsqueeze(-1)
    logps, entropies = [], []
    for row, chosen in zip(logits, index, strict=True):
        if logits.dtype == torch.float32:
            logsumexp = row.logsumexp(-1)
            logps.append(row.gather(-1, chosen).squeeze(-1) - logsumexp)
            if entropy:
                p = (row - logsumexp.unsqueeze(-1)).exp()
                entropies.append(logsumexp - (p * row).sum(-1))
        else:
            log_p = row.log_softmax(-1)
            logps.append(log_p.gather(-1, chosen).squeeze(-1))
            if entropy:
                entropies.append(-(log_p.exp() * log_p).sum(-1))
    return (torch.stack(logps), torch.stack(entropies)) if entropy else (torch.stack(logps),)


def gather_minus_logsumexp(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
    x = logits.float()
    logsumexp = x.logsumexp(-1)
    logps = x.gather(-1, index.unsqueeze(-1)).squeeze(-1) - logsumexp
    if not entropy:
        return (logps,)
    log_p = x - logsumexp.unsqueeze(-1)
    return logps, -(log_p.exp() * log_p).sum(-1)


# The best of what torch.compile makes of several equivalent expressions: in memory, time and error.
compiled = torch.compile(gather_minus_logsumexp, dynamic=False)


@contextlib.contextmanager
def empty_compiler_cache():
    """Compiles anew what is compiled inside, which a second run would otherwise take from a cache on disk."""
    name = "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    try:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as os.environ[name]:
            yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def memlean(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
    if entropy:
        return selective_log_softmax(logits, index, return_entropy=True)
    return (selective_log_softmax(logits, index),)


@dataclass(frozen=True)
class Case:
    source: str
    values: Tensor  # [batch, seq, vocab] in float32
    index: Tensor
    dtype: torch.dtype
    entropy: bool


def steps(methods: dict[str, Method], repeats: int) -> int:
    """How many times ``study`` advances the progress bar."""
    return 1 + len(methods) + repeats


def study(case: Case, methods: dict[str, Method], repeats: int, bar, notes: list[str]) -> list[dict]:
    """One dictionary of plain values per method that runs here. Says in ``notes`` which did not, and why."""
    logits = case.values.to(case.dtype).requires_grad_()
    dtype = str(case.dtype).removeprefix("torch.")
    label = f"V = {logits.shape[-1]:,} {dtype}{' + entropy' if case.entropy else ''}"
    upstream = upstream_gradients(case)
    bar.set_description(f"{label}: float64 reference")
    expected = reference(logits.detach(), case.index, upstream)
    bar.update()

    results: dict[str, dict] = {}
    runnable: dict[str, Method] = {}
    for name, method in methods.items():
        bar.set_description(f"{label}: {name}, memory and error")
        if method is compiled:
            torch.compiler.reset()
        try:
            first_call_s = sum(seconds(method, logits, case.index, upstream))
        except Exception as error:  # no compiler, or one that fails: the other methods are still worth showing
            if method is not compiled:
                raise
            note = f"No compiled peer: {type(error).__name__}: {str(error).strip().splitlines()[0]}"
            if note not in notes:
                notes.append(note)
        else:
            runnable[name] = method
            results[name] = {
                "source": case.source,
                "vocab": logits.shape[-1],
                "dtype": dtype,
                "entropy": case.entropy,
                "method": name,
                "compile_s": first_call_s if method is compiled else None,
                **facts(method, logits, case, upstream, expected),
            }
        bar.update()

    bar.set_description(f"{label}: time")
    timed = {name: partial(seconds, method, logits, case.index, upstream) for name, method in runnable.items()}
    for name, times in in_turns(timed, repeats, bar.update).items():
        result = results[name]
        result["forward_s"] = [forward for forward, _ in times]
        result["forward_backward_s"] = [forward + backward for forward, backward in times]
    for result in results.values():
        for kind in ("forward", "forward_backward"):
            # Per pair of neighbours in time: a machine that is busy for a while slows down both.
            pairs = zip(results["row loop"][f"{kind}_s"], result[f"{kind}_s"], strict=True)
            result[f"{kind}_speedup"] = statistics.median(before / after for before, after in pairs)
    return list(results.values())


def facts(method: Method, logits: Tensor, case: Case, upstream: list[Tensor], expected) -> dict:
    """What is kept and allocated, how far from ``expected`` it is, rows with NaN: all that is no time."""
    return {
        **saved(method, logits, case),
        **peaks(method, logits, case.index, upstream),
        **_errors(method, logits, case.index, upstream, expected),
        "nan_rows_when_masked": _nan_rows_when_masked(method, logits, case),
    }


def in_turns(
    functions: Mapping[str, Callable[[], T]], repeats: int, after_turn: Callable[[], object] | None = None
) -> dict[str, list[T]]:
    """What each function returned, one after the other in each turn: what is compared was measured together.

    Each turn has another order, the same in each process, so that none always finds what the one before it left. And
    each finds torch's threads awake, as the product that makes the logits leaves them: soon after their last work they
    sleep, and waking one on a virtual machine takes a good part of the fastest pass.
    """
    results: dict[str, list[T]] = {name: [] for name in functions}
    shuffled = random.Random(0)
    work = torch.zeros(2**18)
    for _ in range(repeats):
        for name in shuffled.sample(list(functions), len(functions)):
            work.add_(1)
            results[name].append(functions[name]())
        if after_turn is not None:
            after_turn()
    return results


def upstream_gradients(case: Case) -> list[Tensor]:
    """Gradients of the outputs: values that bfloat16 holds, so that no method has to round them."""
    generator = torch.Generator().manual_seed(0)
    count = 2 if case.entropy else 1
    return [torch.randn(case.index.shape, generator=generator).bfloat16().double() for _ in range(count)]


def _backward(outputs: Sequence[Tensor], logits: Tensor, upstream: list[Tensor]) -> Tensor:
    (gradient,) = torch.autograd.grad(outputs, logits, _like(outputs, upstream))
    return gradient


def _like(outputs: Sequence[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    return [g.to(output.dtype) for g, output in zip(upstream, outputs, strict=True)]


def reference(logits: Tensor, index: Tensor, upstream: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Values and gradient in float64, one sequence at a time."""
    values, gradient = [], torch.empty(logits.shape, dtype=torch.float64)
    for i, row in enumerate(logits):
        x = row.double().requires_grad_()
        log_p = x.log_softmax(-1)
        outputs = [log_p.gather(-1, index[i].unsqueeze(-1)).squeeze(-1)]
        if len(upstream) == 2:
            outputs.append(-(log_p.exp() * log_p).sum(-1))
        gradient[i] = _backward(outputs, x, [g[i] for g in upstream])
        values.append([output.detach() for output in outputs])
    return [torch.stack(column) for column in zip(*values, strict=True)], gradient


def saved(method: Method, logits: Tensor, case: Case) -> dict:
    """What autograd keeps between forward and backward, by storage, without the caller's own logits and index."""
    sizes, calls = {}, 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = (storage.nbytes(), tensor.numel() >= (0, *tensor.shape)[-1] >= logits.shape[-1])
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = method(logits, case.index, case.entropy)
    del outputs  # only now: a storage freed during the forward could give its address to another
    sizes.pop(case.index.untyped_storage().data_ptr(), None)
    keeps_logits = sizes.pop(logits.untyped_storage().data_ptr(), None) is not None
    return {
        "save_calls": calls,
        "keeps_logits": keeps_logits,
        "retained_bytes": sum(size for size, _ in sizes.values()),
        "retained_vocab_bytes": sum(size for size, is_vocab in sizes.values() if is_vocab),
    }


def peaks(method: Method, logits: Tensor, index: Tensor, upstream: list[Tensor]) -> dict:
    """The most memory that forward, then backward, had in use above what was there before both.

    By the kernel's high-water mark of resident memory, which misses nothing, whoever allocated it; None without it.
    """
    forward: int | None
    backward: int | None
    try:
        before = _reset_high_water_mark()
        outputs = method(logits, index, len(upstream) == 2)
        forward = _resident("VmHWM") - before
        _reset_high_water_mark()
        gradient = _backward(outputs, logits, upstream)
        backward = _resident("VmHWM") - before
        del gradient
    except OSError:
        forward = backward = None
    return {"peak_forward_bytes": forward, "peak_backward_bytes": backward}


def _reset_high_water_mark() -> int:
    """Returns the resident bytes that the mark starts from."""
    with contextlib.suppress(AttributeError):  # glibc keeps freed memory, which later allocations would hide in
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def _errors(method: Method, logits: Tensor, index: Tensor, upstream: list[Tensor], expected) -> dict:
    """Largest absolute differences from float64: of any value, and of any element of the gradient."""
    outputs = method(logits, index, len(upstream) == 2)
    gradient = _backward(outputs, logits, upstream)
    expected_outputs, expected_gradient = expected
    return {
        "value_error": _largest_distance(outputs, expected_outputs),
        "gradient_error": _largest_distance(gradient, expected_gradient),
    }


def _largest_distance(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    distances = [(a.detach() - b).abs().max() for a, b in zip(some, others, strict=True)]
    return torch.stack(distances).max().item()  # a NaN anywhere stays visible


def _nan_rows_when_masked(method: Method, logits: Tensor, case: Case) -> int:
    """Rows with a NaN when the vocabulary's padding is masked with -inf, where p log p is 0 * -inf unless one cares."""
    masked = logits.detach().clone()
    masked[..., -MASKED:] = -torch.inf
    outputs = method(masked.requires_grad_(), case.index, case.entropy)
    return int(torch.stack(outputs).isnan().any(0).sum())


def seconds(method: Method, logits: Tensor, index: Tensor, upstream: list[Tensor]) -> tuple[float, float]:
    """Of the forward and of the backward. Freeing the gradient is not part of it."""
    start = time.perf_counter()
    outputs = method(logits, index, len(upstream) == 2)
    forward = time.perf_counter() - start
    grad_outputs = _like(outputs, upstream)
    start = time.perf_counter()
    gradient = torch.autograd.grad(outputs, logits, grad_outputs)
    backward = time.perf_counter() - start
    del gradient
    return forward, backward
