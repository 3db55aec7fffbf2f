from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.problem.metrics import accuracy
from sparsekit_fl.problem.problem import Problem, check_fit


def linear() -> nn.Module:
    return nn.Linear(3, 2)


def client(width: int = 3, label: int = 1) -> fl.Client:
    split = fl.TensorData((torch.zeros(4, width),), torch.tensor([0, label, 0, 1]))
    return fl.Client(id=5, data=fl.ClientData(split, split, split))


def problem(**changes: Any) -> Problem:
    return Problem(**{"model": linear, "example_inputs": (torch.zeros(1, 3),), **changes})


def test_a_fitting_problem_passes_and_leaves_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    check_fit(problem(loss=F.cross_entropy, metrics={"accuracy": accuracy}), client())
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(
    ("changes", "who", "error", "message"),
    [
        ({"model": linear()}, client(), InvalidValueError, "ready Linear"),
        ({"loss": "mse"}, client(), InvalidValueError, "loss must be callable"),
        ({"example_inputs": ()}, client(), InvalidValueError, "example_inputs"),
        ({"metrics": {}}, client(), InvalidValueError, "metrics must map"),
        ({"model": dict}, client(), InvalidValueError, "must build a torch.nn.Module, got dict"),
        ({}, client(width=4), DataError, r"does not take the data of client 5 .*\(2, 4\)"),
        ({}, client(label=2), DataError, "label 2, but the model has 2 outputs"),
        ({"loss": lambda outputs, targets: outputs}, client(), DataError, "scalar"),
        ({"loss": F.binary_cross_entropy}, client(), DataError, "loss or metrics fail"),
        ({"metrics": {"accuracy": lambda outputs, targets: 0.5}}, client(), DataError, r"\(sum, weight\)"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_reason(
    changes: dict[str, Any], who: fl.Client, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check_fit(problem(**changes), who)


def test_a_reader_of_ones_own_is_used_for_any_kind_of_split() -> None:
    def read(split: list[float], positions: Any) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        chosen = split if positions is None else [split[i] for i in positions]
        return (torch.tensor(chosen)[:, None].expand(-1, 3),), torch.zeros(len(chosen), dtype=torch.int64)

    own = problem(read_batch=read)
    data = fl.ClientData(train=[1.0, 2.0], val=[1.0], test=[1.0])
    check_fit(own, fl.Client(id=0, data=data))
    assert own.materialise(data.train).inputs[0].tolist() == [[1.0] * 3, [2.0] * 3]
