"""Index errors that are planted into the graphs of random networks are caught, in every mode, dtype and path.

Continuous integration runs one in 31 of 500 seeds. All of them:

    SPARSEKIT_ALL_SEEDS=1 pytest tests/sparsekit/tracing/test_planted.py
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import fuzz
import laws
import numpy as np
import planted
import torch

from sparsekit.errors import NoUnitsError

WAYS = [(large, dtype) for large in (False, True) for dtype in (torch.float32, torch.bfloat16)]
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
        large, dtype = WAYS[(seed // len(planted.ERRORS)) % len(WAYS)]
        modes = MODES[(seed // 16) % 2]
        given = x.to(dtype) if x.is_floating_point() else x
        if planted.is_caught(model.to(dtype), given, name, wrong, large=large, modes=modes):
            caught[error, large, dtype, modes] += 1
        elif not planted.is_harmless(fuzz.build(seed)[0], x, wrong):
            missed.append((seed, error, name, large, dtype, modes))
    return caught, missed


def test_planted_index_errors_are_caught_in_every_mode_dtype_and_path() -> None:
    """In some networks no error that matters can be planted, or the wrong graph keeps the law of masks."""
    seeds = fuzz.seeds(500, 31)
    caught, missed = check_seeds(seeds)
    assert missed == []
    assert caught.total() >= 0.6 * len(seeds)
    for place, values in enumerate((set(planted.ERRORS), {False, True}, {torch.float32, torch.bfloat16}, set(MODES))):
        assert {kind[place] for kind in caught} == values
