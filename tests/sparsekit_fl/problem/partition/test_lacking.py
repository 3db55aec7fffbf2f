"""The paper's non-IID levels: every client lacks exactly x of the classes, and no fewer examples for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import sparsekit_fl as fl
from sparsekit_fl.problem.partition.pathological import lacking


@given(classes=st.integers(2, 200), per_client=st.integers(1, 20), images=st.integers(2, 200), data=st.data())
def test_a_client_keeps_its_number_of_examples(classes: int, per_client: int, images: int, data: st.DataObject) -> None:
    lack = data.draw(st.integers(0, classes - 1))
    found = lacking(lack, classes, {"classes_per_client": per_client, "images_per_class": images})
    owned, each = found["classes_per_client"], found["images_per_class"]
    assert owned == classes - lack
    assert each >= 2
    assert each == 2 or per_client * images - owned < owned * each <= per_client * images
    assert found["distinct"] is True


@pytest.mark.parametrize("lack", [0, 4, 8])
def test_clients_of_the_digits_lack_exactly_so_many_classes(lack: int) -> None:
    _, clients = fl.build_problem(fl.preset_for(), lack_classes=lack)
    for client in clients:
        assert len(set(client.data.train.labels().tolist())) == 10 - lack
        assert set(client.data.test.labels().tolist()) == set(client.data.train.labels().tolist())
        assert 38 <= len(client.data.train) + len(client.data.val) <= 50
