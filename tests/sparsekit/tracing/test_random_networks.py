"""Random networks are cut exactly, and faults planted into them are caught: index errors, and readers of a width.

Continuous integration runs a few of hundreds of seeds. All of them:

    SPARSEKIT_ALL_SEEDS=1 pytest -m "slow or not slow" tests/sparsekit/tracing/test_random_networks.py
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import fuzz
import laws
import numpy as np
import pytest
import readers
import torch
from laws import check_masked_equals_compact, check_nothing_is_lost, random_mask, with_index
from torch import Tensor, nn

from sparsekit.errors import NoUnitsError
from sparsekit.graph.edit import without
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitSlice
from sparsekit.tracing import blocks
from sparsekit.tracing.blocks import BlockVerifier
from sparsekit.tracing.inputs import ModelInputs
from sparsekit.tracing.passes import ReadOnly, private_passes
from sparsekit.tracing.session import Session
from sparsekit.tracing.verify import Verifier

Rng = np.random.Generator
HUNDREDS = pytest.param(fuzz.seeds(200, 8), 0.85, marks=pytest.mark.slow, id="hundreds")


@pytest.mark.parametrize("prune_hidden_size", [False, True])
@pytest.mark.parametrize(("seeds", "share"), [(range(1000, 1018), 0.9), HUNDREDS])
def test_random_networks_are_cut_exactly(seeds: range, share: float, prune_hidden_size: bool) -> None:
    cut, wrong = 0, []
    for seed in seeds:
        model, x = fuzz.build(seed)
        try:
            graph, _ = laws.trace(model, x, prune_hidden_size=prune_hidden_size)
        except NoUnitsError:
            continue
        cut += 1
        for number, ratio in enumerate((0.5, 0.1 + 0.8 * (seed % 9) / 8)):
            mask = random_mask(graph, ratio, seed + number)
            try:
                check_masked_equals_compact(model, (x,), {}, graph, mask, train=(seed + number) % 2 == 1)
                check_nothing_is_lost(model, graph, mask)
            except (AssertionError, RuntimeError, ValueError) as error:
                wrong.append(f"seed {seed}, ratio {ratio:.1f}: {error!r}\n{model}\nwiring {model.wiring}, {model.outputs}")
    assert wrong == []
    assert cut > share * len(seeds)


def _permuted(piece: UnitSlice, rng: Rng, size: int) -> Tensor:
    order = torch.from_numpy(rng.permutation(len(piece.index)))
    return piece.index[order if not torch.equal(order, torch.arange(len(order))) else order.flip(0)]


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
    "shifted": lambda piece, rng, size: piece.index.roll(1, 0),
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
        piece = graph.groups[name].slices[number]
        index = ERRORS[error](piece, rng, graph.shapes[piece.name][piece.dim])
        if index is not None:
            return name, with_index(graph, name, number, index)
    return None


def is_harmless(model: nn.Module, x: Tensor, wrong: UnitGraph) -> bool:
    """Whether a changed graph still keeps the law of masks, in both modes and under many masks, and so is no error."""
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
    with private_passes():
        verifier: Any = PATHS[path](model, calls, None, training)
        while name in wrong.groups:
            failures = verifier.failures(wrong)
            if not failures:
                return False
            wrong = without(wrong, {other for tied in wrong.tied_sets if failures.keys() & set(tied) for other in tied})
    return True


WAYS = [(path, dtype) for path in PATHS for dtype in (torch.float32, torch.bfloat16)]
MODES = (("eval", "train"), ("eval",))


def check_seeds(seeds: Iterable[int]) -> tuple[Counter[Any], list[Any]]:
    """Count the caught errors that matter, by kind, path, dtype and choice of modes; and list those that were missed."""
    caught: Counter[Any] = Counter()
    missed = []
    for seed in seeds:
        model, x = fuzz.build(seed)
        try:
            # Not verified: that nothing is refused of honest graphs is a law of its own, and most of a trace.
            graph, _ = laws.trace(model, x, verify=False)
        except NoUnitsError:
            continue
        rng = np.random.default_rng([7, seed])
        error = list(ERRORS)[seed % len(ERRORS)]
        found = plant(graph, error, rng) or plant(graph, "permuted", rng)
        if found is None:
            continue
        name, wrong = found
        path, dtype = WAYS[(seed // len(ERRORS)) % len(WAYS)]
        modes = MODES[(seed // 16) % 2]
        given = x.to(dtype) if x.is_floating_point() else x
        if is_caught(model.to(dtype), given, name, wrong, path=path, modes=modes):
            caught[error, path, dtype, modes] += 1
        elif not is_harmless(fuzz.build(seed)[0], x, wrong):
            missed.append((seed, error, name, path, dtype, modes))
    return caught, missed


def test_planted_index_errors_are_caught_in_every_mode_dtype_and_path() -> None:
    """In some networks no error that matters can be planted, or the wrong graph keeps the law of masks."""
    seeds = fuzz.seeds(500, 31)
    caught, missed = check_seeds(seeds)
    assert missed == []
    assert caught.total() >= 0.6 * len(seeds)
    for place, values in enumerate((set(ERRORS), set(PATHS), {torch.float32, torch.bfloat16}, set(MODES))):
        assert {kind[place] for kind in caught} == values


def test_no_reader_of_a_width_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code outside of a layer that computes with its width, in a small model, a large one, or one without values."""
    cut, wrong = 0, []
    for seed in fuzz.seeds(500, 43):
        planted_reader = readers.plant_reader(seed, rows=20_000)
        if planted_reader is None:
            continue
        model, x, reader = planted_reader
        path = "small" if reader in readers.WITH_GRADIENTS else ("small", "large", "meta")[(seed // len(readers.READERS)) % 3]
        dtype = (torch.float32, torch.bfloat16)[seed % 2]
        given = x.to(dtype) if x.is_floating_point() else x
        device = "meta" if path == "meta" else "cpu"
        monkeypatch.setattr(blocks, "LARGE_NUMBERS", 10**12 if path == "small" else 0)
        try:
            graph, _ = laws.trace(model.to(device, dtype), given.to(device))
        except NoUnitsError:
            continue
        cut += 1
        again = readers.plant_reader(seed, rows=20_000)
        assert again is not None
        problem = readers.is_wrong(*again[:2], graph)
        if problem is not None:
            wrong.append((seed, reader, path, dtype, problem))
    assert wrong == []
    assert cut
