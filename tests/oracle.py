"""The truth that tests compare with: float64 formulas on plain PyTorch, nothing of memlean in them."""

import torch
from torch import Tensor


def logps_and_entropy(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiable float64 values. Entropy's gradient is NaN where a logit is -inf: use `gradient` there."""
    log_p = logits.double().log_softmax(-1)
    chosen = index.long().unsqueeze(-1) if index.dim() == logits.dim() - 1 else index.long()
    logps = log_p.gather(-1, chosen).view(index.shape)
    p = log_p.exp()
    return logps, -torch.special.xlogy(p, p).sum(-1)


def gradient(logits: Tensor, index: Tensor, grad_logps: Tensor | None, grad_entropy: Tensor | None) -> Tensor:
    """d(sum grad_logps * logps + grad_entropy * entropy) / d logits in float64, with 0 log 0 = 0."""
    x = logits.detach().double()
    log_p = x.log_softmax(-1)
    p = log_p.exp()
    result = torch.zeros_like(x)
    if grad_logps is not None:
        chosen = index.long().unsqueeze(-1) if index.dim() == logits.dim() - 1 else index.long()
        g = grad_logps.double().reshape(chosen.shape)
        result = result.scatter_add(-1, chosen, g) - p * g.sum(-1, keepdim=True)
    if grad_entropy is not None:
        entropy = -torch.special.xlogy(p, p).sum(-1, keepdim=True)
        result = result - grad_entropy.double().unsqueeze(-1) * (torch.special.xlogy(p, p) + p * entropy)
    return result
