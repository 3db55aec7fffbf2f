"""TorchPruning: an importance class of the library Torch-Pruning as a criterion.

Its importance classes read a list of pairs: what is cut from a layer by which of its pruning functions, and at which
positions. Such a list follows from our index table; its own graph is not needed, so that every model that we can trace is
scored, by exactly the numbers that the class would give there.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from sparsekit._torch import ConvNd, InstanceNorm, NormBase, tree_map_only
from sparsekit.criteria.base import ScoringContext
from sparsekit.criteria.batches import (
    Batch,
    DataDriven,
    Loss,
    call_model,
    check_finite,
    example_count,
    split_batch,
)
from sparsekit.errors import InvalidValueError, MissingDependencyError, MissingImportanceError, install_hint
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup, UnitSlice


class Cut:
    """What goes from one layer: unpacks to (dependency, positions), as an item of that library's groups does."""

    def __init__(self, layer: nn.Module, function: Any, positions: list[int], root_positions: list[int]) -> None:
        self.dep = SimpleNamespace(
            layer=layer, target=SimpleNamespace(module=layer), pruning_fn=function, handler=function, trigger=function
        )
        self.idxs = positions
        self.root_idxs = root_positions

    def __iter__(self) -> Iterator[Any]:
        return iter((self.dep, self.idxs))

    def __getitem__(self, place: int) -> Any:
        return (self.dep, self.idxs)[place]


def _function(library: Any, layer: nn.Module, piece: UnitSlice) -> Any:
    """The library's function that cuts this slice of a layer; None for layers and axes that it does not know."""
    if isinstance(layer, ConvNd):
        if layer.groups > 1 and layer.groups == layer.out_channels:
            return library.prune_depthwise_conv_out_channels
        out = piece.dim == (1 if layer.transposed else 0)
        return library.prune_conv_out_channels if out else library.prune_conv_in_channels
    if isinstance(layer, nn.Linear):
        return library.prune_linear_out_channels if piece.dim == 0 else library.prune_linear_in_channels
    if isinstance(layer, InstanceNorm):
        return library.prune_instancenorm_out_channels
    if isinstance(layer, NormBase):
        return library.prune_batchnorm_out_channels
    kinds = (
        (nn.LayerNorm, library.prune_layernorm_out_channels),
        (nn.GroupNorm, library.prune_groupnorm_out_channels),
        (nn.PReLU, library.prune_prelu_out_channels),
        (nn.Embedding, library.prune_embedding_out_channels),
    )
    return next((function for kind, function in kinds if isinstance(layer, kind)), None)


def cuts_of(group: UnitGroup, model: nn.Module) -> list[Cut]:
    """A group in the form that importance classes read: one cut for each layer and side, those that make the units first.

    Root positions are those along the first cut; where another layer has more or fewer positions a unit, they are spread evenly
    over the unit's.
    """
    library = _library()
    modules = dict(model.named_modules())
    ordered = sorted((piece for piece in group.slices if piece.name.endswith("weight")), key=lambda piece: piece.side == "in")
    cuts: list[Cut] = []
    root_span = 0
    for piece in ordered:
        layer = modules.get(piece.name.rpartition(".")[0])
        function = None if layer is None else _function(library, layer, piece)
        if layer is None or function is None:
            continue
        span = piece.span
        root_span = root_span or span
        pairs = sorted(
            (position, unit * root_span + place * root_span // span)
            for unit, positions in enumerate(piece.index.tolist())
            for place, position in enumerate(positions)
        )
        cuts.append(Cut(layer, function, [position for position, _ in pairs], [root for _, root in pairs]))
    return cuts


def _library() -> Any:
    try:
        import torch_pruning
    except ImportError as error:
        raise MissingDependencyError(
            f"TorchPruning needs the package torch-pruning; install it with {install_hint('torch-pruning')}"
        ) from error
    return torch_pruning


@dataclass(frozen=True)
class TorchPruning(DataDriven):
    """Score units by an importance object of Torch-Pruning: magnitude, LAMP, FPGM, Taylor, Hessian, activation, or your own.

    Classes that read gradients (`GroupTaylorImportance`) get those of the batches, summed into `.grad`, as after a
    `backward()` on each; classes with `accumulate_grad` (`GroupHessianImportance`) those of every single example; classes
    with `compute_importance` (`ActivationImportance`) a forward pass on each batch. Gradients of the model are put back.

    Args:
        importance: Called on a group; returns one number for each channel of its first layer.
        batches: Data for classes that need it, as for `Fisher`.
        loss: As for `Fisher`.
        comparable: Whether its scores can be compared between groups. The library's global ranking takes this for granted,
            with scores divided by their group's mean by default.

    Source: Fang et al., DepGraph: Towards Any Structural Pruning, CVPR 2023; the package torch-pruning, 1.6 or later.
    """

    importance: Callable[[Any], Tensor | None] | None = field(default=None, compare=False)
    batches: Iterable[Batch] | None = field(default=None, kw_only=True, compare=False)
    loss: Loss | None = field(default=None, kw_only=True)
    comparable: bool = field(default=True, kw_only=True)

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        """Call the importance object on every group: float64, the mean over a unit's channels, as there for heads."""
        _library()
        if self.importance is None:
            raise MissingImportanceError("TorchPruning needs an object of one of its classes; TorchPruning(LAMPImportance())")
        model = self._model(context, graph)
        before = {parameter: parameter.grad for parameter in model.parameters()}
        attributes = {module: set(vars(module)) for module in model.modules()}
        try:
            if self.batches is None:
                return {name: self._one(group, model) for name, group in graph.groups.items()}
            for parameter in before:
                parameter.grad = None
            if not any(hasattr(self.importance, name) for name in ("accumulate_grad", "compute_importance")):
                # Classes that read no gradients need no loss.
                with contextlib.suppress(MissingImportanceError):
                    return {name: self._one(group, model) for name, group in graph.groups.items()}
            self._prepare(model)
            return {name: self._one(group, model) for name, group in graph.groups.items()}
        finally:
            for parameter, gradient in before.items():
                parameter.grad = gradient
            for module, names in attributes.items():
                for name in set(vars(module)) - names:  # activations that the object has noted on the layers
                    delattr(module, name)

    def _one(self, group: UnitGroup, model: nn.Module) -> Tensor:
        assert self.importance is not None
        cuts = cuts_of(group, model)
        name = type(self.importance).__name__
        try:
            found = self.importance(cuts) if cuts else None
        except AttributeError as error:
            if "grad" not in str(error) and "data" not in str(error):
                raise
            raise MissingImportanceError(
                f"{name} reads gradients that are not there ({error}); pass batches and a loss to TorchPruning"
            ) from error
        if found is None:
            raise InvalidValueError(
                f"{name} has no score for group {group.name!r}, none of whose layers it reads; leave the group out with"
                " sparsekit.graph.edit.without, or take another class"
            )
        if found.dim() != 1 or found.numel() % group.size:
            raise InvalidValueError(
                f"{name} returned scores of shape {tuple(found.shape)} for group {group.name!r} of {group.size} units;"
                " one number for each channel of its first layer is needed"
            )
        return check_finite(group.name, found.detach().cpu().double().reshape(group.size, -1).mean(1), name)

    def _prepare(self, model: nn.Module) -> None:
        """Bring gradients or activations to where the importance object looks for them."""
        by_example = getattr(self.importance, "accumulate_grad", None)
        watching = getattr(self.importance, "compute_importance", None)
        if watching is not None:
            with self._passes(model) as passes:
                for batch in passes:
                    args, kwargs, _ = split_batch(batch, keep_target=False)
                    with watching(model):
                        model(*args, **kwargs)
            return
        parameters = [p for p in model.parameters() if p.is_floating_point()]
        if by_example is not None:
            self.importance.zero_grad()  # type: ignore[union-attr]
        for parameter in parameters:
            parameter.grad = None
        with self._passes(model, parameters) as passes:
            for batch in passes:
                for part in (batch,) if by_example is None else _examples(batch):
                    call_model(model, part, self.loss).backward()
                    if by_example is not None:
                        by_example(model)
                        for parameter in parameters:
                            parameter.grad = None
        if by_example is not None:
            for parameter in parameters:  # where the object puts what it has accumulated
                parameter.grad = torch.zeros_like(parameter)


def _examples(batch: Any) -> Iterator[Any]:
    """The batch one example at a time."""
    examples = example_count(batch)

    def row(place: int) -> Callable[[Tensor], Tensor]:
        return lambda t: t[place : place + 1] if t.dim() and t.shape[0] == examples else t

    for place in range(examples):
        yield tree_map_only(Tensor, row(place), dict(batch) if isinstance(batch, Mapping) else batch)
