"""LaneModel: one module, run for all lanes at once on their stacked weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sparsekit._torch import DropoutNd, buffers_of, lane_axis, lanes_in, lanes_out, parameters_of, tree_map_only
from sparsekit.graph.mask import UnitMask
from sparsekit.graph.state import StateDict
from sparsekit.surgery.rebuild import copy_with
from sparsekit_fl.lanes import kernels

__all__ = ["BoundModel", "LaneModel", "refusal"]


def refusal(module: nn.Module) -> str | None:
    """Say why a module cannot run for several clients at once, as far as its layers tell; None where nothing speaks against.

    Dropout draws from one generator, and each client has its own.
    """
    for name, part in module.named_modules():
        drops = part.p if isinstance(part, DropoutNd) else getattr(part, "dropout", 0.0)
        if isinstance(drops, float) and drops > 0:
            return f"{type(part).__name__} {name!r} draws random numbers while training"
    return None


class LaneModel:
    """A module whose state is given at each call.

    Args:
        module: Of the shapes that the lanes have; copied.
        divided: Names of layers whose outputs are divided by a number of the lane.
    """

    def __init__(self, module: nn.Module, divided: Iterable[str] = ()) -> None:
        self._module = copy_with(module, {})
        self._mode = _LaneMode()
        self._places: dict[str, tuple[nn.Module, str]] = {}
        self._divisor: Any = 1.0
        self._holds: StateDict | None = None
        for part in self._module.modules():
            if isinstance(part, nn.RNNBase):
                # It would ask for addresses in memory, which mapped tensors do not have.
                part.flatten_parameters = lambda: None  # type: ignore[method-assign]
        self.parameters: dict[str, bool] = {}
        """Name → whether it trains."""
        self.buffers: set[str] = set()
        saved = set(self._module.state_dict())
        modules = dict(self._module.named_modules())
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        for name, tensor in named:
            if name in saved:
                owner, _, attribute = name.rpartition(".")
                self._places[name] = modules[owner], attribute
                if isinstance(tensor, nn.Parameter):
                    self.parameters[name] = tensor.requires_grad
                else:
                    self.buffers.add(name)
        self._tied = self._aliases(saved)
        for owner_module, attribute in [*self._places.values(), *self._tied.values()]:
            parameters_of(owner_module).pop(attribute, None)
            buffers_of(owner_module).pop(attribute, None)
        for name in divided:
            self._module.get_submodule(name).register_forward_hook(self._divide)

    def _aliases(self, saved: set[str]) -> dict[str, tuple[nn.Module, str]]:
        """Other names of tied entries: alias → where it is. `self.names` says which entry each stands for."""
        first = {id(tensor): name for name, tensor in self._module.state_dict(keep_vars=True).items() if name in self._places}
        modules = dict(self._module.named_modules(remove_duplicate=False))
        self.names: dict[str, str] = {}
        aliases: dict[str, tuple[nn.Module, str]] = {}
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            self.names[name] = first.get(id(tensor), name)
            if name in saved and name not in self._places:
                owner, _, attribute = name.rpartition(".")
                aliases[name] = modules[owner], attribute
        return aliases

    def _divide(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:  # noqa: ARG002 - torch's signature
        divided: Tensor = output / self._divisor
        return divided

    def _put(self, state: StateDict) -> None:
        self._holds = None
        for name, (owner, attribute) in self._places.items():
            owner.__dict__[attribute] = state[name]
        for name, (owner, attribute) in self._tied.items():
            owner.__dict__[attribute] = state[self.names[name]]

    def __call__(self, state: StateDict, inputs: Sequence[Tensor], divisors: Tensor | None = None) -> Any:
        """Run all lanes in training mode. Running statistics move in place.

        Args:
            state: Name → (lanes, …), every parameter and buffer.
            inputs: The model's positional inputs, (lanes, batch, …) each.
            divisors: float (lanes,); None divides nothing.
        """

        def one(own: StateDict, arguments: Sequence[Tensor], divisor: Any) -> Any:
            self._put(own)
            self._divisor = divisor
            return self._module(*arguments)

        self._module.train()
        ones = 1.0 if divisors is None else divisors
        mapped = torch.func.vmap(one, in_dims=(0, 0, None if divisors is None else 0), randomness="error")
        with self._mode:
            return mapped(dict(state), tuple(inputs), ones)

    def alone(self, state: StateDict, inputs: Sequence[Any], *, training: bool, divisor: float = 1.0) -> Any:
        """Run one lane as an ordinary module.

        Args:
            state: Name → tensor of that lane; a dict that does not change.
            inputs: The model's positional inputs, (batch, …) each.
            training: Whether it is in training mode.
            divisor: Of the layers whose outputs are divided.
        """
        if self._holds is not state:
            self._put(state)
            self._holds = state
        self._divisor = divisor
        if self._module.training is not training:
            self._module.train(training)
        return self._module(*inputs)


class BoundModel(nn.Module):
    """The model of one lane, as a module that can be scored.

    Args:
        model: The module of all lanes.
        state: What the lane holds: name → tensor.
        mask: The units of the lane's client, by which the FLOPs of scoring it are counted; None for all of them.
        divisor: Of the layers whose outputs are divided.
    """

    def __init__(self, model: LaneModel, state: StateDict, mask: UnitMask | None = None, *, divisor: float = 1.0) -> None:
        super().__init__()
        self.mask = mask
        self._divisor = divisor
        self._model = model
        self._state = dict(state)

    def forward(self, *inputs: Any) -> Any:
        """What the lane's model gives."""
        return self._model.alone(self._state, inputs, training=self.training, divisor=self._divisor)


class _LaneMode(TorchFunctionMode):
    """Hands functions with weights to the kernels, wherever the model calls them; torch maps all others by itself."""

    def __init__(self) -> None:
        super().__init__()
        self._table: Mapping[Any, Callable[..., Any]] = {
            F.conv1d: self._conv(F.conv1d),
            F.conv2d: self._conv(F.conv2d),
            F.conv3d: self._conv(F.conv3d),
            F.linear: self._linear,
            F.batch_norm: self._batch_norm,
            F.embedding: self._embedding,
            torch.lstm: self._lstm,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        known = self._table.get(func)
        found = NotImplemented if known is None else known(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if found is NotImplemented else found

    def _conv(self, conv: Callable[..., Tensor]) -> Callable[..., Any]:
        rank = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}[conv]

        def run(
            input: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            dilation: Any = 1,
            groups: int = 1,
        ) -> Any:
            if lane_axis(weight) is None or input.ndim != rank + 2:
                return NotImplemented
            x, own, shift = _whole(input, weight, bias)
            return _mapped(kernels.conv(conv, x, own, shift, (stride, padding, dilation, groups)))

        return run

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        if lane_axis(weight) is None or weight.ndim != 2:
            return NotImplemented
        return _mapped(kernels.linear(*_whole(input, weight, bias)))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        statistics = [tensor for tensor in (running_mean, running_var, weight) if tensor is not None]
        if not statistics or lane_axis(statistics[0]) is None:
            return NotImplemented
        if training and input.numel() // input.shape[1] == 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(input.shape)}")
        x, *rest = _whole(input, running_mean, running_var, weight, bias)
        mean, variance, scale, shift = rest
        return _mapped(kernels.batch_norm(x, mean, variance, scale, shift, training, momentum, eps))

    def _embedding(
        self,
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        del norm_type
        if lane_axis(weight) is None or max_norm is not None or scale_grad_by_freq or sparse:
            return NotImplemented
        tokens, table = _whole(input, weight)
        return _mapped(kernels.embedding(tokens, table, padding_idx))

    def _lstm(self, input: Tensor, hx: Any, params: Any, *options: Any) -> Any:
        # With an input of packed sequences the signature is another one; with a projection there are five weights a layer.
        if not isinstance(params, list | tuple) or lane_axis(params[0]) is None or hx[0].shape[-1] != hx[1].shape[-1]:
            return NotImplemented
        x, hidden, cells, *weights = _whole(input, *hx, *params)
        return tree_map_only(Tensor, _mapped, kernels.lstm(x, (hidden, cells), weights, options))


def _whole(*tensors: Tensor | None) -> list[Any]:
    """All lanes of each tensor, along its first axis; a tensor that all lanes share is repeated without copying it."""
    axes = [None if tensor is None else lane_axis(tensor) for tensor in tensors]
    found: list[Any] = []
    pairs = list(zip(tensors, axes, strict=True))
    lanes = next(lanes_out(tensor).shape[axis] for tensor, axis in pairs if tensor is not None and axis is not None)
    for tensor, axis in pairs:
        if tensor is None:
            found.append(None)
        elif axis is None:
            found.append(tensor.expand(lanes, *tensor.shape))
        else:
            found.append(lanes_out(tensor).movedim(axis, 0))
    return found


def _mapped(tensor: Tensor) -> Tensor:
    return lanes_in(tensor, 0)
