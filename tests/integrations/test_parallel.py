"""The same step before and after under TP = 2, PP = 2 and PP = 2 x VPP = 2: two processes, gloo, real schedules."""

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest


def two_processes(layout, variable, store):
    """The JSON of both ranks."""
    script = Path(__file__).with_name("two_processes.py")
    command = [sys.executable, script, layout, variable]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

    def start(rank):
        environment = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)}
        return subprocess.Popen([*command, str(rank), store], env=os.environ | environment, **pipes)

    ranks = [start(rank) for rank in range(2)]
    outputs = [process.communicate(timeout=300) for process in ranks]
    for process, (_, errors) in zip(ranks, outputs, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in outputs]


@pytest.mark.parametrize("variable", ["variable", "fixed"])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "pp2_vpp2"])
def test_same_step(layout, variable, tmp_path):
    ranks = two_processes(layout, variable, str(tmp_path / "store"))
    print(f"twinkle-kit {version('twinkle-kit')}, {ranks[0]['versions']}, gloo, {layout}, {variable} length")
    tokens = 2 * (8 + 8 + 7 + 8) if variable == "variable" and layout != "pp2_vpp2" else 8 * 8
    vocab = 512 // (2 if layout == "tp2" else 1)
    assert sorted(found["ranks"] for found in ranks) == ([[0, 0], [1, 0]] if layout == "tp2" else [[0, 0], [0, 1]])
    for found in ranks:
        last = layout == "tp2" or found["ranks"][1] == 1  # only the last stage has a loss and logits
        for op in ("dtype_preserving", "memlean"):
            step = found[op]
            print(f"rank {found['ranks']} {op}: loss {step['loss']}, logits elements kept {step['kept']}, "
                  f"worst gradient difference {step['worst_gradient_difference']:.3g}")  # fmt: skip
            assert step["kept"] == [tokens * vocab if last else 0, 0]
            assert step["gradients"] > 0
            parts = 4 if variable == "variable" else 1
            assert step["logps"] == (parts if last else 0)
            assert step["returned_logits"] == (parts if last else 0) and step["same_returned_logits"]
            reported = step["counters"]["twinkle.report_logits"]
            assert reported == ({"logits dropped": 4, "logits bytes dropped": tokens * vocab * 4} if last else {})
            calls = step["counters"].get("twinkle.selective_log_softmax", {})
            if op == "dtype_preserving" or layout == "tp2":  # under TP memlean runs the original operator
                assert step["loss"][0] == step["loss"][1] and step["same_logps"] and step["same_gradients"]
                assert calls == ({"calls: tensor-parallel original": 4} if op == "memlean" else {})
            else:
                assert step["loss"][1] == pytest.approx(step["loss"][0], rel=1e-6)
                assert step["worst_gradient_difference"] < 1e-6
                assert calls == ({"calls: memlean": 4} if last else {})
        if layout == "tp2":
            step = found["tensor_parallel"]
            print(f"rank {found['ranks']} tp=True: loss {step['loss']}, entropy off by "
                  f"{found['entropy']['worst_error']:.3g}, worst gradient difference "
                  f"{step['worst_gradient_difference']:.3g}")  # fmt: skip
            assert step["counters"]["twinkle.selective_log_softmax"] == {"calls: tensor-parallel memlean": 4}
            assert step["loss"][1] == pytest.approx(step["loss"][0], rel=1e-6)
            # The original rounds its gradient to bfloat16 whatever the logits are.
            assert 0 < step["worst_gradient_difference"] < 1e-2
            assert found["entropy"]["refused"]
            assert found["entropy"]["worst_error"] < 2e-6
    assert ranks[0]["memlean"]["loss"] == ranks[1]["memlean"]["loss"]
