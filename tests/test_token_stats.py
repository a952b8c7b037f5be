"""token_stats and entropy_from_logits: every field against float64, gradients of three, none of the others."""

import hostile
import oracle
import pytest
import torch
from closeness import assert_gradients, assert_values
from memory import Dispatched, Saved

import memlean
from memlean import _ops, entropy_from_logits, selective_log_softmax, token_stats

pytestmark = pytest.mark.usefixtures("each_path")
FIELDS = memlean.TokenStats._fields
DIFFERENTIABLE = ("logp", "entropy", "logsumexp")


def truth(logits, index, temperature=1.0):
    x = logits.double()
    top = x.amax(-1)
    shifted = (x - top.unsqueeze(-1)) / temperature
    logp, entropy = oracle.logps_and_entropy(shifted, index)
    p = oracle.log_probabilities(shifted).exp()
    logsumexp = top / temperature + shifted.exp().sum(-1).log()
    return memlean.TokenStats(logp, entropy, logsumexp, logits.argmax(-1), top, p.square().sum(-1))


@pytest.mark.parametrize("temperature", [None, 0.5])
@pytest.mark.parametrize("vocab", [1, 33, 2049, 40_000])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_hostile_rows_against_float64(dtype, vocab, temperature):
    logits = hostile.rows(vocab, dtype)
    index = hostile.telling_index(logits)
    got = token_stats(logits, index, temperature=temperature)
    expected = truth(logits, index, temperature or 1.0)
    for name in ("logp", "entropy", "logsumexp"):
        assert_values(getattr(got, name), getattr(expected, name), ulps=3)
    assert torch.equal(got.max.double(), expected.max)
    assert torch.equal(got.max, logits.gather(-1, got.argmax.unsqueeze(-1)).squeeze(-1).to(got.max.dtype))
    first = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(got.argmax, first)
    assert torch.allclose(got.sum_p2.double(), expected.sum_p2, rtol=3e-6, atol=0)


@pytest.mark.parametrize("name", FIELDS)
def test_one_field_alone_has_the_same_bits(name):
    logits, index = torch.randn(5, 3000), torch.randint(3000, (5, 2))
    alone, whole = token_stats(logits, index, want=(name,)), token_stats(logits, index)
    assert torch.equal(getattr(alone, name), getattr(whole, name))
    assert [field for field in FIELDS if getattr(alone, field) is not None] == [name]


def test_the_same_bits_as_selective_log_softmax():
    logits, index = torch.randn(5, 70_000).bfloat16(), torch.randint(70_000, (5, 2))
    logp, entropy = selective_log_softmax(logits, index, return_entropy=True)
    stats = token_stats(logits, index)
    assert torch.equal(stats.logp, logp)
    assert torch.equal(stats.entropy, entropy)
    assert torch.equal(entropy_from_logits(logits), entropy)


def test_without_an_index():
    logits = torch.randn(2, 3, 50)
    stats = token_stats(logits)
    assert stats.logp is None
    for name in FIELDS[1:]:
        assert getattr(stats, name).shape == (2, 3)


@pytest.mark.parametrize("candidates", [None, 0, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", ["none", "scalar", "per token"])
@pytest.mark.parametrize("want", [("logsumexp",), DIFFERENTIABLE], ids=str)
def test_gradcheck(want, temperature, masked, candidates):
    logits = (torch.randn(3, 5, dtype=torch.float64) * 2).requires_grad_()
    index = torch.randint(5, (3,) if candidates is None else (3, candidates))
    options = {"temperature": {"none": None, "scalar": 0.7, "per token": torch.rand(3) + 0.5}[temperature]}
    if masked:
        options |= {"row_mask": torch.tensor([1, 0, 1]), "ignore_index": 5}  # 5: also one beyond the vocabulary
        index[0] = 5

    def function(x):
        return tuple(field for field in token_stats(x, index, want=want, **options) if field is not None)

    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(function, logits)


def test_gradcheck_of_one_row():
    logits = torch.randn(7, dtype=torch.float64, requires_grad=True)
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: token_stats(x, torch.tensor(2), want=DIFFERENTIABLE, temperature=0.7)[:3], logits)


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_the_gradient_of_logsumexp_is_the_softmax(dtype):
    logits = hostile.rows(3000, dtype)
    leaf = logits.clone().requires_grad_()
    logsumexp = token_stats(leaf, want=("logsumexp",)).logsumexp
    (gradient,) = torch.autograd.grad(logsumexp.sum(), leaf)
    assert gradient.dtype == dtype
    assert_gradients(gradient, oracle.log_probabilities(logits).exp())


def test_argmax_max_and_sum_p2_carry_no_gradient():
    stats = token_stats(torch.randn(3, 9, requires_grad=True), torch.zeros(3).long())
    assert [name for name in FIELDS if getattr(stats, name).requires_grad] == list(DIFFERENTIABLE)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_one_gradient_of_many(name):
    leaf, index = torch.randn(4, 50, requires_grad=True), torch.randint(50, (4,))
    (got,) = torch.autograd.grad(getattr(token_stats(leaf, index), name).sum(), leaf)
    (alone,) = torch.autograd.grad(getattr(token_stats(leaf, index, want=(name,)), name).sum(), leaf)
    assert torch.equal(got, alone)


def test_skipped_rows():
    logits, index = torch.full((3, 40_000), torch.nan), torch.tensor([4, -100, 4])
    logits[2] = torch.randn(40_000)
    leaf = logits.requires_grad_()
    stats = token_stats(leaf, index, row_mask=torch.tensor([0, 1, 1]), ignore_index=-100)
    for name in FIELDS:
        value = getattr(stats, name)
        assert torch.equal(value[:2], torch.full_like(value[:2], -1 if name == "argmax" else 0))
        assert value[2].isfinite()
    (gradient,) = torch.autograd.grad(stats.logp.sum() + stats.entropy.sum() + stats.logsumexp.sum(), leaf)
    assert torch.equal(gradient[:2], torch.zeros(2, 40_000))


@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_rows_without_a_distribution(dtype):
    logits = torch.randn(4, 300).to(dtype)
    logits[0, 7], logits[1, 9], logits[2] = torch.nan, torch.inf, -torch.inf
    stats = token_stats(logits, torch.zeros(4).long())
    for name in ("logp", "entropy", "sum_p2"):
        assert getattr(stats, name).isnan().tolist() == [True, True, True, False]
    assert stats.argmax[:3].tolist() == [-1, -1, -1]
    for name in ("max", "logsumexp"):
        assert getattr(stats, name)[:2].isnan().all()
        assert getattr(stats, name)[2] == -torch.inf


def test_empty_batch():
    logits = torch.randn(0, 9, requires_grad=True)
    stats = token_stats(logits, torch.zeros(0, 2).long())
    stats.logsumexp.sum().backward()
    assert stats.logp.shape == (0, 2)
    assert logits.grad.shape == (0, 9)


def test_three_numbers_a_row_are_kept_and_one_gradient_is_allocated(each_path):
    leaf, index = torch.randn(8, 40_000).bfloat16().requires_grad_(), torch.randint(40_000, (8,))
    with Saved() as saved:
        stats = token_stats(leaf, index)
    assert saved.bytes_beyond(leaf, index) <= 12 * 8
    loss = stats.logp.sum() + stats.entropy.sum() + stats.logsumexp.sum()
    if each_path == "generic":
        return  # chunks, which test_generic_path.py bounds
    with Dispatched() as dispatched:
        loss.backward()
    assert [size for size in dispatched.allocated if size > 40_000] == [leaf.numel() * 2]


@pytest.mark.parametrize(
    ("want", "return_entropy", "extras"),
    [
        (("logp", "max", "logsumexp"), False, False),
        (("entropy",), True, False),
        (("argmax",), False, True),
        (("sum_p2",), False, True),
    ],
    ids=str,
)
def test_what_costs_more_is_computed_where_it_is_wanted(want, return_entropy, extras, monkeypatch):
    operator, made = _ops.token_stats_forward, []
    monkeypatch.setattr(_ops, "token_stats_forward", lambda *a, **k: made.append(operator(*a, **k)) or made[0])
    token_stats(torch.randn(3, 9), torch.zeros(3).long(), want=want)
    _, entropy, _, _, _, sum_p2, argmax = made[0]
    assert (entropy.numel(), sum_p2.numel(), argmax.numel()) == (3 * return_entropy, 3 * extras, 3 * extras)


def test_entropy_from_logits_options_and_gradient():
    logits = (torch.randn(3, 5, dtype=torch.float64)).requires_grad_()
    row_mask, temperature = torch.tensor([1, 0, 1]), torch.rand(3) + 0.5
    entropy = entropy_from_logits(logits, temperature=temperature, row_mask=row_mask)
    _, expected = oracle.logps_and_entropy(logits / temperature.unsqueeze(-1), torch.zeros(3, 0).long())
    assert_values(entropy, expected * row_mask, ulps=2)
    assert torch.autograd.gradcheck(
        lambda x: entropy_from_logits(x, temperature=temperature, row_mask=row_mask), logits
    )


def test_errors():
    logits = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"want must name fields among logp, entropy, .*, got 'perplexity'"):
        token_stats(logits, want=("perplexity",))
    with pytest.raises(TypeError, match=r"logits must be a torch\.Tensor, got list"):
        token_stats([[0.0]])
    with pytest.raises(TypeError, match=r"logits must be a torch\.Tensor, got list"):
        entropy_from_logits([[0.0]])
    with pytest.raises(IndexError, match=r"index\[1\] is 3, expected 0 <= index < 3"):
        token_stats(logits, torch.tensor([0, 3]))
    with pytest.raises(ValueError, match="temperature must be finite and positive, got -1"):
        token_stats(logits, temperature=-1)


@pytest.mark.parametrize("want", [FIELDS, ("logsumexp",)], ids=["all", "logsumexp"])
def test_compiled_equals_eager(want, each_path):
    if each_path == "generic":
        pytest.skip("the compiler sees the operators, not the functions behind them")
    torch.compiler.reset()

    def step(logits, index):
        stats = token_stats(logits * 1, index, want=want, temperature=0.7)
        return *(x for x in stats if x is not None), sum(x.sum() for x in stats[:3] if x is not None)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    logits, index = torch.randn(4, 300), torch.randint(300, (4,))
    answers = []
    for function in (step, compiled):
        leaf = logits.clone().requires_grad_()
        *fields, loss = function(leaf, index)
        answers.append((*fields, torch.autograd.grad(loss, leaf)[0]))
    for eager, got in zip(*answers, strict=True):
        assert torch.equal(eager, got)


def test_opcheck(each_path):
    if each_path == "generic":
        pytest.skip("the functions of the generic path are called directly here")
    options = {"temperature": torch.rand(3) + 0.5, "row_mask": torch.tensor([True, False, True]), "ignore_index": -100}
    for index in (torch.tensor([1, 2, -100]), torch.zeros(3, 0).long(), torch.tensor([[1, -100]] * 3)):
        for wanted in ((True, True), (False, False)):
            torch.library.opcheck(_ops.token_stats_forward, (torch.randn(3, 40), index, *wanted), options)
