"""LearnableMask with learned criteria of somebody else: followed step by step, judged by their own scores."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from masked import batches_like, classifier, convolutions, train_alike, train_step
from torch import Tensor

from sparsekit import GradientImportance, LearnableMask, criteria
from sparsekit.allocation import mask_from_scores, ratio_counts
from sparsekit.criteria import Learned, ScoringContext
from sparsekit.graph.graph import UnitGraph
from sparsekit.graph.mask import UnitMask


@dataclass(frozen=True)
class Opposite:
    """The least important units stay."""

    dtype: torch.dtype = torch.float64
    learned: bool = True

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        assert context.importance is not None
        return {name: (-context.importance[name]).to(self.dtype) for name in graph.groups}


@dataclass
class Smoothed:
    """An exponential mean over the steps: it counts on being asked once a step."""

    mean: dict[str, Tensor] = field(default_factory=dict)
    asked: int = 0
    learned: bool = True

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        assert context.importance is not None
        self.asked += 1
        for name, values in context.importance.items():
            before = self.mean.get(name, values)
            self.mean[name] = 0.9 * before + 0.1 * values
        return self.mean


@dataclass(frozen=True)
class ByWeights:
    """Importance times magnitude of the second layer's bias: needs the weights."""

    learned: bool = True

    def scores(self, graph: UnitGraph, context: ScoringContext) -> Mapping[str, Tensor]:
        assert context.importance is not None
        assert context.weights is not None
        return {name: context.importance[name] + context.weights[f"{name}.bias"].abs() for name in graph.groups}


RULE = GradientImportance(lr=0.5, refresh_every=1)


def _largest(graph: UnitGraph, scores: Mapping[str, Tensor]) -> UnitMask:
    return mask_from_scores(graph, scores, ratio_counts(graph, 0.5))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_mask_follows_the_scores_and_not_the_importance(dtype: torch.dtype) -> None:
    model, x, y = classifier()
    masked = LearnableMask(model, (x,), criterion=Opposite(dtype), ratio=0.5, learning=GradientImportance(lr=0.5))
    seen = []
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.5)
    for _ in range(8):
        train_step(masked, optimizer, x, y)
        opposite = {name: (-values).to(dtype) for name, values in masked.importance().items()}
        assert masked.unit_mask() == _largest(masked.graph, opposite)
        seen.append(masked.unit_mask())
    assert any(mask != seen[0] for mask in seen)


@pytest.mark.parametrize("criterion", [Opposite, Smoothed, ByWeights, Learned])
def test_compact_and_masked_execution_follow_a_learned_criterion_alike(criterion: Any) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)

    model, x, _ = classifier()
    train_alike(model, batches_like((x,)), make, steps=20, tolerance=1e-9, ratio=0.5, criterion=criterion, learning=RULE)


def test_a_criterion_with_a_memory_is_asked_once_a_step() -> None:
    model, x, y = classifier()
    criterion = Smoothed()
    masked = LearnableMask(model, (x,), criterion=criterion, ratio=0.5, learning=RULE)
    assert criterion.asked == 1
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.5, momentum=0.9)
    for _ in range(10):
        train_step(masked, optimizer, x, y)
        masked.unit_mask()
    assert criterion.asked == 11
    masked.unit_mask()
    masked(x)
    assert criterion.asked == 11
    assert masked.unit_mask() == _largest(masked.graph, criterion.mean)


@pytest.mark.parametrize("name", ["fisher", "activation", "random", "magnitude"])
def test_any_criterion_may_choose_what_stays_anew_at_every_ratio(name: str) -> None:
    """One that reads data runs the dense model with its present weights."""
    model, x, y = convolutions()
    data = {"batches": [(x, y)], "loss": F.cross_entropy} if name in ("fisher", "activation") else {}
    criterion = criteria.registry[name](**data)
    masked = LearnableMask(model, (x,), criterion=criterion, ratio=0.5)
    optimizer = torch.optim.SGD(masked.parameters(), lr=0.05)
    for ratio in (0.5, 0.25, 0.75):
        masked.ratio = ratio
        assert masked.unit_mask().counts() == ratio_counts(masked.graph, ratio)
        if name == "fisher":
            whole = convolutions()[0]
            whole.load_state_dict(masked.dense_state())
            context = ScoringContext(weights=masked.dense_state(), model=whole.train())
            assert masked.unit_mask() == mask_from_scores(
                masked.graph, criterion.scores(masked.graph, context), masked.widths.counts()
            )
        train_step(masked, optimizer, x, y)
