"""What each option costs: its time over that of the same call without it, both measured in turns in one run.

    python benchmarks/bench_features.py --csv benchmarks/results/features.csv

The ratio is that of the fastest of ``--repeats`` turns, which neighbours on the machine disturb least.
"""

import argparse
import csv
import datetime
import time
from collections.abc import Callable
from functools import partial

import torch

import memlean
from memlean import _ops, selective_log_softmax, token_stats

COLUMNS = (
    "date",
    "option",
    "passes",
    "dtype",
    "rows",
    "vocab",
    "seconds_with",
    "seconds_without",
    "ratio",
    "goal",
    "machine",
)


def fastest(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Seconds of the fastest call of each, taken in turns."""
    best = dict.fromkeys(functions, float("inf"))
    for turn in range(repeats + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if turn > 0:  # the first warms up
                best[name] = min(best[name], time.perf_counter() - begin)
    return best


def cases(logits: torch.Tensor, index: torch.Tensor) -> dict[str, tuple[Callable, Callable, float]]:
    """Name: (with, without, goal); each function of logits gives what backward starts from."""
    rows = len(index)
    tenth = torch.arange(rows) % 10 == 0
    temperature = torch.rand(rows) + 0.5
    lists = logits.float().topk(50).indices.flatten(), torch.arange(rows + 1) * 50
    mask = torch.zeros(logits.shape, dtype=torch.bool).scatter_(1, lists[0].view(rows, 50), True)

    def plain(x):
        return selective_log_softmax(x, index)

    return {
        "90 % of rows skipped": (lambda x: selective_log_softmax(x, index, row_mask=tenth), plain, 0.15),
        "entropy": (lambda x: selective_log_softmax(x, index, return_entropy=True), plain, 1.15),
        "one temperature": (lambda x: selective_log_softmax(x, index, temperature=0.7), plain, 1.05),
        "temperature per token": (lambda x: selective_log_softmax(x, index, temperature=temperature), plain, 1.05),
        "50 tokens kept, lists": (lambda x: selective_log_softmax(x, index, keep=lists), plain, None),
        "50 tokens kept, mask": (lambda x: selective_log_softmax(x, index, keep=mask), plain, None),
        "all six extras": (lambda x: token_stats(x, index), plain, 1.25),
    }


def both_passes(function: Callable, leaf: torch.Tensor) -> None:
    outputs = function(leaf)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(x for x in outputs if x.requires_grad)
    torch.autograd.grad(outputs, leaf, [torch.ones_like(x) for x in outputs])


def measure(dtype: torch.dtype, options: argparse.Namespace) -> list[tuple]:
    """Rows of COLUMNS without date and machine."""
    torch.manual_seed(0)
    logits = (torch.randn(options.rows, options.vocab) * 3).to(dtype)
    index = torch.randint(options.vocab, (options.rows,))
    leaf = logits.detach().requires_grad_()
    passes = {"forward": lambda function: function(logits), "both": lambda function: both_passes(function, leaf)}
    table = []
    for name, (option, plain, goal) in cases(logits, index).items():
        for passes_name, call in passes.items():
            seconds = fastest({"with": partial(call, option), "without": partial(call, plain)}, options.repeats)
            ratio = round(seconds["with"] / seconds["without"], 4)
            shape = (str(dtype).removeprefix("torch."), options.rows, options.vocab)
            table.append((name, passes_name, *shape, *seconds.values(), ratio, goal))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=1, help="more than this machine has idle make the rows noise")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--csv", help="append rows to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    isa = _ops.native.isa_active() if _ops.native else "no kernels"
    machine = f"{isa}, {torch.get_num_threads()} threads, torch {torch.__version__}, memlean {memlean.__version__}"
    print(f"{options.rows} rows of {options.vocab}; {machine}")
    table = []
    for dtype in (torch.bfloat16, torch.float32):
        table += measure(dtype, options)
    for name, passes, dtype_name, *_, ratio, goal in table:
        print(f"{dtype_name:9}{passes:8}{name:24}{ratio:6.3f}" + (f"  (goal <= {goal})" if goal else ""))
    if options.csv:
        with open(options.csv, "a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(COLUMNS)
            writer.writerows([datetime.date.today(), *row, machine] for row in table)


if __name__ == "__main__":
    main()
