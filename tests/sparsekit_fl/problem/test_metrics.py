from __future__ import annotations

import torch
import torch.nn.functional as F

from sparsekit_fl.problem.metrics import IGNORED, TokenAccuracy, accuracy, cross_entropy

SCORES = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 1.0]])


def test_accuracy_is_right_predictions_and_their_number() -> None:
    right, counted = accuracy(SCORES, torch.tensor([0, 0, 0]))
    assert (int(right), int(counted)) == (2, 3)


def test_unknown_words_count_as_asked_for_but_never_as_right() -> None:
    right, counted = TokenAccuracy(never_right=(1,))(SCORES[None], torch.tensor([[0, 1, IGNORED]]))
    assert (int(right), int(counted)) == (1, 2)


def test_cross_entropy_takes_classes_last_for_sequences() -> None:
    outputs, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, IGNORED], [4, 2, 3]])
    assert torch.allclose(cross_entropy(outputs, targets), F.cross_entropy(outputs.transpose(1, 2), targets))
    assert torch.equal(cross_entropy(SCORES, torch.tensor([0, 1, 0])), F.cross_entropy(SCORES, torch.tensor([0, 1, 0])))
