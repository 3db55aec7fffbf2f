"""SwapStatistics: estimates the importance of units and chooses swaps, by the rule that docs/concepts/masks.md states."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import group_order
from sparsekit.graph.mask import UnitMask
from sparsekit.training.exploration import Reading

_MEMORY = 0.9
"""Factor on all sums after a round."""
_FULFILLED = 0.5
"""A round has failed if the units that it added gained less than this share of the prediction."""
_PATIENCE = 3
"""Failed rounds in a row, after which the mask has converged."""


class SwapStatistics:
    """Sums of samples of all units. Vectors are float (J,), in the order of the graph's groups; a sample is one step.

    `max_swap_fraction` and `num_std_errors` are those of `LossImportance`; `like` is a vector on the device of the importance.
    """

    def __init__(self, graph: UnitGraph, like: Tensor, max_swap_fraction: float, num_std_errors: float) -> None:
        self.max_swap_fraction, self.num_std_errors = max_swap_fraction, num_std_errors
        self._offsets = group_order(graph.groups.values())
        self.memory = {kind: like.new_zeros(3, like.numel()) for kind in ("kept", "dropped")}  # sums of 1, g and g²
        self.memory["expected_gain"] = torch.zeros_like(like)
        # Groups on the other axes of an entry: when they change, sums of its gradients belong to other weights.
        self._beside = {
            f"{name}.{number}": {other for other, at in graph.slices_of[piece.name] if at.dim != piece.dim and other != name}
            for name, group in graph.groups.items()
            for number, piece in enumerate(group.slices)
            if piece.gated
        }
        self.counters = {"idle": 0.0, "curve": 0.0, "spread": 0.0, "noise": 0.0}

    @property
    def converged(self) -> bool:
        return self.counters["idle"] >= _PATIENCE

    def add(self, kind: str, units: Tensor, values: Tensor) -> None:
        """Add a sample of "kept" units, the gradients of their gates, or of "dropped" ones: int64 and float (n,)."""
        sums = self.memory[kind]
        values = values.to(sums)
        sums.index_add_(1, units.to(sums.device), torch.stack([torch.ones_like(values), values, values.square()]))

    def add_dropped(self, readings: Mapping[str, Reading], mask: UnitMask) -> None:
        """Add the gradients of dropped units' outgoing weights, projected on the sum of earlier, independent samples."""
        sums: dict[str, Tensor] = {}
        for key, (group, dim, table, gradient) in readings.items():
            kept = table[mask[group].to(table.device)].reshape(-1)
            gradient = gradient.index_fill(dim, kept, 0.0)
            direction = self.memory.get(f"direction.{key}")
            if direction is None or direction.shape != gradient.shape:
                direction = torch.zeros_like(gradient)
            direction = direction.index_fill(dim, kept, 0.0)
            products = (
                torch.stack([gradient * direction, direction.square()]).movedim(dim + 1, 1).reshape(2, gradient.shape[dim], -1)
            )
            pair = products.sum(2)[:, table].sum(2)
            sums[group] = sums[group] + pair if group in sums else pair
            self.memory[f"direction.{key}"] = direction + gradient
        for group, (dot, square) in sums.items():
            units = (square > 0).nonzero().reshape(-1)
            self.add("dropped", units + self._offsets[group], dot[units] / square[units].sqrt())

    def add_displacement(self, weights: Tensor, gradient: Tensor, *, second_half: bool) -> None:
        """Compare the gradients of the two halves of a round along the weight displacement between them."""
        counters, memory = self.counters, self.memory
        if not second_half:
            for name, values in (("weights", weights), ("slope", gradient)):
                memory[name] = memory[name].add_(values) if name in memory else values
            counters["before"] = counters.get("before", 0.0) + 1.0
        elif "weights" in memory and memory["weights"].shape == weights.shape:
            displacement, n = weights - memory["weights"] / counters["before"], counters.get("after", 0.0) + 1.0
            rise = float(torch.dot(displacement, gradient - memory["slope"] / counters["before"]))
            # From differences of neighbours, since the mean moves as the displacement grows.
            counters["squares"] = counters.get("squares", 0.0) + (0.5 * (rise - counters["last"]) ** 2 if n > 1.0 else 0.0)
            counters |= {"after": n, "last": rise, "rises": counters.get("rises", 0.0) + rise}

    def _stiffness(self) -> float:
        """Return an upper bound of the curvature per gradient variance: `num_std_errors` above the estimate."""
        counters = self.counters
        n = counters.get("after", 0.0)
        if n > 1.0:
            spread = counters["squares"] / (n - 1.0)
            new = {"curve": counters["rises"] / n, "spread": spread, "noise": spread / n + spread / counters["before"]}
            counters |= {name: _MEMORY * counters[name] + value for name, value in new.items()}
        if not counters["spread"]:
            return math.inf
        return (max(counters["curve"], 0.0) + self.num_std_errors * math.sqrt(counters["noise"])) / counters["spread"]

    def _moments(self, kind: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return mean, its standard error and variance of the samples; the error is infinite where there are fewer than
        three."""
        count, total, squares = self.memory[kind]
        mean = total / count.clamp_min(1.0)
        variance = (squares - total * mean).clamp_min(0.0) / (count - 1.0).clamp_min(1.0)
        return mean, torch.where(count > 2.0, (variance / count.clamp_min(1.0)).sqrt(), torch.inf), variance

    def end_round(self, mask: UnitMask) -> tuple[UnitMask, Tensor]:
        """Judge the units that entered last, and swap where the gain exceeds the cost and the errors.

        Returns:
            The mask from now on, and a lower bound of the importance of each unit; infinite where unknown.
        """
        errors, expected, stiffness = self.num_std_errors, self.memory["expected_gain"], self._stiffness()
        gate, error, variance = self._moments("kept")
        curve = stiffness * variance
        slope = curve - gate  # at a gate of 0, where a unit enters
        kept = torch.cat([mask[name] for name in self._offsets]).to(gate.device)
        known = kept & error.isfinite() & curve.isfinite()
        at_least = torch.where(known, _gain(slope - errors * error, curve), torch.inf)
        at_most = torch.where(known, _gain(slope + errors * error, curve), torch.inf)
        slope, doubt, variance = self._moments("dropped")
        gain = torch.where(doubt.isfinite(), _gain(slope - errors * doubt, stiffness * variance), -torch.inf)
        judged = (expected > 0.0) & known
        failed = bool(judged.any()) and bool(at_most[judged].sum() < _FULFILLED * expected[judged].sum())
        expected.zero_()
        keep = dict(mask)
        for name, offset in self._offsets.items():
            own = slice(offset, offset + mask[name].numel())
            most = math.ceil(self.max_swap_fraction * min(int(mask[name].sum()), int((~mask[name]).sum())))
            leaving, entering = _choose_swaps(mask[name], at_most[own].cpu(), gain[own].cpu(), most)
            keep[name] = mask[name].index_fill(0, leaving, False).index_fill(0, entering, True)
            expected[own][entering] = gain[own][entering]
        swapped = bool((expected > 0.0).any())
        self.counters["idle"] = self.counters["idle"] + 1.0 if failed or not (swapped or judged.any()) else 0.0
        for kind in ("kept", "dropped"):
            self.memory[kind] *= _MEMORY
        self.begin_round()
        return UnitMask(keep), torch.where(kept, at_least, gain)

    def begin_round(self, changed: Mapping[str, Tensor] | None = None) -> None:
        """Forget the weight displacement, and all sums of units that entered or left: group name → bool (units,)."""
        self.forget_displacement()
        if changed is not None:
            for kind in ("kept", "dropped"):
                every = torch.cat([changed[name] for name in self._offsets])
                self.memory[kind].masked_fill_(every.to(self.memory[kind].device), 0.0)
            for key, beside in self._beside.items():
                if any(bool(changed[name].any()) for name in beside):
                    self.memory.pop(f"direction.{key}", None)

    def forget_displacement(self) -> None:
        """Forget the weight displacement, as after other weights were frozen."""
        for name in ("before", "after", "last", "rises", "squares"):
            self.counters.pop(name, None)
        for name in ("weights", "slope"):
            self.memory.pop(name, None)

    def apply(self, function: Callable[[Tensor], Tensor]) -> None:
        """Move every tensor to another device; the dtypes stay."""
        self.memory = {name: function(value).to(value.dtype) for name, value in self.memory.items()}


def _choose_swaps(keep: Tensor, cost: Tensor, gain: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return pair the kept units that cost least with the dropped ones that gain most, while the gain exceeds the cost.

    Returns:
        int64 (swaps,) each, at most `most`: the units that leave, and those that enter in their places.
    """
    cost, gain = _rounded(cost), _rounded(gain)  # ties go to the lower index, in any order of computation
    leaving = torch.where(keep, cost, torch.inf).argsort(stable=True)[:most]
    entering = torch.where(keep, -torch.inf, gain).argsort(descending=True, stable=True)[:most]
    pairs = int((gain[entering] > cost[leaving]).sum())  # costs ascend and gains descend: the pairs that pay come first
    return leaving[:pairs], entering[:pairs]


def _gain(slope: Tensor, curve: Tensor) -> Tensor:
    """Return decrease of the loss in the best step down a slope; 0 if there is none."""
    return torch.where(curve > 0.0, 0.5 * slope.clamp_min(0.0).square() / curve, 0.0)


def _rounded(values: Tensor) -> Tensor:
    """Round to 16 binary digits."""
    mantissa, exponent = torch.frexp(values)
    return torch.where(values.isfinite(), torch.ldexp((mantissa * 2.0**16).round() / 2.0**16, exponent), values)
