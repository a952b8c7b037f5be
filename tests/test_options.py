"""temperature, row_mask, ignore_index: values and gradients of ``logits / temperature``, and rows that are not read."""

import hostile
import oracle
import pytest
import torch
from closeness import assert_gradients, assert_values
from memory import Saved

from memlean import selective_log_softmax

pytestmark = pytest.mark.usefixtures("each_path")

TEMPERATURES = {
    "none": lambda rows: None,
    "scalar": lambda rows: 0.7,
    "0-d tensor": lambda rows: torch.tensor(1.6),
    "per token": lambda rows: torch.rand(rows, dtype=torch.float64) * 2 + 0.3,
}


def per_row(temperature, rows):
    """float64 ``[rows, 1]``; rounded to float32 as the kernels take it, which a test's own 0.7 is not."""
    if temperature is None:
        return torch.ones(())
    return torch.as_tensor(temperature, dtype=torch.float64).expand(rows).unsqueeze(-1)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 3.0, 100.0, "per token"])
@pytest.mark.parametrize("vocab", [1, 33, 40_000])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_temperature_on_hostile_rows_against_float64(dtype, vocab, temperature, each_path):
    logits = hostile.rows(vocab, dtype)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    if temperature == "per token":
        temperature = torch.rand(len(logits)) + 0.2
    divisor = per_row(torch.as_tensor(temperature, dtype=real), len(logits))
    index = hostile.telling_index(logits)
    leaf = logits.clone().requires_grad_()
    outputs = selective_log_softmax(leaf, index, return_entropy=True, temperature=temperature)
    # Without the offset, whose division would round.
    exact = (logits.double() - logits.double().amax(-1, keepdim=True)) / divisor
    for got, expected in zip(outputs, oracle.logps_and_entropy(exact, index), strict=True):
        assert_values(got, expected, ulps={"native": 1, "generic": 2}[each_path] + 1)
    upstream = [torch.randn_like(x) for x in outputs]
    (got,) = torch.autograd.grad(outputs, leaf, upstream)
    assert_gradients(got, oracle.gradient(exact, index, *upstream) / divisor, scale=10 * (1 / divisor.min()).item())


@pytest.mark.parametrize("temperature", [1e-30, 1e-40, 1e30, 3e38])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_extreme_temperatures(dtype, temperature):
    logits = torch.tensor([[3.0, 1.0, 2.0, -torch.inf]]).to(dtype).requires_grad_()
    logps, entropy = selective_log_softmax(logits, torch.tensor([[0, 1]]), True, temperature=temperature)
    (gradient,) = torch.autograd.grad(logps.sum() + entropy.sum(), logits)
    assert logps[0, 0] <= 0
    assert gradient[0, 3] == 0
    assert not gradient.isnan().any()
    if temperature < 1:
        assert logps[0, 0] == 0
        assert logps[0, 1] < -1e29
        assert entropy == 0
    else:
        assert torch.allclose(logps, torch.full((1, 2), 1 / 3, dtype=logps.dtype).log())
        assert torch.allclose(entropy, torch.tensor([3.0], dtype=entropy.dtype).log())


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_low_temperature_of_large_logits_stays_finite(create_graph):
    logits = torch.tensor([[1e38, 1e38, 0.0]], requires_grad=True)
    logps = selective_log_softmax(logits, torch.tensor([0]), temperature=0.01)
    (gradient,) = torch.autograd.grad(logps.sum(), logits, create_graph=create_graph)
    assert torch.allclose(gradient, torch.tensor([[50.0, -50.0, 0.0]]))


def test_a_temperature_of_one_changes_no_bit():
    logits, index = torch.randn(4, 3000), torch.randint(3000, (4,))
    plain = selective_log_softmax(logits, index, return_entropy=True)
    for one in (1, 1.0, torch.tensor(1.0), torch.ones(4)):
        for a, b in zip(plain, selective_log_softmax(logits, index, True, temperature=one), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 1), (1, 4), (3, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_a_temperature_broadcasts_to_the_rows(dtype, shape):
    logits, index = torch.randn(3, 4, 50), torch.randint(50, (3, 4))
    temperature = torch.randint(1, 5, shape).to(dtype)
    got = selective_log_softmax(logits, index, temperature=temperature)
    each = temperature.float().expand(3, 4)
    assert torch.equal(got, selective_log_softmax(logits, index, temperature=each))
    assert_values(got, oracle.logps_and_entropy(logits.double() / each.unsqueeze(-1), index)[0], ulps=3)


def test_a_temperature_beside_candidates_may_have_a_trailing_one():
    logits, index, temperature = torch.randn(3, 4, 50), torch.randint(50, (3, 4, 2)), torch.rand(3, 4) + 0.5
    a = selective_log_softmax(logits, index, temperature=temperature)
    assert torch.equal(a, selective_log_softmax(logits, index, temperature=temperature.unsqueeze(-1)))


def test_the_temperature_is_not_written_to_and_the_logits_are_not_copied():
    logits, index = torch.randn(8, 4000, requires_grad=True), torch.randint(4000, (8,))
    temperature = torch.rand(8) + 0.5
    before = temperature.clone()
    with Saved() as saved:
        selective_log_softmax(logits, index, temperature=temperature, row_mask=torch.ones(8)).sum().backward()
    assert torch.equal(temperature, before)
    assert saved.bytes_beyond(logits, index, temperature) <= 8 * (12 + 1)


@pytest.mark.parametrize("candidates", [None, 0, 1, 3])
@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_gradcheck(temperature, masked, return_entropy, candidates):
    logits = (torch.randn(3, 5, dtype=torch.float64) * 2).requires_grad_()
    index = torch.randint(5, (3,) if candidates is None else (3, candidates))
    row_mask = torch.tensor([1, 0, 2]) if masked else None
    options = {"temperature": TEMPERATURES[temperature](3), "row_mask": row_mask}
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: selective_log_softmax(x, index, return_entropy, **options), logits)


@pytest.mark.parametrize("candidates", [None, 2])
def test_gradcheck_of_one_row_and_ignored_tokens(candidates):
    logits = torch.randn(9, dtype=torch.float64, requires_grad=True)
    index = torch.tensor(3) if candidates is None else torch.tensor([3, -100])
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: selective_log_softmax(x, index, True, temperature=0.6, ignore_index=-100), logits)


# ---- Rows that are not read -----------------------------------------------------------------------------------------


def results(logits, index, **options):
    leaf = logits.clone().requires_grad_()
    logps, entropy = selective_log_softmax(leaf, index, return_entropy=True, **options)
    upstream = [torch.linspace(1, 2, x.numel(), dtype=x.dtype).view(x.shape) for x in (logps, entropy)]
    return logps, entropy, torch.autograd.grad([logps, entropy], leaf, upstream)[0]


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32], ids=str)
@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_masked_rows_are_zero_whatever_they_hold_and_change_no_other(dtype, poison, mask_dtype):
    logits, index = torch.randn(6, 40_000).to(dtype), torch.randint(40_000, (6, 2))
    row_mask = torch.tensor([1, 0, 1, 1, 0, 1]).to(mask_dtype)
    plain = results(logits, index)
    logits[row_mask == 0] = poison
    for before, after in zip(plain, results(logits, index, row_mask=row_mask), strict=True):
        assert torch.equal(after[row_mask == 0], torch.zeros_like(after[row_mask == 0]))
        assert torch.equal(after[row_mask != 0], before[row_mask != 0])


@pytest.mark.parametrize("ignore_index", [-100, -1, 7, 10, 2**40])
def test_ignored_tokens_are_zero_and_get_no_gradient(ignore_index):
    logits, index = torch.randn(5, 10), torch.randint(7, (5,))
    plain = results(logits, index)
    logits[1] = logits[4] = torch.nan
    index[1] = index[4] = ignore_index
    for before, after in zip(plain, results(logits, index, ignore_index=ignore_index), strict=True):
        assert torch.equal(after[[1, 4]], torch.zeros_like(after[[1, 4]]))
        assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])


def test_a_row_with_some_ignored_candidates_is_read():
    logits, index = torch.randn(2, 10), torch.tensor([[3, -100, 5], [-100, -100, -100]])
    logps, entropy, gradient = results(logits, index, ignore_index=-100)
    whole = selective_log_softmax(logits[0], torch.tensor([3, 5]), return_entropy=True)
    assert torch.equal(logps[0, [0, 2]], whole[0])
    assert logps[0, 1] == 0
    assert entropy[0] == whole[1]
    assert torch.equal(logps[1], torch.zeros(3))
    assert entropy[1] == 0
    grad_logps = torch.linspace(1, 2, 6).view(2, 3)[:1, [0, 2]]
    expected = oracle.gradient(logits[:1], torch.tensor([[3, 5]]), grad_logps, torch.ones(1))
    assert_gradients(gradient[:1], expected, scale=10)
    assert torch.equal(gradient[1], torch.zeros(10))


def test_without_candidates_ignore_index_skips_nothing():
    logits, index = torch.randn(3, 10), torch.zeros(3, 0, dtype=torch.long)
    _, entropy = selective_log_softmax(logits, index, return_entropy=True, ignore_index=-100)
    assert torch.equal(entropy, selective_log_softmax(logits, index, return_entropy=True)[1])
    assert (entropy > 0).all()


def test_everything_masked():
    logits, index = torch.full((4, 5000), torch.nan), torch.zeros(4, dtype=torch.long)
    for result in results(logits, index, row_mask=torch.zeros(4)):
        assert torch.equal(result, torch.zeros_like(result))


def test_one_long_row_masked():
    # One row is split over the threads; masked, it is split as well.
    for result in results(torch.full((1, 151_936), torch.nan), torch.tensor([5]), row_mask=torch.zeros(1)):
        assert torch.equal(result, torch.zeros_like(result))


@pytest.mark.parametrize("create_graph", [False, True])
def test_poison_in_skipped_rows_stays_out_of_the_gradient(create_graph):
    logits = torch.randn(4, 10)
    logits[0], logits[1] = torch.nan, torch.inf
    leaf, index = logits.requires_grad_(), torch.tensor([-100, 2, 3, 4])
    row_mask = torch.tensor([1, 0, 1, 1])
    logps, entropy = selective_log_softmax(leaf, index, True, row_mask=row_mask, ignore_index=-100, temperature=0.5)
    (gradient,) = torch.autograd.grad(logps.sum() + entropy.sum(), leaf, create_graph=create_graph)
    assert torch.equal(gradient[:2], torch.zeros(2, 10))
    assert gradient[2:].isfinite().all()


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_native_and_generic_agree(temperature):
    from memlean import reference

    logits, index = torch.randn(6, 3000), torch.randint(3000, (6, 2))
    index[2, 0], index[3] = -100, -100
    row_mask = torch.tensor([1, 0, 1, 1, 1, 1])
    options = {"temperature": TEMPERATURES[temperature](6), "row_mask": row_mask, "ignore_index": -100}
    got = results(logits, index, **options)
    t = options["temperature"]
    plain = (None if t is None else torch.as_tensor(t, dtype=torch.float32), row_mask == 1, -100)
    logps, entropy, statistics = reference.token_logprob_forward(logits, index, True, *plain)
    upstream = [torch.linspace(1, 2, x.numel()).view(x.shape) for x in (logps, entropy)]
    gradient = reference.token_logprob_backward(logits, index, statistics, *upstream, *plain)
    for a, b in zip(got, (logps, entropy, gradient), strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=2e-6)


# ---- Errors ---------------------------------------------------------------------------------------------------------

LOGITS, INDEX = torch.zeros(2, 3, 10), torch.zeros(2, 3, dtype=torch.long)
ERRORS = {
    "zero": (ValueError, {"temperature": 0}, "temperature must be finite and positive, got 0"),
    "negative": (ValueError, {"temperature": -0.5}, "temperature must be finite and positive, got -0.5"),
    "nan": (ValueError, {"temperature": float("nan")}, "temperature must be finite and positive, got nan"),
    "inf": (ValueError, {"temperature": float("inf")}, "temperature must be finite and positive, got inf"),
    "beyond float32": (ValueError, {"temperature": 1e39}, "must be finite and positive in float32, got 1e[+]39"),
    "beneath float32": (ValueError, {"temperature": 1e-50}, "must be finite and positive in float32, got 1e-50"),
    "beyond any float": (ValueError, {"temperature": 10**400}, "must be finite and positive in float32, got 1000"),
    "a string": (TypeError, {"temperature": "warm"}, "temperature must be a number or a tensor, got str"),
    "a bool": (TypeError, {"temperature": True}, "temperature must be a number or a tensor, got bool"),
    "complex": (TypeError, {"temperature": torch.ones(3) * 1j}, "temperature must be a real number or tensor, got tor"),
    "a bool tensor": (TypeError, {"temperature": torch.ones(3) > 0}, "temperature must be a real number or tensor"),
    "with a gradient": (ValueError, {"temperature": torch.ones(3, requires_grad=True)}, "must not require grad"),
    "of another shape": (
        ValueError,
        {"temperature": torch.ones(2)},
        r"broadcast to the rows \[2, 3\], got shape \[2\]",
    ),
    "on another device": (ValueError, {"temperature": torch.ones(3, device="meta")}, "one device, got cpu and meta"),
    "mask list": (TypeError, {"row_mask": [1, 0]}, "row_mask must be a torch.Tensor, got list"),
    "mask shape": (ValueError, {"row_mask": torch.ones(3)}, r"row_mask must have .* rows, \[2, 3\], got \[3\]"),
    "mask device": (ValueError, {"row_mask": torch.ones(2, 3, device="meta")}, "one device, got cpu and meta"),
    "ignore float": (TypeError, {"ignore_index": -100.0}, "ignore_index must be an int or None, got float"),
    "ignore beyond int64": (ValueError, {"ignore_index": 2**63}, "ignore_index must be within int64, got 92233720"),
    "ignore bool": (TypeError, {"ignore_index": False}, "ignore_index must be an int or None, got bool"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_options(name):
    error, options, message = ERRORS[name]
    with pytest.raises(error, match=message):
        selective_log_softmax(LOGITS, INDEX, **options)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_a_bad_temperature_in_a_tensor_is_named_by_value_and_position(bad):
    temperature = torch.ones(2, 3)
    temperature[1, 2] = bad
    with pytest.raises(ValueError, match=rf"temperature\[1, 2\] must be finite and positive, got {bad:g}$"):
        selective_log_softmax(LOGITS, INDEX, temperature=temperature)


def test_another_token_out_of_range_raises_beside_ignore_index():
    index = torch.tensor([-100, 3, -1])
    with pytest.raises(IndexError, match=r"index\[2\] is -1, expected 0 <= index < 10"):
        selective_log_softmax(torch.zeros(3, 10), index, ignore_index=-100)


# ---- Compiled -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_compiled_equals_eager(temperature, dynamic, each_path):
    if each_path == "generic":
        pytest.skip("the compiler sees the operators, not the functions behind them")
    torch.compiler.reset()
    options = {
        "temperature": TEMPERATURES[temperature](4),
        "row_mask": torch.tensor([1, 0, 1, 1]),
        "ignore_index": -100,
    }

    def step(logits, index):
        logps, entropy = selective_log_softmax(logits * 1, index, return_entropy=True, **options)
        return logps, entropy, logps.sum() - 0.1 * entropy.sum()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for vocab in (60, 300):
        logits, index = torch.randn(4, vocab), torch.tensor([3, 2, -100, vocab - 1])
        answers = []
        for function in (step, compiled):
            leaf = logits.clone().requires_grad_()
            logps, entropy, loss = function(leaf, index)
            answers.append((logps, entropy, torch.autograd.grad(loss, leaf)[0]))
        for eager, got in zip(*answers, strict=True):
            assert torch.equal(eager, got)
