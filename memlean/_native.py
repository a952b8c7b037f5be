"""Loads the native library; where that fails, says why and what to do, and leaves the work to the generic path."""

import importlib
import importlib.machinery
import re
import struct
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import torch

from memlean import _env

OLDEST_TORCH = (2, 10)  # the first with the whole stable C API that the library uses
REINSTALL = "reinstall memlean (pip install --force-reinstall --no-deps --no-cache-dir, and what you installed it from)"
MACHINES = {3: "i386", 40: "arm", 62: "x86_64", 183: "aarch64", 243: "riscv64"}


class Problem(NamedTuple):
    """Why there is no native library."""

    cause: str
    remedy: str
    kind: Literal["chosen", "failed", "wrong"] = "failed"  # chosen: no warning; wrong: nothing should be used like this


def load() -> tuple[ModuleType | None, Problem | None]:
    """The native module, or the reason why there is none, after one warning.

    Raises:
        ValueError: an environment variable with a value that it cannot have.
    """
    try:
        return _load()
    except ValueError as error:
        if not _env.doctor_is_starting():
            raise
        return None, Problem(str(error), "correct the variable or unset it", "wrong")


def _load() -> tuple[ModuleType | None, Problem | None]:
    _env.chunk_bytes(False)  # a wrong value is an error here, not at the first call that needs it
    hugepages, isa = _env.hugepages(), _env.isa()
    if _env.native_disabled():
        return None, Problem("MEMLEAN_DISABLE_NATIVE=1", "unset it", "chosen")
    found = _find_and_import()
    if isinstance(found, Problem):
        if found.kind != "chosen":
            warnings.warn(
                "memlean: the native library could not be loaded, the slower generic path is used instead: "
                f"{found.cause}. To repair it, {found.remedy}; MEMLEAN_DISABLE_NATIVE=1 silences this; "
                "`python -m memlean doctor` says more.",
                RuntimeWarning,
                stacklevel=6,  # the line that imports memlean
            )
        return None, found
    try:
        found.isa_select(isa)
    except ValueError as error:
        raise ValueError(f"environment variable MEMLEAN_ISA: {error}") from None
    found.use_hugepages(hugepages)
    return found, None


def _find_and_import() -> ModuleType | Problem:
    library = _library()
    if isinstance(library, Problem):
        return library
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        cause = f"{library.name} needs torch {needed} or newer, installed is torch {torch.__version__}"
        return Problem(cause, f"install another torch (pip install 'torch>={needed}')")
    if sys.platform == "linux" and (damage := _damage(library)):
        return Problem(f"{library} {damage}", REINSTALL)
    try:
        # Not `from memlean import _C`, which takes a missing file for a circular import.
        return importlib.import_module("memlean._C")
    except ImportError as error:
        if "undefined symbol" not in str(error):
            return Problem(str(error), REINSTALL)
        cause = (
            f"{library.name} was built with torch {_built_with_torch(library)}, which the installed torch "
            f"{torch.__version__} does not fit: {error}"
        )
        return Problem(cause, f"{REINSTALL}, which builds it with the installed torch")
    except Exception as error:
        cause = f"{library.name} raised {type(error).__name__}: {error}"
        return Problem(cause, f"{REINSTALL}, and report this", "wrong")


def _library() -> Path | Problem:
    """The file that importing memlean._C would load."""
    folder = Path(__file__).parent
    names = ["_C" + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    if present := [folder / name for name in names if (folder / name).is_file()]:
        return present[0]
    note = folder / "_not_built.txt"
    if note.is_file():
        why = note.read_text(encoding="utf-8")
        cause = f"there is no _C, memlean was installed without it: {why}"
        remedy = f"see to that (pip install -v shows the build) and {REINSTALL}"
        return Problem(cause, remedy, "chosen" if why == "MEMLEAN_BUILD=skip" else "failed")
    others = [path.name for path in folder.glob("_C.*") if path.suffix in (".so", ".pyd")]
    instead = f", only {', '.join(others)}, for another Python or platform" if others else ""
    return Problem(f"there is no file {names[0]} in {folder}{instead}", REINSTALL)


def _damage(library: Path) -> str | None:
    """What is wrong with an ELF file, by its header: one that is cut off would kill the process in the loader."""
    try:
        header, python = (_first_bytes(path, 64) for path in (library, Path("/proc/self/exe")))
    except OSError:
        return None  # the loader will say more
    if header and header[:4] != b"\x7fELF":
        return "is not a shared library of Linux (ELF)"
    size = library.stat().st_size
    if len(header) < 64:
        return f"is cut off after {size} bytes"
    class_and_order, machine = slice(4, 6), slice(18, 20)
    if (header[class_and_order], header[machine]) != (python[class_and_order], python[machine]):
        numbers = (int.from_bytes(start[machine], sys.byteorder) for start in (header, python))
        theirs, ours = (MACHINES.get(number, f"machine {number}") for number in numbers)
        return f"is a library for {theirs}, this Python is one for {ours}"
    # The table of sections comes last in the file.
    (start,), (entry, count) = struct.unpack_from("=Q", header, 0x28), struct.unpack_from("=HH", header, 0x3A)
    if size < start + entry * count:
        return f"is cut off: it has {size} bytes and should have {start + entry * count}"
    return None


def _first_bytes(path: Path, count: int) -> bytes:
    with path.open("rb") as file:
        return file.read(count)


def _built_with_torch(library: Path) -> str:
    found = re.search(rb"built with torch ([^,\0]+)", library.read_bytes())
    return found[1].decode() if found else "of an unknown version"
