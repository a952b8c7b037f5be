"""setuptools as the build backend, except that torch is asked for only where the environment has none to build with.

A static requirement would be downloaded into every isolated build: gigabytes, beside the torch that is there.
"""

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

MODE = os.environ.get("MEMLEAN_BUILD", "").strip() or "auto"
if MODE not in ("auto", "require", "skip"):
    raise SystemExit(f"environment variable MEMLEAN_BUILD must be auto, require or skip, got {MODE!r}")


@functools.cache
def find_torch() -> tuple[Path, str] | None:
    """Folder and version of an installed torch >= 2.10, without importing it.

    pip's build isolation hides the environment's torch from this process, but not from one without pip's PYTHONPATH.
    """
    ask = "import importlib.util as u; print(*getattr(u.find_spec('torch'), 'submodule_search_locations', None) or ())"
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for environment in (os.environ, outside):
        folder = Path(subprocess.check_output([sys.executable, "-Pc", ask], env=environment, text=True).strip())
        if (folder / "include/torch/csrc/stable").is_dir():
            version = re.search(r"__version__ = '((\d+)\.(\d+).*?)'", (folder / "version.py").read_text())
            if version and (int(version[2]), int(version[3])) >= (2, 10):
                return folder, version[1]
    return None


def get_requires_for_build_wheel(config_settings=None):
    compiler = os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc"
    can_build = MODE != "skip" and shutil.which(compiler.split()[0]) is not None
    torch = ["torch>=2.10"] if can_build and find_torch() is None else []
    return build_meta.get_requires_for_build_wheel(config_settings) + torch


get_requires_for_build_editable = get_requires_for_build_wheel
