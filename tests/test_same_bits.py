"""The same bits for every thread count, batch, chunking and instruction set."""

import json
from pathlib import Path

import child
import fingerprint
import hostile
import pytest
import torch
from fingerprint import fingerprints, results

from memlean import _ops, selective_log_softmax

needs_native = pytest.mark.skipif(_ops.native is None, reason="a promise of the C kernels, which this run does not use")
VOCAB = 100_001  # four segments, the last one short


@pytest.fixture(scope="module")
def here():
    return fingerprints()


@pytest.fixture
def assert_same(each_path):
    """The same bits from the C kernels. torch's own reductions, on the generic path, depend on the number of rows."""

    def bits(a, b):
        assert torch.equal(a.nan_to_num(), b.nan_to_num())

    def nearly(a, b):
        assert torch.allclose(a, b, rtol=1e-5 if a.dtype != torch.bfloat16 else 2**-7, atol=2e-6, equal_nan=True)

    return bits if each_path == "native" else nearly


def test_hashes_tell_cases_apart(here):
    certain = [name for name in here if " 1 " in name]  # a vocabulary of one: zeros in float32, three times
    assert len(set(here.values())) == len(here) - len(certain) + 2


@needs_native
@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_thread_count(count, threads, here):
    threads(count)
    assert fingerprints() == here


@pytest.mark.parametrize("isa", _ops.native.isa_available() if _ops.native else [])
def test_every_instruction_set(isa, here):
    script = str(Path(fingerprint.__file__))
    assert json.loads(child.output_of(script, MEMLEAN_ISA=isa, OMP_NUM_THREADS="1")) == here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_position_and_size_of_a_batch(dtype, assert_same):
    # 40 rows go to threads row by row, one row is split over them.
    logits = torch.cat([hostile.rows(VOCAB, dtype), hostile.rows(VOCAB, dtype).flip(0)])[:40]
    index = hostile.telling_index(logits)
    whole = results(logits, index)
    for part in (slice(0, 1), slice(7, 8), slice(39, 40), slice(3, 8), slice(1, None)):
        for a, b in zip(whole, results(logits[part], index[part]), strict=True):
            assert_same(a[part], b)
    for a, b in zip(whole, results(logits.flip(0), index.flip(0)), strict=True):
        assert_same(a, b.flip(0))


@pytest.mark.parametrize("chunk_bytes", [1, 4 * VOCAB, 12 * VOCAB + 5, 2**30])
def test_every_chunking(chunk_bytes, assert_same):
    logits = torch.randn(11, VOCAB).bfloat16()
    index = torch.randint(VOCAB, (11, 2))
    for a, b in zip(results(logits, index), results(logits, index, chunk_bytes=chunk_bytes), strict=True):
        assert_same(a, b)


@pytest.mark.usefixtures("each_path")
def test_alignment_changes_no_bit():
    row = torch.randn(3001)
    index = torch.tensor([17])
    expected = results(row[None], index)
    for offset in range(1, 17):
        moved = torch.empty(3001 + offset)[offset:].copy_(row)
        for a, b in zip(expected, results(moved[None], index), strict=True):
            assert torch.equal(a, b)


def test_columns_of_minus_infinity_change_no_value(assert_same):
    logits, index = torch.randn(4, 3000), torch.randint(3000, (4,))
    padded = torch.cat([logits, torch.full((4, 72), -torch.inf)], -1)
    assert_same(selective_log_softmax(logits, index), selective_log_softmax(padded, index))
