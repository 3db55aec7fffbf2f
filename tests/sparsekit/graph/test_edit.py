"""Graphs with fewer groups: groups left out keep all units, and everything else is as before."""

import pytest
import torch
import zoo
from torch import nn

from sparsekit.errors import InvalidValueError
from sparsekit.graph.edit import only, without
from sparsekit.graph.groups import Unprunable
from sparsekit.graph.mask import UnitMask
from sparsekit.surgery.compaction import compact
from sparsekit.tracing.trace import trace_units


def test_what_is_left_out_is_fixed_with_a_reason_and_stays_whole_in_a_compact_model() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    graph = trace_units(model, torch.randn(3, 4))
    smaller = without(graph, ["0"])
    assert list(smaller.groups) == ["2"]
    assert smaller.unprunable[-1] == Unprunable("0", 6, "left out on purpose", "choice")
    assert smaller.shapes == graph.shapes
    small = compact(model, smaller, UnitMask({"2": torch.arange(5) < 3}))
    assert [small[0].out_features, small[2].out_features] == [6, 3]  # type: ignore[index]


@pytest.mark.parametrize("edit", [without, only])
def test_tied_groups_are_left_out_together_or_not_at_all(edit: object) -> None:
    _, _, _, stacked = zoo.traced("lstm-stacked")  # two layers of one hidden size
    (tied,) = stacked.ties
    with pytest.raises(InvalidValueError, match="share one size"):
        edit(stacked, tied[:1])  # type: ignore[operator]
    assert without(stacked, tied).ties == ()
    assert only(stacked, tied).ties == stacked.ties
