"""probe(): find the effect of an operator without a handler on units, by running it with some of their values changed."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsekit._torch import operator_schema, tree_map_only
from sparsekit.labels.values import NO_UNIT, NOT_ZERO, IntArray, Labels, TensorLabels
from sparsekit.rng import seeded
from sparsekit.tracing.ops.call import Call, Outputs, tensors_of

_MOST_NUMBERS = 1 << 21
"""Maximum number of elements of the operands to probe."""


def probe(call: Call, reason: str) -> Outputs:
    """Label the outputs of any operator, by running it with changed inputs. Units that it mixes become unprunable.

    For each bit, the operator runs with changed values at the positions whose number has that bit, and again at the others. The
    changes that reach a position of the output give the number of its unit. Last, the operator runs on half of the units.

    Args:
        call: An operator that has run.
        reason: Why the units are unprunable if it mixes them.
    """
    tracer, runner = call.tracer, _Runner(call)
    owners = {id(tensor): (tensor, tracer.labels(tensor)) for tensor in call.tensors}
    axes = [(tensor, labels, dim) for tensor, labels in owners.values() for dim, axis in enumerate(labels.units) if axis]
    every = [(tensor, dim, axis) for tensor, labels in owners.values() for dim, axis in enumerate(labels.axes)]
    alike = [(tensor, dim) for tensor, dim, axis in every if axis is not None and axis.is_uniform]
    made: list[list[Labels | None]] = [[None] * out.dim() for out in call.outputs]
    found = [runner.places(tensor, dim) for tensor, _, dim in axes] if runner.can_run else []
    known = [(each, places) for each, places in zip(axes, found, strict=False) if places is not None]
    if not runner.can_run or not runner.can_lose([(tensor, dim, places) for (tensor, _, dim), places in known], alike):
        call.fix_inputs(reason)
        return None
    for (_, labels, dim), places in zip(axes, found, strict=True):
        if places is None:
            tracer.fix(labels.axes[dim], reason, quiet=labels.entry is not None and not labels.entry.is_parameter)
    zeros = runner.zeros([tensor for tensor, labels in owners.values() if labels.has_units])
    for (tensor, labels, dim), places in known:
        axis = labels.axes[dim]
        assert axis is not None
        tracer.make(labels, dim)
        for output, (at, place) in places.items():
            nodes = np.where(place >= 0, axis.nodes[place], NO_UNIT)
            sources = np.where((place >= 0) & (id(tensor) in zeros), axis.sources[place], NOT_ZERO)
            before = made[output][at]
            if before is not None:
                both = (nodes >= 0) & (before.nodes >= 0)
                tracer.unite(nodes[both], before.nodes[both])
                nodes = np.maximum(nodes, before.nodes)
                sources = np.where(before.sources != NOT_ZERO, before.sources, sources)
            made[output][at] = Labels(nodes, sources)
    return [TensorLabels(tuple(axes)) for axes in made]


class _Runner:
    """Runs an operator again, with some of its tensors changed."""

    def __init__(self, call: Call) -> None:
        self._call = call
        schema = operator_schema(call.func).arguments
        self._written = {each.name for each in schema if each.alias_info is not None and each.alias_info.is_write}
        tensors = call.tensors
        self.can_run = (
            bool(call.outputs)
            and not any(t.is_meta or t.layout is not torch.strided for t in (*tensors, *call.outputs))
            and max(t.numel() for t in (*tensors, *call.outputs)) <= _MOST_NUMBERS
        )
        self._expected: list[Tensor] = []
        if self.can_run:
            try:
                self._expected = self._run({})
            except Exception:  # noqa: BLE001 - whatever an operator of somebody else's raises
                self.can_run = False
        self.can_run = self.can_run and [t.shape for t in self._expected] == [t.shape for t in call.outputs]

    def _run(self, changed: Mapping[int, Tensor]) -> list[Tensor]:
        def own(value: Any, is_written: bool) -> Any:
            def one(tensor: Tensor) -> Tensor:
                new = changed.get(id(tensor), tensor)
                return new.clone() if is_written else new

            return tree_map_only(Tensor, one, value)

        arguments = {name: own(value, name in self._written) for name, value in self._call.arguments.items()}
        with seeded(0):
            found = tensors_of((self._call.func(**arguments),))
        return [found[k] if k < len(found) else out for k, out in enumerate(self._call.outputs)]

    def can_lose(
        self, axes: Sequence[tuple[Tensor, int, dict[int, tuple[int, IntArray]]]], alike: Sequence[tuple[Tensor, int]]
    ) -> bool:
        """Return whether the operator does the same to half of the units, in reverse order. `alike`: axes of equal values."""
        kept: dict[int, tuple[int, IntArray]] = {}  # output → axis, positions
        changes: dict[int, Tensor] = {}
        for tensor, dim, places in axes:
            order = np.arange(tensor.shape[dim])[::-2].copy()
            for output, (at, place) in places.items():
                mine = np.flatnonzero(np.isin(place, order))
                if len(mine) != len(order) or len(set(place.tolist())) != len(place):
                    return True  # several positions of one unit: verification decides
                mine = mine[np.argsort(np.searchsorted(-order, -place[mine]))]
                if output in kept and not np.array_equal(kept[output][1], mine):
                    return True
                kept[output] = at, mine
            changes[id(tensor)] = changes.get(id(tensor), tensor).index_select(dim, torch.from_numpy(order).to(tensor.device))
        sizes = {tensor.shape[dim] for tensor, dim, _ in axes}
        for tensor, dim in alike:
            if tensor.shape[dim] in sizes:
                changes[id(tensor)] = changes.get(id(tensor), tensor).narrow(dim, 0, (tensor.shape[dim] + 1) // 2)
        try:
            found = self._run(changes)
            for output, (at, mine) in kept.items():
                expected = self._expected[output].index_select(at, torch.from_numpy(mine).to(found[output].device))
                if not torch.allclose(found[output].nan_to_num(), expected.nan_to_num(), rtol=1e-3, atol=1e-5):
                    return False
        except Exception:  # noqa: BLE001 - whatever an operator of somebody else's raises
            return False
        return True

    def zeros(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        """Return ids of the input tensors that make all outputs zero if they are zero."""
        found = set()
        for tensor in tensors:
            with suppress(Exception):
                if all(not bool(out.any()) for out in self._run({id(tensor): torch.zeros_like(tensor)})):
                    found.add(id(tensor))
        return frozenset(found)

    def places(self, tensor: Tensor, dim: int) -> dict[int, tuple[int, IntArray]] | None:
        """Return output → (axis, position along `dim` of `tensor` that each position of it depends on, -1 where none).

        None where some output depends on several positions at once; outputs that do not depend on any are left out.
        """
        size = tensor.shape[dim]
        number = torch.arange(size, device=tensor.device)
        bits = range(max(1, (size - 1).bit_length()))
        reached = [
            [self._reached(tensor, dim, (number >> bit) % 2 == side) for side in (0, 1)] for bit in bits
        ]  # [bit][side][output][axis]
        found: dict[int, tuple[int, IntArray]] = {}
        for output, out in enumerate(self._call.outputs):
            if not any(lines[output][0].any() for pair in reached for lines in pair if lines[output]):
                continue  # it does not depend on the units
            for axis in range(out.dim()):
                low, high = (np.stack([pair[side][output][axis] for pair in reached]) for side in (0, 1))
                if (low & high).any() or ((low | high).any(axis=0) != (low | high).all(axis=0)).any():
                    continue
                place = np.where((low | high).any(axis=0), (high.T * (1 << np.arange(len(reached)))).sum(axis=1), -1)
                found[output] = (axis, place.astype(np.int64))
                break
            else:
                return None
        return found

    def _reached(self, tensor: Tensor, dim: int, which: Tensor) -> list[list[npt.NDArray[np.bool_]]]:
        """Return, for each axis of each output, the positions whose values change if some positions of an input axis do."""
        shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
        reached = [torch.zeros(out.shape, dtype=torch.bool, device=out.device) for out in self._call.outputs]
        for other in _others(tensor, dim):
            with suppress(Exception):
                found = self._run({id(tensor): torch.where(which.reshape(shape), other, tensor)})
                for seen, out, before in zip(reached, found, self._expected, strict=True):
                    seen |= ~((out == before) | (out.isnan() & before.isnan()))
        return [
            [seen.any(tuple(d for d in range(seen.dim()) if d != axis)).cpu().numpy() if seen.dim() > 1 else seen.cpu().numpy()
             for axis in range(seen.dim())]
            for seen in reached
        ]  # fmt: skip


def _others(tensor: Tensor, dim: int) -> Iterator[Tensor]:
    """Yield other values for a tensor: random numbers and NaN for floats, else its own values in another order."""
    if tensor.is_floating_point() or tensor.is_complex():
        generator = torch.Generator().manual_seed(20133)
        for _ in range(2):
            noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
            yield tensor + (1 + tensor.abs().max()) * noise
        yield torch.full_like(tensor, torch.nan)
    elif tensor.dtype == torch.bool:
        yield ~tensor
    else:
        yield tensor.flip([d for d in range(tensor.dim()) if d != dim])
