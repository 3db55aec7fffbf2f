"""A deployed run that waits for nobody: SuperNodes that come in when they do, one of them slow, one killed while it trains."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from fault_deployment import MARKS, PLANTED, Deployment

from sparsekit_fl.deployment.plan import Plan

pytestmark = MARKS

NODES = {"fast": "0,1", "other": "2,3", "slow": "4", "killed": "5"}
ROUNDS = 7


class Seen:
    before: list[dict[str, Any]]
    result: dict[str, Any]
    rounds: list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    folder = tmp_path_factory.mktemp("asynchronous")
    out = folder / "run"
    options = {"rounds": ROUNDS, "eval_every": ROUNDS, "cohort": 6, "async_buffer": 2, "nodes": len(NODES)}
    plan = Plan(**PLANTED, **options, out=str(out))
    found = Seen()
    with Deployment(folder) as deployment:
        deployment.plant("hold-4-1", "hold-5-1")
        deployment.start_superlink()
        for name, clients in NODES.items():
            deployment.start_node(name, clients)
        deployment.submit(plan)
        deployment.event("began-5-1")
        deployment.kill("killed")
        deployment.event("began-4-1")
        # The slow one is still at its first task, and Flower has not yet noticed that the other is gone.
        found.before = deployment.await_rounds(out, 3)
        assert not (deployment.events / "done-4-1").exists()
        deployment.lift("hold-4-1")
        found.result = deployment.await_result(out)
        found.rounds = deployment.records(out)
    return found


def _came(record: dict[str, Any]) -> list[tuple[int, int]]:
    note = next(note for note in record["notes"] if "came in" in note)
    return [(int(client), int(age)) for client, age in re.findall(r"(\d+) \((\d+)\)", note)]


def test_a_slow_supernode_holds_up_nobody_and_comes_in_with_its_age(seen: Seen) -> None:
    early = {client for record in seen.before for client, _ in _came(record)}
    assert early <= {0, 1, 2, 3}
    assert all(len(_came(record)) == 2 for record in seen.rounds)
    ages = [age for record in seen.rounds for client, age in _came(record) if client == 4]
    assert ages[0] >= 3


def test_a_killed_supernode_holds_up_nobody_and_its_client_is_dropped(seen: Seen) -> None:
    assert len(seen.rounds) == ROUNDS
    assert all(client != 5 for record in seen.rounds for client, _ in _came(record))
    told = "; ".join([*(one["reason"] for one in seen.rounds[-1]["dropped"]), *seen.rounds[-1]["notes"]])
    everywhere = "; ".join(note for record in seen.rounds for note in record["notes"])
    dropped = [one["client"] for record in seen.rounds for one in record["dropped"]]
    # Flower notices after a minute at most; a fast run has ended by then, and says that it was under way.
    assert dropped == [5] or "whose work does not count" in everywhere
    assert "client 5 was not scored" in told
    assert {one["id"] for one in seen.result["final"]["per_client"]} == {0, 1, 2, 3, 4}
