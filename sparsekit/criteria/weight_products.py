"""weight_products(): Σ |w·∂L/∂w| over the entries of each unit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sparsekit.criteria.batches import DataDriven, call_model, example_count, scoring
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import wide

__all__ = ["sum_over_units", "weight_products"]


def sum_over_units(graph: UnitGraph, entries: dict[str, nn.Parameter], values: dict[int, Tensor]) -> dict[str, Tensor]:
    """Sum what belongs to each unit, over every slice of its group; of tied names the first counts.

    Args:
        graph: The units.
        entries: State-dict key → parameter.
        values: Identity of a parameter → float tensor of its shape; others count nothing.

    Returns:
        Group name → float (units,), on the CPU.
    """
    found: dict[str, Tensor] = {}
    for name, group in graph.groups.items():
        total = torch.zeros(group.size, dtype=torch.float64)
        seen: set[tuple[int, int]] = set()
        for piece in group.slices:
            entry = entries.get(piece.name)
            if entry is None or id(entry) not in values or (id(entry), piece.dim) in seen:
                continue
            seen.add((id(entry), piece.dim))
            value = values[id(entry)]
            others = [dim for dim in range(value.dim()) if dim != piece.dim]
            along = value.sum(others) if others else value
            total += along.cpu().double()[piece.index].sum(1)
        found[name] = total
    return found


def weight_products(criterion: DataDriven, model: nn.Module, graph: UnitGraph) -> dict[str, Tensor]:
    """Average the gradients of all entries over the criterion's batches and sum |w·gradient| over the entries of a unit.

    Args:
        criterion: Has the batches and the loss.
        model: The dense model; nothing of it changes.
        graph: Its units.

    Returns:
        Group name → float64 (units,), on the CPU.
    """
    graph.check_state(model.state_dict(), what=f"the {type(model).__name__}")
    entries = {name: p for name, p in model.named_parameters(remove_duplicate=False) if p.is_floating_point()}
    touched = {id(entries[name]): entries[name] for name in graph.slices_of if name in entries}
    totals: dict[int, Tensor] = {}
    seen = 0
    with scoring(model, touched.values()), torch.inference_mode(mode=False), torch.enable_grad():
        for batch, meter in criterion._read(model):
            with meter:
                loss = call_model(model, batch, criterion.loss)
                gradients = torch.autograd.grad(loss, list(touched.values()), allow_unused=True)
            examples = example_count(batch)
            for key, gradient in zip(touched, gradients):
                if gradient is not None:
                    part = wide(gradient) * examples
                    totals[key] = totals[key].add_(part) if key in totals else part
            seen += examples
    products = {key: (wide(touched[key].detach()) * total / seen).abs() for key, total in totals.items()}
    return sum_over_units(graph, entries, products)
