"""What is saved for backward, what is written to, and what is not done at all."""

import hostile
import pytest
import torch
from memory import Dispatched, Saved

from memlean import selective_log_softmax

ROWS = 32


def inputs(dtype=torch.float32, vocab=1000, rows=ROWS):
    return torch.randn(rows, vocab).to(dtype).requires_grad_(), torch.randint(vocab, (rows,))


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_saved_are_the_callers_tensors_and_three_numbers_a_row(dtype, return_entropy):
    logits, index = inputs(dtype)
    with Saved() as saved:
        selective_log_softmax(logits, index, return_entropy)
    pointers = [tensor.data_ptr() for tensor in saved.tensors]
    assert len(pointers) == 3
    assert logits.data_ptr() in pointers
    assert index.data_ptr() in pointers
    number = torch.float64 if dtype == torch.float64 else torch.float32
    assert 0 < saved.bytes_beyond(logits, index) <= 3 * number.itemsize * ROWS <= 24 * ROWS


def test_at_most_16_bytes_a_row_and_no_more_saves_for_more_rows():
    counts = set()
    for rows in (1, 7, 100):
        logits, index = inputs(torch.bfloat16, rows=rows)
        with Saved() as saved:
            selective_log_softmax(logits, index, return_entropy=True)
        assert saved.bytes_beyond(logits, index) <= 16 * rows
        counts.add(len(saved.tensors))
    assert len(counts) == 1


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.uint8], ids=str)
def test_a_narrow_index_is_saved_as_it_is(index_dtype):
    logits, index = inputs(vocab=200)
    index = index.to(index_dtype)
    with Saved() as saved:
        selective_log_softmax(logits, index)
    assert index.data_ptr() in [tensor.data_ptr() for tensor in saved.tensors]
    assert saved.bytes_beyond(logits, index) <= 16 * ROWS


def test_a_view_is_saved_without_a_copy():
    logits, index = torch.randn(4, 9, 500, requires_grad=True), torch.randint(500, (4, 8))
    with Saved() as saved:
        selective_log_softmax(logits[:, :-1], index)
    assert saved.bytes_beyond(logits, index) <= 16 * 32


def test_entropy_with_zero_weight_retains_nothing_more():
    logits, index = inputs(vocab=5000)
    with Saved() as saved:
        logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
        loss = (logps - 0.0 * entropy).sum()
    assert saved.bytes_beyond(logits, index) <= 64 * ROWS
    loss.backward()


def test_saved_tensors_are_unpacked_once_in_a_backward():
    logits, index = inputs()
    with Saved() as saved:
        logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    (logps.sum() + entropy.sum()).backward()
    assert saved.unpacked == 3


def test_nothing_is_saved_without_a_gradient():
    logits, index = inputs()
    with Saved() as saved:
        with torch.no_grad():
            without_grad = selective_log_softmax(logits, index, return_entropy=True)
        frozen = selective_log_softmax(logits.detach(), index, return_entropy=True)
    assert saved.tensors == []
    assert not any(x.requires_grad for x in (*without_grad, *frozen))


@pytest.mark.usefixtures("each_path")
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_inputs_are_never_written_to(dtype):
    logits = hostile.rows(3000, dtype)
    logits[3, :5] = torch.nan
    index = hostile.telling_index(logits)
    before, index_before = logits.view(torch.uint8).clone(), index.clone()
    leaf = logits.requires_grad_()
    versions = leaf._version, index._version
    logps, entropy = selective_log_softmax(leaf, index, return_entropy=True)
    upstream = torch.randn_like(logps)
    upstream_before = upstream.clone()
    torch.autograd.grad([logps, entropy], leaf, [upstream, torch.ones_like(entropy)], create_graph=True)
    torch.autograd.grad([logps, entropy], leaf, [upstream, torch.ones_like(entropy)])
    assert (leaf._version, index._version) == versions
    assert torch.equal(leaf.detach().view(torch.uint8), before)
    assert torch.equal(index, index_before)
    assert torch.equal(upstream, upstream_before)


CHANGES = {
    "logits": lambda logits, index: logits.mul_(2),
    "logits through a view": lambda logits, index: logits[0, 0].zero_(),
    "logits through detach": lambda logits, index: logits.detach().add_(1),
    "logits through out=": lambda logits, index: torch.add(logits, 1, out=logits.detach()),
    "index": lambda logits, index: index.fill_(0),
}


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.usefixtures("each_path")
def test_a_change_in_place_before_backward_raises_autograds_own_error(what):
    leaf, index = inputs()
    logits = leaf * 1
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    with torch.no_grad():
        CHANGES[what](logits, index)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (logps.sum() + entropy.sum()).backward()


@pytest.mark.usefixtures("each_path")
def test_a_change_in_place_of_the_results_is_harmless():
    logits, index = inputs()
    (expected,) = torch.autograd.grad(selective_log_softmax(logits, index).sum(), logits)
    (got,) = torch.autograd.grad(selective_log_softmax(logits, index).mul_(1.0).add_(3.0).sum(), logits)
    assert torch.equal(got, expected)


def test_entropy_not_asked_for_costs_no_memory(generic_path):
    logits, index = inputs(vocab=10_000)
    with Dispatched() as alone:
        selective_log_softmax(logits.detach(), index)
    with Dispatched() as both:
        selective_log_softmax(logits.detach(), index, return_entropy=True)
    assert sum(alone.allocated) < sum(both.allocated)


def test_unused_outputs_cost_no_work_and_no_memory(generic_path):
    logits, index = inputs(vocab=10_000)

    def backward(use):
        logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
        with Dispatched() as dispatched:
            torch.autograd.grad(use(logps, entropy).sum(), logits)
        return dispatched

    full = logits.numel() * 4
    only_logps, both = backward(lambda logps, _: logps), backward(lambda logps, entropy: logps + entropy)
    assert sum(size >= full for size in only_logps.allocated) == 2  # the gradient and one chunk
    assert len(only_logps.operators) < len(both.operators)


def test_neither_output_used_means_no_gradient():
    logits, index = inputs()
    selective_log_softmax(logits, index, return_entropy=True)
    (gradient,) = torch.autograd.grad(logits.sum(), logits)
    assert torch.equal(gradient, torch.ones_like(logits))


@pytest.mark.parametrize("keep", ["logps", "entropy"])
def test_frozen_logits_in_a_larger_graph_get_no_backward(keep):
    weight = torch.ones(ROWS, requires_grad=True)
    logits, index = inputs()
    outputs = dict(zip(["logps", "entropy"], selective_log_softmax(logits.detach(), index, True), strict=True))
    (outputs[keep] * weight).sum().backward()
    assert torch.equal(weight.grad, outputs[keep])
