"""Random networks: a gated model equals the compacted one, in outputs and gradients, whatever the layers and the wiring.

Continuous integration runs every eighth of 200 seeds. All of them:

    SPARSEKIT_ALL_SEEDS=1 pytest -m slow tests/sparsekit/tracing/test_fuzz.py
"""

from collections.abc import Sequence
from typing import Any

import fuzz
import laws
import pytest
from laws import check_masked_equals_compact, check_nothing_is_lost, random_mask
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.errors import NoUnitsError


def trace(seed: int, **options: Any) -> tuple[nn.Module, Tensor, sk.UnitGraph | None]:
    model, x = fuzz.build(seed)
    try:
        return model, x, laws.trace(model, x, **options)[0]
    except NoUnitsError:
        return model, x, None


def check(model: nn.Module, x: Tensor, graph: sk.UnitGraph, mask: sk.UnitMask, *, train: bool = False) -> str | None:
    try:
        check_masked_equals_compact(model, (x,), {}, graph, mask, train=train)
        check_nothing_is_lost(model, graph, mask)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def describe(model: nn.Module) -> str:
    wiring = getattr(model, "wiring", ())
    return f"{model}\nwiring {wiring}, outputs {getattr(model, 'outputs', ())}"


def check_seeds(seeds: Sequence[int], **options: Any) -> tuple[int, list[str]]:
    cut, wrong = 0, []
    for seed in seeds:
        model, x, graph = trace(seed, **options)
        if graph is None:
            continue
        cut += 1
        for number, ratio in enumerate((0.5, 0.1 + 0.8 * (seed % 9) / 8)):
            problem = check(model, x, graph, random_mask(graph, ratio, seed + number), train=(seed + number) % 2 == 1)
            if problem is not None:
                wrong.append(f"seed {seed}, ratio {ratio:.1f}: {problem}\n{describe(model)}")
    return cut, wrong


HUNDREDS = pytest.param(fuzz.seeds(200, 8), 0.85, marks=pytest.mark.slow, id="hundreds")


@pytest.mark.parametrize("prune_hidden_size", [False, True])
@pytest.mark.parametrize(("seeds", "share"), [(range(1000, 1018), 0.9), HUNDREDS])
def test_random_networks_are_cut_exactly(seeds: range, share: float, prune_hidden_size: bool) -> None:
    cut, wrong = check_seeds(seeds, prune_hidden_size=prune_hidden_size)
    assert wrong == []
    assert cut > share * len(seeds)
