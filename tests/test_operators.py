"""torch's own check of the operators: schema, fakes, dispatch, dynamic shapes."""

import hostile
import pytest
import torch

from memlean import _ops


def case(shape, candidates=(), dtype=torch.float32, strided=False):
    logits = torch.randn(shape).to(dtype)
    if strided:
        logits = torch.randn(*shape[:-1], shape[-1] + 2).to(dtype)[..., 1:-1]
    return logits, torch.randint(shape[-1], (*shape[:-1], *candidates))


CASES = {
    "rows": lambda: case((4, 9)),
    "one row": lambda: case((9,)),
    "candidates": lambda: case((2, 3, 9), (5,)),
    "no candidates": lambda: case((2, 9), (0,)),
    "no rows": lambda: case((0, 9)),
    "strided": lambda: case((2, 3, 9), strided=True),
    **{str(dtype): lambda dtype=dtype: case((3, 40), dtype=dtype) for dtype in hostile.DTYPES},
}


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_opcheck_forward(name, return_entropy):
    torch.library.opcheck(_ops.token_logprob_forward, (*CASES[name](), return_entropy))


@pytest.mark.parametrize("use", [(True, True), (True, False), (False, True)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_opcheck_backward(name, use):
    logits, index = CASES[name]()
    logps, entropy, statistics = _ops.token_logprob_forward(logits, index, True)
    upstream = [torch.randn_like(x) if used else None for x, used in zip((logps, entropy), use, strict=True)]
    torch.library.opcheck(_ops.token_logprob_backward, (logits, index, statistics, *upstream))


OPTIONS = {
    "one temperature": lambda rows: {"temperature": torch.tensor(0.7)},
    "temperatures": lambda rows: {"temperature": torch.rand(rows) + 0.5},
    "row_mask": lambda rows: {"row_mask": torch.rand(rows) < 0.5},
    "ignore_index": lambda rows: {"ignore_index": 3},
    "a shard": lambda rows: {"first_token": 0, "index_limit": 20},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", ["rows", "candidates", "no rows", "strided"])
def test_opcheck_options(name, option):
    logits, index = CASES[name]()
    options = OPTIONS[option](logits.shape[:-1])
    torch.library.opcheck(_ops.token_logprob_forward, (logits, index, True), options)
    logps, entropy, statistics = _ops.token_logprob_forward(logits, index, True, **options)
    upstream = (logits, index, statistics, logps.nan_to_num(), entropy)
    torch.library.opcheck(_ops.token_logprob_backward, upstream, options)
    if logits.is_contiguous():
        torch.library.opcheck(_ops.token_logprob_backward_, upstream, options)
