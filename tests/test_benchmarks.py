import argparse
import csv
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("tqdm")
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_selective_log_softmax as bench  # noqa: E402
import harness  # noqa: E402
import peers  # noqa: E402
import readme_table  # noqa: E402


def test_readme_has_the_numbers_of_the_committed_csv():
    text = readme_table.README.read_text()
    assert readme_table.updated(text) == text, "run `make readme-table`"


def test_every_row_names_its_commit_and_machine():
    files = list(harness.RESULTS.glob("*.csv"))
    assert {file.stem for file in files} == {path.stem.removeprefix("bench_") for path in BENCHMARKS.glob("bench_*.py")}
    for file in files:
        rows = harness.read(file.stem)
        assert tuple(rows[0]) == harness.COLUMNS
        assert all(row["commit"] and row["machine"] and row["date"] and row["script"] for row in rows)


@pytest.fixture
def table(tmp_path):
    return harness.Table("bench_nothing.py", argparse.Namespace(results=tmp_path, quick=False))


def test_ratios_are_medians_over_turns(table):
    table.add_times({"slow": [3.0, 8.0, 50.0]}, ("fast", [1.0, 2.0, 10.0]), ("probe", [1.5, 2.0, 5.0]), measure="both")
    table.write()
    with (table.folder / "nothing.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert (row["peer"], row["value"], row["ratio"], row["share_of_limit"]) == ("slow", "8", "4", "0.25")


def test_a_point_gives_times_memory_and_errors(table, threads):
    class Bar:
        update = set_description = staticmethod(lambda *_: None)

    point = bench.Point("base", torch.float32, 2, 1024, (peers.MEMLEAN, "log_softmax"), entropy=True, scoring=True)
    threads(torch.get_num_threads())
    known = {peers.MEMLEAN: peers.memlean, "log_softmax": peers.log_softmax}
    bench.study(point, known, 2, table, Bar)
    memlean, peer = (harness.select(table.rows, peer=name) for name in known)
    assert {row["measure"] for row in memlean} == {row["measure"] for row in peer}
    assert {"scoring", "forward", "backward", "both", "peak backward"} <= {row["measure"] for row in memlean}
    assert all(row["share_of_limit"] for row in memlean if row["unit"] == "s")
    assert harness.the(memlean, "value", measure="retained") <= 16 * point.rows
    assert harness.the(peer, "value", measure="retained") == 2 * point.rows * point.vocab * 4
    assert harness.the(memlean, "value", measure="value error") < 1e-6
    assert harness.the(memlean, "value", measure="NaN rows when masked") == 0
    assert harness.the(peer, "value", measure="NaN rows when masked") == point.rows
