"""The machinery around a call: autocast, checkpoint, hooks, transforms, threads, processes."""

import threading
from concurrent.futures import ThreadPoolExecutor

import child
import hostile
import oracle
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from memlean import selective_log_softmax, token_stats


def batch(dtype=torch.float32, rows=6, vocab=200):
    return torch.randn(rows, vocab).to(dtype).requires_grad_(), torch.randint(vocab, (rows,))


def loss_of(logits, index):
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    return logps.sum() - 0.1 * entropy.sum()


def plain_gradient(logits, index):
    return torch.autograd.grad(loss_of(logits, index), logits)[0]


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
@pytest.mark.usefixtures("each_path")
def test_autocast_has_no_effect(dtype, backward_inside):
    logits, index = batch(dtype)
    expected = selective_log_softmax(logits, index, return_entropy=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = selective_log_softmax(logits, index, return_entropy=True)
        loss = got[0].sum() - 0.1 * got[1].sum()
        if backward_inside:
            loss.backward()
    if not backward_inside:
        loss.backward()
    for a, b in zip(expected, got, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert logits.grad.dtype == dtype
    assert torch.equal(logits.grad, plain_gradient(logits, index))


@pytest.mark.usefixtures("each_path")
def test_inference_tensors():
    with torch.inference_mode():
        logits, index = torch.randn(3, 50), torch.randint(50, (3,))
        inside = selective_log_softmax(logits, index, return_entropy=True)
    outside = selective_log_softmax(logits, index, return_entropy=True)
    for a, b in zip(inside, outside, strict=True):
        assert torch.equal(a, b)
        assert not b.requires_grad


@pytest.mark.parametrize("function", [selective_log_softmax, lambda *args, **kwargs: token_stats(*args, **kwargs).logp])
@pytest.mark.usefixtures("each_path")
def test_tokens_and_options_from_inference_mode_beside_logits_to_train(function):
    with torch.inference_mode():
        index = torch.tensor([1, 2, 3])
        options = {"temperature": torch.tensor([0.5, 1.0, 2.0]), "row_mask": torch.tensor([True, False, True])}
    logits = torch.randn(3, 50, requires_grad=True)
    (got,) = torch.autograd.grad(function(logits, index, **options).sum(), logits)
    normal = {name: option.clone() for name, option in options.items()}
    (expected,) = torch.autograd.grad(selective_log_softmax(logits, index.clone(), **normal).sum(), logits)
    assert torch.equal(got, expected)


@pytest.mark.usefixtures("each_path")
def test_inference_mode_on_logits_that_require_a_gradient():
    logits, index = batch()
    with torch.inference_mode():
        logps = selective_log_softmax(logits, index)
    assert not logps.requires_grad
    assert torch.equal(logps, selective_log_softmax(logits, index))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.usefixtures("each_path")
def test_checkpoint(use_reentrant, autocast):
    logits, index = batch(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        checkpoint(loss_of, logits, index, use_reentrant=use_reentrant).backward()
    assert torch.equal(logits.grad, plain_gradient(logits, index))


def test_reentrant_checkpoint_takes_the_lean_backward(monkeypatch):
    # It runs backward inside a backward; only create_graph=True may keep tensors of the logits' size.
    def refuse(*_):
        raise AssertionError("the differentiable gradient keeps tensors of the logits' size")

    monkeypatch.setattr("memlean.reference.differentiable_gradient", refuse)
    logits, index = batch()
    checkpoint(loss_of, logits, index, use_reentrant=True).backward()


@pytest.mark.parametrize("hooks", [torch.autograd.graph.save_on_cpu, torch.autograd.graph.disable_saved_tensors_hooks])
def test_saved_tensor_hooks(hooks):
    logits, index = batch()
    with hooks() if hooks is torch.autograd.graph.save_on_cpu else hooks("not here"):
        loss = loss_of(logits, index)
    loss.backward()
    assert torch.equal(logits.grad, plain_gradient(logits, index))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("each_path")
def test_deterministic_algorithms(deterministic):
    # They also fill new memory with NaN: whatever is not written shows.
    logits = hostile.rows(3000, torch.float32)
    index = hostile.telling_index(logits)
    logits.requires_grad_()
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    (gradient,) = torch.autograd.grad([logps, entropy], logits, [torch.ones_like(logps), torch.ones_like(entropy)])
    assert not any(x.isnan().any() for x in (logps, entropy, gradient))


@pytest.mark.parametrize("candidates", [None, 4])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_meta_tensors_have_the_real_shapes_and_dtypes(dtype, candidates):
    index = torch.randint(9, (2, 3) if candidates is None else (2, 3, candidates))
    real = torch.randn(2, 3, 9).to(dtype).requires_grad_()
    meta = real.detach().to("meta").requires_grad_()
    for a, b in zip(
        selective_log_softmax(real, index, return_entropy=True),
        selective_log_softmax(meta, index.to("meta"), return_entropy=True),
        strict=True,
    ):
        assert b.device.type == "meta"
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
    (gradient,) = torch.autograd.grad(loss_of(meta, index.to("meta")), meta)
    assert (gradient.shape, gradient.dtype) == (real.shape, dtype)


def test_fake_tensors():
    with FakeTensorMode():
        logits, index = (
            torch.empty(8, 2**40, dtype=torch.bfloat16, requires_grad=True),
            torch.empty(8, dtype=torch.int32),
        )
        loss_of(logits, index).backward()
        assert logits.grad.shape == (8, 2**40)
        assert logits.grad.dtype == torch.bfloat16


TRANSFORMS = {
    "grad": lambda x, y: torch.func.grad(lambda x: loss_of(x, y))(x),
    "vjp": lambda x, y: torch.func.vjp(lambda x: loss_of(x, y), x)[1](torch.tensor(1.0, dtype=x.dtype))[0],
    "vmap of grad": lambda x, y: torch.func.vmap(torch.func.grad(loss_of))(x, y),
    "grad of vmap": lambda x, y: torch.func.grad(lambda x: torch.func.vmap(loss_of)(x, y).sum())(x),
    "grad of vmap over the last": lambda x, y: torch.func.grad(
        lambda x: torch.func.vmap(loss_of, in_dims=(2, 1))(x.movedim(0, 2), y.movedim(0, 1)).sum()
    )(x),
    "grads in a batch": lambda x, y: torch.autograd.grad(
        loss_of(x.requires_grad_(), y).expand(1), x, torch.ones(1, 1, dtype=x.dtype), is_grads_batched=True
    )[0][0],
    "jacrev": lambda x, y: torch.func.jacrev(lambda x: loss_of(x, y))(x),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms_give_the_plain_gradient(name):
    logits, index = torch.randn(3, 4, 9, dtype=torch.float64), torch.randint(9, (3, 4))
    got = TRANSFORMS[name](logits.clone(), index)
    upstream = torch.ones(3, 4, dtype=torch.float64)
    assert torch.allclose(got, oracle.gradient(logits, index, upstream, -0.1 * upstream), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("in_dims", [(0, 0), (1, 1), (0, None), (None, 0)], ids=str)
def test_vmap_equals_a_loop(in_dims):
    logits, index = torch.randn(4, 4, 9), torch.randint(9, (4, 4))
    logits, index = (x[0] if dim is None else x for x, dim in zip((logits, index), in_dims, strict=True))

    def item(x, dim, i):
        return x if dim is None else x.select(dim, i)

    got = torch.func.vmap(lambda x, y: selective_log_softmax(x, y, return_entropy=True), in_dims)(logits, index)
    loop = [selective_log_softmax(item(logits, in_dims[0], i), item(index, in_dims[1], i), True) for i in range(4)]
    for a, b in zip(got, zip(*loop, strict=True), strict=True):
        assert torch.equal(a, torch.stack(b))


def test_hessian_by_reverse_mode_twice():
    logits, index = torch.randn(7, dtype=torch.float64), torch.tensor(3)
    p = logits.softmax(-1)
    got = torch.func.jacrev(torch.func.grad(lambda x: selective_log_softmax(x, index)))(logits)
    assert torch.allclose(got, p.outer(p) - p.diag(), rtol=1e-12, atol=1e-14)


def test_forward_mode_is_refused_in_one_sentence_and_never_silently_zero():
    logits, index = torch.randn(3, 9), torch.randint(9, (3,))
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: selective_log_softmax(x, index), (logits,), (torch.ones_like(logits),))


def test_dual_numbers_are_refused_too():
    logits, index = torch.randn(3, 5), torch.tensor([1, 2, 3])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(logits, torch.ones_like(logits))
        with pytest.raises(NotImplementedError, match="jvp"):
            selective_log_softmax(dual, index)


@pytest.mark.usefixtures("each_path")
def test_python_threads_do_not_disturb_one_another():
    batches = [batch(rows=8, vocab=40_000) for _ in range(4)]
    expected = [plain_gradient(*each) for each in batches]
    together = threading.Barrier(4)

    def work(i):
        together.wait()
        return [plain_gradient(*batches[i]) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        for want, got in zip(expected, pool.map(work, range(4)), strict=True):
            assert all(torch.equal(want, each) for each in got)


def test_backward_in_another_thread_than_forward():
    logits, index = batch()
    loss = loss_of(logits, index)
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    assert torch.equal(logits.grad, plain_gradient(logits, index))


class Scored(Dataset):
    """Scores in the worker what the main process scored before it forked."""

    def __len__(self):
        return 4

    def __getitem__(self, seed):
        torch.manual_seed(seed)
        logits, index = batch(rows=40, vocab=5000)
        return selective_log_softmax(logits, index).detach(), plain_gradient(logits, index)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_data_loader_workers(start):
    expected = [Scored()[i] for i in range(4)]
    loader = DataLoader(Scored(), batch_size=None, num_workers=2, multiprocessing_context=start, timeout=60)
    for want, got in zip(expected, loader, strict=True):
        for a, b in zip(want, got, strict=True):
            assert torch.equal(a, b)


# torch's own parallel operators hang after a fork that follows a parallel region, unless the child sets one thread, as
# data loader workers do: the child here does the same.
FORK = """
import os, torch
from memlean import selective_log_softmax
logits, index = torch.randn(64, 100_000, requires_grad=True), torch.zeros(64, dtype=torch.long)
def gradient():
    return torch.autograd.grad(selective_log_softmax(logits, index).sum(), logits)[0]
expected = gradient()
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    logps = selective_log_softmax(logits.detach(), index)
    os._exit(0 if torch.equal(logps, selective_log_softmax(logits.detach(), index)) else 3)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert torch.equal(gradient(), expected)
"""


def test_fork_after_parallel_use():
    child.output_of("-c", FORK, timeout=60)
