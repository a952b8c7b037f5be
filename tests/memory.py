"""What a call allocates, keeps and dispatches."""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

STATUS = Path("/proc/self/status")
LIBC = ctypes.CDLL(None)
needs_high_water_mark = pytest.mark.skipif(
    not (STATUS.exists() and "VmHWM" in STATUS.read_text()), reason="no high-water mark in /proc/self/status here"
)


def _status(field: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


def resident() -> int:
    return _status("VmRSS")


def give_back_freed_memory() -> None:
    """Freed memory that stays resident hides the allocations that it serves."""
    gc.collect()
    if hasattr(LIBC, "malloc_trim") and hasattr(LIBC, "mallopt"):
        # Keeps glibc from raising the size (M_MMAP_THRESHOLD, -3) from which an allocation has pages of its own.
        LIBC.mallopt(-3, 2**20)
        LIBC.malloc_trim(0)


def peak_growth(function: Callable[[], object]) -> int:
    """Bytes by which resident memory rises at its highest while ``function`` runs."""
    give_back_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is resident now
    before = resident()
    function()
    return _status("VmHWM") - before


def allocator_peak(function: Callable[[], object]) -> int:
    """The most bytes that PyTorch's CPU allocator had handed out at once for what ``function`` allocates. Exact."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


class Saved:
    """Everything that autograd saves inside ``with Saved() as saved``."""

    def __init__(self):
        self.tensors: list[Tensor] = []
        self.unpacked = 0

    def _pack(self, tensor: Tensor) -> Tensor:
        self.tensors.append(tensor.detach())
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.unpacked += 1
        return tensor

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    def bytes_beyond(self, *callers: Tensor) -> int:
        """Bytes of saved storages that are none of the caller's own."""
        own = {tensor.untyped_storage().data_ptr() for tensor in callers}
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in self.tensors}
        return sum(size for pointer, size in storages.items() if pointer not in own)


class Dispatched(TorchDispatchMode):
    """The operators called inside, and the sizes of the storages they made."""

    def __init__(self):
        super().__init__()
        self.operators: list[str] = []
        self.allocated: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operators.append(str(function))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage()._cdata not in given:
                self.allocated.append(x.untyped_storage().nbytes())
        return out


class Alive(TorchDispatchMode):
    """The most bytes of tensors alive at once, besides the caller's: what an operator uses in between is not seen."""

    def __init__(self, *callers: Tensor):
        super().__init__()
        self.peak = 0
        self._callers = callers
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self._storages = {key: held for key, held in self._storages.items() if not held[0].expired()}
        own = {tensor.untyped_storage()._cdata for tensor in self._callers}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and (storage := x.untyped_storage())._cdata not in own:
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._storages.values()))
        return out


def retained_and_peak(function: Callable[[Tensor, Tensor], object], logits: Tensor, index: Tensor) -> tuple[int, int]:
    """Bytes that autograd keeps for ``function(logits, index)``, and the most that forward and backward need.

    Both without ``logits`` and ``index``. In half precision the CPU's scatter, in the backward of gather, has a float32
    buffer of its own, which `Alive`, seeing whole operators, leaves out; but that keeps autograd from adding up
    gradients in place, so the smaller of the two peaks counts.
    """
    with Saved() as saved:
        outputs = function(logits, index)
    retained = saved.bytes_beyond(logits, index)
    del outputs
    saved.tensors.clear()

    def both_passes() -> None:
        torch.autograd.grad([output.float().sum() for output in tree_leaves(function(logits, index))], logits)

    peak = allocator_peak(both_passes)
    if logits.dtype != torch.float32:
        with Alive(logits, index) as alive:
            both_passes()
        peak = min(peak, alive.peak)
    return retained, peak
