"""What comes over Flower's wire: whatever it is, it is read or refused, never unpickled, and never more."""

import json
import pickle

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from local_grid import over_the_wire

from sparsekit.errors import DataError
from sparsekit_fl.engines.flower.wire import MAX_HEADER_BYTES, read

pytestmark = pytest.mark.flower


def message(record):
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    return Message(record, 7, "train")


def raw(text, stype="sparsekit.raw", data=b"abc"):
    array = Array(dtype="uint8", shape=(len(data),), stype=stype, data=data)
    return RecordDict({"header": ConfigRecord({"json": text}), "payloads": ArrayRecord({"0/body": array})})


BAD = {
    "no records": RecordDict(),
    "no payloads": RecordDict({"header": ConfigRecord({"json": "{}"})}),
    "no header": RecordDict({"payloads": ArrayRecord()}),
    "records swapped": RecordDict({"header": ArrayRecord(), "payloads": ConfigRecord({"json": "{}"})}),
    "a number for a header": RecordDict({"header": ConfigRecord({"json": 3}), "payloads": ArrayRecord()}),
    "bytes for a header": RecordDict({"header": ConfigRecord({"json": b"{}"}), "payloads": ArrayRecord()}),
    "a list for a header": raw("[]"),
    "half a header": raw('{"a":'),
    "a header nested without end": raw("[" * 10**6),
    "a header that is too long": raw(json.dumps({"a": "x" * MAX_HEADER_BYTES})),
    "numpy's own format, which may hold a pickle": raw("{}", stype="numpy.ndarray", data=pickle.dumps([1])),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_message_of_ours_is_refused(name, monkeypatch):
    def never(*_, **__):
        raise AssertionError("something was unpickled")

    for function in ("load", "loads"):
        monkeypatch.setattr(pickle, function, never)
    with pytest.raises(DataError):
        read(over_the_wire(message(BAD[name])))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    header=st.one_of(JSON.map(json.dumps), st.text(max_size=40)),
    stype=st.sampled_from(["sparsekit.raw", "numpy.ndarray", ""]),
    data=st.binary(max_size=50),
)
def test_any_header_and_payload_is_read_as_it_is_or_refused(header, stype, data):
    try:
        found, payloads = read(over_the_wire(message(raw(header, stype, data))), max_bytes=40)
    except DataError:
        return
    assert isinstance(found, dict)
    assert payloads == {"0/body": data}
    assert len(data) <= 40
