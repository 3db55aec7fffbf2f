"""Faults planted into random networks are caught, in every mode, dtype and path: index errors, and readers of a width.

Continuous integration runs a few of 500 seeds. All of them:

    SPARSEKIT_ALL_SEEDS=1 pytest tests/sparsekit/tracing/test_planted.py
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import fuzz
import laws
import numpy as np
import planted
import pytest
import readers
import torch

from sparsekit.errors import NoUnitsError
from sparsekit.tracing import blocks

WAYS = [(path, dtype) for path in planted.PATHS for dtype in (torch.float32, torch.bfloat16)]
MODES = (("eval", "train"), ("eval",))


def check_seeds(seeds: Iterable[int]) -> tuple[Counter[Any], list[Any]]:
    """How many errors that matter were caught, for each kind, path, dtype and choice of modes; and those that were not."""
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
        error = list(planted.ERRORS)[seed % len(planted.ERRORS)]
        found = planted.plant(graph, error, rng) or planted.plant(graph, "permuted", rng)
        if found is None:
            continue
        name, wrong = found
        path, dtype = WAYS[(seed // len(planted.ERRORS)) % len(WAYS)]
        modes = MODES[(seed // 16) % 2]
        given = x.to(dtype) if x.is_floating_point() else x
        if planted.is_caught(model.to(dtype), given, name, wrong, path=path, modes=modes):
            caught[error, path, dtype, modes] += 1
        elif not planted.is_harmless(fuzz.build(seed)[0], x, wrong):
            missed.append((seed, error, name, path, dtype, modes))
    return caught, missed


def test_planted_index_errors_are_caught_in_every_mode_dtype_and_path() -> None:
    """In some networks no error that matters can be planted, or the wrong graph keeps the law of masks."""
    seeds = fuzz.seeds(500, 31)
    caught, missed = check_seeds(seeds)
    assert missed == []
    assert caught.total() >= 0.6 * len(seeds)
    for place, values in enumerate((set(planted.ERRORS), set(planted.PATHS), {torch.float32, torch.bfloat16}, set(MODES))):
        assert {kind[place] for kind in caught} == values


def test_no_reader_of_a_width_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code outside of a layer that computes with its width, in a small model, a large one, or one without values."""
    cut, wrong = 0, []
    for seed in fuzz.seeds(500, 43):
        planted_reader = readers.plant_reader(seed, rows=20_000)
        if planted_reader is None:
            continue
        model, x, reader = planted_reader
        path = ("small", "large", "meta")[(seed // len(readers.READERS)) % 3]
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
