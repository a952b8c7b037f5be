"""What an installation puts in place: from source with and without a compiler, and which torch it is built with."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import child
import pytest
import setuptools

from memlean import _ops, selftest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not (ROOT / "setup.py").is_file(), reason="not a checkout")

USE = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import memlean
from memlean import _ops
print(memlean.__file__, bool(_ops.native))
print(*(warning.message for warning in caught))
"""


@pytest.fixture
def checkout(tmp_path):
    """A copy of what a build reads, without what earlier builds left."""
    for name in ("csrc", "memlean", "tools"):
        ignored = shutil.ignore_patterns("__pycache__", "_C.*", "_not_built.txt")
        shutil.copytree(ROOT / name, tmp_path / "checkout" / name, ignore=ignored)
    for path in ROOT.iterdir():
        if path.suffix in (".py", ".toml", ".in", ".md", ".pth") or path.name == "LICENSE":
            shutil.copy(path, tmp_path / "checkout")
    return tmp_path / "checkout"


def hook(folder: Path, call: str, *flags: str, before: str = "", path: tuple[Path, ...] = (), **variables: str):
    """Calls a hook of the build backend as pip does, in a process of its own, which prints last what it returned."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MEMLEAN_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, *flags, "-c", f"{before}\nimport build_backend\nprint(build_backend.{call})"],
        env=inherited | {"PYTHONPATH": os.pathsep.join(map(str, (folder / "tools", *path)))} | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )


def wheel(folder: Path, **variables: str) -> tuple[str, str, Path]:
    """Builds it; its file name, what was printed, and the folder that it is unpacked to."""
    result = hook(folder, "build_wheel('dist')", **variables)
    assert result.returncode == 0, result.stderr
    name = result.stdout.splitlines()[-1]
    installed = folder / "installed"
    with zipfile.ZipFile(folder / "dist" / name) as archive:
        archive.extractall(installed)
    return name, result.stdout, installed


def use(installed: Path) -> list[str]:
    """The two lines that USE prints with this installation. -S: an editable installation would be found instead."""
    where, *warnings = child.output_of("-S", "-c", USE, pythonpath=installed).splitlines()
    assert where.startswith(str(installed))
    return [where.rpartition(" ")[2], *warnings]


@pytest.mark.skipif(_ops.native is None, reason="the C kernels are not in use in this run")
def test_a_wheel_built_from_the_source_distribution(checkout):
    result = hook(checkout, "build_sdist('dist')")
    assert result.returncode == 0, result.stderr
    shutil.unpack_archive(checkout / "dist" / result.stdout.splitlines()[-1], checkout)
    (unpacked,) = checkout.glob("memlean-*/")
    name, _, installed = wheel(unpacked, MEMLEAN_BUILD="require")
    assert re.fullmatch(rf"memlean-[\d.]+-cp\d+-{sys.implementation.cache_tag[:2]}\d+-linux_\w+\.whl", name)
    (library,) = (installed / "memlean").glob("_C.*")
    assert (installed / "memlean/py.typed").is_file() and (installed / "memlean_autoload.pth").is_file()
    assert not (installed / "memlean/_not_built.txt").exists()
    # What manylinux_2_28 allows, torch's own platform: no symbol of a newer glibc. And no debug information.
    versions = re.findall(rb"\0GLIBC_(\d+)\.(\d+)", library.read_bytes())
    assert max((int(major), int(minor)) for major, minor in versions) <= (2, 28)
    assert library.stat().st_size < 2 * 2**20
    assert str(ROOT).encode() not in library.read_bytes()

    printed = child.output_of("-S", "-W", "error::RuntimeWarning", "-m", "memlean", "selftest", pythonpath=installed)
    assert f"C kernels, {_ops.native.isa_available()[-1]}: all is well" in printed
    assert printed.count("ok  ") == len(selftest.CHECKS)

    # Where this build has left its results, the next one leaves the library out if it is told to.
    name, _, _ = wheel(unpacked, MEMLEAN_BUILD="skip")
    assert not [path for path in zipfile.Path(unpacked / "dist" / name, "memlean/").iterdir() if "_C." in path.name]


def test_without_a_compiler_the_package_is_pure_python_and_says_so(checkout):
    name, printed, installed = wheel(checkout, CC="no-such-compiler")
    assert name.endswith("-py3-none-any.whl")
    (line,) = (line for line in printed.splitlines() if line.startswith("memlean: "))
    assert "without its C kernels" in line and "no-such-compiler" in line
    native, warning = use(installed)
    assert native == "False"
    assert "memlean was installed without it: " in warning and "'no-such-compiler'" in warning
    # Nothing but the reason stays behind when the next build succeeds or is switched off.
    name, printed, installed = wheel(checkout, MEMLEAN_BUILD="skip")
    assert name.endswith("-py3-none-any.whl")
    assert (installed / "memlean/_not_built.txt").read_text() == "MEMLEAN_BUILD=skip"
    assert use(installed) == ["False", ""]  # who skips it needs no warning


def test_a_required_build_fails_without_a_compiler(checkout):
    result = hook(checkout, "build_wheel('dist')", CC="no-such-compiler", MEMLEAN_BUILD="require")
    assert result.returncode != 0
    assert "'no-such-compiler'" in result.stderr.splitlines()[-1]
    assert not list(checkout.glob("dist/*.whl"))


def test_an_unknown_build_mode_is_an_error(checkout):
    result = hook(checkout, "build_wheel('dist')", MEMLEAN_BUILD="yes")
    assert result.returncode != 0
    message = "environment variable MEMLEAN_BUILD must be auto, require or skip, got 'yes'"
    assert result.stderr.splitlines()[-1] == message


REQUIRES = "get_requires_for_build_wheel()"


@pytest.fixture
def isolated(tmp_path):
    """A folder with setuptools and without torch, as pip's build isolation makes one."""
    for pattern in ("setuptools*", "_distutils_hack"):
        for path in Path(setuptools.__file__).parent.parent.glob(pattern):
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


def test_torch_is_not_downloaded_where_the_environment_has_one(checkout, isolated):
    # -S hides the environment from the hook itself.
    result = hook(checkout, REQUIRES, "-S", path=(isolated,))
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, "[]"), result.stderr


@pytest.mark.parametrize(
    ("version", "variables", "expected"),
    [
        (None, {}, "['torch>=2.10']"),
        ("2.9.1", {}, "['torch>=2.10']"),
        ("2.10.0a0+git1234567", {}, "[]"),
        (None, {"MEMLEAN_BUILD": "skip"}, "[]"),
        (None, {"CC": "no-such-compiler"}, "[]"),
    ],
)
def test_torch_is_a_build_requirement_only_where_it_is_needed(checkout, isolated, version, variables, expected):
    # A Python without site-packages: what the hook asks sees this folder alone.
    python = isolated / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    if version:
        (isolated / "torch/include/torch/csrc/stable").mkdir(parents=True)
        (isolated / "torch/__init__.py").touch()
        (isolated / "torch/version.py").write_text(f"__version__ = '{version}'\n")
    before = f"import sys; sys.executable = {str(python)!r}"
    result = hook(checkout, REQUIRES, "-S", before=before, path=(isolated,), **variables)
    assert (result.returncode, result.stdout.splitlines()[-1]) == (0, expected), result.stderr
