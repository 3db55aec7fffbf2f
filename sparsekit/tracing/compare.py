"""compare_tensors(): whether a value of the narrow model equals the gated one, up to rounding."""

from collections.abc import Iterable

import torch
from torch import Tensor

# Allowed errors: a share of what the mask has changed, and a share of the values for what rounding does.
_ALLOWED = {torch.float64: (1e-5, 1e-10), torch.bfloat16: (1e-1, 3e-2), torch.float16: (5e-2, 5e-3)}
_LOOSE = (1e-3, 1e-5)
_OUTLIER = 1e6  # larger values, as those of a mask that is added, say nothing of rounding


def is_undefined(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and bool(tensor.numel()) and not bool(torch.isfinite(tensor).any())


def rounding_floor(values: Iterable[Tensor]) -> float:
    """Return an error that rounding may make anywhere in a pass, such as where large values cancel."""
    largest = 0.0
    dtype = torch.float64
    for value in values:
        if value.is_floating_point() and value.numel():
            dtype = value.dtype if torch.finfo(value.dtype).eps > torch.finfo(dtype).eps else dtype
            low, high = value.aminmax()
            size = max(-float(low), float(high))
            largest = max(largest, size) if size < _OUTLIER else largest
    return 64 * torch.finfo(dtype).eps * largest


def compare_tensors(
    whole: Tensor, expected: Tensor, found: Tensor, floor: float = 0.0, *, is_output: bool = False
) -> str | None:
    """Return why a value of the compacted model differs from the gated one, or None if it does not.

    Errors are judged channel by channel, relative to the change that the mask makes there. Otherwise, one channel of a residual
    stream with values in the thousands would hide the errors of all others. Any axis may be the one of the channels.

    Args:
        whole: The value with all units.
        expected: The value of the gated model.
        found: The value of the compacted model.
        floor: An error that is allowed everywhere.
        is_output: An output must be finite somewhere, and must not change where it is not a floating-point value.
    """
    if torch.equal(expected, found) and (not is_output or not expected.is_floating_point()):
        return None
    if expected.is_complex():
        whole, expected, found = (torch.view_as_real(t) for t in (whole, expected, found))
    if not expected.is_floating_point():
        return "removing units changes the output"
    if not expected.numel():
        return None
    if not is_output and bool((found - expected).abs().max() <= floor):
        return None
    finite = torch.isfinite(expected)
    if not bool(finite.any()) and is_output:
        return "the output is infinite or NaN on the example inputs, so nothing can be compared"
    if not torch.equal(finite, torch.isfinite(found)):
        return "removing units makes values infinite or NaN"
    share, rounding = _ALLOWED.get(expected.dtype, _LOOSE)
    error, size, change = (
        torch.where(finite & torch.isfinite(t), t, 0).abs().double() for t in (found - expected, expected, whole - expected)
    )
    for axis in range(max(1, expected.dim())):
        others = [other for other in range(expected.dim()) if other != axis]
        worst, scale, changed = (t.amax(others) if others else t for t in (error, size, change))
        if bool((worst > share * changed + rounding * scale + floor).any()):
            return f"removing units changes the output by {float((worst / scale.clamp(min=1e-30)).max()):.1e} of its size"
    return None
