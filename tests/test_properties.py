"""Random calls of every kind, against float64: each path within its error, the C kernels bit for bit at every level.

The profile ``ci`` (default) tries the same examples each time; ``make fuzz-python`` tries others, and more of them.
"""

import collections
import contextlib
import math
import os

import hostile
import oracle
import paths
import pytest
import torch
from closeness import assert_gradients, assert_values
from fingerprint import bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memlean import selective_log_softmax, token_stats
from memlean.reference import real_dtype

everything = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
settings.register_profile("ci", derandomize=True, max_examples=300, **everything)
settings.register_profile("long", max_examples=6_000, **everything)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

CHUNK_BYTES = 6000  # of the generic path: several chunks in most calls
tried = collections.Counter()


@pytest.fixture(scope="module", autouse=True)
def report_what_was_tried():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # most calls are small; test_same_bits.py compares thread counts
    yield
    torch.set_num_threads(before)
    print("\ntried:", ", ".join(f"{count} {what}" for what, count in tried.items()))


# ---- What is drawn --------------------------------------------------------------------------------------------------

EDGES = [width + step for width in (32, 2048, 32768) for step in (-1, 0, 1)]
VOCABS = st.one_of(*[st.integers(1, 70)] * 4, st.integers(1, 5000), st.sampled_from(EDGES))
SCALES = st.sampled_from([1.0, 1.0, 1e-40, 1e-3, 30.0, 1e4, 1e30])
OFFSETS = st.sampled_from([0.0, 0.0, 1.0, -1e4, 1e4, 1e30, -1e30])
SPECIAL = st.sampled_from(
    [math.nan, math.inf, -math.inf, -math.inf, -0.0, 1e-45, -1e-40, hostile.FLT_MAX, -hostile.FLT_MAX, -1e4, -1e30]
)
TEMPERATURES = st.sampled_from([0.05, 0.3, 1.0, 1.7, 50.0])
EXTREME_TEMPERATURES = [1e-37, 1e-30, 1e30]
INDEX_DTYPES = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
UPSTREAMS = st.sampled_from([0.0, 1.0, 1.0, -3.0, 1e-30, 1e4, 1e30])
IGNORED = -100


def _unaligned(x):
    raw = bytearray(x.numel() * x.element_size() + 1)
    return torch.frombuffer(raw, dtype=x.dtype, offset=1, count=x.numel()).view(x.shape).copy_(x)


def _in_storage(x, shape, view):
    return view(torch.full(shape, 7, dtype=x.dtype)).copy_(x)


# Each puts x somewhere else, most with the same numbers.
LAYOUTS = {
    "contiguous": lambda x: x,
    "vocabulary step": lambda x: _in_storage(x, (*x.shape[:-1], 3 * x.shape[-1]), lambda s: s[..., ::3]),
    "vocabulary first": lambda x: x.movedim(-1, 0).contiguous().movedim(0, -1),
    "reversed dimensions": lambda x: (
        x.permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
    ),
    "expanded rows": lambda x: x[:1].expand_as(x) if x.dim() > 1 else x,
    "expanded vocabulary": lambda x: x[..., :1].expand_as(x),
    "offset": lambda x: _in_storage(x, (x.numel() + 5,), lambda s: s[5:].view(x.shape)),
    "padded rows": lambda x: _in_storage(x, (*x.shape[:-1], x.shape[-1] + 9), lambda s: s[..., 4:-5]),
    "every other row": lambda x: (
        _in_storage(x, (2 * x.shape[0], *x.shape[1:]), lambda s: s[1::2]) if x.dim() > 1 else x
    ),
    "unaligned": _unaligned,
}


@st.composite
def calls(draw):
    """logits, index, options and upstream gradients of one call."""
    torch.manual_seed(draw(st.integers(0, 2**31)))
    dtype, vocab = draw(st.sampled_from(hostile.DTYPES)), draw(VOCABS)
    shape = draw(st.lists(st.integers(1, 3), max_size=4))[: 4 if vocab <= 70 else 2 if vocab <= 5000 else 1]
    rows = math.prod(shape)
    kinds = draw(st.lists(st.sampled_from(list(hostile.ROWS)), min_size=1, max_size=4))
    made = torch.stack([hostile.ROWS[kinds[i % len(kinds)]](vocab).double() for i in range(rows)])
    logits = hostile.narrowed(made * draw(SCALES) + draw(OFFSETS), dtype)
    for row, column, value in draw(
        st.lists(st.tuples(st.integers(0, rows - 1), st.integers(0, vocab - 1), SPECIAL), max_size=3)
    ):
        logits[row, column] = value
    logits = LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](logits.view(*shape, vocab))

    candidates = draw(st.sampled_from([None, None, 0, 1, 3, 70]))
    index_dtype = draw(st.sampled_from(INDEX_DTYPES))
    highest = min(vocab - 1, torch.iinfo(index_dtype).max)
    index = torch.randint(highest + 1, shape if candidates is None else (*shape, candidates)).to(index_dtype)
    if index.numel():
        index.view(-1)[0], index.view(-1)[-1] = 0, highest

    real, options = real_dtype(dtype), {}
    if draw(st.booleans()):
        options["temperature"] = draw(st.one_of(TEMPERATURES, TEMPERATURES, st.sampled_from(EXTREME_TEMPERATURES)))
        if draw(st.booleans()):
            options["temperature"] *= torch.rand(shape, dtype=torch.float64) + 0.5
    if draw(st.booleans()):
        options["row_mask"] = torch.randint(3, shape)
    if index_dtype is not torch.uint8 and draw(st.booleans()):
        options["ignore_index"] = IGNORED
        index[torch.rand(index.shape) < 0.3] = IGNORED
    upstream = torch.randn(index.shape, dtype=real) * draw(UPSTREAMS), torch.randn(shape, dtype=real) * draw(UPSTREAMS)
    return logits, index, options, upstream


# ---- What is right --------------------------------------------------------------------------------------------------


def expected(logits, index, options, upstream):
    """logps, entropy, gradient in float64, and the largest upstream gradient of a row over the temperature."""
    temperature = torch.as_tensor(options.get("temperature", 1.0), dtype=real_dtype(logits.dtype)).double()
    divisor = temperature.expand(logits.shape[:-1]).unsqueeze(-1)
    exact = (logits.double() - logits.double().amax(-1, keepdim=True)) / divisor
    tokens = index.long() if index.dim() == logits.dim() else index.long().unsqueeze(-1)
    ignored = tokens == options.get("ignore_index", 2**40)
    skipped = options.get("row_mask", torch.ones(())).eq(0).expand(logits.shape[:-1])
    if tokens.shape[-1] > 0:
        skipped = skipped | ignored.all(-1)
    tokens = tokens.masked_fill(ignored, 0)
    grad_logps, grad_entropy = upstream
    grad_logps = grad_logps.view(tokens.shape).masked_fill(ignored, 0.0)
    logps, entropy = oracle.logps_and_entropy(exact, tokens)
    gradient = oracle.gradient(exact, tokens, grad_logps, grad_entropy) / divisor
    unused = skipped | ((grad_logps == 0).all(-1) & (grad_entropy == 0))
    # Adding up a row's candidates rounds in units of the sum of their sizes.
    scale = torch.maximum(grad_logps.abs().sum(-1), grad_entropy.abs()).max().item()
    return (
        logps.masked_fill(ignored | skipped.unsqueeze(-1), 0.0).view(index.shape),
        entropy.masked_fill(skipped, 0.0),
        gradient.masked_fill(unused.unsqueeze(-1), 0.0),
        scale / divisor.min().item(),
    )


def results(logits, index, options, upstream, create_graph=False, **more):
    leaf = logits.detach().requires_grad_()
    used = leaf * 1 if more else leaf  # inplace_backward wants no leaf
    outputs = selective_log_softmax(used, index, True, **options, chunk_bytes=CHUNK_BYTES, **more)
    (gradient,) = torch.autograd.grad(outputs, leaf, upstream, create_graph=create_graph)
    tried["forward passes"] += 1
    tried["backward passes"] += 1
    return *(x.detach() for x in outputs), gradient.detach()


def is_extreme(options):
    temperature = torch.as_tensor(options.get("temperature", 1.0), dtype=torch.float64)
    return bool((temperature.log10().abs() > 20).any())


def assert_right(got, truth, options, ulps):
    logps, entropy, gradient, scale = truth
    for value, expected_value in zip(got, (logps, entropy), strict=False):
        assert_values(value, expected_value, ulps)
        assert not (value > 0).any() or value is got[1]
    assert not (got[1] < 0).any()
    if is_extreme(options):  # a gradient over such a temperature is beyond float32, or nothing
        assert torch.equal(got[2].isnan(), gradient.isnan())
    else:
        assert_gradients(got[2], gradient, scale=max(10 * scale, 1e-30))


# ---- Properties -----------------------------------------------------------------------------------------------------


def each_path():
    """(name, context), the highest level last."""
    yield "generic path", paths.generic()
    for name in paths.LEVELS:
        yield name, paths.level(name)


@given(calls())
def test_values_and_gradients(call):
    tried["examples"] += 1
    truth = expected(*call)
    hashes = {}
    for name, path in each_path():
        with path:
            got = results(*call)
        assert_right(got, truth, call[2], ulps=3)
        if name in paths.LEVELS:
            hashes[name] = bits(*got)
    assert len(set(hashes.values())) <= 1, hashes


@given(calls())
def test_with_create_graph(call):
    tried["examples"] += 1
    assert_right(results(*call, create_graph=True), expected(*call), call[2], ulps=3)


@given(calls())
def test_inplace_backward_has_the_same_bits(call):
    tried["examples"] += 1
    logits, index, *rest = call
    if index.dim() == logits.dim():
        index, rest[1] = index[..., :64], (rest[1][0][..., :64], rest[1][1])
    logits = logits.contiguous()
    for _, path in each_path():
        with path:
            plain, inplace = results(logits, index, *rest), results(logits, index, *rest, inplace_backward=True)
        assert bits(*plain) == bits(*inplace)


@given(calls())
def test_token_stats(call):
    tried["examples"] += 1
    logits, index, options, _ = call
    read = expected(*call)[0].new_ones(logits.shape[:-1]).bool()
    if "row_mask" in options:
        read &= options["row_mask"] != 0
    if "ignore_index" in options and index.numel():
        ignored = index == IGNORED
        read &= ~(ignored if index.dim() < logits.dim() else ignored.all(-1))
    exists = logits.isfinite().any(-1) & ~(logits.isnan() | logits.isposinf()).any(-1)
    for _, path in each_path():
        with path:
            logps, entropy = selective_log_softmax(logits, index, True, **options)
            stats = token_stats(logits, index, **options)
        tried["forward passes"] += 2
        assert bits(logps, entropy) == bits(stats.logp, stats.entropy)
        highest = logits.amax(-1)
        assert torch.equal(stats.max[read & exists], highest[read & exists].to(stats.max.dtype))
        first = (logits == highest.unsqueeze(-1)).int().argmax(-1)
        assert torch.equal(stats.argmax, first.masked_fill(~(read & exists), -1))
        sum_p2 = stats.sum_p2[read & exists]
        assert ((sum_p2 > 0) & (sum_p2 <= 1 + 1e-6)).all()


@given(calls(), st.data())
def test_a_token_out_of_range_is_named(call, data):
    tried["examples"] += 1
    logits, index, options, _ = call
    if index.numel() == 0:
        return
    index, vocab = index.long(), logits.shape[-1]
    outside = st.one_of(st.integers(vocab, 2**63 - 1), st.integers(-(2**63), -1).filter(lambda i: i != IGNORED))
    position = data.draw(st.integers(0, index.numel() - 1))
    bad = index.view(-1)[position] = data.draw(outside)
    where = ", ".join(str(i) for i in torch.unravel_index(torch.tensor(position), index.shape)) if index.dim() else ""
    where = where.replace("tensor(", "").replace(")", "")
    for _, path in each_path():
        with path, contextlib.suppress(IndexError):
            try:
                selective_log_softmax(logits, index, **options)
            except IndexError as error:
                message = f"index[{where}] is {bad}" if where else f"index is {bad}"
                assert f"{message}, expected 0 <= index < {vocab}" in str(error)
                raise
            raise AssertionError(f"no error for {bad}")
        tried["refused calls"] += 1
