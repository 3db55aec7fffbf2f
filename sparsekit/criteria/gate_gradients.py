"""gate_squares(): the mean square of ∂L/∂gate of every unit, over the examples of some batches.

∂L/∂gate_j = Σ w·∂L/∂w over the entries that gates multiply. At the inputs of linear layers and convolutions, it is also Σ
x·∂L/∂x. One backward pass gives that *for each example*, without any gradient of a weight.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from sparsekit._torch import ConvNd
from sparsekit.criteria.batches import Batch, DataDriven
from sparsekit.criteria.weights import along_axis, unit_entries
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitGraph, UnitGroup, UnitSlice
from sparsekit.graph.index import wide

ReadBy: TypeAlias = tuple[nn.Module, UnitSlice, int]
"""A layer whose inputs are units, the slice of its weight, and the axis of its input counted from the end."""


def _channel_axis(module: nn.Module, piece: UnitSlice) -> int | None:
    """Return the axis of a layer's input, from the end, that has the positions of a slice of its weight; None without one."""
    if isinstance(module, nn.Linear) and piece.dim == 1:
        return -1
    if isinstance(module, ConvNd) and module.groups == 1 and piece.dim == (0 if module.transposed else 1):
        return -1 - len(module.kernel_size)
    return None


def owners_of(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Return identity of a parameter → the modules that have it."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for entry in module.parameters(recurse=False):
            found.setdefault(id(entry), []).append(module)
    return found


def unit_readers(model: nn.Module, graph: UnitGraph) -> dict[str, list[ReadBy] | None]:
    """Return group name → the layers whose inputs are its units.

    None if units are also read in another way, such as by a norm's scale, a grouped convolution or a parametrized weight.
    """
    owners, entries = owners_of(model), dict(model.named_parameters(remove_duplicate=False))

    def readers(group: UnitGroup) -> list[ReadBy] | None:
        found: dict[tuple[nn.Module, int], ReadBy] = {}
        for piece in group.slices:
            if not piece.gated:
                continue
            entry = entries.get(piece.name)
            homes = owners.get(id(entry), [])
            if piece.side != "in" or not homes:
                return None
            for module in homes:
                axis = _channel_axis(module, piece)
                if axis is None or getattr(module, "weight", None) is not entry:
                    return None
                found.setdefault((module, piece.dim), (module, piece, axis))  # tied names have the same parameter
        return list(found.values())

    return {name: readers(group) for name, group in graph.groups.items()}


@contextmanager
def inputs_of(layers: Iterable[nn.Module], *, differentiable: bool = False) -> Iterator[dict[nn.Module, list[Tensor]]]:
    """Inside the context, record the input of each call of some layers, with gradients if `differentiable`."""
    calls: dict[nn.Module, list[Tensor]] = {}

    def note(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor):
            return None
        x = args[0]
        if differentiable:
            if torch.is_inference_mode_enabled():  # no tensor gets a gradient in it
                return None
            x = x.clone() if x.is_inference() else x
            # A separate view, whose gradient leaves out other layers that take the same tensor.
            x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
        calls.setdefault(layer, []).append(x)
        return (x, *args[1:])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_pre_hook(note).remove)
        yield calls


def sum_up(parts: Sequence[Tensor]) -> Tensor:
    return reduce(lambda total, part: total + part.to(total.device), parts)


def gate_squares(criterion: DataDriven, model: nn.Module, graph: UnitGraph, *, positions: bool = False) -> dict[str, Tensor]:
    """Return the mean of (∂L/∂gate)² over the criterion's batches: group name → float64 (units,), on the CPU.

    The gradients of single examples are squared if the units are inputs of linear layers and convolutions that have the
    examples on the first axis of their input, alone or merged with time or windows. Otherwise, the mean square is estimated by
    B·g² from the gradient g of a batch of B examples, which is exact in expectation if the mean is zero.

    With `positions`, the gradient at each position of an example (token, pixel) is squared, and the squares are added up. If
    positions are independent, both estimates have the same expectation, and this one has far less noise.

    Raises:
        InvalidValueError: the loss does not depend on the units of a group, or all gradients are zero.
    """
    readers = unit_readers(model, graph)
    gated = {name: [pair for pair in pairs if pair[1].gated] for name, pairs in unit_entries(model, graph).items()}
    layers = {module for found in readers.values() for module, _, _ in found or ()}
    weights = {id(entry): entry for pairs in gated.values() for entry, _ in pairs if entry.is_floating_point()}
    sums: dict[str, Tensor] = {}
    seen, mixing = 0, None
    with criterion._passes(model, weights.values()) as passes:
        for batch in passes:
            examples = batch.examples
            mixing = _mixing(model, batch, layers, with_target=criterion.loss is None) if mixing is None else mixing
            with inputs_of(layers, differentiable=True) as calls:
                loss = criterion._loss(model, batch)
                found = _one_pass(loss, calls, readers, gated, examples, positions, mixing)
            seen += examples
            for name, squares in found.items():
                sums[name] = sum_up([sums[name], squares]) if name in sums else squares
    for name in graph.groups:
        if name not in sums:
            raise InvalidValueError(
                f"the loss does not depend on the units of group {name!r}, or this part of the forward pass runs without"
                " gradients (torch.no_grad, detach); leave the group out with sparsekit.graph.edit.without, use a loss over all"
                " outputs, or use Wanda or Magnitude, which need no gradients"
            )
    if graph.groups and not any(bool(sums[name].any()) for name in graph.groups):
        raise InvalidValueError(
            "the gradients of the loss are all zero on these batches. Are the targets the model's own outputs? Then pass"
            " batches of inputs alone and no loss to prune(), which compares with these outputs; or use Wanda, which"
            " needs no loss"
        )
    return {name: sums[name].cpu().double() / seen for name in graph.groups}


def _one_pass(
    loss: Tensor,
    inputs: Mapping[nn.Module, list[Tensor]],
    readers: Mapping[str, list[ReadBy] | None],
    gated: Mapping[str, list[tuple[nn.Parameter, UnitSlice]]],
    examples: int,
    positions: bool,
    mixing: Container[nn.Module],
) -> dict[str, Tensor]:
    """Return group name → Σ (∂L/∂gate)² over the examples, float (units,), without groups that are not part of the loss."""
    direct = {
        name: found
        for name, found in readers.items()
        if found and all(m not in mixing and _by_example(inputs.get(m, []), axis, examples) for m, _, axis in found)
    }
    wanted = {id(entry): entry for name, pairs in gated.items() if name not in direct for entry, _ in pairs}
    calls = [(module, x) for module, every in inputs.items() for x in every]
    targets = [*(x for _, x in calls), *wanted.values()]
    if not targets:
        return {}
    gradients = torch.autograd.grad(loss, targets, allow_unused=True)
    axes = {module: axis for found in direct.values() for module, _, axis in found}
    at_input: dict[nn.Module, list[Tensor]] = {}
    for (module, x), gradient in zip(calls, gradients):
        if module in axes and gradient is not None:
            product = (wide(x.detach()) * wide(gradient)).movedim(axes[module], -1)
            each = product.reshape(examples, -1, product.shape[-1])
            at_input.setdefault(module, []).append(each if positions else each.sum(1, keepdim=True))
    of_weight = {id(entry): g for entry, g in zip(wanted.values(), gradients[len(calls) :]) if g is not None}
    found = {}
    for name, pairs in gated.items():
        if name in direct:
            own = [(each, piece.index) for module, piece, _ in direct[name] for each in at_input.get(module, ())]
            parts = [_doubled(each[..., index.to(each.device)].sum(-1) * examples) for each, index in own]
            if parts:
                rows = parts if positions else [sum_up([part.sum(1) for part in parts])]
                found[name] = sum_up([part.square().flatten(0, -2).sum(0) for part in rows])
        else:
            products = [(wide(e.detach()) * wide(of_weight[id(e)]), piece) for e, piece in pairs if id(e) in of_weight]
            parts = [along_axis(each, piece.dim)[piece.index.to(each.device)].sum(1) for each, piece in products]
            if parts:
                # B·g² estimates the mean square over B independent examples with zero mean; one more B makes it their sum.
                found[name] = _doubled(sum_up(parts)).square() * examples * examples
    return found


def _doubled(values: Tensor) -> Tensor:
    return values if values.device.type == "mps" else values.double()


def _by_example(inputs: Sequence[Tensor], axis: int, examples: int) -> bool:
    """Return whether a layer was called, and always with a multiple of `examples` rows on the first axis."""
    return bool(inputs) and all(x.dim() >= 1 - axis and x.shape[0] and x.shape[0] % examples == 0 for x in inputs)


def _mixing(model: nn.Module, batch: Batch, layers: Iterable[nn.Module], *, with_target: bool) -> set[nn.Module]:
    """Return the layers that do not keep the rows of an example together on the first axis, such as layers with time first.

    To find them, the first example replaces the last one. Only the last rows may change then.
    """
    examples = batch.examples
    if examples < 2:
        return set()

    def swap(tensor: Tensor) -> Tensor:
        axis = next((axis for axis, size in enumerate(tensor.shape[:2]) if size == examples), None)
        if axis is None:
            return tensor
        return torch.cat([tensor.narrow(axis, 0, examples - 1), tensor.narrow(axis, 0, 1)], axis)

    seen = []
    for given in (batch, batch.map(swap)):
        with torch.no_grad(), inputs_of(layers) as calls:
            given.run(model, with_target=with_target)
        seen.append(calls)
    found = set()
    for layer, inputs in seen[0].items():
        for x, other in zip(inputs, seen[1].get(layer, ())):
            away = (wide(x) - wide(other)).abs() > 1e-3 * wide(x).abs().max() if x.shape == other.shape else torch.ones(2, 1)
            last = len(away) // examples
            if bool(away[: len(away) - last].any()):
                found.add(layer)
    return found
