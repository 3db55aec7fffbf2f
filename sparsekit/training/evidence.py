"""Evidence: the rule of importance, as docs/concepts/masks.md states it: what a unit is worth, and which units are swapped."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import group_order
from sparsekit.graph.mask import UnitMask
from sparsekit.training.widening import Reading

_MEMORY = 0.9
"""Weight, after a round, of what was seen before."""
_KEPT_PROMISE = 0.5
"""Share of their promised worth below which newcomers have brought nothing."""
_PATIENCE = 3
"""Rounds in a row that brought nothing, after which the mask has settled."""


class Evidence:
    """What samples say of all units. Vectors are float (J,), in the order of the graph's groups; a sample is one step.

    `share` and `errors` are those of `LossImportance`; `like` is a vector on the device of the importance.
    """

    def __init__(self, graph: UnitGraph, like: Tensor, share: float, errors: float) -> None:
        self.share, self.errors = share, errors
        self._offsets = group_order(graph.groups.values())
        self.memory = {kind: like.new_zeros(3, like.numel()) for kind in ("kept", "dropped")}  # sums of 1, g and g²
        self.memory["promised"] = torch.zeros_like(like)
        # What a change of leaves the sums of gradients of other weights: those of units on the entry's other axes.
        self._beside = {
            f"{name}.{number}": {other for other, at in graph.slices_of[piece.name] if at.dim != piece.dim and other != name}
            for name, group in graph.groups.items()
            for number, piece in enumerate(group.slices)
            if piece.gated
        }
        self.clock = {"idle": 0.0, "curve": 0.0, "spread": 0.0, "noise": 0.0}

    @property
    def converged(self) -> bool:
        return self.clock["idle"] >= _PATIENCE

    def add(self, kind: str, units: Tensor, values: Tensor) -> None:
        """Add a sample of "kept" units, the gradients of their gates, or of "dropped" ones: int64 and float (n,)."""
        sums = self.memory[kind]
        values = values.to(sums)
        sums.index_add_(1, units.to(sums.device), torch.stack([torch.ones_like(values), values, values.square()]))

    def add_dropped(self, readings: Mapping[str, Reading], mask: UnitMask) -> None:
        """Add the gradients of dropped units' outgoing weights along the sum of earlier samples, whose noise is another."""
        sums: dict[str, Tensor] = {}
        for key, (group, dim, table, gradient) in readings.items():
            kept = table[mask[group].to(table.device)].reshape(-1)
            gradient = gradient.index_fill(dim, kept, 0.0)
            way = self.memory.get(f"way.{key}")
            if way is None or way.shape != gradient.shape:
                way = torch.zeros_like(gradient)
            way = way.index_fill(dim, kept, 0.0)
            products = torch.stack([gradient * way, way.square()]).movedim(dim + 1, 1).reshape(2, gradient.shape[dim], -1)
            pair = products.sum(2)[:, table].sum(2)
            sums[group] = sums[group] + pair if group in sums else pair
            self.memory[f"way.{key}"] = way + gradient
        for group, (dot, square) in sums.items():
            units = (square > 0).nonzero().reshape(-1)
            self.add("dropped", units + self._offsets[group], dot[units] / square[units].sqrt())

    def add_way(self, weights: Tensor, gradient: Tensor, *, second_half: bool) -> None:
        """Compare the gradients of the two halves of a round along the way that the weights went between them."""
        clock, memory = self.clock, self.memory
        if not second_half:
            memory["weights"] = memory.get("weights", 0.0) + weights
            memory["slope"] = memory.get("slope", 0.0) + gradient
            clock["before"] = clock.get("before", 0.0) + 1.0
        elif "weights" in memory and memory["weights"].shape == weights.shape:
            way, n = weights - memory["weights"] / clock["before"], clock.get("after", 0.0) + 1.0
            rise = float(torch.dot(way, gradient - memory["slope"] / clock["before"]))
            # From differences of neighbours, since the mean moves as the way grows.
            clock["squares"] = clock.get("squares", 0.0) + (0.5 * (rise - clock["last"]) ** 2 if n > 1.0 else 0.0)
            clock |= {"after": n, "last": rise, "rises": clock.get("rises", 0.0) + rise}

    def _stiffness(self) -> float:
        """The curvature that the variance of a sample stands for, by its errors above the estimate."""
        clock = self.clock
        n = clock.get("after", 0.0)
        if n > 1.0:
            spread = clock["squares"] / (n - 1.0)
            new = {"curve": clock["rises"] / n, "spread": spread, "noise": spread / n + spread / clock["before"]}
            clock |= {name: _MEMORY * clock[name] + value for name, value in new.items()}
        if not clock["spread"]:
            return math.inf
        return (max(clock["curve"], 0.0) + self.errors * math.sqrt(clock["noise"])) / clock["spread"]

    def _moments(self, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, its standard error and variance of the samples; the error is infinite where there are fewer than three."""
        count, total, squares = self.memory[kind]
        mean = total / count.clamp_min(1.0)
        variance = (squares - total * mean).clamp_min(0.0) / (count - 1.0).clamp_min(1.0)
        return mean, torch.where(count > 2.0, (variance / count.clamp_min(1.0)).sqrt(), torch.inf), variance

    def end_round(self, mask: UnitMask) -> tuple[UnitMask, Tensor]:
        """Judge the last newcomers, and swap what pays by more than its errors.

        Returns:
            The mask from now on, and the worth of each unit, at least; infinite where unknown.
        """
        errors, promised, stiffness = self.errors, self.memory["promised"], self._stiffness()
        gate, error, variance = self._moments("kept")
        curve = stiffness * variance
        slope = curve - gate  # at a gate of 0, where a newcomer begins
        kept = torch.cat([mask[name] for name in self._offsets]).to(gate.device)
        known = kept & error.isfinite() & curve.isfinite()
        at_least = torch.where(known, _worth(slope - errors * error, curve), torch.inf)
        at_most = torch.where(known, _worth(slope + errors * error, curve), torch.inf)
        slope, doubt, variance = self._moments("dropped")
        gain = torch.where(doubt.isfinite(), _worth(slope - errors * doubt, stiffness * variance), -torch.inf)
        judged = (promised > 0.0) & known
        failed = bool(judged.any()) and bool(at_most[judged].sum() < _KEPT_PROMISE * promised[judged].sum())
        promised.zero_()
        keep = dict(mask)
        for name, offset in self._offsets.items():
            own = slice(offset, offset + mask[name].numel())
            most = math.ceil(self.share * min(int(mask[name].sum()), int((~mask[name]).sum())))
            leaving, entering = _choose_swaps(mask[name], at_most[own].cpu(), gain[own].cpu(), most)
            keep[name] = mask[name].index_fill(0, leaving, False).index_fill(0, entering, True)
            promised[own][entering] = gain[own][entering]
        swapped = bool((promised > 0.0).any())
        self.clock["idle"] = self.clock["idle"] + 1.0 if failed or not (swapped or judged.any()) else 0.0
        for kind in ("kept", "dropped"):
            self.memory[kind] *= _MEMORY
        self.begin_round()
        return UnitMask(keep), torch.where(kept, at_least, gain)

    def begin_round(self, changed: Mapping[str, Tensor] | None = None) -> None:
        """Forget the way of the weights, and all about units that came or went: group name → bool (units,)."""
        self.forget_way()
        if changed is not None:
            for kind in ("kept", "dropped"):
                every = torch.cat([changed[name] for name in self._offsets])
                self.memory[kind].masked_fill_(every.to(self.memory[kind].device), 0.0)
            for key, beside in self._beside.items():
                if any(bool(changed[name].any()) for name in beside):
                    self.memory.pop(f"way.{key}", None)

    def forget_way(self) -> None:
        """Begin to compare the gradients of the weights again, such as those of other weights."""
        for name in ("before", "after", "last", "rises", "squares"):
            self.clock.pop(name, None)
        for name in ("weights", "slope"):
            self.memory.pop(name, None)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move every tensor to another device; the dtypes stay."""
        self.memory = {name: function(value).to(value.dtype) for name, value in self.memory.items()}


def _choose_swaps(keep: Tensor, cost: Tensor, gain: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Pair the kept units that cost least with the dropped ones that gain most, while the gain exceeds the cost.

    Returns:
        int64 (swaps,) each, at most `most`: the units that leave, and those that enter in their places.
    """
    cost, gain = _rounded(cost), _rounded(gain)  # ties go to the lower index, in any order of computation
    leaving = torch.where(keep, cost, torch.inf).argsort(stable=True)[:most]
    entering = torch.where(keep, -torch.inf, gain).argsort(descending=True, stable=True)[:most]
    pairs = int((gain[entering] > cost[leaving]).sum())  # costs ascend and gains descend: the pairs that pay come first
    return leaving[:pairs], entering[:pairs]


def _worth(slope: Tensor, curve: Tensor) -> Tensor:
    """What the loss falls by in the best step down a slope; nothing where there is none."""
    return torch.where(curve > 0.0, 0.5 * slope.clamp_min(0.0).square() / curve, 0.0)


def _rounded(values: Tensor) -> Tensor:
    """Round to 16 binary digits."""
    mantissa, exponent = torch.frexp(values)
    return torch.where(values.isfinite(), torch.ldexp((mantissa * 2.0**16).round() / 2.0**16, exponent), values)
