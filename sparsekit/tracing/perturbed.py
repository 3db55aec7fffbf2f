"""PerturbedState: perturbed entries of a model, which can be zeroed and restored."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from sparsekit._torch import buffers_of
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import along
from sparsekit.surgery.rebuild import copy_with, named_entries

_TINY = 1e-3


class PerturbedState:
    """Copies of entries, with statistics, scales and biases of order one, so that initial zeros cannot hide an error.

    Floating-point entries have the dtype given for their name, or else their own. Tensors of the model are not changed.
    """

    def __init__(
        self,
        entries: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype | None],
        generator: torch.Generator,
        constants: Mapping[str, Tensor],
        dtype: torch.dtype | None,
    ) -> None:
        self.values: dict[str, Tensor] = {}
        self._zeroed: dict[int, Tensor] = {}
        self._origin: dict[int, Tensor] = {}  # id of the value → tensor to restore it from
        self._drawn: list[tuple[str, Tensor, Tensor]] = []
        done: dict[int, Tensor] = {}
        for name, own in entries.items():
            if id(own) not in done:
                value = done[id(own)] = _perturbed(name, own.detach(), dtypes.get(name), generator)
                self._origin[id(value)] = value.clone() if _is_changed(own) else own.detach()
                if _is_changed(own) and isinstance(own, nn.Parameter):
                    self._drawn.append((name, own.detach(), value))
            self.values[name] = done[id(own)]
        for name, own in constants.items():
            if id(own) not in done:
                wanted = dtype if dtype is not None and own.is_floating_point() else own.dtype
                done[id(own)] = own.detach().to(wanted, copy=True)
            self.values[name] = done[id(own)]

    def redraw(self, generator: torch.Generator, *, positive: bool) -> None:
        """Draw other scales and biases, since a unit with zero activations cannot reveal an error.

        `positive` draws biases between 0.5 and 1.5, so that few units are silent after a ReLU.
        """
        for name, own, value in self._drawn:
            value.copy_(_perturbed(name, own, value.dtype, generator))
            if positive and "bias" in name.rpartition(".")[2]:
                value.copy_(torch.rand(own.shape, generator=generator) + 0.5)
            self._origin[id(value)] = value.clone()
            self._zeroed.pop(id(value), None)

    def zero_dropped(self, graph: UnitGraph, keep: Mapping[str, Tensor]) -> None:
        """Zero the entries that gates of 0 would zero, in place, after restoring the ones zeroed before.

        Gated copies of all entries would be most of the cost of verifying a large model. `keep`: group name → bool.
        """
        gates: dict[int, dict[int, Tensor]] = {}  # by value, since tied entries have several names
        values = {id(value): value for value in self.values.values()}
        for name, stays in keep.items():
            for piece in graph.groups[name].slices if not bool(stays.all()) else ():
                if piece.gated:
                    value = self.values[piece.name]
                    whole = torch.ones(value.shape[piece.dim], dtype=value.dtype)
                    gates.setdefault(id(value), {}).setdefault(piece.dim, whole)[piece.index[~stays].reshape(-1)] = 0.0
        self.restore(but=gates.keys())
        for key, axes in gates.items():
            value, source = values[key], self._origin[key]
            for dim, gate in axes.items():
                source = torch.mul(source, along(gate, dim, value.dim()).to(value.device), out=value)
            self._zeroed[key] = value

    def restore(self, but: Collection[int] = ()) -> None:
        """Restore zeroed values, except for some, given by their ids."""
        for key in self._zeroed.keys() - but:
            self._zeroed.pop(key).copy_(self._origin[key])


def is_meta(model: nn.Module) -> bool:
    """Return whether entries of the model are on the meta device, where they have no values."""
    return any(tensor.is_meta for tensor in named_entries(model).values())


def with_values(model: nn.Module, outside: Mapping[int, object]) -> nn.Module:
    """Return a copy of a module on the meta device with random values: entries about as large as in a trained layer.

    `outside` is as for `copy_with`.
    """
    generator = torch.Generator().manual_seed(20131)

    def values(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        scale = tensor.shape[-1] ** -0.5 if tensor.dim() > 1 else 1.0
        return (torch.randn(tensor.shape, generator=generator) * scale).to(tensor.dtype)

    entries = named_entries(model)
    made = {id(tensor): values(tensor) for tensor in entries.values()}
    twin = copy_with(model, {name: made[id(tensor)] for name, tensor in entries.items()}, outside=outside)
    for module in twin.modules():
        for name, buffer in buffers_of(module).items():
            if buffer is not None and buffer.is_meta:  # one that is not part of the state
                buffers_of(module)[name] = values(buffer)
    return twin


def _perturbed(name: str, own: Tensor, dtype: torch.dtype | None, generator: torch.Generator) -> Tensor:
    value = own.to(dtype if own.is_floating_point() and dtype is not None else own.dtype, copy=True)
    if _is_changed(own):
        noise = torch.empty(own.shape, dtype=value.dtype, device="cpu").uniform_(-1.0, 1.0, generator=generator).to(own.device)
        if name.endswith("running_var"):
            value.copy_(1.0 + 0.5 * noise)
        elif name.endswith("running_mean"):
            value.copy_(0.5 * noise)
        else:
            value.add_(0.3 * noise)
    return value


def _is_changed(own: Tensor) -> bool:
    """Return whether to perturb an entry: at most one of its axes is longer than 1, or all of its values are tiny."""
    return (
        own.is_floating_point() and own.layout is torch.strided and (own.numel() == max(own.shape, default=1) or _is_tiny(own))
    )


def _is_tiny(tensor: Tensor) -> bool:
    # The first few numbers nearly always decide.
    return not bool((tensor.reshape(-1)[:8].abs() > _TINY).any()) and not bool((tensor.abs() > _TINY).any())
