"""The two apps of a deployment and their plan, over a grid in this process; what a device keeps of a run, and predicts with."""

import io
import json
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Context, RecordDict
from local_grid import LocalGrid

from sparsekit.errors import DataError, InvalidValueError, UnknownNameError
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.cli.flower_app import write_app
from sparsekit_fl.deployment import apps
from sparsekit_fl.deployment.apps import serve
from sparsekit_fl.deployment.plan import Plan
from sparsekit_fl.engines.flower.node import DeviceMemories
from sparsekit_fl.engines.flower.nodes import _run_id
from sparsekit_fl.errors import LostMemoryError
from sparsekit_fl.results.saved import load_model
from sparsekit_fl.rounds import run
from sparsekit_fl.testing import tiny_clients, tiny_problem


def test_a_plan_survives_flowers_run_configuration() -> None:
    plan = Plan(method="fedavg", rounds=3, lr=0.5, resume=True, out="run")
    assert Plan.of(plan.to_run_config()) == plan


def test_a_plan_makes_the_options_of_its_run_and_has_no_seed_for_the_noise_since_every_node_reads_it() -> None:
    plan = Plan(eval_clients=5, lr_decay=0.5, upload="bfloat16")
    config = plan.make_config()
    assert (config.eval_clients, config.lr_decay, config.upload) == (5, 0.5, "bfloat16")
    assert Plan().make_config().eval_clients is None
    with pytest.raises(UnknownNameError):
        Plan.of({**plan.to_run_config(), "dp-noise-seed": 1})


def test_a_node_gets_only_the_clients_it_was_given_with_their_capabilities_and_the_server_no_data() -> None:
    assert [client.id for client in Plan().make_task(ids=[2, 5]).clients] == [2, 5]
    own = Plan(dataset="sparsekit_fl.testing:tiny_data")
    assert own.make_task(ids=()).clients == []
    clients = own.make_task(ids=[1, 2]).clients
    assert [client.capability.ratio for client in clients] == [0.5, 0.25]
    assert own.make_config(clients).capability_levels is None, "drawn levels do not replace them"
    for plan, there in ((Plan(), "the clients 0 to 19"), (own, "no clients")):
        with pytest.raises(InvalidValueError, match=rf"the data have {there}, but this node was given \[99\]"):
            plan.make_task(ids=[99])


def test_a_node_keeps_the_memory_that_the_server_counts_on_and_its_newest_whatever_replies_were_lost(tmp_path: Path) -> None:
    DeviceMemories(tmp_path).write(3, 1, {"local": {"count": 1}})
    for round in (2, 4, 6):
        store = DeviceMemories(tmp_path)
        assert store.read(3, 1) == {"local": {"count": 1}}
        store.write(3, round, {"local": {"count": round}})
    assert sorted(path.stem for path in tmp_path.rglob("*.pt")) == ["3-1", "3-6"]
    store = DeviceMemories(tmp_path)
    store.write(3, 8, {"local": {"count": torch.tensor(8)}})
    assert int(store.read(3, 8)["local"]["count"]) == 8
    assert store.read(3, 6) == {"local": {"count": 6}}
    with pytest.raises(LostMemoryError):
        store.read(3, 1)
    assert store.read(3, None) == {}


def test_the_app_folder_is_complete_and_never_written_over(tmp_path: Path) -> None:
    written = write_app(tmp_path / "my app")
    project = tomllib.loads((tmp_path / "my app" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-app"
    assert Plan.of(project["tool"]["flwr"]["app"]["config"]) == Plan()
    assert not any("@" in path.read_text().replace("${@}", "") for path in written if path.suffix == ".toml")
    with pytest.raises(InvalidValueError, match="nothing was written"):
        write_app(tmp_path / "my app")


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_what_runs_leave_in_the_app_folder_is_never_sent_to_devices(tmp_path: Path) -> None:
    from flwr.cli.build import build_fab_from_disk

    write_app(tmp_path)
    fresh = build_fab_from_disk(tmp_path)
    assert set(zipfile.ZipFile(io.BytesIO(fresh)).namelist()) == {"pyproject.toml", "README.md", ".info/CONTENT"}
    # Flower keeps the apps of earlier runs below its home, so without an end each would hold all before it.
    deep = "flwr-home/apps/a/b/c/d/e/f/g/h/i/README.md"
    for made in (deep, "run/result.json", "run/rounds.jsonl", "state/a/0.json", "keys/notes.md"):
        (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / made).write_text("secret")
    assert build_fab_from_disk(tmp_path) == fresh
    (tmp_path / "mine.py").touch()
    assert "mine.py" in zipfile.ZipFile(io.BytesIO(build_fab_from_disk(tmp_path))).namelist()


def _context(run_config: dict[str, Any] | None = None, **node_config: str) -> Any:
    run_config = {**Plan().to_run_config(), **(run_config or {})}
    return SimpleNamespace(run_config=run_config, node_config={"clients": "0-1", **node_config})


def test_the_device_of_a_node_is_its_own_and_the_cpu_where_none_is_named() -> None:
    assert apps._make(_context())[0].config.device == "cpu"
    assert apps._make(_context(device="meta"))[0].config.device == "meta"
    with pytest.raises(InvalidValueError, match="device must be cpu, cuda, cuda:N or mps, or several by commas, got 'gpu1'"):
        apps._make(_context(device="gpu1"))


def test_a_node_has_the_clients_that_it_names_or_the_one_that_flower_calls_its_partition() -> None:
    context = _context()
    assert sorted(apps._make(context)[1]) == [0, 1]
    context.node_config = {"partition-id": 3, "num-partitions": 8}
    assert sorted(apps._make(context)[1]) == [3]
    context.node_config = {}
    with pytest.raises(InvalidValueError, match="was given no clients; start it with --node-config"):
        apps._make(context)


@pytest.mark.parametrize("options", [{"min-replies": 2}, {"cohort": 9}])
def test_a_node_of_one_client_takes_options_that_need_several(options: dict[str, Any]) -> None:
    assert list(apps._make(_context(options, clients="3"))[1]) == [3]


def test_a_run_that_is_resumed_or_extended_finds_the_memories_on_its_nodes(tmp_path: Path) -> None:
    id = _run_id(Memories(tmp_path / "a", durable=True))
    again = Memories(tmp_path / "a", durable=True)
    again.keep({})
    assert _run_id(again) == id
    assert _run_id(Memories(tmp_path / "b", durable=True)) != id
    for options in ({"rounds": 3}, {"rounds": 9, "timeout-seconds": 5.0, "out": "elsewhere"}):
        store = apps._node(_context(options, **{"state-dir": "state"}), id).memories
        assert isinstance(store, DeviceMemories)
        assert store.folder == Path("state") / id


TINY: dict[str, Any] = {"dataset": "sparsekit_fl.testing:tiny_data", "local_epochs": 1, "batch_size": 8}


def _serve(plan: Plan, nodes: list[dict[str, str]]) -> None:
    """Run a plan on two nodes, whose keys were registered as "first" and "second"."""
    config = plan.to_run_config()
    grid = LocalGrid(apps.client, nodes=2, run_config=config, node_configs=nodes)
    names = [SimpleNamespace(node_id=node, name=name) for node, name in ((1000, "first"), (1001, "second"))]
    grid.get_nodes = lambda: names  # type: ignore[attr-defined]
    serve(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))


@pytest.mark.parametrize("memory", ["nodes", "server"])
@pytest.mark.same_bits
def test_a_device_predicts_with_the_models_of_its_own_clients_and_they_are_nowhere_else(memory: str, tmp_path: Path) -> None:
    plan = Plan(**TINY, method="fedlps", rounds=2, cohort=4, seed=3, out=str(tmp_path / "server"), nodes=2, memory=memory)
    _serve(plan, [{"clients": ids, "state-dir": str(tmp_path / name)} for ids, name in (("0-3", "a"), ("4-7", "b"))])
    here = run(plan.make_method(), tiny_problem(), tiny_clients(), plan.make_config(tiny_clients()), out=tmp_path / "here")
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


def test_a_node_that_claims_clients_which_the_servers_list_gives_to_another_takes_no_part(tmp_path: Path) -> None:
    allowed = tmp_path / "allowed.toml"
    allowed.write_text('first = "0-3"\nsecond = "4-7"\n')
    out = tmp_path / "out"
    plan = Plan(**TINY, method="fedavg", rounds=1, cohort=2, out=str(out), memory="server", allowed=str(allowed))
    # The second one has its own client and one of the first's, which nobody else claims.
    _serve(plan, [{"clients": ids} for ids in ("0-2", "3,4")])
    result = json.loads((out / "result.json").read_text())
    assert [one["id"] for one in result["final"]["per_client"]] == [0, 1, 2]
    assert "it claims the clients [3], which 'second' is not allowed to have" in "; ".join(result["rounds"][0]["notes"])
