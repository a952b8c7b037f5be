"""A vocabulary split over gloo ranks: memlean beside megatron-core's fused_vocab_parallel_cross_entropy.

    pip install --no-deps megatron-core==0.16.1
    python benchmarks/bench_vocab_parallel.py --csv benchmarks/results/vocab_parallel.csv

For each: bytes that autograd keeps on a rank beside the caller's tensors, the largest error of value and gradient
against float64, and the time of both passes, the fastest of turns. megatron-core has no entropy, and its gradient is
always bfloat16.
"""

import argparse
import csv
import datetime
import multiprocessing
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

import memlean
from memlean.distributed import vocab_parallel_selective_log_softmax


def kept_bytes(function, *callers: torch.Tensor) -> int:
    """Bytes of the storages that autograd saves in function(), without those of the caller."""
    storages = {}

    def pack(tensor):
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        saved.append(tensor)  # alive, so that no address is used twice
        return tensor

    saved = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = function()
    del outputs
    own = {tensor.untyped_storage().data_ptr() for tensor in callers}
    return sum(size for pointer, size in storages.items() if pointer not in own)


def measure(rank: int, ranks: int, store: str, options, answers) -> None:
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    torch.manual_seed(0)
    logits = (torch.randn(options.rows, options.vocab) * 3).to(getattr(torch, options.dtype))
    index = torch.randint(options.vocab, (options.rows,))
    shard = logits.chunk(ranks, -1)[rank].clone().requires_grad_()
    log_p = logits.double().log_softmax(-1)
    truth = log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    slope = (torch.zeros_like(log_p).scatter_(-1, index.unsqueeze(-1), 1.0) - log_p.exp()).chunk(ranks, -1)[rank]
    del log_p, logits

    def source():
        # A copy: megatron-core overwrites logits that are float32 already, and keeps nothing else then.
        return shard * 1

    implementations = {
        "megatron-core": lambda x: -fused_vocab_parallel_cross_entropy(x.unsqueeze(1), index.unsqueeze(1), group)[:, 0],
        "memlean": lambda x: vocab_parallel_selective_log_softmax(x, index),
        "memlean with entropy": lambda x: vocab_parallel_selective_log_softmax(x, index, return_entropy=True),
    }
    seconds = dict.fromkeys(implementations, float("inf"))
    facts = {}
    for turn in range(options.repeats + 1):
        for name, function in implementations.items():
            x = source()
            dist.barrier()
            begin = time.perf_counter()
            outputs = function(x)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            # The error is that of the log-probabilities; the time is that of all outputs.
            loss = sum(output.sum() for output in outputs) if turn > 0 else outputs[0].sum()
            (gradient,) = torch.autograd.grad(loss, x)
            if turn > 0:
                seconds[name] = min(seconds[name], time.perf_counter() - begin)
                continue
            error = (outputs[0].detach().double() - truth).abs().max().item()
            gradient_error = (gradient.double() - slope).abs().max().item()
            x = source()
            facts[name] = (kept_bytes(lambda f=function, x=x: f(x), x, index), error, gradient_error)
    if rank == 0:
        answers.put([(name, *facts[name], seconds[name]) for name in implementations])
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", help="append rows to this file")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (options.ranks, str(Path(folder, "store")), options, answers)
        processes = [context.Process(target=measure, args=(rank, *arguments)) for rank in range(options.ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
            if process.exitcode != 0:
                raise SystemExit(f"a rank ended with exit code {process.exitcode}")
    table = answers.get()
    shard_bytes = options.rows * options.vocab // options.ranks * getattr(torch, options.dtype).itemsize
    base = table[0][-1]  # megatron-core
    print(
        f"{options.ranks} ranks, {options.rows} rows of {options.vocab}, {options.dtype}: {shard_bytes} bytes a shard"
    )
    print(f"{'':22}{'kept bytes':>12}{'x shard':>9}{'error':>10}{'gradient':>10}{'seconds':>9}{'ratio':>7}")
    for name, kept, error, gradient_error, seconds in table:
        print(
            f"{name:22}{kept:12}{kept / shard_bytes:9.4f}{error:10.1e}{gradient_error:10.1e}{seconds:9.4f}"
            f"{seconds / base:7.3f}"
        )
    if options.csv:
        columns = "date ranks rows vocab dtype implementation kept_bytes error gradient_error seconds memlean torch"
        with open(options.csv, "a", newline="") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(columns.split())
            for row in table:
                shape = (options.ranks, options.rows, options.vocab, options.dtype)
                writer.writerow([datetime.date.today(), *shape, *row, memlean.__version__, torch.__version__])


if __name__ == "__main__":
    main()
