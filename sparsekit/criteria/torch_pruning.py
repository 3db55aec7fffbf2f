"""TorchPruning: use an importance class of the library Torch-Pruning as a criterion."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparsekit._torch import ConvNd
from sparsekit.criteria.base import ScoringContext
from sparsekit.criteria.batches import Batches, DataDriven, Loss, check_finite
from sparsekit.errors import InvalidValueError, MissingImportanceError, require
from sparsekit.graph import UnitGraph, UnitGroup, UnitSlice


class _Cut(NamedTuple("_Cut", [("dep", Any), ("idxs", list[int])])):
    """The cut of one layer: unpacks to (dependency, positions), as an item of that library's groups does."""

    root_idxs: list[int]


def _function(library: Any, layer: nn.Module, piece: UnitSlice) -> Any:
    """Return the library's function that cuts this slice of a layer; None if the library does not support the layer."""
    pruner = library.pruner.function.PrunerBox.get(library.ops.module2type(layer))
    depthwise = isinstance(layer, ConvNd) and 1 < layer.groups == layer.out_channels
    reads = isinstance(layer, ConvNd | nn.Linear) and piece.dim != int(getattr(layer, "transposed", False)) and not depthwise
    return None if pruner is None else pruner.prune_in_channels if reads else pruner.prune_out_channels


def _cuts_of(group: UnitGroup, model: nn.Module) -> list[_Cut]:
    """Return a group in the format of importance classes: one cut per layer and side, first those that produce the units.

    Root positions are along the first cut. If a layer has another number of positions per unit, they are spread evenly.
    """
    library, modules = require("torch_pruning"), dict(model.named_modules())
    cuts: list[_Cut] = []
    root_span = 0
    for piece in sorted(group.slices, key=lambda piece: piece.side == "in"):
        owner, _, attribute = piece.name.rpartition(".")
        layer = modules.get(owner) if attribute == "weight" else None
        function = None if layer is None else _function(library, layer, piece)
        if function is None:
            continue
        root_span = root_span or piece.span
        pairs = sorted(
            (position, unit * root_span + place * root_span // piece.span)
            for unit, positions in enumerate(piece.index.tolist())
            for place, position in enumerate(positions)
        )
        target = SimpleNamespace(module=layer)
        dependency = SimpleNamespace(layer=layer, target=target, pruning_fn=function, handler=function, trigger=function)
        cuts.append(_Cut(dependency, [position for position, _ in pairs]))
        cuts[-1].root_idxs = [root for _, root in pairs]
    return cuts


@dataclass(frozen=True)
class TorchPruning(DataDriven):
    """Score units by an importance object of Torch-Pruning: magnitude, LAMP, FPGM, Taylor, or your own.

    Classes that read gradients (`GroupTaylorImportance`) get the gradients of the batches, summed into `.grad`, as after a
    `backward()` on each. The model's gradients are restored. Classes that need separate passes (`GroupHessianImportance`,
    `ActivationImportance`) raise an error: use `Fisher` or `Wanda` in their place.

    Args:
        importance: Called on a group; returns one number for each channel of its first layer.
        batches: Data for classes that need it, as in `DataDriven`.
        loss: As in `DataDriven`.
        comparable: Whether its scores can be compared between groups. The library's global ranking takes this for granted,
            with scores divided by their group's mean by default.

    Source: Fang et al., DepGraph: Towards Any Structural Pruning, CVPR 2023; the package torch-pruning, 1.6 or later.
    """

    importance: Callable[[Any], Tensor | None] | None = field(default=None, compare=False)
    batches: Batches | None = field(default=None, kw_only=True, compare=False)
    loss: Loss | None = field(default=None, kw_only=True)
    comparable: bool = field(default=True, kw_only=True)

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Call the importance object on every group. A unit's score, float64, is the mean over its channels."""
        if self.importance is None:
            raise MissingImportanceError("TorchPruning needs an object of one of its classes; TorchPruning(LAMPImportance())")
        if any(hasattr(self.importance, name) for name in ("accumulate_grad", "compute_importance")):
            raise InvalidValueError(f"{type(self.importance).__name__} needs passes over data; use Fisher or Wanda")
        model = self._model(context, graph)
        before = {parameter: parameter.grad for parameter in model.parameters()}
        try:
            if self.batches is not None:
                for parameter in before:
                    parameter.grad = None
                # Classes that use no gradients need no loss.
                with contextlib.suppress(MissingImportanceError):
                    return {name: self._one(group, model) for name, group in graph.groups.items()}
                with self._passes(model, [p for p in before if p.is_floating_point()]) as passes:
                    for batch in passes:
                        self._loss(model, batch).backward()
            return {name: self._one(group, model) for name, group in graph.groups.items()}
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient

    def _one(self, group: UnitGroup, model: nn.Module) -> Tensor:
        assert self.importance is not None
        cuts, name = _cuts_of(group, model), type(self.importance).__name__
        try:
            found = self.importance(cuts) if cuts else None
        except AttributeError as error:
            if "grad" not in str(error) and "data" not in str(error):
                raise
            raise MissingImportanceError(
                f"{name} reads gradients that are not there ({error}); pass batches and a loss to TorchPruning"
            ) from error
        if found is None or found.dim() != 1 or found.numel() % group.size:
            raise InvalidValueError(
                f"{name} returned {'no scores' if found is None else f'scores of shape {tuple(found.shape)}'} for group"
                f" {group.name!r} of {group.size} units, not one number per channel of its first layer; leave the group out"
                " with sparsekit.graph.edit.without, or take another class"
            )
        return check_finite(group.name, found.detach().cpu().double().reshape(group.size, -1).mean(1), name)
