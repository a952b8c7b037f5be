"""Python in a process of its own, for what cannot be undone: environment variables, forks, missing libraries."""

import os
import subprocess
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parent
SITE_PACKAGES = Path(torch.__file__).parent.parent


def run(
    *arguments: str, pythonpath: Path = ROOT, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess:
    """``python *arguments`` with only those MEMLEAN_ variables that are given. A hang fails the test by the timeout."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("MEMLEAN_")}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"PYTHONPATH": os.pathsep.join(map(str, (pythonpath, HERE, SITE_PACKAGES)))} | environment,
        cwd=HERE,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def output_of(*arguments: str, **options) -> str:
    """What the child printed; the test fails with its stderr if it failed."""
    result = run(*arguments, **options)
    assert result.returncode == 0, f"exit code {result.returncode}\n{result.stderr}"
    return result.stdout
