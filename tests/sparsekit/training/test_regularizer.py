"""ImportanceRegularizer: exact targets."""

import torch

from sparsekit.training.rules import ImportanceRegularizer, standardise


def test_targets_are_the_sigmoid_of_standardised_or_plain_sums() -> None:
    sums = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0])
    plain = ImportanceRegularizer(target="absolute").targets(sums, [3, 2])
    assert torch.equal(plain, torch.sigmoid(sums))
    deviation = (2 / 3) ** 0.5
    ours = ImportanceRegularizer().targets(sums, [3, 2])
    assert torch.allclose(ours, torch.sigmoid(torch.tensor([-1 / deviation, 0.0, 1 / deviation, 0.0, 0.0])))
    assert standardise(sums, torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3, 2]))[3:].tolist() == [0.0, 0.0]


def test_a_model_without_units_has_nothing_to_regularise() -> None:
    assert ImportanceRegularizer().targets(torch.empty(0), []).shape == (0,)
