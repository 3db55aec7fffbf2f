"""Submodels in a Flower app that exists already: the example learns, and averages each entry over its holders."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from local_grid import LocalGrid

import sparsekit as sk

pytestmark = pytest.mark.flower
FOLDER = Path(__file__).parents[3] / "examples/flower_first"


def load(app, monkeypatch):
    """The modules of an example by name, as its folder on the path has them."""
    found = {}
    for path in [FOLDER / "task.py", *sorted((FOLDER / app).glob("*.py"), reverse=True)]:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        found[path.stem] = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, path.stem, found[path.stem])
        spec.loader.exec_module(found[path.stem])
    return found


@pytest.mark.parametrize("app", ["dense", "heterofl"])
def test_the_example_learns(app, monkeypatch, capsys):
    example = load(app, monkeypatch)
    torch.manual_seed(0)
    nodes, config = 6, {"num-server-rounds": 5, "local-epochs": 1, "learning-rate": 0.05}
    grid = LocalGrid(example["client_app"].app, nodes=nodes, run_config=config,
                     node_configs=[{"partition-id": k, "num-partitions": nodes} for k in range(nodes)])  # fmt: skip
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    example["server_app"].app(grid=grid, context=context)
    found = float(capsys.readouterr().out.split("eval_acc': ")[1].split("}")[0].split(",")[0])
    assert found > 0.5


def test_an_entry_is_the_mean_over_its_holders_and_stays_where_nobody_trained_it(monkeypatch):
    example = load("heterofl", monkeypatch)
    server, graph, state = example["server_app"], example["submodel"].GRAPH, example["task"].Net().state_dict()
    monkeypatch.setattr(server, "RATIOS", (0.25, 0.5))
    app, sent = ClientApp(), {}

    @app.train()
    def train(message, context):
        part, number = message.content["arrays"].to_torch_state_dict(), context.node_id % 2 + 1
        sent[number] = {name: torch.ones_like(one) for name, one in part.items()}
        trained = {name: one + number for name, one in part.items()}
        content = {"arrays": ArrayRecord(trained), "metrics": MetricRecord({"num-examples": 10 * number})}
        return Message(RecordDict(content), reply_to=message)

    grid, strategy = LocalGrid(app, nodes=2), server.HeteroFL(fraction_train=1.0, min_train_nodes=2, min_available_nodes=2)
    asked = strategy.configure_train(1, ArrayRecord(state), ConfigRecord({"lr": 0.1}), grid)
    merged = strategy.aggregate_train(1, list(grid.send_and_receive(asked)))[0].to_torch_state_dict()
    zeros = {name: torch.zeros_like(one) for name, one in state.items()}
    held = {
        number: sk.expand(part, graph, example["submodel"].first_units(server.RATIOS[number - 1]), into=zeros)
        for number, part in sent.items()
    }
    for name, before in state.items():
        weight = sum(10 * number * one[name] for number, one in held.items())
        moved = sum(10 * number**2 * one[name] for number, one in held.items()) / weight.clamp(min=1)
        torch.testing.assert_close(merged[name], before + moved)
    assert any((sum(one[name] for one in held.values()) == 0).any() for name in state), "some are trained by nobody"
