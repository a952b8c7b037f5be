"""Public reports: more than 2^31 elements, and strides beyond 32 bits."""

import oracle
import pytest
import torch
from closeness import assert_gradients, assert_values

from memlean import selective_log_softmax

VOCAB = 4096
FAR = 2**31 + 4096


def _strided(shape, stride):
    """A view of which only its own elements are ever touched."""
    reach = sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) + 1
    return torch.empty(reach, dtype=torch.bfloat16).as_strided(shape, stride).copy_(torch.randn(shape))


INPUTS = {
    "pytorch_84144": lambda: _strided((2, VOCAB), (FAR, 1)),  # row * stride is beyond 2^31
    "onnxruntime_32299": lambda: _strided((3, VOCAB), (2**30 + 5, 1)),  # the third row alone is
    "paddle_71935": lambda: _strided((2, 2, VOCAB), (FAR, VOCAB, 1)),  # batch * stride is
    "trl_7266": lambda: _strided((2, 3, VOCAB), (VOCAB, FAR, 1)),  # position * stride is, in a transposed batch
    "fastertransformer_524": lambda: _strided((1, 1025), (1, 2**21)),  # column * stride is
}


@pytest.mark.parametrize("ref", INPUTS)
@pytest.mark.usefixtures("each_path")
def test_report(ref):
    """Offsets in 32 bits: the last rows were zero, garbage or untouched, without an error."""
    logits = INPUTS[ref]().requires_grad_()
    index = torch.randint(logits.shape[-1], logits.shape[:-1])
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    for value, expected in zip((logps, entropy), oracle.logps_and_entropy(logits, index), strict=True):
        assert_values(value, expected, ulps=3)
    upstream = torch.ones(index.shape)
    (gradient,) = torch.autograd.grad(logps.sum(), logits)
    assert_gradients(gradient, oracle.gradient(logits, index, upstream, None), scale=10)
