import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.problem.data import TensorData, read


def pool(rows=6):
    return TensorData((torch.arange(rows * 2).reshape(rows, 2),), torch.arange(rows))


class Pairs(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


@pytest.mark.parametrize("positions", [[1, 2], np.array([1, 2]), torch.tensor([1, 2]), slice(1, 3)])
def test_positions_may_be_a_list_an_array_a_tensor_or_a_slice(positions):
    assert pool().batch(positions)[1].tolist() == [1, 2]
    assert pool().take([5, 4, 3]).batch(positions)[1].tolist() == [4, 3]


def test_the_transform_runs_when_a_batch_is_read_and_once_when_materialised():
    calls = []

    def double(rows):
        calls.append(len(rows))
        return rows * 2.0

    view = TensorData(pool().inputs, pool().targets, torch.tensor([1, 3]), double)
    ready = view.materialise()
    assert ready.transform is None
    assert ready.index is None
    assert ready.batch([1])[0][0].tolist() == [[12.0, 14.0]]
    assert calls == [2]


def test_a_map_style_data_set_is_stacked():
    inputs, targets = read(Pairs([(np.ones(3), 1), (np.zeros(3), 0)]), [1, 0])
    assert inputs[0].dtype == torch.get_default_dtype()
    assert targets.tolist() == [0, 1]
    assert targets.dtype == torch.int64


def test_parts_of_data_sets_of_tensors_share_them():
    part = Subset(Subset(TensorDataset(*pool().inputs, pool().targets), [5, 3, 1]), [2, 0])
    data = fl.ClientData(part, None, part)
    assert isinstance(data.train, TensorData)
    assert data.train.labels().tolist() == [1, 5]


def test_a_full_device_has_the_figures_of_the_paper_and_speed_follows_the_ratio_unless_it_is_given():
    full = fl.Capability()
    assert full.flops_per_second == 727e9
    assert full.uplink_bytes_per_second == 14 * 2**20
    assert full.downlink_bytes_per_second == 110.6 * 2**20
    assert fl.Capability(ratio=0.25).flops_per_second == 727e9 / 4
    assert fl.Capability(ratio=0.25, flops_per_second=1e9).flops_per_second == 1e9
    assert fl.Capability(ratio=0.5, flops_per_second=1e9).at(0.25).flops_per_second == 0.5e9


def test_validation_data_may_lack():
    assert len(fl.ClientData(pool(), [], pool()).val) == len(fl.ClientData(pool(), None, pool()).val) == 0


@pytest.mark.parametrize(
    ("make", "given", "message"),
    [
        (TensorData, [(torch.zeros(3, 1),), torch.zeros(2)], r"one row per example, got \[\(3, 1\), \(2,\)\]"),
        (TensorData, [(torch.zeros(3),), torch.zeros(3), torch.tensor([3])], r"\[0, 3\)"),
        (TensorData, [(torch.zeros(3),), torch.zeros(3), torch.tensor([0.0])], "int64"),
        (TensorData, [([1, 2],), torch.zeros(2)], "must be tensors"),
        (read, [Pairs([{"x": 1}]), [0]], "input, …, target"),
        (read, [Pairs([(object(), 1)]), [0]], "tensors, arrays or numbers"),
        (read, [Pairs([(torch.zeros(2), 1), (torch.zeros(3), 1)]), [0, 1]], "of one shape: .*stack expects"),
        (fl.ClientData, [TensorDataset(torch.zeros(2)), pool(), pool()], "inputs and targets must be tensors"),
        (fl.Capability, [0], "ratio"),
        (fl.Capability, [1.5], "ratio"),
        (fl.Capability, [float("nan")], "ratio"),
        (fl.Capability, [1.0, 1e9, -1], "uplink_bytes_per_second"),
        (fl.ClientData, [pool(), pool(), iter([1])], "test must be"),
        (fl.Client, [7, fl.ClientData([], pool(), pool())], "^train of client 7 is empty"),
        (fl.Client, [7, fl.ClientData(pool(), pool(), [])], "^test of client 7 is empty"),
        (fl.Client, [3, (pool(),) * 3], r"data of client 3 must be ClientData\(train=…, val=…, test=…\), got tuple"),
    ],
)
def test_impossible_data_and_devices_are_refused_with_the_reason(make, given, message):
    with pytest.raises((DataError, InvalidValueError), match=message):
        make(*given)
