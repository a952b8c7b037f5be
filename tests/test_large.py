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


@pytest.mark.skipif(_available_memory() < 12 * 2**30, reason="needs 8.6 GB for logits and gradient, and some to spare")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_row_of_more_than_2_to_the_31_elements_in_memory(dtype):
    vocab = 151_936
    rows = 2**31 // vocab + 2
    logits = torch.zeros(rows, vocab, dtype=dtype)
    told_apart = torch.tensor([0, rows // 2, rows - 2, rows - 1])  # the last two lie beyond 2^31 elements
    logits[told_apart] = torch.randn(4, vocab).to(dtype)
    index = torch.arange(rows)
    logps, entropy = selective_log_softmax(logits.requires_grad_(), index, return_entropy=True)
    flat = torch.ones(rows).bool()
    flat[told_apart] = False
    assert logps[flat].eq(logps[1]).all()
    for value, expected in zip(
        (logps, entropy), oracle.logps_and_entropy(logits[told_apart], index[told_apart]), strict=True
    ):
        assert_values(value[told_apart], expected, ulps=2)
    upstream = torch.zeros(rows)
    upstream[told_apart] = 1
    (gradient,) = torch.autograd.grad(logps, logits, upstream)
    expected = oracle.gradient(logits[told_apart], index[told_apart], torch.ones(4), None)
    assert_gradients(gradient[told_apart], expected)
    assert not gradient[1].any()
    assert not gradient[-3].any()


@pytest.mark.parametrize("shape_and_stride", [((2, 8), (2**62, 1)), ((2**20, 8), (2**50, 1)), ((2, 8), (2**63 - 1, 1))])
def test_rows_times_stride_beyond_64_bits_are_refused_before_memlean_sees_them(shape_and_stride):
    # The kernels check it themselves as well: tests/c/test_kernels.c.
    with pytest.raises(RuntimeError, match=r"storage|overflow"):
        torch.zeros(8).as_strided(*shape_and_stride)
