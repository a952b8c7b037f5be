"""Public reports: magnitude and precision."""

import math

import oracle
import pytest
import torch
from closeness import ulp

from memlean import selective_log_softmax

pytestmark = pytest.mark.usefixtures("each_path")


def test_report_xtuner_1108():
    """The ratio of one policy to itself was not 1: one pass stayed in bfloat16, the other went to float32."""
    logits, index = (torch.randn(8, 5000) * 5).bfloat16(), torch.randint(5000, (8,))
    in_bfloat16, in_float32 = (x.log_softmax(-1).gather(-1, index.view(-1, 1)) for x in (logits, logits.float()))
    assert (in_float32 - in_bfloat16).exp().ne(1).any()  # the reported recipe
    with torch.no_grad():
        old = selective_log_softmax(logits, index, return_entropy=True)
    new = selective_log_softmax(logits.clone().requires_grad_(), index, return_entropy=True)
    for a, b in zip(old, new, strict=True):
        assert torch.equal(a, b)
    assert torch.equal((new[0] - old[0]).exp(), torch.ones(8))


def test_report_bergson_399():
    """float64 logits lost their precision in the loss."""
    logits, index = torch.tensor([[0.0, 1e-12]], dtype=torch.float64), torch.tensor([1])
    assert logits.float().log_softmax(-1)[0, 1].item() == pytest.approx(-math.log(2), abs=1e-7)
    assert abs(logits.float().log_softmax(-1)[0, 1].item() - (5e-13 - math.log(2))) > 1e-10  # the reported recipe
    leaf = logits.clone().requires_grad_()
    logps, entropy = selective_log_softmax(leaf, index, return_entropy=True)
    assert abs(logps.item() - (5e-13 - math.log(2))) <= 2.3e-16
    assert abs(entropy.item() - math.log(2)) <= 2.3e-16
    (gradient,) = torch.autograd.grad(logps.sum(), leaf)
    assert torch.allclose(gradient, oracle.gradient(logits, index, torch.ones(1), None), rtol=1e-15, atol=0)
    assert torch.autograd.gradcheck(lambda x: selective_log_softmax(x, index, return_entropy=True), leaf)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_report_maxtext_5231(dtype):
    """Log-probabilities above 0 from the difference of two rounded numbers."""
    exact = torch.randn(200, 500)
    exact[:, 3] = torch.linspace(2, 90, 200)
    logits, index = exact.to(dtype), exact.argmax(-1)
    if dtype == torch.bfloat16:
        recipe = logits.gather(-1, index.view(-1, 1)).squeeze(-1) - exact.logsumexp(-1)
        assert (recipe > 0.03).any()
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    assert (logps <= 0).all()
    assert (entropy >= 0).all()
    highest = torch.tensor(math.log(500), dtype=torch.float64)
    assert (entropy <= highest + ulp(highest, torch.float32)).all()
    flat = selective_log_softmax(torch.full((1, 500), 0.3).to(dtype), torch.tensor([0]), return_entropy=True)
    assert 0 < flat[1].item() <= highest + ulp(highest, torch.float32)
