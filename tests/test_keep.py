"""keep: log-probabilities over the tokens that a sampler could have drawn, with the chosen token always among them."""

import hostile
import oracle
import pytest
import torch
from closeness import assert_gradients, assert_values
from memory import Dispatched, Saved

from memlean import _ops, selective_log_softmax


def as_lists(mask):
    """(ids, offsets) of a mask, in an order that no sorted list has and with one id twice."""
    ids, offsets = [], [0]
    for row in mask.reshape(-1, mask.shape[-1]):
        kept = row.nonzero().squeeze(-1).flip(0)
        ids.append(torch.cat([kept, kept[:1]]))
        offsets.append(offsets[-1] + len(ids[-1]))
    return torch.cat(ids), torch.tensor(offsets)


FORMS = {"mask": lambda mask: mask, "lists": as_lists}


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


def masked(logits, mask, index, ignore_index=None):
    """float64 logits with -inf where a column is neither kept nor chosen."""
    tokens = index if index.dim() == logits.dim() else index.unsqueeze(-1)
    counted = torch.ones_like(tokens, dtype=torch.bool) if ignore_index is None else tokens != ignore_index
    chosen = torch.zeros(logits.shape, dtype=torch.int64).scatter_add(-1, tokens.where(counted, 0), counted.long()) > 0
    return logits.detach().double().masked_fill(~(mask | chosen), -torch.inf)


def results(logits, index, **options):
    leaf = logits.detach().clone().requires_grad_()
    outputs = selective_log_softmax(leaf, index, return_entropy=True, **options)
    upstream = [torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view(x.shape) for x in outputs]
    return *outputs, torch.autograd.grad(outputs, leaf, upstream)[0], upstream


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 1.0])
@pytest.mark.parametrize("vocab", [1, 33, 2049, 70_001])
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_hostile_rows_against_float64(dtype, vocab, share, form, each_path):
    logits = hostile.rows(vocab, dtype)
    index = hostile.telling_index(logits)[:, :3]
    mask = torch.rand(logits.shape) < share
    logps, entropy, gradient, upstream = results(logits, index, keep=form(mask), entropy_over="kept")
    exact = masked(logits, mask, index)
    truth, true_entropy = oracle.logps_and_entropy(exact, index)
    ulps = {"native": 1, "generic": 2}[each_path]
    assert_values(logps, truth, ulps)
    assert_values(entropy, true_entropy, ulps + 1)
    assert_gradients(gradient, oracle.gradient(exact, index, *upstream), scale=10)
    dropped = (~mask).scatter(-1, index, False) & ~gradient.isnan().any(-1, keepdim=True)
    assert (gradient[dropped] == 0).all()


def test_the_chosen_token_is_kept(each_path):
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    mask = torch.tensor([[False, True, True, False]])
    logps = selective_log_softmax(logits, torch.tensor([0]), keep=mask)
    assert_values(logps, logits[:, :3].double().log_softmax(-1)[:, 0], ulps=1)
    alone = selective_log_softmax(logits, torch.tensor([0]), True, keep=torch.zeros_like(mask), entropy_over="kept")
    assert [x.tolist() for x in alone] == [[0.0], [0.0]]


def test_every_candidate_of_a_row_is_kept(each_path):
    logits, index = torch.randn(3, 40), torch.tensor([[1, 5], [7, 7], [0, 39]])
    got = selective_log_softmax(logits, index, keep=torch.zeros(3, 40, dtype=torch.bool))
    assert_values(got, logits.double().gather(-1, index).log_softmax(-1).where(index != 7, 0.0), ulps=1)


def test_an_ignored_token_keeps_nothing(form, each_path):
    logits, mask = torch.randn(3, 40), torch.rand(3, 40) < 0.3
    mask[:, 0] = False
    index = torch.tensor([[-100, 3], [-100, 0], [-100, -100]])
    logps, entropy, gradient, upstream = results(logits, index, keep=form(mask), entropy_over="kept", ignore_index=-100)
    exact = masked(logits, mask, index, -100)
    truth, true_entropy = oracle.logps_and_entropy(exact, index.clamp(min=0))
    assert_values(logps[:2, 1], truth[:2, 1], ulps=2)
    assert_values(entropy[:2], true_entropy[:2], ulps=2)
    assert (logps[index == -100] == 0).all()
    assert entropy[2] == 0
    assert (gradient[2] == 0).all()
    g = upstream[0].where(index != -100, 0.0)
    assert_gradients(gradient[:2], oracle.gradient(exact, index.clamp(min=0), g, upstream[1])[:2], scale=10)


def test_what_is_dropped_does_not_matter(form, each_path):
    logits, index = torch.randn(4, 3000), torch.randint(3000, (4,))
    mask = torch.rand(4, 3000) < 0.2
    poisoned = logits.clone()
    poisoned[~mask.scatter(-1, index.unsqueeze(-1), True)] = torch.nan
    poisoned[0, ~mask[0].scatter(0, index[0], True)] = torch.inf
    for a, b in zip(
        results(logits, index, keep=form(mask), entropy_over="kept")[:3],
        results(poisoned, index, keep=form(mask), entropy_over="kept")[:3],
        strict=True,
    ):
        assert torch.equal(a, b)


def test_other_options_beside_it(form, each_path):
    logits, index, mask = torch.randn(2, 3, 500), torch.randint(500, (2, 3)), torch.rand(2, 3, 500) < 0.1
    temperature, row_mask = torch.rand(2, 3) + 0.5, torch.tensor([[1, 0, 1], [1, 1, 1]])
    logps, entropy, gradient, upstream = results(
        logits, index, keep=form(mask), entropy_over="kept", temperature=temperature, row_mask=row_mask
    )
    exact = masked(logits, mask, index) / temperature.double().unsqueeze(-1)
    for got, truth in zip((logps, entropy), oracle.logps_and_entropy(exact, index), strict=True):
        assert_values(got, truth.where(row_mask > 0, 0.0), ulps=2)
    truth = oracle.gradient(exact, index, *upstream) / temperature.double().unsqueeze(-1)
    assert_gradients(gradient, truth.where(row_mask.unsqueeze(-1) > 0, 0.0), scale=10)


@pytest.mark.parametrize("ignore_index", [None, -100])
def test_full_entropy(ignore_index, form, each_path):
    logits, index, mask = torch.randn(5, 500), torch.randint(500, (5,)), torch.rand(5, 500) < 0.1
    index[0] = 3 if ignore_index is None else ignore_index
    options = {"temperature": 0.7, "row_mask": torch.tensor([1, 1, 0, 1, 1]), "ignore_index": ignore_index}
    leaf = logits.clone().requires_grad_()
    logps, entropy = selective_log_softmax(leaf, index, True, keep=form(mask), entropy_over="full", **options)
    assert torch.equal(logps, selective_log_softmax(logits, index, keep=form(mask), **options))
    assert torch.equal(entropy, selective_log_softmax(logits, index, True, **options)[1])
    upstream = [torch.randn_like(x) for x in (logps, entropy)]
    (gradient,) = torch.autograd.grad([logps, entropy], leaf, upstream)
    read = (options["row_mask"] > 0) & (index != -100)
    chosen = index.clamp(min=0)
    truth = (
        oracle.gradient(masked(logits, mask, chosen) / 0.7, chosen, upstream[0], None)
        + oracle.gradient(logits.double() / 0.7, chosen, None, upstream[1])
    ) / 0.7
    assert_gradients(gradient, truth.where(read.unsqueeze(-1), 0.0), scale=20)


LAYOUTS = {
    "one row": lambda: (torch.randn(700), torch.tensor(3), torch.rand(700) < 0.3),
    "one set for all rows": lambda: (torch.randn(2, 3, 700), torch.randint(700, (2, 3)), torch.rand(700) < 0.3),
    "one set for each sequence": lambda: (
        torch.randn(2, 3, 700),
        torch.randint(700, (2, 3)),
        torch.rand(2, 1, 700) < 0.3,
    ),
    "a transposed mask": lambda: (torch.randn(6, 700), torch.randint(700, (6,)), (torch.rand(700, 6) < 0.3).T),
    "every second column": lambda: (
        torch.randn(6, 1400)[:, ::2],
        torch.randint(700, (6,)),
        (torch.rand(6, 2100) < 0.3)[:, ::3],
    ),
    "transposed logits": lambda: (torch.randn(700, 6).T, torch.randint(700, (6,)), torch.rand(6, 700) < 0.3),
    "true is 255": lambda: (
        torch.randn(2, 700),
        torch.randint(700, (2,)),
        ((torch.rand(2, 700) < 0.3).to(torch.uint8) * 255).view(torch.bool),
    ),
    "no rows": lambda: (torch.randn(0, 700), torch.zeros(0, dtype=torch.long), torch.rand(0, 700) < 0.3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout, each_path):
    logits, index, mask = LAYOUTS[layout]()
    plain = (mask.view(torch.uint8) != 0 if layout == "true is 255" else mask).expand(logits.shape).contiguous()
    expected = results(logits.contiguous(), index, keep=plain, entropy_over="kept")[:3]
    for keep in (mask, as_lists(plain) if len(logits) else (torch.zeros(0, dtype=torch.long), torch.zeros(1).long())):
        for a, b in zip(results(logits, index, keep=keep, entropy_over="kept")[:3], expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8], ids=str)
def test_ids_and_offsets_of_other_dtypes(dtype, each_path):
    logits, index = torch.randn(2, 40), torch.tensor([3, 5])
    ids, offsets = torch.tensor([1, 2, 3, 7, 9]), torch.tensor([0, 3, 5])
    expected = selective_log_softmax(logits, index, keep=(ids, offsets))
    assert torch.equal(selective_log_softmax(logits, index, keep=(ids.to(dtype), offsets.to(dtype))), expected)
    assert torch.equal(selective_log_softmax(logits, index, keep=[ids, offsets]), expected)


def test_keeping_everything_changes_no_bit(form, each_path):
    logits, index = hostile.rows(3000, torch.bfloat16), torch.randint(3000, (len(hostile.ROWS),))
    kept = results(logits, index, keep=form(torch.ones(logits.shape, dtype=torch.bool)), entropy_over="kept")
    for a, b in zip(kept[:3], results(logits, index)[:3], strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(_ops.native is None, reason="a promise of the C kernels, which this run does not use")
@pytest.mark.parametrize("dtype", hostile.DTYPES, ids=str)
def test_the_same_bits_for_every_form_thread_count_and_instruction_set(dtype, threads):
    logits = hostile.rows(100_001, dtype)[:4]  # few rows: the threads share each of them
    index, mask = hostile.telling_index(logits), torch.rand(logits.shape) < 0.001
    expected = results(logits, index, keep=mask, entropy_over="kept")[:3]
    before = _ops.native.isa_active()
    try:
        for isa in _ops.native.isa_available():
            _ops.native.isa_select(isa)
            for count in (1, 2):
                threads(count)
                for form in FORMS.values():
                    got = results(logits, index, keep=form(mask), entropy_over="kept")[:3]
                    for a, b in zip(got, expected, strict=True):
                        assert torch.equal(a.nan_to_num(), b.nan_to_num())
    finally:
        _ops.native.isa_select(before)


@pytest.mark.parametrize("candidates", [None, 0, 1, 3])
@pytest.mark.parametrize("entropy_over", [None, "kept", "full"])
def test_gradcheck(entropy_over, candidates, form, each_path):
    logits = (torch.randn(3, 7, dtype=torch.float64) * 2).requires_grad_()
    index = torch.randint(7, (3,) if candidates is None else (3, candidates))
    mask = torch.rand(3, 7) < 0.5
    mask[:, 2] = True  # without candidates, an empty set has no distribution
    options = {"keep": form(mask), "entropy_over": entropy_over, "temperature": 0.8}
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x: selective_log_softmax(x, index, entropy_over is not None, **options), logits)


def test_create_graph_gives_the_same_gradient(form, each_path):
    logits, index, mask = torch.randn(4, 50), torch.randint(50, (4,)), torch.rand(4, 50) < 0.3
    leaf = logits.clone().requires_grad_()
    outputs = selective_log_softmax(leaf, index, True, keep=form(mask), entropy_over="kept")
    upstream = [torch.ones_like(x) for x in outputs]
    (plain,) = torch.autograd.grad(outputs, leaf, upstream, retain_graph=True)
    (differentiable,) = torch.autograd.grad(outputs, leaf, upstream, create_graph=True)
    assert torch.allclose(plain, differentiable, atol=1e-6)


def test_in_place_gradient(form, each_path):
    logits, index, mask = torch.randn(4, 5000), torch.randint(5000, (4,)), torch.rand(4, 5000) < 0.01
    gradients = []
    for inplace_backward in (False, True):
        leaf = logits.clone().requires_grad_()
        logps, entropy = selective_log_softmax(
            leaf * 1, index, True, keep=form(mask), entropy_over="kept", inplace_backward=inplace_backward
        )
        gradients += torch.autograd.grad(logps.sum() + entropy.sum(), leaf)
    assert torch.equal(*gradients)


def test_vmap_and_func_grad(each_path):
    logits, index, mask = torch.randn(3, 5, 60), torch.randint(60, (3, 5)), torch.rand(3, 5, 60) < 0.3
    expected = selective_log_softmax(logits, index, keep=mask)
    mapped = torch.func.vmap(lambda x, y, m: selective_log_softmax(x, y, keep=m))(logits, index, mask)
    assert torch.allclose(mapped, expected, atol=1e-6)
    one_set = torch.func.vmap(lambda x, y: selective_log_softmax(x, y, keep=mask[0, 0]))(logits, index)
    assert torch.allclose(one_set, selective_log_softmax(logits, index, keep=mask[0, 0]), atol=1e-6)
    gradient = torch.func.grad(lambda x: selective_log_softmax(x, index, keep=mask).sum())(logits)
    leaf = logits.clone().requires_grad_()
    selective_log_softmax(leaf, index, keep=mask).sum().backward()
    assert torch.allclose(gradient, leaf.grad, atol=1e-6)
    ids, offsets = as_lists(mask[0])
    with pytest.raises(ValueError, match=r"keep must be a mask under vmap, got \(ids, offsets\)"):
        torch.func.vmap(lambda x, y: selective_log_softmax(x, y, keep=(ids, offsets)))(logits, index)


def test_compiled(form):
    def step(x, index, keep):
        logps, entropy = selective_log_softmax(x * 1, index, True, keep=keep, entropy_over="kept")
        return logps.sum() - 0.01 * entropy.sum()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for vocab in (60, 90):
        logits, index, mask = torch.randn(4, vocab), torch.randint(vocab, (4,)), torch.rand(4, vocab) < 0.3
        gradients = []
        for function in (step, compiled):
            leaf = logits.clone().requires_grad_()
            gradients += torch.autograd.grad(function(leaf, index, form(mask)), leaf)
        assert torch.equal(*gradients)


@pytest.mark.parametrize("form_name", FORMS)
def test_opcheck(form_name):
    logits, index, mask = torch.randn(4, 9), torch.randint(9, (4, 2)), torch.rand(4, 9) < 0.3
    keep = FORMS[form_name](mask)
    kept = dict(zip(("keep", "keep_offsets"), keep, strict=True)) if form_name == "lists" else {"keep": keep}
    torch.library.opcheck(_ops.token_logprob_forward, (logits, index, True), kept)
    logps, entropy, statistics = _ops.token_logprob_forward(logits, index, True, **kept)
    upstream = (logits, index, statistics, logps, entropy)
    torch.library.opcheck(_ops.token_logprob_backward, upstream, kept)
    torch.library.opcheck(_ops.token_logprob_backward_, upstream, kept)


@pytest.mark.parametrize("entropy_over", ["kept", "full"])
def test_nothing_of_the_vocabularys_size_is_made_or_kept(entropy_over, form, each_path):
    rows, vocab = 8, 40_000
    logits, index = torch.randn(rows, vocab).bfloat16().requires_grad_(), torch.randint(vocab, (rows,))
    keep = form(torch.rand(rows, vocab) < 0.001)
    own = (logits, index, keep) if isinstance(keep, torch.Tensor) else (logits, index, *keep)
    with Saved() as saved, Dispatched() as dispatched:
        logps, entropy = selective_log_softmax(logits, index, True, keep=keep, entropy_over=entropy_over)
    assert saved.bytes_beyond(*own) <= 2 * rows * 12
    if each_path == "native":
        assert max(dispatched.allocated) < vocab
    with Dispatched() as dispatched:
        (logps.sum() + entropy.sum()).backward()
    if each_path == "native":
        gradients = 1 if entropy_over == "kept" else 3  # that of each read, and their sum
        assert sum(size >= vocab for size in dispatched.allocated) <= gradients


def test_the_generic_path_keeps_to_its_budget(generic_path):
    rows, vocab, budget = 16, 1000, 4 * 4 * 1000
    logits, index = torch.randn(rows, vocab).requires_grad_(), torch.randint(vocab, (rows,))
    for form in FORMS.values():
        keep = form(torch.rand(rows, vocab) < 0.001)
        with Dispatched() as dispatched:
            logps = selective_log_softmax(logits, index, keep=keep, chunk_bytes=budget)
        assert max(dispatched.allocated) <= budget
        with Dispatched() as dispatched:
            logps.sum().backward()
        assert max(size for size in dispatched.allocated if size != 4 * rows * vocab) <= budget


IDS, OFFSETS = torch.tensor([1, 2, 3, 7, 9]), torch.tensor([0, 3, 5])
MASK = torch.ones(2, 10, dtype=torch.bool)


@pytest.mark.parametrize(
    ("keep", "error", "message"),
    [
        (3, TypeError, r"keep must be a bool mask or \(ids, offsets\), got int"),
        ((IDS,), TypeError, r"keep must be a bool mask or \(ids, offsets\), got tuple"),
        (MASK.float(), TypeError, r"keep must be a bool mask or \(ids, offsets\), got a tensor of torch.float32"),
        (MASK[:, :9], ValueError, r"keep must broadcast to logits' shape \[2, 10\], got \[2, 9\]"),
        (MASK.expand(3, 2, 10), ValueError, r"keep must broadcast to logits' shape \[2, 10\], got \[3, 2, 10\]"),
        (MASK.to("meta"), ValueError, "logits and keep must be on one device, got cpu and meta"),
        (([1, 2], OFFSETS), TypeError, "keep: ids must be a torch.Tensor, got list"),
        ((IDS.float(), OFFSETS), TypeError, "keep: ids must be int64, int32, int16, int8 or uint8, got torch.float32"),
        ((IDS.to("meta"), OFFSETS), ValueError, "logits and keep: ids must be on one device, got cpu and meta"),
        ((IDS[None], OFFSETS), ValueError, r"keep: ids must have shape \[count\], got \[1, 5\]"),
        (
            (IDS, OFFSETS[:2]),
            ValueError,
            r"keep: offsets must have shape \[3\], one more than there are rows, got \[2\]",
        ),
        ((IDS + 1, OFFSETS), IndexError, r"keep: ids\[4\] is 10, expected 0 <= id < 10 \(the vocabulary\)"),
        ((IDS - 2, OFFSETS), IndexError, r"keep: ids\[0\] is -1, expected 0 <= id < 10 \(the vocabulary\)"),
        (
            (IDS, OFFSETS + 1),
            ValueError,
            r"keep: offsets\[0\] is 1, expected offsets that rise from 0 to 5 \(the number",
        ),
        ((IDS, OFFSETS.flip(0)), ValueError, r"keep: offsets\[0\] is 5, expected offsets that rise from 0 to 5"),
        (
            (IDS, torch.tensor([0, 4, 3])),
            ValueError,
            r"keep: offsets\[2\] is 3, expected offsets that rise from 0 to 5",
        ),
        (
            (IDS, torch.tensor([0, 9, 5])),
            ValueError,
            r"keep: offsets\[1\] is 9, expected offsets that rise from 0 to 5",
        ),
        (
            (IDS, torch.tensor([0, 3, 4])),
            ValueError,
            r"keep: offsets\[2\] is 4, expected offsets that rise from 0 to 5",
        ),
    ],
)
def test_bad_sets(keep, error, message, each_path):
    with pytest.raises(error, match=message):
        selective_log_softmax(torch.randn(2, 10), torch.tensor([1, 2]), keep=keep)


def test_the_entropy_must_be_named(each_path):
    logits, index = (torch.randn(2, 10, requires_grad=True) * 1), torch.tensor([1, 2])
    with pytest.raises(ValueError, match="entropy_over must be 'kept' or 'full' where both keep and return_entropy"):
        selective_log_softmax(logits, index, True, keep=MASK)
    with pytest.raises(ValueError, match="entropy_over must be 'kept' or 'full', got 'all'"):
        selective_log_softmax(logits, index, True, keep=MASK, entropy_over="all")
    with pytest.raises(ValueError, match="inplace_backward takes entropy_over='kept' only"):
        selective_log_softmax(logits, index, True, keep=MASK, entropy_over="full", inplace_backward=True)
