"""``python -m memlean estimate``: the memory that each fix saves a trainer, from formulas, without allocating anything.

All sizes are those of one rank. *Retained* is what stays allocated because of the function: between forward and
backward, or for the logits until the step ends. *Peak* is the most that is allocated at once, in forward or backward,
the gradient of the logits included. Neither counts the logits that the model has just put out, nor what an operator
allocates and frees inside one call, which differs between devices.

`TRAINERS` says which function of which release each formula is of. The formulas of twinkle are checked by the tests
against what PyTorch allocates in the real functions; those of the others by ``tools/check_estimates.py`` where these
trainers are installed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from memlean.demo.report import format_bytes

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
STATISTICS_BYTES = 3 * 4  # memlean keeps three float32 numbers a token


@dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        tokens: of one micro-batch, padding included.
        vocab: columns of the logits, before they are divided between ranks.
        dtype: of the logits: ``"bfloat16"``, ``"float16"`` or ``"float32"``.
        entropy: whether the loss takes the entropy too.
        tp: tensor-parallel ranks that the vocabulary is divided between.
        sequences: of one micro-batch, all of the same length.
        micro_batches: of one step.
        divisible_by: the vocabulary is padded to a multiple of this times ``tp``: 1 for mcore-bridge (twinkle,
            ms-swift), 128 unless ``--make-vocab-size-divisible-by`` says otherwise for Megatron-LM's own scripts.

    Raises:
        ValueError: a number that is not a positive int, a dtype that is none of the three, sequences of unequal length.
    """

    tokens: int
    vocab: int
    dtype: str = "bfloat16"
    entropy: bool = False
    tp: int = 1
    sequences: int = 1
    micro_batches: int = 2
    divisible_by: int = 1

    def __post_init__(self) -> None:
        for name in ("tokens", "vocab", "tp", "sequences", "micro_batches", "divisible_by"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
        if self.dtype not in DTYPES.values():
            raise ValueError(f"dtype must be one of {', '.join(DTYPES.values())}, got {self.dtype!r}")
        if self.tokens % self.sequences:
            raise ValueError(f"sequences must divide tokens ({self.tokens}), got {self.sequences}")

    @property
    def vocab_per_rank(self) -> int:
        """Columns of the logits on one rank, padding included."""
        return math.ceil(self.vocab / (self.tp * self.divisible_by)) * self.divisible_by

    @property
    def half(self) -> bool:
        return self.dtype != "float32"

    @property
    def logits_bytes(self) -> int:
        """Bytes of the logits of one micro-batch on one rank."""
        return self.tokens * self.vocab_per_rank * (2 if self.half else 4)


class Copies(NamedTuple):
    """What a log-prob function needs, in tensors of the logits' size and dtype."""

    retained: float
    peak: float
    logits: bool  # whether it also saves the logits themselves


class Memory(NamedTuple):
    """Bytes; ``logits``: whether the logits that came in are kept for backward as well."""

    retained: int
    peak: int
    logits: bool = False


class Change(NamedTuple):
    """One fix. ``before`` is None where the trainer refuses the call."""

    before: Memory | None
    after: Memory


def _row_loop(case: Case) -> Copies:
    """log_softmax + gather of each sequence in half precision, gather - logsumexp in float32."""
    row = 1 / case.sequences
    if not case.entropy:  # in backward: a row with its two gradients beside the other rows, or those and their stack
        return Copies(1 if case.half else 0, max(2, 1 + 2 * row), not case.half)
    return Copies(2, 2 + 3 * row, False) if case.half else Copies(1, max(2, 1 + 3 * row), True)


def _twinkle(case: Case) -> Copies | None:
    if case.tp == 1:
        return _row_loop(case)
    if case.entropy:
        return None
    # On a clone: a float32 softmax; then a bfloat16 gradient, which float32 logits have converted.
    return Copies(2, 3, False) if case.half else Copies(1, 2.5, False)


def _trl(case: Case) -> Copies:
    if not case.entropy:
        return _row_loop(case)
    # The entropy's log_softmax and exp beside the row loop; in chunks of 128 tokens, but all of them stay.
    return Copies(3 if case.half else 2, max(3, 2 + 2 / case.sequences), not case.half)


def _verl(case: Case) -> Copies:
    if case.entropy:  # a softmax for the entropy, in the logits' dtype, and one in float32 on a clone of the logits
        return Copies(3, 4, True) if case.half else Copies(2, 3, True)
    return _megatron_cross_entropy(case)


def _ms_swift(case: Case) -> Copies:
    if not case.entropy:
        return _megatron_cross_entropy(case)
    extra = 2 + (case.tp > 1)  # log_softmax and the chunks' exp; across ranks the exp of the shard, too
    return Copies(2 + extra, 3 + extra, True) if case.half else Copies(extra, 2 + extra, True)


def _megatron_cross_entropy(case: Case) -> Copies:
    # A float32 softmax; float32 logits are overwritten with it, and that with the gradient.
    return Copies(2, 3, False) if case.half else Copies(0, 0, True)


@dataclass(frozen=True)
class Trainer:
    """Whose memory: ``measured`` names release and function, ``when`` the configuration in which that function runs."""

    measured: str
    when: str
    copies: Callable[[Case], Copies | None]
    tensor_parallel: bool


TRAINERS = {
    "twinkle": Trainer(
        "twinkle-kit 0.5.1: selective_log_softmax, _create_4d_attention_mask, forward_backward",
        "the Megatron path; the mask on an NPU",
        _twinkle,
        True,
    ),
    "trl": Trainer(
        "trl 1.16.0: selective_log_softmax, selective_log_softmax_and_entropy",
        "where its Triton kernel does not run: on a CPU or NPU",
        _trl,
        False,
    ),
    "verl": Trainer(
        "verl 0.9.1: vocab_parallel_log_probs_from_logits, vocab_parallel_entropy",
        "the Megatron path without fused kernels",
        _verl,
        True,
    ),
    "ms-swift": Trainer(
        "ms-swift 4.6.0: compute_logps_and_entropy_from_logits",
        "the Megatron path; its Hugging Face path calls TRL's functions",
        _ms_swift,
        True,
    ),
}


def estimate(case: Case, trainer: str = "twinkle") -> dict[str, Change]:
    """What each fix changes, by its name in docs/integrations.md.

    Example::

        from memlean.estimate import Case, estimate

        retained = estimate(Case(tokens=16_384, vocab=151_936))["selective_log_softmax"].before.retained  # bytes

    Args:
        case: what is trained.
        trainer: a key of `TRAINERS`. The log-prob fix is estimated for each, the other two for twinkle alone.

    Returns:
        ``{"selective_log_softmax": Change, "causal_mask": Change, "report_logits": Change}``, or the first alone.

    Raises:
        ValueError: a trainer that is not in `TRAINERS`, or one that does not divide the vocabulary with ``tp > 1``.
    """
    if trainer not in TRAINERS:
        raise ValueError(f"trainer must be one of {', '.join(TRAINERS)}, got {trainer!r}")
    if case.tp > 1 and not TRAINERS[trainer].tensor_parallel:
        raise ValueError(f"tp must be 1 for {trainer}, which does not divide the vocabulary, got {case.tp}")
    logits = case.logits_bytes
    copies = TRAINERS[trainer].copies(case)
    before = copies and Memory(round(copies.retained * logits), round(copies.peak * logits), copies.logits)
    statistics = STATISTICS_BYTES * case.tokens
    changes = {"selective_log_softmax": Change(before, Memory(statistics, logits + statistics, True))}
    if trainer == "twinkle":
        mask = case.tokens**2 // case.sequences  # [sequences, 1, length, length] of bool
        collected = case.micro_batches * logits
        changes["causal_mask"] = Change(Memory(mask, 2 * mask), Memory(0, 0))  # the mask and its inverse
        # Batches of fixed length are concatenated while the parts are still there.
        changes["report_logits"] = Change(Memory(collected, 2 * collected), Memory(0, 0))
    return changes


def to_dict(case: Case, trainer: str) -> dict[str, Any]:
    """The same as plain values, for ``--json``; sizes in bytes."""
    return {
        "trainer": trainer,
        "measured": TRAINERS[trainer].measured,
        "when": TRAINERS[trainer].when,
        **vars(case),
        "vocab_per_rank": case.vocab_per_rank,
        "logits_bytes": case.logits_bytes,
        "fixes": {
            fix: {when: memory and memory._asdict() for when, memory in change._asdict().items()}
            for fix, change in estimate(case, trainer).items()
        },
    }


def table(case: Case, trainer: str) -> str:
    """The same as text."""
    vocab = f"V = {case.vocab:,}"
    if case.tp > 1:
        vocab += f" over {case.tp} ranks ({case.vocab_per_rank:,} each)"
    step = [f"{case.micro_batches} micro-batches"] if trainer == "twinkle" else []
    parts = [f"{case.tokens:,} tokens in {case.sequences} sequence{'s' * (case.sequences > 1)}", vocab, case.dtype]
    parts += ["with entropy"] if case.entropy else []
    lines = [
        f"{TRAINERS[trainer].measured}\n{TRAINERS[trainer].when}",
        ", ".join([*parts, *step]),
        f"the logits of a micro-batch: {format_bytes(case.logits_bytes)}",
        "",
        f"{'':24}{'retained':>22}{'peak':>26}",
        f"{'fix':24}{'before':>12}{'after':>12}{'before':>14}{'after':>12}",
    ]
    for fix, (before, after) in estimate(case, trainer).items():
        old = [format_bytes(before.retained), format_bytes(before.peak)] if before else ["refused"] * 2
        new = [format_bytes(after.retained), format_bytes(after.peak)]
        lines.append(f"{fix:24}{old[0]:>12}{new[0]:>12}{old[1]:>14}{new[1]:>12}")
    lines += ["", "Beside the logits. docs/estimate.md says what is counted and how it was checked."]
    change = estimate(case, trainer)["selective_log_softmax"]
    if change.before and not change.before.logits:
        lines.append("memlean keeps the logits themselves until backward; the function that it replaces does not.")
    return "\n".join(lines)


# --- the command ------------------------------------------------------------------------------------------------------


def add_parser(commands: Any) -> None:
    """Adds the subcommand to what ``argparse.ArgumentParser.add_subparsers`` returned."""
    parser = commands.add_parser("estimate", help="memory that each fix saves a trainer, computed without allocating")
    parser.add_argument("--tokens", type=_positive, required=True, help="tokens of one micro-batch, padding included")
    parser.add_argument("--vocab", type=_positive, help="columns of the logits; default: from --model")
    parser.add_argument("--dtype", type=_dtype, metavar="|".join(DTYPES), help="default: from --model, else bf16")
    parser.add_argument("--model", type=_model, metavar="CONFIG.json", help="a Hugging Face config: vocab and dtype")
    parser.add_argument("--entropy", action="store_true", help="the loss takes the entropy, too")
    parser.add_argument("--trainer", choices=TRAINERS, default="twinkle", help="default: %(default)s")
    parser.add_argument("--tp", type=_positive, default=1, metavar="N", help="tensor-parallel ranks")
    parser.add_argument("--divisible-by", type=_positive, default=1, metavar="N",
                        help="pad the vocabulary to a multiple of N x TP (Megatron-LM's scripts: 128)")  # fmt: skip
    parser.add_argument("--sequences", type=_positive, default=1, metavar="N", help="of one micro-batch (default: 1)")
    parser.add_argument("--micro-batches", type=_positive, default=2, metavar="N", help="of one step (default: 2)")
    parser.add_argument("--json", action="store_true", help="bytes, machine-readable")
    parser.set_defaults(run=lambda options: run(options, parser))


def run(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints the estimate. Options that do not fit together end the program through ``parser.error``."""
    vocab, dtype = options.model or (None, None)
    vocab = options.vocab or vocab
    if vocab is None:
        parser.error("argument --vocab: expected a number, or --model with a config that has vocab_size, got neither")
    try:
        case = Case(
            options.tokens,
            vocab,
            options.dtype or dtype or "bfloat16",
            options.entropy,
            options.tp,
            options.sequences,
            options.micro_batches,
            options.divisible_by,
        )
        made = json.dumps(to_dict(case, options.trainer), indent=2) if options.json else table(case, options.trainer)
    except ValueError as error:
        parser.error(str(error))
    print(made)
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


def _dtype(text: str) -> str:
    name = DTYPES.get(text, text)
    if name not in DTYPES.values():
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}, got {text!r}")
    return name


def _model(text: str) -> tuple[int, str | None]:
    """vocab_size and dtype of a Hugging Face config, whose language model may be nested under text_config."""
    try:
        config = json.loads(Path(text).read_text())
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"expected a readable JSON file, got {text!r}: {error}") from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {type(config).__name__} in {text!r}")
    nested = config.get("text_config")
    config |= nested if isinstance(nested, dict) else {}
    vocab = config.get("vocab_size")
    if not isinstance(vocab, int) or vocab <= 0:
        raise argparse.ArgumentTypeError(f"expected a config with a positive vocab_size, got {vocab!r} in {text!r}")
    dtype = config.get("dtype") or config.get("torch_dtype")
    return vocab, None if dtype is None else _dtype(str(dtype))
