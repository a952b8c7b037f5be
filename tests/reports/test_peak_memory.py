"""Public reports: memory."""

import child
import pytest
import torch
from memory import Dispatched, needs_high_water_mark, peak_growth
from torch.utils.checkpoint import checkpoint

from memlean import selective_log_softmax

ROWS, VOCAB, MIB = 1024, 20_000, 2**20
BUDGET = 2 * MIB
ROOM = 24 * MIB  # three chunks, what the heap keeps, and the counters' own error; a copy of the logits has 78 MiB
LOGITS_BYTES = ROWS * VOCAB * 4


def batch(dtype=torch.float32):
    return torch.randn(ROWS, VOCAB).to(dtype).requires_grad_(), torch.randint(VOCAB, (ROWS,))


def memlean(logits, index):
    return selective_log_softmax(logits, index, return_entropy=True, chunk_bytes=BUDGET)


def allocated_by_both_passes(function, logits, index):
    """The storages that each pass allocates, the largest first, without the gradient."""
    with Dispatched() as forward:
        outputs = function(logits, index)
    with Dispatched() as backward:
        torch.autograd.grad([x.sum() for x in outputs], logits)
    backward.allocated.remove(logits.numel() * logits.element_size())
    return [sorted(one_pass.allocated, reverse=True) for one_pass in (forward, backward)], forward, backward


def in_float32_chunks(logits, index):
    """The reported recipe: the upcast stands above the loop, and training ignores the chunks."""
    x = logits.float()
    parts = [x[i : i + 16].log_softmax(-1) for i in range(0, ROWS, 16)]
    chosen = [p.gather(-1, y.unsqueeze(-1)).sum() for p, y in zip(parts, index.split(16), strict=True)]
    return (torch.stack(chosen),)


@needs_high_water_mark
@pytest.mark.usefixtures("each_path")
def test_report_verl_2448():
    """A checkpoint around the whole loop: backward rebuilt all chunks at once."""

    def backward(function):
        logits, index = batch()
        loss = checkpoint(lambda *args: sum(x.sum() for x in function(*args)), logits, index, use_reentrant=False)
        return peak_growth(lambda: torch.autograd.grad(loss, logits))

    assert backward(in_float32_chunks) >= 2 * LOGITS_BYTES
    assert backward(memlean) <= LOGITS_BYTES + ROOM


@pytest.mark.parametrize("ref", ["nemo_rl_2871", "nemo_rl_2882"])
@pytest.mark.usefixtures("each_path")
def test_report_chunks(ref):
    """Chunks in scoring and none in training; an upcast of everything above the loop."""
    logits, index = batch(torch.bfloat16)
    recipe, _, _ = allocated_by_both_passes(in_float32_chunks, logits, index)
    assert max(one_pass[0] for one_pass in recipe) == LOGITS_BYTES
    for one_pass in allocated_by_both_passes(memlean, logits, index)[0]:
        assert one_pass[0] <= BUDGET


@pytest.mark.usefixtures("each_path")
def test_report_skyrl_1650():
    """An int64 one-hot in backward: 8 bytes for each logit."""
    logits, index = batch(torch.bfloat16)
    (_, backward), *passes = allocated_by_both_passes(memlean, logits, index)
    assert max(backward, default=0) <= BUDGET
    for one_pass in passes:
        assert not [name for name in one_pass.operators if "one_hot" in name or "scatter_add" in name]


WITHOUT_COMPILER = """
import sys, torch
import memlean
print([name for name in ("torch._dynamo", "torch._inductor", "triton") if name in sys.modules and name not in before])
logits = torch.randn(4, 100, requires_grad=True)
memlean.selective_log_softmax(logits, torch.arange(4), return_entropy=True)[0].sum().backward()
print([name for name in ("torch._inductor", "triton") if name in sys.modules])
"""


@pytest.mark.parametrize("ref", ["unsloth_zoo_592", "veomni_841"])
def test_report_no_compiler_behind_the_call(ref):
    """A compiled helper ran out of memory; a "fused" function allocated the whole ``[N, V]`` inside."""
    before = "import sys, torch\nbefore = set(sys.modules)\n"
    printed = child.output_of("-c", before + WITHOUT_COMPILER, TORCHDYNAMO_DISABLE="1")
    assert printed.splitlines() == ["[]", "[]"]


@needs_high_water_mark
@pytest.mark.parametrize("ref", ["unsloth_zoo_592", "veomni_841"])
def test_report_measured_and_not_believed(ref, each_path):
    logits, index = batch()
    memlean(logits[:2], index[:2])
    outputs = []
    assert peak_growth(lambda: outputs.extend(memlean(logits, index))) <= ROOM
    loss = sum(x.sum() for x in outputs)
    assert peak_growth(lambda: torch.autograd.grad(loss, logits)) <= LOGITS_BYTES + ROOM
