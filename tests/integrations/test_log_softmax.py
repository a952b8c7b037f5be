"""Fix 1, on the real twinkle functions."""

import sys

import pytest
import torch
import twinkle.loss.dpo
import twinkle.loss.grpo
import twinkle.model.megatron.megatron
import twinkle.model.transformers.transformers
import twinkle.utils.torch_utils
from megatron.core import parallel_state

import memlean

HOLDERS = [
    "twinkle.loss.dpo",
    "twinkle.loss.grpo",
    "twinkle.model.megatron.megatron",
    "twinkle.model.transformers.transformers",
    "twinkle.utils",
    "twinkle.utils.torch_utils",
]


def holders(value):
    return sorted(
        name
        for name, module in sys.modules.items()
        if name.startswith("twinkle") and any(held is value for held in list(vars(module).values()))
    )


def test_every_holder_gets_it_and_gets_the_original_back():
    original = twinkle.utils.torch_utils.selective_log_softmax
    assert holders(original) == HOLDERS
    report = memlean.patch("twinkle.selective_log_softmax")
    assert report["selective_log_softmax"].status == "applied"
    assert holders(original) == []
    assert holders(twinkle.utils.torch_utils.selective_log_softmax) == HOLDERS
    assert {f"{name}.selective_log_softmax" for name in HOLDERS} <= set(report["selective_log_softmax"].sites)
    memlean.unpatch()
    assert holders(original) == HOLDERS


@pytest.mark.parametrize("return_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_agree_with_the_original(dtype, return_entropy):
    torch.manual_seed(0)
    logits = (torch.randn(2, 9, 1000) * 3).to(dtype)
    index = torch.randint(1000, (2, 9))

    def run():
        leaf = logits.clone().requires_grad_()
        out = twinkle.loss.grpo.selective_log_softmax(leaf, index, return_entropy)
        outputs = out if return_entropy else (out,)
        sum((o.float() * torch.linspace(-1, 1, 9)).sum() for o in outputs).backward()
        return [o.detach() for o in outputs], leaf.grad

    before, gradient_before = run()
    with memlean.patched("twinkle") as report:
        after, gradient_after = run()
        assert dict(report["selective_log_softmax"].counters) == {"calls: memlean": 1}
    # bfloat16: upstream rounds its log-probabilities to 8 bits, memlean's are float32.
    tolerance = 5e-6 if dtype is torch.float32 else 2**-7
    for old, new in zip(before, after, strict=True):
        assert new.dtype is torch.float32
        torch.testing.assert_close(old.float(), new, rtol=tolerance, atol=tolerance)
    assert gradient_after.dtype is dtype
    torch.testing.assert_close(gradient_before, gradient_after, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("return_entropy", [False, True])
def test_the_original_saves_logits_for_backward_and_the_replacement_only_its_input(return_entropy):
    logits = torch.randn(4, 8, 4096, dtype=torch.bfloat16, requires_grad=True)
    index = torch.randint(4096, (4, 8))

    def saved_bytes():
        storages = {}

        def pack(tensor):
            if tensor.untyped_storage().data_ptr() != logits.untyped_storage().data_ptr():
                storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            twinkle.utils.torch_utils.selective_log_softmax(logits, index, return_entropy)
        return sum(t.untyped_storage().nbytes() for t in storages.values())

    before = saved_bytes()
    with memlean.patched("twinkle"):
        after = saved_bytes()
    assert before >= (2 if return_entropy else 1) * logits.numel() * 2
    assert after <= 32 * index.numel()  # the index and three numbers a row


def test_tensor_parallel_error_propagates(monkeypatch):
    """With TP > 1 the original catches an AssertionError of its own branch and answers from the local shard."""
    monkeypatch.setattr(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", 2)

    def broken(*_):
        raise AssertionError("target out of the partitions")

    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_group", broken)
    monkeypatch.setattr("megatron.core.mpu.get_tensor_model_parallel_group", broken)
    logits, index = torch.randn(2, 3, 8), torch.randint(8, (2, 3))
    swallowed = twinkle.utils.torch_utils.selective_log_softmax(logits, index)
    assert torch.isfinite(swallowed).all()  # a plausible number, computed from one shard
    with memlean.patched("twinkle"), pytest.raises(AssertionError, match="target out of the partitions"):
        twinkle.utils.torch_utils.selective_log_softmax(logits, index)


def test_tensor_parallel_entropy_is_refused_as_upstream(monkeypatch):
    monkeypatch.setattr(parallel_state, "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", 2)
    with memlean.patched("twinkle"), pytest.raises(NotImplementedError, match="return_entropy"):
        twinkle.utils.torch_utils.selective_log_softmax(torch.randn(2, 3, 8), torch.zeros(2, 3).long(), True)


def test_a_tensor_subclass_gets_the_original():
    class Sharded(torch.Tensor):
        pass

    logits, index = torch.randn(2, 3, 8).as_subclass(Sharded), torch.randint(8, (2, 3))
    before = twinkle.utils.torch_utils.selective_log_softmax(logits, index)
    with memlean.patched("twinkle") as report:
        after = twinkle.utils.torch_utils.selective_log_softmax(logits, index)
        assert dict(report["selective_log_softmax"].counters) == {"calls: original, for Sharded": 1}
    assert torch.equal(before, after)


def test_signature_and_name_stay():
    import inspect

    original = twinkle.utils.torch_utils.selective_log_softmax
    with memlean.patched("twinkle"):
        replacement = twinkle.utils.torch_utils.selective_log_softmax
        assert inspect.signature(replacement) == inspect.signature(original)
        assert (replacement.__module__, replacement.__qualname__) == (original.__module__, original.__qualname__)
