"""Unit graphs with planted index errors, and whether the verification finds them: what the fuzz of wrong graphs shares."""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from laws import check_masked_equals_compact, random_mask
from torch import Tensor, nn

from sparsekit.graph.edit import without
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitSlice
from sparsekit.tracing.blocks import BlockVerifier
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.passes import ReadOnly, private_passes
from sparsekit.tracing.session import Session
from sparsekit.tracing.verify import Verifier

Rng = np.random.Generator


def _permuted(piece: UnitSlice, rng: Rng, size: int) -> Tensor:
    order = torch.from_numpy(rng.permutation(len(piece.index)))
    return piece.index[order if not torch.equal(order, torch.arange(len(order))) else order.flip(0)]


def _shifted(piece: UnitSlice, rng: Rng, size: int) -> Tensor:
    return piece.index.roll(1, 0)


def _swapped(piece: UnitSlice, rng: Rng, size: int) -> Tensor:
    """Two units have each other's positions: one row is missing where it belongs, and another unit has it."""
    a, b = rng.choice(len(piece.index), 2, replace=False).tolist()
    index = piece.index.clone()
    index[[a, b]] = index[[b, a]]
    return index


def _foreign(piece: UnitSlice, rng: Rng, size: int) -> Tensor | None:
    """One unit has a position that belongs to none of this group, such as to another group."""
    others = np.setdiff1d(np.arange(size), piece.index.numpy())
    if not others.size:
        return None
    index = piece.index.clone()
    index[int(rng.integers(len(index))), int(rng.integers(index.shape[1]))] = int(rng.choice(others))
    return index


ERRORS: dict[str, Callable[[UnitSlice, Rng, int], Tensor | None]] = {
    "permuted": _permuted,
    "shifted": _shifted,
    "swapped": _swapped,
    "foreign": _foreign,
}


def plant(graph: UnitGraph, error: str, rng: Rng) -> tuple[str, UnitGraph] | None:
    """The graph with an error in one slice of one group, and the name of the group; None where no slice can have it."""
    places = [
        (name, number)
        for name, group in graph.groups.items()
        for number, piece in enumerate(group.slices)
        if group.size > 1 and len(group.slices) > 1
    ]
    for at in rng.permutation(len(places)).tolist():
        name, number = places[at]
        group = graph.groups[name]
        piece = group.slices[number]
        index = ERRORS[error](piece, rng, graph.shapes[piece.name][piece.dim])
        if index is not None:
            pieces = [*group.slices]
            pieces[number] = dataclasses.replace(piece, index=index)
            groups = {**graph.groups, name: dataclasses.replace(group, slices=tuple(pieces))}
            return name, dataclasses.replace(graph, groups=groups)
    return None


def is_harmless(model: nn.Module, x: Tensor, wrong: UnitGraph) -> bool:
    """Whether a wrong graph keeps the law of masks all the same, in both modes and under many masks: it is no error then."""
    model, x = _perturbed(model), x.double() if x.is_floating_point() else x
    for seed, ratio in enumerate((0.5, 0.3, 0.8, 0.5, 0.2, 0.9, 0.4, 0.6)):
        for train in (False, True):
            try:
                mask = random_mask(wrong, ratio, seed)
                check_masked_equals_compact(model, (x,), {}, wrong, mask, train=train, gradients=False)
            except (AssertionError, RuntimeError, ValueError):
                return False
    return True


def _perturbed(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for name, entry in model.double().state_dict().items():
        if entry.is_floating_point() and entry.dim() == 1:
            noise = torch.rand(entry.shape, generator=generator, dtype=entry.dtype)
            entry.add_(0.2 * noise if "running_var" in name else 0.3 * (noise - 0.5))
    return model


PATHS: dict[str, Callable[..., Any]] = {
    "small": lambda *given: Verifier(Session(*given)),
    "lean": lambda *given: Verifier(Session(*given, lean=True)),
    "large": BlockVerifier,
}


def is_caught(model: nn.Module, x: Tensor, name: str, wrong: UnitGraph, *, path: str, modes: Sequence[str]) -> bool:
    """Whether the verification leaves the group out, however many others it leaves out with it."""
    calls = [ModelInputs((x,), {}, ReadOnly(model))]
    training: list[Any] = [(0, False)] if "train" in modes else []
    with private_passes(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        verifier: Any = PATHS[path](model, calls, None, training)
        while name in wrong.groups:
            failures = verifier.failures(wrong)
            if not failures:
                return False
            wrong = without(wrong, {other for tied in wrong.tied_sets if failures.keys() & set(tied) for other in tied})
    return True
