"""The two apps of a deployment, over a grid in this process; which device has which clients; models that a device keeps."""

import io
import json
import math
import tomllib
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from local_grid import LocalGrid, StillClock, over_the_wire
from own_models import OwnModels

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError, UnknownNameError
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.cli import flower_app
from sparsekit_fl.cli.flower_app import DEFAULTS, parsed, run_text, write_app
from sparsekit_fl.cli.options import RunOptions
from sparsekit_fl.cli.run import Experiment
from sparsekit_fl.flower import app
from sparsekit_fl.flower.app import Node, serve
from sparsekit_fl.flower.engine import GridEngine, content, describe_clients, identity_of, read_clients, run_id
from sparsekit_fl.methods import make_method
from sparsekit_fl.rounds import run
from sparsekit_fl.spec import RunSpec, by_id
from sparsekit_fl.testing import TinyNet, tiny_clients, tiny_config, tiny_problem


def test_options_survive_flowers_run_configuration():
    given = {"rounds": 3, "lr": 0.5, "out": Path("my run"), "clip": None, "set": ("mu=0.5", "partition.alpha=0.3")}
    assert parsed({"run": run_text("fedprox", given), "resume": True}) == ("fedprox", RunOptions(**given, resume=True))
    assert parsed(DEFAULTS) == ("fedlps", RunOptions(resume=False))
    with pytest.raises(UnknownNameError):
        parsed({**DEFAULTS, "run": "fedavg training.no_such=1"})


def test_a_node_gets_only_the_clients_it_was_given_with_their_capabilities_and_the_server_no_data():
    own = RunOptions(dataset="sparsekit_fl.testing:tiny_data")
    assert [client.id for client in Experiment.of(RunOptions(), ids=[2, 5]).clients] == [2, 5]
    server = Experiment.of(own, ids=())
    assert server.clients == []
    device = Experiment.of(own, ids=[1, 2])
    assert [client.capability.ratio for client in device.clients] == [0.5, 0.25]
    assert device.config == server.config
    assert server.config.capability_levels is None, "drawn levels do not replace them"
    for options, there in ((RunOptions(), "the clients 0 to 19"), (own, "no clients")):
        with pytest.raises(InvalidValueError, match=rf"the data have {there}, but this node was given \[99\]"):
            Experiment.of(options, ids=[99])


def test_a_node_keeps_the_memory_that_the_server_counts_on_and_its_newest_whatever_replies_were_lost(tmp_path):
    spec, clients = RunSpec.build(OwnModels(), tiny_problem(), tiny_config(rounds=9)), by_id(tiny_clients())
    node = Node(spec, clients, Memories(tmp_path, durable=True), device=True)

    def train(round, memory_round):
        request = fl.Request(round=round, client_id=3, state=spec.initial, memory_round=memory_round)
        reply = node.answer(request)
        assert reply.stored
        assert ("it started without memory" in reply.note) == (memory_round == 4)
        return sorted(path.stem for path in tmp_path.glob("*.state"))

    assert train(1, None) == ["3-1"]
    assert [train(round, 1) for round in (2, 4, 6)] == [["3-1", "3-2"], ["3-1", "3-4"], ["3-1", "3-6"]]
    assert train(7, 4) == ["3-7"]
    assert train(8, 7) == ["3-7", "3-8"]


@pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Flower's
def test_the_app_folder_is_complete_never_written_over_and_what_runs_leave_in_it_is_never_sent(tmp_path):
    from flwr.cli.build import build_fab_from_disk

    folder = tmp_path / "my app"
    write_app(folder)
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "my-app"
    assert project["tool"]["flwr"]["app"]["config"] == DEFAULTS
    with pytest.raises(InvalidValueError, match="nothing was written"):
        write_app(folder)
    fresh = build_fab_from_disk(folder)
    assert set(zipfile.ZipFile(io.BytesIO(fresh)).namelist()) == {"pyproject.toml", "README.md", ".info/CONTENT"}
    # Flower keeps the apps of earlier runs below its home, so without an end each would hold all before it.
    deep = "flwr-home/apps/a/b/c/d/e/f/g/h/i/README.md"
    for made in (deep, "run/result.json", "run/rounds.jsonl", "state/a/0.json", "keys/notes.md"):
        (folder / made).parent.mkdir(parents=True, exist_ok=True)
        (folder / made).write_text("secret")
    assert build_fab_from_disk(folder) == fresh


RUN = "0123456789abcdef"


def _node(run=RUN, *, options="fedlps", **node_config):
    config = {**DEFAULTS, "run": options}
    return app._node(SimpleNamespace(run_config=config, node_config={"state-dir": "state", **node_config}), run)


def test_a_node_has_the_device_and_the_clients_that_it_names_or_the_one_that_flower_calls_its_partition(tmp_path):
    assert (sorted(_node(clients="0-1").clients), _node(clients="0-1").spec.config.device) == ([0, 1], "cpu")
    assert _node(clients="0-1", device="meta").spec.config.device == "meta"
    assert sorted(_node(**{"partition-id": 3, "num-partitions": 8}).clients) == [3]
    for missing in ({}, {"clients": "0", "state-dir": ""}):
        with pytest.raises(InvalidValueError, match="was given no clients, or no place for their memories"):
            _node(**missing)
    # Options that need several clients.
    assert list(_node(clients="3", options="fedlps min_replies=2 cohort=9").clients) == [3]
    # A run that is resumed finds its memories.
    found = Memories(tmp_path / "a", durable=True)
    id = run_id(found)
    found.keep({})
    assert run_id(Memories(tmp_path / "a", durable=True)) == id != run_id(Memories(tmp_path / "b", durable=True))
    assert _node(id, clients="0").memories.folder == Path("state") / id / "clients"


TINY = "dataset=sparsekit_fl.testing:tiny_data training.local_epochs=1 training.batch_size=8 seed=3 rounds=2"


def _serve(config, nodes):
    """Run an app on some nodes."""
    grid = LocalGrid(app.client, nodes=len(nodes), run_config=config, node_configs=nodes)
    serve(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=config))


@pytest.mark.same_bits
def test_a_device_predicts_with_the_models_of_its_own_clients_and_they_are_nowhere_else(tmp_path):
    config = {**DEFAULTS, "run": f"fedlps {TINY} cohort=4 nested=false out={tmp_path / 'server'}"}
    _serve(config, [{"clients": ids, "state-dir": str(tmp_path / name)} for ids, name in (("0-3", "a"), ("4-7", "b"))])
    experiment = Experiment.of(parsed(config)[1])
    here, plain = (
        run(make_method(text), experiment.problem, experiment.clients, experiment.config, out=tmp_path / name)
        for text, name in (("fedlps nested=false", "here"), ("fedlps", "plain"))
    )
    (home,) = (path for path in (tmp_path / "a").iterdir() if list(path.glob("models/*")))
    widths = set()
    for which in ("global", 0, 1, 2, 3):
        own, expected = (fl.load_model(place, which, model=TinyNet) for place in (home, tmp_path / "here"))
        assert own.state_dict().keys() == expected.state_dict().keys()
        assert all(torch.equal(tensor, expected.state_dict()[name]) for name, tensor in own.state_dict().items())
        widths.add(own.first.out_features)
    assert len(widths) > 1, "narrow models among them"
    found = json.loads((tmp_path / "server" / "result.json").read_text())["final"]["state_sha256"]
    assert found == here.final.state_sha256 != plain.final.state_sha256
    with pytest.raises(DataError, match="no client 5"):
        fl.load_model(home, 5)
    with pytest.raises(DataError, match="stayed on its device"):
        fl.load_model(tmp_path / "server", 0)
    assert not list((tmp_path / "server" / "models").glob("client-*"))


def test_the_error_that_ends_a_run_is_written_for_the_command_that_started_it(tmp_path):
    more = {"nodes": 1, "error-file": str(tmp_path / "error.json")}
    with pytest.raises(InvalidValueError, match="cohort"):
        _serve({**DEFAULTS, "run": f"fedavg {TINY} engine=flower cohort=99", **more}, [{}])
    told = json.loads((tmp_path / "error.json").read_text())
    assert told["kind"] == "InvalidValueError"
    assert "cohort" in told["text"]


@pytest.mark.parametrize(
    ("options", "gpus", "visible"), [({"workers": 4}, "0.0", None), ({"device": "cuda:1,cuda:3", "workers": 4}, "0.5", "1,3")]
)
def test_processes_of_the_simulation_get_the_gpus_that_were_named_under_numbers_of_their_own(
    options, gpus, visible, tmp_path, monkeypatch
):
    """Ray shows each process the GPUs that it may use as cuda:0, cuda:1, …, whichever they are."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    given = RunOptions(**options, ray_address="HEAD:6379")
    command, env = flower_app._app_for("fedavg", given, tmp_path, tmp_path / "out", tmp_path / "error", 8000)
    assert f"client-resources-num-gpus={gpus}" in command[-1]
    assert "init-args" not in command[-1], "a cluster has its own resources"
    assert (env.get("CUDA_VISIBLE_DEVICES"), env["RAY_ADDRESS"]) == (visible, "HEAD:6379")
    written = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert parsed(written)[1].device == ("cuda" if visible else None)


SPEC = RunSpec.build(fl.Method(), tiny_problem(), tiny_config())
OURS = identity_of(SPEC)
ROSTER = [
    fl.Client(id=3 * place, data=fl.ClientData(train=range(100 + place), val=range(7), test=range(8)),
           capability=fl.Capability(ratio=1 / (1 + place), uplink_bytes_per_second=1e6 / 3))
    for place in range(3)
]  # fmt: skip


def _saying(*identities, **more):
    """Devices that have the roster, and say that they are of these versions and models."""
    app = ClientApp()

    @app.query()
    def introduce(message, context):
        return Message(content(describe_clients(ROSTER, identities[context.node_id - 1000])), reply_to=message)

    return LocalGrid(app, nodes=len(identities), **more)


def test_a_device_says_how_many_examples_and_which_capability_each_of_its_clients_has():
    clients = GridEngine(_saying(OURS)).clients(SPEC, {})
    for own, known in zip(ROSTER, clients.values(), strict=True):
        assert (known.id, known.capability) == (own.id, own.capability)
        assert [len(known.data.train), len(known.data.val), len(known.data.test)] == [len(own.data.train), 7, 8]


def test_a_device_that_says_nothing_is_waited_for_once_and_the_others_are_used(monkeypatch, caplog):
    clock = StillClock()
    monkeypatch.setattr("sparsekit_fl.flower.engine.time", clock)
    grid = _saying(OURS, OURS, fault=lambda message, reply: reply if message.metadata.dst_node_id == 1000 else None)
    engine = GridEngine(grid, nodes=2)
    roster = engine.clients(SPEC, {})
    assert len(roster) == len(ROSTER)
    assert 300.0 <= clock.now < 301.0
    assert engine.clients(SPEC, {}) is roster
    assert clock.now < 301.0, "nobody waits for it in a round"
    assert engine.workers == 1
    assert "SuperNode 1001 is not used: no reply within 300 seconds" in caplog.text


def test_too_few_devices_are_waited_for_no_longer_than_was_said(monkeypatch):
    monkeypatch.setattr("sparsekit_fl.flower.engine.time", StillClock())
    with pytest.raises(fl.errors.WorkerDiedError, match="1 of 2 SuperNodes came within 5 seconds"):
        GridEngine(_saying(OURS), nodes=2, wait_seconds=5).clients(SPEC, {})


class Coming(LocalGrid):
    """Nodes 1000, 1001, …, of which those in `there` are there; each has the clients that `claims` says, and counts queries."""

    def __init__(self, claims, there):
        self.claims, self.there, self.queries = claims, there, []
        app = ClientApp()

        @app.query()
        def introduce(message, context):
            self.queries.append(context.node_id)
            own = [replace(ROSTER[0], id=id) for id in self.claims[context.node_id]]
            return Message(content(describe_clients(own, OURS)), reply_to=message)

        super().__init__(app, nodes=len(claims))

    def get_node_ids(self):
        return list(self.there)


def test_who_is_there_is_asked_before_each_round_and_each_device_once_as_long_as_it_stays(monkeypatch):
    monkeypatch.setattr("sparsekit_fl.flower.engine.time", StillClock())
    grid = Coming({1000: [0, 1], 1001: [2], 1002: [3]}, [1000, 1001])
    engine = GridEngine(grid, nodes=2)
    assert sorted(engine.clients(SPEC, {})) == [0, 1, 2]
    assert engine.clients(SPEC, {}) is engine.clients(SPEC, {})
    for there, clients in (([1000], [0, 1]), ([1000, 1002], [0, 1, 3]), ([1002, 1001], [2, 3])):
        grid.there = there
        assert list(engine.clients(SPEC, {})) == clients
    assert sorted(grid.queries) == [1000, 1001, 1001, 1002]
    grid.there = []
    with pytest.raises(fl.errors.WorkerDiedError, match="no SuperNode can be used"):
        engine.clients(SPEC, {})


def test_two_devices_that_claim_one_client_are_both_named_and_a_newcomer_waits_until_the_other_has_gone(monkeypatch, caplog):
    monkeypatch.setattr("sparsekit_fl.flower.engine.time", StillClock())
    grid = Coming({1000: [0, 1], 1001: [1, 2]}, [1000, 1001])
    with pytest.raises(InvalidValueError, match="SuperNodes 1000 and 1001 both claim client 1; correct option `clients`"):
        GridEngine(grid, nodes=2).clients(SPEC, {})
    grid.there = [1001]
    engine = GridEngine(grid)
    assert list(engine.clients(SPEC, {})) == [1, 2]
    grid.there = [1000, 1001]
    assert list(engine.clients(SPEC, {})) == [1, 2]
    assert "SuperNode 1000 is not used: SuperNodes 1001 and 1000 both claim client 1" in caplog.text
    grid.there = [1000]
    assert list(engine.clients(SPEC, {})) == [0, 1]


ROW = [4, 3, 1, 1, 1.0, 1.0, 1.0, 1.0]


def _with(column, value):
    return [[3, *ROW[1:]], [*ROW[:column], value, *ROW[column + 1 :]]]


ROWS = [[], None, [3, 4], [ROW[:3]], _with(0, 3), _with(0, -1), _with(1, 0), _with(1, 2**50), _with(4, 2.0), _with(6, math.nan)]
BYTES = [b"", b"\xff\x00", b"[" * 10**5, b"[]"]


@pytest.mark.parametrize("payload", [*(json.dumps({"identity": OURS, "clients": rows}).encode() for rows in ROWS), *BYTES])
def test_a_malformed_introduction_is_refused(payload):
    LocalGrid(ClientApp())  # what Flower asks of a process that makes a message
    with pytest.raises(DataError, match="badly"):
        read_clients(over_the_wire(Message(content(payload), 1, "query")), OURS)


def test_a_node_whose_version_or_model_or_frozen_weights_differ_is_not_used_and_the_error_says_why():
    """Frozen values never travel, so a device with other ones would train another model unnoticed."""
    frozen = replace(SPEC, frozen=frozenset(list(SPEC.initial)[:1]))
    name = next(iter(frozen.frozen))
    nudged = frozen.initial[name].clone()
    nudged.view(-1)[0] = torch.nextafter(nudged.view(-1)[0], torch.tensor(9.0))
    other = replace(frozen, initial={**frozen.initial, name: nudged})
    identities = [identity_of(frozen), identity_of(other), identity_of(SPEC), OURS.replace("sparsekit ", "sparsekit 0.")]
    assert len(set(identities)) == 4
    for theirs in identities[1:]:
        with pytest.raises(fl.errors.WorkerDiedError, match=r"no SuperNode can be used.*it has sparsekit .*, and the server"):
            GridEngine(_saying(theirs)).clients(frozen, {})
