"""UnitGraph: gates, kept positions and checks follow from the index table."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo_base import Lambda

from sparsekit.errors import ForeignMaskError
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.groups import UnitGroup, UnitSlice, Unprunable
from sparsekit.tracing.trace import trace_units


def _graph() -> UnitGraph:
    """Two channels, flattened to 2·2 columns of a linear layer: unit j spans columns 2j and 2j + 1."""
    slices = (
        UnitSlice("conv.weight", 0, torch.tensor([[0], [1]]), "out", gated=True),
        UnitSlice("fc.weight", 1, torch.tensor([[0, 1], [2, 3]]), "in", gated=False),
    )
    shapes = {"conv.weight": torch.Size((2, 1)), "fc.weight": torch.Size((1, 4)), "fc.bias": torch.Size((1,))}
    return UnitGraph(
        {"conv": UnitGroup("conv", 2, "channel", slices)}, shapes, unprunable=(Unprunable("fc", 1, "model output"),)
    )


def _state() -> dict[str, torch.Tensor]:
    return {
        "conv.weight": torch.tensor([[3.0], [5.0]]),
        "fc.weight": torch.tensor([[1.0, 2.0, 3.0, 4.0]]),
        "fc.bias": torch.tensor([7.0]),
    }


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ForeignMaskError, match="no group 'fc'"):
        _graph().gate(_state(), {"fc": torch.ones(1)})
    with pytest.raises(ForeignMaskError, match=r"shape \(2,\), got \(3,\)"):
        _graph().gate(_state(), {"conv": torch.ones(3)})
    state = _state()
    del state["fc.bias"]
    with pytest.raises(ForeignMaskError, match=r"lacks 'fc\.bias'"):
        _graph().check_state(state)
    with pytest.raises(ForeignMaskError, match="expanded first"):
        _graph().check_state({**_state(), "conv.weight": torch.ones(1, 1)}, what="this state")


@given(st.lists(st.lists(st.sampled_from("abcdefg"), min_size=2, max_size=3, unique=True), max_size=5))
def test_ties_that_share_a_group_are_one_set(ties: list[list[str]]) -> None:
    groups = {name: UnitGroup(name, 4, "cell", ()) for name in "abcdefg"}
    graph = UnitGraph(groups, {}, ties=tuple(map(tuple, ties)))
    linked = {name: {name} for name in groups}
    for _ in groups:  # every round reaches one tie further
        linked = {name: same.union(*(tied for tied in ties if same & set(tied))) for name, same in linked.items()}
    assert set(graph.tied_sets) == {tuple(sorted(same)) for same in linked.values()}
    assert [tied[0] for tied in graph.tied_sets] == sorted(tied[0] for tied in graph.tied_sets)
    graph.check_counts({name: 1 + "abcdefg".index(tied[0]) % 4 for tied in graph.tied_sets for name in tied})


@pytest.mark.parametrize("between", [nn.Identity(), nn.ReLU(), nn.Tanh()], ids=["linear", "relu", "tanh"])
def test_gates_of_zero_and_one_are_exact_and_soft_ones_behind_what_scales(between: nn.Module) -> None:
    torch.manual_seed(0)
    # Its units have no reader with weights, so they are gated where they are made.
    model = Lambda(lambda m, x, scale=1.0: (m.between(m.a(x)) * scale).sum(-1, keepdim=True), a=(3, 6), between=between)
    x = torch.randn(4, 3)
    graph = trace_units(model, x)
    for gates, exact in ((torch.tensor([0.0, 1, 1, 0, 1, 0]), True), (torch.full((6,), 0.5), not isinstance(between, nn.Tanh))):
        found = torch.func.functional_call(model, graph.gate(model.state_dict(), {"a": gates}), (x,))
        assert torch.allclose(found, model(x, gates), atol=1e-6) == exact
