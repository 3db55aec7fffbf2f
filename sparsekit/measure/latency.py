"""Latency as a function of the widths: a table of the model's own layers, measured on this device at this number of threads.

Each layer is run alone at some widths of its inputs and outputs; between them times are interpolated. What the layers do not
explain, such as sums written as functions, is the difference to the whole model, and goes down with the activations.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.index import gather
from sparsekit.layers import LayerRule, find_rule, resize
from sparsekit.measure.latency_cache import LatencyCache
from sparsekit.measure.shapes import AffineShape, probe_shapes, stack_shapes, without_data
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


class LatencyMeter:
    """Milliseconds of a forward pass at given widths."""

    def __init__(
        self,
        sizes: Mapping[str, int],
        inputs: Sequence[Sequence[AffineShape]],
        outputs: Sequence[AffineShape],
        grid: npt.NDArray[np.float64],
        tables: npt.NDArray[np.float64],
        whole_ms: float,
    ) -> None:
        """Set up the meter.

        Args:
            sizes: Leader of tied groups → units of the dense model.
            inputs: Shapes of the tensors that each call gets.
            outputs: Shape that each call returns.
            grid: float (calls, 2, points): shares of inputs and of outputs at which the tables are.
            tables: float (calls, points, points): milliseconds.
            whole_ms: Time of the whole dense model.
        """
        self._sizes = dict(sizes)
        self._shapes = [*(tuple(shapes) for shapes in inputs)], [(shape,) for shape in outputs]
        self._grid = grid
        total = float(tables[:, -1, -1].sum())
        self.table_error = (total - whole_ms) / whole_ms
        """(sum of the layers − whole model) / whole model, for the dense model."""
        # Layers run one by one may take longer than in a row; then the table is scaled to the whole.
        self._tables = tables * min(1.0, whole_ms / total) if total > 0 else tables
        self._rest = max(0.0, whole_ms - float(self._tables[:, -1, -1].sum()))
        self._matrices = [_elements(shapes, list(sizes)) for shapes in self._shapes]
        self._dense = [matrix.at(np.zeros(len(sizes))) for matrix in self._matrices]
        self._last: tuple[tuple[int, ...], float] | None = None

    def at(self, counts: Mapping[str, int]) -> float:
        """Milliseconds where the groups keep `counts` units."""
        key = tuple(counts[name] for name in self._sizes)
        if self._last is None or self._last[0] != key:
            self._last = key, self._predict(np.array([*self._sizes.values()], dtype=np.float64) - np.array(key))
        return self._last[1]

    def gain(self, before: Mapping[str, int], after: Mapping[str, int], limit: float) -> float:
        """By how many milliseconds the step comes nearer to the limit."""
        old = self.at(before)
        if old <= limit:
            return 0.0
        kept, new = self._last, self.at(after)
        self._last = kept
        return old - new

    def _predict(self, lost: npt.NDArray[np.float64]) -> float:
        elements = [matrix.at(lost) for matrix in self._matrices]
        places, weights = [], []
        for side, (now, dense) in enumerate(zip(elements, self._dense, strict=True)):
            grid = self._grid[:, side]
            share = np.clip(now / np.maximum(dense, 1.0), grid[:, 0], 1.0)
            place = np.clip((grid <= share[:, None]).sum(1) - 1, 0, grid.shape[1] - 2)
            rows = np.arange(len(grid))
            low, high = grid[rows, place], grid[rows, place + 1]
            places.append(place)
            weights.append(np.where(high > low, (share - low) / np.maximum(high - low, 1e-12), 1.0))
        rows, (i, j), (a, b) = np.arange(len(self._tables)), places, weights
        t = self._tables
        near = t[rows, i, j] * (1 - b) + t[rows, i, j + 1] * b
        far = t[rows, i + 1, j] * (1 - b) + t[rows, i + 1, j + 1] * b
        traffic = float(elements[1].sum() / max(1.0, self._dense[1].sum()))
        return float((near * (1 - a) + far * a).sum() + self._rest * traffic)


@dataclass(frozen=True)
class _Elements:
    """Numbers of elements of many tensors at once, added up by call."""

    axes: npt.NDArray[np.float64]
    spans: npt.NDArray[np.float64]
    owner: npt.NDArray[np.int64]
    calls: int

    def at(self, lost: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        sizes = np.maximum(self.axes - self.spans @ lost, np.minimum(self.axes, 1.0)).prod(1)
        return np.bincount(self.owner, sizes, self.calls).astype(np.float64)


def _elements(shapes: Sequence[Sequence[AffineShape]], leaders: Sequence[str]) -> _Elements:
    axes, spans = stack_shapes([shape for some in shapes for shape in some], leaders)
    owner = [call for call, some in enumerate(shapes) for _ in some]
    return _Elements(axes, spans, np.array(owner, dtype=np.int64), len(shapes))


def measure_latency(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, seconds: float = 0.5, least: int = 5
) -> float:
    """Median milliseconds of a forward pass without gradients, after two passes to warm up.

    Args:
        model: In the mode that is to be measured.
        args: Positional inputs.
        kwargs: Keyword inputs.
        seconds: Passes are repeated for about as long,
        least: and at least so often.
    """
    device = next((tensor.device for tensor in [*model.parameters(), *find_tensors(args)]), torch.device("cpu"))
    times: list[float] = []
    with torch.no_grad():
        begun = time.perf_counter()
        while len(times) < least + 2 or time.perf_counter() - begun < seconds:
            start = time.perf_counter()
            model(*args, **kwargs)
            torch.get_device_module(device).synchronize()
            times.append(time.perf_counter() - start)
            if len(times) >= 200:
                break
    return float(np.median(times[2:])) * 1000


def measure_table(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    graph: UnitGraph,
    rules: Mapping[type[nn.Module], LayerRule] | None = None,
) -> LatencyMeter:
    """Measure the layers of a model at some widths, or read what was measured before.

    Args:
        model: The dense model; not changed.
        args: Positional inputs: the batch whose latency is meant.
        kwargs: Keyword inputs.
        graph: The units.
        rules: Rules for layers of your own.
    """
    copied = copy_with(model, {}).eval()
    device = next((entry.device for entry in copied.parameters()), torch.device("cpu"))
    cache = LatencyCache(device)
    try:
        light = without_data(copied, args, kwargs)
        calls = _calls(light[0], light[1], light[2], rules)
    except Exception:  # noqa: BLE001 - a model that looks at values cannot run without any
        light = copied, args, dict(kwargs)
        calls = _calls(copied, args, kwargs, rules)
    lengths = [len(find_tensors([call.args, call.kwargs])) for call in calls]

    def shapes(module: nn.Module) -> list[tuple[int, ...]]:
        found = _calls(module, light[1], light[2], rules)
        return [s for call in found for s in (*(tuple(t.shape) for t in find_tensors([call.args, call.kwargs])), call.output)]

    flat = iter(probe_shapes(light[0], graph, shapes, rules))
    inputs, outputs = [], []
    for length in lengths:
        inputs.append(tuple(next(flat) for _ in range(length)))
        outputs.append(next(flat))
    table = _Table(copied, graph, rules, cache, device)
    points = [table.measure(*parts) for parts in zip(calls, inputs, outputs, strict=True)]
    cache.save()
    whole = measure_latency(copied, args, kwargs)
    sizes = {name: graph.groups[name].size for name, *_ in graph.tied_sets}
    grid = np.array([grid for grid, _ in points]).reshape(len(points), 2, len(SHARES))
    tables = np.array([times for _, times in points]).reshape(len(points), len(SHARES), len(SHARES))
    return LatencyMeter(sizes, inputs, outputs, grid, tables, whole)


def _calls(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], rules: Mapping[type[nn.Module], LayerRule] | None
) -> list[_Call]:
    """The calls of the layers in one pass: modules without children, and those whose inside is one operator."""
    found: list[_Call] = []
    inside: list[str] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, ___: Any) -> None:
            inside.append(name)

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: Any, named: Any, result: Any) -> None:
            inside.pop()
            made = find_tensors(result)
            if not inside and made:
                empty, empty_named = map_tensors(lambda t: torch.empty_like(t, device="meta"), (given, named))
                found.append(_Call(name, empty, empty_named, tuple(made[0].shape)))

        return hook

    handles = []
    for name, module in model.named_modules():
        rule = find_rule(module, rules)
        if name and (not any(True for _ in module.children()) or (rule is not None and rule.opaque)):
            handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
            handles.append(module.register_forward_hook(leave(name), with_kwargs=True))
    try:
        with torch.no_grad():
            model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


class _Table:
    """Measures layers at points of the grid; equal layers once."""

    def __init__(
        self,
        model: nn.Module,
        graph: UnitGraph,
        rules: Mapping[type[nn.Module], LayerRule] | None,
        cache: LatencyCache,
        device: torch.device,
    ) -> None:
        self.model, self.graph, self.rules, self.cache, self.device = model, graph, rules, cache, device
        self.first = {name: tied[0] for tied in graph.tied_sets for name in tied}
        self.generator = torch_generator(np.random.default_rng(0))

    def measure(
        self, call: _Call, inputs: tuple[AffineShape, ...], output: AffineShape
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """The grid, float (2, points), and the times in milliseconds, float (points, points)."""
        reads = {name for shape in inputs for _, spans in shape.axes for name in spans}
        makes = {name for _, spans in output.axes for name in spans}
        together = reads & makes
        if together and reads != makes:
            reads = makes = reads | makes
        number = len(SHARES)
        grid, times = np.ones((2, number)), np.zeros((number, number))
        for i, u in enumerate(SHARES):
            for j, v in enumerate(SHARES):
                if (not reads and i < number - 1) or (not makes and j < number - 1) or (together and i != j):
                    continue
                lost = dict.fromkeys(self.first.values(), 0)
                for names, share in ((reads, u), (makes, v)):
                    for name in names:
                        size = self.graph.groups[name].size
                        lost[name] = size - max(1, round(share * size))
                grid[0, i] = _share(inputs, lost)
                grid[1, j] = _share((output,), lost)
                times[i, j] = self._time(call, inputs, lost)
        if together:
            times[:] = np.minimum.outer(np.diag(times), np.full(number, np.inf))
        elif not reads:
            times[:] = times[-1]
        elif not makes:
            times[:] = times[:, -1:]
        # A narrower layer that was measured slower is taken for as slow as the wider one.
        return np.maximum.accumulate(grid, 1), np.maximum.accumulate(np.maximum.accumulate(times, 0), 1)

    def _time(self, call: _Call, inputs: tuple[AffineShape, ...], lost: Mapping[str, int]) -> float:
        layer = self.model.get_submodule(call.name)
        shapes = iter([shape.at(lost) for shape in inputs])
        given = map_tensors(lambda t: torch.empty(next(shapes), dtype=t.dtype, device="meta"), (call.args, call.kwargs))
        keep = {
            name: torch.arange(group.size) < group.size - lost[self.first[name]] for name, group in self.graph.groups.items()
        }
        axes = self._axes(call.name, keep)
        key = self._key(layer, axes, given)
        known = self.cache.get(key)
        if known is not None:
            return known * 1000
        try:
            small = self._narrow(call.name, layer, axes, keep)
            args, kwargs = map_tensors(self._fill, given)
            found = measure_latency(small, args, kwargs, seconds=0.03, least=5)
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):
            if not any(lost.values()):
                return 0.0  # a layer that cannot run alone is part of what the table does not explain
            return self._time(call, inputs, dict.fromkeys(lost, 0))
        self.cache.put(key, found / 1000)
        return found

    def _axes(self, name: str, keep: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
        """Entry of the layer → axis → positions kept."""
        found: dict[str, dict[int, Tensor]] = {}
        for entry in named_entries(self.model.get_submodule(name)):
            whole = f"{name}.{entry}"
            stays: dict[int, Tensor] = {}
            for group, piece in self.graph.slices_of.get(whole, ()):
                own = stays.setdefault(piece.dim, torch.ones(self.graph.shapes[whole][piece.dim], dtype=torch.bool))
                own[piece.index[~keep[group]].reshape(-1)] = False
            found[entry] = {dim: own.nonzero().reshape(-1) for dim, own in stays.items() if not bool(own.all())}
        return found

    def _narrow(
        self, name: str, layer: nn.Module, axes: Mapping[str, Mapping[int, Tensor]], keep: Mapping[str, Tensor]
    ) -> nn.Module:
        entries = named_entries(layer)
        narrow = {entry: gather(entries[entry].detach(), cut) for entry, cut in axes.items() if cut}
        small = copy_with(layer, narrow)
        resize(small, self.rules)
        for size in self.graph.sizes:
            if size.module == name:
                value = size.per_unit * int(keep[size.group].sum())
                setattr(small, size.name, (value,) if isinstance(getattr(small, size.name), tuple) else value)
        return small

    def _fill(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, generator=self.generator).to(self.device, tensor.dtype)
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self.device)

    def _key(self, layer: nn.Module, axes: Mapping[str, Mapping[int, Tensor]], given: Any) -> str:
        """What the time depends on: the layer, the shapes of its entries and of its inputs."""
        entries = {
            name: ([axes[name][d].numel() if d in axes[name] else n for d, n in enumerate(entry.shape)], str(entry.dtype))
            for name, entry in named_entries(layer).items()
        }
        tensors = [(list(tensor.shape), str(tensor.dtype)) for tensor in find_tensors(given)]
        plain = {k: v for k, v in vars(layer).items() if not k.startswith("_") and isinstance(v, int | float | str | tuple)}
        sized = ("in_channels", "out_channels", "in_features", "out_features", "num_features", "normalized_shape", "groups")
        options = sorted((k, v) for k, v in plain.items() if k not in sized)
        grouped = getattr(layer, "groups", 1) != 1
        return repr((type(layer).__module__, type(layer).__qualname__, options, grouped, entries, tensors))


def _share(shapes: Sequence[AffineShape], lost: Mapping[str, int]) -> float:
    def elements(at: Mapping[str, int]) -> int:
        return sum(int(np.prod(shape.at(at))) for shape in shapes)

    return elements(lost) / max(1, elements(dict.fromkeys(lost, 0)))
