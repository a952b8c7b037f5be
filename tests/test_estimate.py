"""The formulas of ``memlean estimate`` against what PyTorch allocates, the published cases, and the command."""

import json

import pytest
import torch
from memory import Saved, retained_and_peak

from memlean import estimate, selective_log_softmax
from memlean.__main__ import main
from memlean.demo import measure
from memlean.estimate import Case, Change, Memory

TOKENS, VOCAB = 512, 2000
GIB, MIB = 2**30, 2**20
PUBLISHED = ["estimate", "--tokens", "16384", "--vocab", "151936", "--dtype", "bf16"]

cases = pytest.mark.parametrize(
    "case",
    [
        Case(TOKENS, VOCAB, dtype, entropy, sequences=sequences)
        for dtype in estimate.DTYPES.values()
        for entropy in (False, True)
        for sequences in (1, 2, 8)
    ],
    ids=lambda case: f"{case.dtype}-{'entropy' if case.entropy else 'logps'}-{case.sequences}",
)


def inputs(case):
    shape = (case.sequences, case.tokens // case.sequences)
    logits = torch.randn(*shape, case.vocab).to(getattr(torch, case.dtype)).requires_grad_()
    return logits, torch.randint(case.vocab, shape)


def check(measured, expected, logits_bytes):
    """Equal but for 2 % of the logits: what has the size of index."""
    assert measured == pytest.approx(expected, abs=0.02 * logits_bytes)


@cases
def test_memlean(case):
    logits, index = inputs(case)

    def function(logits, index):
        return selective_log_softmax(logits, index, case.entropy)

    after = estimate.estimate(case)["selective_log_softmax"].after
    retained, peak = retained_and_peak(function, logits, index)
    assert retained == after.retained == 12 * TOKENS
    check(peak, after.peak, case.logits_bytes)


@cases
def test_row_loop(case):
    logits, index = inputs(case)
    before = estimate.estimate(case)["selective_log_softmax"].before
    retained, peak = retained_and_peak(lambda x, i: measure.row_loop(x, i, case.entropy), logits, index)
    check(retained, before.retained, case.logits_bytes)
    if case.half:  # in float32 the demo gathers each row, where trainers gather once
        check(peak, before.peak, case.logits_bytes)


@cases
def test_whether_the_logits_are_kept_too(case):
    change = estimate.estimate(case)["selective_log_softmax"]
    functions = {True: lambda x, i: measure.row_loop(x, i, case.entropy), False: selective_log_softmax}
    for is_before, function in functions.items():
        logits, index = inputs(case)
        with Saved() as saved:
            function(logits, index)
        kept = any(tensor.data_ptr() == logits.data_ptr() for tensor in saved.tensors)
        assert kept == (change.before if is_before else change.after).logits


def rows(text):
    """The lines of the table: fix -> its four cells."""
    lines = [line.split() for line in text.splitlines() if line.startswith(("selective", "causal", "report"))]
    return {name: [" ".join(cells[i : i + 2]) for i in range(0, len(cells), 2)] for name, *cells in lines}


def test_published_cases(capsys):
    assert main(PUBLISHED) == 0
    table = rows(capsys.readouterr().out)
    assert table["selective_log_softmax"][:2] == ["4.64 GiB", "192 KiB"]
    assert table["causal_mask"] == ["256 MiB", "0 B", "512 MiB", "0 B"]
    assert table["report_logits"] == ["9.27 GiB", "0 B", "18.55 GiB", "0 B"]
    assert main([*PUBLISHED, "--entropy"]) == 0
    assert rows(capsys.readouterr().out)["selective_log_softmax"][:2] == ["9.27 GiB", "192 KiB"]


def test_json_has_the_same_in_bytes(capsys):
    assert main([*PUBLISHED, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    logits = 16384 * 151936 * 2
    assert made["logits_bytes"] == logits
    assert made["fixes"]["selective_log_softmax"]["before"] == {"retained": logits, "peak": 3 * logits, "logits": False}
    assert made["fixes"]["causal_mask"]["before"]["peak"] == 512 * MIB
    assert made["fixes"]["report_logits"]["before"]["peak"] == pytest.approx(18.55 * GIB, rel=1e-3)
    assert main([*PUBLISHED, "--json", "--tp", "2", "--entropy"]) == 0
    assert json.loads(capsys.readouterr().out)["fixes"]["selective_log_softmax"]["before"] is None


def test_a_refused_call_is_in_the_table(capsys):
    assert main([*PUBLISHED, "--tp", "2", "--entropy"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("selective_log_softmax")]
    assert line.split() == ["selective_log_softmax", "refused", "192", "KiB", "refused", "2.32", "GiB"]
    assert "(75,968 each)" in out


@pytest.mark.parametrize("trainer", estimate.TRAINERS)
def test_only_twinkle_has_the_other_fixes(trainer):
    changes = estimate.estimate(Case(100, 1000), trainer)
    assert (len(changes) == 3) == (trainer == "twinkle")
    assert all(isinstance(change, Change) and isinstance(change.after, Memory) for change in changes.values())


@pytest.mark.parametrize(
    ("vocab", "tp", "divisible_by", "per_rank"),
    [(1000, 1, 1, 1000), (1001, 2, 1, 501), (151936, 1, 128, 151936), (151936, 2, 128, 76032), (50257, 8, 128, 6400)],
)
def test_padded_vocabulary(vocab, tp, divisible_by, per_rank):
    assert Case(1, vocab, tp=tp, divisible_by=divisible_by).vocab_per_rank == per_rank


@pytest.mark.parametrize(
    ("config", "vocab", "dtype"),
    [
        ({"vocab_size": 1000, "torch_dtype": "float32"}, 1000, "float32"),
        ({"vocab_size": 1000, "dtype": "float16"}, 1000, "float16"),
        ({"vocab_size": 1000}, 1000, "bfloat16"),
        ({"dtype": "float16", "text_config": {"vocab_size": 7, "dtype": "bfloat16"}, "vocab_size": 9}, 7, "bfloat16"),
        ({"torch_dtype": "float16", "text_config": {"vocab_size": 7}}, 7, "float16"),
        ({"vocab_size": 7, "text_config": None}, 7, "bfloat16"),
    ],
    ids=str,
)
def test_model_config(tmp_path, capsys, config, vocab, dtype):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert main(["estimate", "--tokens", "8", "--model", str(path), "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["vocab"], made["dtype"]) == (vocab, dtype)
    assert main(["estimate", "--tokens", "8", "--model", str(path), "--vocab", "5", "--dtype", "fp32", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert (made["vocab"], made["dtype"]) == (5, "float32")


@pytest.mark.parametrize(
    "content", ["", "[1]", "{}", '{"vocab_size": "7"}', '{"vocab_size": 7, "dtype": "int8"}', None]
)
def test_bad_model_config(tmp_path, capsys, content):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit):
        main(["estimate", "--tokens", "8", "--model", str(path)])
    message = capsys.readouterr().err
    assert "argument --model: expected" in message and ", got" in message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], "argument --tokens: expected a positive whole number, got '0'"),
        (["--tokens", "1.5"], "argument --tokens: expected a positive whole number, got '1.5'"),
        (["--vocab", "-3"], "argument --vocab: expected a positive whole number, got '-3'"),
        (["--dtype", "int8"], "argument --dtype: expected one of bf16, fp16, fp32, got 'int8'"),
        (["--sequences", "3"], "sequences must divide tokens (16384), got 3"),
        (["--trainer", "trl", "--tp", "2"],
         "tp must be 1 for trl, which does not divide the vocabulary, got 2"),
        (["--trainer", "none"], "argument --trainer: invalid choice: 'none'"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main([*PUBLISHED, *arguments])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 0}, "tokens must be a positive int, got 0"),
        ({"vocab": 1.5}, "vocab must be a positive int, got 1.5"),
        ({"dtype": "bf16"}, "dtype must be one of bfloat16, float16, float32, got 'bf16'"),
        ({"sequences": 3}, r"sequences must divide tokens \(8\), got 3"),
    ],
)
def test_errors_of_a_case(arguments, message):
    with pytest.raises(ValueError, match=message):
        Case(**{"tokens": 8, "vocab": 16} | arguments)


def test_error_of_an_unknown_trainer():
    with pytest.raises(ValueError, match="trainer must be one of twinkle, trl, verl, ms-swift, got 'none'"):
        estimate.estimate(Case(8, 16), "none")


def test_neither_vocab_nor_model(capsys):
    with pytest.raises(SystemExit):
        main(["estimate", "--tokens", "8"])
    assert "argument --vocab: expected a number, or --model" in capsys.readouterr().err
