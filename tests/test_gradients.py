"""Gradients against float64, in every combination of what is used."""

import hostile
import oracle
import pytest
import torch
from closeness import assert_gradients, assert_values

from memlean import selective_log_softmax

pytestmark = pytest.mark.usefixtures("each_path")


def gradient_of(logits, index, grad_logps, grad_entropy, **options):
    """The gradient for these upstream gradients; None stands for an output that is not used at all."""
    leaf = logits.detach().requires_grad_()
    outputs = selective_log_softmax(leaf, index, return_entropy=True)
    used = [(y, g) for y, g in zip(outputs, (grad_logps, grad_entropy), strict=True) if g is not None]
    return torch.autograd.grad([y for y, _ in used], leaf, [g for _, g in used], **options)[0]


USES = [(vocab, "both") for vocab in hostile.VOCABS] + [(2049, "logps"), (2049, "entropy"), (32769, "logps")]


@pytest.mark.parametrize(("vocab", "use"), USES)
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_hostile_rows_against_float64(dtype, vocab, use):
    logits = hostile.rows(vocab, dtype)
    index = hostile.telling_index(logits)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    grad_logps = torch.randn(index.shape, dtype=real) if use != "entropy" else None
    grad_entropy = torch.randn(len(logits), dtype=real) if use != "logps" else None
    got = gradient_of(logits, index, grad_logps, grad_entropy)
    assert got.dtype == dtype
    assert_gradients(got, oracle.gradient(logits, index, grad_logps, grad_entropy), scale=10)


@pytest.mark.parametrize("vocab", [10, 5000, 151936])
def test_float32_against_log_softmax_and_gather(vocab):
    logits = torch.randn(8, vocab, requires_grad=True)
    index = torch.randint(vocab, (8,))
    (got,) = torch.autograd.grad(selective_log_softmax(logits, index).sum(), logits)
    exact = oracle.gradient(logits, index, torch.ones(8), None)
    torch_logps = logits.log_softmax(-1).gather(-1, index.unsqueeze(-1))
    (torch_gradient,) = torch.autograd.grad(torch_logps.sum(), logits)
    assert (got - exact).abs().max() <= 8.9e-8
    assert (got - torch_gradient).abs().max() <= 1.2e-7  # torch's own error on top


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_gradients_are_rounded_once(dtype):
    logits = (torch.randn(8, 20000) * 3).to(dtype)
    index = torch.randint(20000, (8,))
    exact = oracle.gradient(logits, index, torch.ones(8), None)
    got = gradient_of(logits, index, torch.ones(8), None)
    normal = exact.abs() >= torch.finfo(dtype).tiny
    assert (got == exact.to(dtype))[normal].double().mean() >= 0.999


@pytest.mark.parametrize("gap", [14.0, 30.0, 80.0])
def test_the_chosen_token_keeps_its_precision_near_certainty(gap):
    logits = torch.tensor([[gap, 0.0, -1.0]])
    index = torch.tensor([0])
    got = gradient_of(logits, index, torch.ones(1), None)
    exact = oracle.gradient(logits, index, torch.ones(1), None)
    assert (got / exact - 1).abs().max() <= 2e-6


@pytest.mark.parametrize("candidates", [None, 0, 1, 3])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_gradcheck(candidates, return_entropy):
    logits = (torch.randn(2, 3, 9, dtype=torch.float64) * 2).requires_grad_()
    index = torch.randint(9, (2, 3) if candidates is None else (2, 3, candidates))
    assert torch.autograd.gradcheck(lambda x: selective_log_softmax(x, index, return_entropy), logits)


@pytest.mark.parametrize("candidates", [None, 0, 3])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_second_derivatives(candidates, return_entropy):
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    index = torch.randint(5, (2,) if candidates is None else (2, candidates))
    assert torch.autograd.gradgradcheck(lambda x: selective_log_softmax(x, index, return_entropy), logits)


def test_second_derivatives_beside_minus_infinity():
    logits = torch.tensor([[0.5, -torch.inf, 1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    logps, entropy = selective_log_softmax(logits, torch.tensor([2]), return_entropy=True)
    (first,) = torch.autograd.grad(logps.sum() + entropy.sum(), logits, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), logits)

    finite = logits.detach()[:, [0, 2, 3]].requires_grad_()
    logps, entropy = selective_log_softmax(finite, torch.tensor([1]), return_entropy=True)
    (first,) = torch.autograd.grad(logps.sum() + entropy.sum(), finite, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), finite)
    assert second[0, 1] == 0
    assert torch.allclose(second[:, [0, 2, 3]], expected, rtol=1e-12, atol=1e-14)


def test_create_graph_gives_the_same_first_derivative():
    logits, index = hostile.rows(300, torch.float64), torch.randint(300, (len(hostile.ROWS),))
    upstream = torch.randn(2, len(logits), dtype=torch.float64)
    plain = gradient_of(logits, index, *upstream)
    assert_gradients(gradient_of(logits, index, *upstream, create_graph=True), plain, scale=10)


def test_create_graph_keeps_the_precision_near_certainty():
    logits, index = torch.tensor([[14.0, 0.0, -1.0]]), torch.tensor([0])
    got = gradient_of(logits, index, torch.ones(1), None, create_graph=True)
    exact = oracle.gradient(logits, index, torch.ones(1), None)
    assert (got / exact - 1).abs().max() <= 2e-6


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_twice_with_retain_graph_gives_the_same_bits(dtype):
    logits = hostile.rows(3000, dtype).requires_grad_()
    index = torch.randint(3000, (len(logits),))
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    loss = (logps.sum() - 0.01 * entropy.sum()) * 3
    (first,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (second,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, second)


def test_zero_weight_on_entropy_changes_no_gradient():
    logits = torch.randn(4, 100, requires_grad=True)
    index = torch.randint(100, (4,))
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True)
    (weighted,) = torch.autograd.grad((logps - 0.0 * entropy).sum(), logits)
    (alone,) = torch.autograd.grad(selective_log_softmax(logits, index).sum(), logits)
    assert torch.equal(weighted, alone)


def test_duplicate_candidates_add_their_gradients():
    logits = torch.randn(3, 40000)
    index = torch.tensor([[5, 39999, 5, 5]]).expand(3, 4)
    upstream = torch.randn(3, 4)
    merged = torch.stack([upstream[:, [0, 2, 3]].double().sum(-1), upstream[:, 1].double()], -1)
    assert_gradients(gradient_of(logits, index, upstream, None), oracle.gradient(logits, index[:, :2], merged, None))


UPSTREAMS = {
    "expanded": lambda rows: torch.tensor(0.7).expand(rows),
    "strided": lambda rows: torch.randn(rows, 3)[:, 1],
    "reversed": lambda rows: torch.randn(rows).flip(0),
    "bfloat16": lambda rows: torch.randn(rows).bfloat16(),
    "float64": lambda rows: torch.randn(rows).double(),
}


@pytest.mark.parametrize("name", UPSTREAMS)
@pytest.mark.parametrize("output", ["logps", "entropy"])
def test_upstream_gradients_of_any_layout_and_dtype(name, output):
    logits, index = torch.randn(6, 50), torch.randint(50, (6,))
    upstream = UPSTREAMS[name](6)

    class Upstream(torch.autograd.Function):
        """Identity whose backward hands over ``upstream``, as a caller's own function may."""

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, _):
            return upstream

    leaf = logits.clone().requires_grad_()
    outputs = dict(zip(["logps", "entropy"], selective_log_softmax(leaf, index, return_entropy=True), strict=True))
    (got,) = torch.autograd.grad(Upstream.apply(outputs[output]).sum(), leaf)
    plain = upstream.float().contiguous()
    pair = (plain, None) if output == "logps" else (None, plain)
    assert torch.equal(got, gradient_of(logits, index, *pair))


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_rows_without_upstream_are_exact_zeros_whatever_they_hold(poison, create_graph):
    logits = torch.randn(3, 40000)
    logits[1] = poison
    index = torch.randint(40000, (3, 2))
    grad_logps, grad_entropy = torch.ones(3, 2), torch.ones(3)
    grad_logps[1], grad_entropy[1] = 0, 0
    got = gradient_of(logits, index, grad_logps, grad_entropy, create_graph=create_graph)
    assert torch.equal(got[1], torch.zeros(40000))
    assert got[::2].isfinite().all()
    assert (got[::2] != 0).any()


def test_negative_zero_upstream_is_zero_too():
    logits = torch.full((1, 5), torch.nan)
    assert torch.equal(gradient_of(logits, torch.tensor([1]), torch.tensor([-0.0]), None), torch.zeros(1, 5))


def test_opposite_candidates_still_have_a_gradient():
    # The sum of a row's upstream gradients is 0, the gradients are not.
    logits, index, upstream = torch.randn(1, 6), torch.tensor([[1, 4]]), torch.tensor([[2.0, -2.0]])
    assert torch.equal(gradient_of(logits, index, upstream, None), torch.tensor([[0, 2.0, 0, 0, -2.0, 0]]))


def test_logits_of_minus_infinity_get_gradient_zero():
    logits = torch.tensor([[1.0, -torch.inf, 0.0, -torch.inf]])
    got = gradient_of(logits, torch.tensor([0]), torch.ones(1), torch.ones(1))
    assert torch.equal(got[0, [1, 3]], torch.zeros(2))
    assert got.isfinite().all()


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_empty_batches_stay_connected(dtype):
    for shape, index_shape in [((0, 9), (0,)), ((2, 0, 9), (2, 0)), ((0, 9), (0, 3)), ((3, 9), (3, 0))]:
        logits = torch.randn(shape).to(dtype).requires_grad_()
        outputs = selective_log_softmax(logits, torch.zeros(index_shape, dtype=torch.long), return_entropy=True)
        assert outputs[0].shape == index_shape
        assert outputs[1].shape == shape[:-1]
        (outputs[0].sum() + 0 * outputs[1].sum()).backward()
        assert logits.grad.dtype == dtype
        assert torch.equal(logits.grad, torch.zeros_like(logits))


def test_out_dtype_input_passes_gradients_through():
    logits = torch.randn(4, 30).bfloat16().requires_grad_()
    index = torch.randint(30, (4,))
    logps, entropy = selective_log_softmax(logits, index, return_entropy=True, out_dtype="input")
    upstream = torch.randn(4).bfloat16()
    (got,) = torch.autograd.grad([logps, entropy], logits, [upstream, upstream])
    assert torch.equal(got, gradient_of(logits, index, upstream.float(), upstream.float()))


def test_gradients_through_a_model_reach_its_weights():
    weight = torch.randn(20, 8, dtype=torch.float64, requires_grad=True)
    hidden, index = torch.randn(5, 8, dtype=torch.float64), torch.randint(20, (5,))
    (got,) = torch.autograd.grad(selective_log_softmax(hidden @ weight.T, index).sum(), weight)
    expected = oracle.gradient(hidden @ weight.T, index, torch.ones(5), None).T @ hidden
    assert torch.allclose(got, expected, rtol=1e-12, atol=1e-13)


def test_values_with_and_without_grad_have_the_same_bits():
    logits, index = hostile.rows(5000, torch.bfloat16), torch.randint(5000, (len(hostile.ROWS),))
    frozen = selective_log_softmax(logits, index, return_entropy=True)
    trained = selective_log_softmax(logits.clone().requires_grad_(), index, return_entropy=True)
    for a, b in zip(frozen, trained, strict=True):
        assert not a.requires_grad
        assert b.requires_grad
        assert torch.equal(a, b)
    assert_values(frozen[0], oracle.logps_and_entropy(logits, index)[0], ulps=2)
