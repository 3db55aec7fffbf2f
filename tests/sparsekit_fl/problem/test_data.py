"""Data of clients and their devices, and the partitions that deal them."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from personal import Read, chain
from torch.utils.data import Subset, TensorDataset

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError
from sparsekit_fl.client.fit import Examples
from sparsekit_fl.problem.data import TensorData, read
from sparsekit_fl.problem.partition import dirichlet, natural, pathological


def pool(rows=6):
    return TensorData((torch.arange(rows * 2).reshape(rows, 2),), torch.arange(rows))


@pytest.mark.parametrize("positions", [[1, 2], np.array([1, 2]), torch.tensor([1, 2]), slice(1, 3)])
def test_positions_may_be_a_list_an_array_a_tensor_or_a_slice(positions):
    assert pool().batch(positions)[1].tolist() == [1, 2]
    assert pool().take([5, 4, 3]).batch(positions)[1].tolist() == [4, 3]


def test_the_transform_runs_when_a_batch_is_read_and_once_for_the_batches_of_a_client():
    calls = []

    def double(rows):
        calls.append(len(rows))
        return rows * 2.0

    view = TensorData(pool().inputs, pool().targets, torch.tensor([1, 3]), double)
    assert view.batch([1])[0][0].tolist() == [[12.0, 14.0]]
    assert calls.pop() == 1
    ready = Examples(chain(2, 3), view, device="cpu")
    assert [batch.inputs[0].tolist() for _ in range(2) for batch in ready.batches(None, [(1, 2)])] == [[[12.0, 14.0]]] * 2
    assert calls == [2]


def test_a_map_style_data_set_is_stacked():
    inputs, targets = read(Read([(np.ones(3), 1), (np.zeros(3), 0)]), [1, 0])
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
        (read, [Read([{"x": 1}]), [0]], "input, …, target"),
        (read, [Read([(object(), 1)]), [0]], "tensors, arrays or numbers"),
        (read, [Read([(torch.zeros(2), 1), (torch.zeros(3), 1)]), [0, 1]], "of one shape: .*stack expects"),
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


def pictures(per_class=45, classes=5, tests=12):
    """Shuffled labels, so that "consecutive" must mean "of one class, in order"."""
    rng = np.random.default_rng(3)

    def pool(count):
        labels = torch.from_numpy(rng.permutation(np.repeat(np.arange(classes), count)))
        return fl.TensorData((torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8),), labels)

    return fl.DataSource(
        name="own", kind="image", train=pool(per_class), test=pool(tests), classes=classes, mean=(0.0,), std=(1.0,)
    )


def texts(sizes=(10, 40, 5, 40, 20)):
    owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    tokens = torch.arange(len(owners), dtype=torch.int32)[:, None]
    return fl.DataSource(
        name="talk", kind="tokens", train=fl.TensorData((tokens,), tokens.long()), test=None, classes=len(owners),
        owners=owners,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("deal", "source"), [(dirichlet, pictures()), (partial(pathological, images_per_class=10), pictures()), (natural, texts())]
)
def test_every_client_gets_examples_of_its_own(deal, source):
    splits, again = (deal(source, clients=4, rng=np.random.default_rng(7)) for _ in range(2))
    assert len(splits) == 4
    taken = []
    for client, same in zip(splits, again, strict=True):
        assert min(len(client.train), len(client.val), len(client.test)) > 0
        assert all(torch.equal(getattr(client, s).index, getattr(same, s).index) for s in ("train", "val", "test"))
        assert client.train.inputs[0].data_ptr() == source.train.inputs[0].data_ptr()
        own = [*client.train.index.tolist(), *client.val.index.tolist()]
        taken += own
        if client.test.targets is client.train.targets:
            assert not set(own) & set(client.test.index.tolist())
    assert len(taken) == len(set(taken)), "no two clients train on one example"


def test_each_client_has_consecutive_examples_of_its_number_of_classes_and_a_tenth_to_validate():
    source = pictures()
    members = {c: torch.nonzero(source.train.targets == c).flatten().tolist() for c in range(5)}
    for hand in pathological(source, clients=10, rng=np.random.default_rng(0), images_per_class=10):
        classes = hand.train.labels().unique().tolist()
        assert len(classes) == 2
        for split, count in ((hand.train, 9), (hand.val, 1), (hand.test, 10)):
            assert split.labels().bincount(minlength=5)[classes].tolist() == [count, count]
        for c in classes:
            rows = [row for split in (hand.train, hand.val) for row in split.index.tolist() if source.train.targets[row] == c]
            start = members[c].index(min(rows))
            assert start % 10 == 0
            assert sorted(rows) == sorted(members[c][start : start + 10])


def test_shards_shrink_with_a_warning(caplog):
    splits = pathological(pictures(), clients=20, rng=np.random.default_rng(0), images_per_class=10)
    assert {len(hand.train) + len(hand.val) for hand in splits} == {10}
    assert "shards of 5 are used" in caplog.text
    with pytest.raises(DataError, match="larger data set"):
        pathological(pictures(), clients=500, rng=np.random.default_rng(0), images_per_class=10)


def test_natural_takes_the_largest_owners_and_splits_by_position():
    source = texts()
    splits = natural(source, clients=3, rng=np.random.default_rng(0))
    owners = [source.owners[hand.train.index].unique().tolist() for hand in splits]
    assert owners == [[1], [3], [4]]
    first = splits[0]
    assert [split.index.tolist() for split in (first.train, first.val, first.test)] == [
        list(range(10, 42)), list(range(42, 46)), list(range(46, 50)),
    ]  # fmt: skip


@pytest.mark.parametrize("deal", [pathological, dirichlet])
def test_partitions_by_class_refuse_examples_without_classes_and_say_what_does(deal):
    numbers = fl.TensorData((torch.zeros(40, 3),), torch.linspace(0, 1, 40))
    for source in (fl.DataSource(name="prices", train=numbers, test=numbers), texts()):
        with pytest.raises(DataError, match=r"needs one class label per example .* or a function of your own"):
            deal(source, clients=2, rng=np.random.default_rng(0))


@given(classes=st.integers(2, 12), per_client=st.integers(1, 5), images=st.integers(2, 20), data=st.data())
def test_a_client_lacks_the_classes_asked_for_and_keeps_its_number_of_examples(classes, per_client, images, data):
    lack = data.draw(st.integers(0, classes - 1))
    given = {"classes_per_client": per_client, "images_per_class": images, "lack_classes": lack}
    source, owned = pictures(per_class=120, classes=classes), classes - lack
    for hand in pathological(source, clients=2, rng=np.random.default_rng(0), **given):
        examples = torch.cat([hand.train.labels(), hand.val.labels()])
        assert len(examples.unique()) == owned
        assert len(examples) == 2 * owned or per_client * images - owned < len(examples) <= per_client * images
