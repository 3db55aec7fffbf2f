"""WithExits and place_exits(): output layers after the first parts of a model, so that a weak client trains those parts only.

An exit sits where a layer reads its input. Running to an exit stops there: what comes after is neither computed nor
differentiated, whatever code calls the layers.
"""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsekit.errors import InvalidValueError
from sparsekit.graph import Layer, prefix_entries
from sparsekit.layers import is_convolution
from sparsekit.measure import cost_model
from sparsekit.tracing import trace_layers
from sparsekit_fl.client.context import part_flops

_GRID = 4
_MOST = 4  # exits: as many as the paper has in its ResNets, and as a VGG has pools between its layers


class ExitHead(nn.Module):
    """One linear layer on the features; those of a convolution are averaged to a grid of at most 4 positions per axis first.

    Other features are averaged over the axes between examples and features, unless the model gives an output for each of
    those positions. `inputs` and `outputs` are shapes with the axis of examples; features are on axis 1 after a
    convolution, else on the last.
    """

    def __init__(self, inputs: Sequence[int], outputs: Sequence[int], *, convolution: bool) -> None:
        super().__init__()
        self._grid = tuple(min(_GRID, size) for size in inputs[2:]) if convolution else ()
        self._averages = not convolution and tuple(inputs[:-1]) != tuple(outputs[:-1])
        self.linear = nn.Linear(inputs[1] * math.prod(self._grid) if convolution else inputs[-1], outputs[-1])

    def forward(self, inputs: Tensor) -> Tensor:
        """Return float (N, features, …) or (N, …, features) → (N, outputs), or (N, …, outputs)."""
        if self._grid:
            pools: tuple[Any, ...] = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)
            inputs = pools[len(self._grid) - 1](inputs, self._grid).flatten(1)
        elif self._averages and inputs.dim() > 2:
            inputs = inputs.flatten(1, -2).mean(1)
        result: Tensor = self.linear(inputs)
        return result


class _Stop(BaseException):
    """Ends a forward pass at an exit. No `Exception`, which a model's own code may catch."""


class WithExits(nn.Module):
    """A model with exits; called, it gives the mean of all outputs, its own among them. The model's state is under "model.".

    `places` are qualified names of the modules before which the exits `heads` are, in forward order; each is called once per
    pass.
    """

    def __init__(self, model: nn.Module, places: Sequence[str], heads: Sequence[nn.Module]) -> None:
        super().__init__()
        self.model = model
        self.exits = nn.ModuleList(heads)
        self._places = tuple(places)

    @property
    def depth(self) -> int:
        """Number of outputs: the exits, and the model's own."""
        return len(self._places) + 1

    def outputs(self, *inputs: Any, depth: int | None = None) -> list[Tensor]:
        """Return the outputs of the first `depth` exits, in [1, self.depth]; None gives all, the model's own last.

        Nothing behind the last one asked for is run.
        """
        depth = self.depth if depth is None else depth
        found: list[Tensor] = []

        def leave(head: nn.Module, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001 - torch's signature
            found.append(head(args[0]))
            if len(found) == depth:
                raise _Stop

        handles = [
            self.model.get_submodule(place).register_forward_pre_hook(partial(leave, head))
            for place, head in list(zip(self._places, self.exits, strict=True))[:depth]
        ]
        try:
            found.append(self.model(*inputs))
        except _Stop:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return found

    def forward(self, *inputs: Any) -> Tensor:
        """Return the mean of all outputs."""
        return torch.stack(self.outputs(*inputs)).mean(0)


def _read_by(model: nn.Module, layers: Sequence[Layer], inputs: tuple[Any, ...]) -> tuple[dict[int, Tensor], Any]:
    """Return what each layer reads, with its graph, of those that are modules called once with a tensor; and the outputs."""
    modules, calls = dict(model.named_modules()), dict[int, list[Any]]()

    def note(place: int, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG001 - torch's signature
        calls.setdefault(place, []).append(args[0] if args else None)

    for place, layer in enumerate(layers):
        if layer.name and layer.name in modules:
            modules[layer.name].register_forward_pre_hook(partial(note, place))
    with torch.enable_grad():
        outputs = model(*inputs)
    return {place: args[0] for place, args in sorted(calls.items()) if len(args) == 1 and isinstance(args[0], Tensor)}, outputs


def _depends(read: Tensor, before: Sequence[Layer], parameters: Mapping[str, nn.Parameter]) -> bool:
    """Return whether what is read depends on every layer before: the model is a chain up to there."""
    names = {name for layer in before for name in layer.entries}
    wanted = [parameter for name, parameter in parameters.items() if name in names and parameter.requires_grad]
    if not wanted or not read.requires_grad:
        return False
    found = torch.autograd.grad(read.sum(), wanted, allow_unused=True, retain_graph=True)
    return all(gradient is not None for gradient in found)


def _spread(places: Sequence[int], shares: Sequence[float]) -> list[int]:
    """Return at most four places whose shares of the model's work are nearest to equal parts."""
    if len(places) <= _MOST:
        return list(places)
    left = list(places)
    for step in range(1, _MOST + 1):
        left.remove(min(left, key=lambda place: abs(shares[place] - step / (_MOST + 1))))
    return [place for place in places if place not in left]


def place_exits(build: Callable[[], nn.Module], inputs: tuple[Any, ...]) -> WithExits:
    """Build a model and give it exits, each one linear layer, at most four besides the model's own output.

    They are where the resolution of the features changes, as it does at the pools of a convolutional network, or, where it
    never does, before every layer; only where each layer before takes part in what arrives there, and the layers before
    multiply at all. Of too many, those that cut the model's work into the most equal parts are taken. Just before the last
    layer there is one only if there is no other place.

    Args:
        build: Builds the model.
        inputs: One call's.

    Raises:
        InvalidValueError: no place for an exit; says what is needed.
    """
    model = build()
    layers, private = trace_layers(model, *inputs), copy.deepcopy(model).eval()
    read, outputs = _read_by(private, layers, inputs)
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        raise InvalidValueError(
            f"exits need a model that gives one tensor (N, …, outputs), {type(model).__name__} gives"
            f" {tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__}"
        )
    costs = cost_model(model, *inputs)
    work = [part_flops(costs, prefix_entries(layers, place)) for place in range(len(layers))]
    convolution = {place: is_convolution(private.get_submodule(layers[place].name)) for place in read}
    # Number of axes, and the positions for which there are features; token ids are not features.
    resolutions = {
        place: (one.dim(), *(one.shape[2:] if convolution[place] else one.shape[1:-1]))
        for place, one in read.items()
        if one.is_floating_point()
    }
    parameters = dict(private.named_parameters())
    usable = [
        place
        for place in resolutions
        if place > 0
        and work[place] > 0
        and len(read[place]) == len(outputs)
        and _depends(read[place], layers[:place], parameters)
    ]
    inner = [place for place in usable if place < len(layers) - 1] or usable
    changed = [place for place in inner if place - 1 in resolutions and resolutions[place - 1] != resolutions[place]]
    chosen = _spread(changed or inner, [flops / max(1, costs.forward_flops(None)) for flops in work])
    if not chosen:
        names = ", ".join(layer.name or "the model itself" for layer in layers)
        raise InvalidValueError(
            f"{type(model).__name__} has no place for an exit: its layers are, in forward order, {names}. An exit needs a layer"
            " that is a module of its own, is called once per pass, and reads what all the layers before it have made"
        )
    heads = [ExitHead(read[place].shape, outputs.shape, convolution=convolution[place]) for place in chosen]
    return WithExits(model, [layers[place].name for place in chosen], heads)
