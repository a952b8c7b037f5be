"""Prints mask bytes made, the rise of the resident peak, mask bytes skipped: ``mask_memory.py LENGTH PATCHED``."""

import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core.transformer.enums import AttnMaskType
from rig import InputProcessor, cpu_instead_of_cuda, device_prefix, features

import memlean
from memlean.integrations import twinkle as shim


def resident(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


length, patched = int(sys.argv[1]), sys.argv[2] == "1"
if patched:
    memlean.patch("twinkle")
layer = torch.nn.Linear(1, 1)
layer.attn_mask_type = AttnMaskType.causal
trainer = SimpleNamespace(model=[layer], strategy=SimpleNamespace(unwrap_model=lambda chunks: chunks))
shim._step.set(shim._Step(trainer, "causal_lm", False, None))
processor = InputProcessor(framework="megatron")
with cpu_instead_of_cuda(), device_prefix("npu"):
    processor(features(lengths=(8,)), micro_batch_size=1)  # what the first call loads is not the mask's
    inputs = features(lengths=(length,))
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    outputs = processor(inputs, micro_batch_size=1)
    peak = resident("VmHWM") - before
masks = [output["attention_mask"] for output in outputs if output["attention_mask"] is not None]
skipped = memlean.report()["causal_mask"].counters["mask bytes skipped"] - 8 * 8 if patched else 0
print(sum(mask.numel() for mask in masks), peak, skipped)
