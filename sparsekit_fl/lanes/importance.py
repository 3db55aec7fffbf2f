"""LaneImportance: learns the importance of the units of several clients at once, by the rule of the FedLPS paper.

The same arithmetic as `training/importance.py` over `sparsekit/training/unit_vectors.py`, with the lanes as first axis and
without a number that is read from the device: which units change is a gather whatever changes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsekit.criteria.magnitudes import own_slices
from sparsekit.errors import InvalidValueError
from sparsekit.graph.index import wide
from sparsekit.graph.mask import UnitMask
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit_fl.lanes.lane import LaneLearning, LaneWeights
from sparsekit_fl.lanes.places import LanePlaces
from sparsekit_fl.lanes.rows import Place, Rows

__all__ = ["LaneImportance", "PaperRule"]


@dataclass(frozen=True, eq=False, kw_only=True)
class PaperRule:
    """What one client learns by: gate gradients and the importance regulariser, on the importance of its units.

    Args:
        importance: float (J,), the start.
        lr: Learning rate of the importance.
        term: The regulariser.

    Source: Xue et al., ICDE 2025 (arXiv 2412.07216), learnable sparse training.
    """

    importance: Tensor
    lr: float
    term: ImportanceRegularizer

    @property
    def key(self) -> Hashable:
        """The regulariser; the learning rate is each client's own."""
        return self.term

    def learner(self, weights: LaneWeights, lanes: Sequence[LaneLearning]) -> LaneImportance:
        """Begin to learn; see `LaneLearning`."""
        return LaneImportance(weights, lanes, term=self.term)


class LaneImportance:
    """Importance of all units of several clients; their masks follow it after every step.

    Args:
        weights: Those of the lanes, loaded.
        lanes: What each of them learns, by `PaperRule`.
        term: The regulariser.
    """

    def __init__(self, weights: LaneWeights, lanes: Sequence[LaneLearning], *, term: ImportanceRegularizer) -> None:
        graph, device = weights.graph, weights.device
        self._weights = weights
        self._term = term
        importance, rates = _starts(lanes)
        self.importance = importance.clone().to(device)
        self._rates = rates.to(device)
        self.places = LanePlaces(graph, weights.masks, weights.own, device)
        self._sizes = [group.size for group in graph.groups.values()]
        self._pull = 2.0 * term.weights(self._sizes).to(self.importance)
        self._counts = {name: counts.to(device) for name, counts in self._kept_counts().items()}
        # The key of an entry in the graph, and its name among the weights; they differ for tied entries alone.
        table = {**weights.parameters, **weights.buffers}
        aliases = {alias: alias if alias in table else None for alias in graph.slices_of}
        self._name = {alias: name or self._tied(alias) for alias, name in aliases.items()}
        leaves = {key: weights.starts[0][key] for key in self._name if self._name[key] in weights.parameters}
        consumers: dict[tuple[str, int], set[str]] = {}
        producers: dict[tuple[str, int], set[str]] = {}
        for name, group in graph.groups.items():
            own = set(own_slices(group, leaves))
            for place, piece in enumerate(group.slices):
                if piece.name in leaves:
                    if piece.gated:
                        consumers.setdefault((piece.name, piece.dim), set()).add(name)
                    if place in own:
                        producers.setdefault((piece.name, piece.dim), set()).add(name)
        self._consumers = {place: consumers[place] for place in sorted(consumers)}
        self._producers = {place: producers[place] for place in sorted(producers)}
        self._dense = {key: self._stacked(key) for key in self._name}
        self._saved = {key: torch.zeros_like(self._dense[key]) for key, name in self._name.items() if name in weights.velocity}
        self._starts = {key: self._dense[key].clone() for key, name in self._name.items() if name in weights.anchors}
        """The dense weights of the round's start, to which entering units are pulled."""
        self._full = torch.zeros(len(importance), graph.units + 1, device=device, dtype=self.importance.dtype)
        self._still = torch.zeros(self.places.units.shape, device=device, dtype=self.importance.dtype)
        self._remember()

    def load(self, lanes: Sequence[LaneLearning]) -> None:
        """Begin again; see `LaneLearner`."""
        weights = self._weights
        importance, rates = _starts(lanes)
        self.importance.copy_(importance)
        self._rates.copy_(rates)
        self.places.load(weights.masks, weights.own)
        for name, counts in self._kept_counts().items():
            self._counts[name].copy_(counts)
        for key, dense in self._dense.items():
            dense.copy_(self._stacked(key))
        for saved in self._saved.values():
            saved.zero_()
        for key, start in self._starts.items():
            start.copy_(self._dense[key])
        self._remember()

    def tensors(self) -> list[Tensor]:
        """Return what a step changes; see `LaneLearner`."""
        positions = [tensor for axes in self.places.positions.values() for tensor in axes.values()]
        changing = [self.importance, self._full, self._still, self.places.units]
        return [*changing, *positions, *self._dense.values(), *self._saved.values()]

    def _kept_counts(self) -> dict[str, Tensor]:
        """Group name → int64 (lanes,)."""
        return {
            name: torch.tensor([int(mask[name].sum()) for mask in self._weights.own]) for name in self._weights.graph.groups
        }

    def _remember(self) -> None:
        """Note the magnitudes of all units, and which part of them does not lie in the narrow entries."""
        self._full[:, :-1] = self._dense_magnitudes(self._producers).to(self._full)
        self._still.copy_(self._full.gather(1, self.places.units) - self._narrow_magnitudes(slice(None)))

    def _tied(self, alias: str) -> str:
        weights = self._weights
        names = (*weights.parameters, *weights.buffers)
        return next(name for name in names if alias in weights.named({name: torch.empty(0)}))

    def _stacked(self, key: str) -> Tensor:
        """The dense copies of an entry, (lanes, …) with spare positions."""
        return torch.stack([self.places.spare(key, start[key].detach()) for start in self._weights.starts])

    def _dense_magnitudes(self, producers: Mapping[tuple[str, int], set[str]]) -> Tensor:
        """Σ |θ| over each unit's own parameters in the dense copies: float (lanes, J)."""
        graph = self._weights.graph
        found = self.importance.new_zeros(len(self.importance), graph.units)
        for (key, dim), groups in producers.items():
            along = _along(self._dense[key].abs(), dim)
            for group, piece in graph.slices_of[key]:
                if piece.dim == dim and group in groups:
                    first = self.places.offsets[group]
                    own = along[:, piece.index.to(along.device)].sum(-1)
                    found[:, first : first + own.shape[1]] += own.to(found)
        return found

    def _to_slots(self, places: Mapping[tuple[str, int], set[str]], values: Callable[[str], Tensor], rows: Place) -> Tensor:
        """Add up what each slot has of some entries, in a fixed order: float (rows, slots).

        Args:
            places: (key, axis) → the groups that count.
            values: Key → (rows, …).
            rows: The lanes.
        """
        found = self.importance.new_zeros(len(self.importance[rows]), self.places.slots)
        for (key, dim), groups in places.items():
            along = _along(values(key), dim)
            wanted = {self.places.spans[group].start for group in groups}
            for span, narrow, _ in self.places.tables[key, dim]:
                if span.start in wanted:
                    own = narrow[rows]
                    parts = along.gather(1, own.flatten(1)).view(own.shape)
                    found[:, span] += _sum(parts).to(found)
        return found

    def _narrow_magnitudes(self, rows: Place) -> Tensor:
        """Σ |θ| over the narrow entries of each slot: float (rows, slots)."""
        return self._to_slots(self._producers, lambda key: self._weights.parameters[self._name[key]][rows].abs(), rows)

    def magnitudes(self, rows: Place) -> Tensor:
        """Σ |θ| over each unit's own parameters, dropped units as they were when last kept: float (rows, J)."""
        present = self._narrow_magnitudes(rows) + self._still[rows]
        return self._full[rows].scatter(1, self.places.units[rows], present)[:, :-1]

    def targets(self, rows: Place) -> Tensor:
        """Return the targets of the regulariser at the present weights: float (rows, J)."""
        magnitudes = self.magnitudes(rows)
        if self._term.target == "standardised":
            magnitudes = torch.cat([_standardised(own) for own in magnitudes.split(self._sizes, 1)], 1)
        return torch.sigmoid(magnitudes)

    def update(self, rows: Rows, gradients: Mapping[str, Tensor]) -> None:
        """One gradient step on the importance; see `LaneLearner`."""
        weights, place = self._weights.parameters, rows.place

        def products(key: str) -> Tensor:
            weight, gradient = weights[self._name[key]][place], gradients.get(self._name[key])
            return torch.zeros_like(weight) if gradient is None else wide(weight) * wide(gradient)

        gates = self._to_slots(self._consumers, products, place)
        importance = self.importance[place]
        change = (importance - self.targets(place)).mul_(self._pull)
        wider = torch.cat([change, change.new_zeros(len(change), 1)], 1)
        change = wider.scatter_add_(1, self.places.units[place], gates)[:, :-1]
        rows.put(self.importance, importance - self._rates[place] * change)

    def follow(self, rows: Rows) -> None:
        """Give the lanes the units of largest importance; see `LaneLearner`."""
        place = rows.place
        before, units = self.places.units[place], self._chosen(place)
        if rows.active is not None:
            units = torch.where(rows.active.unsqueeze(1), units, before)
        changed = (units != before).any(1)
        if self._weights.device.type != "cpu" or self._weights.repeats:
            self._remask(place, units, changed)
            return
        few = changed.nonzero().reshape(-1)  # a CPU need not wait for this number
        if few.numel():
            self._remask(torch.arange(len(self.importance))[place][few], units[few], changed[few])

    def _chosen(self, rows: Place) -> Tensor:
        """The unit of each slot by the present importance; units that stay keep their slots: int64 (rows, slots).

        Example: slots hold units (0, 3), and 1 and 3 have most importance: (1, 3).
        """
        present = self.places.units[rows]
        found = []
        for name, scores in zip(self._weights.graph.groups, self.importance[rows].split(self._sizes, 1), strict=True):
            size, first = scores.shape[1], self.places.offsets[name]
            slots = present[:, self.places.spans[name]]
            order = torch.sort(scores, dim=1, descending=True, stable=True).indices
            rank = torch.empty_like(order).scatter_(1, order, torch.arange(size, device=order.device).expand_as(order))
            keep = rank < self._counts[name][rows].unsqueeze(1)
            spare = slots == self.places.total
            inside = (slots - first).masked_fill(spare, size)
            wider = torch.cat([keep, torch.ones_like(keep[:, :1])], 1)  # a slot without a unit stays so
            stays = wider.gather(1, inside)
            there = torch.zeros_like(wider).scatter_(1, inside, torch.ones_like(inside, dtype=torch.bool))[:, :-1]
            numbers = torch.arange(size, device=order.device).expand_as(keep)
            entering = numbers.masked_fill(there | ~keep, size).sort(1).values
            place = (~stays).cumsum(1) - 1
            new = entering.gather(1, place.clamp(min=0)) + first
            found.append(torch.where(stays, slots, new))
        return torch.cat(found, 1)

    def _remask(self, rows: Place, units: Tensor, changed: Tensor) -> None:
        """Save what leaves and fetch what enters. What lanes that have not `changed` have is written as it is."""
        weights, places = self._weights, self.places
        moved = changed.unsqueeze(1)
        full = self._full[rows]
        self._full[rows] = torch.where(moved, torch.cat([self.magnitudes(rows), full[:, -1:]], 1), full)
        # Copied: of lanes side by side these are views of the positions, which move now.
        before = {key: tuple(index.clone() for index in places.index(key, rows)) for key in self._name}
        places.move(rows, units)
        for key, name in self._name.items():
            table = weights.parameters if name in weights.parameters else weights.buffers
            after = places.index(key, rows)
            self._exchange(table[name], self._dense[key], rows, before[key], after)
            if key in self._saved:
                self._exchange(weights.velocity[name], self._saved[key], rows, before[key], after)
            if key in self._starts:
                weights.anchors[name][rows] = self._starts[key][after]
        still = self._full[rows].gather(1, units) - self._narrow_magnitudes(rows)
        self._still[rows] = torch.where(moved, still, self._still[rows])

    @staticmethod
    def _exchange(narrow: Tensor, dense: Tensor, rows: Place, before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> None:
        dense[before] = narrow[rows]
        narrow[rows] = dense[after]

    def mask(self, lane: int) -> UnitMask:
        """Return the mask that a lane has now."""
        return self.places.mask(lane)

    def state(self, lane: int) -> dict[str, Tensor]:
        """Return the narrow state of a lane; see `LaneLearner`."""
        if not bool(torch.isfinite(self.importance[lane]).all()):
            raise InvalidValueError("the importance became NaN or infinite; lower the learning rate of weights or importance")
        weights, keys = self._weights, {name: key for key, name in self._name.items()}
        own = {}
        for name, tensor in {**weights.parameters, **weights.buffers}.items():
            narrow = tensor[lane].detach()
            own[name] = (self.places.ascending(keys[name], lane, narrow) if name in keys else narrow.clone()).cpu()
        return weights.named(own)

    def memory(self, lane: int) -> dict[str, Tensor]:
        """Return the importance, float (J,)."""
        return {"importance": self.importance[lane].cpu().clone()}


def _starts(lanes: Sequence[LaneLearning]) -> tuple[Tensor, Tensor]:
    """The importance at the start, float (lanes, J), and its learning rate, float (lanes, 1)."""
    rules = [lane for lane in lanes if isinstance(lane, PaperRule)]
    assert len(rules) == len(lanes), "clients of different rules have different keys"
    importance = torch.stack([rule.importance.detach() for rule in rules])
    return importance, importance.new_tensor([[rule.lr] for rule in rules])


def _along(values: Tensor, dim: int) -> Tensor:
    """Sum (rows, …) over all axes but the first and the one that is `dim` without it: (rows, positions)."""
    values = wide(values)
    return values if values.dim() == 2 else _sum(values.movedim(dim + 1, 1).flatten(2))


def _sum(values: Tensor) -> Tensor:
    """Sum (rows, columns, many) over the last axis.

    As a product with ones: a plain sum rounds differently with the number of rows.
    """
    if values.shape[2] == 1:
        return values.squeeze(2)
    return torch.bmm(values, values.new_ones(len(values), values.shape[2], 1)).squeeze(2)


def _standardised(values: Tensor) -> Tensor:
    """Subtract the mean of each row and divide by its standard deviation: (rows, units)."""
    centred = values - _sum(values.unsqueeze(1)) / values.shape[1]
    variance = _sum((centred * centred).unsqueeze(1)) / values.shape[1]
    return centred / (variance.sqrt() + 1e-12)
