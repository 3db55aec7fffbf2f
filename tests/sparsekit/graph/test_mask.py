"""UnitMask and WeightMask: immutable, compared by value, checked against their graph."""

import pytest
import torch

from sparsekit.errors import InvalidValueError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup, UnitSlice
from sparsekit.graph.mask import UnitMask, WeightMask, to_weights


def _rows(*rows: int) -> torch.Tensor:
    return torch.tensor(rows).reshape(-1, 1)


@pytest.fixture
def graph() -> UnitGraph:
    """Linear(2, 3) with bias, then Linear(3, 2) without: the hidden features are the units."""
    slices = (
        UnitSlice("a.weight", 0, _rows(0, 1, 2), "out", gated=True),
        UnitSlice("a.bias", 0, _rows(0, 1, 2), "out", gated=True),
        UnitSlice("b.weight", 1, _rows(0, 1, 2), "in", gated=False),
    )
    shapes = {"a.weight": torch.Size((3, 2)), "a.bias": torch.Size((3,)), "b.weight": torch.Size((2, 3))}
    return UnitGraph({"a": UnitGroup("a", 3, "feature", slices)}, shapes)


def _mask(*keep: int) -> UnitMask:
    return UnitMask({"a": torch.tensor(keep, dtype=torch.bool)})


@pytest.mark.parametrize("kind", [UnitMask, WeightMask])
def test_a_mask_does_not_change_with_the_tensor_that_it_was_made_of(kind: type[UnitMask] | type[WeightMask]) -> None:
    keep = torch.tensor([True, False, True])
    mask = kind({"a": keep})
    keep.zero_()
    assert mask["a"].tolist() == [True, False, True]


def test_density_counts_the_entries_that_stay(graph: UnitGraph) -> None:
    # One of three units: 2 of 6 weights, 1 of 3 biases, 2 of 6 columns.
    assert _mask(0, 1, 0).density(graph) == 5 / 15


def test_by_entry_a_dropped_unit_loses_its_rows_and_the_columns_that_read_it(graph: UnitGraph) -> None:
    weights = to_weights(graph, _mask(1, 0, 1))
    assert weights["a.weight"].tolist() == [[True, True], [False, False], [True, True]]
    assert weights["a.bias"].tolist() == [True, False, True]
    assert weights["b.weight"].tolist() == [[True, False, True], [True, False, True]]


def test_what_does_not_fit_is_refused(graph: UnitGraph) -> None:
    with pytest.raises(InvalidValueError, match="keeps no unit of group 'a'"):
        _mask(0, 0, 0).check(graph)
    groups = {name: UnitGroup(name, 2, "cell", ()) for name in ("x", "y")}
    graph = UnitGraph(groups, {}, ties=(("x", "y"),))
    mask = UnitMask({"x": torch.tensor([True, True]), "y": torch.tensor([True, False])})
    with pytest.raises(InvalidValueError, match="equally many"):
        mask.check(graph)
    with pytest.raises(InvalidValueError, match="must be boolean"):
        UnitMask({"a": torch.tensor([1, 0, 1])})
