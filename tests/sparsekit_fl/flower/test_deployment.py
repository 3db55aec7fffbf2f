"""A deployment over TLS with known SuperNodes only, whose SuperLink dies."""

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from fault_deployment import MARKS, PLANTED, Deployment, embedded, until

from sparsekit_fl.cli.flower_app import AppOptions

pytestmark = MARKS


@pytest.mark.same_bits
def test_known_supernodes_over_tls_give_the_bits_of_this_machine_also_after_their_superlink_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    options = AppOptions(**PLANTED, rounds=2, cohort=3, eval_every=2, out=out, nodes=2)
    whole = embedded(options, tmp_path / "whole", monkeypatch, clients=4)
    first = whole.rounds[1].cohort[0]
    with Deployment(tmp_path, tls=True) as deployment:
        deployment.plant(f"hold-{first}-2")
        deployment.start_superlink()
        for key, clients in enumerate(("0,1", "2,3")):
            deployment.register(key)
            deployment.start_node(f"node-{key}", clients, key=key)
        deployment.start_node("stranger", "0-3")
        deployment.submit(options)
        deployment.event(f"began-{first}-2")
        until(lambda: "2001" in deployment.log("stranger"), "the stranger is refused")
        deployment.kill("superlink")
        deployment.lift(f"hold-{first}-2")
        deployment.start_superlink()
        deployment.submit(options.replaced(resume=True))
        result = deployment.await_result(out)
    assert result["final"]["state_sha256"] == whole.final.state_sha256
    assert result["final"]["personal"] == whole.final.to_dict()["personal"]
    assert result["cost"]["uplink_bytes"] == whole.cost.uplink_bytes
    assert [record["round"] for record in result["rounds"]] == [1, 2]
    assert all(record["dropped"] == [] for record in result["rounds"])
