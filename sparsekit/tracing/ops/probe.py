"""probe(): what an operator that has no handler does to units, found by running it with some of their values changed."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sparsekit._torch import operator_schema, tree_map_only
from sparsekit.labels.values import NO_UNIT, NOT_ZERO, IntArray, Labels, TensorLabels
from sparsekit.tracing.ops.call import Call, Outputs, tensors_of

_MOST_NUMBERS = 1 << 21
"""Larger operands are not probed."""


def probe(call: Call, reason: str) -> Outputs:
    """Labels of the outputs of any operator; units that it does not keep apart stay whole.

    Along an axis of units, positions are changed bit by bit of their number, and those that are left. A position of an output
    belongs to the unit whose number can be read off the changes that reach it. Verification decides about the rest.

    Args:
        call: An operator that has run.
        reason: Why the units stay whole if it mixes them.
    """
    tracer, runner = call.tracer, _Runner(call)
    owners = {id(tensor): (tensor, tracer.labels(tensor)) for tensor in call.tensors}
    if not runner.can_run:
        call.fix_inputs(reason)
        return None
    made: list[list[Labels | None]] = [[None] * out.dim() for out in call.outputs]
    zeros = runner.zeros([tensor for tensor, labels in owners.values() if labels.has_units])
    for tensor, labels in owners.values():
        for dim, axis in enumerate(labels.units):
            if axis is None:
                continue
            places = runner.places(tensor, dim)
            if places is None:
                tracer.fix(axis, reason, quiet=labels.entry is not None and not labels.entry.is_parameter)
                continue
            tracer.make(labels, dim)
            for output, (at, place) in places.items():
                nodes = np.where(place >= 0, axis.nodes[place], NO_UNIT)
                known = zeros is not None and (id(tensor) in zeros)
                sources = np.where((place >= 0) & known, axis.sources[place], NOT_ZERO)
                before = made[output][at]
                if before is None:
                    made[output][at] = Labels(nodes, sources)
                else:
                    both = (nodes >= 0) & (before.nodes >= 0)
                    tracer.unite(nodes[both], before.nodes[both])
                    joined = np.where(before.sources != NOT_ZERO, before.sources, sources)
                    made[output][at] = Labels(np.maximum(nodes, before.nodes), joined)
    return [TensorLabels(tuple(axes)) for axes in made]


class _Runner:
    """Runs an operator again, with one of its tensors changed."""

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
                self._expected = self._run(None, None)
            except Exception:  # noqa: BLE001 - whatever an operator of somebody else's raises
                self.can_run = False
        self.can_run = self.can_run and [t.shape for t in self._expected] == [t.shape for t in call.outputs]

    def _run(self, tensor: Tensor | None, changed: Tensor | None) -> list[Tensor]:
        def own(value: Any, is_written: bool) -> Any:
            return tree_map_only(Tensor, lambda t: changed if t is tensor else t.clone() if is_written else t, value)

        arguments = {name: own(value, name in self._written) for name, value in self._call.arguments.items()}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            found = list(tensors_of((self._call.func(**arguments),)))
        return [found[k] if k < len(found) else out for k, out in enumerate(self._call.outputs)]

    def zeros(self, tensors: Sequence[Tensor]) -> frozenset[int]:
        """Return ids of the tensors that make all outputs zero if they are."""
        found = set()
        for tensor in tensors:
            with suppress(Exception):
                if all(not bool(out.any()) for out in self._run(tensor, torch.zeros_like(tensor))):
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
        """Return for each axis of each output where values change if some positions along an axis do."""
        shape = [-1 if d == dim else 1 for d in range(tensor.dim())]
        reached = [torch.zeros(out.shape, dtype=torch.bool, device=out.device) for out in self._call.outputs]
        for other in _others(tensor, dim):
            with suppress(Exception):
                for seen, out, before in zip(
                    reached, self._run(tensor, torch.where(which.reshape(shape), other, tensor)), self._expected, strict=True
                ):
                    seen |= ~((out == before) | (out.isnan() & before.isnan()))
        return [
            [seen.any(tuple(d for d in range(seen.dim()) if d != axis)).cpu().numpy() if seen.dim() > 1 else seen.cpu().numpy()
             for axis in range(seen.dim())]
            for seen in reached
        ]  # fmt: skip


def _others(tensor: Tensor, dim: int) -> Iterator[Tensor]:
    """Yield other values for a tensor: of floats random ones and NaN; of others its own in another order."""
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
