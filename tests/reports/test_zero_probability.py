"""Public reports: a zero probability, infinities, NaN."""

import math

import oracle
import paths
import pytest
import torch
from closeness import assert_gradients, assert_values
from fingerprint import bits, results
from ranks import Ranks

from memlean import selective_log_softmax, token_stats
from memlean.distributed import vocab_parallel_selective_log_softmax

INF, NAN = math.inf, math.nan


@pytest.mark.usefixtures("each_path")
def test_report_skyrl_2259():
    """Padded columns at -inf made the entropy NaN."""
    logits = torch.randn(3, 8)
    logits[:, 5:] = -INF
    p = logits.softmax(-1)
    assert (p * p.log()).sum(-1).isnan().all()  # the reported recipe
    index = torch.tensor([0, 2, 4])
    _, entropy, gradient = results(logits, index)
    assert_values(entropy, oracle.logps_and_entropy(logits[:, :5], index)[1], ulps=2)
    assert torch.equal(gradient[:, 5:], torch.zeros(3, 3))
    assert gradient[:, :5].ne(0).all()


def of_shard(rank, logits, index):
    shard = logits.chunk(2, -1)[rank].clone().requires_grad_()
    logps, entropy = vocab_parallel_selective_log_softmax(shard, index, return_entropy=True)
    (gradient,) = torch.autograd.grad(logps.sum() + entropy.sum(), shard)
    return logps.detach(), entropy.detach(), gradient


def test_report_skyrl_2259_on_two_ranks():
    """One rank is padded in part, in another row it holds nothing but padding."""
    logits, index = torch.randn(3, 16), torch.tensor([0, 6, 7])
    logits[:, 13:] = -INF
    logits[1, 8:] = -INF
    logps, entropy = oracle.logps_and_entropy(logits, index)
    gradient = oracle.gradient(logits, index, torch.ones(3), torch.ones(3))
    with Ranks(2) as ranks:
        answers = ranks(of_shard, logits, index)
    for (got_logps, got_entropy, got_gradient), part in zip(answers, gradient.chunk(2, -1), strict=True):
        assert_values(got_logps, logps, ulps=2)
        assert_values(got_entropy, entropy, ulps=2)
        assert_gradients(got_gradient, part, scale=10)
    assert torch.equal(answers[1][2][1], torch.zeros(8))


@pytest.mark.parametrize("ref", ["allennlp_890", "openrlhf_583"])
@pytest.mark.usefixtures("each_path")
def test_report(ref):
    """A row that is masked completely gave NaN to the whole batch by the mean."""
    logits, index = torch.randn(2, 8), torch.tensor([3, 5])
    logits[1] = -INF
    both, alone = results(logits, index), results(logits[:1], index[:1])
    for got, expected in zip(both, alone, strict=True):
        assert torch.equal(got[:1], expected)
        assert got[1].isnan().all()
    assert both[0].mean().isnan()  # why a caller has to name such rows
    masked = results(logits, index, row_mask=torch.tensor([1, 0]))
    assert all(x.isfinite().all() for x in masked)
    assert torch.equal(masked[2][1], torch.zeros(8))


@pytest.mark.parametrize("ref", ["mindspore_378", "pytorch_161150"])
@pytest.mark.parametrize("row", [[NAN, INF, -INF], [-INF, INF, INF]], ids=str)
def test_report_nan_and_inf(ref, row):
    """A mix of NaN and -inf, and other numbers when compiled."""
    logits, index = torch.tensor([row, [0.5, 1.0, -1.0]]), torch.tensor([[0, 1, 2], [2, 1, 0]])

    def call(logits, index):
        stats = token_stats(logits * 1, index)
        return *selective_log_softmax(logits * 1, index, return_entropy=True), stats.logsumexp, stats.sum_p2

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(logits, index)
    assert bits(*compiled) == bits(*call(logits, index))
    clean = results(logits[1:], index[1:])
    contexts = [paths.generic(), *map(paths.level, paths.LEVELS)]
    for context in contexts:
        with context:
            got = results(logits, index)
            everything = call(logits, index)
        for x, expected in zip(got, clean, strict=True):
            assert x[0].isnan().all()
            assert torch.allclose(x[1:], expected, rtol=1e-6)
        assert all(x[0].isnan().all() for x in everything)
        assert all(x[1].isfinite().all() for x in everything)
    if paths.LEVELS:
        assert len({bits(*results_at(level, logits, index)) for level in paths.LEVELS}) == 1


def results_at(level, logits, index):
    with paths.level(level):
        return results(logits, index)


@pytest.mark.usefixtures("each_path")
def test_report_pytorch2_0_ttnn_1341():
    """log(softmax(x)) is -inf for a token far below the maximum."""
    logits, index = torch.tensor([[0.0, -200.0]]), torch.tensor([1])
    assert logits.softmax(-1).log()[0, 1] == -INF  # the reported recipe
    leaf = logits.requires_grad_()
    logps, entropy = selective_log_softmax(leaf, index, return_entropy=True)
    assert logps.item() == -200
    assert entropy.item() == 0
    (gradient,) = torch.autograd.grad(logps.sum(), leaf)
    assert gradient.tolist() == [[-1.0, 1.0]]
