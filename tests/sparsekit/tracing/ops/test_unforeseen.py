"""Operators and states out of the ordinary protect their own units at most: no crash, no refusal of the model."""

import threading
from collections.abc import Callable
from typing import Any

import laws
import pytest
import torch
from laws import check_masked_equals_compact, random_mask
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import UnsupportedModelError
from sparsekit.graph.mask import UnitMask


@torch.library.custom_op("sparsekit_tests::norm", mutates_args=())
def _norm(value: Tensor, other: Tensor) -> Tensor:
    return value * other.sum()


@torch.library.custom_op("sparsekit_tests::linear", mutates_args=())
def _linear(value: Tensor) -> Tensor:
    return value.flip(-1) + 1.0


OPERATORS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "cdist": lambda m, h: torch.cdist(h, m.codes),
    "norm of another library": lambda _, h: torch.ops.sparsekit_tests.norm(h, h),
    "linear of another library": lambda _, h: torch.ops.sparsekit_tests.linear(h),
    "addmv": lambda m, h: torch.addmv(m.codes.sum(1)[: len(h)], h, m.codes[0]).unsqueeze(-1) * m.codes[0],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_out_of_the_ordinary_costs_at_most_its_own_units(name: str) -> None:
    torch.manual_seed(0)
    wide = 40 if name == "cdist" else 6
    model = Lambda(
        lambda m, x: (OPERATORS[name](m, m.a(x)), m.head(m.b(x).relu())),
        a=(3, 6),
        codes=nn.Parameter(torch.randn(40, 6)),
        b=(3, 5),
        head=(5, 2),
    )
    x = torch.randn(wide, 3)
    graph, _ = laws.trace(model, x)
    assert dict(graph.fingerprint())["b"] == 5
    check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 0), gradients=False)


class Extra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: Any) -> None:
        del state


def test_states_that_are_copied_or_no_tensors_are_no_obstacle() -> None:
    x = torch.randn(4, 3)
    extra = nn.Sequential(Extra(3, 8), nn.ReLU(), nn.Linear(8, 2))
    assert sk.count_cost(extra, x).parameters == 50
    assert sk.prune(extra, (x,), budget="params=60%", multiple_of=1).model(x).shape == (4, 2)
    copied = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    copied.register_state_dict_post_hook(lambda _m, state, _p, _l: state.update({k: v.clone() for k, v in state.items()}))
    assert list(sk.trace_units(copied, x).groups) == ["0"]
    sparse = Lambda(lambda m, y: torch.sparse.mm(m.table, m.head(m.a(y).relu())), a=(3, 8), head=(8, 2))
    sparse.register_buffer("table", torch.eye(4).to_sparse())
    assert list(sk.trace_units(sparse, x).groups) == ["a"]


def test_the_default_device_may_be_the_meta_device() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(4, 3)
    with torch.device("meta"):
        assert sk.trace_units(model, x).fingerprint() == (("0", 6),)


@pytest.mark.parametrize("inside", [False, True], ids=["of the model", "of a layer"])
def test_an_attribute_that_cannot_be_copied_is_named(inside: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    (model[0] if inside else model).guard = threading.Lock()
    with pytest.raises(UnsupportedModelError, match=f"{'Linear' if inside else 'Sequential'}.guard cannot be copied"):
        sk.trace_units(model, torch.randn(4, 3))


def test_weights_that_share_memory_share_it_after_a_cut_and_tied_ones_are_counted_once() -> None:
    torch.manual_seed(0)

    class Tied(nn.Module):
        def __init__(self, by_data: bool) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 6, bias=False), nn.Linear(3, 6, bias=False), nn.Linear(6, 2)
            if by_data:
                self.b.weight.data = self.a.weight.data
            else:
                self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.a(x).relu() + self.b(x).tanh())

    for by_data in (True, False):
        model = Tied(by_data)
        graph = sk.trace_units(model, torch.randn(4, 3))
        mask = UnitMask({"a": torch.arange(6) < 3})
        small = sk.compact(model, graph, mask)
        assert small.b.weight.data_ptr() == small.a.weight.data_ptr()
        assert (small.b.weight is small.a.weight) != by_data
        entries = {id(p) for p in model.parameters()}
        assert len(graph.tensors) == len(entries)
        total = sum(p.numel() for p in model.parameters())
        assert mask.density(graph) == sum(p.numel() for p in small.parameters()) / total
