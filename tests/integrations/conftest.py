"""The real twinkle-kit and megatron-core, on a CPU. A missing one fails the tests here; nothing is skipped."""

import pytest
import rig

import memlean


@pytest.fixture(scope="package", autouse=True)
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
