"""Latency as a function of the widths: a table of the model's own layers, measured on this device at this number of threads.

Each layer is run alone at some widths of its inputs and outputs; between them times are interpolated. What the layers do not
explain, such as sums written as functions, is the difference to the whole model, and goes down with the activations.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import gather, narrow_shape
from sparsekit.layers import LayerRule, find_rule, resize
from sparsekit.measure.clock import LatencyCache, device_of, stopwatch
from sparsekit.measure.paired import prepare
from sparsekit.measure.shapes import probe_shapes, shape_at, without_data
from sparsekit.measure.volumes import Array, Axes, Meter, Volumes
from sparsekit.rng import torch_generator
from sparsekit.surgery.rebuild import copy_with, named_entries
from sparsekit.tracing.inputs import find_tensors, map_tensors

SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)
"""Widths at which a layer is measured, as shares of its own."""


@dataclass(frozen=True)
class _Call:
    """One call of a layer in a pass of the dense model: where it is, and its arguments on the meta device."""

    name: str
    args: Any
    kwargs: Any
    output: tuple[int, ...]


class LatencyMeter(Meter):
    """Milliseconds of a forward pass."""

    def __init__(
        self,
        leaders: Sequence[str],
        inputs: Sequence[Sequence[Axes]],
        outputs: Sequence[Axes],
        dense: Mapping[str, int],
        grid: Array,
        tables: Array,
        whole_ms: float,
    ) -> None:
        """Set up the meter.

        Args:
            leaders: Of tied groups the first, which the shapes follow.
            inputs: Shapes of the tensors that each call gets.
            outputs: Shape that each call returns.
            dense: Group name → units of the dense model.
            grid: float (calls, 2, points): shares of inputs and of outputs at which the tables are.
            tables: float (calls, points, points): milliseconds.
            whole_ms: Time of the whole dense model.
        """
        self.volumes = Volumes([*(axes for some in inputs for axes in some), *outputs], leaders)
        self._owner = np.array([call for call, some in enumerate(inputs) for _ in some], dtype=np.int64)
        self._grid = grid
        total = float(tables[:, -1, -1].sum())
        self.table_error = (total - whole_ms) / whole_ms
        """(sum of the layers − whole model) / whole model, for the dense model."""
        # Layers run one by one may take longer than in a row; then the table is scaled to the whole.
        self._tables = tables * min(1.0, whole_ms / total) if total > 0 else tables
        self._rest = max(0.0, whole_ms - float(self._tables[:, -1, -1].sum()))
        self._dense = self._sides(self.volumes.at(dense))

    def _sides(self, entries: Array) -> tuple[Array, Array]:
        """float (calls,) each: the entries that calls get and return."""
        given, made = np.split(entries, [len(self._owner)])
        return np.bincount(self._owner, given, len(self._tables)).astype(np.float64), made

    def read(self, entries: Array) -> float:
        now, rows = self._sides(entries), np.arange(len(self._tables))
        places, weights = [], []
        for side in (0, 1):
            grid = self._grid[:, side]
            share = np.clip(now[side] / np.maximum(self._dense[side], 1.0), grid[:, 0], 1.0)
            place = np.clip((grid <= share[:, None]).sum(1) - 1, 0, grid.shape[1] - 2)
            low, high = grid[rows, place], grid[rows, place + 1]
            places.append(place)
            weights.append(np.where(high > low, (share - low) / np.maximum(high - low, 1e-12), 1.0))
        (i, j), (a, b), t = places, weights, self._tables
        near = t[rows, i, j] * (1 - b) + t[rows, i, j + 1] * b
        far = t[rows, i + 1, j] * (1 - b) + t[rows, i + 1, j + 1] * b
        traffic = float(now[1].sum() / max(1.0, self._dense[1].sum()))
        return float((near * (1 - a) + far * a).sum() + self._rest * traffic)


def measure_latency(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seconds: float = 0.5, least: int = 5
) -> float:
    """Median milliseconds of a forward pass without gradients, after two to warm up; takes `seconds`, and `least` passes."""
    with torch.no_grad():
        return _median_ms(lambda: model(*args, **kwargs), device_of(model, args), seconds=seconds, least=least)


def _median_ms(call: Callable[[], object], device: torch.device, *, seconds: float = 0.5, least: int = 5) -> float:
    timed = stopwatch(device)
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 200 and (len(times) < least + 2 or time.perf_counter() - begun < seconds):
        times.append(timed(call))
    return float(np.median(times[2:])) * 1000


def measure_table(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    graph: UnitGraph,
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
    runtime: str = "eager",
) -> LatencyMeter:
    """Measure the layers of the dense model at some widths, on the batch that is meant, or read what was measured before.

    Layers are measured in eager passes. Another runtime scales all times by what the whole dense model takes in it.
    """
    light, given, named, calls = without_data(model, args, kwargs, partial(_calls, rules=rules))

    def shapes(module: nn.Module) -> list[tuple[int, ...]]:
        found = _calls(module, given, named, rules)
        return [s for call in found for s in (*(tuple(t.shape) for t in find_tensors([call.args, call.kwargs])), call.output)]

    flat = iter(probe_shapes(light, graph, shapes, rules))
    inputs, outputs = [], []
    for call in calls:
        inputs.append(tuple(next(flat) for _ in find_tensors([call.args, call.kwargs])))
        outputs.append(next(flat))
    copied, device = copy_with(model, {}).eval(), device_of(model)
    layers = _Layers(copied, graph, rules, LatencyCache(device), device)
    points = [layers.table(*parts) for parts in zip(calls, inputs, outputs, strict=True)]
    layers.cache.save()
    whole = eager = measure_latency(copied, args, kwargs)
    if runtime != "eager":
        with torch.no_grad():
            whole = _median_ms(prepare(copied, runtime, args, kwargs), device)
    grid = np.array([grid for grid, _ in points]).reshape(len(points), 2, len(SHARES))
    tables = np.array([times for _, times in points]).reshape(len(points), len(SHARES), len(SHARES)) * (whole / eager)
    dense = {name: group.size for name, group in graph.groups.items()}
    return LatencyMeter([tied[0] for tied in graph.tied_sets], inputs, outputs, dense, grid, tables, whole)


def _calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], rules: Mapping[type[nn.Module], LayerRule] | None
) -> list[_Call]:
    """The calls of the layers in one pass: modules without children, and layers that hold others, such as a padding."""
    found: list[_Call] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: Any, named: Any, result: Any) -> None:
            made = find_tensors(result)
            if made:
                empty, empty_named = map_tensors(lambda t: torch.empty_like(t, device="meta"), (given, named))
                found.append(_Call(name, empty, empty_named, tuple(made[0].shape)))

        return hook

    opaque: list[str] = []
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            rule = find_rule(module, rules)
            if name and not name.startswith(tuple(opaque)):
                if rule is not None and (rule.opaque or any(True for _ in module.parameters(recurse=False))):
                    opaque.append(f"{name}.")
                elif any(True for _ in module.children()):
                    continue
                hooks.callback(module.register_forward_hook(note(name), with_kwargs=True).remove)
        with torch.no_grad():
            model(*args, **kwargs)
    return found


@dataclass(frozen=True, eq=False)
class _Layers:
    """Measures the layers of a model; equal ones once."""

    model: nn.Module
    graph: UnitGraph
    rules: Mapping[type[nn.Module], LayerRule] | None
    cache: LatencyCache
    device: torch.device
    generator: torch.Generator = field(default_factory=lambda: torch_generator(np.random.default_rng(0)))

    def table(self, call: _Call, inputs: tuple[Axes, ...], output: Axes) -> tuple[Array, Array]:
        """The grid, float (2, points), and the times in milliseconds, float (points, points)."""
        reads = {name for axes in inputs for _, spans in axes for name in spans}
        makes = {name for _, spans in output for name in spans}
        together = bool(reads & makes)
        if together:
            reads = makes = reads | makes
        dense = {tied[0]: self.graph.groups[tied[0]].size for tied in self.graph.tied_sets}
        number = len(SHARES)
        grid, times = np.ones((2, number)), np.zeros((number, number))
        for i, u in enumerate(SHARES):
            for j, v in enumerate(SHARES):
                if (not reads and i < number - 1) or (not makes and j < number - 1) or (together and i != j):
                    continue
                counts = dict(dense)
                for names, share in ((reads, u), (makes, v)):
                    counts.update((name, max(1, round(share * dense[name]))) for name in names)
                for side, shapes in enumerate((inputs, (output,))):
                    now, whole = (sum(math.prod(shape_at(axes, at)) for axes in shapes) for at in (counts, dense))
                    grid[side, (i, j)[side]] = now / max(1, whole)
                lost = {name: dense[name] - count for name, count in counts.items()}
                times[i, j] = self._time(call, [shape_at(axes, counts) for axes in inputs], lost)
        if together:
            times[:] = np.diag(times)[:, None]
        elif not reads:
            times[:] = times[-1]
        elif not makes:
            times[:] = times[:, -1:]
        # A narrower layer that was measured slower is taken for as slow as the wider one.
        return np.maximum.accumulate(grid, 1), np.maximum.accumulate(np.maximum.accumulate(times, 0), 1)

    def _time(self, call: _Call, shapes: Sequence[tuple[int, ...]], lost: Mapping[str, int]) -> float:
        """Milliseconds of a call on inputs of such shapes, of the layer where groups have lost units."""
        layer, place = self.model.get_submodule(call.name), iter(shapes)
        given = map_tensors(lambda t: torch.empty(next(place), dtype=t.dtype, device="meta"), (call.args, call.kwargs))
        first = {name: tied[0] for tied in self.graph.tied_sets for name in tied}
        keep = {name: torch.arange(each.size) < each.size - lost[first[name]] for name, each in self.graph.groups.items()}
        entries = named_entries(layer)
        axes = {entry: self._kept(f"{call.name}.{entry}", keep) for entry in entries}
        key = _key(layer, {name: narrow_shape(entry.shape, axes[name]) for name, entry in entries.items()}, given)
        known = self.cache.get(key)
        if known is not None:
            return known * 1000
        try:
            small = copy_with(layer, {entry: gather(entries[entry].detach(), cut) for entry, cut in axes.items() if cut})
            resize(small, self.rules)
            for size in self.graph.sizes:
                if size.module == call.name:
                    value = size.per_unit * int(keep[size.group].sum())
                    setattr(small, size.name, (value,) if isinstance(getattr(small, size.name), tuple) else value)
            args, kwargs = map_tensors(self._fill, given)
            found = measure_latency(small, args, kwargs, seconds=0.03, least=5)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            if not any(lost.values()):
                return 0.0  # a layer that cannot run alone is part of what the table does not explain
            whole = [tuple(tensor.shape) for tensor in find_tensors([call.args, call.kwargs])]
            return self._time(call, whole, dict.fromkeys(lost, 0))
        self.cache[key] = found / 1000
        return found

    def _kept(self, name: str, keep: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """Axis of an entry → int64: the positions that are kept, of axes that lose some."""
        stays: dict[int, Tensor] = {}
        for group, piece in self.graph.slices_of.get(name, ()):
            own = stays.setdefault(piece.dim, torch.ones(self.graph.shapes[name][piece.dim], dtype=torch.bool))
            own[piece.index[~keep[group]].reshape(-1)] = False
        return {dim: own.nonzero().reshape(-1) for dim, own in stays.items() if not bool(own.all())}

    def _fill(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=self.generator).to(self.device, tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)


def _key(layer: nn.Module, shapes: Mapping[str, Sequence[int]], given: Any) -> str:
    """What the time depends on: the layer, the shapes of its entries and of its inputs."""
    entries = {name: (list(shapes[name]), str(entry.dtype)) for name, entry in named_entries(layer).items()}
    tensors = [(list(tensor.shape), str(tensor.dtype)) for tensor in find_tensors(given)]
    plain = {k: v for k, v in vars(layer).items() if not k.startswith("_") and isinstance(v, int | float | str | tuple)}
    sized = ("in_channels", "out_channels", "in_features", "out_features", "num_features", "normalized_shape", "groups")
    options = sorted((k, v) for k, v in plain.items() if k not in sized)
    grouped = getattr(layer, "groups", 1) != 1
    return repr((type(layer).__module__, type(layer).__qualname__, options, grouped, entries, tensors))
