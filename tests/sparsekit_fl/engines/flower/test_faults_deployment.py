"""One deployed run in which much goes wrong at once: five SuperNodes, four rounds, and the same bits as without processes.

Round 1 is whole. In round 2 a client raises, the process of another is killed while it trains, a SuperNode is killed, and a
client answers after the deadline. In round 3 the killed SuperNode is missing; before it ends, that SuperNode is back with its
folder, another device has lost its folder, and a further SuperNode claims a client that is taken. Round 4 is whole again.
Every reply comes twice, in every round.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from fault_deployment import MARKS, PLANTED, Deployment, embedded, until

from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.results.records import RunResult

pytestmark = MARKS

NODES = {"healthy": "0,1", "crashing": "2,3", "killed": "4,5", "late": "6,7"}
# Flower notices after 60 to 70 seconds that a process is gone, and that is to be seen as well.
LEAST_SECONDS = 90.0
# A round takes about twice as long as the SuperLink takes to start; in the deadline, no healthy client may fail.
STARTS = 15


class Storm:
    records: list[dict[str, Any]]
    result: dict[str, Any]
    calm: RunResult
    killed_pid: int
    counts: dict[str, str]
    deadline_seconds: float


def _remove(folder: Path) -> None:
    """Remove a folder into which a device may still be writing what it has just learnt."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    raise AssertionError(f"{folder} is still written to")


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Storm:
    folder = tmp_path_factory.mktemp("storm")
    out = folder / "run"
    plan = {**PLANTED, "rounds": 4, "cohort": 8, "eval_every": 4, "out": str(out), "nodes": len(NODES), "min_replies": 1}
    seen = Storm()
    with Deployment(folder) as deployment, pytest.MonkeyPatch.context() as patch:
        deployment.plant("raise-1-2", "hold-2-2", "hold-4-2", "hold-6-2", "hold-0-3")
        deployment.start_superlink()
        for name, clients in NODES.items():
            deployment.start_node(name, clients)
        seen.deadline_seconds = round(max(LEAST_SECONDS, STARTS * deployment.start_seconds), 1)
        deployment.submit(Plan(**plan, timeout_seconds=seen.deadline_seconds))
        seen.killed_pid = int(deployment.event("began-2-2"))
        os.kill(seen.killed_pid, signal.SIGKILL)
        deployment.event("began-4-2")
        deployment.kill("killed")
        deployment.event("began-6-2")
        deployment.await_rounds(out, 2)
        # Only now, after the round has ended without it, does the late client go on.
        deployment.lift("hold-6-2")
        deployment.event("done-6-2")
        deployment.event("began-0-3")
        for client_id in (6, 7):
            deployment.event(f"done-{client_id}-3")
        _remove(deployment.state("late"))
        for name, clients in (("killed", "4,5"), ("claiming", "0")):
            deployment.start_node(name, clients)
        for name in ("killed", "claiming"):
            until(lambda name=name: "Node ID" in deployment.log(name), f"the SuperNode {name!r} is known")  # type: ignore[misc]
        deployment.lift("hold-0-3")
        seen.result = deployment.await_result(out)
        seen.records = deployment.records(out)
        seen.counts = {path.name: path.read_text() for path in deployment.events.glob("done-*")}
        fallen = [f"raise-{client_id}-2" for client_id in range(1, 8)] + ["raise-4-3", "raise-5-3"]
        seen.calm = embedded(Plan(**plan), folder / "calm", patch, clients=8, faults=tuple(fallen))
    return seen


def _reason(storm: Storm, round: int, client_id: int) -> str:
    (found,) = [one["reason"] for one in storm.records[round - 1]["dropped"] if one["client"] == client_id]
    return str(found)


def _notes(storm: Storm, round: int) -> str:
    return "; ".join(storm.records[round - 1].get("notes", []))


def test_a_run_without_faults_drops_nobody(storm: Storm) -> None:
    assert storm.records[0]["dropped"] == storm.records[3]["dropped"] == []
    assert sorted(storm.records[0]["cohort"]) == list(range(8))


def test_a_client_that_raises_is_dropped_with_its_reason(storm: Storm) -> None:
    assert "ArithmeticError: planted in 1-2" in _reason(storm, 2, 1)
    assert "local policy" in _reason(storm, 2, 1)
    assert "0" in storm.records[1]["ratios"]


def test_clients_whose_process_was_killed_are_dropped_and_take_part_in_the_next_round(storm: Storm) -> None:
    for client_id in (2, 3):
        assert "Flower's error" in _reason(storm, 2, client_id)
        assert str(client_id) in storm.records[2]["ratios"]


def test_the_clients_of_a_killed_supernode_are_dropped_until_it_is_back(storm: Storm) -> None:
    for client_id in (4, 5):
        assert "Flower's error" in _reason(storm, 2, client_id)
        assert f"no SuperNode has client {client_id} now" in _reason(storm, 3, client_id)
    assert "is gone, with the clients [4, 5]" in _notes(storm, 3)


def test_a_supernode_that_is_back_goes_on_from_its_memories(storm: Storm) -> None:
    assert "came, with the clients [4, 5]" in _notes(storm, 4)
    # Round 1 counted; round 2 was cut off, round 3 missed.
    assert storm.counts["done-4-4"] == storm.counts["done-5-4"] == "2"


def test_clients_whose_memory_was_lost_start_afresh_and_the_record_says_so(storm: Storm) -> None:
    for client_id in (6, 7):
        assert storm.counts[f"done-{client_id}-4"] == "1"
        assert f"the memory of client {client_id} of round 3 cannot be read" in _notes(storm, 4)
    assert "it started afresh" in _notes(storm, 4)


def test_a_reply_after_the_deadline_does_not_count(storm: Storm) -> None:
    for client_id in (6, 7):
        assert f"no reply within {storm.deadline_seconds:g} seconds" in _reason(storm, 2, client_id)
        assert str(client_id) in storm.records[2]["ratios"]
    # Its memory of the round that did not count is not looked at either: rounds 1 and 3.
    assert storm.counts["done-6-2"] == storm.counts["done-6-3"] == "2"


def test_a_claimed_client_stays_with_the_supernode_that_was_first(storm: Storm) -> None:
    assert "is not used for now: it claims the clients [0], which another node has" in _notes(storm, 4)
    assert storm.counts["done-0-4"] == "4"


def test_replies_that_come_twice_count_once(storm: Storm) -> None:
    assert [len(record["ratios"]) for record in storm.records] == [8, 1, 6, 8]


@pytest.mark.same_bits
def test_after_all_that_the_model_is_what_the_updates_that_counted_make_of_it(storm: Storm) -> None:
    assert storm.result["final"]["state_sha256"] == storm.calm.final.state_sha256
    assert len(storm.result["final"]["per_client"]) == 8
