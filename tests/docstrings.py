"""The public names, and the code in their docstrings."""

import inspect
import textwrap

import memlean
from memlean import distributed, estimate

PUBLIC = {f"memlean.{name}": getattr(memlean, name) for name in memlean.__all__ if name != "__version__"}
PUBLIC["memlean.distributed.vocab_parallel_selective_log_softmax"] = distributed.vocab_parallel_selective_log_softmax
PUBLIC["memlean.estimate.estimate"] = estimate.estimate


def code(documented: object, heading: str) -> str | None:
    """The indented block after the line ``heading::`` of its docstring; None without such a line."""
    lines = inspect.getdoc(documented).splitlines()
    if f"{heading}::" not in lines:
        return None
    block = []
    for line in lines[lines.index(f"{heading}::") + 1 :]:
        if line and not line.startswith("    "):
            break
        block.append(line)
    return textwrap.dedent("\n".join(block)).strip()


EQUIVALENTS = {name: block for name, value in PUBLIC.items() if (block := code(value, "Equivalent to"))}
EXAMPLES = {name: block for name, value in PUBLIC.items() if (block := code(value, "Example"))}
EXAMPLES_WITH_TWINKLE = {name: block for name, block in EXAMPLES.items() if '"twinkle"' in block}
EXAMPLES_HERE = {name: block for name, block in EXAMPLES.items() if name not in EXAMPLES_WITH_TWINKLE}
