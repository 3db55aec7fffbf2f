"""Masked dense training, written down plainly: the truth that every cell is compared with.

The model is dense, with zeros for the entries of dropped units. A step hands the kept entries, their gradients and their
optimiser state to an optimiser of its own, and writes back what it makes of them; so nothing of a dropped unit changes.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from sparsekit import UnitGraph, UnitMask

__all__ = ["Reference", "mask_of"]

Make = Callable[[list[nn.Parameter], nn.Parameter], torch.optim.Optimizer]
"""(weights, importance) → an optimiser over both."""


def mask_of(graph: UnitGraph, scores: Tensor, ratio: float) -> UnitMask:
    """Keep the largest scores of each group: at least one, ties to the lower index."""
    masks, start = {}, 0
    for name, group in graph.groups.items():
        part = scores[start : start + group.size].tolist()
        count = max(1, -int(-ratio * group.size // 1))
        kept = sorted(range(group.size), key=lambda unit: (-part[unit], unit))[:count]
        masks[name] = torch.zeros(group.size, dtype=torch.bool).index_fill(0, torch.tensor(kept), True)
        start += group.size
    return UnitMask(masks)


class Reference:
    """Masked dense training of one model.

    Args:
        model: Dense; changed.
        graph: Its units.
        scores: float (J,), the importance; changed.
        make: Makes the optimiser, of plain loops.
        lasts: Keep one optimiser over the first mask, for optimisers that cannot follow another.
    """

    def __init__(self, model: nn.Module, graph: UnitGraph, scores: Tensor, make: Make, *, lasts: bool) -> None:
        self.model = model
        self.graph = graph
        self.scores = scores.clone()
        self.ratio = 0.5
        self._make = make
        self._weights = {name: parameter.data for name, parameter in model.named_parameters()}
        self._state: dict[str, dict[str, Any]] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._lasting: Any = None
        self._lasts = lasts

    def _kept(self, mask: UnitMask, name: str) -> tuple[Tensor, ...]:
        """Open mesh of the kept positions of an entry, from the index table of the graph."""
        shape = self._weights[name].shape
        kept = [torch.ones(size, dtype=torch.bool) for size in shape]
        for group_name, group in self.graph.groups.items():
            for piece in group.slices:
                if piece.name == name:
                    kept[piece.dim][piece.index[~mask[group_name]].reshape(-1)] = False
        device = self._weights[name].device
        return torch.meshgrid(*(axis.nonzero().reshape(-1).to(device) for axis in kept), indexing="ij")

    def gradients(self, loss: Callable[[Callable[..., Tensor]], Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients of the weights, dense, and of the importance: Σ gradient · weight over the entries that read a unit."""
        mask = mask_of(self.graph, self.scores, self.ratio)
        gated = {}
        for name, weight in self._weights.items():
            gated[name] = torch.zeros_like(weight)
            gated[name][self._kept(mask, name)] = weight[self._kept(mask, name)]
            gated[name].requires_grad_()
        loss(lambda *args: functional_call(self.model, gated, args)).backward()
        of_weights = {name: tensor.grad for name, tensor in gated.items()}
        of_scores, start = torch.zeros_like(self.scores), 0
        for group_name, group in self.graph.groups.items():
            for piece in group.slices:
                if piece.gated:
                    product = (of_weights[piece.name].double() * gated[piece.name].detach().double()).transpose(0, piece.dim)
                    sums = product.flatten(1).sum(1) if product.dim() > 1 else product
                    values = sums[piece.index.to(sums.device)].sum(1) * mask[group_name].to(sums.device)
                    of_scores[start : start + group.size] += values.to(of_scores)
            start += group.size
        return of_weights, of_scores

    def step(self, loss: Callable[[Callable[..., Tensor]], Tensor]) -> None:
        """One step under the mask of the present importance."""
        mask = mask_of(self.graph, self.scores, self.ratio)
        places = {name: self._kept(mask, name) for name in self._weights}
        if self._lasting is None:
            weights = {name: nn.Parameter(self._weights[name][places[name]]) for name in self._weights}
            importance = nn.Parameter(self.scores)
            optimizer = self._make(list(weights.values()), importance)
        else:
            weights, importance, optimizer = self._lasting
        if self._lasts:
            self._lasting = weights, importance, optimizer
        else:
            self._hand_out(optimizer, weights, importance, places)

        def evaluate() -> Tensor:
            with torch.no_grad():
                for name, weight in weights.items():
                    self._weights[name][places[name]] = weight
                self.scores.copy_(importance)
            with torch.enable_grad():
                of_weights, of_scores = self.gradients(loss)
            for name, weight in weights.items():
                weight.grad = of_weights[name][places[name]]
            importance.grad = of_scores
            with torch.no_grad():
                return loss(lambda *args: functional_call(self.model, self._gated(places), args))

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(evaluate)
        else:
            evaluate()
            optimizer.step()
        with torch.no_grad():
            for name, weight in weights.items():
                self._weights[name][places[name]] = weight
            self.scores.copy_(importance)
        if not self._lasts:
            self._take_back(optimizer, weights, importance, places)

    def _gated(self, places: dict[str, tuple[Tensor, ...]]) -> dict[str, Tensor]:
        gated = {name: torch.zeros_like(weight) for name, weight in self._weights.items()}
        for name, weight in self._weights.items():
            gated[name][places[name]] = weight[places[name]]
        return gated

    def _hand_out(self, optimizer: Any, weights: dict[str, nn.Parameter], importance: nn.Parameter, places: Any) -> None:
        if "importance" in self._state:
            optimizer.state[importance].update(self._state["importance"])
        for name, leaf in weights.items():
            if name not in self._state or (self._factored(name) and leaf.shape != self._shapes[name]):
                continue  # factored moments start anew where the shape changes
            for kind, value in self._state[name].items():
                place = self._place(kind, places[name])
                optimizer.state[leaf][kind] = value if place is None or value.dim() == 0 else value[place]

    def _take_back(self, optimizer: Any, weights: dict[str, nn.Parameter], importance: nn.Parameter, places: Any) -> None:
        self._state["importance"] = dict(optimizer.state[importance])
        for name, leaf in weights.items():
            self._shapes[name] = leaf.shape
            dense = self._state.setdefault(name, {})
            for kind, value in optimizer.state[leaf].items():
                if not isinstance(value, Tensor) or value.dim() == 0:
                    dense[kind] = value
                    continue
                if kind not in dense:
                    shape = [
                        1 if own == 1 and narrow > 1 else size
                        for own, narrow, size in zip(value.shape, leaf.shape, self._weights[name].shape, strict=True)
                    ]
                    dense[kind] = value.new_zeros(shape)
                dense[kind][self._place(kind, places[name])] = value

    def _factored(self, name: str) -> bool:
        return "row_var" in self._state[name]

    def _place(self, kind: str, place: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Where the state of kept entries lies: as they do, but for the axis that a factored moment is a mean over."""
        reduced = {"row_var": len(place) - 1, "col_var": len(place) - 2}.get(kind)
        if reduced is None:
            return place
        axes = [
            torch.zeros(1, dtype=torch.int64, device=mesh.device) if dim == reduced else mesh.movedim(dim, 0).flatten(1)[:, 0]
            for dim, mesh in enumerate(place)
        ]
        return torch.meshgrid(*axes, indexing="ij")
