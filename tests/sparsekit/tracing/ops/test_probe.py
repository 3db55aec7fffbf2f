"""An operator that no handler knows is run with some values changed: units that it keeps apart may go, others stay."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import check_masked_equals_compact, random_mask, trace
from torch import Tensor, nn
from zoo_base import Lambda

from sparsekit.errors import NoUnitsError
from sparsekit.tracing.trace import trace_units

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


class Parts(nn.Module):
    def __init__(self, runs: dict[str, Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        conv = nn.Conv2d
        self.parts = nn.ModuleDict(
            {
                name: Lambda(lambda m, x: m.b(m.f(m.a(x).sigmoid())), a=conv(3, 5, 1), b=conv(5, 2, 1), f=f)
                for name, f in runs.items()
            }
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        return [part(x) for part in self.parts.values()]


def test_operators_in_no_table_keep_the_units_that_they_keep_apart() -> None:
    torch.manual_seed(0)
    model, x = Parts(APART).eval(), torch.randn(2, 3, 6, 6)
    graph, warned = trace(model, x)
    assert {name.split(".")[1]: group.size for name, group in graph.groups.items()} == dict.fromkeys(APART, 5), warned
    check_masked_equals_compact(model, (x,), {}, graph, random_mask(graph, 0.5, 1), gradients=False)


@pytest.mark.parametrize(
    "mixes",
    [
        lambda y: torch.linalg.svdvals(y.flatten(2)),
        lambda y: torch.linalg.qr(y.flatten(2).mT)[0],
        lambda y: y.renorm(2, 0, 1.0),
        lambda y: y.transpose(1, 3).tril(),
    ],
    ids=["svdvals", "qr", "renorm", "tril"],
)
def test_units_that_an_unknown_operator_mixes_stay(mixes: Any) -> None:
    model = Lambda(lambda m, x: m.b(mixes(m.a(x)).flatten(1)), a=(3, 5, 1), b=nn.LazyLinear(2))
    model(x := torch.randn(2, 3, 6, 6))
    with pytest.warns(UserWarning, match="is not known to keep units apart"), pytest.raises(NoUnitsError):
        trace_units(model, x)


def test_steps_of_a_slice_take_neighbours_together() -> None:
    def run(m: Any, x: Tensor) -> Any:
        y = m.a(x)
        return m.b(y[..., ::2] * y[..., 1::2].sigmoid())

    graph, _ = trace(Lambda(run, a=(3, 12), b=(6, 2)), torch.randn(4, 3))
    assert graph.groups["a"].size == 6
    assert {piece.span for piece in graph.groups["a"].slices if piece.name == "a.weight"} == {2}


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
