"""NaN and infinities: contained in their row, never invented, never lost."""

import math

import hostile
import pytest
import torch

from memlean import selective_log_softmax

pytestmark = pytest.mark.usefixtures("each_path")
NAN, INF = math.nan, math.inf
POISON = [[NAN], [INF], [NAN, INF, -INF], [-INF, INF, INF], [-NAN]]


def finite_rows(vocab, dtype):
    logits = torch.randn(3, vocab).to(dtype).requires_grad_()
    return logits, torch.randint(vocab, (3, 2))


def results(logits, index):
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    (gradient,) = torch.autograd.grad([logps, entropy], logits, [torch.ones_like(logps), torch.ones_like(entropy)])
    return logps, entropy, gradient


@pytest.mark.parametrize("vocab", [3, 33, 5000, 40000])
@pytest.mark.parametrize("poison", POISON, ids=str)
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_poison_anywhere_makes_its_row_nan_and_no_other(dtype, poison, vocab):
    logits, index = finite_rows(vocab, dtype)
    clean = results(logits, index)
    for at in {0, vocab // 2, vocab - len(poison)}:
        poisoned = logits.detach().clone()
        width = min(len(poison), vocab - at)
        poisoned[1, at : at + width] = torch.tensor(poison[:width]).to(dtype)
        if not (poisoned[1].isnan() | poisoned[1].isposinf()).any():
            continue  # the block was cut off before its poison
        dirty = results(poisoned.requires_grad_(), index)
        for before, after in zip(clean, dirty, strict=True):
            assert after[1].isnan().all()
            assert torch.equal(before[::2], after[::2])


@pytest.mark.parametrize("vocab", [1, 8, 2048, 40000])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_a_row_of_minus_infinity_is_nan_and_alone(dtype, vocab):
    logits, index = finite_rows(vocab, dtype)
    clean = results(logits, index)
    masked = logits.detach().clone()
    masked[1] = -INF
    dirty = results(masked.requires_grad_(), index)
    for before, after in zip(clean, dirty, strict=True):
        assert after[1].isnan().all()
        assert torch.equal(before[::2], after[::2])


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_a_chosen_minus_infinity(dtype):
    logits = torch.tensor([[0.0, -INF, 0.0, -INF]]).to(dtype).requires_grad_()
    logps, entropy, gradient = results(logits, torch.tensor([1]))
    assert logps.item() == -INF
    assert entropy.item() == pytest.approx(math.log(2), abs=1e-7)
    assert gradient.tolist() == [[-0.5, 1.0, -0.5, 0.0]]


@pytest.mark.parametrize("mask", [-INF, -1e4, -60000.0])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_masked_columns_count_for_nothing(dtype, mask):
    logits = torch.randn(4, 100).to(dtype)
    padded = torch.cat([logits, torch.full((4, 29), mask).to(dtype)], -1)
    index = torch.randint(100, (4,))
    plain = results(logits.requires_grad_(), index)
    masked = results(padded.requires_grad_(), index)
    for a, b in zip(plain[:2], masked[:2], strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-6)
    assert torch.equal(masked[2][:, 100:], torch.zeros(4, 29).to(dtype))


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_one_token_vocabulary_is_certain(dtype):
    logits = torch.tensor([[3.0], [-1e4], [0.0]]).to(dtype).requires_grad_()
    logps, entropy, gradient = results(logits, torch.zeros(3, dtype=torch.long))
    for x in (logps, entropy, gradient.flatten()):
        assert torch.equal(x, torch.zeros_like(x))


@pytest.fixture
def flush_denormal():
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no such mode")
    yield
    torch.set_flush_denormal(False)


def test_denormal_float16_logits_count_where_denormal_floats_are_zero(flush_denormal):
    # They are ordinary floats once converted: 6e-5 is 60 times the error of a logp.
    logits, index = torch.tensor([[6e-5, 1e-6, 0.0, -6e-5]]).half(), torch.tensor([[0, 1, 2, 3]])
    logps = selective_log_softmax(logits, index)
    steps = logits.double() - logits[:, 2:3].double()
    assert torch.allclose((logps - logps[:, 2:3]).double(), steps, rtol=0, atol=2.4e-7)


def test_nan_upstream_stays_in_its_row():
    logits = torch.randn(3, 50, requires_grad=True)
    logps = selective_log_softmax(logits, torch.tensor([1, 2, 3]))
    (gradient,) = torch.autograd.grad(logps, logits, torch.tensor([1.0, NAN, 1.0]))
    assert gradient[1].isnan().all()
    assert gradient[::2].isfinite().all()
