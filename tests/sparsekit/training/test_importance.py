"""ImportanceRegularizer, UnitVectors and ImportanceLearner: exact numbers on a small model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsekit import NarrowModel, choose, select, trace_units
from sparsekit.criteria import Learned, Random, View
from sparsekit.criteria.magnitudes import unit_magnitudes
from sparsekit.errors import InvalidValueError
from sparsekit.training.dense import GateProbe
from sparsekit.training.importance import ImportanceLearner, ImportanceRegularizer
from sparsekit.training.unit_vectors import UnitVectors, standardise


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(4 * 4 * 4, 5), nn.Tanh(), nn.Linear(5, 3),
    ).double()  # fmt: skip


X = torch.randn(4, 2, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0])


def prepared(ratio: float) -> tuple[NarrowModel, UnitVectors]:
    model = network()
    graph = trace_units(model, X)
    narrow_model = NarrowModel(model, graph)
    fused = UnitVectors(narrow_model)
    narrow_model.load(model.state_dict(), select(Random(), graph, ratio, View(generator=torch.Generator().manual_seed(1))))
    fused.reload()
    return narrow_model, fused


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_the_gate_gradient_is_the_derivative_of_the_loss_by_a_gate(ratio) -> None:
    narrow_model, fused = prepared(ratio)
    graph = narrow_model.graph
    F.cross_entropy(narrow_model.module(X), Y).backward()
    found = torch.zeros(fused.total, dtype=torch.float64).index_copy(0, fused.slot_units, fused.gate_gradient())
    gates = {name: keep.double().requires_grad_() for name, keep in narrow_model.mask.items()}
    dense = network()
    loss = F.cross_entropy(torch.func.functional_call(dense, graph.gate(dict(dense.named_parameters()), gates), (X,)), Y)
    loss.backward()
    expected = torch.cat([gate.grad * narrow_model.mask[name] for name, gate in gates.items()])
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert expected.abs().max() > 1e-4


def test_a_probe_gives_the_gate_gradients_of_dropped_units_too() -> None:
    narrow_model, fused = prepared(0.5)
    F.cross_entropy(narrow_model.module(X), Y).backward()
    before = narrow_model.narrow_state()
    found = GateProbe(narrow_model).gradient(lambda model: F.cross_entropy(model(X), Y))
    assert torch.allclose(found[fused.slot_units], fused.gate_gradient(), rtol=0, atol=1e-12)
    assert (found[fused.dropped_units] != 0).any()
    assert all(torch.equal(narrow_model.narrow_state()[name], value) for name, value in before.items())


@pytest.mark.parametrize("ratio", [1.0, 0.5, 0.2])
def test_fused_magnitudes_are_those_of_the_dense_state_at_all_times(ratio) -> None:
    narrow_model, fused = prepared(ratio)
    optimizer = torch.optim.SGD(narrow_model.parameters(), lr=0.1)

    def check() -> None:
        state = narrow_model.dense_state()
        parameters = {name: state[name] for name in narrow_model.named_parameters()}
        expected = torch.cat([unit_magnitudes(group, parameters) for group in narrow_model.graph.groups.values()])
        assert torch.allclose(fused.magnitudes(), expected, rtol=0, atol=1e-12)

    for step in range(6):
        check()
        optimizer.zero_grad()
        F.cross_entropy(narrow_model.module(X), Y).backward()
        optimizer.step()
        check()
        other = View(generator=torch.Generator().manual_seed(step))
        fused.remask(select(Random(), narrow_model.graph, 0.7 if step == 3 else ratio, other), [optimizer])


def test_targets_are_the_sigmoid_of_standardised_or_plain_sums() -> None:
    sums = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0])
    plain = ImportanceRegularizer(target="absolute").targets(sums, [3, 2])
    assert torch.equal(plain, torch.sigmoid(sums))
    deviation = (2 / 3) ** 0.5
    ours = ImportanceRegularizer().targets(sums, [3, 2])
    assert torch.allclose(ours, torch.sigmoid(torch.tensor([-1 / deviation, 0.0, 1 / deviation, 0.0, 0.0])))
    assert standardise(sums, torch.tensor([0, 0, 0, 1, 1]))[3:].tolist() == [0.0, 0.0]


def test_the_weights_of_the_term_are_a_sum_or_a_mean_per_group() -> None:
    assert ImportanceRegularizer(strength=2.0).weights([3, 2]).tolist() == [2.0] * 5
    assert torch.allclose(ImportanceRegularizer(reduction="mean").weights([3, 2]), torch.tensor([1 / 3] * 3 + [0.5] * 2))


def test_one_update_is_a_gradient_step_on_task_loss_and_term() -> None:
    narrow_model, fused = prepared(0.5)
    start = torch.rand(fused.total, dtype=torch.float64)
    learner = ImportanceLearner(fused, start, lr=0.1, term=ImportanceRegularizer(strength=0.5))
    F.cross_entropy(narrow_model.module(X), Y).backward()
    gradient = torch.zeros_like(start).index_copy(0, fused.slot_units, fused.gate_gradient())
    expected = start - 0.1 * (gradient + 2 * 0.5 * (start - learner.targets()))
    learner.update()
    assert torch.allclose(learner.importance, expected, rtol=0, atol=1e-12)


def test_the_mask_follows_only_when_it_changed_and_ties_keep_the_lower_index() -> None:
    narrow_model, fused = prepared(0.5)
    importance = torch.zeros(fused.total, dtype=torch.float64)
    learner = ImportanceLearner(fused, importance, lr=0.1, term=ImportanceRegularizer())
    assert not fused.stands(learner.importance)
    learner.follow()
    assert all(keep.tolist() == sorted(keep.tolist(), reverse=True) for keep in narrow_model.mask.values())
    version = narrow_model.version
    assert not learner.follow()
    learner.importance[0] = 1.0
    assert not learner.follow()
    assert narrow_model.version == version
    learner.importance[5] = 2.0
    assert learner.follow()
    assert narrow_model.mask["0"].tolist() == [True, True, False, False, False, True]
    assert narrow_model.mask == select(Learned(), narrow_model.graph, 0.5, View(importance=fused.split(learner.importance)))


def test_stands_agrees_with_sorting_on_random_importance() -> None:
    narrow_model, fused = prepared(0.5)
    generator = torch.Generator().manual_seed(0)
    agreed = 0
    for _ in range(200):
        importance = torch.randn(fused.total, dtype=torch.float64, generator=generator)
        importance[fused.slot_units] += 1.5
        best = choose(narrow_model.graph, fused.split(importance), narrow_model.mask.counts())
        assert fused.stands(importance) == (best == narrow_model.mask)
        agreed += fused.stands(importance)
    assert 0 < agreed < 200


def test_bad_values_are_refused() -> None:
    _, fused = prepared(0.5)
    with pytest.raises(InvalidValueError, match="must have shape"):
        ImportanceLearner(fused, torch.zeros(3), lr=0.1, term=ImportanceRegularizer())
    learner = ImportanceLearner(fused, torch.full((fused.total,), float("nan")), lr=0.1, term=ImportanceRegularizer())
    with pytest.raises(InvalidValueError, match="NaN"):
        learner.follow()
    for bad in ({"strength": -1.0}, {"target": "relative"}, {"reduction": "max"}):
        with pytest.raises(InvalidValueError):
            ImportanceRegularizer(**bad)
