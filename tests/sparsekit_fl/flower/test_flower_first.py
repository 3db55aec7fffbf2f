"""Submodels in a Flower app that exists already: the example's diff, messages, and the effect of a bad reply."""

import difflib
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from local_grid import LocalGrid

import sparsekit as sk
from sparsekit.errors import InvalidValueError
from sparsekit_fl.flower import BanditRatios, SubmodelStrategy, train_submodel
from sparsekit_fl.flower.client import KEY, mask_record, packed, read_mask, traced
from sparsekit_fl.packing import unpack
from sparsekit_fl.testing import TinyNet

pytestmark = pytest.mark.flower
FOLDER = Path(__file__).parents[3] / "examples/flower_first"
EXAMPLE = torch.zeros(1, 6)


def module(name, path, monkeypatch):
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, made)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("app", ["dense", "heterofl", "fedlps"])
def test_the_example_learns(app, monkeypatch, capsys):
    module("task", FOLDER / "task.py", monkeypatch)
    client = module("client_app", FOLDER / app / "client_app.py", monkeypatch)
    server = module("server_app", FOLDER / app / "server_app.py", monkeypatch)
    torch.manual_seed(0)
    nodes, config = 6, {"num-server-rounds": 5, "local-epochs": 1, "learning-rate": 0.05}
    grid = LocalGrid(client.app, nodes=nodes, run_config=config,
                     node_configs=[{"partition-id": k, "num-partitions": nodes} for k in range(nodes)])  # fmt: skip
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    server.app(grid=grid, context=context)
    found = float(capsys.readouterr().out.split("eval_acc': ")[1].split("}")[0].split(",")[0])
    assert found > 0.5


@pytest.mark.parametrize("app", ["heterofl", "fedlps"])
def test_the_example_changes_at_most_40_lines_of_the_app(app):
    changed = 0
    for name in ("client_app.py", "server_app.py"):
        before, after = ((FOLDER / kind / name).read_text().splitlines() for kind in ("dense", app))
        changed += sum(line[0] in "+-" and line[1:2] != line[0] for line in difflib.ndiff(before, after) if line.strip())
    assert 0 < changed <= 40


def app_of(change=lambda *_: None):
    """An app whose nodes add their number to every entry that they train, and change their reply."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        number = context.node_id - 1000
        with train_submodel(message, context, TinyNet(), EXAMPLE) as submodel, torch.no_grad():
            for parameter in submodel.model.parameters():
                parameter += number + 1
        reply = submodel.reply({"num-examples": 10 * (number + 1), "train_acc": 0.5})
        change(reply, number)
        return reply

    return app


def one_round(strategy, app, state, nodes=3, **options):
    """The state after one round, the metrics, and the replies as (number, mask, entries)."""
    grid = LocalGrid(app, nodes=nodes, **options)
    replies = list(grid.send_and_receive(strategy.configure_train(1, ArrayRecord(state), ConfigRecord(), grid)))
    sent = [
        (reply.metadata.src_node_id - 1000, reply.content[KEY], unpack(reply.content["arrays"]["body"].data)[0])
        for reply in replies
        if "body" in reply.content["arrays"]
    ]
    arrays, metrics = strategy.aggregate_train(1, replies)
    return arrays.to_torch_state_dict(), metrics, sent


def fedavg():
    return FedAvg(fraction_train=1.0, min_train_nodes=1, min_available_nodes=1)


@pytest.mark.parametrize("learned", [False, True])
def test_an_entry_is_the_mean_over_its_holders_or_over_all_and_stays_where_nobody_trained_it(learned):
    state, graph, ratios = TinyNet().state_dict(), traced(TinyNet(), EXAMPLE), {1000: 0.25, 1001: 0.5, 1002: 0.5}
    strategy = SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE, ratio=ratios.__getitem__, learned=learned)
    merged, metrics, sent = one_round(strategy, app_of(), state)
    zeros = {name: torch.zeros_like(tensor, dtype=torch.double) for name, tensor in state.items()}
    held = {
        number: sk.expand({name: torch.ones_like(one).double() for name, one in part.items()}, graph, read_mask(record, graph),
                          into=zeros)
        for number, record, part in sent
    }  # fmt: skip
    for name, _ in TinyNet().named_parameters():
        moved = sum(10 * (number + 1) ** 2 * one[name] for number, one in held.items())
        weight = 60.0 if learned else sum(10 * (number + 1) * one[name] for number, one in held.items()).clamp(min=1)
        assert torch.allclose(merged[name].double(), state[name].double() + moved / weight, atol=1e-6), name
    assert any((sum(one[name] for one in held.values()) == 0).any() for name in state), "some are trained by nobody"
    assert metrics["train_acc"] == pytest.approx(0.5)
    whole = sum(tensor.numel() for tensor in state.values())
    assert all(sum(tensor.numel() for tensor in part.values()) < whole for *_, part in sent), "what is trained is sent alone"


def sending(name, value):
    """Node 2 sends another record under this name, made of its reply."""

    def change(reply, number):
        if number == 2:
            reply.content[name] = value(reply)

    return change


def state_of(reply):
    return unpack(reply.content["arrays"]["body"].data)[0]


def entry(change):
    """Node 2 sends another first entry."""
    return sending(
        "arrays", lambda reply: packed((state := state_of(reply)) | {(name := next(iter(state))): change(state[name])})
    )


def other_mask(reply):
    mask = read_mask(reply.content[KEY], traced(TinyNet(), EXAMPLE))
    return mask_record(sk.UnitMask({name: keep.flip(0) for name, keep in mask.items()}), seconds=1.0)


def metrics(**values):
    return sending("metrics", lambda _: MetricRecord({"num-examples": 30, "train_acc": 0.5} | values))


BAD = {
    "not finite": entry(lambda tensor: tensor * math.nan),
    "another shape": entry(lambda tensor: tensor[:1]),
    "another type": entry(torch.Tensor.double),
    "arrays of numpy": sending("arrays", lambda reply: ArrayRecord(state_of(reply))),
    "no mask": sending(KEY, lambda _: ConfigRecord({"seconds": 1.0})),
    "another mask": sending(KEY, other_mask),
    "no number of examples": metrics(**{"num-examples": math.nan}),
    "examples without end": metrics(**{"num-examples": 1e308}),
    "a list of examples": metrics(**{"num-examples": [1, 2]}),
    "a metric more": metrics(invented=1.0),
    "a metric that is a list": metrics(train_acc=[0.5, 0.5]),
    "two records of metrics": sending("more", lambda _: MetricRecord({"num-examples": 30})),
}


# A client that learns its mask may have any.
@pytest.mark.parametrize(
    ("name", "learned"), [(name, False) for name in BAD] + [(name, True) for name in BAD if name != "another mask"]
)
def test_a_bad_reply_changes_nothing(name, learned, caplog):
    state = TinyNet().state_dict()
    made = {nodes: one_round(SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE, learned=learned), app_of(how), state, nodes)[0]
            for nodes, how in ((3, BAD[name]), (2, lambda *_: None))}  # fmt: skip
    assert all(torch.equal(made[3][name], made[2][name]) for name in state)
    assert "continues without the reply of node 1002" in caplog.text


def test_a_reply_twice_counts_once_and_the_order_of_replies_changes_no_bit():
    state = TinyNet().state_dict()
    made = [one_round(SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE), app_of(), state, seed=seed, twice=twice)[0]
            for seed, twice in ((0, False), (1, False), (2, True))]  # fmt: skip
    assert all(torch.equal(one[name], made[0][name]) for one in made for name in state)


def test_a_client_goes_on_from_the_importance_that_it_learned():
    app, seen = ClientApp(), []

    @app.train()
    def train(message, context):
        with train_submodel(message, context, TinyNet(), EXAMPLE) as submodel:
            seen.append({name: one.clone() for name, one in submodel.model.importance().items()})
            submodel.model.load_importance({name: one + torch.arange(len(one)) for name, one in seen[-1].items()})
        return submodel.reply({"num-examples": 1, "train_acc": 0.5})

    grid, strategy = LocalGrid(app), SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE, learned=True)
    for _ in range(2):
        list(grid.send_and_receive(strategy.configure_train(1, ArrayRecord(TinyNet().state_dict()), ConfigRecord(), grid)))
    for name, first in seen[0].items():
        assert torch.equal(seen[1][name], first + torch.arange(len(first)))


def test_a_strategy_that_steps_towards_the_mean_still_does():
    state = TinyNet().state_dict()
    inner = FedAdam(fraction_train=1.0, min_train_nodes=1, min_available_nodes=1, eta=0.5)
    inner.current_arrays = {name: Array(tensor.numpy()) for name, tensor in state.items()}
    merged, _, _ = one_round(SubmodelStrategy(inner, TinyNet(), EXAMPLE), app_of(), state)
    plain, _, _ = one_round(SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE), app_of(), state)
    assert any(not torch.allclose(merged[name].float(), plain[name].float()) for name in state)


def test_a_client_without_the_strategy_and_a_wrong_ratio_are_refused():
    message = Message(RecordDict({"arrays": ArrayRecord(TinyNet().state_dict())}), 1000, "train")
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(InvalidValueError, match="SubmodelStrategy"), train_submodel(message, context, TinyNet(), EXAMPLE):
        pass
    with pytest.raises(InvalidValueError, match=r"ratio must be in \(0, 1\]"):
        one_round(SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE, ratio=1.5), app_of(), TinyNet().state_dict())


def test_the_ratios_of_a_node_do_not_depend_on_when_others_appear():
    first, second = BanditRatios(10), BanditRatios(10)
    assert {node: first(node) for node in (3, 8, 5)} == {node: second(node) for node in (5, 3, 8)}


def test_bandits_that_were_saved_as_json_ask_for_the_same_ratios_as_those_that_went_on():
    def rounds(bandits, first, last):
        found = []
        for round in range(first, last):
            found += [bandits(node) for node in (2**63, 5)]
            bandits.tell(5, {"train_acc": 0.1 * round}, 1.0 / found[-1])  # node 2**63 never answers
        return found

    going, resumed = BanditRatios(20), BanditRatios(20)
    rounds(going, 0, 6)
    resumed.load_state_dict(json.loads(json.dumps(going.state_dict())))
    assert rounds(resumed, 6, 12) == rounds(going, 6, 12)
