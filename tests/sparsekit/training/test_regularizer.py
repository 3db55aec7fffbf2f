"""ImportanceRegularizer: exact targets and weights."""

import pytest
import torch

from sparsekit.training.regularizer import ImportanceRegularizer, standardise


def test_targets_are_the_sigmoid_of_standardised_or_plain_sums() -> None:
    sums = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0])
    plain = ImportanceRegularizer(target="absolute").targets(sums, [3, 2])
    assert torch.equal(plain, torch.sigmoid(sums))
    deviation = (2 / 3) ** 0.5
    ours = ImportanceRegularizer().targets(sums, [3, 2])
    assert torch.allclose(ours, torch.sigmoid(torch.tensor([-1 / deviation, 0.0, 1 / deviation, 0.0, 0.0])))
    assert standardise(sums, torch.tensor([0, 0, 0, 1, 1]), torch.tensor([3, 2]))[3:].tolist() == [0.0, 0.0]


def test_the_weights_of_the_term_are_a_sum_or_a_mean_per_group() -> None:
    assert ImportanceRegularizer(strength=2.0).weights([3, 2]).tolist() == [2.0] * 5
    assert torch.allclose(ImportanceRegularizer(reduction="mean").weights([3, 2]), torch.tensor([1 / 3] * 3 + [0.5] * 2))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_model_without_units_has_nothing_to_regularise(reduction: str) -> None:
    assert ImportanceRegularizer(reduction=reduction).weights([]).shape == (0,)
    assert ImportanceRegularizer(reduction=reduction).targets(torch.empty(0), []).shape == (0,)
