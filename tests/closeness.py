"""How near is near enough: in units of the results' own rounding."""

import torch
from torch import Tensor

# Sums of exp carry a relative error of a few units in the last place, so their logarithm carries an absolute one.
FLOOR = 8.0


def ulp(magnitude: Tensor, dtype: torch.dtype) -> Tensor:
    """Distance from |magnitude| to the next number of ``dtype``, as float64."""
    x = magnitude.abs().double().clamp(max=torch.finfo(dtype).max)
    _, exponent = torch.frexp(x)
    eps = torch.finfo(dtype).eps
    return torch.ldexp(torch.full_like(x, eps), exponent - 1).clamp(min=torch.finfo(dtype).tiny * eps)


def assert_values(actual: Tensor, expected: Tensor, ulps: float) -> None:
    """Within ``ulps`` of the expected value's magnitude, infinities and NaN where they are expected."""
    expected = expected.double()
    allowed = ulps * ulp(expected.abs().nan_to_num().clamp(min=FLOOR), actual.dtype)
    if actual.dtype == torch.float64:
        allowed = 8 * allowed  # the truth is rounded to float64 itself, more than once
    _assert_within(actual, expected, allowed)


def assert_gradients(actual: Tensor, expected: Tensor, scale: float = 1) -> None:
    """Float64 gradients rounded once to the gradient's dtype, plus the arithmetic of upstreams near ``scale``."""
    # exp(x - m) inherits the rounding of x - m, which may be as low as -88 (-745 in float64); absolute errors come from
    # sums over the row.
    relative, absolute = (2e-13, 2e-15) if actual.dtype == torch.float64 else (1e-5, 1.2e-7)
    allowed = ulp(expected, actual.dtype) * 0.51 + expected.abs() * relative + scale * absolute
    _assert_within(actual, expected, allowed)


def _assert_within(actual: Tensor, expected: Tensor, allowed: Tensor) -> None:
    # What is beyond the results' range is an infinity there.
    same = (actual == expected.to(actual.dtype)) | (actual.isnan() & expected.isnan())
    highest = torch.finfo(actual.dtype).max  # an error may also end beyond the range
    wrong = ~(same | ((actual.double().clamp(-highest, highest) - expected).abs() <= allowed))
    where = wrong.nonzero()[:5].tolist()
    assert not wrong.any(), f"at {where}: got {actual[wrong][:5].tolist()}, expected {expected[wrong][:5].tolist()}"
