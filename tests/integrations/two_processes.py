"""One of two processes: steps before and after, compared, as JSON. ``two_processes.py LAYOUT VARIABLE RANK STORE``."""

import json
import os
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # fused_vocab_parallel_cross_entropy would be compiled

import megatron.core
import torch
from megatron.core import parallel_state
from rig import Trainer, as_tensors, cpu_instead_of_cuda, features, process_group, same

import memlean

LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "pp2_vpp2": {"pp": 2, "vpp": 2}}


def compare(trainer, inputs, **options):
    """What differs between an unpatched step and a patched one."""
    before, gradients, kept_before = trainer.step(inputs)
    logits_before, _, _ = trainer.step(inputs, return_logits=True)
    with memlean.patched("twinkle", **options) as report:
        after, gradients_after, kept_after = trainer.step(inputs)
        counters = {name: dict(record["counters"]) for name, record in report.to_dict().items()}
        logits_after, _, _ = trainer.step(inputs, return_logits=True)
    worst = [(new - old).abs().max().item() for old, new in zip(gradients, gradients_after, strict=True)]
    return {
        "loss": [before["loss"], after["loss"]],
        "same_logps": same(before["logps"], after["logps"]),
        "same_gradients": same(gradients, gradients_after),
        "worst_gradient_difference": max(worst),
        "gradients": len(gradients),
        "logps": len(as_tensors(after["logps"])),
        "kept": [kept_before, kept_after],
        "same_returned_logits": same(logits_before["logits"], logits_after["logits"]),
        "returned_logits": len(as_tensors(logits_after["logits"])),
        "counters": counters,
    }


def entropy_of_shards(rank):
    """twinkle's own function on half of the vocabulary: what it says unpatched, and its error against the whole."""
    from twinkle.utils import torch_utils

    logits, index = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0)), torch.arange(10).view(2, 5) * 6
    shard = logits.chunk(2, -1)[rank].clone().requires_grad_()
    try:
        torch_utils.selective_log_softmax(shard, index, return_entropy=True)
        refused = ""
    except NotImplementedError as error:
        refused = str(error)
    whole = logits.double().requires_grad_()
    log_p = whole.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    expected = log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    with memlean.patched("twinkle", tp=True):
        logps, entropies = torch_utils.selective_log_softmax(shard, index, return_entropy=True)
    (gradient,) = torch.autograd.grad((logps * 2 + entropies).sum(), shard)
    (gradient_of_whole,) = torch.autograd.grad((expected * 2 + entropy).sum(), whole)
    errors = [logps - expected, entropies - entropy, gradient - gradient_of_whole.chunk(2, -1)[rank]]
    return {"refused": refused, "worst_error": max(error.abs().max().item() for error in errors)}


layout, variable, rank, store = sys.argv[1], sys.argv[2] == "variable", int(sys.argv[3]), sys.argv[4]
sizes = LAYOUTS[layout]
with cpu_instead_of_cuda(), process_group(**sizes, rank=rank, world_size=2, store=store):
    trainer = Trainer(variable=variable, layers=4, **sizes)
    # Interleaved over two gloo ranks, both neighbours are one peer, and unpatched megatron-core 0.16.1 takes the shape
    # from the one for that of the other: there, micro-batches of different lengths fail without memlean already.
    inputs = features(lengths=(8, 6, 8, 5, 8 if layout == "pp2_vpp2" else 7, 3, 8, 4))
    found = {
        "versions": f"torch {torch.__version__}, megatron-core {megatron.core.__version__}",
        "ranks": [parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()],
        "dtype_preserving": compare(trainer, inputs, exclude="selective_log_softmax"),
        "memlean": compare(trainer, inputs),
    }
    if layout == "tp2":
        found["tensor_parallel"] = compare(trainer, inputs, tp=True)
        found["entropy"] = entropy_of_shards(rank)
    print(json.dumps(found))
