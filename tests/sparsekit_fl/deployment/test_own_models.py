"""The two apps of a deployment, over a grid in this process: what a device keeps of a run, and predicts with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Context, RecordDict
from local_grid import LocalGrid

from sparsekit.errors import DataError
from sparsekit_fl.deployment import apps
from sparsekit_fl.deployment.apps import serve
from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.engines.spec import RunSpec
from sparsekit_fl.results.saved import load_model
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_problem


@pytest.mark.parametrize("memory", ["nodes", "server"])
@pytest.mark.same_bits
def test_a_device_predicts_with_the_models_of_its_own_clients_and_they_are_nowhere_else(memory: str, tmp_path: Path) -> None:
    plan = Plan(
        method="fedlps", problem="sparsekit_fl.testing:tiny_problem", rounds=2, cohort=4, seed=3, local_epochs=1,
        batch_size=8, out=str(tmp_path / "server"), nodes=2, memory=memory,
    )  # fmt: skip
    config = plan.to_run_config()
    nodes = [
        {"clients": ids, "data": "sparsekit_fl.testing:tiny_client", "state-dir": str(tmp_path / name)}
        for ids, name in (("0-3", "a"), ("4-7", "b"))
    ]
    grid = LocalGrid(apps.client, nodes=2, rng=np.random.default_rng(0), run_config=config, node_configs=nodes)
    serve(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    here = run(plan.make_method(), tiny_problem(), tiny_clients(), plan.make_config(8), out=tmp_path / "here")
    (home,) = (tmp_path / "a").iterdir()
    widths = set()
    for which in ("global", 0, 1, 2, 3):
        own, expected = load_model(home, which), load_model(tmp_path / "here", which)
        assert own.state_dict().keys() == expected.state_dict().keys()
        assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in own.state_dict().items())
        widths.add(own.first.out_features)
    assert len(widths) > 1, "narrow models among them"
    assert here.final.state_sha256
    with pytest.raises(DataError, match="no client 5"):
        load_model(home, 5)
    with pytest.raises(DataError, match="stayed on its device"):
        load_model(tmp_path / "server", 0)
    assert not list((tmp_path / "server" / "models").glob("client-*"))


def test_a_process_that_serves_all_nodes_of_a_run_builds_the_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(method="fedlps", problem="sparsekit_fl.testing:tiny_problem", rounds=2, cohort=4, seed=3, local_epochs=1,
                batch_size=8, nodes=8, memory="server")  # fmt: skip
    config = plan.to_run_config()
    nodes = [{"partition-id": k, "num-partitions": 8, "data": "sparsekit_fl.testing:tiny_client"} for k in range(8)]
    grid = LocalGrid(apps.client, nodes=8, rng=np.random.default_rng(0), run_config=config, node_configs=nodes)
    built = []
    build = RunSpec.build
    monkeypatch.setattr(RunSpec, "build", lambda *given, **more: built.append(given) or build(*given, **more))
    serve(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))
    # Once for all nodes, once to know the model before they come, and once for the loop.
    assert len(built) == 3
