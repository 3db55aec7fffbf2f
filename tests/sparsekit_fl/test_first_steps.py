"""What new users of the federated layer met in their first hour."""

import logging
import math
from dataclasses import replace

import pytest
from personal import Read, tiny_run

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit_fl.testing import tiny_clients, tiny_problem


@pytest.mark.parametrize(
    ("bad", "lazy", "split"),
    [(math.nan, False, "train"), (math.inf, True, "train"), (math.nan, True, "val"), (math.inf, False, "test")],
)
def test_inputs_that_are_no_numbers_are_found_in_any_data_set(
    bad: float, lazy: bool, split: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = tiny_clients(2)
    getattr(first.data, split).inputs[0][5, 3] = bad
    if lazy:
        first = replace(first, data=fl.ClientData(*(Read(getattr(first.data, name)) for name in ("train", "val", "test"))))
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        tiny_run("fedlps" if lazy and split == "train" else "fedavg", clients=[first, other], rounds=3, cohort=2)
    assert f"inputs of client 0 hold NaN or infinity, in example 5 of {split} first" in caplog.text
    assert "learning rate" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if "continues without client 0" in record.getMessage()]
    assert len(lines) == (3 if split == "train" else 0)


@pytest.mark.parametrize("given", ["fedavg", fl.methods.fedavg])
def test_a_method_that_was_not_called_is_told_how_to_call_it(given: object) -> None:
    with pytest.raises(InvalidValueError, match=r"method must be a Method, got .*(?i:fedavg).*as in fl\.methods\.fedlps\(\)"):
        fl.run(given, tiny_problem(), [], fl.RunConfig(rounds=1, cohort=1))  # type: ignore[arg-type]
