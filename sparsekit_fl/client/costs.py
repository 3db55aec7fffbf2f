"""What work costs: simulated time, the row-mask convention of FLOPs, and devices as budgets."""

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np

from sparsekit.allocation import ratio_counts
from sparsekit.errors import InvalidValueError, NoUnitsError
from sparsekit.graph import UnitMask, WeightMask
from sparsekit.measure import Budget, BudgetError, CostModel, CostTerm, cost_model, format_cost
from sparsekit.rng import torch_scope
from sparsekit.tracing import trace_units
from sparsekit_fl.client.messages import WorkCost
from sparsekit_fl.problem.clients import Capability
from sparsekit_fl.problem.problem import Problem


def client_seconds(cost: WorkCost, capability: Capability) -> float:
    """Return the seconds that a device of this capability needs: download, train, upload, one after the other.

    Those of `flops_scoring` are left out.
    """
    return (
        cost.downlink_bytes / capability.downlink_bytes_per_second
        + cost.flops_training / capability.flops_per_second
        + cost.uplink_bytes / capability.uplink_bytes_per_second
    )


def scoring_seconds(cost: WorkCost, capability: Capability) -> float:
    """Return the seconds that a device of this capability needs for the passes by which its method decides."""
    return max(0, cost.flops_scoring) / capability.flops_per_second


def round_cost(costs: Iterable[WorkCost], *, wall_seconds: float, seconds: float | None = None) -> WorkCost:
    """Add up the work of all clients; the seconds are those of the slowest one.

    Args:
        costs: One per client.
        wall_seconds: Measured for the whole round; the clients' own wall seconds overlap and are not added.
        seconds: Simulated length of a round that does not wait for its slowest client.
    """
    costs = list(costs)
    if seconds is None:
        seconds = max((cost.seconds for cost in costs), default=0.0)
        # The slowest with scoring may be another client than the slowest without.
        scoring = max((cost.simulated_seconds for cost in costs), default=0.0) - seconds
    else:
        scoring = 0.0
    return replace(sum(costs, WorkCost()), seconds=seconds, scoring_seconds=scoring, wall_seconds=wall_seconds)


def rowmask_flops(costs: CostModel, mask: UnitMask | WeightMask | None = None) -> int:
    """Return the FLOPs of one example: (2 · nonzero weights + bias entries) per output position.

    Products between activations count whole.

    Args:
        costs: The model's terms.
        mask: A UnitMask, by which the rows of dropped units vanish, or a WeightMask, by which entries do; None keeps all.
    """
    if isinstance(mask, WeightMask):
        sizes = {name: int(mask[name].sum()) if name in mask else math.prod(s) for name, s in costs.graph.shapes.items()}
    else:
        sizes = costs.sizes(mask, sides=("out",))
    flops = Fraction(costs.other_flops)
    for term in costs.terms:
        flops += term.positions * (2 * sizes[term.weight] + _bias_entries(costs, term))
    return int(flops // costs.examples)


def part_flops(costs: CostModel, weights: Collection[str], *, bias: bool = False) -> int:
    """Return the FLOPs of one example spent on the uses of some weights of the whole model.

    Args:
        costs: The model's terms.
        weights: State-dict keys; others than weights of convolutions and products cost nothing.
        bias: Count bias entries once per output position too, as the paper's convention does.
    """
    flops = Fraction(0)
    for term in costs.terms:
        if term.weight in weights:
            added = _bias_entries(costs, term) if bias else 0
            flops += term.positions * (2 * math.prod(costs.graph.shapes[term.weight]) + added)
    return int(flops // costs.examples)


def _bias_entries(costs: CostModel, term: CostTerm) -> int:
    return math.prod(costs.graph.shapes[term.bias]) if term.bias is not None else 0


class DeviceBudgets:
    """What budgets of devices mean for a problem: the largest ratio whose uniform submodel fits.

    The model is made and traced once; every capability is arithmetic from then on.

    ```python
    devices = fl.DeviceBudgets(problem)
    clients = [fl.Client(id=k, data=data[k], capability=devices.capability(flops=2e6, memory_bytes=5e6)) for k in range(100)]
    ```
    """

    def __init__(self, problem: Problem) -> None:
        """Make the model, trace its units and its costs.

        Args:
            problem: Whose model the devices train.

        Raises:
            NoUnitsError: the model has no units, so that every device must train all of it.
        """
        with torch_scope(np.random.default_rng(0)):
            model = problem.model()
        try:
            self._graph = trace_units(model, *problem.example_inputs)
        except NoUnitsError as error:
            raise NoUnitsError(f"a budget of a device needs a model with units: {error}", error.fixed) from error
        self._costs = cost_model(model, *problem.example_inputs, graph=self._graph, metrics=("memory",))
        sizes = {group.size for group in self._graph.groups.values()}
        self._ratios = sorted({count / size for size in sizes for count in range(1, size + 1)})

    def costs(self, ratio: float) -> dict[str, float]:
        """What the submodel at a ratio costs.

        Args:
            ratio: Share of units kept in each group, in (0, 1].

        Returns:
            "flops" of a forward pass of one example, and "memory_bytes": parameters, buffers and the peak of the activations of
            one example.
        """
        found = self._costs.costs(ratio_counts(self._graph, ratio))
        return {"flops": found["flops"], "memory_bytes": found["bytes"] + found["memory"] / self._costs.examples}

    def capability(self, *, flops: float | None = None, memory_bytes: float | None = None, **more: Any) -> Capability:
        """The capability of a device.

        Args:
            flops: The most FLOPs of a forward pass, for one example.
            memory_bytes: The most bytes of parameters, buffers and activations, for one example.
            **more: Other fields of `Capability`, such as `flops_per_second`.

        Returns:
            With the largest ratio whose uniform submodel is within all budgets.

        Raises:
            InvalidValueError: no budget, one that is no positive number, or a ratio beside it.
            BudgetError: not even one unit of each group fits; the message has the least.
        """
        if "ratio" in more:
            raise InvalidValueError("a capability from a budget finds its own ratio; leave `ratio` out")
        budget = Budget(flops=flops, memory=memory_bytes)  # checks both numbers
        limits = {"flops": budget.flops, "memory_bytes": budget.memory}
        given = {name: float(limit) for name, limit in limits.items() if limit is not None}

        def fits(ratio: float) -> bool:
            costs = self.costs(ratio)
            return all(costs[name] <= limit for name, limit in given.items())

        fitting = bisect_left(self._ratios, True, key=lambda ratio: not fits(ratio))
        if not fitting:
            least = self.costs(self._ratios[0])
            told = " and ".join(f"{name} ≤ {format_cost(_METRIC[name], limit)}" for name, limit in given.items())
            reached = " and ".join(format_cost(_METRIC[name], least[name]) for name in given)
            raise BudgetError(f"no submodel fits {told}: one unit of each group already costs {reached}", least)
        return Capability(ratio=self._ratios[fitting - 1], **more)


_METRIC = {"flops": "flops", "memory_bytes": "memory"}
