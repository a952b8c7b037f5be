"""What is installed here, which path a call takes, and what is wrong: text that can be pasted into a bug report."""

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import memlean
from memlean import _env, _ops, selftest
from memlean.integrations import _patch

FINE, SLOW, BROKEN = 0, 1, 2
VERDICTS = ("fine", "works, but slowly: the C kernels are not in use", "broken")


def collect() -> dict[str, Any]:
    """The facts, as a dictionary of plain values."""
    native, problem = _ops.native, _ops.native_problem
    facts: dict[str, Any] = {
        "memlean": memlean.__version__,
        "location": str(Path(memlean.__file__).parent),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "native": native is not None,
    }
    if problem is not None:
        facts |= {"native_missing_because": problem.cause, "remedy": problem.remedy}
    if native is not None:
        facts |= {
            "library": native.__file__,
            "library_build": native.build,
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
    facts["environment"] = {name: value for name, value in os.environ.items() if name.startswith("MEMLEAN_")}
    facts["patches"] = {
        record.name: f"{record.status}, {record.target} {record.version}: {record.reason}"
        for record in _patch.examine().records
    }
    facts["broken"] = _broken()
    facts["exit_code"] = BROKEN if facts["broken"] else FINE if native else SLOW
    return facts


def _broken() -> list[str]:
    """What makes results, or the next import, wrong."""
    found = _env.problems()
    if _ops.native_problem and _ops.native_problem.kind == "wrong" and _ops.native_problem.cause not in found:
        found.append(_ops.native_problem.cause)
    try:
        _patch.examine(*_env.patch_targets())
    except ValueError as error:
        found.append(f"environment variable MEMLEAN_PATCH: {error}")
    return found or selftest.run()


def _hugepages() -> str:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        return setting.read_text().split("[")[1].split("]")[0]
    except (OSError, IndexError):
        return "not available"


def report(as_json: bool = False) -> int:
    """Prints the facts. Returns 0 for fine, 1 for works but slowly, 2 for broken."""
    facts = collect()
    if as_json:
        print(json.dumps(facts, indent=2))
        return facts["exit_code"]
    for name, value in facts.items():
        if name in ("patches", "broken", "exit_code"):
            continue
        if isinstance(value, dict):
            value = "; ".join(f"{k}: {v}" for k, v in value.items()) or "nothing set"
        elif isinstance(value, list):
            value = ", ".join(value)
        print(f"{name.replace('_', ' '):24}{value}")
    fixes = [f"{fix}: {verdict}" for fix, verdict in facts["patches"].items()]
    for name, lines in (("patches", fixes or ["no trainer found"]), ("broken", facts["broken"])):
        for i, line in enumerate(lines):  # a line each: they are sentences
            print(f"{'' if i else name:24}{line}")
    print(VERDICTS[facts["exit_code"]])
    return facts["exit_code"]
