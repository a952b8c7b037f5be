"""The ways a call can be computed: the C kernels at each level of this CPU, and the generic path."""

from collections.abc import Iterator
from contextlib import contextmanager

from memlean import _ops, reference

OPERATORS = ("token_logprob_forward", "token_logprob_backward", "token_logprob_backward_", "token_stats_forward")
LEVELS = _ops.native.isa_available() if _ops.native else []


@contextmanager
def generic() -> Iterator[None]:
    """The functions of the generic path, called directly, so that tests see the operators inside them."""
    kept = {name: getattr(_ops, name) for name in OPERATORS}
    try:
        for name in OPERATORS:
            setattr(_ops, name, getattr(reference, name))
        yield
    finally:
        for name, operator in kept.items():
            setattr(_ops, name, operator)


@contextmanager
def level(name: str) -> Iterator[None]:
    """The C kernels at this level."""
    before = _ops.native.isa_active()
    _ops.native.isa_select(name)
    try:
        yield
    finally:
        _ops.native.isa_select(before)
