"""What comes over Flower's wire: whatever it is, it is read or refused, never unpickled, and never more."""

import pickle
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st
from local_grid import over_the_wire

from sparsekit.errors import DataError
from sparsekit_fl.flower.engine import content, read, run_of

pytestmark = pytest.mark.flower


def message(record: RecordDict) -> Message:
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    return Message(record, 7, "train")


def raw(sizes: Any, stype: str = "sparsekit.raw", data: bytes = b"abc") -> RecordDict:
    array = Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)
    return RecordDict({"about": ConfigRecord({"sizes": sizes}), "body": ArrayRecord({"body": array})})


BAD = {
    "no records": RecordDict(),
    "no body": RecordDict({"about": ConfigRecord({"sizes": [0]})}),
    "an empty body": RecordDict({"about": ConfigRecord({"sizes": [0]}), "body": ArrayRecord()}),
    "no sizes": RecordDict({"about": ConfigRecord(), "body": raw([3])["body"]}),
    "records swapped": RecordDict({"about": ArrayRecord(), "body": ConfigRecord({"sizes": [3]})}),
    "a number for sizes": raw(3),
    "a text for sizes": raw("3"),
    "texts for sizes": raw(["3"]),
    "a negative size": raw([-1, 4]),
    "too short a body": raw([4]),
    "too long a body": raw([2]),
    "numpy's own format, which may hold a pickle": raw([3], stype="numpy.ndarray", data=pickle.dumps([1])),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_message_of_ours_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for function in ("load", "loads"):
        monkeypatch.setattr(pickle, function, never)
    with pytest.raises(DataError):
        read(over_the_wire(message(BAD[name])))


@given(st.lists(st.binary(max_size=20), max_size=5), st.text(alphabet="0123456789abcdef", max_size=16))
def test_payloads_come_back_as_they_were(parts: list[bytes], run: str) -> None:
    received = over_the_wire(message(content(*parts, run=run)))
    assert (read(received), read(received, len(parts)), run_of(received)) == (parts, parts, run)
    with pytest.raises(DataError, match="expected"):
        read(received, len(parts) + 1)
