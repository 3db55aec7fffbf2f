from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.problem.clients import Capability, Client, ClientData
from sparsekit_fl.problem.data import TensorData

SPLIT = TensorData((torch.zeros(2, 1),), torch.zeros(2, dtype=torch.int64))


def test_a_full_device_has_the_figures_of_the_paper_and_speed_follows_the_ratio_unless_it_is_given() -> None:
    full = Capability()
    assert full.flops_per_second == 727e9
    assert full.uplink_bytes_per_second == 14 * 2**20
    assert full.downlink_bytes_per_second == 110.6 * 2**20
    assert Capability(ratio=0.25).flops_per_second == 727e9 / 4
    assert Capability(ratio=0.25, flops_per_second=1e9).flops_per_second == 1e9
    assert Capability(ratio=0.5, flops_per_second=1e9).at(0.25).flops_per_second == 0.5e9


@pytest.mark.parametrize(
    ("make", "given", "error", "message"),
    [
        (Capability, {"ratio": 0}, InvalidValueError, "ratio"),
        (Capability, {"ratio": 1.5}, InvalidValueError, "ratio"),
        (Capability, {"ratio": float("nan")}, InvalidValueError, "ratio"),
        (Capability, {"uplink_bytes_per_second": -1}, InvalidValueError, "uplink_bytes_per_second"),
        (ClientData, {"train": SPLIT, "val": SPLIT, "test": iter([1])}, DataError, "test must be"),
        (Client, {"id": 7, "data": ClientData([], SPLIT, SPLIT)}, DataError, "^train of client 7 is empty"),
        (Client, {"id": 7, "data": ClientData(SPLIT, SPLIT, [])}, DataError, "^test of client 7 is empty"),
        (
            Client,
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
    assert len(ClientData(SPLIT, [], SPLIT).val) == len(ClientData(SPLIT, None, SPLIT).val) == 0
