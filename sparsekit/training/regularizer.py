"""ImportanceRegularizer: pulls the importance of units towards a target that follows the weights."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from sparsekit.errors import InvalidValueError
from sparsekit.graph.index import wide

Target = Literal["standardised", "absolute"]


@dataclass(frozen=True, kw_only=True)
class ImportanceRegularizer:
    """The regulariser λ‖Q − σ(|θ|_J)‖², which pulls importance towards a target that follows the weights.

    Args:
        strength: λ in the paper.
        target: "standardised": sigmoid of the absolute sums after each group's mean and deviation are removed;
            "absolute": sigmoid of the absolute sums, as in the paper (close to 1 for every unit of a wide network).

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), importance regularisation term; the standardised target is ours.
    """

    strength: float = 1.0
    target: Target = "standardised"

    def __post_init__(self) -> None:
        if not 0.0 <= self.strength < float("inf"):
            raise InvalidValueError(f"strength must be a finite number >= 0, got {self.strength}")
        if self.target not in ("standardised", "absolute"):
            raise InvalidValueError(f"target must be 'standardised' or 'absolute', got {self.target!r}")

    def targets(self, magnitudes: Tensor, sizes: Sequence[int]) -> Tensor:
        """Return the target of every unit, a constant for the gradient.

        Args:
            magnitudes: float (J,), Σ |θ| of each unit, groups one after the other.
            sizes: Units of each group.

        Returns:
            float (J,) in [0, 1], float32 at least.
        """
        if self.target == "standardised":
            magnitudes = standardise(magnitudes, *unit_tables(tuple(sizes), magnitudes.device))
        return torch.sigmoid(wide(magnitudes))


# Made once: a table that is made on the CPU would cross to the device of the model in every step.
@lru_cache(maxsize=256)
def unit_tables(sizes: tuple[int, ...], device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Return the group of each unit, int64 (J,), and the size of each group, int64 (groups,)."""
    with torch.inference_mode(False):
        counts = torch.tensor(sizes, dtype=torch.long)
        return torch.arange(len(sizes)).repeat_interleave(counts).to(device), counts.to(device)


def standardise(values: Tensor, group_of: Tensor, sizes: Tensor) -> Tensor:
    """Subtract each group's mean and divide by its standard deviation.

    Args:
        values: float (J,).
        group_of: int64 (J,), the group of each value, from 0.
        sizes: int64 (groups,), the number of values in each.

    Returns:
        float (J,), float32 at least; 0 throughout a group whose values are all equal.
    """
    values = wide(values)
    counts = sizes.to(values.dtype)
    mean = values.new_zeros(sizes.numel()).index_add_(0, group_of, values) / counts
    centred = values - mean[group_of]
    variance = values.new_zeros(sizes.numel()).index_add_(0, group_of, centred * centred) / counts
    return centred / (variance.sqrt() + 1e-12)[group_of]
