"""Taylor: a unit is worth what the loss would rise by without it, by the first terms of its Taylor series."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

from torch import Tensor

from sparsekit.criteria.base import Need, View
from sparsekit.criteria.batches import DataDriven, check_finite
from sparsekit.criteria.gate_gradients import Reduction, gate_moments
from sparsekit.criteria.weight_products import weight_products
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph

__all__ = ["Taylor"]

Form = Literal["cost", "signed", "absolute", "squared", "products"]


@dataclass(frozen=True)
class Taylor(DataDriven):
    """The expected rise of the loss when a unit's gate goes from 1 to 0.

    With ḡ the mean of ∂L/∂gate over all examples, signed, and h the mean of its square, the forms are:

    - "cost": −ḡ + ½·h, both terms of the series; h stands for the second derivative, as in Fisher's information;
    - "signed": −ḡ, the first term; it ranks single removals best far from convergence and tends to zero at a minimum;
    - "absolute": |ḡ|, for units that may be scaled in either direction; "squared": ḡ²;
    - "products": Σ |w·∂L/∂w| over all entries of a unit, with gradients averaged over the batches: what other pruning
      libraries call Taylor.

    Averaging comes before any absolute value: the deviation of a single batch is as large as the mean, and its absolute
    value alone would be noise.

    Args:
        form: Which of them.
        reduction: Whether the loss is the "mean" or the "sum" over the examples of a batch.

    Source: Molchanov et al., Importance Estimation for Neural Network Pruning, CVPR 2019; the second term as in Theis et
        al., Faster gaze prediction with dense networks and Fisher pruning, arXiv 1801.05787.
    """

    form: Form = field(default="cost", kw_only=True)
    reduction: Reduction = field(default="mean", kw_only=True)

    learned: ClassVar[bool] = False
    comparable: ClassVar[bool] = True
    needs: ClassVar[frozenset[Need]] = frozenset({"gradients", "data"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in get_args(Form):
            raise InvalidValueError(f"form must be one of {', '.join(get_args(Form))}, got {self.form!r}")

    def scores(self, graph: UnitGraph, view: View) -> Mapping[str, Tensor]:
        """Estimate what removing each unit costs.

        Args:
            graph: The units.
            view: Needs `model`, the dense model.

        Returns:
            Group name → float64 (units,), in units of the loss but for "squared"; may be negative.

        Raises:
            MissingImportanceError: no model or no batches.
            DataError: an empty loader, or a batch on another device than the model.
            InvalidValueError: a score is not finite, or the loss does not depend on a group.
        """
        model = self._model(view)
        if self.form == "products":
            return {name: check_finite(name, s, "Taylor") for name, s in weight_products(self, model, graph).items()}
        moments = gate_moments(self, model, graph, reduction=self.reduction)
        found = {}
        for name, each in moments.items():
            if self.form == "cost":
                values = -each.mean + 0.5 * each.square
            elif self.form == "signed":
                values = -each.mean
            else:
                values = each.mean.abs() if self.form == "absolute" else each.mean.square()
            found[name] = check_finite(name, values, "Taylor")
        return found
