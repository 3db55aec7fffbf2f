"""Devices: which SuperNode has which client, and the capabilities it reports."""

import json
import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from flwr.app import Message
from flwr.clientapp import ClientApp
from local_grid import LocalGrid, StillClock, over_the_wire

import sparsekit_fl as fl
from sparsekit.errors import DataError
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.flower.engine import GridEngine, content, describe_clients, identity_of, read_clients
from sparsekit_fl.problem.data import Capability, Client, ClientData
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import tiny_config, tiny_problem

SPEC = RunSpec.build(fl.Method(), tiny_problem(), tiny_config())
OURS = identity_of(SPEC)


ROSTER = [
    Client(id=3 * place, data=ClientData(train=range(100 + place), val=range(7), test=range(8)),
           capability=Capability(ratio=1 / (1 + place), uplink_bytes_per_second=1e6 / 3))
    for place in range(3)
]  # fmt: skip


def _saying(*identities, **more):
    """Devices that have the roster, and say that they are of these versions and models."""
    app = ClientApp()

    @app.query()
    def introduce(message, context):
        return Message(content(describe_clients(ROSTER, identities[context.node_id - 1000])), reply_to=message)

    return LocalGrid(app, nodes=len(identities), **more)


def test_a_device_says_how_many_examples_and_which_capability_each_of_its_clients_has():
    clients = GridEngine(_saying(OURS)).introduce(SPEC)
    for own, known in zip(ROSTER, clients.values(), strict=True):
        assert (known.id, known.capability) == (own.id, own.capability)
        assert [len(known.data.train), len(known.data.val), len(known.data.test)] == [len(own.data.train), 7, 8]


def test_a_device_that_says_nothing_is_waited_for_once_and_the_others_are_used(monkeypatch, caplog):
    clock = StillClock()
    monkeypatch.setattr("sparsekit_fl.flower.engine.time", clock)
    grid = _saying(OURS, OURS, fault=lambda message, reply: reply if message.metadata.dst_node_id == 1000 else None)
    engine = GridEngine(grid, nodes=2)
    assert len(engine.introduce(SPEC)) == len(ROSTER)
    assert 300.0 <= clock.now < 301.0
    assert engine.workers == 1
    assert "SuperNode 1001 is not used: no reply within 300 seconds" in caplog.text


def test_too_few_devices_are_waited_for_no_longer_than_was_said(monkeypatch):
    monkeypatch.setattr("sparsekit_fl.flower.engine.time", StillClock())
    with pytest.raises(WorkerDiedError, match="1 of 2 SuperNodes came within 5 seconds"):
        GridEngine(_saying(OURS), nodes=2, wait_seconds=5).introduce(SPEC)


ROW = [4, 3, 1, 1, 1.0, 1.0, 1.0, 1.0]


def _with(column, value):
    return [[3, *ROW[1:]], [*ROW[:column], value, *ROW[column + 1 :]]]


ROWS = [[], None, [3, 4], [ROW[:3]], _with(0, 3), _with(0, -1), _with(1, 0), _with(1, 2**50), _with(4, 2.0), _with(6, math.nan)]
BYTES = [b"", b"\xff\x00", b"[" * 10**5, b"[]"]


@pytest.mark.parametrize("payload", [*(json.dumps({"identity": OURS, "clients": rows}).encode() for rows in ROWS), *BYTES])
def test_a_malformed_introduction_is_refused(payload):
    LocalGrid(ClientApp())  # what Flower asks of a process that makes a message
    with pytest.raises(DataError, match="badly"):
        read_clients(over_the_wire(Message(content(payload), 1, "query")), OURS)


def test_a_node_whose_version_or_model_or_frozen_weights_differ_is_not_used_and_the_error_says_why():
    """Frozen values never travel, so a device with other ones would train another model unnoticed."""
    frozen = replace(SPEC, frozen=frozenset(list(SPEC.initial)[:1]))
    name = next(iter(frozen.frozen))
    nudged = frozen.initial[name].clone()
    nudged.view(-1)[0] = torch.nextafter(nudged.view(-1)[0], torch.tensor(9.0))
    other = replace(frozen, initial={**frozen.initial, name: nudged})
    identities = [identity_of(frozen), identity_of(other), identity_of(SPEC), OURS.replace("sparsekit ", "sparsekit 0.")]
    assert len(set(identities)) == 4
    for theirs in identities[1:]:
        with pytest.raises(WorkerDiedError, match=r"no SuperNode can be used.*it has sparsekit .*, and the server has"):
            GridEngine(_saying(theirs)).introduce(frozen)
