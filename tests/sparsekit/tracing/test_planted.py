"""Index errors that are planted into the graphs of random networks are caught, in every mode, dtype and path."""

from typing import Any

import fuzz
import laws
import numpy as np
import planted
import pytest
import torch

from sparsekit.errors import NoUnitsError

FAST, ALL = 12, 500
WAYS = [(large, dtype) for large in (False, True) for dtype in (torch.float32, torch.bfloat16)]


def check_seeds(seeds: range) -> tuple[int, list[Any]]:
    """How many errors were planted that matter, and those that were not caught."""
    planted_errors, missed = 0, []
    for seed in seeds:
        model, x = fuzz.build(seed)
        try:
            graph, _ = laws.trace(model, x)
        except NoUnitsError:
            continue
        rng = np.random.default_rng([7, seed])
        error = list(planted.ERRORS)[seed % len(planted.ERRORS)]
        found = planted.plant(graph, error, rng) or planted.plant(graph, "permuted", rng)
        if found is None:
            continue
        name, wrong = found
        large, dtype = WAYS[(seed // len(planted.ERRORS)) % len(WAYS)]
        modes = ("eval",) if (seed // 16) % 2 else ("eval", "train")
        given = x.to(dtype) if x.is_floating_point() else x
        if planted.is_caught(model.to(dtype), given, name, wrong, large=large, modes=modes):
            planted_errors += 1
        elif not planted.is_harmless(fuzz.build(seed)[0], x, wrong):
            planted_errors += 1
            missed.append((seed, error, name, large, dtype, modes))
    return planted_errors, missed


def test_planted_index_errors_are_caught() -> None:
    count, missed = check_seeds(range(0, 41 * FAST, 41))
    assert missed == []
    assert count >= 0.8 * FAST


@pytest.mark.slow
def test_planted_index_errors_are_caught_in_every_mode_dtype_and_path() -> None:
    """All 500: in some networks no error that matters can be planted, or what was planted keeps the law of masks."""
    count, missed = check_seeds(range(ALL))
    assert missed == []
    assert count >= 0.6 * ALL
