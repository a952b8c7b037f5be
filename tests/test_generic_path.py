"""The path for devices without a kernel: bounded temporaries, no waiting for the device, no accumulating scatter."""

import oracle
import pytest
import torch
from closeness import assert_gradients, assert_values
from memory import Dispatched, needs_high_water_mark, peak_growth

from memlean import _env, reference, selective_log_softmax

pytestmark = pytest.mark.usefixtures("generic_path")

ROWS, VOCAB = 64, 4000
KIB, MIB = 2**10, 2**20


def both_passes(dtype, return_entropy, chunk_bytes=None, logits=None):
    """What each pass dispatched; results and the gradient left out."""
    logits = torch.randn(ROWS, VOCAB).to(dtype) if logits is None else logits
    leaf = logits.detach().requires_grad_()
    index = torch.randint(leaf.shape[-1], (*leaf.shape[:-1], 2))
    with Dispatched() as forward:
        outputs = selective_log_softmax(leaf, index, return_entropy, chunk_bytes=chunk_bytes)
    loss = sum(x.sum() for x in outputs) if return_entropy else outputs.sum()
    with Dispatched() as backward:
        torch.autograd.grad(loss, leaf)
    backward.allocated.remove(leaf.numel() * leaf.element_size())
    return forward, backward


@pytest.mark.parametrize("budget", [16 * KIB, 100 * KIB, 10**6])
@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_largest_temporary_is_within_the_budget_in_both_passes(dtype, return_entropy, budget):
    one_row = VOCAB * (8 if dtype == torch.float64 else 4)
    for one_pass in both_passes(dtype, return_entropy, budget):
        assert max(one_pass.allocated) <= max(budget, one_row)
        assert max(one_pass.allocated) > budget / 2  # and the budget is used


@pytest.mark.parametrize("layout", ["slice", "transposed", "expanded", "vocabulary stride"])
def test_strided_logits_stay_within_the_budget(layout):
    logits = {
        "slice": torch.randn(8, 9, VOCAB)[:, :-1],
        "transposed": torch.randn(8, 8, VOCAB).transpose(0, 1),
        "expanded": torch.randn(1, VOCAB).expand(64, VOCAB),
        "vocabulary stride": torch.randn(VOCAB, 64).t(),
    }[layout]
    for one_pass in both_passes(torch.float32, True, 64 * KIB, logits):
        assert max(one_pass.allocated) <= 64 * KIB


def test_the_environment_sets_the_default_budget(monkeypatch):
    monkeypatch.setenv("MEMLEAN_CHUNK_BYTES", str(80 * KIB))
    for one_pass in both_passes(torch.float32, True):
        assert 40 * KIB < max(one_pass.allocated) <= 80 * KIB


def test_the_argument_wins_over_the_environment(monkeypatch):
    monkeypatch.setenv("MEMLEAN_CHUNK_BYTES", "1")
    for one_pass in both_passes(torch.float32, True, 80 * KIB):
        assert 40 * KIB < max(one_pass.allocated) <= 80 * KIB


def test_default_budgets():
    assert _env.chunk_bytes(return_entropy=False) == 64 * MIB
    assert _env.chunk_bytes(return_entropy=True) == 32 * MIB


@pytest.mark.parametrize("value", ["0", "-5", "64M", "1e6", "none"])
def test_the_budget_in_the_environment_must_be_a_positive_number(value, monkeypatch):
    monkeypatch.setenv("MEMLEAN_CHUNK_BYTES", value)
    with pytest.raises(ValueError, match=f"MEMLEAN_CHUNK_BYTES must be a positive number of bytes, got '{value}'"):
        selective_log_softmax(torch.zeros(2, 3), torch.zeros(2, dtype=torch.long))


@needs_high_water_mark
@pytest.mark.parametrize("return_entropy", [False, True])
def test_peak_memory_is_a_few_chunks_and_the_gradient(return_entropy):
    budget = 40 * MIB  # above glibc's largest mmap threshold, so that freed chunks really leave
    logits = torch.randn(256, 151_936).bfloat16().requires_grad_()
    index = torch.randint(151_936, (256,))
    outputs = []

    def forward():
        outputs[:] = torch.utils._pytree.tree_leaves(
            selective_log_softmax(logits, index, return_entropy, chunk_bytes=budget)
        )

    assert peak_growth(forward) <= 4 * budget
    gradient_bytes = logits.numel() * logits.element_size()
    loss = sum(x.sum() for x in outputs)
    assert peak_growth(lambda: torch.autograd.grad(loss, logits)) <= gradient_bytes + 4 * budget


def test_no_accumulating_scatter_and_no_one_hot():
    for one_pass in both_passes(torch.float32, True, 64 * KIB):
        names = " ".join(one_pass.operators)
        for forbidden in ("scatter_add", "index_add", "accumulate", "one_hot", "index_put"):
            assert forbidden not in names


def test_no_graph_inside():
    logits, index = torch.randn(4, 50, requires_grad=True), torch.randint(50, (4,))
    logp, entropy, statistics = reference.token_logprob_forward(logits, index, True)
    assert not any(x.requires_grad for x in (logp, entropy, statistics))
    gradient = reference.token_logprob_backward(logits, index, statistics, logp, entropy)
    assert not gradient.requires_grad


@pytest.mark.parametrize("return_entropy", [False, True])
def test_nothing_waits_for_the_device(return_entropy):
    # On meta tensors whatever looks at a value raises: .item(), nonzero, a branch on a tensor.
    logits = torch.randn(6, 50, device="meta", requires_grad=True)
    index = torch.zeros(6, 3, dtype=torch.long, device="meta")
    with Dispatched() as dispatched:
        outputs = selective_log_softmax(logits, index, return_entropy, chunk_bytes=600)
        loss = sum(x.sum() for x in outputs) if return_entropy else outputs.sum()
        (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.shape == logits.shape
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & set(dispatched.operators)


def test_an_index_out_of_range_is_nan_where_it_cannot_raise(monkeypatch):
    # As on a device where looking at the index would have to wait.
    monkeypatch.setattr(reference, "check_index", lambda index, vocab, ignore_index: None)
    logits, index = torch.randn(3, 9), torch.tensor([4, 9, -100])
    logps = selective_log_softmax(logits, index)
    assert logps[0] == selective_log_softmax(logits[:1], index[:1])[0]
    assert logps[1:].isnan().all()


@pytest.mark.parametrize("chunk_bytes", [1, 5000, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_small_chunks_against_float64(dtype, chunk_bytes):
    logits, index = torch.randn(3, 5, 300).to(dtype).requires_grad_(), torch.randint(300, (3, 5, 4))
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True, chunk_bytes=chunk_bytes)
    for value, expected in zip((logps, entropy), oracle.logps_and_entropy(logits, index), strict=True):
        assert_values(value, expected, ulps=2)
    (gradient,) = torch.autograd.grad(logps.sum() - entropy.sum(), logits)
    upstream = torch.ones_like(logps)
    assert_gradients(gradient, oracle.gradient(logits, index, upstream, -torch.ones(3, 5)), scale=10)
