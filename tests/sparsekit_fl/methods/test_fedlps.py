"""FedLPS: the oracles of learned patterns and of the bandit, patterns over a client's own classes, and the ablations."""

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from personal import STATE, client_context, deep_problem, server_context, tiny_run, training, watched
from torch import nn

import sparsekit as sk
import sparsekit_fl as fl
from sparsekit.graph import UnitMask
from sparsekit_fl.client.fit import TrainingLog
from sparsekit_fl.client.packing import Kept
from sparsekit_fl.methods import fedavg, fedlps, fedlps_paper, registry
from sparsekit_fl.methods.fedlps import utility
from sparsekit_fl.methods.local_classes import FedLPSLocalClasses
from sparsekit_fl.methods.server import ClientInfo
from sparsekit_fl.spec import RunSpec
from sparsekit_fl.testing import TinyNet, tiny_clients, tiny_config, tiny_problem


def server(round: int, capability: float, memory: dict) -> fl.ServerContext:
    roster = {7: ClientInfo(examples=10, capability=fl.Capability(ratio=capability))}
    return server_context(round=round, rounds=100, roster=roster, cohort=10, rng=[0, round], memory=memory)


def answer(ratio: float, accuracy: float, **metrics: float) -> fl.Update:
    return fl.Update(
        round=1, client_id=7, examples=10, delta={name: torch.zeros_like(one) for name, one in STATE.items()}, ratio=ratio,
        metrics={"accuracy": accuracy, **metrics}, cost=fl.WorkCost(seconds=2.0),
    )  # fmt: skip


def test_proposals_never_exceed_the_capability_of_the_round() -> None:
    method, memory = fedlps(), {}
    for round in range(1, 60):
        level = (1.0, 0.5, 0.25, 0.125, 0.0625)[round % 5]
        ctx = server(round, level, memory)
        proposal = method.assign(ctx, 7).ratio
        assert 1 / 16 <= proposal <= max(level, 1 / 16)
        if round % 3:
            method.aggregate(ctx, [answer(proposal, 0.5 + 0.001 * round, initial_accuracy=0.1)])


def test_a_proposal_that_was_never_answered_is_made_again() -> None:
    memory: dict = {}
    first = fedlps().assign(server(1, 1.0, memory), 7).ratio
    assert fedlps().assign(server(2, 1.0, memory), 7).ratio == first


@pytest.mark.parametrize(("capability", "eliminated"), [(1.0, True), (1 / 16, False)])
def test_a_ratio_is_eliminated_only_if_it_was_executed(capability, eliminated) -> None:
    """Accuracy that falls under a ratio that capability cut says nothing of the drawn one."""
    method, memory = fedlps(), {}
    for round, accuracy in ((1, 0.9), (2, 0.1)):
        ctx = server(round, capability, memory)
        ratio = method.assign(ctx, 7).ratio
        method.aggregate(ctx, [answer(ratio, accuracy, initial_accuracy=0.1)])
    # Each of two pulls splits one of five arms.
    assert len(method._bandit(ctx, memory["7"], seed=0).arms) == (6 if eliminated else 7)


def test_fedlps_paper_has_the_sums_of_the_paper_and_counts_no_download() -> None:
    method = fedlps_paper()
    masked = SimpleNamespace(named_weights=lambda: {"w": None})
    assert method._pull({"w": torch.zeros(1, 3)}, masked) == 2.0  # the gradient of ‖θ − ω‖²
    memory: dict = {}
    ctx = server(1, 1.0, memory)
    ratio, rate = method.assign(ctx, 7).ratio, fl.Capability().downlink_bytes_per_second
    update = answer(ratio, 0.5, initial_accuracy=0.1)
    method.aggregate(ctx, [dataclasses.replace(update, cost=fl.WorkCost(seconds=2.0, downlink_bytes=int(rate)))])
    ((_, reward),) = method._bandit(ctx, memory["7"], seed=0).told
    assert reward == pytest.approx(utility(0.5) - utility(0.1))


@pytest.mark.parametrize("criterion", ["activation", "fisher"])
def test_a_pattern_that_starts_from_own_data_keeps_units_that_serve_it_and_loses_nothing(criterion: str) -> None:
    spec, client, context = client_context(fedlps(start=criterion, strength=0.0))
    state = {name: tensor.clone() for name, tensor in TinyNet().state_dict().items()}
    state["first.weight"][::2], state["first.bias"][::2] = 9.0, -1e3  # large, and behind a ReLU always zero
    state["last.weight"][:, ::2], state["first.bias"][1::2] = 9.0, 1.0
    spec.method._begin(context, fl.Task(state=state, ratio=0.5))
    start = {name: value + context.memory["refit"].get(name, 0.0) for name, value in state.items()}
    assert context.memory["importance"].argsort(descending=True)[:4].sort().values.tolist() == [1, 3, 5, 7]
    inputs = client.data.train.inputs[0]
    net = TinyNet().eval()
    net.load_state_dict(start)
    small = sk.compact(net, spec.graph, UnitMask({"first": torch.arange(8) % 2 == 1}))
    torch.testing.assert_close(small(inputs), net(inputs), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("problem", [tiny_problem(), deep_problem()], ids=["norm", "plain"])
def test_a_refit_stays_with_its_client_in_every_round(problem: fl.Problem) -> None:
    """A client that hardly trains uploads what it received, and deploys the refitted model."""
    config = training(tiny_config(), lr=1e-9)
    method = fedlps(start="fisher", strength=0.0, ratios=0.5, keep="last")
    received = {name: tensor.clone() for name, tensor in problem.model().state_dict().items()}
    memory: dict = {}
    for round in (1, 2):
        _, _, context = client_context(method, problem, config, memory=memory, round=round)
        result = method.train(context, fl.Task(state=received, ratio=0.5))
        kept, deployed = Kept(context.graph, result.mask), memory["kept"]["state"]
        sent = {name: value for name, value in result.state.items() if value.is_floating_point()}
        for name, value in sent.items():
            torch.testing.assert_close(value, kept.gather(name, received[name]), rtol=0, atol=1e-5)
        assert max(float((deployed[name] - value).abs().max()) for name, value in sent.items()) > 0.01
        received = {name: value + 0.1 if name in sent else value for name, value in received.items()}


def test_own_data_are_scored_at_the_first_participation_alone() -> None:
    plain, own = (watched(fedlps(start=start, strength=0.0, ratios=0.5), rounds=8)[1] for start in ("magnitude", "fisher"))
    seen = set()
    for one, other in zip(plain, own, strict=True):
        assert (other.cost.flops_scoring > one.cost.flops_scoring) == (other.client_id not in seen)
        seen.add(other.client_id)
    assert len(seen) < len(own)


def test_utility_is_the_papers_function() -> None:
    for x in (0.0, 0.3, 1.0, 15.0):
        assert utility(x) == pytest.approx(10 - 20 / (1 + math.exp(0.35 * x)))


GRAPH = RunSpec.build(fedavg(), tiny_problem(), tiny_config()).graph


def test_rows_of_classes_without_an_example_train_lower_and_go_up_as_they_came(monkeypatch) -> None:
    names, narrow = ("last.bias", "last.weight", "first.bias"), UnitMask({"first": torch.arange(8) < 4})
    start = {name: torch.zeros_like(tensor) for name, tensor in TinyNet().state_dict().items()}
    start["last.bias"] = torch.tensor([1.0, 2.0, 3.0])
    state = {"last.bias": torch.tensor([1.5, -27.0, 2.0]), "last.weight": torch.ones(3, 4), "first.bias": torch.ones(4)}
    entered = []

    def trained(self, client, task):
        entered.append(task.state)
        return fl.Result(state=state, mask=narrow, log=TrainingLog())

    monkeypatch.setattr(fl.methods.fedlps, "train", trained)
    client: Any = SimpleNamespace(graph=GRAPH, frozen=frozenset(), memory={"classes": torch.tensor([0, 2])})
    found = FedLPSLocalClasses().train(client, fl.Task(state=start)).state
    assert entered[0]["last.bias"].tolist() == [1.0, -28.0, 3.0]
    assert all(entered[0][name] is start[name] for name in start if name != "last.bias")
    assert [found[name].tolist() for name in names] == [[1.5, 2.0, 2.0], [[1.0] * 4, [0.0] * 4, [1.0] * 4], [1.0] * 4]
    assert state["last.bias"].tolist() == [1.5, -27.0, 2.0], "the model that is kept has the lower bias"


def test_without_an_output_bias_nothing_changes_and_a_warning_says_so(caplog) -> None:
    problem = fl.Problem(
        model=lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3, bias=False)),
        example_inputs=(torch.zeros(2, 6),),
    )
    plain, ours = (
        [update.delta["0.weight"] for update in watched(method, problem=problem, rounds=1)[1]]
        for method in (fl.methods.fedlps(low=0.25, high=0.4, keep="loss"), FedLPSLocalClasses())
    )
    assert "the output layer has no bias of its own" in caplog.text
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))


def one_class_less(client: fl.Client) -> fl.Client:
    """The client without its examples of class 1."""

    def without(data: fl.TensorData) -> fl.TensorData:
        kept = data.targets != 1
        return fl.TensorData((data.inputs[0][kept],), data.targets[kept])

    data = client.data
    return dataclasses.replace(client, data=fl.ClientData(train=without(data.train), val=data.val, test=without(data.test)))


def test_a_client_neither_trains_nor_predicts_a_class_that_it_does_not_have(tmp_path) -> None:
    from sparsekit.surgery.saving import load_compact

    clients = [one_class_less(client) for client in tiny_clients()]
    _, updates = watched(FedLPSLocalClasses(), clients=clients, out=tmp_path)
    for update in updates:
        assert not update.delta["last.weight"][1].any()
        assert not update.delta["last.bias"][1].any()
        assert update.delta["last.bias"][0] != 0
    trained = {update.client_id for update in updates}
    points = torch.randn(200, 6, generator=torch.Generator().manual_seed(0))
    for client_id in trained:
        model = load_compact(tmp_path / "models" / f"client-{client_id}.safetensors", tiny_problem().model()).eval()
        assert 1 not in model(points).argmax(1)


PATTERNS = ["fedlps-random", "fedlps-ordered", "fedlps-magnitude"]
CHANGED = {
    "flst": {"ratios"}, "rcr-fix": {"ratios"}, "rcr-dyn": {"ratios"}, "p-ucbv-fix": set(), "p-ucbv-dyn": set(),
    **{name: {"pattern"} for name in PATTERNS},
}  # fmt: skip


def test_only_the_named_part_differs_from_fedlps() -> None:
    variants = {"fedlps", "fedlps-paper", "fedlps-local-classes"}
    assert set(CHANGED) == {name for name, kind in registry.items() if issubclass(kind, fedlps)} - variants
    for name, changed in CHANGED.items():
        ours, whole = registry[name]().options(), fedlps().options()
        assert {option for option in whole if ours[option] != whole[option]} == changed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fixed"), [("rcr-fix", True), ("rcr-dyn", False)])
def test_a_clients_capability_is_drawn_once_or_in_every_round(name, fixed) -> None:
    # The run says the opposite of the method, which has the last word.
    config = dataclasses.replace(tiny_config(rounds=8), capability="dynamic" if fixed else "fixed")
    result, updates = watched(name, config=config)
    ratios: dict[int, set[float]] = {}
    for update in updates:
        ratios.setdefault(update.client_id, set()).add(update.ratio)
    assert all(len(found) == 1 for found in ratios.values()) == fixed
    assert result.config.capability == ("fixed" if fixed else "dynamic")


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PATTERNS, "fedlps-local-classes pattern=ordered"])
def test_patterns_take_one_ratio_for_all_or_leave_it_to_the_bandits(name) -> None:
    _, free = watched(name, rounds=6)
    _, bound = watched(f"{name} ratios=0.5", rounds=6)
    assert len({update.ratio for update in free}) > 3
    assert {update.ratio for update in bound} == {0.5}
    first = {}
    for update in free:
        first.setdefault(update.client_id, update)
    assert all(("initial_accuracy" in update.metrics) == (first[update.client_id] is update) for update in free)


@pytest.mark.slow
def test_the_proximal_term_is_that_of_the_learning_client() -> None:
    options = "ratios=1.0 mu=500.0 strength=0.0"
    mine, theirs = (tiny_run(f"{name} {options}", rounds=1).state for name in ("fedlps-ordered", "fedlps"))
    assert all(torch.allclose(mine[name].double(), theirs[name].double(), atol=1e-5) for name in theirs)
