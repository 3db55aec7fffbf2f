"""MovingAverage: the exponential moving average of a model whose mask changes while it trains."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsekit._torch import foreach_lerp_
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.index import wide
from sparsekit.surgery.compaction import compact_state, expand
from sparsekit.training.learnable import LearnableMask


class MovingAverage:
    """The average of the weights of a learnable mask over its steps, unit by unit.

    A unit that enters the mask begins with its present weights as its average, and a dropped unit has no average but its
    weights. Averages are held in float32 at least. Buffers (the statistics of norms) are those of the model, not averages.

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
        self.load_state_dict(masked.dense_state())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from averages that `state_dict` returned.

        Raises:
            ForeignMaskError: another model's averages.
        """
        masked = self.masked
        if {name: tensor.shape for name, tensor in state.items()} != masked.graph.shapes:
            raise ForeignMaskError("the averages belong to another model; pass what state_dict() of its MovingAverage returned")
        self._mask, leaves = masked.narrow_model.mask, masked.named_weights()
        # A step of 1/1000 vanishes in bfloat16.
        narrow = compact_state({name: wide(tensor) for name, tensor in state.items()}, masked.graph, self._mask)
        self._narrow = {name: narrow[name].to(leaf.device) for name, leaf in leaves.items()}

    def _follow(self) -> None:
        leaves = self.masked.named_weights()
        moved = any(leaf.device != self._narrow[name].device for name, leaf in leaves.items())
        if moved or self.masked.narrow_model.mask is not self._mask:
            self.load_state_dict(self.state_dict())

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights; call it after each step of the optimiser."""
        self._follow()
        present = [wide(leaf) for leaf in self.masked.named_weights().values()]
        foreach_lerp_(list(self._narrow.values()), present, 1.0 - self.decay)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages as they are held, the weights of dropped units, and the buffers; copies."""
        dense = {name: wide(tensor) for name, tensor in self.masked.dense_state().items()}
        small = compact_state(dense, self.masked.graph, self._mask)
        for _, names, leaf in self.masked.narrow_model.tensors():
            if isinstance(leaf, nn.Parameter):
                own = next(self._narrow[name] for name in names if name in self._narrow)
                small.update(dict.fromkeys(names, own))
        return expand(small, self.masked.graph, self._mask, into=dense)

    def dense_state(self) -> dict[str, Tensor]:
        """Return the averaged dense state under the model's own keys, in the dtypes of the model: copies."""
        like = self.masked.dense_state()
        return {name: tensor.to(like[name]) for name, tensor in self.state_dict().items()}

    def copy_to(self, masked: LearnableMask) -> None:
        """Load the average into a learnable mask of the same model, which keeps its mask and importance.

        To score the average while training continues, use `compact`, or copy to a deep copy of the mask.
        """
        masked.load_state_dict({**masked.state_dict(), **self.dense_state()})

    def compact(self) -> nn.Module:
        """Return the average as a plain, narrow module under the present mask; a copy."""
        small = self.masked.compact()
        self._follow()
        small.load_state_dict(compact_state(self.dense_state(), self.masked.graph, self._mask))
        return small
