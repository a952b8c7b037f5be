"""Every environment variable that memlean reads, with its default.

========================== ======== ==============================================================================
variable                   default  meaning
========================== ======== ==============================================================================
MEMLEAN_DISABLE_NATIVE     0        1: do not load the C kernels; the generic path computes everything
MEMLEAN_ISA                highest  generic, avx2, avx512 or neon: highest instruction set to use; read once, at import
MEMLEAN_HUGEPAGE           1        0: do not ask for huge pages for large gradients; read once, at import
MEMLEAN_CHUNK_BYTES        64 MiB   bytes of the largest temporary of the generic path (32 MiB with entropy)
MEMLEAN_PATCH              none     comma-separated targets or fixes (``twinkle``, ``twinkle.report_logits``) that every
                                    Python process patches as soon as it imports them
MEMLEAN_MASK               npu      npu or auto: the ``mask`` of that patch
MEMLEAN_TP                 0        1: the ``tp`` of that patch
MEMLEAN_STRICT             0        1: ``memlean.patch`` raises where it would refuse a fix with a warning
MEMLEAN_DISABLE            0        1: patch nothing, and let what is patched run the original; read at every call
MEMLEAN_BUILD              auto     while installing. require: no package without the C kernels; skip: do not build them
========================== ======== ==============================================================================
"""

import os
import sys

DEFAULT_CHUNK_BYTES = 64 * 2**20
DEFAULT_CHUNK_BYTES_ENTROPY = 32 * 2**20


def _flag(name: str, default: bool) -> bool:
    text = os.environ.get(name, "").strip()
    if text not in ("", "0", "1"):
        raise ValueError(f"environment variable {name} must be 0 or 1, got {text!r}")
    return default if text == "" else text == "1"


def native_disabled() -> bool:
    return _flag("MEMLEAN_DISABLE_NATIVE", False)


def hugepages() -> bool:
    return _flag("MEMLEAN_HUGEPAGE", True)


def patch_targets() -> list[str]:
    return [name.strip() for name in os.environ.get("MEMLEAN_PATCH", "").split(",") if name.strip()]


def patch_mask() -> str:
    text = os.environ.get("MEMLEAN_MASK", "").strip() or "npu"
    if text not in ("npu", "auto"):
        raise ValueError(f"environment variable MEMLEAN_MASK must be npu or auto, got {text!r}")
    return text


def patch_tp() -> bool:
    return _flag("MEMLEAN_TP", False)


def patch_strict() -> bool:
    return _flag("MEMLEAN_STRICT", False)


def patches_disabled() -> bool:
    return _flag("MEMLEAN_DISABLE", False)


def isa() -> str | None:
    return os.environ.get("MEMLEAN_ISA", "").strip().lower() or None


def chunk_bytes(return_entropy: bool) -> int:
    text = os.environ.get("MEMLEAN_CHUNK_BYTES", "").strip()
    if text == "":
        return DEFAULT_CHUNK_BYTES_ENTROPY if return_entropy else DEFAULT_CHUNK_BYTES
    if not text.isdecimal() or int(text) == 0:
        raise ValueError(f"environment variable MEMLEAN_CHUNK_BYTES must be a positive number of bytes, got {text!r}")
    return int(text)


def problems() -> list[str]:
    """What is wrong with the variables that are set. MEMLEAN_ISA and MEMLEAN_PATCH are judged by those who know."""
    found = []
    readers = (native_disabled, hugepages, patch_mask, patch_tp, patch_strict, patches_disabled)
    for read in (*readers, lambda: chunk_bytes(False)):
        try:
            read()
        except ValueError as error:
            found.append(str(error))
    return found


def doctor_is_starting() -> bool:
    """Whether this is ``python -m memlean doctor``, which reports a wrong value where everything else raises.

    While Python looks for a module, and so imports the package around it, sys.argv[0] is "-m".
    """
    return sys.argv[:2] == ["-m", "doctor"] and "memlean" in sys.orig_argv
