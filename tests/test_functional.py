import math

import pytest
import torch

import oracle
from memlean import selective_log_softmax

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def hostile_logits(vocab: int, dtype: torch.dtype) -> torch.Tensor:
    """Eight rows: flat, peaked, offset, with -inf blocks and masking constants."""
    torch.manual_seed(vocab)
    x = torch.randn(8, vocab) * 3
    x[1] = 0
    x[2, vocab // 2] = 60
    x[3] += 1000
    x[4, ::3] = -math.inf
    x[5, 1:] = -60000
    x[6] *= 10
    x[7] = torch.linspace(-1, 1, vocab)
    return x.to(dtype)


@pytest.mark.parametrize("vocab", [1, 2, 10, 33, 1000, 32769, 151936])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_gradients_against_float64(dtype, vocab):
    logits = hostile_logits(vocab, dtype).requires_grad_()
    index = torch.randint(1 if vocab > 1 else 0, vocab, (8,))
    index[2] = vocab // 2
    if vocab == 1:
        logits.data[4] = 0  # all -inf has a test of its own
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    expected_logps, expected_entropy = oracle.logps_and_entropy(logits.detach(), index)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    assert logps.dtype == entropy.dtype == real
    tight = 1e-12 if dtype == torch.float64 else 1.2e-7
    scale = expected_logps.abs().clamp(min=12)
    assert ((logps - expected_logps).abs() <= scale * tight).logical_or(logps == expected_logps).all()
    assert (entropy - expected_entropy).abs().max() <= 12 * tight
    assert logps.max() <= 0 and entropy.min() >= 0

    grad_logps, grad_entropy = torch.randn(8, dtype=real), torch.randn(8, dtype=real)
    (gradient,) = torch.autograd.grad([logps, entropy], logits, [grad_logps, grad_entropy])
    assert gradient.dtype == dtype
    expected = oracle.gradient(logits, index, grad_logps, grad_entropy)
    rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(dtype, 0)
    assert ((gradient - expected).abs() <= expected.abs() * rounding + 40 * tight).all()
