"""Log-probabilities and entropy against float64."""

import math

import hostile
import oracle
import pytest
import torch
from closeness import assert_values, ulp

from memlean import selective_log_softmax

pytestmark = pytest.mark.usefixtures("each_path")


def real(dtype):
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.fixture
def ulps(each_path):
    """The C kernels finish each row in float64; the generic path, for devices without it, rounds every step."""
    return {"native": 1, "generic": 2}[each_path]


@pytest.mark.parametrize("vocab", hostile.VOCABS)
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_hostile_rows_against_float64(dtype, vocab, ulps):
    logits = hostile.rows(vocab, dtype)
    index = hostile.telling_index(logits)
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    expected_logps, expected_entropy = oracle.logps_and_entropy(logits, index)
    assert logps.dtype == entropy.dtype == real(dtype)
    assert_values(logps, expected_logps, ulps)
    # Where all terms are equal, as in float16 at an offset of 1e4, so are the errors of their exp, and W adds them up.
    assert_values(entropy, expected_entropy, ulps + 1)
    assert not (logps > 0).any()
    assert not (entropy < 0).any()
    log_vocab = torch.tensor(math.log(vocab), dtype=torch.float64)
    assert not (entropy > log_vocab + ulp(log_vocab, entropy.dtype)).any()


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_every_small_vocabulary(dtype, ulps):
    for vocab in range(1, 71):
        logits = hostile.row("noise", vocab, dtype).expand(vocab, vocab)
        logps, entropy = selective_log_softmax(logits, torch.arange(vocab), return_entropy=True)
        expected_logps, expected_entropy = oracle.logps_and_entropy(logits, torch.arange(vocab))
        assert_values(logps, expected_logps, ulps)
        assert_values(entropy, expected_entropy, ulps)


def test_published_flat_row():
    logps, entropy = selective_log_softmax(torch.zeros(1, 151936), torch.tensor([7]), return_entropy=True)
    assert abs(logps.item() + 11.9312146585) <= 1e-6
    assert abs(entropy.item() - 11.9312146585) <= 1e-6


def test_published_peaked_row():
    logits = torch.randn(1, 151936)
    logits[0, 77] = 100.3
    index = torch.tensor([[0]])
    assert abs(selective_log_softmax(logits, index) - oracle.logps_and_entropy(logits, index)[0]).item() <= 3.05e-6


def test_bfloat16_error_is_one_ulp_and_the_row_loop_is_far_worse(ulps):
    logits = (torch.randn(32, 151936) * 3).bfloat16()
    logits[:16, 5] = 40
    index = torch.randint(151936, (32,))
    index[:8] = 5
    truth, _ = oracle.logps_and_entropy(logits, index)
    row_loop = torch.stack([x.log_softmax(-1)[y] for x, y in zip(logits, index, strict=True)])
    error = (selective_log_softmax(logits, index) - truth).abs()
    magnitude = logits.double().abs().amax(-1)
    assert (error <= ulps * ulp(magnitude, torch.float32)).all()
    assert (row_loop - truth).abs().max() > 1e4 * error.max()


@pytest.mark.parametrize("name", ["offset 1e4", "offset -1e4", "wide", "noise"])
def test_common_offset_changes_only_what_the_input_rounds(name, ulps):
    logits = hostile.row(name, 3000, torch.float32)[None]
    index = torch.tensor([17])
    for offset in (1.0, -1e3, 1e6, 1e20, -1e30):
        shifted = logits + offset
        got = selective_log_softmax(shifted, index, return_entropy=True)
        for value, expected in zip(got, oracle.logps_and_entropy(shifted, index), strict=True):
            assert_values(value, expected, ulps)


def test_common_offset_without_rounding_gives_the_same_bits():
    logits = torch.randint(-64, 64, (4, 5000)) / 8.0
    index = torch.randint(5000, (4,))
    plain = selective_log_softmax(logits, index, return_entropy=True)
    for offset in (-4096.0, 64.0, 2.0**17):
        for a, b in zip(plain, selective_log_softmax(logits + offset, index, return_entropy=True), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("gap", [1.0, 5.0, 14.0, 30.0, 80.0])
def test_a_nearly_certain_token_keeps_its_relative_precision(gap):
    # torch's own float32 log_softmax is 12 % off at p = 1 - 1e-6.
    logits = torch.tensor([[gap, 0.0]])
    index = torch.tensor([0])
    expected = -math.log1p(math.exp(-gap))
    got = selective_log_softmax(logits, index).item()
    assert math.isclose(got, expected, rel_tol=2e-6)


def test_far_below_the_maximum_is_not_minus_infinity():
    logps, entropy = selective_log_softmax(torch.tensor([0.0, -200.0]), torch.tensor(1), return_entropy=True)
    assert logps.item() == -200
    assert entropy.item() == 0


def test_float64_is_float64_throughout():
    logits = torch.tensor([0, 1e-12], dtype=torch.float64)
    logps = selective_log_softmax(logits, torch.tensor(1))
    assert abs(logps.item() - (-math.log(2) + 5e-13)) <= 2.3e-16


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_every_index_dtype_up_to_its_largest_value(dtype):
    vocab = min(torch.iinfo(dtype).max, 40000) + 1
    logits = torch.randn(3, vocab)
    index = torch.tensor([0, vocab // 2, vocab - 1])
    assert torch.equal(selective_log_softmax(logits, index.to(dtype)), selective_log_softmax(logits, index))


@pytest.mark.parametrize("shape", [(), (6,), (2, 3), (3, 1, 2), (1, 2, 1, 3)], ids=str)
@pytest.mark.parametrize("candidates", [None, 0, 1, 4])
def test_every_rank_equals_flat_rows(shape, candidates):
    logits = torch.randn(*shape, 11)
    index = torch.randint(11, shape if candidates is None else (*shape, candidates))
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    assert logps.shape == index.shape
    assert entropy.shape == shape
    rows = entropy.numel()
    flat_index = index.reshape(rows) if candidates is None else index.reshape(rows, candidates)
    flat = selective_log_softmax(logits.reshape(rows, 11), flat_index, return_entropy=True)
    assert torch.equal(logps.flatten(), flat[0].flatten())
    assert torch.equal(entropy.flatten(), flat[1])


def test_trailing_one_is_a_candidate_and_stays():
    logits = torch.randn(2, 5, 7)
    index = torch.randint(7, (2, 5))
    assert torch.equal(
        selective_log_softmax(logits, index.unsqueeze(-1)).squeeze(-1), selective_log_softmax(logits, index)
    )


def test_candidates_equal_one_call_each():
    logits = torch.randn(4, 50)
    index = torch.randint(50, (4, 70))  # more candidates than tokens: with duplicates
    each = torch.stack([selective_log_softmax(logits, index[:, k]) for k in range(70)], -1)
    assert torch.equal(selective_log_softmax(logits, index), each)


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_out_dtype_input_rounds_once(dtype):
    logits = torch.randn(5, 300).to(dtype)
    index = torch.randint(300, (5,))
    exact = selective_log_softmax(logits, index, return_entropy=True)
    rounded = selective_log_softmax(logits, index, return_entropy=True, out_dtype="input")
    for a, b in zip(exact, rounded, strict=True):
        assert b.dtype == dtype
        assert torch.equal(a.to(dtype), b)


def test_entropy_does_not_change_logps():
    logits, index = hostile.rows(40000, torch.bfloat16), torch.randint(40000, (len(hostile.ROWS),))
    alone = selective_log_softmax(logits, index)
    assert torch.equal(alone, selective_log_softmax(logits, index, return_entropy=True)[0])


def test_sum_of_all_probabilities_is_one():
    logits = torch.randn(3, 5000) * 5
    every = selective_log_softmax(logits, torch.arange(5000).expand(3, 5000))
    assert (every.double().exp().sum(-1) - 1).abs().max() <= 1e-6


def test_parameter_and_subclass_without_behaviour_of_its_own():
    logits = torch.nn.Parameter(torch.randn(2, 9))
    logps = selective_log_softmax(logits, torch.tensor([1, 2]))
    assert type(logps) is torch.Tensor
    assert logps.requires_grad
