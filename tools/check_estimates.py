"""The formulas of ``memlean estimate`` beside what the functions of installed trainers need, as a Markdown table.

    pip install torch==2.13.0 trl==1.16.0              # whichever are to be checked, in an environment of their own
    pip install torch==2.13.0 megatron-core==0.16.1 verl==0.9.1 ms-swift==4.6.0
    python tools/check_estimates.py --trainer trl verl ms-swift

Sizes are in tensors of the logits' size. Exits with 1 if a formula is off by more than a tenth of one. The test suite
checks twinkle-kit the same way.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from memory import retained_and_peak
from ranks import Ranks

from memlean.estimate import TRAINERS, Case, estimate

TOKENS, VOCAB = 32_768, 256  # many times the chunks that some functions work in
TOLERANCE = 0.1


def _trl(case):
    from trl.trainer import utils

    return utils.selective_log_softmax_and_entropy if case.entropy else utils.selective_log_softmax


def _verl(case):
    from verl.utils.megatron import tensor_parallel

    def log_probs_and_entropy(logits, index):  # as its Megatron engine calls them
        copy = logits.clone()
        entropy = tensor_parallel.vocab_parallel_entropy(logits)
        return tensor_parallel.vocab_parallel_log_probs_from_logits(copy, index), entropy

    return log_probs_and_entropy if case.entropy else tensor_parallel.vocab_parallel_log_probs_from_logits


def _ms_swift(case):
    from swift.megatron.trainers.vocab_parallel_utils import compute_logps_and_entropy_from_logits

    def logps_and_entropy(logits, index):
        outputs = compute_logps_and_entropy_from_logits(logits, index, case.entropy)
        return outputs if case.entropy else outputs[0]

    return logps_and_entropy


FUNCTIONS = {"trl": _trl, "verl": _verl, "ms-swift": _ms_swift}


def measure(rank: int, trainer: str, case: Case) -> tuple[float, float]:
    """On one rank: what is retained and the peak, in tensors of the logits' size."""
    if TRAINERS[trainer].tensor_parallel:
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(case.tp)
    shape = (case.sequences, case.tokens // case.sequences)
    leaf = torch.randn(*shape, case.vocab_per_rank).to(getattr(torch, case.dtype)).requires_grad_()
    index = torch.randint(case.vocab, shape, generator=torch.Generator().manual_seed(0))
    retained, peak = retained_and_peak(FUNCTIONS[trainer](case), leaf * 1, index)
    return retained / case.logits_bytes, peak / case.logits_bytes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", nargs="+", choices=FUNCTIONS, default=list(FUNCTIONS))
    options = parser.parse_args()
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # what megatron-core compiles is measured as it is written
    worst = 0.0
    print("| trainer | TP | dtype | entropy | sequences | retained: formula | measured | peak: formula | measured |")
    print("|---" * 9 + "|")
    for tp in (1, 2):
        with Ranks(tp) as ranks:
            for trainer in options.trainer:
                if tp > 1 and not TRAINERS[trainer].tensor_parallel:
                    continue
                for dtype in ("bfloat16", "float32"):
                    for entropy in (False, True):
                        for sequences in (1, 4):
                            case = Case(TOKENS, VOCAB * tp, dtype, entropy, tp, sequences)
                            before = estimate(case, trainer)["selective_log_softmax"].before
                            formulas = before.retained / case.logits_bytes, before.peak / case.logits_bytes
                            measured = ranks(measure, trainer, case)[0]
                            worst = max(worst, *(abs(f - m) for f, m in zip(formulas, measured, strict=True)))
                            cells = [f"{f:.2f} | {m:.2f}" for f, m in zip(formulas, measured, strict=True)]
                            row = [trainer, tp, dtype, "yes" if entropy else "no", sequences, *cells]
                            print("| " + " | ".join(map(str, row)) + " |", flush=True)
    print(f"\nlargest difference: {worst:.2f} of the logits")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
