"""Moving values by index and by patches: exact along other axes than that of the units, fixed along it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import check_masked_equals_compact, random_mask
from torch import Tensor, nn
from zoo_base import Lambda

from sparsekit.errors import NoUnitsError
from sparsekit.tracing.trace import FixedUnitsWarning, trace_units

INDEX = torch.tensor([1, 0, 2, 2])


def wide(h: Tensor) -> Tensor:
    return INDEX[:, None].expand(-1, h.shape[1])


MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "index_add": lambda h: h.new_zeros(3, h.shape[1]).index_add(0, INDEX, h),
    "index_add in place": lambda h: h.new_zeros(3, h.shape[1]).index_add_(0, INDEX, h, alpha=2),
    "index_copy": lambda h: torch.zeros_like(h).index_copy(0, torch.tensor([3, 1, 0, 2]), h),
    "scatter_add": lambda h: torch.zeros_like(h).scatter_add(0, wide(h), h),
    "gather": lambda h: h.gather(0, wide(h)),
    "gather of some": lambda h: h.gather(0, wide(h)[:2]),
}


def model(move: Callable[[Tensor], Tensor]) -> nn.Module:
    return Lambda(lambda m, x: m.head(move(torch.tanh(m.a(x)))), a=nn.Linear(3, 6), head=nn.Linear(6, 2))


@pytest.mark.parametrize("name", MOVES)
def test_moving_rows_leaves_units_apart(name: str) -> None:
    net, x = model(MOVES[name]), torch.randn(4, 3)
    graph = trace_units(net, x)
    assert graph.fingerprint() == (("a", 6),)
    check_masked_equals_compact(net, (x,), {}, graph, random_mask(graph, 0.5, 0), train=True)


@pytest.mark.parametrize(
    "move",
    [
        lambda h: h.gather(1, INDEX[None].expand(h.shape[0], -1)).repeat(1, 2)[:, :6],
        lambda h: h.gather(0, torch.randint(4, h.shape, generator=torch.Generator().manual_seed(0))),
        lambda h: h.scatter_add(0, torch.randint(4, h.shape, generator=torch.Generator().manual_seed(0)), h),
        lambda h: h.index_add(1, INDEX, h[:, :4]),
    ],
    ids=["gather along units", "gather apart", "scatter apart", "index_add along units"],
)
@pytest.mark.parametrize("verify", [True, False])
def test_moving_units_fixes_them(move: Any, verify: bool) -> None:
    with pytest.warns(FixedUnitsWarning), pytest.raises(NoUnitsError):
        trace_units(model(move), torch.randn(4, 3), verify=verify)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_channel_spans_its_places_in_the_patches(batched: bool, stride: int) -> None:
    torch.manual_seed(0)
    net = Lambda(
        lambda m, x: m.head(F.fold(m.scale * F.unfold(torch.tanh(m.a(x)), 2, stride=stride), (4, 4), 2, stride=stride)),
        a=nn.Conv2d(1, 3, 3),
        scale=nn.Parameter(torch.rand(12, 1)),
        head=nn.Conv2d(3, 2, 1),
    )
    x = torch.randn(2, 1, 6, 6)[: None if batched else 1]
    x = x if batched else x[0]
    graph = trace_units(net, x)
    spans = {(piece.name, piece.dim): piece.span for piece in graph.groups["a"].slices}
    assert spans == {("a.weight", 0): 1, ("a.bias", 0): 1, ("scale", 0): 4, ("head.weight", 1): 1}
    check_masked_equals_compact(net, (x,), {}, graph, random_mask(graph, 0.5, 0), train=True)
