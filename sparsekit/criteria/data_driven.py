"""Criteria that run the model on data: Taylor and Fisher, from the gradients of a loss, and Wanda, from activations."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit.criteria.base import ScoringContext
from sparsekit.criteria.batches import DataDriven, check_finite
from sparsekit.criteria.gate_gradients import gate_squares, inputs_of, sum_up, unit_readers
from sparsekit.criteria.weights import along_axis, unit_entries
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitGraph
from sparsekit.graph.index import wide

_Sums: TypeAlias = tuple[Tensor, Tensor]
"""The sum over the tokens of each expert, and the number of its tokens; both float (experts,)."""


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
        """Return the scores: float64 (units,), at least 0."""
        model = self._model(context, graph)
        entries = unit_entries(model, graph)
        touched = {id(entry): entry for pairs in entries.values() for entry, _ in pairs if entry.is_floating_point()}
        totals: dict[int, Tensor] = {}
        examples = 0
        with self._passes(model, touched.values()) as passes:
            for batch in passes:
                loss = self._loss(model, batch)
                gradients = torch.autograd.grad(loss, list(touched.values()), allow_unused=True)
                examples += batch.examples
                for key, gradient in zip(touched, gradients):
                    if gradient is not None:
                        part = wide(gradient) * batch.examples
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
    """½·E[(∂L/∂gate)²]: estimates by how much the loss rises without a unit, near a minimum of the loss.

    If a group ties several layers, such as all blocks of a residual stage, one gate multiplies all of them, and the sum of
    their gradients is squared.

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
        """Return the scores, averaged over the examples: float64 (units,), at least 0, in units of the loss."""
        squares = gate_squares(self, self._model(context, graph), graph, positions=self.per_position)
        return {name: check_finite(name, 0.5 * square, self.name) for name, square in squares.items()}


def position_fisher() -> Fisher:
    """Return Fisher importance with one gradient per position (token or pixel), ½·E[Σ (∂L/∂gate)²]. For language models."""
    return Fisher(per_position=True)


@dataclass(frozen=True)
class Wanda(DataDriven):
    """Σ |w|·‖x‖ over the weights w that consume a unit; ‖x‖ is the root mean square of their inputs.

    The score of an expert in a mixture is gate · ‖output‖, averaged over the tokens that are routed to it; 0 without tokens.
    The score of a feature inside of experts is Σ |w|, since hooks do not see the inputs of single experts.

    No loss and no targets are needed; a tuple's last item and a mapping's labels are ignored.

    Source: Sun et al., A Simple and Effective Pruning Approach for Large Language Models (Wanda), ICLR 2024, there for single
        weights; for experts Lasby et al., REAP the Experts, arXiv 2510.13999.
    """

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Return the scores, from forward passes over the batches: float64 (units,), at least 0."""
        model = self._model(context, graph)
        squares: dict[nn.Module, Tensor] = {}
        counts: dict[nn.Module, int] = {}
        readers, entries = unit_readers(model, graph), unit_entries(model, graph)
        axes = {layer: axis for found in readers.values() for layer, _, axis in found or ()}
        with self._passes(model) as passes, _routed_outputs(model, graph) as routed:
            for batch in passes:
                with inputs_of(axes) as calls:
                    batch.run(model)
                for layer, inputs in calls.items():
                    for x in inputs:
                        values = wide(x).movedim(axes[layer], -1).reshape(-1, x.shape[axes[layer]])
                        part = values.square().sum(0)
                        squares[layer] = squares[layer] + part if layer in squares else part
                        counts[layer] = counts.get(layer, 0) + values.shape[0]
        sizes = {layer: (total / counts[layer]).sqrt() for layer, total in squares.items()}
        found = {}
        for name, each in readers.items():
            if name in routed:
                total, count = routed[name]
                found[name] = check_finite(name, (total / count.clamp(min=1)).cpu().double(), "Wanda")
                continue
            stacked = [(entry, piece) for entry, piece in entries[name] if piece.gated]
            if not each and all(piece.side == "in" and entry.dim() == 3 for entry, piece in stacked):
                parts = [along_axis(wide(entry.detach()).abs(), p.dim).cpu().double()[p.index].sum(1) for entry, p in stacked]
                found[name] = check_finite(name, sum_up(parts), "Wanda")
                continue
            if not each or not all(layer in sizes for layer, _, _ in each):
                raise InvalidValueError(
                    f"the units of group {name!r} are not the input of a linear layer or an ungrouped convolution, so that"
                    " their activations are not seen; use Fisher or Magnitude, or leave the group out with"
                    " sparsekit.graph.edit.without"
                )
            parts = []
            for layer, piece, _ in each:
                weight = wide(layer.get_parameter("weight").detach()).abs()
                columns = along_axis(weight, piece.dim) * sizes[layer]
                parts.append(columns.cpu().double()[piece.index].sum(1))
            found[name] = check_finite(name, sum_up(parts), "Wanda")
        return found


@contextmanager
def _routed_outputs(model: nn.Module, graph: UnitGraph) -> Iterator[dict[str, _Sums]]:
    """Add up gate · ‖output‖ over the tokens of each expert, in every pass inside the block."""
    sums: dict[str, _Sums] = {}
    with ExitStack() as hooks:
        for name, group in graph.groups.items():
            if group.kind == "expert":
                home = next(piece.name for piece in group.slices if piece.gated).rpartition(".")[0]
                note = partial(_note, sums, name, group.size)
                hooks.callback(model.get_submodule(home).register_forward_pre_hook(note, with_kwargs=True).remove)
        yield sums


def _note(sums: dict[str, _Sums], name: str, size: int, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x, index, gates = (*args, *kwargs.values())
    rows, chosen = x.reshape(-1, x.shape[-1]), index.reshape(-1)
    # Treat each pair of a token and an expert as a separate token that is routed to this expert alone, with gate 1.
    pairs = rows.repeat_interleave(index.shape[-1], dim=0)
    outputs = experts.forward(pairs, chosen[:, None], torch.ones_like(gates).reshape(-1, 1))
    values = wide(outputs).norm(dim=-1) * wide(gates).reshape(-1)
    total, count = sums.get(name) or (values.new_zeros(size), values.new_zeros(size))
    sums[name] = total.index_add(0, chosen, values), count.index_add(0, chosen, torch.ones_like(values))
