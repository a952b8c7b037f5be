"""Every bit of results and gradients for fixed inputs, one hash per case; as a program it prints them as JSON."""

import hashlib
import json

import hostile
import torch
from torch import Tensor

from memlean import selective_log_softmax, token_stats


def bits(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor.is_floating_point():  # one NaN is as good as another
            tensor = tensor.detach().masked_fill(tensor.isnan(), torch.nan)
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def results(logits: Tensor, index: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
    """logps, entropy, and the gradient for upstream gradients that depend on the values alone."""
    leaf = logits.detach().requires_grad_()
    logps, entropy = selective_log_softmax(leaf, index, return_entropy=True, **options)
    upstream = [(1 + x.detach().nan_to_num(0, 0, 0).remainder(1)) for x in (logps, entropy)]
    (gradient,) = torch.autograd.grad([logps, entropy], leaf, upstream)
    return logps, entropy, gradient


def fingerprints() -> dict[str, str]:
    hashes = {}
    for dtype in hostile.DTYPES:
        for vocab in (1, 70, 2049, 70_001):
            logits = hostile.rows(vocab, dtype)
            logits = torch.cat([logits, logits[:2]])
            logits[-2, vocab // 2] = torch.nan
            logits[-1] = -torch.inf
            index = hostile.telling_index(logits)
            hashes[f"{dtype} {vocab}"] = bits(*results(logits, index))
            hashes[f"{dtype} {vocab} logps alone"] = bits(selective_log_softmax(logits, index))
            if vocab == 1:
                continue
            for temperature in (0.3, torch.linspace(0.1, 5, len(logits))):
                kind = "a temperature" if isinstance(temperature, float) else "temperatures"
                hashes[f"{dtype} {vocab} {kind}"] = bits(*results(logits, index, temperature=temperature))
            row_mask, ignored = torch.arange(len(logits)) % 3, index.where(index != 0, -100)
            hashes[f"{dtype} {vocab} masked"] = bits(
                *results(logits, ignored, row_mask=row_mask, ignore_index=-100), *token_stats(logits, index)
            )
    return hashes


if __name__ == "__main__":
    print(json.dumps(fingerprints()))
