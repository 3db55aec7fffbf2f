"""LaneStack: the weights of several clients under each other, padded with zeros to one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import along
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit_fl.lanes.lane import Lane
from sparsekit_fl.lanes.model import LaneModel
from sparsekit_fl.wire.kept import Kept, mask_state

__all__ = ["LaneStack", "padded"]


def padded(graph: UnitGraph, mask: UnitMask | None, counts: Mapping[str, int]) -> UnitMask:
    """Return a mask that keeps what `mask` keeps, and of every group the first dropped units up to `counts`.

    Units of the padding get zero weights and no gradient, which is what the graph's gates promise to be no unit at all.
    """
    if mask is None:
        return UnitMask.full(graph)
    wider: dict[str, Tensor] = {}
    for name, keep in mask.items():
        missing = counts[name] - int(keep.sum())
        wider[name] = keep.clone()
        if missing:
            wider[name][(~keep).nonzero().reshape(-1)[:missing]] = True
    return UnitMask(wider)


class LaneStack:
    """Weights, and what follows them, of several clients.

    Args:
        graph: The units of the dense model.
        model: The module of the lanes, of the shapes that the padded masks keep.
        counts: Group name → number of units that each lane holds, padding included.
        device: Where the lanes train.
        repeats: Whether steps are replayed there; see `LaneWeights`.
    """

    def __init__(self, graph: UnitGraph, model: LaneModel, counts: Mapping[str, int], device: str, *, repeats: bool) -> None:
        self.graph = graph
        self.model = model
        self.counts = dict(counts)
        self.device = torch.device(device)
        self.repeats = repeats
        self.version = 0
        """Counts how often a tensor took the place of another: what was recorded before knows the old one."""
        self.lanes: Sequence[Lane[object]] = ()
        self.masks: Sequence[UnitMask] = ()
        self.own: Sequence[UnitMask] = ()
        self.starts: Sequence[StateDict] = ()
        self.parameters: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.velocity: dict[str, Tensor] = {}
        self.anchors: dict[str, Tensor] = {}
        self.kept: dict[str, Tensor] = {}
        """Name → (lanes, …), 1 where an entry trains; only names of which a lane holds padding or frozen entries."""
        self.divisors: Tensor | None = None
        self._options: dict[str, Tensor] = {}

    @property
    def rates(self) -> Tensor:
        """The learning rate of each lane, float (lanes,)."""
        return self._options["lr"]

    def load(self, lanes: Sequence[Lane[object]]) -> None:
        """Take the clients' weights. Tensors of the right shape that are there already are written over.

        Args:
            lanes: The clients, of equal keys.
        """
        first = lanes[0]
        self.lanes = lanes
        self.masks = [padded(self.graph, lane.mask, self.counts) for lane in lanes]
        self.own = [UnitMask.full(self.graph) if lane.mask is None else lane.mask for lane in lanes]
        self.starts = [lane.start for lane in lanes]
        narrow = [self._narrow(lane, mask) for lane, mask in zip(lanes, self.masks, strict=True)]
        real = [self._real(lane, mask) for lane, mask in zip(lanes, self.masks, strict=True)]
        for name in self.model.parameters:
            self._write(self.parameters, name, [own[name] for own in narrow])
            limits = [own.get(name) for own in real]
            if any(limit is not None for limit in limits):
                like = narrow[0][name]
                self._write(self.kept, name, [torch.ones_like(like) if limit is None else limit.to(like) for limit in limits])
                self.parameters[name].mul_(self.kept[name])
            elif name in self.kept and self.repeats:
                self.kept[name].fill_(1.0)  # a recorded step multiplies by it
            else:
                self.kept.pop(name, None)
        for name in self.model.buffers:
            self._write(self.buffers, name, [own[name] for own in narrow])
        trained = [name for name, trains in self.model.parameters.items() if trains]
        for name in trained:
            if first.training.momentum:
                self._write(self.velocity, name, [torch.zeros_like(self.parameters[name][0])] * len(narrow))
            if first.pull:
                self._write(self.anchors, name, self.parameters[name].unbind(0))
        if first.divided:
            self._write(self._options, "divisor", self._numbers([lane.divisor for lane in lanes]))
            self.divisors = self._options["divisor"]
        self._write(self._options, "lr", self._numbers([lane.training.lr for lane in lanes]))

    def _numbers(self, values: Sequence[float]) -> tuple[Tensor, ...]:
        """One number per lane, in the type of the weights."""
        like = next((tensor for tensor in self.parameters.values() if tensor.is_floating_point()), torch.zeros(()))
        return like.new_tensor(values).unbind(0)

    def tensors(self) -> list[Tensor]:
        """Return what a step may change."""
        tables = (self.parameters, self.buffers, self.velocity, self.anchors)
        return [tensor for table in tables for tensor in table.values()]

    def _write(self, table: dict[str, Tensor], name: str, tensors: Sequence[Tensor]) -> None:
        # Side by side in memory whatever their strides were, as a narrow model holds them.
        if name in table and table[name].shape == (len(tensors), *tensors[0].shape):
            for place, tensor in zip(table[name], tensors, strict=True):
                place.copy_(tensor)
        else:
            table[name] = torch.stack(list(tensors))
            self.version += 1

    def _narrow(self, lane: Lane[object], mask: UnitMask) -> dict[str, Tensor]:
        start: StateDict = lane.start if lane.frozen is None else mask_state(self.graph, lane.frozen, lane.start)
        kept = Kept(self.graph, mask)
        names = [*self.model.parameters, *self.model.buffers]
        return {name: kept.gather(name, start[name].detach()).to(self.device) for name in names}

    def _real(self, lane: Lane[object], mask: UnitMask) -> dict[str, Tensor]:
        """Name → 1 where an entry of the padded shape trains, for names in which some do not."""
        if lane.frozen is not None:
            return {name: lane.frozen[name].to(self.device) for name in self.model.parameters if name in lane.frozen}
        if lane.mask is None or lane.mask == mask:
            return {}
        found: dict[str, Tensor] = {}
        inside = self.graph.kept_indices(lane.mask)
        for name, axes in self.graph.kept_indices(mask).items():
            for dim, positions in axes.items():
                own = torch.isin(positions, inside[name][dim])
                if not bool(own.all()):
                    shape = tuple(self._size(name, axes, axis) for axis in range(len(self.graph.shapes[name])))
                    limit = found.get(name, torch.ones(shape, dtype=torch.bool))
                    found[name] = limit & along(own, dim, len(shape))
        return {name: limit.to(self.device) for name, limit in found.items()}

    def _size(self, name: str, axes: Mapping[int, Tensor], axis: int) -> int:
        return axes[axis].numel() if axis in axes else self.graph.shapes[name][axis]

    def read(self, lane: int) -> dict[str, Tensor]:
        """Return the narrow state of a lane under its own mask, under the names of the model, on the CPU."""
        own: dict[str, Tensor] = {}
        mask, wide = self.lanes[lane].mask, self.masks[lane]
        cut = {} if mask is None or mask == wide else self.graph.kept_indices(mask)
        around = self.graph.kept_indices(wide) if cut else {}
        for name in (*self.model.parameters, *self.model.buffers):
            tensor = self.of(name)[lane].detach().cpu()
            for dim, positions in cut.get(name, {}).items():
                tensor = tensor.index_select(dim, torch.searchsorted(around[name][dim], positions))
            own[name] = tensor.clone()
        return self.named(own)

    def of(self, name: str) -> Tensor:
        """Return the stacked tensor of a parameter or buffer."""
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def named(self, own: StateDict) -> dict[str, Tensor]:
        """Return entries under all keys of the model's state, tied ones under each, in its order."""
        return {name: own[self.model.names[name]] for name in self.graph.shapes if self.model.names.get(name) in own}
