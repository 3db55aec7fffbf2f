"""signs_of_training(): whether a network has weights that somebody trained."""

import torch
from torch import nn

from sparsekit._torch import InstanceNorm, NormBase

_ENTRIES, _TIMES = 4096, 3.0
"""Weights of the smallest matrix that is looked at, and how many times as much as at random its rows must differ."""


class UncalibratedWarning(UserWarning):
    """A trained network is pruned without data."""


def signs_of_training(model: nn.Module) -> str | None:
    """Return evidence that a network was trained; None if there is none.

    The first sign is a batch norm that has seen batches. The second sign: in at least half of the larger matrices, the norms of
    rows differ three times as much as for independent numbers.
    """
    for name, module in model.named_modules():
        if isinstance(module, NormBase) and not isinstance(module, InstanceNorm):
            seen = module.num_batches_tracked
            if seen is not None and int(seen) > 0:
                return f"batch norm {name!r} has seen {int(seen)} batches"
    uneven = total = 0
    for entry in model.parameters():
        if entry.dim() > 1 and entry.numel() >= _ENTRIES and entry.is_floating_point():
            with torch.no_grad():
                rows = entry.detach().flatten(1).float()
                squares = rows.square()
                variance = squares.var() / rows.shape[1]  # of the mean square of a row of independent numbers
                uneven += bool(squares.mean(1).var() > _TIMES**2 * variance)
            total += 1
    return f"{uneven} of {total} weight matrices have rows of uneven norms" if total and 2 * uneven >= total else None
