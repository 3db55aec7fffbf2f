"""Kinds of optimiser state that do not lie entry by entry: what of it follows the units all the same, and what cannot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsekit.errors import InvalidValueError

REDUCED = {"row_var": 1, "col_var": 2}
"""Adafactor's moments of rows and columns → the axis, counted from the end, that they are a mean over.

Those of a matrix of one row have its shape, and are means none the less.
"""


def reduced_axis(name: str, rank: int) -> int | None:
    """Return the axis over which a factored moment is a mean, for a leaf of `rank` axes; None for other state."""
    return rank - REDUCED[name] if name in REDUCED and rank > 1 else None


def state_shape(name: str, shape: torch.Size) -> torch.Size:
    """Return the shape of the state of that name of an entry of `shape`."""
    axis = reduced_axis(name, len(shape))
    return shape if axis is None else torch.Size([1 if dim == axis else size for dim, size in enumerate(shape)])


def factored_state(optimizer: object, leaf: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the factored moments of `leaf`.

    They lie entry by entry along all axes but one, along which they are means: a matrix of 8 rows and 5 columns has a moment
    (8, 1) whose rows follow the units of the rows, and a moment (1, 5) whose columns follow those of the columns.
    """
    if isinstance(optimizer, torch.optim.Adafactor):
        for name, value in optimizer.state.get(leaf, {}).items():
            if name in REDUCED and value.shape == state_shape(name, leaf.shape):
                yield name, value


def _quantised(value: Tensor, leaf: Tensor) -> bool:
    """Whether a value holds codes of blocks of entries: torchao's subclasses, or bytes as those of bitsandbytes."""
    if value.shape != leaf.shape or value.dim() == 0:
        return False
    return type(value).dequantize is not Tensor.dequantize or value.dtype in (torch.uint8, torch.int8)


def check_movable(optimizers: Iterable[object], leaves: Iterable[nn.Parameter]) -> None:
    """Check that the state of optimisers can follow a change of mask.

    Raises:
        InvalidValueError: state is quantised in blocks, whose entries would change their scale with their place.
    """
    leaves = list(leaves)
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            continue
        for leaf in leaves:
            for name, value in (optimizer.state.get(leaf) or {}).items():
                if isinstance(value, Tensor) and _quantised(value, leaf):
                    raise InvalidValueError(
                        f"{type(optimizer).__name__} keeps {name!r} quantised in blocks of entries, which cannot follow a"
                        " change of mask; use the optimiser with state of full precision, such as torch.optim.AdamW, or keep"
                        " ratio and mask by a criterion that does not learn: Magnitude()"
                    )
