"""What new users of the federated layer met in their first hour."""

import logging
import math

import pytest
import torch
from personal import Read
from torch import nn

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 2))


def _split(examples: int) -> fl.TensorData:
    x = torch.randn(examples, 20, generator=torch.Generator().manual_seed(examples))
    return fl.TensorData((x,), (x[:, 0] > 0).long())


@pytest.mark.parametrize(
    ("bad", "lazy", "split"),
    [(math.nan, False, "train"), (math.inf, True, "train"), (math.nan, True, "val"), (math.inf, False, "test")],
)
def test_inputs_that_are_no_numbers_are_found_in_any_data_set(
    bad: float, lazy: bool, split: str, caplog: pytest.LogCaptureFixture
) -> None:
    splits = {"train": _split(30), "val": _split(10), "test": _split(10)}
    splits[split].inputs[0][7, 3] = bad
    first = fl.ClientData(**{name: Read(data) if lazy else data for name, data in splits.items()})
    clients = [
        fl.Client(id=id, data=first if id == 0 else fl.ClientData(_split(30), _split(10), _split(10))) for id in range(2)
    ]
    problem = fl.Problem(model=_net, example_inputs=(torch.zeros(1, 20),))
    method = fl.methods.fedlps if lazy and split == "train" else fl.methods.fedavg
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        fl.run(method(), problem, clients, fl.RunConfig(rounds=3, cohort=2, seed=0))
    assert f"inputs of client 0 hold NaN or infinity, in example 7 of {split} first" in caplog.text
    assert "learning rate" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if "continues without client 0" in record.getMessage()]
    assert len(lines) == (3 if split == "train" else 0)


@pytest.mark.parametrize("given", ["fedavg", fl.methods.fedavg])
def test_a_method_that_was_not_called_is_told_how_to_call_it(given: object) -> None:
    problem = fl.Problem(model=_net, example_inputs=(torch.zeros(1, 20),))
    with pytest.raises(InvalidValueError, match=r"method must be a Method, got .*(?i:fedavg).*: fl\.methods\.fedavg\(\)"):
        fl.run(given, problem, [], fl.RunConfig(rounds=1, cohort=1))  # type: ignore[arg-type]
