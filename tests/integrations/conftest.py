"""The real twinkle-kit and megatron-core, on a CPU. A missing one fails the tests here; nothing is skipped."""

from importlib.metadata import version
from pathlib import Path

import pytest
import rig

import memlean


@pytest.fixture(scope="module", autouse=True)
def one_process():
    with rig.cpu_instead_of_cuda(), rig.process_group():
        yield


@pytest.fixture(autouse=True)
def nothing_patched(monkeypatch):
    """Each test starts and ends with the original functions."""
    for name in ("MEMLEAN_PATCH", "MEMLEAN_MASK", "MEMLEAN_STRICT", "MEMLEAN_DISABLE", "TWINKLE_FAIL_FAST"):
        monkeypatch.delenv(name, raising=False)
    memlean.unpatch()
    yield
    memlean.unpatch()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    report = (yield).get_result()
    if report.skipped:
        report.outcome, report.longrepr = "failed", f"{item.nodeid} was skipped: nothing may be skipped here"


def pytest_terminal_summary(terminalreporter):
    here = f"{Path(__file__).parent.name}/"
    counts = {
        outcome: sum(here in r.nodeid and r.when == "call" for r in terminalreporter.getreports(outcome))
        for outcome in ("passed", "failed", "skipped")
    }
    versions = ", ".join(f"{name} {version(name)}" for name in ("twinkle-kit", "megatron-core", "torch"))
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in counts.items())
    terminalreporter.write_line(f"tests/integrations: {outcomes}; {versions}, gloo")
