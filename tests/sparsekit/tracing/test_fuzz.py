"""Random networks: a gated model equals the compacted one, in outputs and gradients, whatever the layers and the wiring."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import fuzz
import laws
import pytest
from laws import check_masked_equals_compact, check_nothing_is_lost, random_mask
from torch import Tensor, nn

from sparsekit.errors import NoUnitsError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask
from sparsekit.layers import LayerRule, find_rule
from sparsekit.layers.labels.tracer import Tracer
from sparsekit.layers.labels.values import Labels, TensorLabels

FAST, ALL = 32, 200


def trace(seed: int, **options: Any) -> tuple[nn.Module, Tensor, UnitGraph | None]:
    model, x = fuzz.build(seed)
    try:
        return model, x, laws.trace(model, x, **options)[0]
    except NoUnitsError:
        return model, x, None


def check(model: nn.Module, x: Tensor, graph: UnitGraph, mask: UnitMask, *, train: bool = False) -> str | None:
    """What breaks a law under this mask, or None."""
    try:
        check_masked_equals_compact(model, (x,), {}, graph, mask, train=train)
        check_nothing_is_lost(model, graph, mask)
    except (AssertionError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def describe(model: nn.Module) -> str:
    wiring = getattr(model, "wiring", ())
    return f"{model}\nwiring {wiring}, outputs {getattr(model, 'outputs', ())}"


def check_seeds(seeds: range, **options: Any) -> tuple[int, list[str]]:
    """How many networks had units, and what went wrong."""
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


def test_random_networks_are_cut_exactly() -> None:
    cut, wrong = check_seeds(range(FAST))
    assert wrong == []
    assert cut > 0.9 * FAST


def test_random_networks_with_norms_over_kept_units_are_cut_exactly() -> None:
    cut, wrong = check_seeds(range(1000, 1000 + FAST // 2), norm="kept")
    assert wrong == []
    assert cut > 0.45 * FAST


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["fixed", "kept"])
def test_hundreds_of_random_networks_are_cut_exactly(norm: str) -> None:
    cut, wrong = check_seeds(range(ALL), norm=norm)
    assert wrong == []
    assert cut > 0.9 * ALL


class Liar(LayerRule):
    """Says of a linear layer that its outputs come in the opposite order."""

    types: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    opaque: ClassVar[bool] = True

    def resize(self, module: nn.Module) -> None:
        rule = find_rule(module)
        assert rule is not None
        rule.resize(module)

    def trace(
        self, tracer: Tracer, module: nn.Module, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        assert isinstance(module, nn.Linear)
        out, entering, weight = run(*args, **kwargs), tracer.labels(args[0]), tracer.labels(module.weight)
        tracer.contract(TensorLabels(entering.axes[-1:]), 0, weight, 1)
        rows = weight.axes[0]
        if rows is None:
            return out
        tracer.make(weight, 0)
        if module.bias is not None:
            bias = tracer.labels(module.bias)
            assert bias.axes[0] is not None
            tracer.unite(rows.nodes, bias.axes[0].nodes)
        reverse = Labels(rows.nodes[::-1].copy(), rows.sources[::-1].copy())
        tracer.set(out, TensorLabels((*([None] * (out.dim() - 1)), reverse)))
        return out


LIES = range(8)


def test_a_lie_about_a_layer_is_noticed_by_the_fuzz_and_stopped_by_the_verification() -> None:
    noticed, stopped = 0, 0
    for seed in LIES:
        model, x, believed = trace(seed, rules={nn.Linear: Liar()}, verify=False)
        if believed is None:
            continue
        problem = check(model, x, believed, random_mask(believed, 0.5, seed))
        noticed += problem is not None
        model, x, graph = trace(seed, rules={nn.Linear: Liar()})
        stopped += graph is None or len(graph.groups) < len(believed.groups)
        if graph is not None:
            assert check(model, x, graph, random_mask(graph, 0.5, seed)) is None, seed
    assert noticed >= 4
    assert stopped >= noticed
