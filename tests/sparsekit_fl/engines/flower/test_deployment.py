"""A deployment as users get it, over TLS with known SuperNodes only: the bits of the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from fault_deployment import MARKS, TINY, Deployment, until

from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_problem

pytestmark = MARKS


@pytest.mark.same_bits
def test_encrypted_supernodes_with_known_keys_give_the_bits_of_the_embedded_engine_and_strangers_stay_out(
    tmp_path: Path,
) -> None:
    allowed = tmp_path / "allowed.toml"
    allowed.write_text('client-0 = "0,1"\nclient-1 = "2,3"\n')
    with Deployment(tmp_path, planted=False, tls=True) as deployment:
        deployment.start_superlink()
        for key, clients in enumerate(("0,1", "2,3")):
            deployment.register(key)
            deployment.start_node(f"node-{key}", clients, key=key)
        deployment.start_node("stranger", "0-3")
        # FedAvg sends no mask and keeps nothing; FedLPS does both.
        for name in ("fedavg", "fedlps"):
            out = tmp_path / name
            plan = Plan(**TINY, method=name, rounds=2, cohort=3, eval_every=2, out=str(out), allowed=str(allowed))
            deployment.submit(plan)
            result = deployment.await_result(out)
            here = run(plan.make_method(), tiny_problem(), tiny_clients(4), plan.make_config(4))
            assert result["final"]["state_sha256"] == here.final.state_sha256, name
            assert result["final"]["personal"] == here.final.to_dict()["personal"], name
            assert result["cost"]["uplink_bytes"] == here.cost.uplink_bytes, name
            assert all(record["dropped"] == [] for record in result["rounds"]), name
        until(lambda: "2001" in deployment.log("stranger"), "the stranger is refused")
