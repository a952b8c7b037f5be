"""The examples in the docstrings of patch and what belongs to it, on the real twinkle."""

import json

import docstrings
import pytest

import memlean

APPLIED = {"twinkle.selective_log_softmax", "twinkle.causal_mask", "twinkle.report_logits"}
# What each example leaves applied, and what it has found out.
EXPECTED = {
    "memlean.patch": (APPLIED - {"twinkle.causal_mask"}, {}),
    "memlean.unpatch": (set(), {}),
    "memlean.patched": (set(), {"inside": True, "outside": False}),
    "memlean.report": (APPLIED, {}),
    "memlean.is_patched": (APPLIED, {"applied": True}),
    "memlean.PatchReport": (APPLIED, {"dropped": 0}),
    "memlean.PatchError": (APPLIED, {}),
}


def test_all_are_here():
    assert EXPECTED.keys() == docstrings.EXAMPLES_WITH_TWINKLE.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_example(name):
    names = {"memlean": memlean, "json": json}
    exec(compile(docstrings.EXAMPLES[name], "docstring", "exec"), names)
    applied, found = EXPECTED[name]
    assert {record.name for record in memlean.report().records if record.status == "applied"} == applied
    assert {key: names[key] for key in found} == found


def test_what_the_examples_return():
    names = {"memlean": memlean, "json": json}
    exec(docstrings.EXAMPLES["memlean.unpatch"], names)
    assert {record.name for record in names["left"].records} == APPLIED - {"twinkle.causal_mask"}
    exec(docstrings.EXAMPLES["memlean.PatchReport"], names)
    assert json.loads(names["as_json"]).keys() == APPLIED


def test_the_error_of_the_example(capsys, monkeypatch):
    import twinkle.utils.torch_utils

    monkeypatch.setattr(twinkle.utils.torch_utils, "selective_log_softmax", lambda logits, index: None)
    exec(docstrings.EXAMPLES["memlean.PatchError"], {"memlean": memlean})
    assert "twinkle.selective_log_softmax (version 0.5.1): foreign" in capsys.readouterr().out
    assert not memlean.is_patched("twinkle")
