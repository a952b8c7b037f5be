"""What is installed here, and which path a call takes: text that can be pasted into a bug report."""

import json
import platform
from pathlib import Path
from typing import Any

import torch

import memlean
from memlean import _ops
from memlean.integrations import _patch


def collect() -> dict[str, Any]:
    """The facts, as a dictionary of plain values."""
    native = _ops.native
    facts: dict[str, Any] = {
        "memlean": memlean.__version__,
        "location": str(Path(memlean.__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "native": native is not None,
    }
    if native is None:
        facts["native_missing_because"] = _ops.native_missing_because
    else:
        facts |= {
            "library": native.__file__,
            "built_with": f"{native.compiler}, torch {native.built_with_torch}",
            "isa_available": native.isa_available(),
            "isa_active": native.isa_active(),
            "kernels": [name for name in native.kernel_names() if name.endswith("__" + native.isa_active())],
        }
    facts["hugepages"] = _hugepages()
    facts["paths"] = {"cpu": f"C kernels, {native.isa_active()}" if native else "generic path"}
    for device in ("cuda", "xpu", "mps", "npu"):
        module = getattr(torch, device, None)
        if module is not None and module.is_available():
            facts["paths"][device] = "generic path"
    facts["patches"] = {
        record.name: f"{record.status}, {record.target} {record.version}: {record.reason}"
        for record in _patch.examine().records
    }
    return facts


def _hugepages() -> str:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        return setting.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return "not available"


def report(as_json: bool = False) -> int:
    """Prints the facts. Returns 0, or 1 when the native path is unavailable."""
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        for name, value in facts.items():
            if name == "patches":  # a line each: they are sentences
                value = f"\n{'':24}".join(f"{fix}: {verdict}" for fix, verdict in value.items()) or "no trainer found"
            elif isinstance(value, dict):
                value = "; ".join(f"{k}: {v}" for k, v in value.items())
            elif isinstance(value, list):
                value = ", ".join(value)
            print(f"{name.replace('_', ' '):24}{value}")
        print("fine" if facts["native"] else "works, but slowly: the C kernels are not in use")
    return 0 if facts["native"] else 1
