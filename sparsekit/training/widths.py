"""Widths: how many units of each group a learnable mask keeps, by one ratio or within a budget."""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from sparsekit.allocation.by_cost import by_cost
from sparsekit.allocation.problem import allocate
from sparsekit.allocation.saliency import Scale
from sparsekit.allocation.shares import check_ratio, ratio_counts
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.measure.budget import Budget
from sparsekit.measure.cost import CostModel
from sparsekit.training.unit_vectors import split_units


class Widths:
    """How many units of each group stay.

    Args:
        graph: The units.
        ratio: Share of units that stay in each group, until `set` gives each group a number of its own.
        budget: The largest cost; None if the ratio decides.
        costs: The cost of the model by its widths; None if it is not known.
    """

    def __init__(self, graph: UnitGraph, ratio: float, budget: Budget | None, costs: CostModel | None) -> None:
        self.graph = graph
        self.budget = budget
        self._costs = costs
        self._counts: dict[str, int] | None = None
        self._ratio = check_ratio(ratio)
        self.target: object = ratio
        """What the counts follow from: compares unequal when they change."""

    @property
    def ratio(self) -> float:
        """Share of units that stay in each group; within a budget, of all units."""
        return self._ratio if self._counts is None else sum(self._counts.values()) / self.graph.units

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        if self.budget is not None:
            raise InvalidValueError("this mask has a budget, which says how many units stay; make one with ratio= instead")
        self.target = self._ratio = check_ratio(ratio)
        self._counts = None

    def counts(self) -> Mapping[str, int]:
        """Group name → units that stay."""
        return ratio_counts(self.graph, self._ratio) if self._counts is None else self._counts

    def set(self, counts: Mapping[str, int]) -> None:
        """Give each group its own number of units."""
        self.target = self._counts = dict(counts)

    def within_budget(
        self, importance: Tensor, limits: Mapping[str, tuple[float, float]], scale: Scale = "none"
    ) -> Mapping[str, int]:
        """Return the counts within the budget at which the groups lose least.

        `importance`, float (J,), is in units of the loss, in the order of the graph's groups, and compared between them by
        `scale`; `limits` are group name → (least, largest) share of its units that stays.
        """
        assert self.budget is not None
        assert self._costs is not None
        # Training continues, so that up to a point the remaining units of a group take over from the others.
        rule = partial(by_cost, scale=scale, width_penalty=2.0)
        scores = split_units(self.graph, importance)
        return allocate(rule, self.graph, scores, self._costs, budget=self.budget, limits=limits)

    def pass_flops(self, mask: UnitMask) -> float:
        """Work of a pass under `mask`: FLOPs if the costs are known, else its share of the parameters."""
        return mask.density(self.graph) if self._costs is None else self._costs.costs(mask.counts())["flops"]
