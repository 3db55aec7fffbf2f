"""Magnitudes measure the weights that operators read, whatever entries these are computed from."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import sparsekit as sk

DEAD = torch.randperm(16, generator=torch.Generator().manual_seed(3))[:8]
"""Units whose used weights are 0, and whose stored ones are large."""


class Gate(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.gate: Tensor
        self.register_buffer("gate", torch.ones(shape).index_fill(0, DEAD, 0))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.gate


class Computed(nn.Linear):
    def __init__(self, how: str) -> None:
        super().__init__(6, 16)
        self.how, self.gate = how, Gate((16, 1))
        self.a, self.b = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(16, 2))
        if how == "low rank":
            with torch.no_grad():
                self.weight[DEAD] = -(self.b @ self.a)[DEAD]

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "low rank":
            return F.linear(x, self.weight + self.b @ self.a, self.bias)
        if self.how == "transposed":
            return x @ self.gate(self.weight).t() + self.bias
        return F.linear(x, self.gate(self.weight), self.bias)


def _grown(layer: nn.Module, name: str) -> None:
    layer.get_parameter(name).data[DEAD] *= 50


def _zero(layer: nn.Module, name: str) -> None:
    layer.get_parameter(name).data[DEAD] = 0


def _pruned(layer: nn.Module) -> None:
    mask = torch.ones_like(layer.weight).index_fill(0, DEAD, 0)  # type: ignore[call-overload]
    prune.custom_from_mask(layer, "weight", mask)  # type: ignore[no-untyped-call]
    _grown(layer, "weight_orig")


def _weight_norm(layer: nn.Module) -> None:
    parametrizations.weight_norm(layer)
    _grown(layer, "parametrizations.weight.original1")
    _zero(layer, "parametrizations.weight.original0")


def _old_weight_norm(layer: nn.Module) -> None:
    nn.utils.weight_norm(layer)  # type: ignore[no-untyped-call]
    _grown(layer, "weight_v")
    _zero(layer, "weight_g")


def _gated(layer: nn.Module) -> None:
    parametrize.register_parametrization(layer, "weight", Gate((16, *[1] * (layer.weight.dim() - 1))))  # type: ignore[operator]
    _grown(layer, "parametrizations.weight.original")


WAYS: dict[str, Callable[[], nn.Module]] = {
    **{
        f"{kind}, {change.__name__}": lambda make=make, change=change: (layer := make(), change(layer))[0]  # type: ignore[misc]
        for kind, make in (("linear", lambda: nn.Linear(6, 16)), ("conv", lambda: nn.Conv1d(6, 16, 3)))
        for change in (_pruned, _weight_norm, _old_weight_norm, _gated)
    },
    **{how: lambda how=how: Computed(how) for how in ("low rank", "transposed", "product")},  # type: ignore[misc]
}


@pytest.mark.parametrize("way", WAYS)
def test_units_whose_used_weights_are_zero_go_first(way: str) -> None:
    torch.manual_seed(0)
    first = WAYS[way]()
    _zero(first, "bias")
    image = isinstance(first, nn.Conv1d)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv1d(16, 3, 1) if image else nn.Linear(16, 3)).eval()
    x = torch.randn(4, 6, 5) if image else torch.randn(4, 6)
    pruned = sk.prune(model, x, criterion="magnitude", allocation=lambda problem: dict.fromkeys(problem.graph.groups, 8))
    for mask in (pruned.mask, sk.LearnableMask(model, (x,), ratio=0.5).unit_mask()):
        [kept] = mask.values()
        assert not kept[DEAD].any()
    torch.testing.assert_close(pruned.model(x), model(x))
    made = first.weight  # after a pass, that of the hooks
    if isinstance(first, Computed):
        made = first.weight + first.b @ first.a if way == "low rank" else first.gate(first.weight)
    [scores] = pruned.scores["Magnitude"].values.values()
    torch.testing.assert_close(scores, made.detach().flatten(1).abs().sum(1) + first.bias.abs().detach())
    graph = sk.trace_units(model, x)
    context = sk.criteria.ScoringContext(weights=model.state_dict(), model=model, call=((x,), {}))
    [norms] = sk.criteria.Magnitude(order=2).scores(graph, context).values()
    torch.testing.assert_close(norms, (made.detach().flatten(1).square().sum(1) + first.bias.detach() ** 2).sqrt())


def test_the_state_of_a_plain_model_is_what_counts() -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).eval()
    graph, call = sk.trace_units(model, torch.randn(2, 6)), ((torch.randn(2, 6),), {})
    weights = {name: 2 * value for name, value in model.state_dict().items()}
    plain, other = (sk.criteria.ScoringContext(weights=weights, model=given, call=call) for given in (None, model))
    [a], [b] = (sk.criteria.Magnitude().scores(graph, context).values() for context in (plain, other))
    assert torch.equal(a, b)
