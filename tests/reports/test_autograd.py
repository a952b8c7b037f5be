"""Public reports: autograd, autocast, checkpoints, transforms."""

import oracle
import pytest
import torch
from closeness import assert_gradients
from memory import Saved
from ranks import Ranks
from torch.utils.checkpoint import checkpoint

from memlean import selective_log_softmax, token_stats
from memlean.distributed import vocab_parallel_selective_log_softmax

LOGITS_BYTES = 16 * 3000 * 4


def batch(dtype=torch.float32, rows=16, vocab=3000):
    return torch.randn(rows, vocab).to(dtype).requires_grad_(), torch.randint(vocab, (rows,))


def plain(logits, index):
    """What trainers write."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("weight", [0.0, 0.01])
@pytest.mark.usefixtures("each_path")
def test_report_slime_2130(weight):
    """The entropy's graph with vocabulary-sized tensors was kept although its weight was 0."""

    def kept(function):
        logits, index = batch()
        with Saved() as saved:
            logps, entropy = function(logits, index)
            loss = (logps - weight * entropy).sum()
        loss.backward()
        return saved.bytes_beyond(logits, index)

    assert kept(plain) >= 2 * LOGITS_BYTES  # the reported recipe
    assert kept(lambda *args: selective_log_softmax(*args, return_entropy=True)) <= 16 * 64


@pytest.mark.usefixtures("each_path")
def test_report_trl_7125():
    """Working in place "to save memory" on what autograd had saved: the entropy bonus raised in backward."""
    logits, index = batch()
    p = logits.softmax(-1)
    recipe = -(p * p.log()).sum(-1)
    with torch.no_grad():
        p.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recipe.sum().backward()
    _, entropy = selective_log_softmax(logits, index, return_entropy=True)
    (gradient,) = torch.autograd.grad(entropy.sum(), logits)
    assert_gradients(gradient, oracle.gradient(logits, index, None, torch.ones(16)), scale=10)
    with torch.no_grad():
        assert torch.equal(selective_log_softmax(logits, index, return_entropy=True)[1], entropy)


@pytest.mark.usefixtures("each_path")
def test_report_liger_kernel_507():
    """The loss was 0 for logits that do not require a gradient."""
    logits, index = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])
    with Saved() as saved:
        frozen = selective_log_softmax(logits, index, return_entropy=True)
    assert saved.tensors == []
    trained = selective_log_softmax(logits.clone().requires_grad_(), index, return_entropy=True)
    for a, b in zip(frozen, trained, strict=True):
        assert torch.equal(a, b)
        assert a.ne(0).all()


@pytest.mark.parametrize("ref", ["pytorch_2210", "pytorch_104040"])
@pytest.mark.usefixtures("each_path")
def test_report_second_derivative(ref):
    """A second derivative was refused by an odd message, or silently wrong."""
    logits, index = torch.randn(3, 7, dtype=torch.float64, requires_grad=True), torch.tensor([1, 0, 6])

    def second(function):
        logps, entropy = function(logits, index)
        (first,) = torch.autograd.grad((logps + 0.3 * entropy).sum(), logits, create_graph=True)
        return first, *torch.autograd.grad(first.pow(3).sum(), logits)

    for function in (
        lambda *args: selective_log_softmax(*args, return_entropy=True),
        lambda *args: token_stats(*args)[:2],
    ):
        for got, expected in zip(second(function), second(plain), strict=True):
            assert torch.allclose(got, expected, rtol=1e-10, atol=1e-13)


def second_derivative_of_a_shard(rank):
    shard = torch.randn(2, 5).requires_grad_()
    logps = vocab_parallel_selective_log_softmax(shard, torch.tensor([1, 8]))
    torch.autograd.grad(logps.sum(), shard, create_graph=True)


def test_report_pytorch_104040_vocab_parallel():
    with Ranks(2) as ranks:
        for failure in ranks.outcomes(second_derivative_of_a_shard):
            assert failure.kind == "RuntimeError"
            assert "no second derivative (create_graph=True)" in failure.message


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.parametrize("ref", ["pytorch_141896", "pytorch_90105"])
@pytest.mark.usefixtures("each_path")
def test_report_checkpoint(ref, autocast):
    """Recomputed tensors differed under autocast; saved tensors were read twice in one backward."""
    logits, index = batch(torch.bfloat16)

    def loss(logits, index):
        logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
        return (logps - 0.1 * entropy).sum()

    (expected,) = torch.autograd.grad(loss(logits, index), logits)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        recomputed = checkpoint(loss, logits, index, use_reentrant=False)
    (got,) = torch.autograd.grad(recomputed, logits)
    assert torch.equal(got, expected)
    with Saved() as saved:
        logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    (logps - 0.1 * entropy).sum().backward()
    assert saved.unpacked == len(saved.tensors) == 3


@pytest.mark.parametrize("inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ref", ["pytorch_87979", "pytorch_30572", "pytorch_85504"])
@pytest.mark.usefixtures("each_path")
def test_report_autocast(ref, dtype, inside):
    """The gradient came in another dtype than the logits."""
    logits, index = batch(dtype)
    upstream = torch.randn(16)  # float32
    (expected,) = torch.autograd.grad(selective_log_softmax(logits, index), logits, upstream)
    with torch.autocast("cpu", torch.bfloat16):
        logps = selective_log_softmax(logits, index)
        with torch.autocast("cpu", enabled=inside):
            (got,) = torch.autograd.grad(logps, logits, upstream)
    assert logps.dtype == torch.float32
    assert got.dtype == dtype
    assert torch.equal(got, expected)


@pytest.mark.parametrize("ref", ["mamba_239", "pytorch_129845"])
def test_report_transforms(ref):
    """vmap and func.grad failed with an internal message."""
    logits, index = torch.randn(3, 9, dtype=torch.float64), torch.tensor([1, 8, 0])
    exact = oracle.gradient(logits, index, torch.ones(3), None)
    one_row = torch.func.grad(lambda x: selective_log_softmax(x, index[0]))(logits[0])
    each_row = torch.func.vmap(torch.func.grad(selective_log_softmax))(logits, index)
    assert torch.allclose(one_row, exact[0], rtol=1e-12, atol=1e-15)
    assert torch.allclose(each_row, exact, rtol=1e-12, atol=1e-15)
    with pytest.raises(NotImplementedError, match="jvp"):  # what does not work is refused
        torch.func.jvp(lambda x: selective_log_softmax(x, index), (logits,), (logits,))


@pytest.mark.parametrize("ref", ["unsloth_2434", "trl_2983"])
@pytest.mark.usefixtures("each_path")
def test_report_inference_tensors(ref):
    """ "Inference tensors cannot be saved for backward" for the reference model's logits, and for its tokens."""
    with torch.inference_mode():
        logits, index = torch.randn(3, 50), torch.randint(50, (3,))
    assert logits.is_inference()
    trained = logits.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        trained.gather(-1, index.unsqueeze(-1))  # the reported recipe
    of_reference = selective_log_softmax(logits, index, return_entropy=True)
    of_policy = selective_log_softmax(trained, index, return_entropy=True)
    for a, b in zip(of_reference, of_policy, strict=True):
        assert not a.requires_grad
        assert torch.equal(a, b)
    (gradient,) = torch.autograd.grad(of_policy[0].sum(), trained)
    assert_gradients(gradient, oracle.gradient(trained, index, torch.ones(3), None), scale=10)


def of_dtensor(rank, logits, index):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    sharded = distribute_tensor(logits, init_device_mesh("cpu", (2,)), [Shard(1)])
    refused = {}
    for function in (selective_log_softmax, token_stats, vocab_parallel_selective_log_softmax):
        try:
            function(sharded, index)
        except TypeError as error:
            refused[function.__name__] = str(error)
    shard = sharded.to_local().detach().requires_grad_()
    logps = vocab_parallel_selective_log_softmax(shard, index)
    (gradient,) = torch.autograd.grad(logps.sum(), shard)
    return refused, logps.detach(), gradient


@pytest.fixture(scope="module")
def answers_on_two_ranks():
    torch.manual_seed(0)
    logits, index = torch.randn(3, 10), torch.tensor([0, 4, 9])
    with Ranks(2) as ranks:
        return logits, index, ranks(of_dtensor, logits, index)


@pytest.mark.parametrize("ref", ["pytorch_190746", "ezpz_191"])
def test_report_dtensor(ref, answers_on_two_ranks):
    """Right values and a wrong gradient for sharded logits, or "mixed Tensor and DTensor"."""
    logits, index, answers = answers_on_two_ranks
    exact = oracle.gradient(logits, index, torch.ones(3), None)
    for (refused, logps, gradient), part in zip(answers, exact.chunk(2, -1), strict=True):
        assert len(refused) == 3
        for message in refused.values():
            assert "got a DTensor" in message
            assert "to_local()" in message
        assert torch.allclose(logps, selective_log_softmax(logits, index), rtol=1e-6)
        assert_gradients(gradient, part, scale=10)
