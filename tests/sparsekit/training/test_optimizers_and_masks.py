"""A mask follows its optimizers, whichever way they write, and steps: in parts, skipped, failed, or without growing memory."""

import copy
import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import Lookahead, Sam, SamOver, classifier, convolutions, learnable_mask, shake, train_step
from torch import nn

from sparsekit import GradientImportance, LearnableMask, LearnedNarrowing
from sparsekit.errors import InvalidValueError


def _momentum(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.1, momentum=0.9)


def _trained(make: object, **settings: object) -> tuple[LearnableMask, torch.optim.Optimizer, torch.Tensor, torch.Tensor]:
    model, x, y = classifier()
    masked = LearnableMask(model, (x,), **{"ratio": 0.5, "learning": GradientImportance(), **settings})
    optimizer = make(masked.parameters())
    for _ in range(3):
        train_step(masked, optimizer, x, y)
    return masked, optimizer, x, y


def test_an_optimizer_that_was_loaded_and_not_told_of_says_so_when_the_mask_has_changed() -> None:
    masked, optimizer, x, y = _trained(_momentum, ratio=1.0)
    twin = LearnableMask(classifier()[0], (x,), learning=GradientImportance())
    other = _momentum(twin.parameters())
    twin.load_state_dict(masked.state_dict())
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    twin.ratio = 0.25
    with pytest.raises(InvalidValueError, match=r"call masked\.add_optimizer\(optimizer\) after optimizer\.load_state_dict"):
        train_step(twin, other, x, y)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("order", ["both", "swapped", "alone", "before a change"])
def test_the_state_of_an_optimizer_belongs_to_the_units_that_were_kept(order: str, known: bool) -> None:
    """Also if other units have the same shapes."""
    masked, optimizer, x, y = _trained(_momentum)
    mask, state = masked.state_dict(), copy.deepcopy(optimizer.state_dict())
    model, _, _ = classifier()
    twin = LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance())
    twin.load(model.state_dict(), importance=-masked.scores)
    other = _momentum(twin.parameters())
    if known:
        twin.add_optimizer(other)
    if order == "swapped":
        other.load_state_dict(state)
    if order in ("both", "swapped"):
        twin.load_state_dict(mask)
    if order != "swapped":
        other.load_state_dict(state)
    refused = order in ("alone", "before a change")
    with pytest.raises(InvalidValueError, match="belongs to other units") if refused else nullcontext():
        if order == "before a change":
            twin.add_optimizer(other)
            twin.ratio = 0.25
        train_step(twin, other, x, y)
    assert all("sparsekit" not in key for group in other.param_groups for key in group)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, Lookahead])
def test_state_that_is_not_one_value_for_each_weight_starts_anew_where_units_change(make: Any) -> None:
    """And stays where they do not, and where the mask stands."""
    masked, optimizer, x, y = _trained(lambda p: make(p, lr=0.05))
    changing = [masked.model[0].weight, masked.model[0].bias, masked.model[2].weight]
    before = {leaf: dict(optimizer.state[leaf]) for leaf in masked.parameters()}
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
        masked, optimizer, x, y = _trained(_momentum)
        model = classifier()[0]
        masked.load(model.state_dict(), ratio=0.5)
        assert not any(optimizer.state.values())
        if not again:
            optimizer = _momentum(masked.parameters())
        for seed in range(4):
            shake(masked, seed)
            train_step(masked, optimizer, x, y)
        found.append(masked.dense_state())
    torch.testing.assert_close(*found, rtol=0, atol=0)


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
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("learning", [GradientImportance(), LearnedNarrowing(steps=5, cuts=1, least_steps=1)])
def test_lbfgs_is_refused_before_it_moves_anything_while_the_mask_may_change(learning: Any) -> None:
    model, x, y = classifier()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=learning)
    optimizer = torch.optim.LBFGS(masked.parameters(), line_search_fn="strong_wolfe")
    before = copy.deepcopy(masked.state_dict())
    with pytest.raises(InvalidValueError, match="LBFGS keeps a history"):
        masked.add_optimizer(optimizer)
    for _ in range(2):
        with pytest.raises(InvalidValueError, match="LBFGS keeps a history"):
            optimizer.step(lambda: F.cross_entropy(masked(x), y))
    torch.testing.assert_close(masked.state_dict(), before, rtol=0, atol=0)
    if isinstance(learning, LearnedNarrowing):  # after the last cut the mask stays
        sgd = torch.optim.SGD(masked.parameters(), lr=0.1)
        for _ in range(4):
            train_step(masked, sgd, x, y)
        assert not masked.may_change

        def evaluate() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(masked(x), y)
            loss.backward()
            return loss

        losses = [optimizer.step(evaluate) for _ in range(3)]
        assert losses[-1] < losses[0]


@pytest.mark.parametrize("learning", [GradientImportance(lr=0.1), LearnedNarrowing(steps=20, cuts=2)])
@pytest.mark.parametrize("training", [True, False])
def test_a_mask_learns_from_passes_whose_backward_pass_ran_in_either_mode(learning: Any, training: bool) -> None:
    model, x, y = classifier()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=learning).train(training)
    twin = LearnableMask(model, (x,), ratio=0.5, learning=learning).train(training)
    pair = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (masked, twin)]
    first = masked.scores.clone()
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
    assert not torch.equal(masked.scores, first)
    assert torch.equal(masked.scores, twin.scores)
    assert masked.unit_mask() == twin.unit_mask()
    assert masked.report == twin.report
    state = copy.deepcopy(twin.state_dict())
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
        found.append(masked.scores.clone())
        found.append(torch.tensor(masked.report.flops))
    torch.testing.assert_close(found[0] * 0.5, found[2])
    torch.testing.assert_close(found[1], found[3])


def _task() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)).double()
    return model, torch.randn(16, 6, dtype=torch.float64), torch.randint(3, (16,))


def _train(masked: LearnableMask, optimizer: Any, x: torch.Tensor, y: torch.Tensor, *, parts: bool, seeds: range) -> None:
    for seed in seeds:
        masked.ratio = 0.25 if seed % 4 == 3 else 0.5
        shake(masked, seed)

        def loss(seed: int = seed) -> torch.Tensor:
            shake(masked, 100 + seed)
            return F.cross_entropy(masked(x), y)

        optimizer.zero_grad()
        F.cross_entropy(masked(x), y).backward()
        if parts:
            with masked.freeze_mask():
                optimizer.first_step()
                loss().backward()
                optimizer.second_step()
        else:
            optimizer.step(loss)


@pytest.mark.parametrize("make", [Sam, SamOver])
@pytest.mark.parametrize("parts", [True, False], ids=["two calls", "one call"])
def test_sam_in_compact_execution_equals_masked_execution(make: Any, parts: bool) -> None:
    found = []
    for execution in ("compact", "masked"):
        model, x, y = _task()
        masked = learnable_mask(model, (x,), ratio=0.5, execution=execution, learning=GradientImportance())
        _train(masked, make(masked.parameters()), x, y, parts=parts, seeds=range(9))
        found.append(masked.dense_state())
    torch.testing.assert_close(*found, rtol=0, atol=1e-10)
    norms = found[0]["0.weight"].norm(dim=1) / _task()[0].state_dict()["0.weight"].norm(dim=1)
    assert norms.min() > 0.5  # no unit has lost its weights


def test_a_held_mask_stands_still_and_moves_after_it() -> None:
    model, x, y = _task()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance())
    optimizer = Sam(masked.parameters())
    F.cross_entropy(masked(x), y).backward()
    before = masked.unit_mask()
    with masked.freeze_mask():
        optimizer.first_step()
        shake(masked, 3)
        F.cross_entropy(masked(x), y).backward()
        assert masked.unit_mask() == before
        optimizer.second_step()
    shake(masked, 4)
    assert masked.unit_mask() != before


def test_a_step_that_fails_does_not_hold_the_mask() -> None:
    model, x, _ = _task()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance())
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)

    def fail() -> float:
        shake(masked, 5)
        masked(x)
        raise RuntimeError("out of memory")

    before = masked.unit_mask()
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step(fail)
    assert masked.unit_mask() != before


EAGER = GradientImportance(lr=0.1)


def _step(masked: LearnableMask, optimizer: Any, x: torch.Tensor, y: torch.Tensor, *, zero_late: bool, parts: int = 1) -> None:
    if not zero_late:
        optimizer.zero_grad()
    for number, (images, classes) in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
        loss = F.cross_entropy(masked(images), classes) / parts
        if zero_late and number == 0:
            optimizer.zero_grad()
        loss.backward()


@pytest.mark.parametrize("zero_late", [False, True])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [1.0, torch.inf])
def test_steps_that_are_skipped_teach_nothing(size: float, parts: int, zero_late: bool) -> None:
    """By a GradScaler after an overflow, or by a loop whose gradient is too large, in steps of one pass or of several."""
    found = []
    for skips in (False, True):
        model, x, _ = classifier()
        masked = LearnableMask(model, (x,), ratio=0.5, learning=EAGER)
        optimizer = torch.optim.SGD(masked.parameters(), lr=0.05, momentum=0.9)
        generator, masks = torch.Generator().manual_seed(3), []
        for at in range(60):
            x = torch.randn(x.shape, generator=generator, dtype=x.dtype)
            y = torch.randint(3, (12,), generator=generator)
            if skips and at % 3:
                _step(masked, optimizer, size * x.flip(0), y, zero_late=zero_late, parts=parts)
            _step(masked, optimizer, x, y, zero_late=zero_late, parts=parts)
            optimizer.step()
            masks.append(masked.unit_mask())
        found.append((masks, masked.scores.clone()))
    assert any(mask != found[0][0][0] for mask in found[0][0])
    assert found[1][0] == found[0][0]
    assert torch.equal(found[1][1], found[0][1])


@pytest.mark.parametrize("learning", [None, GradientImportance(lr=0.0)])
def test_no_optimizer_steps_importance(learning: GradientImportance | None) -> None:
    """Neither by gradients, which nobody then pays for, nor by decay; also after all was frozen and set free."""
    model, x, y = convolutions()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=learning)
    masked.requires_grad_(False)
    masked.requires_grad_(True)
    optimizer = torch.optim.AdamW(masked.parameters(), lr=0.1, weight_decay=0.5)
    before = masked.scores.clone()
    for _ in range(3):
        _step(masked, optimizer, x, y, zero_late=False)
        assert masked.scores.grad is None
        optimizer.step()
    assert torch.equal(masked.scores, before)


def _live_bytes() -> int:
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, nn.Parameter) and value.device.type == "cpu":
            storage = value.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def test_memory_does_not_grow_with_the_widths_that_were_tried() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 48, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(48, 40, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(160, 4)),
    )
    x, y = torch.randn(4, 3, 8, 8), torch.randint(4, (4,))
    dense = sum(value.numel() * 4 for value in model.parameters())
    before = _live_bytes()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=EAGER)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05)
    widths = set()
    for at in range(150):
        if at % 10 == 0:
            masked.ratio = 0.3 + at / 400
        train_step(masked, optimizer, x, y)
        widths.add(tuple(masked.unit_mask().counts().values()))
    assert len(widths) > 3
    del optimizer
    assert _live_bytes() - before < 5 * dense


@pytest.mark.parametrize("learning", [GradientImportance(lr=0.1, refresh_every=1), LearnedNarrowing(steps=24, least_steps=2)])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.same_bits
def test_a_closure_learns_what_the_same_training_without_one_learns(learning: Any, accumulate: int, by_name: bool) -> None:
    """Also where a step adds up batches, of which the closure computes the last."""
    found = []
    for closure in (False, True):
        model, x, y = classifier()
        masked = LearnableMask(model, (x,), ratio=0.5, learning=learning)
        optimizer = torch.optim.AdamW(masked.parameters(), lr=0.02)
        for step in range(24):
            parts = torch.randperm(12, generator=torch.Generator().manual_seed(step)).chunk(accumulate)
            for number, part in enumerate(parts):

                def compute(part: torch.Tensor = part, number: int = number) -> torch.Tensor:
                    loss = F.cross_entropy(masked(x[part]), y[part]) / accumulate  # noqa: B023
                    if number == 0:
                        optimizer.zero_grad()  # noqa: B023
                    loss.backward()
                    return loss

                if not closure or number + 1 < accumulate:
                    compute()
                elif by_name:
                    optimizer.step(closure=compute)
                else:
                    optimizer.step(compute)
            if not closure:
                optimizer.step()
        found.append((masked.scores.clone(), masked.unit_mask(), masked.report, masked.dense_state()))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1:3] == found[1][1:3]
    torch.testing.assert_close(found[0][3], found[1][3], rtol=0, atol=0)
