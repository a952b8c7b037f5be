"""Inputs and comparisons for the real trainer of ``memlean.integrations._twinkle_cpu``."""

import torch

from memlean.integrations._twinkle_cpu import (
    FactoriesOnCPU,
    InputProcessor,
    Trainer,
    cpu_instead_of_cuda,
    device_prefix,
    forward,
    process_group,
)

__all__ = [
    "FactoriesOnCPU",
    "InputProcessor",
    "Trainer",
    "cpu_instead_of_cuda",
    "device_prefix",
    "forward",
    "process_group",
]

LENGTHS = (8, 6, 8, 5, 7, 3)


def features(vocab=512, lengths=LENGTHS, seed=3, prompt=1):
    """One feature dict a sequence; the first ``prompt`` labels of each are ignored."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(length):
        return torch.randint(0, vocab, (length,), generator=generator)

    made = []
    for length in lengths:
        labels = tokens(length)
        labels[:prompt] = -100
        made.append(
            {
                "input_ids": tokens(length),
                "labels": labels,
                "attention_mask": torch.ones(length, dtype=torch.long),
                "position_ids": torch.arange(length),
            }
        )
    return made


def as_tensors(values):
    """Logps or logits as a list of tensors, however they were returned."""
    return [] if values is None else [values] if isinstance(values, torch.Tensor) else list(values)


def same(a, b):
    """Bit-equal, tensor by tensor."""
    a, b = as_tensors(a), as_tensors(b)
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
