"""Fix 2. NPU is simulated: twinkle is told it runs there, the arithmetic stays on the CPU.

What happens inside MindSpeed without a mask is not shown here; megatron-core's own attention makes a causal mask then.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from rig import Trainer, device_prefix, features, forward, same
from twinkle.processor.base import InputProcessor

import memlean
from memlean.integrations import twinkle as shim


@pytest.fixture
def masks_built(monkeypatch):
    built = []
    build = InputProcessor._create_4d_attention_mask

    def counted(attention_mask):
        built.append(build(attention_mask))
        return built[-1]

    monkeypatch.setattr(InputProcessor, "_create_4d_attention_mask", staticmethod(counted))
    return built


@pytest.mark.parametrize("variable", [True, False], ids=["variable", "fixed"])
def test_no_mask_is_built_and_the_step_is_the_same(masks_built, variable):
    trainer, inputs = Trainer(variable=variable), features()
    with device_prefix("npu"):
        before, gradients, _ = trainer.step(inputs)
        # The config says nothing about attention_mask_type, so upstream builds masks and hands them to the model.
        assert len(masks_built) == (3 if variable else 1)
        bytes_built = sum(mask.numel() for mask in masks_built)
        masks_built.clear()
        with memlean.patched("twinkle", exclude="selective_log_softmax") as report:
            after, gradients_after, _ = trainer.step(inputs)
    assert masks_built == []
    assert dict(report["causal_mask"].counters) == {
        "masks skipped": 3 if variable else 1,
        "mask bytes skipped": bytes_built,
    }
    assert after["loss"] == before["loss"] and same(gradients_after, gradients)
    for old, new, rows in zip(
        *(r["logps"] if variable else r["logps"].split(2) for r in (before, after)),
        [(8, 6), (8, 5), (7, 3)],
        strict=True,
    ):
        for row, length in enumerate(rows):
            assert torch.equal(old[row, :length], new[row, :length])
        assert torch.isfinite(new).all()


def test_a_mask_from_elsewhere_is_dropped(masks_built):
    class Builds(InputProcessor):
        """A subclass with a collate_fn of its own, which memlean leaves alone."""

        def collate_fn(self, inputs, **kwargs):
            return super().collate_fn(inputs, **kwargs)

    trainer, inputs = Trainer(), features()
    trainer.group.processor = Builds(device_mesh=trainer.processor.device_mesh, framework="megatron")
    before, _, _ = trainer.step(inputs)
    masks_built.clear()
    received = []
    trainer.chunks[0].register_forward_pre_hook(
        lambda module, args, kwargs: received.append(kwargs["attention_mask"]), with_kwargs=True
    )
    with device_prefix("npu"), memlean.patched("twinkle", exclude="selective_log_softmax") as report:
        after, _, _ = trainer.step(inputs)
    assert len(masks_built) == 3 and received == [None] * 3
    assert report["causal_mask"].counters["masks dropped"] == 3
    assert after["loss"] == before["loss"]


def test_live_processor_keeps_its_own_pipeline(masks_built):
    trainer = Trainer()
    pipeline = list(trainer.processor.process_pipeline)
    with device_prefix("npu"), memlean.patched("twinkle"):
        trainer.step(features())
        assert trainer.processor.process_pipeline == pipeline
        created_meanwhile = InputProcessor(device_mesh=trainer.processor.device_mesh, framework="megatron")
    assert masks_built == []
    functions = [getattr(stage, "__func__", stage) for stage in pipeline]
    assert [getattr(stage, "__func__", stage) for stage in created_meanwhile.process_pipeline] == functions


def test_mask_type_defaults_to_causal_for_every_stage():
    trainer, seen = Trainer(), []

    def stage(inputs, **kwargs):
        seen.append(kwargs["attention_mask_type"])
        return inputs

    trainer.processor.process_pipeline.append(stage)
    with device_prefix("npu"):
        trainer.step(features())
        with memlean.patched("twinkle"):
            trainer.step(features())
            trainer.config.attention_mask_type = "general"
            trainer.step(features())
    assert seen == [None, "causal", "general"]


def test_caller_s_features_keep_their_mask():
    trainer, inputs = Trainer(), features()
    with device_prefix("npu"), memlean.patched("twinkle"):
        trainer.step(inputs)
    assert all(torch.equal(f["attention_mask"].flatten(), torch.ones(f["attention_mask"].numel())) for f in inputs)


def test_a_ray_driver_s_handle_passes_through():
    """A stand-in: on a driver, twinkle's constructor does not run, and the call is sent to the workers."""
    handle = InputProcessor.__new__(InputProcessor)
    assert shim.process(lambda self, inputs, **kwargs: (self, inputs, kwargs), handle, [1], a=2) == (
        handle,
        [1],
        {"a": 2},
    )


def test_mask_auto_on_other_devices_needs_the_model(masks_built):
    trainer, inputs = Trainer(), features()
    with memlean.patched("twinkle"):
        trainer.step(inputs)
    assert len(masks_built) == 3  # as upstream: the CPU is not an NPU
    masks_built.clear()
    with memlean.patched("twinkle", mask="auto"):
        trainer.step(inputs)
        assert masks_built == []
        direct = trainer.processor(inputs, micro_batch_size=2, variable_seq_lengths=True, attention_mask_type="causal")
        assert len(masks_built) == 3 and direct[0]["attention_mask"].shape == (2, 1, 8, 8)  # no model in sight
    masks_built.clear()
    with memlean.patched("twinkle"):
        trainer.step(inputs)
    assert len(masks_built) == 3  # auto ended with its block


# --- the truth table: each row is one condition changed from a step whose mask goes ---------------------------------

ROWS = {
    # name: (what changes, whether the mask goes)
    "nothing said": ({}, True),
    "explicit causal": ({"kind": "causal"}, True),
    "enum causal": ({"kind": AttnMaskType.causal}, True),
    "explicit general": ({"kind": "general"}, False),
    "enum padding_causal": ({"kind": AttnMaskType.padding_causal}, False),
    "enum arbitrary": ({"kind": AttnMaskType.arbitrary}, False),
    "cuda": ({"device": "cuda"}, False),
    "cuda, explicit causal": ({"device": "cuda", "kind": "causal"}, False),
    "cuda, auto": ({"device": "cuda", "mask": "auto"}, True),
    "cuda, auto, explicit causal": ({"device": "cuda", "mask": "auto", "kind": "causal"}, True),
    "cuda, auto, no step": ({"device": "cuda", "mask": "auto", "kind": "causal", "step": False}, False),
    "no step, explicit causal": ({"kind": "causal", "step": False}, True),
    "no step, nothing said": ({"step": False}, False),
    "no task given": ({"task": None}, True),
    "embedding": ({"task": "embedding"}, False),
    "embedding, explicit causal": ({"task": "embedding", "kind": "causal"}, False),
    "left padding": ({"padding_side": "left"}, False),
    "left padding, explicit causal": ({"padding_side": "left", "kind": "causal"}, False),
    "padding free": ({"padding_free": True}, False),
    "packed": ({"packed": True}, False),
    "packed, explicit causal": ({"packed": True, "kind": "causal"}, False),
    "transformers": ({"framework": "transformers"}, False),
    "config task_type seq_cls": ({"config": {"task_type": "seq_cls"}}, False),
    "config task_type causal_lm": ({"config": {"task_type": "causal_lm"}}, True),
    "one arbitrary layer": ({"layer": AttnMaskType.arbitrary}, False),
    "one arbitrary layer, explicit causal": ({"layer": AttnMaskType.arbitrary, "kind": "causal"}, False),
    "no layer says": ({"layer": None}, False),
    "no layer says, explicit causal": ({"layer": None, "kind": "causal"}, True),
    "mlp_padding_free": ({"config": {"mlp_padding_free": True}}, False),
    "mlp_padding_free, explicit causal": ({"config": {"mlp_padding_free": True}, "kind": "causal"}, False),
    "dsa": ({"config": {"experimental_attention_variant": "dsa"}}, False),
    "gated delta net": ({"config": {"experimental_attention_variant": "gated_delta_net"}}, True),
    "sliding window": ({"config": {"window_size": (128, 0)}}, False),
    "sliding window, explicit causal": ({"config": {"window_size": (128, 0)}, "kind": "causal"}, True),
    "cuda, auto, sliding window, explicit": (
        {"device": "cuda", "mask": "auto", "config": {"window_size": (128, 0)}, "kind": "causal"},
        False,
    ),
}


@pytest.mark.parametrize(("change", "goes"), ROWS.values(), ids=ROWS.keys())
def test_both_stages_agree_on_the_truth_table(change, goes):
    case = {
        "device": "npu",
        "mask": "npu",
        "kind": None,
        "step": True,
        "task": "causal_lm",
        "packed": False,
        "config": {},
    }
    case |= {
        "padding_side": "right",
        "padding_free": False,
        "framework": "megatron",
        "layer": AttnMaskType.causal,
    } | change

    processor = InputProcessor(padding_free=case["padding_free"], framework=case["framework"])
    processor.padding_side = case["padding_side"]
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    if case["layer"]:
        model[0].attn_mask_type, model[1].attn_mask_type = AttnMaskType.causal, case["layer"]
    model.config = SimpleNamespace(**case["config"])
    trainer = SimpleNamespace(model=[model], strategy=SimpleNamespace(unwrap_model=lambda chunks: chunks))
    step = shim._Step(trainer, case["task"], False, None) if case["step"] else None

    inputs = features(lengths=(4, 2))
    if case["packed"]:
        inputs[0]["position_ids"] = torch.tensor([0, 1, 0, 1])
    kwargs = {"attention_mask_type": case["kind"], "micro_batch_size": 2, "variable_seq_lengths": True}
    dense = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    collated = [{"position_ids": inputs[0]["position_ids"].view(1, -1), "attention_mask": dense}]

    token = shim._step.set(step)
    try:
        with device_prefix(case["device"]), memlean.patched("twinkle", mask=case["mask"]):
            assert shim.eligible(processor, inputs, kwargs) == goes
            assert shim.eligible(processor, collated, kwargs) == goes
            made = shim.collate_without_mask(processor.collate_fn, inputs, **kwargs)
            left = shim.drop_mask(processor.drop_causal_4d_mask, collated, **kwargs)
    finally:
        shim._step.reset(token)

    assert (left[0]["attention_mask"] is None) == goes
    if case["packed"] or case["padding_free"]:
        assert "attention_mask" not in made[0]  # upstream makes none for packed input
    else:
        assert (made[0]["attention_mask"] is None) == goes
    assert all("attention_mask" in feature for feature in inputs)


# --- what a model computes without the mask ---------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(4, 2), (4, 1)], ids=str)
def test_real_gpt_with_and_without_the_mask(lengths):
    model = Trainer().chunks[0]
    with torch.no_grad():
        for parameter in model.parameters():  # at the initial 0.02 attention hardly moves the logits
            parameter.mul_(8) if parameter.dim() == 2 else None
    mask = InputProcessor._create_4d_attention_mask([torch.ones(n) for n in lengths])
    tokens = torch.randint(1, 512, (2, 4), generator=torch.Generator().manual_seed(0))
    position_ids = torch.arange(4).repeat(2, 1)
    position_ids[1, lengths[1] :] = -1
    tokens[1, lengths[1] :] = 0
    with torch.no_grad():
        masked = forward(model, tokens, position_ids, mask)
        without = forward(model, tokens, position_ids, None)
    difference = (masked - without).abs().amax(-1)
    real = torch.arange(4) < torch.tensor(lengths).view(2, 1)
    assert difference[real].max() == 0.0
    assert (difference[~real] > 0).all()
    assert torch.isfinite(masked).all() and torch.isfinite(without).all()
    print(
        f"{lengths}: at real positions {difference[real].max():.1f}, at padded ones up to {difference[~real].max():.3g}"
    )


def test_bytes_at_16384_tokens():
    """Measured in processes of their own: the peak over what twinkle needs for everything else."""
    mib = {}
    for patched in (False, True):
        script = Path(__file__).with_name("mask_memory.py")
        env = os.environ | {"PYTHONPATH": str(script.parent)}
        run = subprocess.run(
            [sys.executable, script, "16384", str(int(patched))], env=env, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
        mib[patched] = np.array([int(n) for n in run.stdout.split()[-3:]]) / 2**20
    print("MiB kept, peak, skipped: before", *mib[False].round(1), "after", *mib[True].round(1))
    kept, peak, skipped = mib[False]
    assert kept == 256 and skipped == 0
    assert peak == pytest.approx(512, abs=16)
    kept, peak, skipped = mib[True]
    assert kept == 0 and skipped == 256
    assert peak < 16
