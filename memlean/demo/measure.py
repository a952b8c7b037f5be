"""The three methods, and what is measured of each."""

import contextlib
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from memlean import selective_log_softmax

Outputs = tuple[Tensor, ...]  # (logps,) or (logps, entropy)
Method = Callable[[Tensor, Tensor, bool], Outputs]

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


@torch.compile(dynamic=False)
def compiled(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
    """The best of what torch.compile makes of several equivalent expressions: in memory, time and error."""
    x = logits.float()
    logsumexp = x.logsumexp(-1)
    logps = x.gather(-1, index.unsqueeze(-1)).squeeze(-1) - logsumexp
    if not entropy:
        return (logps,)
    log_p = x - logsumexp.unsqueeze(-1)
    return logps, -(log_p.exp() * log_p).sum(-1)


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
    upstream = _upstream(case)
    bar.set_description(f"{label}: float64 reference")
    expected = _reference(logits.detach(), case.index, upstream)
    bar.update()

    results: dict[str, dict] = {}
    runnable: dict[str, Method] = {}
    for name, method in methods.items():
        bar.set_description(f"{label}: {name}, memory and error")
        try:
            first_call_s = _first_call(method, logits, case.index, upstream)
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
                **_saved(method, logits, case),
                **_peaks(method, logits, case.index, upstream),
                **_errors(method, logits, case.index, upstream, expected),
                "nan_rows_when_masked": _nan_rows_when_masked(method, logits, case),
            }
        bar.update()

    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runnable}
    for _ in range(repeats):
        bar.set_description(f"{label}: time")
        for name, method in runnable.items():
            seconds[name].append(_seconds(method, logits, case.index, upstream))
        bar.update()
    for name, result in results.items():
        result["forward_s"], result["forward_backward_s"] = (list(times) for times in zip(*seconds[name], strict=True))
        for kind in ("forward", "forward_backward"):
            # Per pair of neighbours in time: a machine that is busy for a while slows down both.
            pairs = zip(results["row loop"][f"{kind}_s"], result[f"{kind}_s"], strict=True)
            result[f"{kind}_speedup"] = statistics.median(before / after for before, after in pairs)
    return list(results.values())


def _upstream(case: Case) -> list[Tensor]:
    """Gradients of the outputs: values that bfloat16 holds, so that no method has to round them."""
    generator = torch.Generator().manual_seed(0)
    count = 2 if case.entropy else 1
    return [torch.randn(case.index.shape, generator=generator).bfloat16().double() for _ in range(count)]


def _backward(outputs: Sequence[Tensor], logits: Tensor, upstream: list[Tensor]) -> Tensor:
    grad_outputs = [g.to(output.dtype) for g, output in zip(upstream, outputs, strict=True)]
    (gradient,) = torch.autograd.grad(outputs, logits, grad_outputs)
    return gradient


def _reference(logits: Tensor, index: Tensor, upstream: list[Tensor]) -> tuple[list[Tensor], Tensor]:
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


def _first_call(method: Method, logits: Tensor, index: Tensor, upstream: list[Tensor]) -> float:
    """Seconds of the first forward and backward, which for the compiled peer is the time to compile them."""
    if method is compiled:
        torch.compiler.reset()
    start = time.perf_counter()
    _backward(method(logits, index, len(upstream) == 2), logits, upstream)
    return time.perf_counter() - start


def _saved(method: Method, logits: Tensor, case: Case) -> dict:
    """What autograd keeps between forward and backward, by storage, without the caller's own logits and index."""
    sizes, calls = {}, 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = (storage.nbytes(), tensor.numel() >= tensor.shape[-1] >= logits.shape[-1])
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


def _peaks(method: Method, logits: Tensor, index: Tensor, upstream: list[Tensor]) -> dict:
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


def _seconds(method: Method, logits: Tensor, index: Tensor, upstream: list[Tensor]) -> tuple[float, float]:
    """Of the forward, and of both passes."""
    start = time.perf_counter()
    outputs = method(logits, index, len(upstream) == 2)
    forward = time.perf_counter() - start
    _backward(outputs, logits, upstream)
    return forward, time.perf_counter() - start
