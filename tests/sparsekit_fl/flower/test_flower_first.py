"""Submodels in a Flower app that exists already: the example's diff, messages, and replies that are bad or hostile."""

import difflib
import importlib.util
import json
import logging
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from local_grid import LocalGrid
from mutations import mutated

import sparsekit as sk
from sparsekit.allocation import make_mask
from sparsekit.errors import InvalidValueError
from sparsekit_fl.flower import BanditRatios, SubmodelStrategy, train_submodel
from sparsekit_fl.flower.client import KEY, mask_record, packed, read_mask, traced
from sparsekit_fl.packing import unpack
from sparsekit_fl.testing import TinyNet

pytestmark = pytest.mark.flower
FOLDER = Path(__file__).parents[3] / "examples/flower_first"
EXAMPLE = torch.zeros(1, 6)
GRAPH, STATE = traced(TinyNet(), EXAMPLE), TinyNet().state_dict()
EVERYBODY = {"fraction_train": 1.0, "min_train_nodes": 1, "min_available_nodes": 1}


def strategy(inner=None, **options):
    return SubmodelStrategy(inner or FedAvg(**EVERYBODY), TinyNet(), EXAMPLE, **options)


def asked(strategy, grid, state=STATE):
    """The messages of a first round."""
    return strategy.configure_train(1, ArrayRecord(state), ConfigRecord(), grid)


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


def one_round(strategy, app, nodes=3, **options):
    """The state after one round, the metrics, and the replies as (number, mask, entries)."""
    grid = LocalGrid(app, nodes=nodes, **options)
    replies = list(grid.send_and_receive(asked(strategy, grid)))
    sent = [
        (reply.metadata.src_node_id - 1000, reply.content[KEY], unpack(reply.content["arrays"]["body"].data)[0])
        for reply in replies
        if "body" in reply.content["arrays"]
    ]
    arrays, metrics = strategy.aggregate_train(1, replies)
    return arrays.to_torch_state_dict(), metrics, sent


@pytest.mark.parametrize("learned", [False, True])
def test_an_entry_is_the_mean_over_its_holders_or_over_all_and_stays_where_nobody_trained_it(learned):
    ratios = {1000: 0.25, 1001: 0.5, 1002: 0.5}
    merged, metrics, sent = one_round(strategy(ratio=ratios.__getitem__, learned=learned), app_of())
    zeros, held = {name: torch.zeros_like(tensor, dtype=torch.double) for name, tensor in STATE.items()}, {}
    for number, record, part in sent:
        ones = {name: torch.ones_like(one).double() for name, one in part.items()}
        held[number] = sk.expand(ones, GRAPH, read_mask(record, GRAPH), into=zeros)
    for name, _ in TinyNet().named_parameters():
        moved = sum(10 * (number + 1) ** 2 * one[name] for number, one in held.items())
        weight = 60.0 if learned else sum(10 * (number + 1) * one[name] for number, one in held.items()).clamp(min=1)
        assert torch.allclose(merged[name].double(), STATE[name].double() + moved / weight, atol=1e-6), name
    assert any((sum(one[name] for one in held.values()) == 0).any() for name in STATE), "some are trained by nobody"
    assert metrics["train_acc"] == pytest.approx(0.5)
    whole = sum(tensor.numel() for tensor in STATE.values())
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
    mask = read_mask(reply.content[KEY], GRAPH)
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
    (bad, *_), (none, *_) = (
        one_round(strategy(learned=learned), app_of(how), nodes) for nodes, how in ((3, BAD[name]), (2, lambda *_: None))
    )
    assert all(torch.equal(bad[name], none[name]) for name in STATE)
    assert "continues without the reply of node 1002" in caplog.text


def test_a_reply_twice_counts_once_and_the_order_of_replies_changes_no_bit():
    ways = ((0, False), (1, False), (2, True))
    first, *others = (one_round(strategy(), app_of(), seed=seed, twice=twice)[0] for seed, twice in ways)
    assert all(torch.equal(one[name], first[name]) for one in others for name in STATE)


def test_a_client_goes_on_from_the_importance_that_it_learned():
    app, seen = ClientApp(), []

    @app.train()
    def train(message, context):
        with train_submodel(message, context, TinyNet(), EXAMPLE) as submodel:
            seen.append({name: one.clone() for name, one in submodel.model.importance().items()})
            submodel.model.load_importance({name: one + torch.arange(len(one)) for name, one in seen[-1].items()})
        return submodel.reply({"num-examples": 1, "train_acc": 0.5})

    grid, learning = LocalGrid(app), strategy(learned=True)
    for _ in range(2):
        list(grid.send_and_receive(asked(learning, grid)))
    for name, first in seen[0].items():
        assert torch.equal(seen[1][name], first + torch.arange(len(first)))


def test_a_strategy_that_steps_towards_the_mean_still_does():
    inner = FedAdam(**EVERYBODY, eta=0.5)
    inner.current_arrays = {name: Array(tensor.numpy()) for name, tensor in STATE.items()}
    merged, plain = (one_round(each, app_of())[0] for each in (strategy(inner), strategy()))
    assert any(not torch.allclose(merged[name].float(), plain[name].float()) for name in STATE)


def test_a_client_without_the_strategy_and_a_wrong_ratio_are_refused():
    message = Message(RecordDict({"arrays": ArrayRecord(STATE)}), 1000, "train")
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(InvalidValueError, match="SubmodelStrategy"), train_submodel(message, context, TinyNet(), EXAMPLE):
        pass
    with pytest.raises(InvalidValueError, match=r"ratio must be in \(0, 1\]"):
        one_round(strategy(ratio=1.5), app_of())


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


NODES, FIRST = 100, 1000  # of a LocalGrid
MUTATIONS = 100_000 if os.environ.get("SPARSEKIT_ALL_SEEDS") else 3_000


def honest(strategy, node):
    mask = strategy._sent[node].mask or make_mask(sk.criteria.Ordered(), GRAPH, 0.5, sk.ScoringContext(weights=STATE))
    part = sk.compact(TinyNet(), GRAPH, mask).state_dict()
    metrics = MetricRecord({"num-examples": 10, "train_acc": 0.5})
    return RecordDict({"arrays": packed(part), "metrics": metrics, KEY: mask_record(mask, seconds=1.0)})


def reply(node, content):
    return SimpleNamespace(metadata=SimpleNamespace(src_node_id=node), content=content, has_error=lambda: False)


@pytest.mark.slow
@pytest.mark.parametrize("learned", [False, True])
def test_no_array_of_a_node_ends_a_round_or_harms_the_model(learned, monkeypatch):
    logging.getLogger("sparsekit_fl").setLevel(logging.ERROR)
    rng, counted, ours = np.random.default_rng(0), 0, strategy(ratio=0.5, learned=learned)
    list(asked(ours, LocalGrid(ClientApp(), nodes=NODES)))
    read, seen = np.load, []
    monkeypatch.setattr(np, "load", lambda file, **more: seen.append(bytes(file.getbuffer())) or read(file, **more))
    content = honest(ours, FIRST)
    array, bits = content["arrays"]["body"].data, content[KEY]["mask"]
    while counted < MUTATIONS // 2:
        replies, sent = [reply(FIRST, honest(ours, FIRST))], set()
        for node in range(FIRST + 1, FIRST + NODES):
            body, mask = mutated(array, rng), bits
            if node % 10 == 0:
                body, mask = array, mutated(bits, rng)
            sent.add(body)
            arrays = ArrayRecord({"body": Array(dtype="uint8", shape=(len(body),), stype="sparsekit.raw", data=body)})
            record = ConfigRecord({"mask": mask, "seconds": 1.0})
            replies.append(reply(node, RecordDict({"arrays": arrays, "metrics": content["metrics"], KEY: record})))
        merged, metrics = ours.aggregate_train(1, replies)
        counted += NODES - 1
        assert metrics["train_acc"] == pytest.approx(0.5)
        assert all(bool(torch.isfinite(tensor).all()) for tensor in merged.to_torch_state_dict().values())
        assert not sent & set(seen), "numpy read what a node sent"


def test_scores_with_names_of_their_own_cost_the_reply_of_their_node_alone(caplog):
    said = [{"num-examples": 10, "eval_acc": 0.5}] * 2 + [{"num-examples": 10}, {"eval_acc": [0.5], "num-examples": 1}]
    replies = [reply(node, RecordDict({"metrics": MetricRecord(one)})) for node, one in enumerate(said)]
    replies += [reply(7, RecordDict({})), reply(0, RecordDict({"metrics": MetricRecord(said[0])}))]
    assert dict(strategy().aggregate_evaluate(1, replies) or {}) == {"eval_acc": 0.5}
    assert all(f"without the reply of node {node}: " in caplog.text for node in (0, 2, 3, 7))
