import pytest
import torch
import torch.nn.functional as F

from sparsekit_fl.problem.metrics import IGNORED, TokenAccuracy, accuracy, cross_entropy, log_loss, perplexity

SCORES = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 1.0]])


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "expected"),
    [
        (accuracy, SCORES, [0, 0, 0], (2, 3)),
        (accuracy, SCORES[None], [[0, 1, IGNORED]], (2, 2)),
        (TokenAccuracy(never_right=(1,)), SCORES[None], [[0, 1, IGNORED]], (1, 2)),
    ],
    ids=["labels", "tokens without padding", "unknown words are never right"],
)
def test_accuracy_is_right_predictions_and_their_number(metric, outputs, targets, expected) -> None:
    right, counted = metric(outputs, torch.tensor(targets))
    assert (int(right), int(counted)) == expected


def test_sums_of_batches_equal_the_whole() -> None:
    targets = torch.tensor([0, 1, 1])
    parts = [log_loss(SCORES[i : i + 2], targets[i : i + 2]) for i in (0, 2)]
    total, weight = log_loss(SCORES, targets)
    assert sum(float(part) for part, _ in parts) == pytest.approx(float(total))
    assert sum(int(count) for _, count in parts) == int(weight) == 3


def test_cross_entropy_takes_classes_last_for_sequences() -> None:
    outputs, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, IGNORED], [4, 2, 3]])
    assert torch.allclose(cross_entropy(outputs, targets), F.cross_entropy(outputs.transpose(1, 2), targets))
    assert torch.equal(cross_entropy(SCORES, torch.tensor([0, 1, 0])), F.cross_entropy(SCORES, torch.tensor([0, 1, 0])))


def test_perplexity_of_a_uniform_guess_is_the_number_of_classes() -> None:
    total, weight = log_loss(torch.zeros(4, 7), torch.zeros(4, dtype=torch.int64))
    assert perplexity(float(total / weight)) == pytest.approx(7)
