"""Operators that no table has are run with values changed; at most, they protect their own units."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn
from zoo_base import Lambda

import sparsekit as sk
from sparsekit.errors import UnsupportedModelError

GRID = torch.rand(2, 6, 6, 2, generator=torch.Generator().manual_seed(3)) * 2 - 1
PLACES = torch.tensor([0, 2, 2, 5, 1, 0])
EYE = torch.eye(6)
KERNEL = torch.ones(1, 1, 3, 3)


def written(y: Tensor) -> Tensor:
    y = y.clone()
    y[y < 0.4] = 0.1
    return y


def filled(y: Tensor) -> Tensor:
    """As attention with compressed keys joins the parts of its keys."""
    heads = y.flatten(2).transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, 2)
    keys = y.new_empty(2, 36, y.shape[1], 3)
    keys[..., :2], keys[..., 2:] = heads, heads[..., :1] * 2
    return keys.sum(-1).transpose(1, 2).view_as(y)


def in_place(name: str, *given: int) -> Callable[[Tensor], Tensor]:
    return lambda y: getattr(y * 1.0, name)(*given)


def spectrum(y: Tensor) -> Tensor:
    window = torch.ones(8).to(y)
    return y + torch.stft(y.flatten(0, 1).flatten(1), 8, window=window, return_complex=True).abs().sum((1, 2)).view(
        *y.shape[:2], 1, 1
    )


# Each keeps the five channels of its input apart.
APART: dict[str, Callable[[Tensor], Tensor]] = {
    "grid_sample": lambda y: F.grid_sample(y, GRID.to(y), align_corners=False),
    "scatter_reduce": lambda y: torch.zeros_like(y).scatter_reduce(3, PLACES.expand(y.shape), y, "amax"),
    "scatter": lambda y: torch.zeros_like(y).scatter(3, y.argsort(3), y),
    "max_unpool2d": lambda y: F.max_unpool2d(*F.max_pool2d(y, 2, return_indices=True), 2),
    "boolean assignment": written,
    "kthvalue": lambda y: y - y.kthvalue(3, 3, keepdim=True)[0],
    "bucketize": lambda y: y * torch.bucketize(y, torch.linspace(0, 1, 5).to(y)),
    "complex": lambda y: torch.view_as_real(torch.complex(y, y * y)).sum(-1),
    "inverse": lambda y: torch.linalg.inv(y + 3 * EYE.to(y)),
    "cholesky": lambda y: torch.linalg.cholesky(y @ y.mT + EYE.to(y)),
    "determinant": lambda y: y * torch.linalg.det(y)[..., None, None],
    "cdist": lambda y: torch.cdist(y, y),
    "renorm": lambda y: y.transpose(0, 1).renorm(2, 0, 1.0).transpose(0, 1),
    "tril": lambda y: y.tril(),
    "cat with nothing": lambda y: torch.cat([y, y[..., :0]], -1),
    "copies into views": filled,
    "one filter for all": lambda y: F.conv2d(
        y, torch.ones(1, 1, 3, 3).to(y).repeat(y.shape[1], 1, 1, 1), None, 1, 1, 1, y.shape[1]
    ),
    "one expanded filter": lambda y: F.conv2d(y, KERNEL.to(y).expand(y.shape[1], 1, 3, 3), None, 1, 1, 1, y.shape[1]),
    "quantile": lambda y: y - y.quantile(0.3, 3, keepdim=True) + y.nanquantile(0.5, 2, keepdim=True),
    "rrelu": F.rrelu,
    "stft": spectrum,
    "squeeze_": lambda y: in_place("squeeze_", 1)(y[:, None]),
    "unsqueeze_": lambda y: in_place("unsqueeze_", 1)(y)[:, 0],
    "transpose_": lambda y: in_place("transpose_", 1, 3)(y).transpose(1, 3),
    "swapaxes_": lambda y: in_place("swapaxes_", 1, 2)(y).transpose(1, 2),
    "t_": lambda y: y * in_place("t_")(y.mean((2, 3))).t()[..., None, None],
    "detach_": in_place("detach_"),
}


def test_operators_in_no_table_keep_the_units_that_they_keep_apart() -> None:
    torch.manual_seed(0)
    run, conv = (lambda m, x: m.b(m.f(m.a(x).sigmoid()))), nn.Conv2d
    parts = nn.ModuleDict({name: Lambda(run, a=conv(3, 5, 1), b=conv(5, 2, 1), f=f) for name, f in APART.items()})
    model, x = Lambda(lambda m, x: [part(x) for part in m.parts.values()], parts=parts).eval(), torch.randn(2, 3, 6, 6)
    graph, warned = trace(model, x)
    assert {name.split(".")[1]: group.size for name, group in graph.groups.items()} == dict.fromkeys(APART, 5), warned
    check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 1), gradients=False)


@torch.library.custom_op("sparsekit_tests::filtered", mutates_args=())
def filtered(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.T


def test_rows_of_a_weight_that_an_unknown_operator_reads_make_units() -> None:
    model = Lambda(
        lambda m, x: m.c(torch.ops.sparsekit_tests.filtered(m.a(x).relu(), m.w).relu()),
        a=(3, 4),
        c=(6, 2),
        w=nn.Parameter(torch.randn(6, 4)),
    )
    graph, told = trace(model, torch.randn(5, 3))
    assert {name: group.size for name, group in graph.groups.items()} == {"w": 6}
    assert any("sparsekit_tests" in each or "filtered" in each for each in told)


@torch.library.custom_op("sparsekit_tests::norm", mutates_args=())
def _norm(value: Tensor, other: Tensor) -> Tensor:
    return value * other.sum()


@torch.library.custom_op("sparsekit_tests::linear", mutates_args=())
def _linear(value: Tensor) -> Tensor:
    return value.flip(-1) + 1.0


MIXING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "svdvals": lambda m, h: m.c(h * torch.linalg.svdvals(h)),
    "qr": lambda m, h: m.c(torch.linalg.qr(h)[0]),
    "renorm": lambda m, h: m.c(h.renorm(2, 0, 1.0)),
    "tril": lambda m, h: m.c(h.tril()),
}
OPERATORS: dict[str, Callable[[Any, Tensor], Tensor]] = MIXING | {
    "cdist": lambda m, h: torch.cdist(h, m.codes),
    "norm of another library": lambda _, h: torch.ops.sparsekit_tests.norm(h, h),
    "linear of another library": lambda _, h: torch.ops.sparsekit_tests.linear(h),
    "addmv": lambda m, h: torch.addmv(m.codes.sum(1)[: len(h)], h, m.codes[0]).unsqueeze(-1) * m.codes[0],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_that_mixes_units_or_is_out_of_the_ordinary_costs_at_most_its_own_units(name: str) -> None:
    torch.manual_seed(0)
    model = Lambda(
        lambda m, x: (OPERATORS[name](m, m.a(x)), m.head(m.b(x).relu())),
        a=(3, 6), b=(3, 5), c=(6, 2), head=(5, 2), codes=nn.Parameter(torch.randn(40, 6)),
    )  # fmt: skip
    x = torch.randn(40 if name == "cdist" else 6, 3)
    graph, told = trace(model, x)
    assert dict(graph.fingerprint())["b"] == 5
    if name in MIXING:
        assert list(graph.groups) == ["b"]
        assert "is not known to keep units apart" in told[0]
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

    for by_data in (True, False):
        a, b = (nn.Linear(3, 6, bias=False) for _ in range(2))
        if by_data:
            b.weight.data = a.weight.data
        else:
            b.weight = a.weight
        model = Lambda(lambda m, x: m.head(m.a(x).relu() + m.b(x).tanh()), a=a, b=b, head=(6, 2))
        graph = sk.trace_units(model, torch.randn(4, 3))
        mask = sk.UnitMask({"a": torch.arange(6) < 3})
        small = sk.compact(model, graph, mask)
        assert small.b.weight.data_ptr() == small.a.weight.data_ptr()
        assert (small.b.weight is small.a.weight) != by_data
        entries = {id(p) for p in model.parameters()}
        assert len(graph.tensors) == len(entries)
        total = sum(p.numel() for p in model.parameters())
        assert mask.density(graph) == sum(p.numel() for p in small.parameters()) / total
