"""MovingAverage: the exponential moving average of a model whose mask changes while it trains."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.index import wide
from sparsekit.surgery.compaction import compact_state
from sparsekit.training.learnable import LearnableMask


class MovingAverage:
    """The average of the weights of a learnable mask over its steps, unit by unit.

    It has the shapes of the dense model, so each unit is averaged with itself. While a unit is dropped, its weights do not
    change, and its average approaches them. Averages are held in float32 at least; buffers
    (the statistics of norms) are copied, not averaged.

    ```python
    average = MovingAverage(masked, decay=0.999)
    for x, y in loader:
        ...
        optimizer.step()
        average.update()
    small = average.compact()
    ```

    Args:
        masked: The model; its present weights are the first average.
        decay: Share of the average that an update keeps, in [0, 1).

    Raises:
        InvalidValueError: a decay outside [0, 1).
    """

    def __init__(self, masked: LearnableMask, decay: float = 0.999) -> None:
        if not 0.0 <= decay < 1.0:
            raise InvalidValueError(
                f"decay must be in [0, 1), got {decay}; it is the share of the average that an update keeps, 0.999 is usual"
            )
        self.masked = masked
        self.decay = decay
        self._averaged = {name for name, _ in masked.model.named_parameters(remove_duplicate=False)}
        # A step of 1/1000 vanishes in bfloat16.
        self._average = {name: wide(tensor).clone() for name, tensor in masked.dense_state().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights; call it after each step of the optimiser."""
        for name, tensor in self.masked.dense_state().items():
            average = self._average[name] = self._average[name].to(tensor.device)
            if name in self._averaged and average.is_floating_point():
                average.lerp_(tensor.to(average.dtype), 1.0 - self.decay)
            else:
                average.copy_(tensor)

    def dense_state(self) -> dict[str, Tensor]:
        """Return the averaged dense state under the model's own keys, in the dtypes of the model: copies."""
        like = self.masked.dense_state()
        return {name: self._average[name].to(like[name], copy=True) for name in like}

    def copy_to(self, masked: LearnableMask) -> None:
        """Load the average into a learnable mask of the same model, which keeps its mask and importance.

        To score the average while training goes on, use `compact`, or copy to a deep copy of the mask.
        """
        masked.load_state_dict({**masked.state_dict(), **self.dense_state()})

    def compact(self) -> nn.Module:
        """Return the average as a plain, narrow module under the present mask; a copy."""
        small = self.masked.compact()
        small.load_state_dict(compact_state(self.dense_state(), self.masked.graph, self.masked.unit_mask()))
        return small

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages as they are held; copies."""
        return {name: tensor.clone() for name, tensor in self._average.items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from averages that `state_dict` returned.

        Raises:
            ForeignMaskError: another model's averages.
        """
        shapes = {name: tensor.shape for name, tensor in self._average.items()}
        if {name: tensor.shape for name, tensor in state.items()} != shapes:
            raise ForeignMaskError("the averages belong to another model; pass what state_dict() of its MovingAverage returned")
        self._average = {name: tensor.detach().to(self._average[name], copy=True) for name, tensor in state.items()}
