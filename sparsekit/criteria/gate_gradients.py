"""gate_moments(): the mean and the mean square of ∂L/∂gate of every unit, over the examples of some batches.

∂L/∂gate_j = Σ w·∂L/∂w over the entries that gates multiply. Where these are the inputs of linear layers and convolutions it
is also Σ x·∂L/∂x at their inputs, which one backward pass gives *for each example* without any gradient of a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsekit._torch import ConvNd
from sparsekit.criteria.batches import DataDriven, call_model, example_count
from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitSlice
from sparsekit.graph.index import wide

Reduction = Literal["mean", "sum"]


@dataclass(frozen=True, eq=False)
class Moments:
    """What is known about ∂L/∂gate of the units of one group.

    Args:
        mean: float64 (units,), over examples, signed.
        square: float64 (units,), the mean of the squares.
    """

    mean: Tensor
    square: Tensor


def _channel_axis(module: nn.Module, piece: UnitSlice) -> int | None:
    """The axis of a layer's input on which the positions of a slice of its weight lie; None where there is none such."""
    if isinstance(module, nn.Linear) and piece.dim == 1:
        return -1
    if isinstance(module, ConvNd) and module.groups == 1 and piece.dim == (0 if module.transposed else 1):
        return -1 - len(module.kernel_size)
    return None


def unit_readers(model: nn.Module, graph: UnitGraph) -> dict[str, list[tuple[nn.Module, UnitSlice, int]] | None]:
    """The layers whose inputs are the units of a group.

    Args:
        model: The dense model.
        graph: Its units.

    Returns:
        Group name → (layer, slice of its weight, axis of its input counted from the end), or None where units are also
        read in another way, such as by a norm's scale, a grouped convolution or a parametrised weight.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for entry in module.parameters(recurse=False):
            owners.setdefault(id(entry), []).append(module)
    entries = dict(model.named_parameters(remove_duplicate=False))
    return {
        name: _layer_readers([(entries.get(piece.name), piece) for piece in group.slices if piece.gated], owners)
        for name, group in graph.groups.items()
    }


def _layer_readers(
    gated: list[tuple[nn.Parameter | None, UnitSlice]], owners: Mapping[int, list[nn.Module]]
) -> list[tuple[nn.Module, UnitSlice, int]] | None:
    readers: list[tuple[nn.Module, UnitSlice, int]] = []
    seen: set[tuple[int, int]] = set()
    for entry, piece in gated:
        if entry is None or piece.side != "in" or not owners.get(id(entry)):
            return None
        if (id(entry), piece.dim) in seen:  # a tied name of the same parameter
            continue
        seen.add((id(entry), piece.dim))
        for module in owners[id(entry)]:
            axis = _channel_axis(module, piece)
            if axis is None or getattr(module, "weight", None) is not entry:
                return None
            readers.append((module, piece, axis))
    return readers


class InputViews:
    """While active, notes the input of each call of some layers.

    Args:
        layers: Which layers.
        differentiable: Whether the inputs are made to carry gradients.
    """

    def __init__(self, layers: set[nn.Module], *, differentiable: bool) -> None:
        self._layers = layers
        self._differentiable = differentiable
        self._hooks = ExitStack()
        self.calls: dict[nn.Module, list[Tensor]] = {}

    def __enter__(self) -> InputViews:
        for layer in self._layers:
            self._hooks.callback(layer.register_forward_pre_hook(self._note).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _note(self, layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor):
            return None
        x = args[0]
        if self._differentiable:
            # A view of its own, so that what other layers do to the same tensor is not in its gradient.
            x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        self.calls.setdefault(layer, []).append(x)
        return (x, *args[1:])


def _by_example(x: Tensor, gradient: Tensor, axis: int, examples: int) -> Tensor | None:
    """Σ x·∂L/∂x over all axes but examples and channels: float (examples, channels); None where the first axis is another."""
    if x.shape[0] != examples or x.dim() < 1 - axis:
        return None
    product = (wide(x.detach()) * wide(gradient)).movedim(axis, -1)
    return product.reshape(examples, -1, product.shape[-1]).sum(1)


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part.to(total.device)


def _exact(values: Tensor) -> Tensor:
    return values if values.device.type == "mps" else values.double()  # which has no float64


class _Sums:
    """Running sums of one group."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.second: Tensor | None = None

    def add(self, gradients: Tensor) -> None:
        """Add the gradients of single examples, float (examples, units)."""
        values = _exact(gradients)
        self.first = _add(self.first, values.sum(0))
        self.second = _add(self.second, values.square().sum(0))

    def add_batch(self, mean: Tensor, examples: int) -> None:
        """Add the gradient of the mean loss of a batch, float (units,)."""
        values = _exact(mean)
        self.first = _add(self.first, values * examples)
        # The square of a mean over B examples is B times too small where they are independent.
        self.second = _add(self.second, values.square() * examples * examples)


def gate_moments(
    criterion: DataDriven, model: nn.Module, graph: UnitGraph, *, reduction: Reduction = "mean"
) -> dict[str, Moments]:
    """Run the model over the criterion's batches and average ∂L/∂gate.

    The squares are those of single examples wherever the units are read by linear layers and convolutions that have the
    examples on the first axis of their input. Elsewhere the gradient g of a batch of B examples stands for B examples: the
    mean square is estimated by B·g², which is exact in expectation where the mean is zero.

    Args:
        criterion: Has the batches and the loss.
        model: The dense model; its parameters, gradients, modes and flags stay as they are.
        graph: Its units.
        reduction: How the loss treats the examples of a batch.

    Returns:
        Group name → moments, on the CPU, float64.

    Raises:
        InvalidValueError: a group's units have no part in the loss, or an unknown reduction.
        MissingImportanceError, DataError: see `DataDriven`.
    """
    if reduction not in ("mean", "sum"):
        raise InvalidValueError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    readers = unit_readers(model, graph)
    entries = dict(model.named_parameters(remove_duplicate=False))
    gated = {
        name: [(entries[piece.name], piece) for piece in _once(group.slices, entries)] for name, group in graph.groups.items()
    }
    layers = {module for found in readers.values() for module, _, _ in found or ()}
    sums = {name: _Sums() for name in graph.groups}
    weights = {id(entry): entry for pairs in gated.values() for entry, _ in pairs if entry.is_floating_point()}
    examples_seen = 0
    with criterion._passes(model, weights.values()) as passes:
        for batch in passes:
            with InputViews(layers, differentiable=True) as views:
                value = call_model(model, batch, criterion.loss)
                examples = example_count(batch)
                _one_batch(value, views, readers, gated, sums, examples, examples if reduction == "mean" else 1)
            examples_seen += examples
    return {name: Moments(*_means(name, found, examples_seen)) for name, found in sums.items()}


def _means(name: str, sums: _Sums, examples: int) -> tuple[Tensor, Tensor]:
    if sums.first is None or sums.second is None:
        raise InvalidValueError(
            f"the loss does not depend on the units of group {name!r}; leave the group out with"
            " sparsekit.graph.edit.without, or use a loss over all outputs"
        )
    return sums.first.cpu().double() / examples, sums.second.cpu().double() / examples


def _once(slices: tuple[UnitSlice, ...], entries: Mapping[str, nn.Parameter]) -> list[UnitSlice]:
    """The gated slices of parameters; of tied names the first."""
    found: dict[tuple[int, int], UnitSlice] = {}
    for piece in slices:
        if piece.gated and piece.name in entries:
            found.setdefault((id(entries[piece.name]), piece.dim), piece)
    return list(found.values())


def _one_batch(
    value: Tensor,
    views: InputViews,
    readers: Mapping[str, list[tuple[nn.Module, UnitSlice, int]] | None],
    gated: Mapping[str, list[tuple[nn.Parameter, UnitSlice]]],
    sums: Mapping[str, _Sums],
    examples: int,
    scale: int,
) -> None:
    """Backward pass of one batch: by example where all readers of a group allow it, else from the weights' gradients."""
    direct: dict[str, list[tuple[nn.Module, UnitSlice, int]]] = {}
    wanted: dict[int, nn.Parameter] = {}
    for name, found in readers.items():
        if found and all(_fits(views, module, axis, examples) for module, _, axis in found):
            direct[name] = found
        else:
            wanted.update((id(entry), entry) for entry, _ in gated[name])
    calls = [(module, x) for module, inputs in views.calls.items() for x in inputs]
    targets = [*(x for _, x in calls), *wanted.values()]
    if not targets or not value.requires_grad:
        return
    gradients = torch.autograd.grad(value, targets, allow_unused=True)
    at_input: dict[tuple[nn.Module, int], Tensor] = {}
    axes = {module: axis for found in direct.values() for module, _, axis in found}
    for (module, x), gradient in zip(calls, gradients):
        if module in axes and gradient is not None:
            part = _by_example(x, gradient, axes[module], examples)
            assert part is not None
            key = (module, axes[module])
            at_input[key] = part if key not in at_input else at_input[key] + part
    of_weight = {id(entry): g for entry, g in zip(wanted.values(), gradients[len(calls) :]) if g is not None}
    for name, sum_ in sums.items():
        total: Tensor | None = None
        if name in direct:
            for module, piece, axis in direct[name]:
                if (module, axis) in at_input:
                    part = at_input[module, axis]
                    total = _add(total, part[:, piece.index.to(part.device)].sum(2))
            if total is not None:
                sum_.add(total * scale)
            continue
        for entry, piece in gated[name]:
            if id(entry) in of_weight:
                product = wide(entry.detach()) * wide(of_weight[id(entry)])
                others = [dim for dim in range(product.dim()) if dim != piece.dim]
                along = product.sum(others) if others else product
                total = _add(total, along[piece.index.to(along.device)].sum(1))
        if total is not None:
            # Of a sum, g / B is the gradient of one example on average.
            mean = total if scale == examples else total / examples
            sum_.add_batch(mean, examples)


def _fits(views: InputViews, module: nn.Module, axis: int, examples: int) -> bool:
    inputs = views.calls.get(module, [])
    return bool(inputs) and all(x.dim() >= 1 - axis and x.shape[0] == examples for x in inputs)
