"""inplace_backward: the gradient in the logits' own storage, and everything that it refuses."""

import hostile
import pytest
import torch
from memory import Dispatched, needs_high_water_mark, peak_growth

from memlean import selective_log_softmax

pytestmark = pytest.mark.usefixtures("each_path")


def model(weight, temperature=1):
    return weight * temperature  # logits that are no leaf and own their memory


def gradient(leaf, index, inplace_backward, **options):
    logps, entropy = selective_log_softmax(
        model(leaf), index, return_entropy=True, inplace_backward=inplace_backward, **options
    )
    upstream = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape) for x in (logps, entropy)]
    return torch.autograd.grad([logps, entropy], leaf, upstream)[0]


def backward_up_to(logits, loss):
    """backward, but not that of the model, which allocates gradients of its own."""

    class Stop(Exception):
        pass

    def stop(_):
        raise Stop

    logits.register_hook(stop)
    with pytest.raises(Stop):
        loss.backward()


@pytest.mark.parametrize("candidates", [None, 0, 1, 64])
@pytest.mark.parametrize("vocab", [1, 33, 70_001])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_the_same_bits_as_out_of_place(dtype, vocab, candidates):
    leaf = torch.randn(4, vocab).to(dtype).requires_grad_()
    index = torch.randint(vocab, (4,) if candidates is None else (4, candidates))
    for options in ({}, {"temperature": torch.rand(4) + 0.5, "row_mask": torch.tensor([1, 0, 1, 1])}):
        assert torch.equal(gradient(leaf, index, True, **options), gradient(leaf, index, False, **options))


def test_the_gradient_is_the_logits_storage():
    weight, index = torch.randn(4, 100, requires_grad=True), torch.randint(100, (4,))
    logits = model(weight)
    seen = []
    logits.register_hook(lambda g: seen.append(g.data_ptr()))
    selective_log_softmax(logits, index, inplace_backward=True).sum().backward()
    assert seen == [logits.data_ptr()]


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_no_bytes_of_the_logits_size_are_allocated(dtype, each_path):
    rows, vocab = 8, 40_000
    weight, index = torch.randn(rows, vocab).to(dtype).requires_grad_(), torch.randint(vocab, (rows,))
    logits = model(weight)
    loss = selective_log_softmax(logits, index, inplace_backward=True).sum()
    with Dispatched() as dispatched:
        backward_up_to(logits, loss)
    largest = max(dispatched.allocated, default=0)
    # The generic path works on chunks; the kernels on nothing at all.
    assert largest < vocab if each_path == "native" else largest <= 8 * rows * vocab


@needs_high_water_mark
def test_resident_memory_does_not_grow(each_path):
    if each_path == "generic":
        pytest.skip("it works on chunks, which test_generic_path.py bounds")
    logits = model(torch.randn(64, 300_000, requires_grad=True))  # 73 MiB
    loss = selective_log_softmax(logits, torch.randint(300_000, (64,)), inplace_backward=True).sum()
    assert peak_growth(lambda: backward_up_to(logits, loss)) <= 8 * 2**20


def test_autograd_stops_another_user_of_the_logits():
    weight, index = torch.randn(4, 100, requires_grad=True), torch.randint(100, (4,))
    logits = model(weight)
    other = logits.square().sum()
    version = logits._version
    selective_log_softmax(logits, index, inplace_backward=True).sum().backward(retain_graph=True)
    assert logits._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


def test_two_calls_on_the_same_logits_never_give_a_wrong_number():
    weight, index = torch.randn(4, 100, requires_grad=True), torch.randint(100, (4,))
    logits = model(weight)
    first = selective_log_softmax(logits, index, inplace_backward=True).sum()
    second = selective_log_softmax(logits, index, inplace_backward=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (first + second).backward()


def test_a_second_backward_is_refused():
    weight, index = torch.randn(4, 100, requires_grad=True), torch.randint(100, (4,))
    loss = selective_log_softmax(model(weight), index, inplace_backward=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace_backward: this is a second backward"):
        loss.backward()


def test_create_graph_leaves_the_logits_as_they_are():
    weight, index = torch.randn(2, 9, dtype=torch.float64, requires_grad=True), torch.randint(9, (2,))

    def function(x):
        return selective_log_softmax(model(x), index, inplace_backward=True)

    assert torch.autograd.gradgradcheck(function, weight)


def test_without_a_gradient_nothing_is_written():
    logits, index = torch.randn(4, 100), torch.randint(100, (4,))
    before = logits.clone()
    selective_log_softmax(logits, index, inplace_backward=True)
    assert torch.equal(logits, before)


SOURCE = torch.zeros(4, 10, requires_grad=True)


def test_one_token_and_any_stride_of_its_dimension():
    class Strided(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return torch.empty_strided((4, 1), (1, 7)).copy_(x)

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    weight = torch.randn(4, 1, requires_grad=True)
    logits = Strided.apply(weight)
    assert logits.stride() == (1, 7)
    assert logits.is_contiguous()
    selective_log_softmax(logits, torch.zeros(4).long(), inplace_backward=True).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(4, 1))


REFUSED = {
    "a leaf": (lambda: torch.zeros(4, 10, requires_grad=True), "logits, which are a leaf"),
    "a parameter": (lambda: torch.nn.Parameter(torch.zeros(4, 10)), "logits, which are a leaf"),
    "a view": (lambda: (SOURCE * 1)[:, :10], "own their memory and are contiguous, got a view"),
    "a transposed view": (lambda: (SOURCE * 1).t(), "got a view or strides"),
    "an expanded view": (lambda: (SOURCE[:1] * 1).expand(4, 10), "got a view or strides"),
    "strided": (lambda: torch.empty_strided((4, 10), (1, 4)), r"strides \[1, 4\] for shape \[4, 10\]"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_logits_that_must_not_be_overwritten(name):
    make, message = REFUSED[name]
    logits = make()
    with pytest.raises(ValueError, match=message):
        selective_log_softmax(logits, torch.zeros(logits.shape[0]).long(), inplace_backward=True)


def test_too_many_candidates():
    with pytest.raises(ValueError, match="inplace_backward takes at most 64 candidates per row, got 65"):
        selective_log_softmax(SOURCE * 1, torch.zeros(4, 65).long(), inplace_backward=True)


def test_compiled_code_is_refused():
    def function(x):
        return selective_log_softmax(x * 1, torch.zeros(4).long(), inplace_backward=True)

    with pytest.raises(Exception, match="inplace_backward works in eager mode only"):
        torch.compile(function, fullgraph=True, backend="eager")(SOURCE)


def test_out_of_place_needs_no_such_care():
    logits = torch.randn(4, 100, requires_grad=True)
    loss = selective_log_softmax(logits, torch.randint(100, (4,))).sum()
    loss.backward(retain_graph=True)
    once = logits.grad.clone()
    loss.backward()
    assert torch.equal(logits.grad, 2 * once)
