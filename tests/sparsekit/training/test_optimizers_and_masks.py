"""A mask follows its importance and its optimizers, whichever way an optimizer writes and wherever it comes from."""

import copy
import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import classifier, shake, train_step
from optimizers import Lookahead
from torch import nn

from sparsekit import GradientImportance, LearnableMask
from sparsekit.errors import InvalidValueError

MOMENTS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def _trained(make: object, **settings: object) -> tuple[LearnableMask, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    model, x, y = classifier()
    masked = LearnableMask(model, (x,), **{"ratio": 0.5, "learning": GradientImportance(), **settings})
    optimizer = make(masked.parameters())
    for _ in range(3):
        train_step(masked, optimizer, x, y)
    return masked, optimizer, x, y


@pytest.mark.parametrize(
    ("name", "mask_first"),
    [
        ("momentum", True),
        ("momentum", False),
        ("AdamW", False),
        ("fused AdamW", True),
        ("momentum and momentum", True),
        ("momentum and momentum", False),
    ],
)
@pytest.mark.same_bits
def test_a_resumed_training_equals_one_that_never_stopped_bit_for_bit(name: str, mask_first: bool) -> None:
    """Also where dropped units return, and where the mask changes before a step."""
    model, x, y = classifier(torch.float32)

    def begin() -> tuple[LearnableMask, list[torch.optim.Optimizer]]:
        masked = LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance())
        return masked, [MOMENTS[kind](masked.parameters()) for kind in name.split(" and ")]

    def turn(masked: LearnableMask, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
        masked.ratio = (0.5, 0.75, 0.75, 0.25)[seed // 3 % 4]
        shake(masked, seed)
        for number, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            ((1 + number) * F.cross_entropy(masked(x), y)).backward()
            optimizer.step()

    (masked, optimizers), (twin, others) = begin(), begin()
    for seed in range(6):
        turn(masked, optimizers, seed)
    buffer = io.BytesIO()
    states = [optimizer.state_dict() for optimizer in optimizers]
    torch.save({"mask": nn.Sequential(masked).state_dict(), "optimizers": states}, buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    loading = [lambda: nn.Sequential(twin).load_state_dict(saved["mask"])]
    # In another order than that in which they were made.
    loading += [lambda at=at: others[at].load_state_dict(saved["optimizers"][at]) for at in reversed(range(len(others)))]
    for load in loading if mask_first else reversed(loading):
        load()
    assert (twin.ratio, twin.unit_mask()) == (0.75, masked.unit_mask())
    for other in others:
        twin.add_optimizer(other)
    for seed in range(6, 14):
        turn(masked, optimizers, seed)
        turn(twin, others, seed)
        expected = masked.state_dict()
        assert expected.keys() == twin.state_dict().keys()
        for key, value in twin.state_dict().items():
            assert torch.equal(value, expected[key]), (seed, key)


def test_an_optimizer_that_was_loaded_and_not_told_of_says_so_when_the_mask_has_changed() -> None:
    masked, optimizer, x, y = _trained(MOMENTS["momentum"], ratio=1.0)
    twin = LearnableMask(classifier()[0], (x,), learning=GradientImportance())
    other = MOMENTS["momentum"](twin.parameters())
    twin.load_state_dict(masked.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.ratio = 0.25
    with pytest.raises(InvalidValueError, match=r"call masked\.add_optimizer\(optimizer\) after optimizer\.load_state_dict"):
        train_step(twin, other, x, y)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, Lookahead])
def test_state_that_is_not_one_value_for_each_weight_starts_anew_where_units_change(make: Any) -> None:
    """And stays where they do not, and where the mask stands."""
    masked, optimizer, x, y = _trained(lambda p: make(p, lr=0.05))
    changing = [masked.model[0].weight, masked.model[0].bias, masked.model[2].weight]
    before = {leaf: dict(optimizer.state[leaf]) for leaf in masked.weights()}
    masked.unit_mask()
    assert all(optimizer.state[leaf] == before[leaf] for leaf in before)
    masked.load_importance({"0": -masked.importance()["0"]})
    masked.unit_mask()
    for leaf, state in before.items():
        assert optimizer.state[leaf] == ({} if any(leaf is other for other in changing) else state)
    train_step(masked, optimizer, x, y)


def test_a_new_training_begins_without_state_and_its_optimizer_is_followed() -> None:
    """After `load` the optimizers of the training before go on as new ones do."""
    found = []
    for again in (False, True):
        masked, optimizer, x, y = _trained(MOMENTS["momentum"])
        model = classifier()[0]
        masked.load(model.state_dict(), ratio=0.5)
        assert not any(optimizer.state.values())
        if not again:
            optimizer = MOMENTS["momentum"](masked.parameters())
        for seed in range(4):
            shake(masked, seed)
            train_step(masked, optimizer, x, y)
        found.append(masked.dense_state())
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name


@pytest.mark.parametrize(("in_place", "inside"), [(True, False), (False, True)])
@pytest.mark.same_bits
def test_a_compiler_around_a_mask_leaves_it_out_and_says_so(in_place: bool, inside: bool) -> None:
    found = []
    torch.compiler.reset()
    for compiled in (False, True):
        model, x, y = classifier(torch.float32)
        graphs: list[object] = []

        def backend(graph: torch.fx.GraphModule, _: object, graphs: list[object] = graphs) -> object:
            graphs.append(graph)
            return graph.forward

        model = torch.compile(model, backend=backend) if inside else model
        masked = LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance(lr=0.5))
        optimizer = torch.optim.SGD(masked.parameters(), lr=0.5)
        call = masked
        if compiled and in_place:
            masked.compile(backend=backend)
        elif compiled:
            call = torch.compile(masked, backend=backend)
        for step in range(6):
            with pytest.warns(UserWarning, match=r"LearnableMask\(torch\.compile\(model\)") if compiled else nullcontext():
                loss = F.cross_entropy(call(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert len(graphs) <= (3 if inside else 0), step
        assert bool(graphs) == inside
        found.append(masked.state_dict())
    for name, expected in found[0].items():
        assert torch.equal(found[1][name], expected), name
