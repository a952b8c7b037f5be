"""Time of selective_log_softmax beside what people use instead, as ratios from one run.

    python benchmarks/bench_selective_log_softmax.py [--csv FILE] [--rows 256] [--vocab 151936] [--repeats 7]

Peers: the row loop of TRL and twinkle over 8 sequences, and ``gather - logsumexp`` under torch.compile, compiled before
it is timed; both as in ``python -m memlean demo``. All are timed in turn, repeat by repeat; a ratio is taken within
each repeat, and the median of the ratios is reported. The read probe sums the same bytes as integers in the same
repeat: what reading the logits alone costs.

Passes: "scoring" is forward under no_grad, "forward" is forward in a training step, whose graph is then dropped.
"""

import argparse
import csv
import itertools
import platform
import statistics
import subprocess
import time
from functools import partial
from pathlib import Path

import torch

from memlean import _ops
from memlean.demo import measure as methods

COLUMNS = ("threads", "dtype", "entropy", "pass", "peer", "ns_per_logit", "ratio_to_memlean", "machine")


def scoring(function, *arguments):
    with torch.no_grad():
        function(*arguments)


def forward(function, *arguments):
    function(*arguments)


def forward_backward(function, logits, *arguments):
    logits.grad = None
    results = function(logits, *arguments)
    torch.autograd.backward(results, [torch.ones_like(result) for result in results])


PASSES = {"scoring": scoring, "forward": forward, "forward + backward": forward_backward}


def seconds(function) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure(timed: dict, repeats: int) -> dict[str, list[float]]:
    """Seconds of each function, taken in turn after one unmeasured round."""
    times = {name: [] for name in timed}
    for repeat in range(repeats + 1):
        for name, function in timed.items():
            sample = seconds(function)
            if repeat > 0:
                times[name].append(sample)
    return times


def machine() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    isa = _ops.native.isa_active() if _ops.native else "generic path"
    return f"{model}; {isa}; torch {torch.__version__}; commit {commit}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="append rows to this file")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    table, here = [], machine()
    for threads, dtype, entropy in itertools.product((2, 1), (torch.bfloat16, torch.float32), (False, True)):
        torch.set_num_threads(threads)
        torch._dynamo.reset()  # else it gives up compiling after a few variants of one function
        torch.manual_seed(0)
        logits = (torch.randn(8, options.rows // 8, options.vocab) * 3).to(dtype).requires_grad_()
        index = torch.randint(options.vocab, logits.shape[:-1])
        peers = {"memlean": methods.memlean, "row loop": methods.row_loop, "compiled": methods.compiled}
        for pass_name, run in PASSES.items():
            timed = {name: partial(run, peer, logits, index, entropy) for name, peer in peers.items()}
            timed["read probe"] = logits.detach().view(torch.int64).sum
            times = measure(timed, options.repeats)
            for name, samples in times.items():
                ratio = statistics.median(t / own for t, own in zip(samples, times["memlean"], strict=True))
                each = statistics.median(samples) * 1e9 / logits.numel()
                dtype_name = str(dtype).removeprefix("torch.")
                table.append((threads, dtype_name, int(entropy), pass_name, name, f"{each:.4f}", f"{ratio:.2f}", here))
                print("{:<3}{:<10}{:<3}{:<20}{:<12}{:>9} ns{:>8} x".format(*table[-1][:-1]), flush=True)
    if options.csv:
        new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            csv.writer(file).writerows(([COLUMNS] if new else []) + table)


if __name__ == "__main__":
    main()
