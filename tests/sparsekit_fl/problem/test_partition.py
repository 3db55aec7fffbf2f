from functools import partial

import numpy as np
import pytest
import torch
from data_contracts import check_partition
from hypothesis import given
from hypothesis import strategies as st

import sparsekit_fl as fl
from sparsekit.errors import DataError
from sparsekit_fl.problem.partition import dirichlet, natural, pathological


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
    check_partition(deal, source)


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
