"""A mask follows its importance and its optimizers, whichever way an optimizer writes and wherever it comes from."""

import copy
import io
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import Lookahead, classifier, shake, train_step
from torch import nn

from sparsekit import GradientImportance, LearnableMask, LearnedNarrowing
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


@pytest.mark.parametrize("learning", [GradientImportance(), LearnedNarrowing(steps=5, cuts=1, least_steps=1)])
def test_lbfgs_is_refused_before_it_moves_anything_while_the_mask_may_change(learning: Any) -> None:
    model, x, y = classifier()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=learning)
    optimizer, before = (
        torch.optim.LBFGS(masked.parameters(), line_search_fn="strong_wolfe"),
        copy.deepcopy(masked.state_dict()),
    )
    with pytest.raises(InvalidValueError, match="LBFGS keeps a history"):
        masked.add_optimizer(optimizer)
    for _ in range(2):
        with pytest.raises(InvalidValueError, match="LBFGS keeps a history"):
            optimizer.step(lambda: F.cross_entropy(masked(x), y))
    after = masked.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    if isinstance(learning, LearnedNarrowing):  # after the last cut the mask stays
        sgd = torch.optim.SGD(masked.parameters(), lr=0.1)
        for _ in range(4):
            train_step(masked, sgd, x, y)
        assert not masked.narrows
        losses = []

        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            losses.append(F.cross_entropy(masked(x), y))
            losses[-1].backward()
            return losses[-1]

        for _ in range(3):
            optimizer.step(evaluate)
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("learning", [GradientImportance(lr=0.1), LearnedNarrowing(steps=20, cuts=2)])
@pytest.mark.parametrize("training", [True, False])
def test_a_mask_learns_from_passes_whose_backward_pass_ran_in_either_mode(learning: Any, training: bool) -> None:
    model, x, y = classifier()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=learning).train(training)
    twin = LearnableMask(model, (x,), ratio=0.5, learning=learning).train(training)
    pair = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (masked, twin)]
    first = masked.importance_vector()
    for step in range(20):
        for each, optimizer in pair:
            if each is twin:
                each.train(not training)(x[: step + 1])
                each.train(training)
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            F.cross_entropy(each(x), y).backward()
            if each is twin:
                each.eval()(x[:3])
                each.train(training)
            optimizer.step()
    assert not torch.equal(masked.importance_vector(), first)
    assert torch.equal(masked.importance_vector(), twin.importance_vector())
    assert masked.unit_mask() == twin.unit_mask()
    if masked.report is not None and twin.report is not None:
        assert masked.report == twin.report
    state = twin.state_dict()
    twin(x)
    pair[1][1].param_groups[0]["lr"] = 0.0
    pair[1][1].step()
    assert all(torch.equal(value, state[name]) for name, value in twin.state_dict().items()), "a step without a backward pass"


def test_both_passes_of_a_pair_count_towards_learned_narrowing() -> None:
    """Of two forward passes before one backward pass, as of siamese networks, none is lost."""
    model, x, y = classifier()
    found = []
    for parts in ((slice(None),), (slice(0, 6), slice(6, None))):
        masked = LearnableMask(model, (x,), ratio=0.5, learning=LearnedNarrowing(steps=20, half_life=1e-9))
        optimizer = torch.optim.SGD(masked.parameters(), lr=0.0)
        F.cross_entropy(torch.cat([masked(x[part]) for part in parts]), y).backward()
        optimizer.step()
        found.append(masked.importance_vector())
        found.append(torch.tensor(masked.report.flops))
    torch.testing.assert_close(found[0] * 0.5, found[2])
    torch.testing.assert_close(found[1], found[3])
