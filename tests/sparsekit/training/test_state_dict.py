"""A state dict of a learnable mask holds the weights themselves, as that of any module, whatever reads or writes it."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import convolutions, train_step, whole_state
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sparsekit as sk
from sparsekit.errors import InvalidValueError, UnsupportedModelError
from sparsekit.graph.edit import without

MAKERS: dict[str, dict[str, Any]] = {
    "fixed": {"ratio": 0.5},
    "budget": {"budget": "flops=40%"},
    "narrowing": {"ratio": 0.5, "learning": sk.LearnedNarrowing(steps=8)},
    "gradients": {"ratio": 0.5, "learning": sk.GradientImportance()},
}


def _masked(rule: str = "fixed") -> tuple[sk.LearnableMask, torch.Tensor, torch.Tensor]:
    model, x, y = convolutions()
    return sk.LearnableMask(model, (x,), **MAKERS[rule]), x, y


@pytest.mark.parametrize("rule", MAKERS)
@pytest.mark.parametrize("inside", [False, True])
def test_what_is_written_into_any_weight_of_a_state_dict_changes_the_mask(rule: str, inside: bool) -> None:
    masked, x, _ = _masked(rule)
    holder: nn.Module = nn.Sequential(masked) if inside else masked
    prefix = "0." if inside else ""
    floats = [name for name, value in holder.state_dict().items() if value.is_floating_point()]
    for name in floats:
        if name == f"{prefix}sparsekit.ratio" or name.startswith(f"{prefix}sparsekit.rule."):
            continue  # numbers that follow from the others or from the steps that were made
        before, held = copy.deepcopy(whole_state(masked)), holder.state_dict()
        masked.dense_state()
        held[name].fill_(0.5)
        after = whole_state(masked)
        own = name.removeprefix(prefix)
        if own.startswith("sparsekit.dropped.") and not held[name].numel():
            continue
        assert any(not torch.equal(before[key], after[key]) for key in before), name
        assert torch.equal(holder.state_dict()[name], torch.full_like(held[name], 0.5))
    masked.eval()(x)


@pytest.mark.parametrize("rule", ["fixed", "gradients"])
def test_dropped_weights_take_part_exactly_once_and_return_when_their_units_do(rule: str) -> None:
    masked, _, _ = _masked(rule)
    state = masked.state_dict()
    own = sum(value.numel() for name, value in state.items() if not name.startswith("sparsekit."))
    dropped = sum(value.numel() for name, value in state.items() if name.startswith("sparsekit.dropped."))
    dense = masked.dense_state()
    assert own + dropped == sum(value.numel() for value in dense.values())
    for name, value in state.items():
        if name.startswith("sparsekit.dropped."):
            value.fill_(7.0)
    masked.ratio = 1.0
    assert sum(int((value == 7.0).sum()) for value in masked.state_dict().values()) == dropped
    masked.ratio = 0.5
    assert sum(int((value == 7.0).sum()) for value in masked.dense_state().values()) == dropped


def _by_hand(masked: nn.Module) -> tuple[Callable[[nn.Module], None], nn.Module]:
    average = copy.deepcopy(masked)

    @torch.no_grad()
    def update(module: nn.Module) -> None:
        for own, value in zip(average.state_dict().values(), module.state_dict().values(), strict=True):
            if own.is_floating_point():
                own.mul_(0.5).add_(value, alpha=0.5)
            else:
                own.copy_(value)

    return update, average


def _timm(name: str) -> Callable[[nn.Module], tuple[Callable[[nn.Module], None], nn.Module]]:
    def make(masked: nn.Module) -> tuple[Callable[[nn.Module], None], nn.Module]:
        average = getattr(pytest.importorskip("timm.utils"), name)(masked, decay=0.5)
        return average.update, average.ema if name == "ModelEma" else average.module

    return make


def _averaged(masked: nn.Module) -> tuple[Callable[[nn.Module], None], nn.Module]:
    average = AveragedModel(masked, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    average.n_averaged.fill_(1)  # it copies the weights first
    return average.update_parameters, average.module


AVERAGES: dict[str, Any] = {
    "by hand": _by_hand,
    "AveragedModel": _averaged,
    **{name: _timm(name) for name in ("ModelEma", "ModelEmaV2", "ModelEmaV3")},
}


@pytest.mark.parametrize("average", AVERAGES)
def test_every_average_of_a_fixed_mask_is_that_of_its_compact_model(average: str) -> None:
    masked, x, y = _masked()
    found = []
    for module in (masked, masked.compact()):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        update, mean = AVERAGES[average](module)
        first = mean.eval()(x).detach()
        for _ in range(6):
            train_step(module, optimizer, x, y)
            update(module)
        assert not torch.allclose(mean.eval()(x), first)
        assert not torch.allclose(mean.eval()(x), module.eval()(x))
        found.append(mean.eval()(x))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("average", AVERAGES)
def test_an_average_across_a_change_of_mask_is_refused_and_one_after_the_last_cut_works(average: str) -> None:
    for rule in ("gradients", "narrowing"):
        masked, x, y = _masked(rule)
        optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)

        def go_on(masked: Any = masked, optimizer: Any = optimizer, x: Any = x, y: Any = y, rule: str = rule) -> None:
            update, mean = AVERAGES[average](masked)
            for _ in range(8):
                if rule == "gradients":
                    masked.load_importance({name: -own for name, own in masked.importance().items()})
                train_step(masked, optimizer, x, y)
                update(masked)
                mean.eval()(x)

        with pytest.raises((UnsupportedModelError, RuntimeError), match=r"other units|must match"):
            go_on()
        for _ in range(8):
            train_step(masked, optimizer, x, y)
        if rule == "narrowing":
            assert not masked.may_change
            go_on()


def test_a_dense_state_and_a_part_of_one_are_loaded_too() -> None:
    masked, _x, _ = _masked()
    model, _, _ = convolutions(seed=3)
    masked.load_state_dict(model.state_dict())
    torch.testing.assert_close(masked.dense_state(), dict(model.state_dict()), rtol=0, atol=0)
    part = {"9.bias": torch.full((3,), 5.0), "3.weight": torch.full((6, 8, 3, 3), 2.0)}
    found = masked.load_state_dict(part, strict=False)
    assert set(found.missing_keys) == model.state_dict().keys() - part.keys()
    torch.testing.assert_close(masked.dense_state(), {**model.state_dict(), **part}, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="Missing key"):
        masked.load_state_dict(part)


def test_a_tied_weight_has_one_entry_and_either_name_is_loaded() -> None:
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 7, bias=False))
    model[4].weight = model[0].weight
    masked = sk.LearnableMask(model, (torch.zeros(1, 2, dtype=torch.long),), ratio=0.5)
    state = masked.state_dict()
    assert "model.0.weight" in state
    assert "model.4.weight" not in state
    assert len({value.untyped_storage().data_ptr() for value in state.values() if value.numel()}) == sum(
        bool(value.numel()) for value in state.values()
    )
    renamed = {name: value for name, value in state.items() if name != "model.0.weight"}
    renamed["model.4.weight"] = torch.ones_like(state["model.0.weight"])
    masked.load_state_dict(renamed)
    assert bool((masked.model[4].weight == 1).all())


def test_a_state_of_other_units_is_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    graph = sk.trace_units(model, (torch.zeros(1, 6),))
    first, second = list(graph.groups)
    masks = [sk.LearnableMask(model, graph=without(graph, [name]), ratio=0.5) for name in (first, second)]
    with pytest.raises(InvalidValueError, match="over other units"):
        masks[0].load_state_dict(masks[1].state_dict())
    assert F.mse_loss(masks[0](torch.ones(1, 6)), masks[0](torch.ones(1, 6))) == 0
