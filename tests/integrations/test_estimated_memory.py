"""The formulas of ``memlean estimate`` against what the real functions of twinkle and megatron-core allocate."""

import pytest
import torch
from memory import allocator_peak, retained_and_peak
from ranks import Ranks
from rig import InputProcessor, Trainer, features
from twinkle.utils import torch_utils

from memlean import estimate
from memlean.estimate import Case

TOKENS, VOCAB = 512, 2000
TOLERANCE = 0.02  # of the logits: what has the size of index


@pytest.mark.parametrize("sequences", [1, 2, 8])
@pytest.mark.parametrize("entropy", [False, True], ids=["logps", "entropy"])
@pytest.mark.parametrize("dtype", estimate.DTYPES.values())
def test_selective_log_softmax(dtype, entropy, sequences):
    case = Case(TOKENS, VOCAB, dtype, entropy, sequences=sequences)
    shape = (sequences, TOKENS // sequences)
    logits = torch.randn(*shape, VOCAB).to(getattr(torch, dtype)).requires_grad_()
    before = estimate.estimate(case)["selective_log_softmax"].before
    retained, peak = retained_and_peak(
        lambda logits, index: torch_utils.selective_log_softmax(logits, index, entropy),
        logits,
        torch.randint(VOCAB, shape),
    )
    print(f"retained {retained:,} of {before.retained:,}, peak {peak:,} of {before.peak:,}")
    assert retained == pytest.approx(before.retained, abs=TOLERANCE * case.logits_bytes)
    assert peak == pytest.approx(before.peak, abs=TOLERANCE * case.logits_bytes)


@pytest.mark.parametrize("sequences", [1, 3])
def test_causal_mask(sequences):
    case = Case(sequences * 1024, VOCAB, sequences=sequences)
    masks = []
    ones = [torch.ones(1024)] * sequences
    peak = allocator_peak(lambda: masks.append(InputProcessor._create_4d_attention_mask(ones)))
    before = estimate.estimate(case)["causal_mask"].before
    assert masks[0].untyped_storage().nbytes() == before.retained
    assert peak == before.peak


@pytest.mark.parametrize("micro_batches", [2, 3])
def test_report_logits(micro_batches):
    """One sequence a micro-batch, fixed length; nothing else of a forward pass is as large as these logits."""
    vocab, length = 32_768, 64
    trainer = Trainer(vocab=vocab, variable=False, layers=1)
    inputs = features(vocab=vocab, lengths=(length,) * micro_batches)
    trainer.step(inputs, micro_batch_size=1, forward_only=True)  # what the first call allocates for good
    kept = []
    peak = allocator_peak(lambda: kept.append(trainer.step(inputs, micro_batch_size=1, forward_only=True)[2]))
    case = Case(length, vocab, "float32", micro_batches=micro_batches)
    before = estimate.estimate(case)["report_logits"].before
    print(f"retained {4 * kept[0]:,} of {before.retained:,}, peak {peak:,} of {before.peak:,}")
    assert 4 * kept[0] == before.retained
    assert peak == pytest.approx(before.peak, rel=TOLERANCE)


def _vocab_parallel(rank, case, name):
    """On each rank: retained and peak, for logits that may be overwritten, as those of a model may."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from memlean.distributed import vocab_parallel_selective_log_softmax

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(case.tp)

    def memlean(logits, index):
        return vocab_parallel_selective_log_softmax(logits, index, return_entropy=case.entropy)

    functions = {
        "twinkle": torch_utils.selective_log_softmax,
        "verl": vocab_parallel_cross_entropy,  # which it calls for log-probabilities, as ms-swift does
        "memlean": memlean,
    }
    leaf = torch.randn(1, case.tokens, case.vocab_per_rank).to(getattr(torch, case.dtype)).requires_grad_()
    index = torch.randint(case.vocab, (1, case.tokens), generator=torch.Generator().manual_seed(0))
    return retained_and_peak(functions[name], leaf * 1, index)


@pytest.fixture(scope="module")
def two_ranks():
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TORCHDYNAMO_DISABLE", "1")  # megatron-core would compile its fused cross entropy
        with Ranks(2) as ranks:
            yield ranks


@pytest.mark.parametrize(
    ("name", "entropy"), [("twinkle", False), ("verl", False), ("memlean", False), ("memlean", True)]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vocab_parallel(two_ranks, name, entropy, dtype):
    case = Case(TOKENS, 2 * VOCAB, dtype, entropy, tp=2)
    change = estimate.estimate(case, "twinkle" if name == "memlean" else name)["selective_log_softmax"]
    expected = change.after if name == "memlean" else change.before
    for retained, peak in two_ranks(_vocab_parallel, case, name):
        print(f"retained {retained:,} of {expected.retained:,}, peak {peak:,} of {expected.peak:,}")
        assert retained == pytest.approx(expected.retained, abs=TOLERANCE * case.logits_bytes)
        assert peak == pytest.approx(expected.peak, abs=TOLERANCE * case.logits_bytes)


def test_twinkle_refuses_entropy_on_a_shard(two_ranks):
    case = Case(TOKENS, 2 * VOCAB, entropy=True, tp=2)
    assert estimate.estimate(case)["selective_log_softmax"].before is None
    outcomes = two_ranks.outcomes(_entropy_of_a_shard)
    assert [outcome.kind for outcome in outcomes] == ["NotImplementedError"] * 2


def _entropy_of_a_shard(rank):
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(2)
    torch_utils.selective_log_softmax(torch.randn(1, 4, 8), torch.zeros(1, 4, dtype=torch.int64), True)
