"""Public reports: what a trainer does around the call, import, determinism."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import child
import pytest
import rig
import torch
from megatron.core.transformer.module import Float16Module
from memory import Dispatched

import memlean
from memlean import _ops, selective_log_softmax

INTEGRATIONS = Path(rig.__file__).parent


@pytest.fixture(scope="module")
def one_process():
    with rig.cpu_instead_of_cuda(), rig.process_group():
        yield


@pytest.fixture
def half_precision_model(one_process):
    """The real GPT in Megatron's half-precision wrapper, and a call of it."""
    trainer = rig.Trainer(dtype=torch.bfloat16)
    trainer.config.bf16 = True
    model = Float16Module(trainer.config, trainer.chunks[0])
    tokens = torch.randint(512, (2, 8))
    return model, lambda: rig.forward(model, tokens, torch.arange(8).repeat(2, 1), None)


@pytest.mark.parametrize("ref", ["trl_1980", "slime_2253", "miles_2764"])
def test_report_upcast(ref, half_precision_model):
    """A wrapper copied all bfloat16 logits to float32 before the lean code ran."""
    model, call = half_precision_model
    assert call().dtype == torch.float32  # docs/integrations.md says where, and this is how to switch it off
    model.register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"fp32_output": False}), with_kwargs=True)
    logits = call()
    assert logits.dtype == torch.bfloat16
    index = torch.randint(512, (2, 8))
    with Dispatched() as dispatched:
        logps = selective_log_softmax(logits, index)
        (gradient,) = torch.autograd.grad(logps.sum(), logits)
    assert gradient.dtype == torch.bfloat16
    assert logps.dtype == torch.float32
    if _ops.native:
        assert max(dispatched.allocated) == logits.numel() * 2  # the gradient
    guide = (INTEGRATIONS.parent.parent / "docs" / "integrations.md").read_text()
    assert "Float16Module" in guide
    assert "fp32_output" in guide


@pytest.mark.parametrize("ref", ["transformers_12878", "transformers_15466", "transformers_8476"])
def test_report_logits_kept(ref, one_process):
    """A pass without training collected the logits of every batch."""
    trainer, inputs = rig.Trainer(), rig.features()
    before, _, kept = trainer.step(inputs, forward_only=True)
    assert kept == 2 * (8 + 8 + 7) * 512
    with memlean.patched("twinkle.report_logits"):
        after, _, kept = trainer.step(inputs, forward_only=True)
        _, _, asked_for = trainer.step(inputs, forward_only=True, return_logits=True)
    assert kept == 0
    assert asked_for == 2 * (8 + 8 + 7) * 512
    assert rig.same(before["logps"], after["logps"])


def mask_bytes(length, patched):
    """Bytes of masks made, the rise of the peak, bytes of masks skipped."""
    script = INTEGRATIONS / "mask_memory.py"
    printed = subprocess.run(
        [sys.executable, script, str(length), str(int(patched))], capture_output=True, text=True, check=True
    ).stdout
    return [int(number) for number in printed.split()[-3:]]


@pytest.mark.parametrize("ref", ["verl_7055", "nemo_aligner_488"])
def test_report_dense_mask(ref):
    """A causal mask of ``S x S`` in float32, or one for each sample, where attention is causal anyway."""
    length = 4096 if ref == "verl_7055" else 2048
    made, peak, _ = mask_bytes(length, patched=False)
    assert made == length**2
    assert peak >= length**2
    made, peak, skipped = mask_bytes(length, patched=True)
    assert (made, skipped) == (0, length**2)
    assert peak < length**2 / 2


@pytest.fixture
def library_of_another_torch(tmp_path):
    """A copy of memlean whose library wants a function that the installed torch does not have."""
    package = Path(memlean.__file__).parent
    shutil.copytree(package, tmp_path / "memlean", ignore=shutil.ignore_patterns("__pycache__"))
    (library,) = (tmp_path / "memlean").glob("_C.*")
    content = library.read_bytes()
    assert b"torch_call_dispatcher" in content
    library.write_bytes(content.replace(b"torch_call_dispatcher", b"torch_call_dispatchez"))
    return tmp_path


SCORE = """
import torch
from memlean import doctor, selective_log_softmax
logits = torch.linspace(-3, 3, 12, dtype=torch.float64).view(2, 6).requires_grad_()
for _ in range(2):
    logps = selective_log_softmax(logits, torch.tensor([1, 2]))
logps.sum().backward()
print([*logps.tolist(), *logits.grad.flatten().tolist()])
doctor.report(as_json=True)
"""


@pytest.mark.skipif(_ops.native is None, reason="the C kernels are not in use in this run")
@pytest.mark.parametrize("ref", ["sglang_30562", "torch_discounted_cumsum_9"])
def test_report_undefined_symbol(ref, library_of_another_torch):
    """A library built for another torch: an undefined symbol, or an ImportError that is swallowed."""
    result = child.run("-S", "-c", SCORE, pythonpath=library_of_another_torch)
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("RuntimeWarning") == 1
    numbers, report = result.stdout.split("\n", 1)
    facts = json.loads(report)
    assert facts["torch"] == torch.__version__
    assert facts["paths"]["cpu"] == "generic path"
    for text in (result.stderr, facts["native_missing_because"]):
        assert "torch_call_dispatchez" in text
    sound, _ = child.output_of("-c", SCORE).split("\n", 1)
    assert json.loads(numbers) == pytest.approx(json.loads(sound), rel=1e-12)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("candidates", [None, 3])
@pytest.mark.usefixtures("deterministic", "each_path")
def test_report_pytorch_50469(candidates):
    """gather's backward is a scatter_add, which deterministic mode refuses on CUDA."""
    logits = torch.randn(4, 50, requires_grad=True)
    index = torch.randint(50, (4,) if candidates is None else (4, candidates))

    def operators(function):
        with Dispatched() as dispatched:
            torch.autograd.grad(function(logits, index).sum(), logits)
        return " ".join(dispatched.operators)

    recipe = operators(lambda x, y: x.log_softmax(-1).gather(-1, y.view(4, -1)))
    assert "scatter_add" in recipe or "gather_backward" in recipe
    for name in ("scatter_add", "index_add", "accumulate", "index_put"):
        assert name not in operators(selective_log_softmax)
