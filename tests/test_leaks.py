"""Hundreds of iterations: resident memory stays where it is."""

import pytest
import torch
from memory import give_back_freed_memory, needs_high_water_mark, resident
from torch.utils.checkpoint import checkpoint

from memlean import selective_log_softmax, token_stats

pytestmark = [needs_high_water_mark, pytest.mark.usefixtures("each_path")]
ITERATIONS, ROWS, VOCAB = 500, 256, 256
LOGITS_BYTES = ROWS * VOCAB * 4


def logps(logits, index):
    return selective_log_softmax(logits, index).sum()


def with_entropy(logits, index):
    return sum(x.sum() for x in selective_log_softmax(logits, index, return_entropy=True))


def inplace(logits, index):
    return selective_log_softmax(logits * 1, index, inplace_backward=True).sum()


def refused(logits, index):
    with pytest.raises(IndexError):
        selective_log_softmax(logits, index + VOCAB)
    return logits[0, 0]


STEPS = {
    "forward": lambda logits, index: logps(logits.detach(), index),
    "forward and backward": lambda *batch: logps(*batch).backward(),
    "with entropy": lambda *batch: with_entropy(*batch).backward(),
    "a graph that is thrown away": lambda *batch: with_entropy(*batch),
    "checkpoint": lambda *batch: checkpoint(with_entropy, *batch, use_reentrant=False).backward(),
    "reentrant checkpoint": lambda *batch: checkpoint(with_entropy, *batch, use_reentrant=True).backward(),
    "create_graph": lambda logits, index: torch.autograd.grad(with_entropy(logits, index), logits, create_graph=True),
    "inplace_backward": lambda *batch: inplace(*batch).backward(),
    "token_stats": lambda *batch: token_stats(*batch).logsumexp.sum().backward(),
    "an error": lambda *batch: refused(*batch).backward(),
}


def growth(step) -> int:
    """Bytes by which resident memory rises from the tenth part of the iterations to the end."""
    index = torch.randint(VOCAB, (ROWS,))
    for i in range(ITERATIONS):
        step(torch.randn(ROWS, VOCAB, requires_grad=True), index)
        if i == ITERATIONS // 10:
            give_back_freed_memory()
            before = resident()
    give_back_freed_memory()
    return resident() - before


@pytest.fixture(autouse=True)
def one_thread(threads):
    threads(1)  # thousands of small calls


@pytest.mark.parametrize("step", STEPS)
def test_resident_memory_is_flat(step):
    # The statistics lost in each iteration would be 1.3 MiB, the logits 112 MiB.
    assert growth(STEPS[step]) <= 2**20


def test_a_leak_would_show():
    kept = []
    assert growth(lambda logits, index: kept.append(logits * 1)) > 100 * LOGITS_BYTES
