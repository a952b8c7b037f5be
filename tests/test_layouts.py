"""Strided logits: same numbers as a contiguous copy, without making one."""

import pytest
import torch
from memory import needs_high_water_mark, peak_growth

from memlean import selective_log_softmax


def _unaligned(x):
    """The same numbers at an address that is a multiple of no element's size."""
    raw = bytearray(x.numel() * x.element_size() + 1)
    out = torch.frombuffer(raw, dtype=x.dtype, offset=1, count=x.numel()).view(x.shape)
    return out.copy_(x)


# Each turns [4, 6, 40] into a view of some kind.
LAYOUTS = {
    "without the last position": lambda x: x[:, :-1],
    "without the first position": lambda x: x[:, 1:],
    "every other row": lambda x: x[::2, ::3],
    "transposed batch": lambda x: x.transpose(0, 1),
    "permuted with a unit dimension": lambda x: x.unsqueeze(2).permute(2, 1, 0, 3),
    "expanded rows": lambda x: x[:, :1].expand(4, 6, 40),
    "one expanded row": lambda x: x[0, 0].expand(5, 40),
    "narrowed vocabulary": lambda x: x[..., 3:36],
    "vocabulary stride 2": lambda x: x[..., ::2],
    "vocabulary first": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "vocabulary transposed": lambda x: x.transpose(1, 2),
    "expanded vocabulary": lambda x: x[..., :1].expand(4, 6, 40),
    "storage offset": lambda x: torch.cat([x.new_zeros(7), x.flatten()])[7:].view(x.shape),
    "unaligned": _unaligned,
    "overlapping rows": lambda x: x.flatten().unfold(0, 40, 1),
    "diagonal": lambda x: x.flatten()[:36].view(6, 6).diagonal().expand(3, 6),
    "negative bit": lambda x: torch.complex(x, x).conj().imag if x.dtype == torch.float32 else x,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.usefixtures("each_path")
def test_same_bits_as_a_contiguous_copy(layout, dtype):
    view = LAYOUTS[layout](torch.randn(4, 6, 40).to(dtype))
    copy = view.clone(memory_format=torch.contiguous_format).resolve_neg()
    index = torch.randint(view.shape[-1], (*view.shape[:-1], 2))
    got = results(view, index)
    for a, b in zip(got, results(copy, index), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("shape", [(1, 5), (3, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("stride", [0, 7, 2**62])
@pytest.mark.usefixtures("each_path")
def test_a_dimension_of_one_element_may_have_any_stride(shape, stride):
    logits = torch.randn(shape)
    steps = zip(shape, logits.stride(), strict=True)
    odd = logits.as_strided(shape, [stride if size == 1 else step for size, step in steps])
    index = torch.zeros(shape[0], dtype=torch.long)
    for a, b in zip(results(odd, index), results(logits, index), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("vocab", [2047, 5000, 33000])
@pytest.mark.usefixtures("each_path")
def test_long_rows_with_a_vocabulary_stride(vocab):
    view = torch.randn(vocab, 3).bfloat16().t()
    index = torch.randint(vocab, (3, 2))
    for a, b in zip(results(view, index), results(view.contiguous(), index), strict=True):
        assert torch.equal(a, b)


def results(logits, index):
    leaf = logits.detach().requires_grad_()
    logps, entropy = selective_log_softmax(leaf, index, return_entropy=True)
    (gradient,) = torch.autograd.grad([logps, entropy], leaf, [torch.ones_like(logps), torch.ones_like(entropy)])
    return logps, entropy, gradient


@pytest.mark.usefixtures("each_path")
def test_index_of_any_layout():
    logits, index = torch.randn(4, 6, 40), torch.randint(40, (6, 4, 3))
    view = index.transpose(0, 1)[..., ::2]
    assert torch.equal(selective_log_softmax(logits, view), selective_log_softmax(logits, view.contiguous()))
    one = torch.tensor(7).expand(4, 6)
    assert torch.equal(selective_log_softmax(logits, one), selective_log_softmax(logits, one.contiguous()))


@pytest.mark.usefixtures("each_path")
def test_the_callers_slice_gets_its_gradient():
    logits = torch.randn(2, 5, 30, requires_grad=True)
    index = torch.randint(30, (2, 4))
    (got,) = torch.autograd.grad(selective_log_softmax(logits[:, :-1], index).sum(), logits)
    (part,) = torch.autograd.grad(selective_log_softmax(logits[:, :-1].clone(), index).sum(), logits)
    assert torch.equal(got, part)
    assert not got[:, -1].any()


VOCAB = 100_000
MIB = 2**20
# Views of 96 rows or more whose contiguous copy is above 36 MiB.
BIG_LAYOUTS = {
    "contiguous": lambda: torch.randn(96, VOCAB),
    "without the last position": lambda: torch.randn(2, 49, VOCAB)[:, :-1],
    "transposed batch": lambda: torch.randn(4, 24, VOCAB).transpose(0, 1),
    "expanded rows": lambda: torch.randn(1, VOCAB).expand(96, VOCAB),
    "every other row": lambda: torch.randn(192, VOCAB)[::2],
    "vocabulary transposed": lambda: torch.randn(VOCAB, 96).t(),
    "storage offset, narrowed": lambda: torch.randn(96, VOCAB + 3)[:, 3:],
    "bfloat16": lambda: torch.randn(192, VOCAB).bfloat16(),
}


@needs_high_water_mark
@pytest.mark.parametrize("layout", BIG_LAYOUTS)
def test_no_full_copy_of_strided_logits(layout, each_path):
    logits = BIG_LAYOUTS[layout]()
    index = torch.zeros(logits.shape[:-1], dtype=torch.long)
    budget = 2 * MIB  # of the generic path, which holds up to three chunks at a time
    # Beside that, room for what the heap keeps and for the counters' own error; a full copy has 36 MiB or more.
    allowed = (8 if each_path == "native" else 24) * MIB

    def forward(x):
        return selective_log_softmax(x, index, return_entropy=True, chunk_bytes=budget)

    selective_log_softmax(logits[:1], index[:1], return_entropy=True)  # whatever is set up on the first call
    assert peak_growth(lambda: forward(logits)) <= allowed

    # Backward makes the gradient, and nothing else of its size.
    leaf = logits.detach().requires_grad_()
    loss = sum(x.sum() for x in forward(leaf))
    gradient_bytes = logits.numel() * logits.element_size()
    growth = peak_growth(lambda: torch.autograd.grad(loss, leaf))
    assert gradient_bytes / 2 < growth <= gradient_bytes + allowed
