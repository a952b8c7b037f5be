"""A vocabulary split over gloo ranks: memlean beside megatron-core's fused_vocab_parallel_cross_entropy.

    python benchmarks/bench_vocab_parallel.py [--quick]

For each: bytes that autograd keeps on a rank beside the caller's tensors, the largest error of value and gradient
against float64, and the time of both passes. megatron-core has no entropy, and its gradient is always bfloat16.
"""

import multiprocessing
import tempfile
import time
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from harness import Table
from peers import MEMLEAN
from tqdm import tqdm

from memlean.demo import logits as inputs
from memlean.demo.measure import Case, in_turns, saved
from memlean.distributed import vocab_parallel_selective_log_softmax

RANKS = 2


def run_rank(rank: int, store: str, dtype: torch.dtype, rows: int, vocab: int, repeats: int, answers) -> None:
    """Puts ``(facts, seconds)`` by implementation into ``answers``, on rank 0."""
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    group = dist.group.WORLD
    values, index = inputs.peaked((rows,), vocab)
    logits = values.to(dtype)
    shard = logits.chunk(RANKS, -1)[rank].clone().requires_grad_()
    log_p = logits.double().log_softmax(-1)
    truth = log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    slope = (torch.zeros_like(log_p).scatter_(-1, index.unsqueeze(-1), 1.0) - log_p.exp()).chunk(RANKS, -1)[rank]
    case = Case("peaked", values, index, dtype, False)

    def megatron(x, index, entropy):
        return (-fused_vocab_parallel_cross_entropy(x.unsqueeze(1), index.unsqueeze(1), group)[:, 0],)

    def memlean(x, index, entropy):
        return (vocab_parallel_selective_log_softmax(x, index),)

    def memlean_with_entropy(x, index, entropy):
        return vocab_parallel_selective_log_softmax(x, index, return_entropy=True)

    def source():
        # A copy: megatron-core overwrites logits that are float32 already, and keeps nothing else then.
        return shard * 1

    def passes(method) -> tuple[tuple, torch.Tensor, float]:
        x = source()
        dist.barrier()
        start = time.perf_counter()
        outputs = method(x, index, False)
        (gradient,) = torch.autograd.grad(outputs, x, [torch.ones_like(output) for output in outputs])
        return outputs, gradient, time.perf_counter() - start

    methods = {"megatron-core": megatron, MEMLEAN: memlean, "memlean with entropy": memlean_with_entropy}
    facts = {}
    for name, method in methods.items():
        outputs, gradient, _ = passes(method)
        facts[name] = {
            "retained": (saved(method, source(), case)["retained_bytes"], "B"),
            "value error": ((outputs[0].detach() - truth).abs().max().item(), "nats"),
        }
        if len(outputs) == 1:  # the truth is that of logps alone
            facts[name]["gradient error"] = ((gradient - slope).abs().max().item(), "nats")
    timed = {name: lambda method=method: passes(method)[-1] for name, method in methods.items()}
    times = in_turns(timed, repeats)
    if rank == 0:
        answers.put((facts, times))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--repeats", type=int, help="turns (default: 15; quick: 2)")
    options = parser.parse_args()
    rows, vocab = (8, 32_000) if options.quick else (64, 151_936)
    repeats = options.repeats or (2 if options.quick else 15)
    table = Table(__file__, options)
    context = multiprocessing.get_context("spawn")
    for dtype in tqdm((torch.bfloat16, torch.float32)):
        answers = context.SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            arguments = (str(Path(folder, "store")), dtype, rows, vocab, repeats, answers)
            processes = [context.Process(target=run_rank, args=(rank, *arguments)) for rank in range(RANKS)]
            for process in processes:
                process.start()
            for process in processes:
                process.join()
                if process.exitcode != 0:
                    raise SystemExit(f"a rank ended with exit code {process.exitcode}")
        facts, times = answers.get()
        columns = {"case": f"{RANKS} ranks", "threads": 1, "rows": rows, "vocab": vocab}
        columns["dtype"] = str(dtype).removeprefix("torch.")
        for name, measured in facts.items():
            for fact, (value, unit) in measured.items():
                table.add(peer=name, measure=fact, value=value, unit=unit, **columns)
        table.add_times(times, (MEMLEAN, times[MEMLEAN]), measure="both", **columns)
    table.write()


if __name__ == "__main__":
    main()
