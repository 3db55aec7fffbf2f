"""NestedModule: equal to the compact module of its mask, and learning in the wider one's memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparsekit import compact, select, trace_units
from sparsekit.criteria import Ordered, Random, View
from sparsekit.errors import ForeignMaskError
from sparsekit.training.narrow_model import NarrowModel
from sparsekit_fl.models.cnn import Cnn
from sparsekit_fl.models.lstm import NextWordLstm
from sparsekit_fl.training.nested import NestedModule


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.hidden = nn.Linear(6 * 36, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.hidden(torch.relu(self.norm(self.conv(x))).flatten(1))))


MODELS = {
    "cnn": (lambda: Cnn(classes=4, size=(16, 16)), lambda: torch.randn(3, 1, 16, 16)),
    "normed": (Normed, lambda: torch.randn(3, 1, 8, 8)),
    "lstm": (lambda: NextWordLstm(vocabulary=11, width=6, hidden=8), lambda: torch.randint(0, 11, (3, 5))),
}


def made(name: str, outer: float, inner: float, pattern=None):
    torch.manual_seed(0)
    model, inputs = MODELS[name][0]().double(), MODELS[name][1]()
    if inputs.is_floating_point():
        inputs = inputs.double()
    graph = trace_units(model, inputs)
    narrow_model = NarrowModel(model, graph)
    wide = select(Ordered(), graph, outer, View())
    narrow_model.load(model.state_dict(), wide)
    if pattern is None:
        mask = select(Ordered(), graph, inner, View())
    else:
        small = select(pattern, graph, 1.0, View(generator=torch.Generator().manual_seed(1)))
        mask = type(small)({group: keep & wide[group] for group, keep in small.items()})
        mask = type(small)({group: _odd(keep) for group, keep in mask.items()})
    return model, graph, narrow_model, mask, inputs


def _odd(keep: torch.Tensor) -> torch.Tensor:
    """Every other kept unit, so that nothing is a prefix."""
    chosen = torch.zeros_like(keep)
    chosen[keep.nonzero().flatten()[1::2]] = True
    return chosen


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("outer", "inner"), [(1.0, 0.5), (0.5, 0.25), (1.0, 1.0)])
def test_gives_what_the_compact_module_gives(name, outer, inner) -> None:
    model, graph, narrow_model, mask, x = made(name, outer, inner)
    nested = NestedModule(narrow_model, mask)
    assert torch.allclose(nested.module.eval()(x), compact(model, graph, mask).eval()(x), atol=1e-12)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("pattern", [None, Random()])
def test_a_step_inside_moves_the_same_entries_outside_and_no_others(name, pattern) -> None:
    model, graph, narrow_model, mask, x = made(name, 1.0, 0.5, pattern)
    before = narrow_model.dense_state()
    nested = NestedModule(narrow_model, mask)
    small = compact(model, graph, mask).train()
    nested.module.train()
    nested.pull()
    for module in (nested.module, small):
        loss = module(x).square().sum()
        gradients = torch.autograd.grad(loss, list(module.parameters()))
        with torch.no_grad():
            for leaf, gradient in zip(module.parameters(), gradients, strict=True):
                leaf -= 0.1 * gradient
    nested.push()
    after, indices = narrow_model.dense_state(), graph.kept_indices(mask)
    trained = dict(small.named_parameters())
    for key in trained:
        inside = torch.ones(before[key].shape, dtype=torch.bool)
        narrow = after[key]
        for dim, kept in indices.get(key, {}).items():
            stays = torch.zeros(before[key].shape[dim], dtype=torch.bool)
            stays[kept] = True
            inside &= stays.view([-1 if d == dim else 1 for d in range(inside.dim())])
            narrow = narrow.index_select(dim, kept)
        assert torch.allclose(narrow, trained[key], atol=1e-12), key
        assert torch.equal(after[key][~inside], before[key][~inside]), key


def test_prefixes_are_views_and_recurrent_gates_are_copies() -> None:
    _, _, narrow_model, mask, _ = made("cnn", 1.0, 0.5)
    assert NestedModule(narrow_model, mask).copied == []
    _, _, narrow_model, mask, _ = made("lstm", 1.0, 0.5)
    copied = NestedModule(narrow_model, mask).copied
    names = [name for place, name in enumerate(narrow_model.named_parameters()) if place in copied]
    assert "lstm1.weight_hh_l0" in names
    assert "embedding.weight" not in names


def test_statistics_are_its_own() -> None:
    _, _, narrow_model, mask, x = made("normed", 1.0, 0.5)
    nested = NestedModule(narrow_model, mask)
    nested.module.train()(x)
    assert torch.equal(narrow_model.module.norm.running_mean, torch.zeros(6, dtype=torch.float64))
    assert not torch.equal(nested.module.norm.running_mean, torch.zeros(3, dtype=torch.float64))


def test_a_part_can_be_added_to_the_whole() -> None:
    for pattern in (None, Random()):
        _, _, narrow_model, mask, _ = made("lstm", 1.0, 0.5, pattern)
        nested = NestedModule(narrow_model, mask)
        inner = list(nested.leaves.values())
        for place, leaf in enumerate(narrow_model.parameters()):
            whole = torch.ones_like(leaf)
            part = torch.full_like(inner[place], 2.0)
            nested.write(place, part, whole, add=True)
            assert whole.sum() == leaf.numel() + 2 * part.numel()
            assert torch.equal(nested.share(place, whole), part + 1)


def test_what_is_shared_follows_pull_and_push() -> None:
    for pattern in (None, Random()):
        _, _, narrow_model, mask, _ = made("lstm", 1.0, 0.5, pattern)
        nested = NestedModule(narrow_model, mask)
        for place, leaf in enumerate(narrow_model.parameters()):
            whole = torch.zeros_like(leaf)
            part = nested.share(place, whole)
            part.fill_(1.0)
            nested.push()
            assert whole.sum() == part.numel()
            whole.fill_(3.0)
            nested.pull()
            assert bool((part == 3.0).all())


def test_a_unit_that_the_wider_module_lacks_is_refused() -> None:
    _, graph, narrow_model, _, _ = made("cnn", 0.5, 0.25)
    with pytest.raises(ForeignMaskError, match="wider module"):
        NestedModule(narrow_model, select(Ordered(), graph, 1.0, View()))
