"""What a type checker says of calls: mypy reads this file, nothing runs it."""

from typing import assert_type

from torch import Tensor

import memlean
from memlean.distributed import vocab_parallel_selective_log_softmax


def functions(logits: Tensor, index: Tensor, entropy: bool) -> None:
    assert_type(memlean.selective_log_softmax(logits, index), Tensor)
    assert_type(memlean.selective_log_softmax(logits, index, temperature=0.7, ignore_index=-100), Tensor)
    assert_type(memlean.selective_log_softmax(logits, index, return_entropy=True), tuple[Tensor, Tensor])
    assert_type(memlean.selective_log_softmax(logits, index, entropy), Tensor | tuple[Tensor, Tensor])
    assert_type(memlean.selective_log_softmax(logits, index, keep=(index, index)), Tensor)
    assert_type(memlean.entropy_from_logits(logits), Tensor)
    assert_type(memlean.token_stats(logits, index).logp, Tensor | None)
    assert_type(vocab_parallel_selective_log_softmax(logits, index), Tensor)
    assert_type(vocab_parallel_selective_log_softmax(logits, index, return_entropy=True), tuple[Tensor, Tensor])
    memlean.selective_log_softmax(logits, index, temprature=0.7)  # type: ignore[call-overload]  # no such option
    memlean.selective_log_softmax(logits, index, out_dtype="float32")  # type: ignore[call-overload]


def patches() -> None:
    assert_type(memlean.patch("twinkle", mask="auto"), memlean.PatchReport)
    with memlean.patched("twinkle", tp=True) as report:
        assert_type(report, memlean.PatchReport)
    assert_type(memlean.is_patched("twinkle"), bool)
    memlean.patch("twinkle", mask="all")  # type: ignore[arg-type]
