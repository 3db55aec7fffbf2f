from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsekit_fl as fl
from sparsekit_fl.client.fit import Examples, evaluate
from sparsekit_fl.problem.metrics import IGNORED, accuracy, cross_entropy

SCORES = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 1.0]])


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "expected"),
    [
        (accuracy, SCORES, [0, 0, 0], (2, 3)),
        (accuracy, SCORES[None], [[0, 1, IGNORED]], (2, 2)),
        (partial(accuracy, never_right=(1,)), SCORES[None], [[0, 1, IGNORED]], (1, 2)),
    ],
    ids=["labels", "tokens without padding", "unknown words are never right"],
)
def test_accuracy_is_right_predictions_and_their_number(metric, outputs, targets, expected):
    right, counted = metric(outputs, torch.tensor(targets))
    assert (int(right), int(counted)) == expected


def test_cross_entropy_takes_classes_last_for_sequences():
    outputs, targets = torch.randn(2, 3, 5), torch.tensor([[0, 1, IGNORED], [4, 2, 3]])
    assert torch.allclose(cross_entropy(outputs, targets), F.cross_entropy(outputs.transpose(1, 2), targets))
    assert torch.equal(cross_entropy(SCORES, torch.tensor([0, 1, 0])), F.cross_entropy(SCORES, torch.tensor([0, 1, 0])))


def test_the_loss_of_padded_sequences_is_a_mean_over_tokens_however_they_are_batched():
    """Rows of one token and of four, in an order that makes the batches of an evaluation uneven."""
    generator = torch.Generator().manual_seed(0)
    outputs, targets = torch.randn(600, 4, 5, generator=generator), torch.randint(5, (600, 4), generator=generator)
    targets[:300, 1:] = IGNORED
    problem = fl.Problem(model=nn.Identity, example_inputs=(outputs[:1],))
    scores = evaluate(nn.Identity(), problem, Examples(problem, fl.TensorData((outputs,), targets), device="cpu"))
    total = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    assert scores["loss"] == (pytest.approx(float(total), rel=1e-6), 300 + 4 * 300)
    plain = replace(problem, loss=lambda outputs, targets: cross_entropy(outputs, targets))
    by_example = evaluate(nn.Identity(), plain, Examples(plain, fl.TensorData((outputs,), targets), device="cpu"))["loss"]
    assert by_example[1] == 600, "of any other loss it is not known what the mean is over"
