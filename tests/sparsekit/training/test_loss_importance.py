"""LossImportance: the mask finds the units that lower the loss, costs what it may, and ends."""

import copy
import functools
import itertools
import math
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from masked import batches_like, classifier, convolutions, planted, train_step
from torch import Tensor, nn

import sparsekit as sk
from sparsekit.tracing.inputs import find_tensors, map_tensors
from sparsekit.training.exploration import Readings
from sparsekit.training.learnable import LearnableMask
from sparsekit.training.loss_importance import LossImportance, LossImportanceRule, _find_bundles
from sparsekit.training.rules import GradientImportance
from sparsekit.training.swap_statistics import SwapStatistics

EAGER = LossImportance(explore=1.0, samples_per_unit=4, max_swap_fraction=1.0, num_std_errors=0.0)


def _adam(masked: LearnableMask) -> torch.optim.Optimizer:
    return torch.optim.AdamW(masked.parameters(), lr=0.02, weight_decay=0.1)


def _batches(x: Tensor, y: Tensor, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        at = torch.randint(0, len(x), (64,), generator=generator)
        yield x[at], y[at]


def _trained(masked: LearnableMask, x: Tensor, y: Tensor, steps: int, each: Callable[[], None] = lambda: None) -> LearnableMask:
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.2)
    for batch, classes in _batches(x, y, steps):
        train_step(masked, optimizer, batch, classes)
        each()
    return masked


@pytest.mark.slow
def test_planted_units_are_found_where_the_rule_of_the_paper_misses_some() -> None:
    found = {LossImportance: 0, GradientImportance: 0}
    for seed in range(3):
        torch.manual_seed(seed)
        model, x, y, good = planted(seed)
        for learning in (LossImportance(steps=800), GradientImportance()):
            masked = _trained(LearnableMask(model, (x[:2],), ratio=0.25, learning=learning), x, y, 800)
            found[type(learning)] += len(set(masked.unit_mask()["0"].nonzero().flatten().tolist()) & good)
    assert found[LossImportance] == 12
    assert found[GradientImportance] <= 9


def test_with_a_number_of_steps_a_mask_settles_by_half_of_them_and_exploration_keeps_to_its_share() -> None:
    model, x, y, _ = planted()
    masked = LearnableMask(model, (x[:2],), ratio=0.25, steps=200, explore=0.3)
    when: list[bool] = []
    _trained(masked, x, y, 200, lambda: when.append(masked.converged))
    assert all(when[99:])
    assert 0.1 < masked.exploration_cost <= 0.3


def test_a_training_too_short_for_two_rounds_does_not_pay_for_one() -> None:
    model, x, y, _ = planted()
    with pytest.warns(UserWarning, match=r"in 100 steps, explore=0.1 allows 0.4 rounds of swaps.* 480 steps or explore=0.48"):
        masked = LearnableMask(model, (x[:2],), ratio=0.25, steps=100)
    before = masked.unit_mask()
    assert masked.converged
    _trained(masked, x, y, 100)
    assert masked.exploration_cost == 0.0
    assert masked.unit_mask() == before


def test_without_a_number_of_steps_a_mask_settles_by_itself() -> None:
    model, x, y, good = planted()
    masked = LearnableMask(model, (x[:2],), ratio=0.25, learning=LossImportance(explore=0.5))
    when: list[bool] = []
    _trained(masked, x, y, 600, lambda: when.append(masked.converged))
    assert when[-1]
    assert not when[100]
    assert masked.exploration_cost <= 0.5
    assert set(masked.unit_mask()["0"].nonzero().flatten().tolist()) == good


@pytest.mark.parametrize("seed", [5, 8])
def test_noise_swaps_little(seed: int) -> None:
    """Labels that nothing predicts: no unit is worth anything, so hardly any is worth a swap."""
    torch.manual_seed(seed)  # with these two, samples of units that were not kept apart and swaps that pay nothing exceed it
    model, x, _, _ = planted(seed)
    y = torch.randint(0, 2, (len(x),), generator=torch.Generator().manual_seed(seed))
    masked = LearnableMask(model, (x[:2],), ratio=0.5)
    masks = [masked.unit_mask()["0"]]
    _trained(masked, x, y, 800, lambda: masks.append(masked.unit_mask()["0"]))
    assert sum(int((after & ~before).sum()) for before, after in itertools.pairwise(masks)) <= 6


@pytest.mark.parametrize(
    ("how", "learning"),
    # With a rate of its own, importance reads its target at every fourth step: the training goes on between two of them.
    [("state", EAGER), ("pickle", EAGER), ("copy", EAGER), ("state", GradientImportance(lr=0.1))],
)
@pytest.mark.same_bits
def test_a_training_goes_on_with_the_same_bits_from_any_step(how: str, learning: Any) -> None:
    model, example, _ = convolutions(torch.float64)
    masked = LearnableMask(model, (example,), ratio=0.5, learning=learning)
    optimizer = _adam(masked)
    batches = [(torch.randn_like(example), torch.randint(3, (12,))) for _ in range(40)]
    for at, (x, y) in enumerate(batches):
        if at == 17:
            if how == "state":
                twin = LearnableMask(model, (x,), ratio=0.5, learning=learning)
                twin.load_state_dict(masked.state_dict())
                other = _adam(twin)
                other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            else:
                pair = (masked, optimizer)
                twin, other = copy.deepcopy(pair) if how == "copy" else pickle.loads(pickle.dumps(pair))
        train_step(masked, optimizer, x, y)
        if at >= 17:
            train_step(twin, other, x, y)
    left, right = masked.state_dict(), twin.state_dict()
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def _masks(
    loss_of: Callable[[Tensor, Tensor], Tensor], times: float, targets: float = 1.0, scale: float | None = None
) -> list[Tensor]:
    """The masks of a training whose loss is `times` a mean, its learning rate so that the weights take the same steps."""
    torch.manual_seed(0)
    model, x, y, _ = planted()
    masked = LearnableMask(model, (x[:2],), ratio=0.25, explore=0.3)
    optimizer = torch.optim.SGD(masked.weights(), lr=0.2 / times)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, growth_interval=100, enabled=scale is not None)
    masks = []
    for batch, classes in _batches(x, y, 500):
        optimizer.zero_grad()
        scaler.scale(loss_of(masked(batch) * targets, classes)).backward()
        scaler.step(optimizer)
        scaler.update()
        masks.append(masked.unit_mask()["0"].clone())
    return masks


@functools.cache
def _plain() -> list[Tensor]:
    return _masks(F.cross_entropy, 1.0)


@pytest.mark.same_bits
@pytest.mark.parametrize(("times", "scale"), [(1 / 1024, None), (65536.0, None), (1.0, 1024.0)])
def test_a_loss_times_a_power_of_two_gives_the_same_mask_at_every_step(times: float, scale: float | None) -> None:
    """Times what a loss is itself, or a GradScaler that grows."""
    one = _plain()
    assert any(not mask.equal(one[0]) for mask in one)
    other = _masks(lambda out, y: times * F.cross_entropy(out, y), times, scale=scale)
    assert all(mask.equal(twin) for mask, twin in zip(one, other, strict=True))


def _squared(out: Tensor, y: Tensor, deviation: float) -> Tensor:
    return F.mse_loss(out[:, 0], deviation * (2.0 * y - 1.0))


def _rounded(out: Tensor, y: Tensor, _: float) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return F.cross_entropy(out.bfloat16(), y)


@pytest.mark.parametrize(("loss_of", "deviation"), [(_squared, 0.1), (_squared, 10.0), (_rounded, 1.0)])
def test_planted_units_are_found_whatever_the_scale_of_targets_and_in_bfloat16(loss_of: Any, deviation: float) -> None:
    """Targets and outputs in another unit: the loss is `deviation` squared times another one."""
    masks = _masks(lambda out, y: loss_of(out, y, deviation), deviation**2, targets=deviation)
    assert set(masks[-1].nonzero().flatten().tolist()) == planted()[3]


def test_a_loop_without_an_optimiser_learns_too() -> None:
    model, x, y, good = planted()
    masked = LearnableMask(model, (x[:2],), ratio=0.25, steps=600)
    for batch, classes in _batches(x, y, 600):
        F.cross_entropy(masked(batch), classes).backward()
        with torch.no_grad():
            for leaf in masked.weights():
                if leaf.grad is not None:
                    leaf -= 0.2 * leaf.grad
        masked.update_importance()
        masked.zero_grad()
    assert set(masked.unit_mask()["0"].nonzero().flatten().tolist()) == good


def test_a_loop_that_never_says_that_a_step_is_over_is_warned() -> None:
    model, x, _, _ = planted()
    masked = LearnableMask(model, (x[:2],), ratio=0.25)
    for _ in range(999):
        masked(x[:4])
    with pytest.warns(UserWarning, match=r"no optimiser has stepped this mask; call masked.update_importance\(\)"):
        masked(x[:4])


def test_a_step_may_have_several_passes() -> None:
    """Gradients that accumulate over four passes decide as those of one pass over all examples."""
    model, x, y, _ = planted()
    masks = []
    for parts in (1, 4):
        masked = LearnableMask(model.double(), (x[:2].double(),), ratio=0.25, steps=200, explore=0.3)
        optimizer = torch.optim.SGD(masked.parameters(), lr=0.2)
        for batch, classes in _batches(x.double(), y, 200):
            for part in torch.arange(64).split(64 // parts):
                (F.cross_entropy(masked(batch[part]), classes[part]) / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
        masks.append(masked.unit_mask())
    assert masks[0] == masks[1]


def test_importance_is_in_nats() -> None:
    """What a kept unit is worth is of the size of the rise of the loss without it, though two terms fall short of that."""
    model, x, y, good = planted()
    masked = _trained(LearnableMask(model, (x[:2],), ratio=0.5, steps=1200, explore=0.3), x, y, 800)
    masked.eval()
    with torch.no_grad():
        whole = F.cross_entropy(masked(x), y)
        small, kept = masked.compact(), masked.unit_mask()["0"].nonzero().flatten().tolist()
        rises = []
        for place in range(len(kept)):
            less = copy.deepcopy(small)
            less[2].weight[:, place] = 0  # type: ignore[index]
            rises.append(float(F.cross_entropy(less(x), y) - whole))
    worth = masked.importance()["0"][kept]
    for unit, rise, value in zip(kept, rises, worth.tolist(), strict=True):
        if unit in good:
            assert rise / 6 < value < 2 * rise
        else:
            assert abs(value) < 0.02


def test_samples_of_a_unit_give_its_mean_with_an_error_from_an_unbiased_variance() -> None:
    graph = sk.trace_units(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), torch.zeros(1, 2))
    evidence = SwapStatistics(graph, torch.zeros(3, dtype=torch.float64), 0.5, 1.0)
    for value in (1.0, 2.0, 4.0, 9.0):
        evidence.add("kept", torch.tensor([1]), torch.tensor([value]))
    mean, error, variance = evidence._moments("kept")
    assert mean.tolist() == [0.0, 4.0, 0.0]
    assert float(variance[1]) == pytest.approx(38 / 3)
    assert error.tolist() == pytest.approx([math.inf, math.sqrt(38 / 3 / 4), math.inf])


def test_a_mask_that_has_converged_learns_again_once_an_earlier_state_is_loaded() -> None:
    model, x, y = classifier()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=LossImportance(explore=1.0, steps=200, samples_per_unit=4))
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.01)
    train_step(masked, optimizer, x, y)
    earlier = masked.state_dict()
    for _ in range(110):
        train_step(masked, optimizer, x, y)
    assert masked.converged
    masked.load_state_dict(earlier)
    for _ in range(10):
        train_step(masked, optimizer, x, y)
    spent = "sparsekit.rule.counters.spent"
    assert masked.state_dict()[spent] > earlier[spent]


@pytest.mark.parametrize("factor", [0.0, math.inf, math.nan])
def test_a_step_without_finite_gradients_is_not_a_sample(factor: float) -> None:
    model, x, y = classifier()
    masked = LearnableMask(model, (x,), ratio=0.5, explore=1.0)
    F.cross_entropy(masked(x), y).backward()
    for weight in masked.weights():
        weight.grad = torch.full_like(weight, factor)
    masked.update_importance()
    state = masked.state_dict()
    assert float(state["sparsekit.rule.counters.step"]) == 1.0
    assert not state["sparsekit.rule.memory.kept"].any()


def test_the_number_of_steps_that_is_asked_for_is_enough_for_two_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever `explore` would pay for."""
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh())]
    x, y = torch.randn(16, 8), torch.randint(2, (16,))

    def train(steps: int) -> int:
        masked = LearnableMask(nn.Sequential(*layers, nn.Linear(8, 2)), (x[:2],), ratio=0.5, explore=0.9, steps=steps)
        optimizer, rounds = torch.optim.SGD(masked.parameters(), lr=0.01), []
        swap = LossImportanceRule._swap
        monkeypatch.setattr(LossImportanceRule, "_swap", lambda rule, mask: (rounds.append(1), swap(rule, mask)))
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(masked(x), y).backward()
            optimizer.step()
        monkeypatch.undo()
        return len(rounds)

    with pytest.warns(
        UserWarning, match=r"allows 0\.\d rounds of swaps.* do not earn their cost back; \d+ steps would do"
    ) as told:
        assert train(30) == 0
    enough = int(re.search(r"(\d+) steps would do", str(told[0].message))[1])  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert train(enough) >= 2


@pytest.mark.parametrize("name", ["vgg-small", "residual", "gpt", "lstm-stacked"])
def test_groups_that_are_explored_together_share_no_weights_and_read_what_each_alone_reads(name: str) -> None:
    model, args, _ = zoo.build(name)
    masked = LearnableMask(model.double(), map_tensors(lambda x: x.double() if x.is_floating_point() else x, args), ratio=0.5)
    bundles = _find_bundles(masked.graph)
    assert sorted(itertools.chain(*bundles)) == sorted(masked.graph.groups)
    assert all(any({*tied} <= {*bundle} for bundle in bundles) for tied in masked.graph.tied_sets)
    (example, _) = batches_like(args)(torch.Generator().manual_seed(0))

    def read(groups: tuple[str, ...]) -> dict[str, Tensor]:
        masked.zero_grad()
        readings = Readings()
        outputs = masked.wide_passes.call(groups, example, {}, readings)
        sum(each.square().sum() for each in find_tensors(outputs)).backward()
        gradients = {leaf: leaf.grad for leaf in masked.weights() if leaf.grad is not None}
        return {key: reading.gradient for key, reading in readings.read(gradients, distributed=False).items()}

    for bundle in bundles:
        touched = [{piece.name for piece in masked.graph.groups[group].slices} for group in bundle]
        ties = [set(tied) for tied in masked.graph.tied_sets]
        for (one, first), (other, second) in itertools.combinations(zip(bundle, touched, strict=True), 2):
            assert not first & second or any({one, other} <= tied for tied in ties)
        together = read(bundle)
        for tied in masked.graph.tied_sets:
            if set(tied) <= set(bundle):
                for key, gradient in read(tied).items():
                    torch.testing.assert_close(together[key], gradient, rtol=1e-9, atol=1e-12)
