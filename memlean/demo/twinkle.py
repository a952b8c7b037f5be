"""``python -m memlean demo --trainer twinkle``: a GRPO step through the real MegatronModel, before and after patching.

Each side runs in a process of its own, so that one's peak does not hide in the other's. The model is a GPT of two
small layers with Qwen's vocabulary; the text is Python's own language reference, in Qwen's tokens. What is not real is
said in ``memlean.integrations._twinkle_cpu``; the optimizer is plain SGD.
"""

import argparse
import base64
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

VOCAB = 151_936
PROMPTS = ("types", "formatstrings")  # chapters of the language reference, each the start of a prompt
GROUP = 4  # completions of each prompt
PROMPT_TOKENS, COMPLETION_TOKENS = 24, 104
STEPS = 3
LEARNING_RATE = 2.0  # large, so that three steps show in the loss
MIB = 2**20


def run(options: argparse.Namespace) -> int:
    """Prints the comparison. Returns 0 if the losses agree and no logits are left in the schedule's results, else 1."""
    needed = ("twinkle", "megatron", "tiktoken", "dashscope")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the twinkle demo needs {', '.join(missing)}: `make demo-twinkle` installs them", file=sys.stderr)
        return 2
    sides = {}
    for side in ("before", "after"):
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MEMLEAN_PATCH")}
        child = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "memlean.demo.twinkle", side],
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
            check=False,
        )
        if child.returncode != 0:
            print(f"the step {side} patching failed, see above", file=sys.stderr)
            return 1
        sides[side] = json.loads(child.stdout.splitlines()[-1])
    before, after = sides["before"], sides["after"]

    size = f"{after['sequences']} sequences of up to {after['longest']} tokens, V = {VOCAB:,}, bfloat16"
    print(f"{after['versions']}\n{size}, median of {STEPS} steps")
    print(f"{'':44}{'before':>12}{'after':>12}")
    for name, key in (
        ("logits left in the schedule's results, MiB", "kept"),
        ("saved for backward by the log-probs, MiB", "saved"),
        ("resident peak over the start, MiB", "peak"),
    ):
        print(f"{name:44}{before[key] / MIB:12.1f}{after[key] / MIB:12.1f}")
    print(f"{'step time, s':44}{before['seconds']:12.2f}{after['seconds']:12.2f}")
    for step, losses in enumerate(zip(before["losses"], after["losses"], strict=True), 1):
        print(f"{f'loss, step {step}':44}{losses[0]:12.6f}{losses[1]:12.6f}")
    print("\nwhat was patched:")
    print(after["report"])
    # Upstream rounds each log-probability and entropy to bfloat16, 8 bits; memlean does not.
    agree = all(abs(a - b) <= 2**-8 * max(1, abs(b)) for a, b in zip(before["losses"], after["losses"], strict=True))
    if not agree:
        print("the losses disagree", file=sys.stderr)
    return 0 if agree and after["kept"] == 0 else 1


def _tokenizer():
    """Qwen's, from the vocabulary file that the dashscope package ships."""
    import tiktoken

    package = importlib.util.find_spec("dashscope")
    assert package is not None and package.submodule_search_locations, "run() has looked for it"
    folder = Path(package.submodule_search_locations[0])
    lines = (folder / "resources/qwen.tiktoken").read_bytes().splitlines()
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return tiktoken.Encoding("qwen", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})


def _batch():
    """Features and advantages: passages that follow a prompt, rewarded for the words they share with it."""
    from pydoc_data.topics import topics

    import torch

    tokenizer = _tokenizer()
    features, advantages = [], []
    for chapter in PROMPTS:
        tokens = tokenizer.encode(topics[chapter])
        prompt = tokens[:PROMPT_TOKENS]
        completions = [
            tokens[PROMPT_TOKENS + i * COMPLETION_TOKENS :][: COMPLETION_TOKENS - 9 * i] for i in range(GROUP)
        ]
        words = set(tokenizer.decode(prompt).lower().split())
        shared = [sum(word in words for word in tokenizer.decode(c).lower().split()) / len(c) for c in completions]
        rewards = torch.tensor(shared)
        advantages += ((rewards - rewards.mean()) / (rewards.std() + 1e-6)).tolist()
        for completion in completions:
            ids = torch.tensor(prompt + completion)
            labels = torch.cat([ids[1:], torch.tensor([-100])])  # the token that each position predicts
            labels[: len(prompt) - 1] = -100
            attention_mask, position_ids = torch.ones_like(ids), torch.arange(len(ids))
            features.append(
                {"input_ids": ids, "labels": labels, "attention_mask": attention_mask, "position_ids": position_ids}
            )
    return features, advantages


def _resident(field: str) -> int:
    """Bytes, from /proc/self/status: VmRSS now, VmHWM its peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def _side(side: str) -> dict:
    """Runs the steps in this process, and says what they took."""
    from importlib.metadata import version

    import torch
    from twinkle.loss import GRPOLoss

    import memlean
    from memlean.integrations import _twinkle_cpu as rig

    if side == "after":
        memlean.patch("twinkle", strict=True)
    import twinkle.model.megatron.megatron as model_module

    saved = []
    log_softmax = model_module.selective_log_softmax

    def watched(logits, index, **kwargs):
        """Adds up the storages that the operator saves for backward, its input included if it keeps that."""
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = log_softmax(logits, index, **kwargs)
        saved.append(sum(storages.values()))
        return result

    features, advantages = _batch()
    with rig.cpu_instead_of_cuda(), rig.process_group():
        trainer = rig.Trainer(vocab=VOCAB, loss=GRPOLoss(entropy_coef=0.01), dtype=torch.bfloat16)
        outputs, _, _ = trainer.step(features, forward_only=True)
        logps = [row for micro_batch in outputs["logps"] for row in micro_batch]
        labels = [f["labels"].flatten() for f in features]
        old_logps = [row[: len(label)][label != -100].tolist() for row, label in zip(logps, labels, strict=True)]
        losses, seconds = [], []
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        start = _resident("VmRSS")
        for _ in range(STEPS):
            began = time.perf_counter()
            outputs, _, kept = trainer.step(features, old_logps=old_logps, advantages=advantages)
            seconds.append(time.perf_counter() - began)
            losses.append(outputs["loss"])
            with torch.no_grad():
                for parameter in trainer.chunks[0].parameters():
                    parameter -= LEARNING_RATE * parameter.grad
        peak = _resident("VmHWM") - start
        with rig.replaced(model_module, selective_log_softmax=watched):  # after the timing, as the hooks take time
            trainer.step(features, old_logps=old_logps, advantages=advantages)
    return {
        "versions": ", ".join(f"{name} {version(name)}" for name in ("twinkle-kit", "megatron-core", "torch")),
        "sequences": len(features),
        "longest": max(f["input_ids"].numel() for f in features),
        "kept": kept * 2,
        "saved": max(saved),
        "peak": peak,
        "seconds": sorted(seconds)[len(seconds) // 2],
        "losses": losses,
        "report": str(memlean.report()),
    }


if __name__ == "__main__":
    print(json.dumps(_side(sys.argv[1])))
