import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.problem.metrics import accuracy
from sparsekit_fl.problem.problem import Problem, check_fit


def linear():
    return nn.Linear(3, 2)


def client(width=3, label=1, *, id=5):
    """Four examples in each split; the label of the last one but one of `test` is given."""
    inputs, targets = torch.arange(4.0 * width).reshape(4, width), torch.tensor([0, 1, 0, 1])
    split, test = fl.TensorData((inputs,), targets), fl.TensorData((inputs,), torch.tensor([0, 1, label, 1]))
    return fl.Client(id=id, data=fl.ClientData(split, split, test))


def problem(**changes):
    return Problem(**{"model": linear, "example_inputs": (torch.zeros(1, 3),), **changes})


class Frozen(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
        self.requires_grad_(False)


def test_a_fitting_problem_passes_and_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    for loss in (F.cross_entropy, lambda outputs, targets: F.cross_entropy(outputs, targets) * 1e-3):
        check_fit(problem(loss=loss, metrics={"accuracy": accuracy}), [client(), client(id=6)])
    check_fit(problem(), [fl.Client(id=0, data=fl.ClientData(range(3), range(0), range(2)))])
    assert torch.equal(before, torch.random.get_rng_state())


def sum_loss(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="sum")


@pytest.mark.parametrize(
    ("changes", "who", "error", "message"),
    [
        ({"model": linear()}, client(), InvalidValueError, "ready Linear"),
        ({"loss": "mse"}, client(), InvalidValueError, "loss must be callable"),
        ({"example_inputs": ()}, client(), InvalidValueError, "example_inputs"),
        ({"metrics": {"loss": accuracy}}, client(), InvalidValueError, "metrics must map names, none of them 'loss'"),
        ({"model": dict}, client(), InvalidValueError, "must build a torch.nn.Module, got dict"),
        ({"model": Frozen}, client(), InvalidValueError, "nothing to train"),
        ({}, client(width=4), DataError, r"does not take the data of client 5 .*\(2, 4\)"),
        ({}, client(label=7), DataError, "client 5 has label 7 in test, but the model has 2 outputs"),
        ({}, client(label=-1), DataError, "client 5 has label -1 in test"),
        ({"loss": lambda outputs, targets: outputs}, client(), DataError, "scalar"),
        ({"loss": sum_loss}, client(), InvalidValueError, "loss must be the mean over the batch"),
        ({"loss": F.binary_cross_entropy}, client(), DataError, "loss or metrics fail"),
        ({"metrics": {"accuracy": lambda outputs, targets: 0.5}}, client(), DataError, "loss or metrics fail"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_round(changes, who, error, message):
    config = fl.RunConfig(rounds=1, cohort=1, training=fl.TrainingConfig(local_epochs=1))
    with pytest.raises(error, match=message):
        fl.run(fl.methods.fedavg(), problem(**changes), [client(id=2), who] if "label" in message else [who], config)
