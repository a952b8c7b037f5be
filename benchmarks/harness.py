"""What the benchmarks share: the machine line, the rows of a csv, the physical limits, the command line."""

import argparse
import contextlib
import csv
import ctypes
import datetime
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from memlean import _ops

RESULTS = Path(__file__).parent / "results"
COLUMNS = (
    "date",
    "script",
    "commit",
    "machine",
    "threads",
    "case",  # which axis this row is a point of
    "dtype",
    "vocab",
    "rows",
    "entropy",
    "peer",
    "measure",
    "value",
    "unit",  # s, B, nats, rows, graphs, Hz
    "ratio",  # of a time: the median over the turns of its ratio to that of `baseline` in the same turn
    "baseline",
    "share_of_limit",  # of a time: the median over the turns of the time of `limit` over it
    "limit",
)
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: whether it runs, not how fast memlean is")
    parser.add_argument("--results", type=Path, help="folder to write to (default: results, or results/quick)")
    return parser


def folder_of(options: argparse.Namespace) -> Path:
    return options.results or (RESULTS / "quick" if options.quick else RESULTS)


class Table:
    """The rows of one run of one script; ``write`` replaces the file of the run before."""

    def __init__(self, script: str, options: argparse.Namespace):
        self.script = Path(script).stem
        self.folder = folder_of(options)
        self.constant = {
            "date": datetime.date.today().isoformat(),
            "script": self.script,
            "commit": _commit(),
            "machine": _machine(),
        }
        self.rows: list[dict] = []

    def add(self, *, value: float, **columns) -> None:
        row = {"threads": torch.get_num_threads(), "value": f"{value:.6g}", **columns}
        for name in ("ratio", "share_of_limit"):
            if name in row:
                row[name] = f"{row[name]:.4g}"
        self.rows.append(self.constant | row)

    def add_times(
        self,
        times: dict[str, Sequence[float]],
        baseline: tuple[str, Sequence[float]],
        limit: tuple[str, Sequence[float]] | None = None,
        **columns,
    ) -> None:
        """A row for each peer in ``times``. All numbers are the seconds of the same turns, one a turn."""
        for peer, mine in times.items():
            row = {"peer": peer, "value": statistics.median(mine), "unit": "s", **columns}
            row |= {"baseline": baseline[0], "ratio": median_ratio(mine, baseline[1])}
            if limit is not None:
                row |= {"limit": limit[0], "share_of_limit": median_ratio(limit[1], mine)}
            self.add(**row)

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.script.removeprefix('bench_')}.csv"
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


def read(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    """The rows of ``<name>.csv`` as they were written."""
    with (folder / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def median_ratio(some: Iterable[float], others: Iterable[float]) -> float:
    return statistics.median(a / b for a, b in zip(some, others, strict=True))


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent)]
    name = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "--", "../memlean", "../csrc"], capture_output=True)
    return name + ("+" if changed.stdout else "")


def _machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    isa = _ops.native.isa_active() if _ops.native else "generic path"
    return f"{model}, {os.cpu_count()} cores; {isa}; torch {torch.__version__}"


class Probes:
    """Seconds that the memory takes for the same bytes, on buffers whose pages are there."""

    def __init__(self, logits: Tensor):
        self.bits = logits.detach().view(-1).view(torch.int64)
        self.copy = self.bits.clone()

    def __call__(self) -> dict[str, float]:
        return {
            "read probe": seconds(self.bits.sum),  # reads every byte once
            "copy probe": seconds(lambda: self.copy.copy_(self.bits)),  # reads and writes every byte once
            "in-place probe": seconds(lambda: self.copy.add_(1)),  # the same, to where it was read from
        }


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


@contextlib.contextmanager
def warm_heap():
    """Freed memory stays in the process, so that the next allocation finds its pages there (glibc)."""
    mallopt = ctypes.CDLL(None).mallopt
    trim_threshold, mmap_max = -1, -4  # of malloc.h
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(mmap_max, 0)
    try:
        yield
    finally:
        mallopt(mmap_max, 65536)
        mallopt(trim_threshold, 128 * 1024)
        ctypes.CDLL(None).malloc_trim(0)


CYCLES = 3_000_000
_CLOCK_SOURCE = """
void spin(long multiplications) {
    long x = 3;
    for (; multiplications > 0; multiplications -= 10)
        __asm__ volatile(".rept 10\\n imul %0, %0\\n .endr" : "+r"(x));
}
"""


@cache
def _spin():
    """A chain of 64-bit multiplications, each 3 cycles after the one before on every x86-64 since 2008."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "spin.c"), Path(folder, "spin.so")
        source.write_text(_CLOCK_SOURCE)
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", source, "-o", library], check=True)
        spin = ctypes.CDLL(str(library)).spin
    spin.argtypes = [ctypes.c_long]
    return spin


def clock() -> float:
    """Cycles a second that this process gets now."""
    return CYCLES / seconds(lambda: _spin()(CYCLES // 3))


def select(rows: list[dict[str, str]], **columns) -> list[dict[str, str]]:
    """The rows that have these values."""
    wanted = {name: str(value) for name, value in columns.items()}
    return [row for row in rows if wanted.items() <= row.items()]


def the(rows: list[dict[str, str]], column: str, **columns) -> float:
    """The number in this column of the one row that has these values."""
    found = select(rows, **columns)
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows have {columns}, expected one")
    return float(found[0][column])
