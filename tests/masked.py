"""The oracle of narrow training: a learnable mask over a dense network with gated entries, slow and simple.

While a unit is dropped, its weights and norm statistics do not change. When it enters, its optimizer state starts fresh.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from laws import DenseModel
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsekit import LearnableMask
from sparsekit.criteria.weights import unit_magnitudes
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import StateDict, narrow_shape, scatter, wide
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.compaction import compact
from sparsekit.surgery.optimizer_state import first_value
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.tracing.inputs import find_tensors, map_tensors
from sparsekit.training import learnable

Example = tuple[tuple[Any, ...], Tensor | None]
"""Inputs, and classes where the loss is a cross entropy; without them outputs are to be 1/2."""


def learnable_mask(*args: Any, execution: str = "compact", **kwargs: Any) -> LearnableMask:
    """A learnable mask, or with execution="masked" its oracle."""
    return (LearnableMask if execution == "compact" else _MaskedMask)(*args, **kwargs)


def classifier(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """Two hidden layers of 8 and 12 units, inputs and classes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    return model.to(dtype), torch.randn(12, 6, dtype=dtype), torch.randint(3, (12,))


def convolutions(
    dtype: torch.dtype = torch.float32, *, seed: int = 0, device: str | None = None
) -> tuple[nn.Module, Tensor, Tensor]:
    """Two convolutions with batch norms and a hidden layer, of 8, 6 and 10 units, images and their classes."""
    torch.manual_seed(seed)
    front = (nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    model = nn.Sequential(*front, nn.Flatten(), nn.Linear(24, 10), nn.ReLU(), nn.Linear(10, 3))
    return model.to(device, dtype), torch.randn(12, 2, 6, 6).to(device, dtype), torch.randint(3, (12,)).to(device)


def shake(masked: LearnableMask, seed: int) -> None:
    """Give units well separated importance, in an order that the seed draws."""
    own = masked.importance()
    order = torch.randperm(masked.graph.units, generator=torch.Generator().manual_seed(seed)) + 1
    parts = (order / masked.graph.units).split([len(values) for values in own.values()])
    masked.load_importance({name: part.to(values) for (name, values), part in zip(own.items(), parts, strict=True)})


def train_step(masked: LearnableMask, optimizer: Optimizer, x: Any, y: Tensor | None) -> Tensor:
    """One step; returns the loss, with its graph."""
    outputs = masked(*x) if isinstance(x, tuple) else masked(x)
    if y is None:
        loss = torch.stack([(each - 0.5).square().mean() for each in find_tensors(outputs) if each.requires_grad]).sum()
    else:
        loss = F.cross_entropy(outputs, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def batches_like(args: tuple[Any, ...]) -> Callable[[torch.Generator], Example]:
    """Draws of inputs of the same shapes, in float64, and of the same range where they are token ids."""

    def drawn(x: Tensor, generator: torch.Generator) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, dtype=torch.float64, generator=generator)
        return x if x.dtype == torch.bool else torch.randint(int(x.max()) + 1, x.shape, generator=generator)

    return lambda generator: (map_tensors(lambda x: drawn(x, generator), args), None)


def train_alike(
    model: nn.Module,
    draw: Callable[[torch.Generator], Example],
    make: Callable[[Any], Optimizer],
    *,
    steps: int,
    ratios: Mapping[int, float] | None = None,
    shaken: int = 0,
    changes: int = 1,
    tolerance: float = 1e-10,
    **options: Any,
) -> tuple[LearnableMask, LearnableMask]:
    """Train a learnable mask and its oracle alike, and fail at the step where they part.

    `ratios` maps a step to the ratio from then on; every `shaken` steps all units get another importance; the mask must be
    another after at least `changes` steps. Of an option that is a class each mask gets an instance of its own.
    """
    generator = torch.Generator().manual_seed(1)
    pair = []
    for which in ("compact", "masked"):
        own = {name: value() if isinstance(value, type) else value for name, value in options.items()}
        pair.append(learnable_mask(model, draw(generator)[0], execution=which, **own))
    optimizers = [make(masked.parameters()) for masked in pair]
    seen, before, losses = 0, pair[0].unit_mask(), {}
    for at in range(steps):
        x, y = draw(generator)
        for masked, optimizer in zip(pair, optimizers, strict=True):
            if ratios and at in ratios:
                masked.ratio = ratios[at]
            if shaken and at % shaken == shaken // 2:
                shake(masked, at)
            losses[masked] = train_step(masked, optimizer, x, y)  # its graph lives on during the next pass
        assert pair[0].unit_mask() == pair[1].unit_mask(), at
        seen, before = seen + (pair[0].unit_mask() != before), pair[0].unit_mask()
        states = [{name: value.double() for name, value in whole_state(masked).items()} for masked in pair]
        torch.testing.assert_close(*states, rtol=0, atol=tolerance, msg=lambda told, at=at: f"step {at}: {told}")
    assert seen >= changes
    return pair[0], pair[1]


def whole_state(masked: LearnableMask) -> dict[str, Tensor]:
    """Copies of all that training continues from, with dense weights: those of dropped units at their places."""
    own = {name: value.clone() for name, value in masked.state_dict().items() if name.startswith("sparsekit.")}
    return masked.dense_state() | {name: value for name, value in own.items() if not name.startswith("sparsekit.dropped.")}


def _itself(model: Any) -> Any:
    return model


class _MaskedMask(LearnableMask):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(learnable, "NarrowModel", MaskedModel), mock.patch.object(learnable, "UnitVectors", _itself):
            super().__init__(*args, **kwargs)
        self._restored: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def add_optimizer(self, optimizer: Any) -> None:
        if isinstance(optimizer, Optimizer) and optimizer not in self._restored:
            self._restored.add(optimizer)
            optimizer.register_step_pre_hook(lambda *_: self.narrow_model.before_step())
            optimizer.register_step_post_hook(lambda *_: self.narrow_model.after_step())  # before the mask changes
        super().add_optimizer(optimizer)


class MaskedModel:
    """Runs the dense module with gated entries, in place of the narrow model and its vectors."""

    def __init__(self, model: nn.Module, graph: UnitGraph, rules: object = None) -> None:
        self.graph = graph
        self.module = copy_with(model, {})
        self.mask = UnitMask.full(graph)
        self._dense = DenseModel(self.module, graph)
        self._saved: dict[str, Tensor] = {}
        self._stepped = self.mask
        self.version = 0
        self.group_sizes = tuple(group.size for group in graph.groups.values())

    @property
    def narrow_model(self) -> "MaskedModel":
        return self

    def _dropped_by_name(self, names: Iterable[str], mask: UnitMask | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, bool of its dropped entries) for all of `names` that units touch, under the mask or another."""
        kept = self.graph.kept_indices(self.mask if mask is None else mask)
        device = next(self.module.parameters()).device
        for name in names:
            if name in kept:
                shape = self.graph.shapes[name]
                stays = torch.zeros(narrow_shape(shape, kept[name]), dtype=torch.bool)
                yield name, scatter(stays, torch.ones(shape, dtype=torch.bool), kept[name]).to(device)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(self._gated(), args, kwargs)

    def _gated(self) -> dict[str, Tensor]:
        device = next(self.module.parameters()).device
        gates = {name: keep.float().to(device) for name, keep in self.mask.items()}
        return self.graph.gate(dict(self.module.named_parameters(remove_duplicate=False)), gates)

    @property
    def kept(self) -> Tensor:
        return torch.cat([self.mask[name] for name in self.graph.groups])

    def gate_gradient(self, gradients: Mapping[Tensor, Tensor] | None = None) -> Tensor:
        parameters = dict(self.module.named_parameters())
        sums = []
        for group in self.graph.groups.values():
            total = wide(next(iter(parameters.values()))).new_zeros(group.size)
            for piece in group.slices:
                leaf = parameters.get(piece.name)
                gradient = None if leaf is None else leaf.grad if gradients is None else gradients.get(leaf)
                if piece.gated and leaf is not None and gradient is not None:
                    product = wide(gradient) * wide(leaf.detach())
                    other = [dim for dim in range(product.dim()) if dim != piece.dim]
                    total += (product.sum(other) if other else product)[piece.index.to(total.device)].sum(1)
            sums.append(total)
        total = torch.cat(sums)
        return total * self.kept.to(total.device)

    def _call(self, gated: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the dense module; statistics of kept units are renewed."""
        # The forward pass writes statistics into copies, since autograd may need what it wrote, unchanged.
        buffers = {name: tensor for name, tensor in named_entries(self.module).items() if name not in gated}
        copies = {name: buffer.clone() for name, buffer in buffers.items()}
        result = self._dense.call({**gated, **copies}, self.mask, self.module, args, kwargs)
        dropped = dict(self._dropped_by_name(copies))
        for name, buffer in buffers.items():
            buffer.copy_(torch.where(dropped[name], buffer, copies[name]) if name in dropped else copies[name])
        return result

    def magnitudes(self) -> Tensor:
        weights = {name: parameter.detach() for name, parameter in self.module.named_parameters()}
        return torch.cat([unit_magnitudes(group, weights) for group in self.graph.groups.values()])

    def mask_unchanged(self, scores: Tensor) -> bool:
        del scores
        return False

    def set_mask(self, mask: UnitMask, optimizers: Sequence[Any] = ()) -> None:
        """Entering entries get the state of a fresh optimizer; for other optimizers than torch's, all of it is lost."""
        mask.check(self.graph)
        parameters = dict(self.module.named_parameters())
        kept = dict(self._dropped_by_name(parameters, mask))
        for name, before in self._dropped_by_name(parameters):
            entering, parameter = before & ~kept[name], parameters[name]
            for optimizer in optimizers if bool((before != kept[name]).any()) else ():
                state = optimizer.state.get(parameter, {})
                if not type(optimizer).__module__.startswith("torch.optim."):
                    state.clear()
                for kind, value in state.items():
                    if isinstance(value, Tensor) and value.dim() > 0:
                        value[entering] = first_value(optimizer, kind, parameter)
        self.mask = mask
        self.version += 1

    def load(self, state: StateDict, mask: UnitMask) -> None:
        self.graph.check_state(state)
        mask.check(self.graph)
        self.module.load_state_dict(dict(state))
        self.mask = mask

    def follow(self) -> None:
        pass

    def names(self) -> dict[str, list[str]]:
        return {name: [name] for name in self.module.state_dict()}

    def dropped(self) -> list[Tensor]:
        return []

    def compact(self) -> nn.Module:
        return compact(self.module, self.graph, self.mask)

    def dense_state(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in named_entries(self.module).items()}

    def before_step(self) -> None:
        self._saved = {name: parameter.detach().clone() for name, parameter in self.module.named_parameters()}
        self._stepped = self.mask

    def after_step(self) -> None:
        parameters = dict(self.module.named_parameters())
        for name, dropped in self._dropped_by_name(parameters, self._stepped):
            parameters[name].detach()[dropped] = self._saved[name][dropped]


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimization over SGD (Foret et al., arXiv 2010.01412): climb, then step from the saved weights."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, rho: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    def _leaves(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    @torch.no_grad()
    def first_step(self) -> None:
        leaves = self._leaves()
        norm = torch.stack([p.grad.norm() for p in leaves]).norm()
        for p in leaves:
            self.state[p]["old_p"] = p.detach().clone()
            p.add_(p.grad, alpha=float(self.defaults["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._leaves():
            p.copy_(self.state[p]["old_p"])
            p.sub_(p.grad, alpha=self.defaults["lr"])

    def step(self, closure: Callable[[], Tensor]) -> None:
        self.first_step()
        with torch.enable_grad():
            closure().backward()
        self.second_step()


class Lookahead(torch.optim.Optimizer):
    """SGD whose weights are pulled halfway back to slow weights every `every` steps (Zhang et al., arXiv 1907.08610)."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, every: int = 3) -> None:
        super().__init__(params, {"lr": lr})
        self.every = every
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                slow = self.state[p].setdefault("slow", p.detach().clone())
                p.sub_(p.grad, alpha=group["lr"])
                if self.steps % self.every == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)


class SamOver(Sam):
    """The same over a base optimizer with momentum that shares its parameter groups, and that writes to `.data`."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1, rho: float = 0.5) -> None:
        super().__init__(params, lr, rho)
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self._leaves():
            p.data = self.state[p]["old_p"].clone()
        self.base.step()
