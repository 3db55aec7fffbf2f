"""Selections: layers by name, regular expression, type and module; what means nothing is an error."""

import re
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.allocation import by_ratio, ratio_counts
from sparsekit.errors import InvalidValueError, UnknownNameError
from sparsekit.pruning.selection import read_limits, select_groups

X = torch.randn(1, 3, 5, 5)


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage1 = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 8, 3, padding=1), bn=nn.BatchNorm2d(8), act=nn.ReLU()))
        self.enter = nn.Conv2d(8, 6, 1)
        self.stage2 = nn.Sequential(nn.Conv2d(6, 10, 3, padding=1), nn.ReLU(), nn.Conv2d(10, 6, 3, padding=1))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(self.stage1(x))
        out: Tensor = self.head((x + self.stage2(x)).mean((2, 3)))
        return out


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, sk.UnitGraph]:
    model = _Net()
    return model, sk.trace_units(model, X)


@pytest.mark.parametrize(
    ("selector", "groups"),
    [
        ("stage1.conv", ("stage1.conv",)),
        ("stage1", ("stage1.conv",)),
        ("stage2", ("enter", "stage2.0")),
        (r"stage2\..*", ("enter", "stage2.0")),
        (r".*\.conv|enter", ("stage1.conv", "enter")),
        (nn.Conv2d, ("stage1.conv", "enter", "stage2.0")),
        (nn.BatchNorm2d, ("stage1.conv",)),
        ("head", ()),
    ],
)
def test_a_selection_means_the_groups_whose_units_it_makes(
    net: tuple[nn.Module, sk.UnitGraph], selector: Any, groups: tuple[str, ...]
) -> None:
    assert select_groups(*net, selector) == groups


@pytest.mark.parametrize(
    ("selector", "error", "told"),
    [
        ("stage3", UnknownNameError, "did you mean 'stage"),
        (r"layer\d", UnknownNameError, "selects nothing"),
        (nn.LSTM, UnknownNameError, "no module of type 'LSTM'"),
        (nn.ReLU, InvalidValueError, "selects layers without weights"),
        (3, InvalidValueError, "by name, regular expression, type or module"),
    ],
)
def test_what_means_nothing_lists_the_nearest(
    net: tuple[nn.Module, sk.UnitGraph], selector: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        select_groups(*net, selector)


@pytest.mark.parametrize(
    "given",
    [
        lambda model, graph, text: sk.prune(model, X, budget="flops=80%", graph=graph, exclude=[text]),
        lambda model, graph, text: sk.prune(model, X, budget="flops=80%", graph=graph, limits={text: (0.5, 1.0)}),
        lambda model, graph, text: sk.prune(model, X, graph=graph, allocation=partial(by_ratio, ratios={text: 0.5})),
        lambda _, graph, text: ratio_counts(graph, {text: 0.5}),
    ],
    ids=["exclude", "limits", "by_ratio", "ratio_counts"],
)
def test_a_bad_regular_expression_ends_in_a_sentence_wherever_it_is_given(
    net: tuple[nn.Module, sk.UnitGraph], given: Callable[..., object]
) -> None:
    for text in ("(stage", "*", "[a", "a{2,1}"):
        with pytest.raises(
            InvalidValueError, match=f"^{re.escape(repr(text))} is neither a (name|group) nor a regular expression: "
        ):
            given(*net, text)


def test_all_limits_of_a_group_hold_and_keep_goes_over_them(net: tuple[nn.Module, sk.UnitGraph]) -> None:
    limits = read_limits(*net, ["enter"], {"stage2": (0.2, 0.9), r"stage2\.0": (0.5, 1.0)})
    assert limits == {"enter": (1.0, 1.0), "stage2.0": (0.5, 0.9)}
