"""How the shapes of activations follow the widths: told by passes in which one width at a time is halved.

A shape is taken for affine in the numbers of units, which holds for all that a cut leaves exact: an axis of units, several of
them side by side, an axis flattened with others.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations, count
from math import comb
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.layers import LayerRule
from sparsekit.measure.flops import told_failure
from sparsekit.measure.volumes import Axes
from sparsekit.surgery.rebuild import copy_with, named_entries, narrow_module
from sparsekit.tracing.blocks import is_meta
from sparsekit.tracing.inputs import map_tensors

T = TypeVar("T")


def length(axis: tuple[Any, Mapping[str, Any]], counts: Mapping[str, int]) -> Any:
    """Return the length of an axis where the groups keep `counts` units; of whole numbers exact."""
    return axis[0] + sum(each * counts[group] for group, each in axis[1].items())


def shape_at(axes: Axes, counts: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape where the groups keep `counts` units."""
    return tuple(max(int(bool(axis[1])), round(length(axis, counts))) for axis in axes)


def without_data(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Callable[[nn.Module, Any, Any], T]
) -> tuple[nn.Module, Any, Any, T]:
    """Return a model in eval mode, its inputs, and what `run` makes of them: on the meta device, where a pass costs no
    arithmetic, or as given. The model shares its parameters with the given one.

    Raises:
        TraceError: the model fails on the inputs.
    """
    bare = {id(entry): entry.detach().to("meta") for entry in named_entries(model).values()}  # tied ones stay tied
    copied = copy_with(model, {name: bare[id(entry)] for name, entry in named_entries(model).items()}).to("meta")
    light = (copied.eval(), *map_tensors(lambda tensor: tensor.to("meta"), (args, dict(kwargs))))
    with told_failure():
        try:
            return *light, run(*light)
        except Exception:
            if is_meta(model):
                raise
        whole = copy_with(model, dict(model.named_parameters(remove_duplicate=False))).eval()
        return whole, args, dict(kwargs), run(whole, args, dict(kwargs))


def probe_shapes(
    model: nn.Module,
    graph: UnitGraph,
    run: Callable[[nn.Module], Sequence[tuple[int, ...]]],
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
) -> tuple[Axes, ...]:
    """Let `run` list shapes of the dense model and of models in which one width is halved.

    A width with which the list becomes another one, or shapes of another rank, is taken for one that changes no shape: costs
    are then too high and never too low.

    Args:
        model: The dense model, in eval mode.
        graph: Its units.
        run: Model → shapes, in an order that widths do not change.
        rules: Rules for layers of your own.

    Returns:
        The shapes, of tied groups by the name of the first.
    """
    dense = list(run(model))
    first, sizes = _widths(graph)
    leaders = list(sizes)

    def shrinks(halved: Collection[str]) -> list[tuple[int, ...]] | None:
        """Return by how much each axis of each shape is shorter where some widths are halved."""
        halves = {name: _half(sizes[home]) for name, home in first.items() if home in halved}
        try:
            found = list(run(narrow_module(model, graph, _first_units(graph, halves), rules)))
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
        if [len(shape) for shape in found] != [len(shape) for shape in dense]:
            return None
        return [tuple(a - b for a, b in zip(one, other, strict=True)) for one, other in zip(dense, found, strict=True)]

    spans = _decoded(dense, leaders, sizes, shrinks)
    if spans is None:
        spans = [[{} for _ in shape] for shape in dense]
        for leader in leaders:
            lost = sizes[leader] - _half(sizes[leader])
            less = shrinks({leader}) if lost else None
            for place, axes in enumerate(less or ()):
                for dim, each in enumerate(axes):
                    if each > 0:
                        spans[place][dim][leader] = each / lost
    whole = {name: group.size for name, group in graph.groups.items()}
    return tuple(
        tuple((size - length((0, own), whole), own) for size, own in zip(shape, axes, strict=True))
        for shape, axes in zip(dense, spans, strict=True)
    )


def half_of_all(graph: UnitGraph) -> tuple[dict[str, int], dict[str, Tensor]]:
    """Return numbers of units where every width is halved, as `probe_shapes` halves them one by one, and the units that
    stay."""
    first, sizes = _widths(graph)
    counts = {name: _half(sizes[home]) for name, home in first.items()}
    return counts, _first_units(graph, counts)


def _widths(graph: UnitGraph) -> tuple[dict[str, str], dict[str, int]]:
    """Group → the first of its tied groups; that one → units of the least of them."""
    first = {name: tied[0] for tied in graph.tied_sets for name in tied}
    return first, {tied[0]: min(graph.groups[name].size for name in tied) for tied in graph.tied_sets}


def _first_units(graph: UnitGraph, counts: Mapping[str, int]) -> dict[str, Tensor]:
    return {name: torch.arange(group.size) < counts.get(name, group.size) for name, group in graph.groups.items()}


def _half(size: int) -> int:
    """Return about half of the units, and two where there are more: with a single one a copy may become a view."""
    return max(min(2, size - 1), size // 2, 1)


def _decoded(
    dense: Sequence[tuple[int, ...]],
    leaders: Sequence[str],
    sizes: Mapping[str, int],
    shrinks: Callable[[Collection[str]], list[tuple[int, ...]] | None],
) -> list[list[dict[str, float]]] | None:
    """Return the same from few passes, where no axis follows more than one width; None where one does.

    Each width is halved in half of the passes, in another half than every other width, so that the passes in which an axis is
    shorter name its width. Two widths together would name more than half of them.
    """
    number = next(n for n in count(2) if comb(n, n // 2) >= len(leaders))
    codes = dict(zip(combinations(range(number), number // 2), leaders))
    if number >= len(leaders):
        return None
    passes = []
    for place in range(number):
        found = shrinks({leader for code, leader in codes.items() if place in code})
        if found is None:
            return None
        passes.append(found)
    spans: list[list[dict[str, float]]] = [[{} for _ in shape] for shape in dense]
    for shape in range(len(dense)):
        for dim in range(len(dense[shape])):
            less = [found[shape][dim] for found in passes]
            code = tuple(place for place, each in enumerate(less) if each)
            if not code:
                continue
            if code not in codes or len({less[place] for place in code}) > 1:
                return None
            leader = codes[code]
            spans[shape][dim][leader] = less[code[0]] / (sizes[leader] - _half(sizes[leader]))
    return spans
