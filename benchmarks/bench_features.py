"""What each option costs: its time over that of the same call without it, measured in the same turns.

python benchmarks/bench_features.py [--quick]
"""

from collections.abc import Callable
from functools import partial

import harness
import torch
from harness import Table, seconds
from tqdm import tqdm

from memlean import selective_log_softmax, token_stats
from memlean.demo import logits as inputs
from memlean.demo.measure import in_turns

PLAIN = "no option"


def options_of(logits: torch.Tensor, index: torch.Tensor) -> dict[str, Callable]:
    """Functions of logits that give what backward starts from."""
    rows = len(index)
    half, tenth = torch.arange(rows) % 2 == 0, torch.arange(rows) % 10 == 0
    temperature = torch.rand(rows) + 0.5
    lists = logits.float().topk(50).indices.flatten(), torch.arange(rows + 1) * 50
    mask = torch.zeros(logits.shape, dtype=torch.bool).scatter_(1, lists[0].view(rows, 50), True)
    return {
        PLAIN: lambda x: selective_log_softmax(x, index),
        "50 % of rows skipped": lambda x: selective_log_softmax(x, index, row_mask=half),
        "90 % of rows skipped": lambda x: selective_log_softmax(x, index, row_mask=tenth),
        "entropy": lambda x: selective_log_softmax(x, index, return_entropy=True),
        "one temperature": lambda x: selective_log_softmax(x, index, temperature=0.7),
        "temperature per token": lambda x: selective_log_softmax(x, index, temperature=temperature),
        "50 tokens kept, lists": lambda x: selective_log_softmax(x, index, keep=lists),
        "50 tokens kept, mask": lambda x: selective_log_softmax(x, index, keep=mask),
        "all six extras": lambda x: token_stats(x, index),
    }


def both_passes(function: Callable, leaf: torch.Tensor) -> None:
    outputs = function(leaf)
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else tuple(x for x in outputs if x.requires_grad)
    torch.autograd.grad(outputs, leaf, [torch.ones_like(x) for x in outputs])


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="more than this machine has idle make the rows noise")
    parser.add_argument("--repeats", type=int, help="turns (default: 15; quick: 2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows, vocab = (16, 32_000) if options.quick else (200, 151_936)
    repeats = options.repeats or (2 if options.quick else 15)
    table = Table(__file__, options)
    values, index = inputs.peaked((rows,), vocab)
    with tqdm(total=4 * repeats) as bar:
        for dtype in (torch.bfloat16, torch.float32):
            logits = values.to(dtype)
            leaf = logits.detach().requires_grad_()
            columns = {"dtype": str(dtype).removeprefix("torch."), "rows": rows, "vocab": vocab}
            functions = options_of(logits, index)
            calls = {
                "forward": {name: partial(function, logits) for name, function in functions.items()},
                "both": {name: partial(both_passes, function, leaf) for name, function in functions.items()},
            }
            for measured, by_name in calls.items():
                bar.set_description(f"{columns['dtype']}, {measured}")
                timed = {name: partial(seconds, call) for name, call in by_name.items()}
                for warm_up in timed.values():
                    warm_up()
                times = in_turns(timed, repeats, bar.update)
                table.add_times(times, (PLAIN, times[PLAIN]), case="options", measure=measured, **columns)
    table.write()


if __name__ == "__main__":
    main()
