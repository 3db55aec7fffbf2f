from typing import Any

import pytest
import torch

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError

SPLIT = fl.TensorData((torch.zeros(2, 1),), torch.zeros(2, dtype=torch.int64))


def test_a_full_device_has_the_figures_of_the_paper_and_speed_follows_the_ratio_unless_it_is_given() -> None:
    full = fl.Capability()
    assert full.flops_per_second == 727e9
    assert full.uplink_bytes_per_second == 14 * 2**20
    assert full.downlink_bytes_per_second == 110.6 * 2**20
    assert fl.Capability(ratio=0.25).flops_per_second == 727e9 / 4
    assert fl.Capability(ratio=0.25, flops_per_second=1e9).flops_per_second == 1e9
    assert fl.Capability(ratio=0.5, flops_per_second=1e9).at(0.25).flops_per_second == 0.5e9


@pytest.mark.parametrize(
    ("make", "given", "error", "message"),
    [
        (fl.Capability, {"ratio": 0}, InvalidValueError, "ratio"),
        (fl.Capability, {"ratio": 1.5}, InvalidValueError, "ratio"),
        (fl.Capability, {"ratio": float("nan")}, InvalidValueError, "ratio"),
        (fl.Capability, {"uplink_bytes_per_second": -1}, InvalidValueError, "uplink_bytes_per_second"),
        (fl.ClientData, {"train": SPLIT, "val": SPLIT, "test": iter([1])}, DataError, "test must be"),
        (fl.Client, {"id": 7, "data": fl.ClientData([], SPLIT, SPLIT)}, DataError, "^train of client 7 is empty"),
        (fl.Client, {"id": 7, "data": fl.ClientData(SPLIT, SPLIT, [])}, DataError, "^test of client 7 is empty"),
        (
            fl.Client,
            {"id": 3, "data": (SPLIT, SPLIT, SPLIT)},
            InvalidValueError,
            r"data of client 3 must be ClientData\(train=…, val=…, test=…\), got tuple",
        ),
    ],
)
def test_impossible_devices_and_data_are_refused(make: Any, given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**given)


def test_validation_data_may_lack() -> None:
    assert len(fl.ClientData(SPLIT, [], SPLIT).val) == len(fl.ClientData(SPLIT, None, SPLIT).val) == 0
