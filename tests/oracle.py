"""The truth that tests compare with: formulas in float64 on plain PyTorch, nothing of memlean in them."""

import torch
from torch import Tensor


def log_probabilities(logits: Tensor) -> Tensor:
    """``log_softmax`` in float64. torch's own adds small terms to 1 one by one: 1e-14 off."""
    x = logits.detach().double()
    top, where = x.max(-1, keepdim=True)
    shifted = x - top
    others = shifted.exp().scatter(-1, where, 0.0).sum(-1, keepdim=True)
    return shifted - others.log1p().where(top.isfinite(), torch.nan)


def _candidates(logits: Tensor, index: Tensor) -> Tensor:
    return index.long() if index.dim() == logits.dim() else index.long().unsqueeze(-1)


def logps_and_entropy(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    log_p = log_probabilities(logits)
    p = log_p.exp()
    return log_p.gather(-1, _candidates(logits, index)).view(index.shape), -torch.special.xlogy(p, p).sum(-1)


def gradient(logits: Tensor, index: Tensor, grad_logps: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """d(sum grad_logps * logps + grad_entropy * entropy) / d logits, with 0 log 0 = 0."""
    log_p = log_probabilities(logits)
    p = log_p.exp()
    result = torch.zeros_like(p)
    if grad_logps is not None:
        chosen = _candidates(logits, index)
        g = grad_logps.double().reshape(chosen.shape)
        own = torch.zeros_like(p).scatter_add(-1, chosen, g)
        # At the chosen token g (1 - p), from -expm1(log p), which keeps the digits that 1 - p loses near p = 1.
        result += -log_p.expm1() * own - p * (g.sum(-1, keepdim=True) - own)
    if grad_entropy is not None:
        p_log_p = torch.special.xlogy(p, p)
        entropy = -p_log_p.sum(-1, keepdim=True)
        result -= grad_entropy.double().unsqueeze(-1) * (p_log_p + p * entropy)
    return result
