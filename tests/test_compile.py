"""torch.compile(fullgraph=True): the same bits as eager, gradients included."""

import shutil

import hostile
import pytest
import torch
from memory import Saved

from memlean import selective_log_softmax

needs_compiler = pytest.mark.skipif(not shutil.which("c++") and not shutil.which("g++"), reason="no C++ compiler here")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=needs_compiler)]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()


def step(logits, index):
    logps, entropy = selective_log_softmax(logits * 1, index, return_entropy=True)
    return logps, entropy, logps.sum() - 0.01 * entropy.sum()


def results(function, logits, index):
    leaf = logits.detach().clone().requires_grad_()
    logps, entropy, loss = function(leaf, index)
    return logps, entropy, torch.autograd.grad(loss, leaf)[0]


def assert_same_bits(function, logits, index):
    for eager, compiled in zip(results(step, logits, index), results(function, logits, index), strict=True):
        assert eager.dtype == compiled.dtype
        assert torch.equal(eager, compiled)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_equal_eager(dtype, backend):
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    logits = hostile.rows(300, dtype)
    assert_same_bits(compiled, logits, torch.randint(300, (len(logits),)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dynamic_shapes(backend):
    compiled = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for rows, vocab in [(4, 100), (7, 100), (5, 333), (3, 5000)]:
        assert_same_bits(compiled, torch.randn(rows, vocab), torch.randint(vocab, (rows,)))


def test_one_graph_serves_all_dynamic_shapes():
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, fullgraph=True, backend=counter, dynamic=True)
    for rows, vocab in [(4, 100), (7, 100), (5, 333), (3, 5000)]:
        compiled(torch.randn(rows, vocab), torch.randint(vocab, (rows,)))
    assert counter.frame_count == 1


VARIANTS = {
    "candidates": lambda: (torch.randn(2, 5, 60), torch.randint(60, (2, 5, 3))),
    "int32 index": lambda: (torch.randn(2, 5, 60), torch.randint(60, (2, 5)).int()),
    "one row": lambda: (torch.randn(60), torch.tensor(7)),
    "no rows": lambda: (torch.randn(0, 60), torch.zeros(0, dtype=torch.long)),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_other_shapes_and_dtypes(name):
    assert_same_bits(torch.compile(step, fullgraph=True, backend="aot_eager"), *VARIANTS[name]())


def test_shifting_inside_the_graph():
    def shifted(logits, index):
        return step(logits[:, :-1], index[:, 1:])

    logits, index = torch.randn(2, 5, 60), torch.randint(60, (2, 5))
    compiled = torch.compile(shifted, fullgraph=True, backend="aot_eager")
    for eager, got in zip(results(shifted, logits, index), results(compiled, logits, index), strict=True):
        assert torch.equal(eager, got)


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_entropy(backend):
    logits, index = torch.randn(5, 60, requires_grad=True), torch.randint(60, (5,))
    (eager,) = torch.autograd.grad(selective_log_softmax(logits, index).sum(), logits)
    compiled = torch.compile(selective_log_softmax, fullgraph=True, backend=backend)
    (got,) = torch.autograd.grad(compiled(logits, index).sum(), logits)
    assert torch.equal(eager, got)


@pytest.mark.parametrize("unused", ["logps", "entropy"])
def test_an_output_without_a_gradient(unused):
    def one(logits, index):
        logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
        return entropy if unused == "logps" else logps

    logits, index = torch.randn(5, 60, requires_grad=True), torch.randint(60, (5,))
    (eager,) = torch.autograd.grad(one(logits, index).sum(), logits)
    compiled = torch.compile(one, fullgraph=True, backend="aot_eager")
    (got,) = torch.autograd.grad(compiled(logits, index).sum(), logits)
    assert torch.equal(eager, got)


def test_without_grad():
    logits, index = torch.randn(5, 60), torch.randint(60, (5,))
    compiled = torch.compile(selective_log_softmax, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        eager, got = selective_log_softmax(logits, index, True), compiled(logits, index, True)
    for a, b in zip(eager, got, strict=True):
        assert torch.equal(a, b)


def test_an_index_out_of_range_raises_from_compiled_code():
    compiled = torch.compile(selective_log_softmax, fullgraph=True, backend="aot_eager")
    with pytest.raises(IndexError, match=r"index\[1\] is -100, expected 0 <= index < 9"):
        compiled(torch.randn(2, 9), torch.tensor([0, -100]))


def test_nothing_of_the_vocabularys_size_is_saved():
    compiled = torch.compile(selective_log_softmax, fullgraph=True, backend="aot_eager")
    logits, index = torch.randn(8, 4000, requires_grad=True), torch.randint(4000, (8,))
    with Saved() as saved:
        compiled(logits, index).sum()
    assert saved.bytes_beyond(logits, index) <= 16 * 8


def test_export():
    class Score(torch.nn.Module):
        def forward(self, logits, index):
            return selective_log_softmax(logits, index, return_entropy=True)

    logits, index = torch.randn(3, 40), torch.randint(40, (3,))
    with torch.no_grad():
        program = torch.export.export(Score(), (logits, index))
    expected = selective_log_softmax(logits, index, return_entropy=True)
    for a, b in zip(expected, program.module()(logits, index), strict=True):
        assert torch.equal(a, b)
