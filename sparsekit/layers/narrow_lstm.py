"""NarrowProjectionLSTM: `nn.LSTM` with a projection that is no narrower than the cells, as is left when most cells go."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit._torch import flat_weights, refresh_flat_weights, set_flat_weights

__all__ = ["NarrowProjectionLSTM"]


class NarrowProjectionLSTM(nn.LSTM):
    """What `nn.LSTM` becomes when at most `proj_size` cells are left: the same parameters, names and arguments.

    torch tells a projection by states and cells of different sizes, and cuDNN wants more cells than projected units. So the
    layer runs with cells to spare, whose weights are zero: they stay at zero and reach nothing.
    """

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:
        """Run, as `nn.LSTM.forward` does."""
        cells = self.hidden_size
        spare = self.proj_size + 1 - cells
        if hx is not None:
            hx = (hx[0], F.pad(hx[1], (0, spare)))
        refresh_flat_weights(self)
        weights = flat_weights(self)
        try:
            self.hidden_size = cells + spare
            set_flat_weights(self, [self._widened(name, getattr(self, name), cells, spare) for name in weights])
            output, (state, cell) = super().forward(input, hx)
        finally:
            self.hidden_size = cells
            set_flat_weights(self, weights.values())
        return output, (state, cell[..., :cells])

    @staticmethod
    def _widened(name: str, weight: Tensor, cells: int, spare: int) -> Tensor:
        if name.startswith("weight_hr"):
            return F.pad(weight, (0, spare))
        gates = weight.unflatten(0, (4, cells))
        return F.pad(gates, (0, 0, 0, spare) if weight.dim() == 2 else (0, spare)).flatten(0, 1)
