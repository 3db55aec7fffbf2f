"""One deployed run over TLS in which everything dies once: three known SuperNodes, four rounds, the bits of one process.

Round 1 is whole. In round 2, the SuperLink is killed; the run is submitted again, and the round is repeated: now the process of
a client is killed while it trains, and a SuperNode. In round 3 that SuperNode is missing; before it ends, it is back with its
folder. Round 4 is whole again. A fourth SuperNode, whose key nobody registered, asks in vain all the time.
"""

import os
import signal
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from fault_deployment import MARKS, PLANTED, Deployment, embedded, until

from sparsekit_fl.cli.flower_app import AppOptions

pytestmark = MARKS

NODES = {"healthy": "0,1", "crashing": "2,3", "killed": "4,5"}


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("storm")
    out = folder / "run"
    options = AppOptions(**PLANTED, rounds=4, cohort=6, eval_every=4, out=out, nodes=len(NODES), min_replies=1)
    with Deployment(folder, keys=len(NODES)) as deployment, pytest.MonkeyPatch.context() as patch:
        deployment.plant("hold-0-2")
        deployment.start_superlink()
        for key, (name, clients) in enumerate(NODES.items()):
            deployment.register(key)
            deployment.start_node(name, clients, key=key)
        deployment.start_node("stranger", "0-5")
        deployment.submit(options)
        deployment.event("began-0-2")
        until(lambda: "2001" in deployment.log("stranger"), "the stranger is refused")
        for spot in ("2-2", "3-2", "4-2", "5-2"):  # nothing of this node holds the round up
            deployment.event(f"done-{spot}")
        deployment.kill("superlink")
        for path in deployment.events.glob("*-2"):  # the hold among them
            path.unlink()
        deployment.plant("hold-2-2", "hold-4-2", "hold-0-3")
        deployment.start_superlink()
        deployment.submit(options.replaced(resume=True))
        os.kill(int(deployment.event("began-2-2")), signal.SIGKILL)
        deployment.event("began-4-2")
        deployment.kill("killed")
        # Flower notices after 60 to 70 seconds that a process is gone.
        deployment.event("began-0-3")
        deployment.start_node("killed", NODES["killed"], key=2)
        until(lambda: "Node ID" in deployment.log("killed"), "the SuperNode that was killed is known again")
        deployment.lift("hold-0-3")
        result, records = deployment.await_result(out), deployment.records(out)
        counts = {path.name: path.read_text() for path in deployment.events.glob("done-*")}
        fallen = tuple(f"raise-{spot}" for spot in ("2-2", "3-2", "4-2", "5-2", "4-3", "5-3"))
        calm = embedded(options, folder / "calm", patch, clients=6, faults=fallen)
    return SimpleNamespace(result=result, records=records, counts=counts, calm=calm)


def _reason(storm: SimpleNamespace, round: int, client_id: int) -> str:
    (found,) = [reason for id, reason in storm.records[round - 1]["dropped"] if id == client_id]
    return str(found)


def _notes(storm: SimpleNamespace, round: int) -> str:
    return "; ".join(storm.records[round - 1].get("notes", []))


def test_clients_whose_process_was_killed_are_dropped_and_take_part_in_the_next_round(storm: SimpleNamespace) -> None:
    for client_id in (2, 3):
        assert "Flower's error" in _reason(storm, 2, client_id)
        assert str(client_id) in storm.records[2]["ratios"]


def test_the_clients_of_a_killed_supernode_are_dropped_until_it_is_back(storm: SimpleNamespace) -> None:
    for client_id in (4, 5):
        assert "Flower's error" in _reason(storm, 2, client_id)
        assert f"no SuperNode has client {client_id} now" in _reason(storm, 3, client_id)
    assert "is gone, with the clients [4, 5]" in _notes(storm, 3)


def test_a_supernode_that_is_back_goes_on_from_its_memories(storm: SimpleNamespace) -> None:
    assert "came, with the clients [4, 5]" in _notes(storm, 4)
    # Round 1 counted; round 2 was cut off, round 3 missed.
    assert storm.counts["done-4-4"] == storm.counts["done-5-4"] == "2"


@pytest.mark.same_bits
def test_after_all_that_the_model_is_what_the_updates_that_counted_make_of_it(storm: SimpleNamespace) -> None:
    assert storm.result["final"]["state_sha256"] == storm.calm.final.state_sha256
    assert len(storm.result["final"]["per_client"]) == 6
    assert [len(record["ratios"]) for record in storm.records] == [6, 2, 4, 6]
