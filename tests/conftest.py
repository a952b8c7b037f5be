import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `import oracle` from every test

import paths

from memlean import _ops

PATHS = ["native", "generic"] if _ops.native else ["generic"]


def pytest_report_header():
    path = f"C kernels, {_ops.native.isa_active()}" if _ops.native else f"generic path ({_ops.native_problem.cause})"
    return f"memlean: {path}; torch {torch.__version__}, {torch.get_num_threads()} threads"


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def generic_path():
    """The functions of the generic path, called directly, so that tests see the operators inside them."""
    with paths.generic():
        yield


@pytest.fixture(params=PATHS)
def each_path(request):
    """The test runs on the C kernels and on the generic path, or on the latter alone where there are no kernels."""
    if request.param == "generic":
        request.getfixturevalue("generic_path")
    return request.param


@pytest.fixture
def threads():
    """torch.set_num_threads, undone at the end."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
