"""More than 2^31 elements, and strides beyond them."""

from pathlib import Path

import oracle
import pytest
import torch
from closeness import assert_gradients, assert_values

from memlean import selective_log_softmax

VOCAB = 8192


def rows_far_apart(count, distance):
    """``[count, VOCAB]`` in a storage of which only these rows are ever touched."""
    storage = torch.empty((count - 1) * distance + VOCAB, dtype=torch.bfloat16)
    logits = storage.as_strided((count, VOCAB), (distance, 1))
    return logits.copy_(torch.randn(count, VOCAB))


@pytest.mark.usefixtures("each_path")
@pytest.mark.parametrize("distance", [2**31 - 1, 2**31, 2**32 + 8])
def test_a_row_stride_beyond_32_bits(distance):
    logits = rows_far_apart(2, distance)
    index = torch.randint(VOCAB, (2,))
    leaf = logits.requires_grad_()
    logps, entropy = selective_log_softmax(leaf, index, return_entropy=True)
    for value, expected in zip((logps, entropy), oracle.logps_and_entropy(logits, index), strict=True):
        assert_values(value, expected, ulps=2)
    (gradient,) = torch.autograd.grad(logps.sum(), leaf)
    assert_gradients(gradient, oracle.gradient(logits, index, torch.ones(2), None))


def test_a_vocabulary_stride_that_reaches_beyond_32_bits():
    storage = torch.empty(2**31 + 2**21, dtype=torch.bfloat16)
    logits = storage.as_strided((1025,), (2**21,)).copy_(torch.randn(1025))
    index = torch.tensor([0, 500, 1024])
    expected, _ = oracle.logps_and_entropy(logits, index)
    assert_values(selective_log_softmax(logits, index), expected, ulps=2)


def _available_memory():
    meminfo = Path("/proc/meminfo")
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines()) if meminfo.exists() else {}
    return int(lines.get("MemAvailable", "0").split()[0]) * 1024


@pytest.mark.skipif(_available_memory() < 10 * 2**30, reason="needs 4 GiB for the gradient, and some to spare")
def test_last_row_of_more_than_2_to_the_31_elements():
    vocab, rows = 2**20, 2**11 + 1
    logits = torch.randn(vocab).bfloat16().expand(rows, vocab).requires_grad_()  # 2 MiB
    index = torch.zeros(rows, dtype=torch.long)
    index[-1] = vocab - 1
    logps = selective_log_softmax(logits, index)
    assert logps[:-1].eq(logps[0]).all()
    last = logits.detach()[-1:]
    assert_values(logps[-1:], oracle.logps_and_entropy(last, index[-1:])[0], ulps=2)

    # Backward skips rows without an upstream gradient, so that this is mostly writing zeros.
    upstream = torch.zeros(rows)
    upstream[-1] = 1
    (gradient,) = torch.autograd.grad(logps, logits, upstream)
    assert_gradients(gradient[-1:], oracle.gradient(last, index[-1:], torch.ones(1), None))
    assert not gradient[-2].any()
