import json

import pytest

from memlean.__main__ import main
from memlean.demo import measure

pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A quick run: the study as --json wrote it, and the chart."""
    folder = tmp_path_factory.mktemp("demo")
    assert main(["demo", "--quick", "--json", str(folder / "study.json"), "--chart", str(folder / "chart.png")]) == 0
    return json.loads((folder / "study.json").read_text()), folder / "chart.png"


def results(study, method):
    return [result for result in study["results"] if result["method"] == method]


def test_quick_covers_both_vocabularies_dtypes_and_entropy(quick):
    study, chart = quick
    cases = {(r["vocab"], r["dtype"], r["entropy"]) for r in results(study, "memlean")}
    assert len(cases) == 8
    assert {vocab for vocab, _, _ in cases} == {49_152, 151_936}
    assert any("Not real logits" in note for note in study["notes"])
    assert any("compiled" in note for note in study["notes"])
    assert chart.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_row_loop_retains_the_vocabulary(quick):
    study, _ = quick
    for result in results(study, "row loop"):
        copies = {"bfloat16": 1, "float32": 0}[result["dtype"]]
        if result["entropy"]:
            copies = {"bfloat16": 2, "float32": 1}[result["dtype"]]
        itemsize = {"bfloat16": 2, "float32": 4}[result["dtype"]]
        assert result["retained_vocab_bytes"] == copies * study["rows"] * result["vocab"] * itemsize


def test_memlean_retains_a_few_bytes_a_row(quick):
    study, _ = quick
    for result in results(study, "memlean"):
        assert result["retained_vocab_bytes"] == 0
        assert result["keeps_logits"]
        assert result["retained_bytes"] <= 16 * study["rows"]
        assert result["save_calls"] == 3
        assert result["nan_rows_when_masked"] == 0


def test_memlean_is_closer_to_float64(quick):
    study, _ = quick
    for before, after in zip(results(study, "row loop"), results(study, "memlean"), strict=True):
        assert after["value_error"] <= min(before["value_error"], 1e-6)
        assert after["gradient_error"] <= before["gradient_error"] * 1.01


def test_memlean_allocates_only_the_gradient(quick):
    study, _ = quick
    large = [r for r in results(study, "memlean") if r["vocab"] == 151_936 and r["dtype"] == "float32"]
    for result in large:
        if result["peak_forward_bytes"] is None:
            pytest.skip("no resident high-water mark on this system")
        gradient = study["rows"] * result["vocab"] * 4
        noise = gradient // 4  # the kernel counts resident pages per CPU and sums them up now and then
        assert result["peak_forward_bytes"] <= noise
        assert result["peak_backward_bytes"] <= gradient + noise


def test_save_calls_of_the_row_loop_grow_with_the_batch():
    import torch

    def save_calls(batch, method):
        logits = torch.randn(batch, 2, 32).bfloat16().requires_grad_()
        case = measure.Case("", logits, torch.zeros(batch, 2, dtype=torch.int64), torch.bfloat16, True)
        return measure.saved(method, logits, case)["save_calls"]

    assert save_calls(8, measure.row_loop) == 8 * save_calls(1, measure.row_loop)
    assert save_calls(8, measure.memlean) == save_calls(1, measure.memlean)


def test_a_failing_compiler_is_a_note_and_the_others_go_on(monkeypatch):
    import torch
    from tqdm import tqdm

    def no_compiler(*_):
        raise RuntimeError("no working C++ compiler\nand a long log")

    monkeypatch.setattr(measure, "compiled", no_compiler)
    case = measure.Case("", torch.randn(2, 3, 100), torch.zeros(2, 3, dtype=torch.int64), torch.float32, True)
    methods = {"row loop": measure.row_loop, "compiled": no_compiler, "memlean": measure.memlean}
    notes = []
    found = measure.study(case, methods, 1, tqdm(disable=True), notes)
    assert [result["method"] for result in found] == ["row loop", "memlean"]
    assert notes == ["No compiled peer: RuntimeError: no working C++ compiler"]
