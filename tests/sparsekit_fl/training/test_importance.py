"""ImportanceLearner: exact numbers on a small model."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from narrow import X, Y, prepared

from sparsekit import select
from sparsekit.criteria import Learned, View
from sparsekit.errors import InvalidValueError
from sparsekit.training.regularizer import ImportanceRegularizer
from sparsekit_fl.training.importance import ImportanceLearner


def test_one_update_is_a_gradient_step_on_task_loss_and_term() -> None:
    narrow_model, fused = prepared(0.5)
    start = torch.rand(fused.total, dtype=torch.float64)
    learner = ImportanceLearner(fused, start, lr=0.1, term=ImportanceRegularizer(strength=0.5))
    F.cross_entropy(narrow_model.module(X), Y).backward()
    gradient = torch.zeros_like(start).index_copy(0, fused.slot_units, fused.gate_gradient())
    expected = start - 0.1 * (gradient + 2 * 0.5 * (start - learner.targets()))
    learner.update()
    assert torch.allclose(learner.importance, expected, rtol=0, atol=1e-12)


def test_the_pattern_is_followed_only_when_it_changed_and_ties_keep_the_lower_index() -> None:
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


def test_bad_values_are_refused() -> None:
    _, fused = prepared(0.5)
    with pytest.raises(InvalidValueError, match="must have shape"):
        ImportanceLearner(fused, torch.zeros(3), lr=0.1, term=ImportanceRegularizer())
    learner = ImportanceLearner(fused, torch.full((fused.total,), float("nan")), lr=0.1, term=ImportanceRegularizer())
    with pytest.raises(InvalidValueError, match="NaN"):
        learner.follow()
