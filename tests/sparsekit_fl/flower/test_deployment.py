"""Deployments as users get them: over TLS with known SuperNodes only, over the death of a SuperLink, and without waiting."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from fault_deployment import MARKS, PLANTED, TINY, Deployment, embedded, until
from personal import tiny_run

from sparsekit_fl.cli.experiment import Experiment
from sparsekit_fl.cli.flower_app import AppOptions
from sparsekit_fl.testing import tiny_clients

pytestmark = MARKS


@pytest.mark.same_bits
def test_encrypted_supernodes_with_known_keys_give_the_bits_of_the_embedded_engine_and_strangers_stay_out(
    tmp_path: Path,
) -> None:
    with Deployment(tmp_path, planted=False, tls=True) as deployment:
        deployment.start_superlink()
        for key, clients in enumerate(("0,1", "2,3")):
            deployment.register(key)
            deployment.start_node(f"node-{key}", clients, key=key)
        deployment.start_node("stranger", "0-3")
        # FedAvg sends no mask and keeps nothing; FedLPS does both.
        for name in ("fedavg", "fedlps"):
            out = tmp_path / name
            options = AppOptions(**TINY, method=name, rounds=2, cohort=3, eval_every=2, out=out)
            deployment.submit(options)
            result = deployment.await_result(out)
            config = Experiment.of(options, ids=()).with_clients(options, tiny_clients(4)).config
            here = tiny_run(options.make_method(), clients=tiny_clients(4), config=config)
            assert result["final"]["state_sha256"] == here.final.state_sha256, name
            assert result["final"]["personal"] == here.final.to_dict()["personal"], name
            assert result["cost"]["uplink_bytes"] == here.cost.uplink_bytes, name
            assert all(record["dropped"] == [] for record in result["rounds"]), name
        until(lambda: "2001" in deployment.log("stranger"), "the stranger is refused")


@pytest.mark.same_bits
def test_a_run_whose_superlink_was_killed_resumes_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    options = AppOptions(**PLANTED, rounds=2, cohort=4, eval_every=2, out=out, nodes=2)
    with Deployment(tmp_path) as deployment:
        deployment.plant("hold-0-2")
        deployment.start_superlink()
        deployment.start_node("a", "0,1")
        deployment.start_node("b", "2,3")
        deployment.submit(options)
        deployment.event("began-0-2")
        deployment.kill("superlink")
        deployment.lift("hold-0-2")
        deployment.start_superlink()
        deployment.submit(options.replaced(resume=True))
        result = deployment.await_result(out)
        counts = {path.name: path.read_text() for path in deployment.events.glob("done-*-2")}
    whole = embedded(options, tmp_path / "whole", monkeypatch, clients=4)
    assert result["final"]["state_sha256"] == whole.final.state_sha256
    assert result["final"]["personal"] == whole.final.to_dict()["personal"]
    assert [record["round"] for record in result["rounds"]] == [1, 2]
    assert all(record["dropped"] == [] for record in result["rounds"])
    assert list(counts.values()) == ["2"] * 4
