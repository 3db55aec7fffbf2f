"""Taylor and Fisher: a unit is worth what the loss would rise by without it, by the first terms of its Taylor series."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from sparsekit.criteria.base import ScoringContext
from sparsekit.criteria.batches import DataDriven, call_model, check_finite, example_count
from sparsekit.criteria.gate_gradients import gate_moments
from sparsekit.criteria.weights import along_axis, unit_entries
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide

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

    Source: Molchanov et al., Importance Estimation for Neural Network Pruning, CVPR 2019; the second term as in Theis et
        al., Faster gaze prediction with dense networks and Fisher pruning, arXiv 1801.05787.
    """

    form: Form = field(default="cost", kw_only=True)

    comparable: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.form not in get_args(Form):
            raise InvalidValueError(f"form must be one of {', '.join(get_args(Form))}, got {self.form!r}")

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Estimate what removing each unit costs: float64, in units of the loss but for "squared"; may be negative."""
        model = self._model(context, graph)
        if self.form == "products":
            return {name: check_finite(name, s, "Taylor") for name, s in self._products(model, graph).items()}
        found = {}
        for name, (mean, square) in gate_moments(self, model, graph).items():
            if self.form == "cost":
                values = -mean + 0.5 * square
            elif self.form == "signed":
                values = -mean
            else:
                values = mean.abs() if self.form == "absolute" else mean.square()
            found[name] = check_finite(name, values, "Taylor")
        return found

    def _products(self, model: nn.Module, graph: UnitGraph) -> dict[str, Tensor]:
        """Average the gradients of all entries over the batches and sum |w·gradient| over the entries of a unit."""
        entries = unit_entries(model, graph)
        touched = {id(entry): entry for pairs in entries.values() for entry, _ in pairs if entry.is_floating_point()}
        totals: dict[int, Tensor] = {}
        examples = 0
        with self._passes(model, touched.values()) as passes:
            for batch in passes:
                loss = call_model(model, batch, self.loss)
                gradients = torch.autograd.grad(loss, list(touched.values()), allow_unused=True)
                examples += example_count(batch)
                for key, gradient in zip(touched, gradients):
                    if gradient is not None:
                        part = wide(gradient) * example_count(batch)
                        totals[key] = totals[key].add_(part) if key in totals else part
        products = {key: (wide(touched[key].detach()) * total / examples).abs() for key, total in totals.items()}
        found = {}
        for name, pairs in entries.items():
            found[name] = torch.zeros(graph.groups[name].size, dtype=torch.float64)
            for entry, piece in pairs:
                if id(entry) in products:
                    found[name] += along_axis(products[id(entry)], piece.dim).cpu().double()[piece.index].sum(1)
        return found


@dataclass(frozen=True)
class Fisher(DataDriven):
    """½·E[(∂L/∂gate)²]: the rise of the loss without the unit, near a minimum.

    One gate acts on everything that a group ties together, such as all blocks of a residual stage, so that the square is
    taken of the sum over all of them.

    Source: Theis et al., arXiv 1801.05787; Liu et al., Group Fisher Pruning for Practical Network Compression, ICML 2021.
    """

    comparable: ClassVar[bool] = True

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Average the squares over the examples of all batches: float64, at least 0, in units of the loss."""
        moments = gate_moments(self, self._model(context, graph), graph)
        return {name: check_finite(name, 0.5 * square, "Fisher") for name, (_, square) in moments.items()}


@dataclass(frozen=True)
class PositionFisher(DataDriven):
    """½·E[Σ (∂L/∂gate)²] over the positions of an example: tokens, pixels.

    The same quantity as `Fisher` if the gradients at different positions are independent, from as many samples as there are
    positions. Prefer it for language models, where a batch has few examples and many tokens.

    Source: as `Fisher`; positions as examples, as in K-FAC for layers that share weights (Eschenhagen et al., NeurIPS 2023,
        arXiv 2311.00636, "expand").
    """

    comparable: ClassVar[bool] = True

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Average the sums of squares over the examples of all batches: float64, at least 0, in units of the loss."""
        moments = gate_moments(self, self._model(context, graph), graph, positions=True)
        return {name: check_finite(name, 0.5 * square, "PositionFisher") for name, (_, square) in moments.items()}
