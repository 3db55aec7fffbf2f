"""Evidence: what training passes say about the loss if a kept unit went, or a dropped one came.

All values are vectors over all units, float (J,), in the order of the graph's groups. One sample is one step of the optimiser:
the mean over its batch of B examples.

- A kept unit has the gradient g of its gate. To remove it moves the gate from 1 to 0 and costs −E[g] + ½ E[g²] nats, where the
  second moment of one example's g, about B times the variance of a sample, stands for the curvature (the Fisher information).
- A dropped unit may come in two ways. *As it was*, with its own outgoing weights: the gate moves from 0 to 1 and gains
  −E[g] − ½ E[g²]. *Afresh*, with outgoing weights of zero, which then learn: along a direction d of those weights, the best
  step gains ½ E[p]² / E[p²], where p is the gradient of one example along d. The direction is the sum of the gradients of all
  earlier samples, so that the noise of a sample is not counted as its own gain. This one has no unit of its own: it is the
  same for scaled losses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitSlice, group_order
from sparsekit.graph.index import along, wide
from sparsekit.graph.mask import UnitMask

__all__ = ["Evidence", "gated_slices"]

_KINDS = ("kept", "as_it_was", "afresh")


def gated_slices(graph: UnitGraph, group: str) -> list[tuple[int, UnitSlice]]:
    """(number of the slice in its group, slice) of the entries that read the units of `group`."""
    return [(i, piece) for i, piece in enumerate(graph.groups[group].slices) if piece.gated]


class Evidence:
    """Counts, sums and sums of squares per unit.

    Args:
        graph: The units.
        like: A float vector on the device of the importance.
    """

    def __init__(self, graph: UnitGraph, like: Tensor) -> None:
        self.graph = graph
        self.batch = 0.0
        """Examples in a sample, on average; of one rank where several train together."""
        self.ranks = 1
        """Processes whose gradients are averaged."""
        self._samples = 0
        self._moments = {kind: like.detach().new_zeros(3, graph.units) for kind in _KINDS}
        self._offsets = group_order(graph.groups.values())
        self._directions: dict[str, Tensor] = {}

    def span(self, group: str) -> slice:
        """Where the units of `group` lie in the vectors."""
        return slice(self._offsets[group], self._offsets[group] + self.graph.groups[group].size)

    def examples(self, count: int) -> None:
        """Take note of the number of examples in a sample."""
        self._samples += 1
        self.batch += (count - self.batch) / self._samples

    def add_kept(self, gradient: Tensor) -> None:
        """Add a sample of the gates' gradients, float (J,); only those of kept units are read later."""
        count, total, squares = self._moments["kept"]
        count.add_(1.0)
        total.add_(gradient)
        squares.addcmul_(gradient, gradient)

    def add_dropped(
        self, group: str, gradients: Mapping[str, Tensor], weights: Callable[[str], Tensor], mask: UnitMask, scale: float
    ) -> None:
        """Add a sample of the dropped units of `group`.

        Args:
            group: The group.
            gradients: State-dict key → gradient of the gated entry, dense.
            weights: Returns the dense entry under a key; only entries of dropped units are read.
            mask: What is kept.
            scale: What the loss was multiplied with before its backward pass.
        """
        size, device = self.graph.groups[group].size, self._moments["kept"].device
        own, dot, norm = (self._moments["kept"].new_zeros(size) for _ in range(3))
        for number, piece in gated_slices(self.graph, group):
            gradient = wide(gradients[piece.name]).to(own.dtype) / scale
            for other, at in self.graph.slices_of[piece.name]:
                if at.gated and at.dim != piece.dim:  # entries that dropped units of another group read come with those
                    gradient = gradient * along(_positions(at, mask[other], gradient), at.dim, gradient.dim())
            key = f"{group}.{number}"
            direction = self._directions.get(key)
            own += _per_unit(gradient * wide(weights(piece.name)), piece).to(device)
            if direction is not None:
                dot += _per_unit(gradient * direction, piece).to(device)
                norm += _per_unit(direction.square(), piece).to(device)
            self._directions[key] = gradient.clone() if direction is None else direction.add_(gradient)
        dropped = (~mask[group]).to(device)
        self._add("as_it_was", group, own, dropped)
        seen = dropped & (norm > 0)
        self._add("afresh", group, dot / norm.clamp_min(torch.finfo(norm.dtype).tiny).sqrt(), seen)

    def _add(self, kind: str, group: str, values: Tensor, where: Tensor) -> None:
        values = torch.where(where, values, 0.0)
        moments = self._moments[kind][:, self.span(group)]
        moments += torch.stack([where.to(values.dtype), values, values.square()])

    def _mean_and_variance(self, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        count, total, squares = self._moments[kind]
        mean = total / count.clamp_min(1.0)
        variance = (squares - total * mean).clamp_min(0.0) / (count - 1.0).clamp_min(1.0)
        return mean, variance, count

    def removal(self) -> tuple[Tensor, Tensor]:
        """The cost of removing each kept unit and its standard error, in nats: float (J,) each; infinite where unknown."""
        mean, variance, count = self._mean_and_variance("kept")
        known = count >= 2
        cost = torch.where(known, 0.5 * self.batch * self.ranks * variance - mean, torch.inf)
        return cost, torch.where(known, (variance / count.clamp_min(1.0)).sqrt(), torch.inf)

    def insertion(self, errors: float) -> tuple[Tensor, Tensor]:
        """The gain of each dropped unit, in nats, less `errors` standard errors: float (J,); minus infinity where unknown.

        Returns:
            The gain of the better way in, and bool (J,): whether that is as it was.
        """
        tiny = torch.finfo(self._moments["kept"].dtype).tiny
        mean, variance, count = self._mean_and_variance("as_it_was")
        gain = -mean - 0.5 * self.batch * variance - errors * (variance / count.clamp_min(1.0)).sqrt()
        as_it_was = torch.where(count >= 3, gain, -torch.inf)
        mean, variance, count = self._mean_and_variance("afresh")
        sure = (mean - errors * (variance / count.clamp_min(1.0)).sqrt()).clamp_min(0.0)
        gain = 0.5 * sure.square() / (self.batch * variance).clamp_min(tiny)
        afresh = torch.where((count >= 3) & (variance > 0), gain, -torch.inf)
        return torch.maximum(as_it_was, afresh), as_it_was > afresh

    def pool(self) -> None:
        """Add up what all ranks have seen of dropped units; the gates of kept ones are averaged over the ranks already."""
        self.ranks = torch.distributed.get_world_size()
        for kind in ("as_it_was", "afresh"):
            own = self._moments[kind].clone()
            torch.distributed.all_reduce(own)
            self._moments[kind] = own

    def forget(self, groups: Iterable[str]) -> None:
        """Forget everything about the units of `groups`, whose mask changed."""
        for group in groups:
            for moments in self._moments.values():
                moments[:, self.span(group)] = 0.0
            for number, _ in gated_slices(self.graph, group):
                self._directions.pop(f"{group}.{number}", None)

    def forget_units(self, units: Tensor) -> None:
        """Forget the sums of some units, int64 places in the vectors over all units, which came or went."""
        for moments in self._moments.values():
            moments.index_fill_(1, units.to(moments.device), 0.0)

    def fade(self, factor: float) -> None:
        """Multiply the weight of everything seen so far; of what all ranks have seen, each goes on with its part."""
        for kind, moments in self._moments.items():
            moments.mul_(factor if kind == "kept" else factor / self.ranks)

    def state(self) -> dict[str, Tensor]:
        """What was seen, to be saved."""
        size = torch.tensor([self.batch, self._samples], dtype=torch.float64)
        directions = {f"direction.{key}": value.clone() for key, value in self._directions.items()}
        return {**{kind: value.clone() for kind, value in self._moments.items()}, "examples": size, **directions}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self.batch, self._samples = float(state["examples"][0]), int(state["examples"][1])
        for kind, own in self._moments.items():
            own.copy_(state[kind])
        prefix = "direction."
        self._directions = {
            key.removeprefix(prefix): value.to(self._moments["kept"], copy=True)
            for key, value in state.items()
            if key.startswith(prefix)
        }

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move every tensor to another device; the dtype stays."""
        dtype = self._moments["kept"].dtype
        self._moments = {kind: function(value).to(dtype) for kind, value in self._moments.items()}
        self._directions = {key: function(value).to(dtype) for key, value in self._directions.items()}


def _per_unit(entries: Tensor, piece: UnitSlice) -> Tensor:
    """Sum `entries` over all positions of each unit of a slice: float (units,)."""
    other = [dim for dim in range(entries.dim()) if dim != piece.dim]
    sums = entries.sum(other) if other else entries
    return sums[piece.index.to(sums.device)].sum(1)


def _positions(piece: UnitSlice, keep: Tensor, like: Tensor) -> Tensor:
    """1 at the kept positions along the axis of a slice, 0 at those of its dropped units."""
    kept = like.new_ones(like.shape[piece.dim])
    kept[piece.index[~keep.cpu()].reshape(-1).to(like.device)] = 0.0
    return kept
