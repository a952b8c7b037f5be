"""What memlean is measured against: the functions of released trainers, and the expressions that people write."""

import importlib
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from memlean import selective_log_softmax
from memlean._ops import native
from memlean.demo.measure import Method, Outputs, gather_minus_logsumexp, memlean


def twinkle() -> Method:
    """The row loop of twinkle-kit: one sequence at a time."""
    from twinkle.utils.torch_utils import selective_log_softmax

    def method(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
        outputs = selective_log_softmax(logits, index, return_entropy=entropy)
        return outputs if entropy else (outputs,)

    return method


def trl() -> Method:
    from trl.trainer.utils import selective_log_softmax, selective_log_softmax_and_entropy

    def method(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
        if entropy:
            return selective_log_softmax_and_entropy(logits, index)
        return (selective_log_softmax(logits, index),)

    return method


def verl() -> Method:
    # Their __init__ files import Ray and more, which the file with the two functions does not need.
    _import_without_init("verl")
    _import_without_init("verl.utils")
    functions = importlib.import_module("verl.utils.torch_functional")

    def method(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
        logps = functions.logprobs_from_logits_v2(logits, index)
        if not entropy:
            return (logps,)
        rows = functions.entropy_from_logits_with_chunking(logits.flatten(0, -2))
        return logps, rows.view(index.shape)

    return method


def _import_without_init(name: str) -> None:
    """Makes a package whose files can be imported and whose __init__ is not run."""
    if name in sys.modules:
        return
    parent, _, leaf = name.rpartition(".")
    module = types.ModuleType(name)
    if parent:
        module.__path__ = [str(Path(folder, leaf)) for folder in sys.modules[parent].__path__]
    else:
        module.__path__ = list(find_spec(name).submodule_search_locations)
    sys.modules[name] = module


def log_softmax(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
    log_p = logits.log_softmax(-1)
    logps = log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    return (logps, -(log_p.exp() * log_p).sum(-1)) if entropy else (logps,)


def cross_entropy(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
    """Has no entropy."""
    return (-F.cross_entropy(logits.flatten(0, -2), index.flatten(), reduction="none").view(index.shape),)


def in_place(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
    """memlean with the gradient written over the logits, which may be no leaf."""
    outputs = selective_log_softmax(logits, index, return_entropy=entropy, inplace_backward=True)
    return outputs if entropy else (outputs,)


def at_level(isa: str) -> Method:
    """memlean with this instruction set; it stays selected for the backward."""

    def method(logits: Tensor, index: Tensor, entropy: bool) -> Outputs:
        native.isa_select(isa)
        return memlean(logits, index, entropy)

    return method


MEMLEAN = "memlean"
IN_PLACE = "memlean in place"
EXPRESSIONS = {"log_softmax": log_softmax, "cross_entropy": cross_entropy, "gather - logsumexp": gather_minus_logsumexp}


def all_peers() -> dict[str, Method]:
    """Every method by its name in the results; those named "... compiled" are compiled at their first call."""
    methods = {MEMLEAN: memlean, "twinkle": twinkle(), "TRL": trl(), "verl": verl(), **EXPRESSIONS}
    for name, expression in EXPRESSIONS.items():
        methods[f"{name} compiled"] = torch.compile(expression, dynamic=False)
    return methods


def variants() -> dict[str, Method]:
    """memlean in other ways, for the points that ask for them."""
    levels = native.isa_available() if native else []
    return {IN_PLACE: in_place, **{f"{MEMLEAN} {isa}": at_level(isa) for isa in levels}}


def fused_linear(weight: Tensor) -> dict[str, Method]:
    """Methods of hidden states ``[rows, hidden]`` instead of logits; ``weight`` is ``[vocab, hidden]``."""

    def from_logits(method: Method) -> Method:
        return lambda hidden, index, entropy: method(F.linear(hidden, weight), index, entropy)

    def linear_cross_entropy(hidden: Tensor, index: Tensor, entropy: bool) -> Outputs:
        options = torch.nn.LinearCrossEntropyOptions()
        return (-F.linear_cross_entropy(hidden, weight, index, reduction="none", options=options),)

    return {
        "linear + memlean": from_logits(memlean),
        "linear + cross_entropy": from_logits(cross_entropy),
        "linear_cross_entropy": linear_cross_entropy,
    }
