"""The server's machine dies: the SuperLink is killed in a round, started again, and the run resumed to the same bits."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")


from fault_deployment import MARKS, PLANTED, Deployment, embedded

from sparsekit_fl.deployment.plan import Plan

pytestmark = MARKS


@pytest.mark.same_bits
def test_a_run_whose_superlink_was_killed_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    plan = {**PLANTED, "rounds": 2, "cohort": 4, "eval_every": 2, "out": str(out), "nodes": 2, "memory": "server"}
    with Deployment(tmp_path) as deployment:
        deployment.plant("hold-0-2")
        deployment.start_superlink()
        deployment.start_node("a", "0,1")
        deployment.start_node("b", "2,3")
        deployment.submit(Plan(**plan))
        deployment.event("began-0-2")
        deployment.kill("superlink")
        shutil.rmtree(deployment.state("b"), ignore_errors=True)
        deployment.lift("hold-0-2")
        deployment.start_superlink()
        deployment.submit(Plan(**plan, resume=True))
        result = deployment.await_result(out)
        counts = {path.name: path.read_text() for path in deployment.events.glob("done-*-2")}
    whole = embedded(Plan(**plan), tmp_path / "whole", monkeypatch, clients=4)
    assert result["final"]["state_sha256"] == whole.final.state_sha256
    assert result["final"]["personal"] == whole.final.to_dict()["personal"]
    assert [record["round"] for record in result["rounds"]] == [1, 2]
    assert all(record["dropped"] == [] for record in result["rounds"])
    assert list(counts.values()) == ["2"] * 4
