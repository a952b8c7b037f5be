"""The vocabulary split over two and three gloo ranks, against the whole in one process."""

import time
from itertools import pairwise

import oracle
import pytest
import torch
import torch.distributed as dist
from closeness import assert_gradients, assert_values
from memory import Dispatched, Saved
from ranks import Failure, Ranks
from torch.testing._internal.distributed.fake_pg import FakeStore

from memlean import _ops, reference, selective_log_softmax
from memlean.distributed import vocab_parallel_selective_log_softmax

REAL_VOCAB = 151_936
CUTS = {
    "5+5": [0, 5, 10],
    "6+4": [0, 6, 10],
    "9+1": [0, 9, 10],
    "4+3+3": [0, 4, 7, 10],
    "real": [0, REAL_VOCAB // 2, REAL_VOCAB],
    "real, uneven": [0, 50_000, 100_001, REAL_VOCAB],
}


@pytest.fixture(scope="module")
def groups():
    with Ranks(2) as two, Ranks(3) as three:
        yield {2: two, 3: three}


def shard_of(rank, logits, cuts):
    begin, end = cuts[rank : rank + 2]
    return logits[..., begin:end].clone().requires_grad_(), (begin, end)


def both_passes(rank, logits, index, cuts, upstream, options, generic=False):
    """logps, entropy and the shard's gradient on this rank."""
    if generic:
        _ops.token_logprob_forward = reference.token_logprob_forward
        _ops.token_logprob_backward = reference.token_logprob_backward
    shard, vocab_range = shard_of(rank, logits, cuts)
    try:
        logps, entropy = vocab_parallel_selective_log_softmax(
            shard, index, return_entropy=True, vocab_range=vocab_range, **options
        )
        (gradient,) = torch.autograd.grad([logps, entropy], shard, upstream)
    finally:
        _ops.token_logprob_forward = torch.ops.memlean.token_logprob_forward.default
        _ops.token_logprob_backward = torch.ops.memlean.token_logprob_backward.default
    return logps.detach(), entropy.detach(), gradient


def assert_shards_equal_the_whole(groups, logits, index, cuts, generic=False, **options):
    # The whole in float64, which test_features.py compares with plain formulas.
    leaf = logits.double().requires_grad_()
    exact = {name: x.double() if name == "temperature" and torch.is_tensor(x) else x for name, x in options.items()}
    logps, entropy = whole = selective_log_softmax(leaf, index, return_entropy=True, **exact)
    real = reference.real_dtype(logits.dtype)
    upstream = [torch.randn_like(x, dtype=real) for x in whole]
    (gradient,) = torch.autograd.grad(whole, leaf, [g.double() for g in upstream])
    answers = groups[len(cuts) - 1](both_passes, logits, index, cuts, upstream, options, generic)
    for rank, (got_logps, got_entropy, got_gradient) in enumerate(answers):
        assert_values(got_logps, logps, ulps=2)
        assert_values(got_entropy, entropy, ulps=2)
        assert got_gradient.dtype == logits.dtype
        begin, end = cuts[rank : rank + 2]
        assert_gradients(got_gradient, gradient[..., begin:end], scale=10)
        assert torch.equal(got_logps.nan_to_num(), answers[0][0].nan_to_num())  # the same bits on every rank
        assert torch.equal(got_entropy.nan_to_num(), answers[0][1].nan_to_num())


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_and_each_ranks_slice_of_the_gradient(groups, dtype, cut):
    vocab = CUTS[cut][-1]
    # Targets on each rank in turn, at both ends of its shard.
    index = torch.tensor([t for begin, end in pairwise(CUTS[cut]) for t in (begin, end - 1)])
    assert_shards_equal_the_whole(groups, (torch.randn(len(index), vocab) * 3).to(dtype), index, CUTS[cut])


@pytest.mark.parametrize("cut", ["6+4", "4+3+3"])
@pytest.mark.parametrize("candidates", [None, 1, 5])
@pytest.mark.parametrize("temperature", [None, 0.7, "per token"])
@pytest.mark.parametrize("masked", [False, True])
def test_options(groups, masked, temperature, candidates, cut):
    logits = torch.randn(3, 4, 10)
    index = torch.randint(10, (3, 4) if candidates is None else (3, 4, candidates))
    options = {"temperature": torch.rand(3, 4) + 0.5 if temperature == "per token" else temperature}
    if masked:
        index[0] = -100
        index.view(-1)[-1] = -100
        options |= {"ignore_index": -100, "row_mask": torch.arange(12).view(3, 4) % 3}
        logits[0] = torch.nan
        logits[1, 2] = torch.inf  # row 6 is masked
    assert_shards_equal_the_whole(groups, logits, index, CUTS[cut], **options)


@pytest.mark.parametrize("generic", [False, True])
@pytest.mark.parametrize("cut", ["6+4", "4+3+3"])
def test_shards_of_minus_infinity(groups, cut, generic):
    cuts = CUTS[cut]
    logits = torch.randn(len(cuts) + 1, 10)
    for row, (begin, end) in enumerate(pairwise(cuts)):
        logits[row, begin:end] = -torch.inf
    logits[-2, 3:] = -torch.inf  # padding over more than one shard
    logits[-1] = -torch.inf
    index = torch.full((len(logits), 3), 9)
    index[:, 1], index[:, 2] = 0, 4
    assert_shards_equal_the_whole(groups, logits, index, cuts, generic)


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_poison_on_one_rank_is_nan_on_all_in_that_row_alone(groups, poison):
    logits = torch.randn(4, 10)
    logits[1, 0] = logits[2, 9] = poison
    assert_shards_equal_the_whole(groups, logits, torch.randint(10, (4,)), CUTS["6+4"])


@pytest.mark.parametrize("gap", [14.0, 30.0, 1e4])
def test_a_nearly_certain_token_keeps_its_precision(groups, gap):
    logits = torch.randn(2, 10, dtype=torch.float64)
    logits[0, 1] += gap
    logits[1, 8] += gap
    index = torch.tensor([1, 8])
    truth, _ = oracle.logps_and_entropy(logits, index)
    for logps, _, _ in groups[2](both_passes, logits, index, CUTS["5+5"], [torch.ones(2)] * 2, {}):
        assert torch.allclose(logps, truth, rtol=1e-12, atol=0)


@pytest.mark.parametrize(("rows", "candidates"), [((0,), None), ((2, 0), 3), ((3,), 0), ((), None)])
def test_empty_and_single(groups, rows, candidates):
    index = torch.zeros(rows if candidates is None else (*rows, candidates), dtype=torch.long)
    assert_shards_equal_the_whole(groups, torch.randn(*rows, 10), index, CUTS["5+5"], temperature=0.7)


def without_range(rank, logits, index, sizes):
    begin = sum(sizes[:rank])
    return vocab_parallel_selective_log_softmax(logits[:, begin : begin + sizes[rank]], index)


def test_equal_shards_need_no_range(groups):
    logits, index = torch.randn(4, 10), torch.tensor([0, 4, 5, 9])
    for logps in groups[2](without_range, logits, index, [5, 5]):
        assert_values(logps, selective_log_softmax(logits, index), ulps=2)


def test_shards_in_another_order(groups):
    logits, index = torch.randn(4, 10), torch.tensor([0, 4, 5, 9])
    for logps in groups[2](in_other_order, logits, index):
        assert_values(logps, selective_log_softmax(logits, index), ulps=2)


def in_other_order(rank, logits, index):
    begin, end = [(7, 10), (0, 7)][rank]
    return vocab_parallel_selective_log_softmax(logits[:, begin:end], index, vocab_range=(begin, end))


def gradcheck(rank, index, temperature, row_mask):
    """Against differences of a loss that depends on the shard of this rank and, fixed, on those of the others."""
    torch.manual_seed(0)
    logits = torch.randn(2, 10, dtype=torch.float64)

    def loss(shard):
        outputs = vocab_parallel_selective_log_softmax(
            shard, index, return_entropy=True, temperature=temperature, row_mask=row_mask
        )
        return sum((x * torch.arange(1, x.numel() + 1).view_as(x)).sum() for x in outputs)

    mine = logits[:, rank * 5 : rank * 5 + 5].clone().requires_grad_()
    (got,) = torch.autograd.grad(loss(mine), mine)
    differences = torch.zeros_like(mine)
    with torch.no_grad():
        for moving in range(2):  # all ranks call together; one of them moves
            for row in range(2):
                for column in range(5):
                    step = torch.zeros_like(mine)
                    step[row, column] = 1e-6 if moving == rank else 0
                    slope = (loss(mine + step) - loss(mine - step)) / 2e-6
                    if moving == rank:
                        differences[row, column] = slope
    return (got - differences).abs().max().item()


@pytest.mark.parametrize("row_mask", [None, torch.tensor([0, 1])], ids=["all rows", "masked"])
@pytest.mark.parametrize("temperature", [None, 0.8, torch.tensor([0.5, 2.0])], ids=["none", "scalar", "per token"])
@pytest.mark.parametrize("index", [torch.tensor([1, 8]), torch.tensor([[1, 8, 8], [5, 0, 4]])], ids=["one", "three"])
def test_gradients_against_differences(groups, index, temperature, row_mask):
    assert max(groups[2](gradcheck, index, temperature, row_mask)) <= 1e-7


def costs(rank, logits, index, return_entropy):
    """Collectives of each pass, bytes kept in between, and what backward allocates of the shard's size."""
    shard = logits.chunk(2, -1)[rank].clone().requires_grad_()
    with Saved() as saved, Dispatched() as forward:
        outputs = vocab_parallel_selective_log_softmax(shard, index, return_entropy=return_entropy)
    loss = sum(x.sum() for x in outputs) if return_entropy else outputs.sum()
    with Dispatched() as backward:
        loss.backward()
    collectives = [[name for name in one_pass.operators if "c10d" in name] for one_pass in (forward, backward)]
    large = [size for size in backward.allocated if size >= shard.numel() * shard.element_size()]
    return *collectives, saved.bytes_beyond(shard, index), large


@pytest.mark.parametrize("return_entropy", [False, True])
def test_one_collective_in_forward_none_in_backward_and_three_numbers_a_row_kept(groups, return_entropy):
    logits, index = torch.randn(16, 20_000).bfloat16(), torch.randint(20_000, (16,))
    for forward, backward, kept, large in groups[2](costs, logits, index, return_entropy):
        assert forward == ["c10d._allgather_base_.default"]
        assert backward == []
        assert 0 < kept <= 12 * 16
        assert large == [16 * 10_000 * 2]  # the gradient itself


def frozen(rank, logits, index):
    with Saved() as saved:
        logps = vocab_parallel_selective_log_softmax(logits.chunk(2, -1)[rank], index)
    return len(saved.tensors), logps.requires_grad


def test_nothing_is_saved_without_a_gradient(groups):
    assert groups[2](frozen, torch.randn(3, 10), torch.zeros(3, dtype=torch.long)) == [(0, False)] * 2


def twice(rank, logits, index):
    shard = logits.chunk(2, -1)[rank].clone().requires_grad_()
    logps = vocab_parallel_selective_log_softmax(shard, index)
    torch.autograd.grad(logps.sum(), shard, create_graph=True)


def test_a_second_derivative_is_refused(groups):
    for failure in groups[2].outcomes(twice, torch.randn(3, 10), torch.zeros(3, dtype=torch.long)):
        assert "has no second derivative (create_graph=True)" in failure.message


def compiled(rank, logits, index):
    def loss(shard):
        outputs = vocab_parallel_selective_log_softmax(shard * 1, index, return_entropy=True)
        return outputs[0].sum() - outputs[1].sum()

    shard = logits.chunk(2, -1)[rank].clone().requires_grad_()
    (eager,) = torch.autograd.grad(loss(shard), shard)
    (got,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(shard), shard)
    return torch.equal(eager, got)


def test_compiled_code_calls_it(groups):
    assert groups[2](compiled, torch.randn(3, 10), torch.tensor([1, 5, 9])) == [True, True]


# ---- Errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "hint"), [(10, ""), (-1, ""), (-100, "pass ignore_index=-100")])
def test_an_index_out_of_range_raises_on_every_rank(groups, bad, hint):
    for failure in groups[2].outcomes(without_range, torch.randn(2, 10), torch.tensor([3, bad]), [5, 5]):
        assert failure.kind == "IndexError"
        assert f"index[1] is {bad}, expected 0 <= index < 10" in failure.message
        assert hint in failure.message


def test_the_group_works_on_after_an_error(groups):
    logits, index = torch.randn(2, 10), torch.tensor([3, 7])
    groups[2].outcomes(without_range, logits, index + 5, [5, 5])
    for logps in groups[2](without_range, logits, index, [5, 5]):
        assert_values(logps, selective_log_softmax(logits, index), ulps=2)


def with_ranges(rank, ranges):
    begin, end = ranges[rank]
    shard, index = torch.zeros(2, end - begin), torch.zeros(2, dtype=torch.long)
    return vocab_parallel_selective_log_softmax(shard, index, vocab_range=(begin, end))


BAD_RANGES = {"gap": [(0, 5), (6, 10)], "overlap": [(0, 6), (5, 10)], "not from 0": [(1, 5), (5, 10)]}


@pytest.mark.parametrize("name", BAD_RANGES)
def test_ranges_that_do_not_cover_the_vocabulary_once(groups, name):
    (a, b), (c, d) = BAD_RANGES[name]
    for failure in groups[2].outcomes(with_ranges, BAD_RANGES[name]):
        assert failure.kind == "ValueError"
        assert "must cover the vocabulary from 0 without gap or overlap" in failure.message
        assert f"got rank 0 [{a}, {b}), rank 1 [{c}, {d})" in failure.message


def test_unequal_shards_without_a_range(groups):
    for failure in groups[2].outcomes(without_range, torch.randn(2, 10), torch.tensor([3, 7]), [6, 4]):
        assert failure.kind == "ValueError"
        assert "got rank 0 [0, 6), rank 1 [4, 8); for shards of unequal size pass vocab_range" in failure.message


def disagreeing(rank, what):
    shard, index = torch.zeros(2, 5), torch.tensor([3, 4])
    if what == "index" and rank == 1:
        index = index.flip(0)
    return vocab_parallel_selective_log_softmax(shard, index, return_entropy=what == "return_entropy" and rank == 1)


@pytest.mark.parametrize("what", ["index", "return_entropy"])
def test_ranks_that_disagree(groups, what):
    for failure in groups[2].outcomes(disagreeing, what):
        assert failure.kind == "ValueError"
        assert f"{what} must be the same on every rank" in failure.message


@pytest.mark.parametrize(
    ("vocab_range", "got"), [((0, 4), "got (0, 4)"), ((-2, 3), "got (-2, 3)"), ((2**24, 2**24 + 5), "16777216")]
)
def test_a_range_that_does_not_fit_the_shard(one_rank, vocab_range, got):
    with pytest.raises(ValueError, match="vocab_range must") as caught:
        vocab_parallel_selective_log_softmax(torch.zeros(2, 5), torch.zeros(2).long(), vocab_range=vocab_range)
    assert got in str(caught.value)


def failing(rank, what):
    rows, candidates = 6, 1
    if rank == 1:
        if what == "raises":
            raise SystemExit("this rank has failed")
        if what == "does not call":
            time.sleep(30)
        rows, candidates = {"fewer rows": (3, 1), "more candidates": (6, 3)}.get(what, (6, 1))
    dtype = torch.float64 if what == "another dtype" and rank == 1 else torch.float32
    index = torch.zeros(rows, candidates, dtype=torch.long)
    return vocab_parallel_selective_log_softmax(torch.zeros(rows, 5, dtype=dtype), index)


@pytest.mark.parametrize("what", ["raises", "does not call", "fewer rows", "more candidates", "another dtype"])
def test_a_rank_that_fails_ends_all_in_bounded_time(what):
    # gloo ends the process of a rank that receives too much, and delivers too little without a word.
    with Ranks(2, timeout=5) as ranks:
        begin = time.monotonic()
        failures = ranks.outcomes(failing, what)
        assert all(isinstance(failure, Failure) for failure in failures)
        assert time.monotonic() - begin < 50


# ---- Devices where a value cannot be looked at ---------------------------------------------------------------------


@pytest.fixture
def one_rank():
    """This process as rank 0 of 2 in a group that communicates nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def test_nothing_waits_for_the_device(one_rank):
    # On meta tensors whatever looks at a value raises.
    logits = torch.randn(6, 50, device="meta", requires_grad=True)
    index, row_mask = torch.zeros(6, 3, dtype=torch.long, device="meta"), torch.ones(6, device="meta")
    with Dispatched() as dispatched:
        logps, entropy = vocab_parallel_selective_log_softmax(
            logits, index, return_entropy=True, temperature=0.7, row_mask=row_mask, ignore_index=-100
        )
        (gradient,) = torch.autograd.grad(logps.sum() + entropy.sum(), logits)
    assert gradient.shape == logits.shape
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & set(dispatched.operators)


def test_dtensor_is_refused(one_rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    shard = DTensor.from_local(torch.zeros(2, 5), init_device_mesh("cpu", (2,)), [Shard(1)], run_check=False)
    with pytest.raises(TypeError, match=r"logits_shard must be a plain tensor, got a DTensor: pass its \.to_local\(\)"):
        vocab_parallel_selective_log_softmax(shard, torch.zeros(2, dtype=torch.long))
