"""Submodels in a Flower app that exists already: the example's diff, what travels, and what a bad reply does."""

import difflib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAdam, FedAvg
from local_grid import LocalGrid

import sparsekit as sk
from sparsekit.errors import InvalidValueError
from sparsekit_fl.flower import SubmodelStrategy, train_submodel
from sparsekit_fl.flower.masks import KEY, traced
from sparsekit_fl.testing import TinyNet

pytestmark = pytest.mark.flower
FOLDER = Path(__file__).parents[3] / "examples/flower_first"
EXAMPLE = torch.zeros(1, 6)


class Grid(LocalGrid):
    """Answers `send_and_receive`, as the grid of an app does."""

    received: list[Message]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        left, found = set(self.push_messages(messages)), []
        while left:
            for reply in self.pull_messages(left):
                left.discard(reply.metadata.reply_to_message_id)
                found.append(reply)
        self.received = found
        return found


def module(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, made)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("app", ["dense", "heterofl", "fedlps"])
def test_the_example_learns(app: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module("task", FOLDER / "task.py", monkeypatch)
    client = module("client_app", FOLDER / app / "client_app.py", monkeypatch)
    server = module("server_app", FOLDER / app / "server_app.py", monkeypatch)
    torch.manual_seed(0)
    nodes, config = 6, {"num-server-rounds": 5, "local-epochs": 1, "learning-rate": 0.05}
    grid = Grid(client.app, nodes=nodes, run_config=config,
                node_configs=[{"partition-id": k, "num-partitions": nodes} for k in range(nodes)])  # fmt: skip
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=config)
    server.app(grid=grid, context=context)
    found = float(capsys.readouterr().out.split("eval_acc': ")[1].split("}")[0].split(",")[0])
    assert found > 0.5


@pytest.mark.parametrize("app", ["heterofl", "fedlps"])
def test_the_example_changes_at_most_40_lines_of_the_app(app: str) -> None:
    changed = 0
    for name in ("client_app.py", "server_app.py"):
        before, after = ((FOLDER / kind / name).read_text().splitlines() for kind in ("dense", app))
        changed += sum(line[0] in "+-" and line[1:2] != line[0] for line in difflib.ndiff(before, after) if line.strip())
    assert 0 < changed <= 40


def app_of(change: Callable[[Message, int], None] = lambda *_: None, *, capability: float = 1.0) -> ClientApp:
    """An app whose nodes add their number to every entry that they train, and change their reply."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        number = context.node_id - 1000
        with train_submodel(message, context, TinyNet(), EXAMPLE, capability=capability) as submodel, torch.no_grad():
            for parameter in submodel.model.parameters():
                if not isinstance(submodel.model, sk.LearnableMask):
                    parameter += number + 1
        reply = submodel.reply({"num-examples": 10 * (number + 1), "train_acc": 0.5})
        change(reply, number)
        return reply

    return app


def one_round(strategy: SubmodelStrategy, app: ClientApp, state: dict[str, Any], nodes: int = 3, **options: Any) -> Any:
    grid = Grid(app, nodes=nodes, **options)
    replies = grid.send_and_receive(strategy.configure_train(1, ArrayRecord(state), ConfigRecord(), grid))
    sizes = [sum(math.prod(array.shape) for array in reply.content["arrays"].values()) for reply in replies]
    arrays, metrics = strategy.aggregate_train(1, replies)
    return (None if arrays is None else arrays.to_torch_state_dict()), metrics, sizes


def fedavg() -> FedAvg:
    return FedAvg(fraction_train=1.0, min_train_nodes=1, min_available_nodes=1)


def test_an_entry_is_the_mean_over_its_holders_and_stays_where_nobody_trained_it() -> None:
    state = TinyNet().state_dict()
    ratios = {1000: 0.25, 1001: 0.5, 1002: 0.5}
    merged, metrics, sizes = one_round(
        SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE, ratio=ratios.__getitem__), app_of(), state
    )
    graph = traced(TinyNet(), EXAMPLE)
    masks = [sk.make_mask(sk.criteria.Ordered(), graph, ratio, sk.ScoringContext(weights=state)) for ratio in ratios.values()]
    for name, _ in TinyNet().named_parameters():
        tensor = state[name]
        zeros = {key: torch.zeros_like(value, dtype=torch.double) for key, value in state.items()}
        held = []
        for mask in masks:
            ones = {key: torch.ones_like(value, dtype=torch.double) for key, value in narrow_state(state, mask).items()}
            held.append(sk.expand(ones, graph, mask, into=zeros)[name])
        weight = sum(w * one for w, one in zip((10, 20, 30), held, strict=True))
        moved = sum(w * step * one for w, step, one in zip((10, 20, 30), (1, 2, 3), held, strict=True))
        wanted = tensor.double() + torch.where(weight > 0, moved / weight.clamp(min=1), 0.0)
        assert torch.allclose(merged[name].double(), wanted, atol=1e-6), name
    assert metrics["train_acc"] == pytest.approx(0.5)
    assert max(sizes) < sum(tensor.numel() for tensor in state.values()), "a client sends what it trained alone"
    over_all, _, _ = one_round(
        SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE, ratio=ratios.__getitem__, over="all"), app_of(), state
    )
    for name in state:
        assert ((over_all[name] - state[name]).abs() <= (merged[name] - state[name]).abs() + 1e-6).all()


def narrow_state(state: dict[str, Any], mask: sk.UnitMask) -> dict[str, Any]:
    model = TinyNet()
    model.load_state_dict(state)
    return sk.compact(model, traced(model, EXAMPLE), mask).state_dict()


def bad(array: Callable[[np.ndarray], np.ndarray]) -> Callable[[Message, int], None]:
    def change(reply: Message, number: int) -> None:
        if number == 2:
            name = next(iter(reply.content["arrays"]))
            reply.content["arrays"][name] = Array(array(reply.content["arrays"][name].numpy()))

    return change


def without_mask(reply: Message, number: int) -> None:
    if number == 2:
        reply.content[KEY] = ConfigRecord({"ratio": 0.5, "seconds": 1.0})


def no_examples(reply: Message, number: int) -> None:
    if number == 2:
        reply.content["metrics"] = MetricRecord({"num-examples": float("nan"), "train_acc": 0.5})


BAD = {
    "not finite": bad(lambda array: array * np.float32("nan")),
    "another shape": bad(lambda array: array[:1]),
    "another type": bad(lambda array: array.astype(np.float64)),
    "no mask": without_mask,
    "no number of examples": no_examples,
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
@pytest.mark.parametrize("mask", ["ordered", "magnitude", "learned"])
def test_a_bad_reply_changes_nothing(change: Any, mask: Any, caplog: pytest.LogCaptureFixture) -> None:
    state = TinyNet().state_dict()
    made = {nodes: one_round(SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE, mask=mask), app_of(how), state, nodes)[0]
            for nodes, how in ((3, change), (2, lambda *_: None))}  # fmt: skip
    assert all(torch.equal(made[3][name], made[2][name]) for name in state)
    assert "continues without the update of node 1002" in caplog.text


def test_a_reply_twice_counts_once_and_the_order_of_replies_changes_no_bit() -> None:
    state = TinyNet().state_dict()
    made = [one_round(SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE), app_of(), state, seed=seed, twice=twice)[0]
            for seed, twice in ((0, False), (1, False), (2, True))]  # fmt: skip
    assert all(torch.equal(one[name], made[0][name]) for one in made for name in state)


def test_a_strategy_that_steps_towards_the_mean_still_does() -> None:
    state = TinyNet().state_dict()
    inner = FedAdam(fraction_train=1.0, min_train_nodes=1, min_available_nodes=1, eta=0.5)
    inner.current_arrays = {name: Array(tensor.numpy()) for name, tensor in state.items()}
    merged, _, _ = one_round(SubmodelStrategy(inner, TinyNet(), EXAMPLE), app_of(), state)
    plain, _, _ = one_round(SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE), app_of(), state)
    assert any(not torch.allclose(merged[name].float(), plain[name].float()) for name in state)


def test_a_client_without_the_strategy_and_options_that_are_wrong_are_refused() -> None:
    message = Message(RecordDict({"arrays": ArrayRecord(TinyNet().state_dict())}), 1000, "train")
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
    with pytest.raises(InvalidValueError, match="SubmodelStrategy"), train_submodel(message, context, TinyNet(), EXAMPLE):
        pass
    for options in ({"mask": "any"}, {"over": "some"}):
        with pytest.raises(InvalidValueError):
            SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE, **options)
    with pytest.raises(InvalidValueError, match=r"ratio of node .* must be in \(0, 1\]"):
        one_round(SubmodelStrategy(fedavg(), TinyNet(), EXAMPLE, ratio=1.5), app_of(), TinyNet().state_dict())
