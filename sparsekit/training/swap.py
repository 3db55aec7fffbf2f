"""choose_swaps(): which dropped units take the places of which kept ones."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["choose_swaps"]


def choose_swaps(keep: Tensor, cost: Tensor, gain: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Pair the kept units that cost least with the dropped ones that gain most, while the gain exceeds the cost.

    Among units that differ by less than rounding explains, the first ones are taken, in any order of computation.

    Args:
        keep: bool (units,), what is kept now.
        cost: float (units,), nats that removing a kept unit costs, at most, as far as its error is known.
        gain: float (units,), nats that a dropped unit gains, at least.
        most: Swaps at most.

    Returns:
        int64 (swaps,) each: the units that leave, and those that enter in their places.
    """
    kept, dropped = keep.nonzero().reshape(-1), (~keep).nonzero().reshape(-1)
    most = min(most, kept.numel(), dropped.numel())
    cost, gain = _rounded(cost), _rounded(gain)
    leaving = kept[cost[kept].argsort(stable=True)[:most]]
    entering = dropped[gain[dropped].argsort(descending=True, stable=True)[:most]]
    # Costs ascend and gains descend, so the pairs that pay come first.
    pairs = int((gain[entering] > cost[leaving]).sum())
    return leaving[:pairs], entering[:pairs]


def _rounded(values: Tensor) -> Tensor:
    """Round to 16 binary digits."""
    mantissa, exponent = torch.frexp(values)
    return torch.where(values.isfinite(), torch.ldexp((mantissa * 2.0**16).round() / 2.0**16, exponent), values)
