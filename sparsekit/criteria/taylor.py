"""Taylor and Fisher: importance from the gradients of a loss."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparsekit.criteria.base import ScoringContext
from sparsekit.criteria.batches import DataDriven, call_model, check_finite, example_count
from sparsekit.criteria.gate_gradients import gate_squares
from sparsekit.criteria.weights import along_axis, unit_entries
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide


@dataclass(frozen=True)
class Taylor(DataDriven):
    """Σ |w·∂L/∂w| over all entries of a unit, with gradients averaged over the batches.

    This is what other pruning libraries call Taylor. Use it for comparisons; `Fisher` was better on every pretrained network
    that we tried.

    Source: Molchanov et al., Importance Estimation for Neural Network Pruning, CVPR 2019, there for single weights; as in
        LLM-Pruner (Ma et al., NeurIPS 2023) and Torch-Pruning.
    """

    comparable: ClassVar[bool] = True

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Average the gradients over the batches and sum up the products: float64, at least 0."""
        model = self._model(context, graph)
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
            check_finite(name, found[name], "Taylor")
        return found


@dataclass(frozen=True)
class Fisher(DataDriven):
    """½·E[(∂L/∂gate)²]: the rise of the loss without the unit, near a minimum.

    One gate multiplies everything that a group ties together, such as all blocks of a residual stage. The sum over all of them
    is squared.

    Args:
        per_position: Square at each position of an example (token, pixel), and add up the squares. If the gradients at
            different positions are independent, this is the same quantity from as many samples as there are positions. Use it
            for language models, where a batch has few examples and many tokens.

    Source: Theis et al., arXiv 1801.05787; Liu et al., Group Fisher Pruning for Practical Network Compression, ICML 2021;
        positions as examples, as in K-FAC for layers that share weights (Eschenhagen et al., NeurIPS 2023, arXiv 2311.00636,
        "expand").
    """

    per_position: bool = field(default=False, kw_only=True)
    comparable: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Name in reports."""
        return "Fisher per position" if self.per_position else "Fisher"

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Average the squares over the examples of all batches: float64, at least 0, in units of the loss."""
        squares = gate_squares(self, self._model(context, graph), graph, positions=self.per_position)
        return {name: check_finite(name, 0.5 * square, self.name) for name, square in squares.items()}


def position_fisher() -> Fisher:
    """½·E[Σ (∂L/∂gate)²] over the positions of an example: tokens, pixels. For language models."""
    return Fisher(per_position=True)
