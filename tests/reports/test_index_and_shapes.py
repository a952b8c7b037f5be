"""Public reports: index and shapes."""

import oracle
import pytest
import torch
from closeness import assert_gradients

from memlean import selective_log_softmax

pytestmark = pytest.mark.usefixtures("each_path")


@pytest.mark.parametrize("chunk_bytes", [1, 3 * 4 * 50, None])
def test_report_verl_6446(chunk_bytes):
    """The chunk loop ran over dimension 1, which is the vocabulary of two-dimensional logits."""
    logits, index = torch.randn(12, 50), torch.randint(50, (12,))
    upstream = torch.linspace(1, 2, 12)

    def call(shape):
        leaf = logits.view(*shape, 50).clone().requires_grad_()
        outputs = selective_log_softmax(leaf, index.view(shape), True, chunk_bytes=chunk_bytes)
        (gradient,) = torch.autograd.grad(outputs, leaf, [upstream.view(shape)] * 2)
        return *(x.flatten() for x in outputs), gradient.view(12, 50)

    flat = call((12,))
    for shape in [(3, 4), (1, 12), (12, 1), (2, 3, 2)]:
        for a, b in zip(call(shape), flat, strict=True):
            assert torch.equal(a, b)
    one = selective_log_softmax(logits[5], index[5], chunk_bytes=chunk_bytes)
    assert one.shape == ()
    assert torch.allclose(one, flat[0][5], rtol=1e-6)


def test_report_trl_5104():
    """The index may hold candidates, ``[..., K]``; ``[2, 5, 1]`` is one candidate, not ``[2, 5]``."""
    logits, index = torch.randn(2, 5, 9, requires_grad=True), torch.randint(9, (2, 5, 4))
    index[..., 3] = index[..., 0]
    candidates = selective_log_softmax(logits, index)
    assert candidates.shape == (2, 5, 4)
    for k in range(4):
        assert torch.equal(candidates[..., k], selective_log_softmax(logits, index[..., k]))
    upstream = torch.randn(2, 5, 4)
    (gradient,) = torch.autograd.grad(candidates, logits, upstream)
    assert_gradients(gradient, oracle.gradient(logits, index, upstream, None), scale=10)
    assert selective_log_softmax(logits, index[..., :1]).shape == (2, 5, 1)
    assert selective_log_softmax(logits, index[..., 0]).shape == (2, 5)
    for shape in [(2, 1), (5,), (2, 5, 1, 1), (1, 5, 4)]:
        with pytest.raises(ValueError, match=r"index must have shape \[2, 5\] or \[2, 5, 'K'\]"):
            selective_log_softmax(logits, torch.zeros(shape, dtype=torch.long))
