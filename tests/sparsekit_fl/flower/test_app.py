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
from own_models import OwnModels

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError, UnknownNameError
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.cli import simulate
from sparsekit_fl.cli.experiment import Experiment
from sparsekit_fl.cli.flower_app import AppOptions, write_app
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.client.messages import decode_reply, encode_request
from sparsekit_fl.flower import app
from sparsekit_fl.flower.app import Node, serve
from sparsekit_fl.flower.engine import run_id
from sparsekit_fl.models import load_model
from sparsekit_fl.results import RunResult
from sparsekit_fl.rounds import run
from sparsekit_fl.spec import RunSpec, by_id
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


def test_options_survive_flowers_run_configuration() -> None:
    settings = ("mu=0.5", "partition.alpha=0.3", "ratios=0.5,1")
    options = AppOptions(method="fedavg", rounds=3, lr=0.5, resume=True, out=Path("run"), set=settings, clip=None)
    config = options.to_run_config()
    assert AppOptions.of(config) == options
    assert config["set.partition.alpha"] == "0.3"
    assert AppOptions.of(AppOptions().to_run_config()).given == {}
    with pytest.raises(UnknownNameError):
        AppOptions.of({**config, "dp-noise-seed": 1})


def test_a_node_gets_only_the_clients_it_was_given_with_their_capabilities_and_the_server_no_data() -> None:
    own = AppOptions(dataset="sparsekit_fl.testing:tiny_data")
    assert [client.id for client in Experiment.of(AppOptions(), ids=[2, 5]).clients] == [2, 5]
    server = Experiment.of(own, ids=())
    assert server.clients == []
    clients = Experiment.of(own, ids=[1, 2]).clients
    assert [client.capability.ratio for client in clients] == [0.5, 0.25]
    assert server.with_clients(own, clients).config.capability_levels is None, "drawn levels do not replace them"
    for options, there in ((AppOptions(), "the clients 0 to 19"), (own, "no clients")):
        with pytest.raises(InvalidValueError, match=rf"the data have {there}, but this node was given \[99\]"):
            Experiment.of(options, ids=[99])


def test_a_node_keeps_the_memory_that_the_server_counts_on_and_its_newest_whatever_replies_were_lost(tmp_path: Path) -> None:
    spec, clients = RunSpec.build(OwnModels(), tiny_problem(), tiny_config(rounds=9)), by_id(tiny_clients())
    node = Node(spec, clients, Memories(tmp_path, durable=True), device=True)

    def train(round: int, memory_round: int | None) -> list[str]:
        request = fl.Request(round=round, client_id=3, state=spec.initial, memory_round=memory_round)
        reply = decode_reply(node.answer(encode_request(request, spec.graph), None), request, spec.graph)
        assert reply.stored
        assert ("it started without memory" in reply.note) == (memory_round == 4)
        return sorted(path.stem for path in tmp_path.glob("*.pt"))

    assert train(1, None) == ["3-1"]
    assert [train(round, 1) for round in (2, 4, 6)] == [["3-1", "3-2"], ["3-1", "3-4"], ["3-1", "3-6"]]
    assert train(7, 4) == ["3-7"]
    assert train(8, 7) == ["3-7", "3-8"]


def test_the_app_folder_is_complete_and_never_written_over(tmp_path: Path) -> None:
    written = write_app(tmp_path / "my app")
    project = tomllib.loads((tmp_path / "my app" / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-app"
    config = project["tool"]["flwr"]["app"]["config"]
    assert config.pop("set") == {}
    assert AppOptions.of(config) == AppOptions()
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


def _context(run_config: dict[str, Any] | None = None, **node_config: Any) -> Any:
    run_config = {**AppOptions().to_run_config(), **(run_config or {})}
    return SimpleNamespace(run_config=run_config, node_config={"clients": "0-1", "state-dir": "state", **node_config})


RUN = "0123456789abcdef"


def test_a_node_has_the_device_and_the_clients_that_it_names_or_the_one_that_flower_calls_its_partition() -> None:
    context = _context()
    assert (sorted(app._node(context, RUN).clients), app._node(context, RUN).spec.config.device) == ([0, 1], "cpu")
    assert app._node(_context(device="meta"), RUN).spec.config.device == "meta"
    with pytest.raises(InvalidValueError, match="device 'gpu1' cannot be used"):
        app._node(_context(device="gpu1"), RUN)
    context.node_config = {"partition-id": 3, "num-partitions": 8, "state-dir": "state"}
    assert sorted(app._node(context, RUN).clients) == [3]
    for missing in ({"state-dir": "state"}, {"clients": "0"}):
        context.node_config = missing
        with pytest.raises(InvalidValueError, match="was given no clients, or no place for their memories"):
            app._node(context, RUN)
    with pytest.raises(InvalidValueError, match="16 hexadecimal digits"):
        app._node(_context(), "../../etc")
    for several in ({"min-replies": 2}, {"cohort": 9}):  # options that need several clients
        assert list(app._node(_context(several, clients="3"), RUN).clients) == [3]


def test_a_run_that_is_resumed_finds_the_memories_on_its_nodes(tmp_path: Path) -> None:
    id = run_id(Memories(tmp_path / "a", durable=True))
    again = Memories(tmp_path / "a", durable=True)
    again.keep({})
    assert run_id(again) == id
    assert run_id(Memories(tmp_path / "b", durable=True)) != id
    for options in ({"rounds": 3}, {"rounds": 3, "timeout-seconds": 5.0, "out": "elsewhere"}):
        assert app._node(_context(options), id).memories.folder == Path("state") / id / "clients"


TINY: dict[str, Any] = {"dataset": "sparsekit_fl.testing:tiny_data", "local_epochs": 1, "batch_size": 8}


def _serve(options: AppOptions, nodes: list[dict[str, str]]) -> None:
    """Run an app on some nodes."""
    config = options.to_run_config()
    grid = LocalGrid(app.client, nodes=len(nodes), run_config=config, node_configs=nodes)
    serve(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))


@pytest.mark.same_bits
def test_a_device_predicts_with_the_models_of_its_own_clients_and_they_are_nowhere_else(tmp_path: Path) -> None:
    options = AppOptions(**TINY, method="fedlps", rounds=2, cohort=4, seed=3, out=tmp_path / "server", nodes=2)
    _serve(options, [{"clients": ids, "state-dir": str(tmp_path / name)} for ids, name in (("0-3", "a"), ("4-7", "b"))])
    here = _here(options, out=tmp_path / "here")
    (home,) = (path for path in (tmp_path / "a").iterdir() if list(path.glob("models/*")))
    widths = set()
    for which in ("global", 0, 1, 2, 3):
        own, expected = load_model(home, which), load_model(tmp_path / "here", which)
        assert own.state_dict().keys() == expected.state_dict().keys()
        assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in own.state_dict().items())
        widths.add(own.first.out_features)
    assert len(widths) > 1, "narrow models among them"
    assert json.loads((tmp_path / "server" / "result.json").read_text())["final"]["state_sha256"] == here.final.state_sha256
    with pytest.raises(DataError, match="no client 5"):
        load_model(home, 5)
    with pytest.raises(DataError, match="stayed on its device"):
        load_model(tmp_path / "server", 0)
    assert not list((tmp_path / "server" / "models").glob("client-*"))


def _here(options: AppOptions, **more: Any) -> RunResult:
    experiment = Experiment.of(AppOptions(**{**options.given, "out": None}))
    return run(options.make_method(), experiment.problem, experiment.clients, experiment.config, **more)


@pytest.mark.same_bits
def test_options_of_the_method_reach_server_and_devices(tmp_path: Path) -> None:
    options = AppOptions(**TINY, method="fedprox", rounds=2, cohort=4, seed=3, out=tmp_path / "run", nodes=1, set=("mu=0.9",))
    _serve(options, [{"clients": "0-7", "state-dir": str(tmp_path / "state")}])
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (
        result["final"]["state_sha256"]
        == _here(options).final.state_sha256
        != _here(options.replaced(set=None)).final.state_sha256
    )


def test_the_error_that_ends_a_run_is_written_for_the_command_that_started_it(tmp_path: Path) -> None:
    options = AppOptions(**TINY, engine="flower", cohort=99, nodes=1, error_file=tmp_path / "error.json")
    with pytest.raises(InvalidValueError, match="cohort"):
        _serve(options, [{}])
    told = json.loads((tmp_path / "error.json").read_text())
    assert told["kind"] == "InvalidValueError"
    assert "cohort" in told["text"]


@pytest.mark.parametrize(
    ("options", "gpus", "visible"),
    [
        ({"workers": 4}, "0.0", None),
        ({"device": "cuda:1"}, "1.0", "1"),
        ({"device": "cuda:1,cuda:3", "workers": 4}, "0.5", "1,3"),
        ({"device": "cuda", "workers": 2}, "0.5", None),
    ],
)
def test_processes_of_the_simulation_get_the_gpus_that_were_named_under_numbers_of_their_own(
    options: dict[str, Any], gpus: str, visible: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray shows each process the GPUs that it may use as cuda:0, cuda:1, …, whichever they are."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    command, env = simulate._app_for("fedavg", RunOptions(**options), tmp_path, tmp_path / "out", tmp_path / "error")
    assert f"client-resources-num-gpus={gpus}" in command[-1]
    assert env.get("CUDA_VISIBLE_DEVICES") == visible
    written = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert AppOptions.of({name: value for name, value in written.items() if name != "set"}).device == (
        "cuda" if "device" in options else None
    )
