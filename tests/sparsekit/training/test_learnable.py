"""LearnableMask: it trains as a dense loop does, its importance is exact, it begins with the cut of `prune`."""

import copy
import runpy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import convolutions, learnable_mask, train_step
from small import make_model, make_trained
from torch import nn

import sparsekit as sk
from sparsekit import Budget, GradientImportance, LearnableMask, LearnedNarrowing, UnitMask, compact, trace_units
from sparsekit.allocation import Schedule, by_ratio
from sparsekit.criteria.weights import unit_magnitudes
from sparsekit.errors import ForeignMaskError, InvalidValueError
from sparsekit.pruning.settings import UncalibratedWarning
from sparsekit.training.importance import importance_targets


@pytest.mark.parametrize("every", [1, 4])
def test_compact_training_equals_a_hand_written_dense_loop(every: int) -> None:
    """The reference knows nothing of narrow tensors: dense leaves, columns zeroed, dropped entries put back by hand."""
    torch.manual_seed(0)
    first, second = nn.Linear(4, 6).double(), nn.Linear(6, 2).double()
    model = nn.Sequential(first, nn.ReLU(), second)
    rule = GradientImportance(lr=0.1, refresh_every=every)
    masked = LearnableMask(model, (torch.zeros(1, 4, dtype=torch.float64),), ratio=0.5, learning=rule)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.1, momentum=0.9)
    values = {name: p.detach().clone() for name, p in model.named_parameters()}
    moving = {name: torch.zeros_like(p) for name, p in values.items()}
    scores = masked.importance()["0"]
    masks, before = set(), {}
    read_under = torch.zeros(6, dtype=torch.bool)
    for step in range(50):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
        y = torch.randint(0, 2, (5,), generator=generator)
        keep = torch.zeros(6, dtype=torch.bool)
        keep[scores.sort(descending=True, stable=True).indices[:3]] = True
        masks.add(tuple(keep.tolist()))
        leaves = {name: value.clone().requires_grad_() for name, value in values.items()}
        hidden = torch.relu(x @ leaves["0.weight"].T + leaves["0.bias"])
        F.cross_entropy((hidden * keep) @ leaves["2.weight"].T + leaves["2.bias"], y).backward()
        sums = values["0.weight"].abs().sum(1) + values["0.bias"].abs()
        if step % every == 0:
            target = torch.sigmoid((sums - sums.mean()) / sums.std(correction=0))
        if step % every == 0 or not torch.equal(keep, read_under):  # the gates' gradient after a change of the mask too
            task, read_under = (leaves["2.weight"].grad * values["2.weight"]).sum(0), keep
        scores = scores - 0.1 * (task + 2 * (scores - target))
        kept = {"0.weight": keep[:, None], "0.bias": keep, "2.weight": keep[None, :], "2.bias": torch.ones(2, dtype=torch.bool)}
        before = before or kept
        for name in values:
            if name != "2.bias":
                moving[name] = moving[name] * (kept[name] & before[name])  # those that enter start without momentum
            moving[name] = torch.where(kept[name], 0.9 * moving[name] + leaves[name].grad, moving[name])
            values[name] = torch.where(kept[name], values[name] - 0.1 * moving[name], values[name])
        before = kept
        loss = F.cross_entropy(masked(x), y)
        optimizer.zero_grad()
        loss.backward()
        if step % 2:
            masked.update_importance()
            torch.nn.utils.clip_grad_norm_(masked.parameters(), 1e9)
        optimizer.step()
        state = masked.dense_state()
        torch.testing.assert_close(state, values, rtol=0, atol=1e-10)
        assert torch.allclose(masked.importance()["0"], scores, rtol=0, atol=1e-10)
    assert len(masks) > 1


def test_a_frozen_layer_is_cut_but_not_trained() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    model[2].weight.requires_grad_(False)
    masked = LearnableMask(model, (torch.randn(4, 3),), ratio=0.5, learning=GradientImportance())
    flags = [p.requires_grad for p in model.parameters()]
    assert [p.requires_grad for p in masked.model.parameters()] == flags
    optimizer = torch.optim.SGD([p for p in masked.parameters() if p.requires_grad], lr=0.1)
    before = masked.dense_state()
    for _ in range(3):
        train_step(masked, optimizer, torch.randn(4, 3), None)
    moved = {name for name, tensor in masked.dense_state().items() if not torch.equal(tensor, before[name])}
    assert moved == {"2.bias", "4.weight", "4.bias"}
    assert [p.requires_grad for p in masked.compact().parameters()] == flags


@pytest.mark.same_bits
def test_a_loaded_mask_trains_as_a_new_one_and_gives_what_it_keeps() -> None:
    model, x, y = convolutions()
    rule = GradientImportance(lr=0.5)
    used = LearnableMask(model, (x,), ratio=0.75, learning=GradientImportance())
    for seed, importance in enumerate((None, torch.rand(used.graph.units)), start=1):
        model, _, _ = convolutions(seed=seed)
        new = LearnableMask(model, graph=used.graph, ratio=0.5, learning=rule)
        if importance is not None:
            new.load(model.state_dict(), importance=importance)
        used.load(model.state_dict(), ratio=0.5, importance=importance, learning=rule)
        assert used.unit_mask() == new.unit_mask()
        for masked in (used, new):
            optimizer = torch.optim.SGD(masked.parameters(), lr=0.1, momentum=0.9)
            for _ in range(5):
                train_step(masked, optimizer, x, y)
        assert torch.equal(used.scores, new.scores)
        torch.testing.assert_close(used.dense_state(), new.dense_state(), rtol=0, atol=0)
        small = compact(model, new.graph, new.unit_mask())
        small.load_state_dict(used.narrow_state())
        assert torch.equal(small.eval()(x), new.compact().eval()(x))


@pytest.mark.parametrize("learning", [None, GradientImportance(), LearnedNarrowing(steps=24)])
@pytest.mark.parametrize("options", [{"ratio": 0.5}, {"budget": "flops=40%"}])
def test_later_changes_of_the_model_do_not_reach_its_mask(options: Any, learning: Any) -> None:
    model, x, _ = convolutions()
    masked = LearnableMask(model, (x,), learning=learning, **options)
    before = copy.deepcopy(masked.state_dict())
    for tensor in model.state_dict().values():
        tensor.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in masked.state_dict().items())


def test_a_mask_that_is_given_stays_until_the_next_load() -> None:
    model, x, y = convolutions()
    state = convolutions(seed=1)[0].state_dict()
    masked = LearnableMask(model, (x,), ratio=0.5, learning=GradientImportance(lr=5.0))
    given = UnitMask({name: torch.arange(len(keep)) < 3 for name, keep in masked.unit_mask().items()})
    masked.load(state, mask=given)
    optimizer, before = torch.optim.SGD(masked.parameters(), lr=0.1), masked.scores.clone()
    for _ in range(3):
        train_step(masked, optimizer, x, y)
    assert masked.unit_mask() == given
    assert torch.equal(masked.scores, before)
    masked.load(state, ratio=0.25)
    assert masked.unit_mask().counts()["0"] == 2
    with pytest.raises(ForeignMaskError, match=r"importance must have shape \(24,\), got \(3,\)"):
        masked.load(state, importance=torch.zeros(3))


OWN: Any = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "examples/layer_rule.py")))


@pytest.mark.parametrize("options", [{"learning": GradientImportance(), "ratio": 0.5}, {"budget": "params=60%"}])
def test_layers_of_ones_own_are_narrowed_and_widened_by_their_rules(options: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(OWN.GatedLinear(5, 8), OWN.Centred(8), OWN.GatedLinear(8, 6), nn.Linear(6, 2))
    rules = {OWN.GatedLinear: OWN.GatedLinearRule(), OWN.Centred: OWN.CentredRule()}
    x = torch.randn(4, 3, 5)
    masked = LearnableMask(model, (x,), rules=rules, **options)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.1)
    for _ in range(12):
        train_step(masked, optimizer, x, None)
    assert masked.model[0].out_features == masked.unit_mask().counts()["0"] < 8
    assert masked.model[2].in_features == masked.model[0].out_features
    torch.testing.assert_close(masked.compact().eval()(x), masked.eval()(x))


def _fixed(model: Any, x: Any, **options: Any) -> LearnableMask:
    return LearnableMask(model, (x,), **options)


def _narrowing(model: Any, x: Any, **options: Any) -> LearnableMask:
    return LearnableMask(model, (x,), learning=LearnedNarrowing(steps=24, least_steps=3), **options)


REFUSED: list[tuple[str, Callable[[Any, Any, Any], object]]] = [
    ("learning must be GradientImportance", lambda m, x, _: _fixed(m, x, learning=GradientImportance)),
    ("not both", lambda m, x, _: _fixed(m, x, ratio=0.5, budget="flops=50%")),
    ("a loss needs batches", lambda m, x, _: _fixed(m, x, loss=F.mse_loss)),
    ("a ratio below 1 or a budget", lambda m, x, data: _fixed(m, x, **data)),
    ("need example_inputs", lambda m, x, data: LearnableMask(m, graph=trace_units(m, x), ratio=0.5, **data)),
    ("made with a budget of flops ≤ 60%", lambda m, x, _: _fixed(m, x, budget="flops=40%").load_state_dict(
        _fixed(m, x, budget="flops=60%").state_dict())),
    ("made with a ratio", lambda m, x, _: _fixed(m, x, budget="flops=40%").load_state_dict(
        _fixed(m, x, ratio=0.5).state_dict())),
    ("lr must be a finite number", lambda *_: GradientImportance(lr="x")),
    ("target must be 'standardized'", lambda *_: GradientImportance(target=None)),
    ("a ratio below 1 or a budget", lambda m, x, _: _narrowing(m, x, ratio=1.0)),
    ("follow from the widths", lambda m, x, _: _narrowing(m, x, budget=Budget(latency_ms=5.0))),
    ("cannot be met", lambda m, x, _: _narrowing(m, x, budget="flops=0.01%")),
    ("says how many units stay", lambda m, x, _: setattr(_narrowing(m, x, ratio=0.3), "ratio", 0.5)),
    ("steps", lambda *_: LearnedNarrowing(steps=0)),
    ("steps", lambda *_: LearnedNarrowing(steps=6)),
    ("until", lambda *_: LearnedNarrowing(steps=50, until=1.0)),
    ("half_life", lambda *_: LearnedNarrowing(steps=50, half_life=0.0)),
]  # fmt: skip


@pytest.mark.parametrize(("told", "call"), REFUSED)
def test_what_does_not_fit_is_refused(told: str, call: Callable[..., object]) -> None:
    model, x, y = convolutions()
    with pytest.raises(InvalidValueError, match=told):
        call(model, x, {"batches": [(x, y)], "loss": F.cross_entropy})


HALVES = [torch.bfloat16, torch.float16]


def _classifier(dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 3))
    return model.to(dtype), torch.randn(12, 6).to(dtype), torch.randint(3, (12,))


def _masked(dtype: torch.dtype) -> LearnableMask:
    model, x, _ = _classifier(dtype)
    return LearnableMask(model, (x,), prune_hidden_size=True, ratio=0.5, learning=GradientImportance(lr=1e-4, refresh_every=1))


@pytest.mark.parametrize("dtype", HALVES)
def test_importance_is_float32_and_small_updates_of_it_last(dtype: torch.dtype) -> None:
    masked = _masked(dtype)
    _, x, y = _classifier(dtype)
    optimizer = torch.optim.SGD(masked.parameters(), lr=1e-4)
    assert masked.scores.dtype == torch.float32
    before = masked.scores.detach().clone()
    for _ in range(20):
        train_step(masked, optimizer, x, y)
    kept = torch.cat(list(masked.unit_mask().values()))
    moved = (masked.scores.detach() != before)[kept]
    assert moved.float().mean() > 0.8
    assert all(p.dtype == dtype for p in masked.model.parameters())


@pytest.mark.parametrize("move", [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: nn.Sequential(m).bfloat16()[0]])
def test_importance_stays_float32_when_the_mask_moves_to_a_shorter_dtype(move) -> None:
    masked = _masked(torch.float32)
    before = masked.scores.detach().clone()
    masked = move(masked)
    assert masked.scores.dtype == torch.float32
    assert torch.equal(masked.scores, before)
    dtype = masked.model[0].weight.dtype
    assert dtype.itemsize == 2
    masked.load_importance({name: -values for name, values in masked.importance().items()})  # dropped units enter
    masked(_classifier(dtype)[1])
    weights = masked.dense_state()
    expected = torch.cat([unit_magnitudes(group, weights) for group in masked.graph.groups.values()])
    assert expected.dtype == torch.float32
    torch.testing.assert_close(masked.vectors.magnitudes(), expected, rtol=1e-6, atol=1e-6)
    assert masked.double().scores.dtype == torch.float64
    assert masked.half().scores.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_gates_are_those_of_the_same_weights_in_float32(dtype: torch.dtype) -> None:
    """One linear layer after the gates, so that the gradient of its weights is exact in both but for their rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 64), nn.Linear(64, 256)).to(dtype)
    x = torch.ones(1, 2)
    found = {}
    for name, module in (("short", model), ("float32", copy.deepcopy(model).float())):
        for execution in ("compact", "masked"):
            graph = trace_units(module, x.to(module[0].weight))
            masked = learnable_mask(module, graph=graph, ratio=0.5, execution=execution, learning=GradientImportance())
            masked(x.to(module[0].weight)).float().sum().backward()
            found[name, execution] = masked.vectors.gate_gradient()
    for execution in ("compact", "masked"):
        expected = found["float32", execution]
        short = found["short", execution]
        assert (short - expected).norm() / expected.norm() < 0.004
    torch.testing.assert_close(found["short", "compact"], found["short", "masked"], rtol=1e-5, atol=1e-5)


def test_targets_are_the_sigmoid_of_standardized_or_plain_sums() -> None:
    sums = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0])
    plain = importance_targets(sums, [3, 2], absolute=True)
    assert torch.equal(plain, torch.sigmoid(sums))
    deviation = (2 / 3) ** 0.5
    ours = importance_targets(sums, [3, 2])
    assert torch.allclose(ours, torch.sigmoid(torch.tensor([-1 / deviation, 0.0, 1 / deviation, 0.0, 0.0])))
    assert ours[3:].tolist() == [0.5, 0.5]  # equal values are in the middle
    assert importance_targets(torch.empty(0), []).shape == (0,)  # of a model without units


@pytest.mark.parametrize("learning", [None, sk.GradientImportance()])
@pytest.mark.parametrize("kind", ["linear", "convolution"])
@pytest.mark.parametrize(
    "how",
    [
        {"budget": "flops=40%"},
        {"budget": "flops=40%", "schedule": Schedule("linear", 3)},
        {"allocation": partial(by_ratio, ratios=0.4), "criterion": "wanda"},
    ],
)
def test_a_mask_from_a_pruned_model_is_that_model(kind: str, how: dict[str, Any], learning: Any) -> None:
    model, batches = make_trained(kind)
    x = batches[0][0]
    pruned = sk.prune(model, x[:2], batches=batches, loss=F.cross_entropy, **how)
    masked = sk.LearnableMask.from_pruned(pruned, model, learning=learning).eval()
    assert masked.unit_mask() == pruned.mask
    with torch.no_grad():
        assert torch.equal(masked(x), pruned.model.eval()(x))
    optimizer = torch.optim.SGD(masked.train().parameters(), 0.05)
    for batch in (batches * 5)[:40]:
        train_step(masked, optimizer, *batch)
    assert masked.unit_mask().counts() == pruned.mask.counts()
    again = sk.LearnableMask.from_pruned(pruned, model, learning=learning)
    again.load_state_dict(masked.state_dict())
    assert again.unit_mask() == masked.unit_mask()
    with torch.no_grad():
        assert torch.equal(again.eval()(x), masked.eval()(x))
        assert torch.equal(again.compact().eval()(x), masked(x))


def test_with_batches_a_mask_begins_with_the_cut_of_prune_and_far_below_the_loss_of_one_without() -> None:
    model, batches = make_trained()
    x, data = batches[0][0][:2], {"batches": batches, "loss": F.cross_entropy}
    pruned = sk.prune(model, x, budget="flops=40%", **data)
    whole = sk.LearnableMask(model, x, budget="flops=40%", **data).eval()
    assert whole.unit_mask() == pruned.mask
    with torch.no_grad():
        assert torch.equal(whole(x), pruned.model.eval()(x))
    with pytest.raises(InvalidValueError, match="has a budget"):
        whole.ratio = 0.5
    for kept in ({"budget": "flops=40%"}, {"ratio": 0.4}):
        with pytest.warns(UncalibratedWarning, match="chance"):
            bare = sk.LearnableMask(model, x, **kept).eval()
        calibrated = sk.LearnableMask(model, x, **kept, **data).eval()
        with torch.no_grad():
            losses = [sum(float(F.cross_entropy(masked(x), y)) for x, y in batches) for masked in (calibrated, bare)]
        assert losses[0] < 0.7 * losses[1]
    calibrated.ratio = 0.2
    assert calibrated.unit_mask().counts()["0"] == 7


def test_what_cannot_begin_is_refused_and_an_untrained_network_is_not_warned_of() -> None:
    model, batches = make_trained()
    x = batches[0][0][:2]
    decided = sk.plan(model, x, budget="flops=50%", batches=batches, loss=F.cross_entropy, criterion="fisher")
    with pytest.raises(InvalidValueError, match=r"call prune\(\)"):
        sk.LearnableMask.from_pruned(decided, model)
    pruned = sk.prune(model, x, budget="flops=50%", batches=batches, loss=F.cross_entropy, criterion="fisher")
    with pytest.raises(ForeignMaskError):
        sk.LearnableMask.from_pruned(pruned, make_model())
    with warnings.catch_warnings():
        warnings.simplefilter("error", UncalibratedWarning)
        sk.LearnableMask(make_model(), x[:, :6], ratio=0.5)
        sk.LearnableMask.from_pruned(pruned, model)
