"""LocalModel: which of a client's trained models it keeps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from sparsekit_fl.policies.local import LocalResult
from sparsekit_fl.policies.personal import LocalModel
from sparsekit_fl.training.loop import TrainingLog

# Validation accuracy and loss of ten examples, training loss of ninety; one row per participation.
PARTICIPATIONS = [(1.0, 0.30, 0.20), (0.9, 0.31, 0.01), (0.9, 0.35, 0.10)]


def kept(select: Any, participations=PARTICIPATIONS, *, metric: str = "accuracy") -> float:
    memory: dict[str, Any] = {}
    for number, (accuracy, validation, training) in enumerate(participations):
        scores = {
            "val": {metric: (accuracy * 10, 10), "loss": (validation * 10, 10)},
            "train": {metric: (90, 90), "loss": (training * 90, 90)},
        }
        ctx: Any = SimpleNamespace(
            memory=memory, round=number, frozen=frozenset(), score=lambda module, split, scores=scores: scores[split]
        )
        state = {"number": torch.tensor(number)}
        LocalModel(select).keep(ctx, LocalResult(state=state, mask=None, log=TrainingLog(), module=nn.Identity()), 1.0)
    return int(memory["state"]["number"])


@pytest.mark.parametrize(("select", "number"), [("last", 2), ("best", 0), ("loss", 1)])
def test_the_last_the_best_or_the_one_of_least_loss_stays(select, number) -> None:
    assert kept(select) == number


def test_of_equal_losses_the_later_one_stays() -> None:
    assert kept("loss", [(0.5, 0.2, 0.1), (1.0, 0.2, 0.1)]) == 1


def test_without_accuracy_best_is_least_validation_loss() -> None:
    assert kept("best", metric="log_loss") == 0
    assert kept("loss", metric="log_loss") == 1
