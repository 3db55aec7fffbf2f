"""A mask moves in one place, and its checkpoint is parsed before anything is changed."""

import copy
import functools
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import convolutions, shake, train_step
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict

import sparsekit as sk
from sparsekit import UnitMask
from sparsekit.errors import InvalidValueError
from sparsekit.graph.edit import without

RULES: dict[str, Any] = {
    "fixed": {"ratio": 0.5},
    "budget": {"budget": "flops=40%"},
    "gradients": {"ratio": 0.5, "learning": sk.GradientImportance(lr=0.1)},
    "narrowing": {"budget": "flops=40%", "learning": sk.LearnedNarrowing(steps=12, least_steps=1)},
}


def _trained(rule: str, steps: int = 2) -> tuple[sk.LearnableMask, torch.optim.Optimizer, Any]:
    model, x, y = convolutions()
    masked = sk.LearnableMask(model, (x,), **RULES[rule])
    optimizer = torch.optim.AdamW(masked.parameters(), lr=0.01)
    for _ in range(steps):
        train_step(masked, optimizer, x, y)
    return masked, optimizer, (x, y)


@functools.cache
def _state(rule: str) -> dict[str, torch.Tensor]:
    return _trained(rule, steps=12)[0].state_dict()


FAULTS: dict[str, Any] = {
    "a shape": lambda state: {**state, "model.3.weight": torch.zeros(5, 8, 3, 3)},
    "a missing entry": lambda state: {name: value for name, value in state.items() if name != "model.3.bias"},
    "an entry too many": lambda state: {**state, "model.3.other": torch.zeros(2)},
    "a value": lambda state: {**state, "model.3.weight": 5.0},
    "importance": lambda state: {**state, "sparsekit.importance": torch.full((24,), torch.nan)},
    "a mask of numbers": lambda state: {**state, "sparsekit.mask": torch.ones(24)},
    "a mask of another width": lambda state: {**state, "sparsekit.mask": torch.ones(25) > 0},
    "an empty mask": lambda state: {**state, "sparsekit.mask": torch.arange(24) < 8},
    "another mask": lambda state: {**state, "sparsekit.mask": torch.ones(24) > 0},
    "fewer dropped weights": lambda state: {**state, "sparsekit.dropped.0": torch.zeros(3)},
    "other units": lambda state: {**state, "sparsekit.units": torch.zeros(8, dtype=torch.uint8)},
    "a ratio": lambda state: {**state, "sparsekit.ratio": torch.tensor(1.5)},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.same_bits
def test_a_checkpoint_that_is_refused_leaves_a_mask_as_its_copy_from_before(rule: str, fault: str) -> None:
    masked, optimizer, _ = _trained(rule)
    before, moments = copy.deepcopy(masked), copy.deepcopy(optimizer.state_dict())
    with pytest.raises((RuntimeError, InvalidValueError)):
        masked.load_state_dict(FAULTS[fault](_state(rule)))
    torch.testing.assert_close(masked.state_dict(), before.state_dict(), rtol=0, atol=0)
    assert (repr(masked), masked.ratio) == (repr(before), before.ratio)
    assert masked.unit_mask() == before.unit_mask()
    torch.testing.assert_close(optimizer.state_dict()["state"], moments["state"], rtol=0, atol=0)


NARROWING = sk.LearnedNarrowing(steps=24, least_steps=3, until=0.5, cuts=3)
RESUMED: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "gradients": (RULES["gradients"], [lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1)]),
    "two optimizers": (RULES["gradients"], [lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)] * 2),
    "AdamW": ({"ratio": 0.3, "learning": NARROWING}, [lambda p: torch.optim.AdamW(p, lr=0.01)]),
    "SGD": (
        {"budget": "flops=20%", "learning": NARROWING},
        [lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True)],
    ),
    "Adafactor": ({"ratio": 0.3, "learning": NARROWING}, [lambda p: torch.optim.Adafactor(p, lr=0.01)]),
}


@pytest.mark.parametrize("at", [1, 5])
@pytest.mark.parametrize("how", ["state", "state, the last part first", "pickle", "copy"])
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.same_bits
def test_a_training_resumed_at_any_step_has_the_bits_of_one_that_never_stopped(name: str, how: str, at: int) -> None:
    """Also where dropped units return, and where the mask changes before a step."""
    model, x, y = convolutions()
    options, makers = RESUMED[name]
    narrows = options["learning"] is NARROWING

    def begin() -> list[Any]:
        masked = sk.LearnableMask(model, (x,), **({"batches": [(x, y)]} if narrows else {}), **options)
        optimizers = [make(masked.parameters()) for make in makers]
        return [masked, *optimizers, *(torch.optim.lr_scheduler.CosineAnnealingLR(each, 24) for each in optimizers)]

    run, twin = begin(), None
    keys, first = run[0].state_dict().keys(), run[0].unit_mask()
    for step in range(24 if narrows else 12):
        if step == at and how.startswith("state"):
            buffer = io.BytesIO()
            torch.save([part.state_dict() for part in (nn.Sequential(run[0]), *run[1:])], buffer)
            buffer.seek(0)
            twin = begin()
            parts = list(zip((nn.Sequential(twin[0]), *twin[1:]), torch.load(buffer, weights_only=True), strict=True))
            for part, state in parts if how == "state" else reversed(parts):
                part.load_state_dict(state)
        elif step == at:
            twin = copy.deepcopy(run) if how == "copy" else pickle.loads(pickle.dumps(run))
        if step == at:
            assert (twin[0].ratio, twin[0].unit_mask()) == (run[0].ratio, run[0].unit_mask())
        if step == at and not narrows and (how.startswith("state") or len(makers) > 1):
            for optimizer in twin[1 : 1 + len(makers)]:
                twin[0].add_optimizer(optimizer)  # the mask may change before its next step
        for masked, *others in (run,) if twin is None else (run, twin):
            if not narrows and step % 3 == 0:
                masked.ratio = (0.5, 0.75, 0.75, 0.25)[step // 3 % 4]
                shake(masked, step)
            for optimizer in others[: len(makers)]:
                generator = torch.Generator().manual_seed(step)
                train_step(masked, optimizer, x + 0.1 * torch.randn(x.shape, generator=generator), y)
            for scheduler in others[len(makers) :]:
                scheduler.step()
    left, right = run[0].state_dict(), twin[0].state_dict()
    assert left.keys() == right.keys() == keys
    torch.testing.assert_close(left, right, rtol=0, atol=0)
    assert run[0].unit_mask() != first


@pytest.mark.parametrize("rule", RULES)
def test_keys_never_change_and_names_of_parameters_are_among_them_also_for_distributed_checkpoints(rule: str) -> None:
    masked, optimizer, _ = _trained(rule)
    state = masked.state_dict()
    assert state.keys() == _trained(rule, steps=0)[0].state_dict().keys()
    assert {name for name, _ in masked.named_parameters()} <= state.keys()
    assert {name for name, _ in masked.named_buffers()} <= state.keys()
    found = get_model_state_dict(masked)
    assert found.keys() == state.keys()
    moments = get_optimizer_state_dict(masked, optimizer)
    assert moments["state"].keys() == dict(masked.named_parameters()).keys()
    twin = _trained(rule, steps=0)[0]
    set_model_state_dict(twin, found)
    torch.testing.assert_close(twin.state_dict(), state, rtol=0, atol=0)


def test_the_optimizer_of_a_mask_that_stays_follows_when_its_ratio_changes() -> None:
    masked, optimizer, (x, y) = _trained("fixed")
    before = optimizer.state[masked.model[0].weight]["exp_avg"].clone()
    stay = masked.unit_mask()["0"].nonzero().reshape(-1)
    masked.ratio = 0.25
    after = masked.unit_mask()["0"].nonzero().reshape(-1)
    kept = before[torch.isin(stay, after)]
    assert torch.equal(optimizer.state[masked.model[0].weight]["exp_avg"], kept)
    train_step(masked, optimizer, x, y)


OTHERS: dict[str, tuple[str, Any]] = {
    "options": (
        "another model, or over one that was traced with other options",
        lambda graph: without(graph, list(graph.groups)[-1:]),
    ),
    "units": ("other units than the mask keeps", None),
    "weights": ("a training that began with other weights", None),
}


@pytest.mark.filterwarnings("ignore::sparsekit.pruning.settings.UncalibratedWarning")
@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("rule", RULES)
def test_the_state_of_an_optimizer_of_another_mask_is_refused_with_what_differs(rule: str, other: str) -> None:
    """Also where all shapes are equal. Of the same mask it is taken, whether loaded or made from the weights of that time."""
    masked, optimizer, (x, y) = _trained(rule)
    told, change = OTHERS[other]
    state = copy.deepcopy(optimizer.state_dict())
    model, _, _ = convolutions(seed=1 if other == "weights" else 0)
    graph = masked.graph if change is None else change(masked.graph)
    mask = UnitMask(
        {name: keep.flip(0) if other == "units" else keep for name, keep in masked.unit_mask().items() if name in graph.groups}
    )
    twin = sk.LearnableMask(model, (x,), graph=graph, **RULES[rule])
    twin.load(model.state_dict(), mask=mask)
    second = torch.optim.AdamW(twin.parameters(), lr=0.01)
    second.load_state_dict(state)
    if other == "units" and mask == masked.unit_mask():
        pytest.skip("all units are kept")
    with pytest.raises(InvalidValueError, match=told):
        train_step(twin, second, x, y)
    model.load_state_dict(masked.dense_state())
    for again in ("loaded", "made from the weights of that time"):
        third = sk.LearnableMask(model, (x,), **RULES[rule])
        if again == "loaded":
            third.load_state_dict(masked.state_dict())
        else:
            third.load(model.state_dict(), mask=masked.unit_mask())
        optimizer = torch.optim.AdamW(third.parameters(), lr=0.01)
        optimizer.load_state_dict(state)
        train_step(third, optimizer, x, y)


def test_neither_a_pass_nor_a_look_moves_a_mask_but_the_step_after_them() -> None:
    masked, optimizer, (x, y) = _trained("gradients", steps=0)
    before = masked.unit_mask()
    masked.scores.neg_()
    loss = F.cross_entropy(masked(x), y)
    assert masked.unit_mask() == before
    masked.compact()
    masked.state_dict()
    masked.eval()(x)
    assert masked.unit_mask() == before
    loss.backward()
    optimizer.step()
    assert masked.unit_mask() != before


def test_a_second_optimizer_still_steps_after_the_first_has_moved_the_mask() -> None:
    model, x, y = convolutions()
    masked = sk.LearnableMask(model, (x,), ratio=0.5, learning=sk.LearnedNarrowing(steps=20, least_steps=1))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (masked.model[:6], masked.model[7:]))
    moved = 0
    for _ in range(12):
        mask = masked.unit_mask()
        loss = F.cross_entropy(masked(x), y)
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        first.step()
        bias = masked.model[9].bias.detach().clone()
        moved += masked.unit_mask() != mask
        second.step()
        assert not torch.equal(masked.model[9].bias, bias)
        assert all(leaf.grad is None or leaf.grad.shape == leaf.shape for leaf in masked.parameters())
    assert moved
