from __future__ import annotations

import pytest
import torch

from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.problem.clients import Capability, Client, ClientData
from sparsekit_fl.problem.data import TensorData

SPLIT = TensorData((torch.zeros(2, 1),), torch.zeros(2, dtype=torch.int64))


def test_a_full_device_has_the_figures_of_the_paper() -> None:
    full = Capability()
    assert full.flops_per_second == 727e9
    assert full.uplink_bytes_per_second == 14 * 2**20
    assert full.downlink_bytes_per_second == 110.6 * 2**20


def test_speed_follows_the_ratio_unless_it_is_given() -> None:
    assert Capability(ratio=0.25).flops_per_second == 727e9 / 4
    assert Capability(ratio=0.25, flops_per_second=1e9).flops_per_second == 1e9
    assert Capability(ratio=0.5, flops_per_second=1e9).at(0.25).flops_per_second == 0.5e9


@pytest.mark.parametrize("wrong", [{"ratio": 0}, {"ratio": 1.5}, {"ratio": float("nan")}, {"uplink_bytes_per_second": -1}])
def test_impossible_devices_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidValueError, match=next(iter(wrong))):
        Capability(**wrong)


def test_an_empty_split_is_refused_but_for_validation_data() -> None:
    for empty in ("train", "test"):
        with pytest.raises(DataError, match=f"^{empty} of client 7 is empty"):
            Client(id=7, data=ClientData(**{"train": SPLIT, "val": SPLIT, "test": SPLIT, empty: []}))
    assert len(ClientData(train=SPLIT, val=[], test=SPLIT).val) == len(ClientData(train=SPLIT, val=None, test=SPLIT).val) == 0
    with pytest.raises(DataError, match="test must be"):
        ClientData(train=SPLIT, val=SPLIT, test=iter([1]))


def test_data_that_are_no_client_data_are_told_apart_by_the_client() -> None:
    with pytest.raises(InvalidValueError, match=r"data of client 3 must be ClientData\(train=…, val=…, test=…\), got tuple"):
        Client(id=3, data=(SPLIT, SPLIT, SPLIT))  # type: ignore[arg-type]
