"""MovingAverage: the exponential moving average of a model whose mask changes while it trains."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from sparsekit._torch import foreach_lerp_
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.index import cut_axes, gather, scatter_, wide
from sparsekit.surgery.compaction import compact_state
from sparsekit.training.learnable import LearnableMask


class MovingAverage:
    """The average of the weights of a learnable mask over its steps, unit by unit.

    It has the shapes of the dense model, so each unit is averaged with itself. While a unit is dropped, its weights do not
    change, and its average approaches them. An update averages the narrow weights alone; the entries of dropped units are
    brought up to date when the mask changes. Averages are held in float32 at least. Buffers (the statistics of norms) are those
    of the model, not averages.

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
        # A step of 1/1000 vanishes in bfloat16.
        self._begin({name: wide(tensor) for name, tensor in masked.dense_state().items()})

    def _begin(self, averages: Mapping[str, Tensor]) -> None:
        """Hold what the mask keeps of dense averages as narrow tensors: state-dict key → float."""
        narrow = self.masked.narrow_model
        self._version, self._updates = narrow.version, 0
        # The weights of dropped units; `load` puts another mapping in place of this one.
        self._weights = narrow.dense_view()
        self._leaves = {key: (names, leaf) for key, names, leaf in narrow.tensors() if isinstance(leaf, nn.Parameter)}
        self._cuts = {key: cut_axes(narrow.graph.shapes[key], narrow.positions(key)) for key in self._leaves}
        dense = {key: averages[key].detach().to(leaf.device) for key, (_, leaf) in self._leaves.items()}
        self._narrow = {key: gather(average, self._cuts[key]).clone() for key, average in dense.items()}
        self._dense = {key: average for key, average in dense.items() if self._cuts[key]}

    def _averages(self) -> dict[str, Tensor]:
        """The dense averages now: key → float, new tensors."""
        found = {}
        for key, average in self._narrow.items():
            cut = self._cuts[key]
            if not cut:
                found[key] = average.clone()
                continue
            # After n updates, the average a of an entry of weight w has become w + decayⁿ (a − w).
            weights = self._weights[key].detach().to(average)
            found[key] = scatter_(average, weights.lerp(self._dense[key].to(average), self.decay**self._updates), cut)
        return found

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights; call it after each step of the optimiser."""
        moved = any(leaf.device != self._narrow[key].device for key, (_, leaf) in self._leaves.items())
        if moved or self.masked.narrow_model.version != self._version:
            self._begin(self._averages())
        present = [wide(leaf.detach()) for _, leaf in self._leaves.values()]
        foreach_lerp_(list(self._narrow.values()), present, 1.0 - self.decay)
        self._updates += 1

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages as they are held, and the buffers; copies."""
        state = {name: wide(tensor) for name, tensor in self.masked.dense_state().items()}
        for key, average in self._averages().items():
            state.update(dict.fromkeys(self._leaves[key][0], average))
        return state

    def dense_state(self) -> dict[str, Tensor]:
        """Return the averaged dense state under the model's own keys, in the dtypes of the model: copies."""
        like = self.masked.dense_state()
        return {name: tensor.to(like[name], copy=True) for name, tensor in self.state_dict().items()}

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

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from averages that `state_dict` returned.

        Raises:
            ForeignMaskError: another model's averages.
        """
        shapes = self.masked.graph.shapes
        if {name: tensor.shape for name, tensor in state.items()} != shapes:
            raise ForeignMaskError("the averages belong to another model; pass what state_dict() of its MovingAverage returned")
        self._begin({name: wide(tensor) for name, tensor in state.items()})
