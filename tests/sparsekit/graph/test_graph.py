"""UnitGraph, its masks and its parts: gates, kept positions and checks follow from the index table."""

from collections.abc import Callable

import pytest
import torch
import zoo
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.graph.edit import only, without
from sparsekit.graph.groups import UnitGroup, UnitSlice, Unprunable
from sparsekit.graph.mask import UnitMask, WeightMask

SHAPES = {"a.weight": torch.Size((3, 2)), "a.bias": torch.Size((3,)), "b.weight": torch.Size((2, 3))}
STATE = {name: torch.ones(shape) for name, shape in SHAPES.items()}
SLICES = tuple(
    UnitSlice(name, dim, torch.arange(3)[:, None], side, gated=side == "out")
    for name, dim, side in (("a.weight", 0, "out"), ("a.bias", 0, "out"), ("b.weight", 1, "in"))
)
GRAPH = sk.UnitGraph({"a": UnitGroup("a", 3, "feature", SLICES)}, SHAPES)
"""Linear(2, 3) with bias, then Linear(3, 2) without: the hidden features are the units."""


def _mask(*keep: int) -> UnitMask:
    return UnitMask({"a": torch.tensor(keep, dtype=torch.bool)})


def _tied(x: tuple[bool, ...], y: tuple[bool, ...]) -> None:
    groups = {name: UnitGroup(name, 2, "cell", ()) for name in ("x", "y")}
    UnitMask({"x": torch.tensor(x), "y": torch.tensor(y)}).check(sk.UnitGraph(groups, {}, ties=(("x", "y"),)))


def _foreign() -> nn.Module:
    other = nn.Sequential(nn.Linear(5, 9), nn.ReLU(), nn.Linear(9, 6), nn.Tanh(), nn.Linear(6, 3))
    return sk.compact(other, zoo.traced("mlp")[3], UnitMask.full(zoo.traced("mlp")[3]))


def _expanded_twice() -> object:
    model, _, _, graph = zoo.traced("mlp")
    mask = UnitMask({"0": torch.arange(8) < 4, "2": torch.arange(6) < 3})
    return sk.expand(model.state_dict(), graph, mask, into=model.state_dict())


def _stacked(edit: Callable[..., object]) -> object:
    graph = zoo.traced("lstm-stacked")[3]
    return edit(graph, graph.ties[0][:1])


REFUSED: list[tuple[type[Exception], str, Callable[[], object]]] = [
    (ForeignMaskError, "no group 'b'", lambda: GRAPH.gate(STATE, {"b": torch.ones(1)})),
    (ForeignMaskError, r"shape \(3,\), got \(2,\)", lambda: GRAPH.gate(STATE, {"a": torch.ones(2)})),
    (ForeignMaskError, r"lacks 'a\.bias'", lambda: GRAPH.check_state({n: v for n, v in STATE.items() if n != "a.bias"})),
    (ForeignMaskError, "expanded first", lambda: GRAPH.check_state({**STATE, "a.weight": torch.ones(1, 2)}, what="this state")),
    (ForeignMaskError, "does not belong to this graph", lambda: UnitMask({"other": torch.tensor([True])}).check(GRAPH)),
    (ForeignMaskError, r"of shape \(9, 5\), the graph expects \(8, 5\)", _foreign),
    (ForeignMaskError, "pass the mask that it was compacted with", _expanded_twice),
    (InvalidValueError, "keeps no unit of group 'a'; at least one must stay", lambda: _mask(0, 0, 0).check(GRAPH)),
    (InvalidValueError, "must keep equally many units", lambda: _tied((True, True), (True, False))),
    (InvalidValueError, "must be boolean", lambda: UnitMask({"a": torch.tensor([1, 0, 1])})),
    (InvalidValueError, "share one size", lambda: _stacked(without)),
    (InvalidValueError, "share one size", lambda: _stacked(only)),
]


@pytest.mark.parametrize(("error", "told", "call"), REFUSED)
def test_what_does_not_fit_is_refused(error: type[Exception], told: str, call: Callable[[], object]) -> None:
    with pytest.raises(error, match=told):
        call()


@given(st.lists(st.lists(st.sampled_from("abcdefg"), min_size=2, max_size=3, unique=True), max_size=5))
def test_ties_that_share_a_group_are_one_set(ties: list[list[str]]) -> None:
    groups = {name: UnitGroup(name, 4, "cell", ()) for name in "abcdefg"}
    graph = sk.UnitGraph(groups, {}, ties=tuple(map(tuple, ties)))
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
    graph = sk.trace_units(model, x)
    for gates, exact in ((torch.tensor([0.0, 1, 1, 0, 1, 0]), True), (torch.full((6,), 0.5), not isinstance(between, nn.Tanh))):
        found = torch.func.functional_call(model, graph.gate(model.state_dict(), {"a": gates}), (x,))
        assert torch.allclose(found, model(x, gates), atol=1e-6) == exact


@pytest.mark.parametrize("kind", [UnitMask, WeightMask])
def test_a_mask_does_not_change_with_the_tensor_that_it_was_made_of(kind: type[UnitMask] | type[WeightMask]) -> None:
    keep = torch.tensor([True, False, True])
    mask = kind({"a": keep})
    keep.zero_()
    assert mask["a"].tolist() == [True, False, True]


def test_the_density_is_the_share_of_entries_that_stay() -> None:
    assert _mask(0, 1, 0).density(GRAPH) == 5 / 15, "2 of 6 weights, 1 of 3 biases, 2 of 6 columns"


def test_what_is_left_out_is_fixed_with_a_reason_and_stays_whole_in_a_compact_model() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    graph = sk.trace_units(model, torch.randn(3, 4))
    smaller = without(graph, ["0"])
    assert list(smaller.groups) == ["2"]
    assert smaller.unprunable[-1] == Unprunable("0", 6, "left out on purpose", "choice")
    assert smaller.shapes == graph.shapes
    small = sk.compact(model, smaller, UnitMask({"2": torch.arange(5) < 3}))
    assert [small[0].out_features, small[2].out_features] == [6, 3]
    stacked = zoo.traced("lstm-stacked")[3]  # two layers of one hidden size
    assert without(stacked, stacked.ties[0]).ties == ()
    assert only(stacked, stacked.ties[0]).ties == stacked.ties


@pytest.mark.filterwarnings("error")
def test_masks_of_different_kinds_differ_in_either_order() -> None:
    units, weights = (kind({"a": torch.tensor([True])}) for kind in (UnitMask, WeightMask))
    assert units == UnitMask({"a": torch.tensor([True])})
    assert all(one != other for one, other in ((units, weights), (weights, units), (units, None), (None, weights)))
