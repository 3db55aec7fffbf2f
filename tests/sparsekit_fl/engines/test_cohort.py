"""Cohort: the contract, whole runs within rounding of the embedded engine, and what trains one client at a time."""

import logging
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from personal import tiny_run
from torch import nn

import sparsekit_fl as fl
from sparsekit.graph.mask import WeightMask
from sparsekit_fl.engines import cohort
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.make import make_method
from sparsekit_fl.policies.aggregate import Mean
from sparsekit_fl.policies.local import Sgd
from sparsekit_fl.problem.models.networks import NextWordLstm
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import EngineContract, StopAfter, TinyNet, tiny_clients, tiny_config, tiny_problem

TOGETHER = ("fedavg", "fedprox", "fedper", "local", "fedmp", "fedrolex", "heterofl", "efd")
ALL_OPTIONS = {"momentum": 0.9, "weight_decay": 1e-3, "clip": 0.5}


class TestContract(EngineContract):
    rounding = 1e-5

    @pytest.fixture
    def engine(self):
        return fl.Cohort()


@pytest.fixture
def precise():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def shared(monkeypatch):
    """Number of clients of each training that they share."""
    found = []
    real = cohort._Steps.run

    def counted(self):
        real(self)
        found.append(len(self._rounds))

    monkeypatch.setattr(cohort._Steps, "run", counted)
    return found


def points():
    """The problem and clients of `tiny`, in the default type."""
    dtype = torch.get_default_dtype()

    def wide(data):
        return fl.TensorData(tuple(x.to(dtype) for x in data.inputs), data.targets)

    clients = [
        replace(client, data=fl.ClientData(*(wide(split) for split in (client.data.train, client.data.val, client.data.test))))
        for client in tiny_clients()
    ]
    return tiny_problem(), clients


def clients_of(draw):
    """Clients with batches of other sizes at the end, and other numbers of batches."""
    generator = torch.Generator().manual_seed(5)

    def split(size):
        inputs, targets = draw(size, generator)
        return fl.TensorData((inputs,), targets)

    return [fl.Client(id=n, data=fl.ClientData(split(9 + 2 * n), split(4), split(4))) for n in range(4)]


def small_net():
    """Convolutions, batch norm, a pool and a linear layer."""
    layers = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, stride=2)
    return nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.Linear(8 * 3 * 3, 3))


def images():
    def draw(size, generator):
        found = torch.randn(size, 1, 16, 16, generator=generator, dtype=torch.get_default_dtype())
        return found, torch.randint(0, 3, (size,), generator=generator)

    problem = fl.Problem(model=small_net, example_inputs=(torch.zeros(2, 1, 16, 16),), channels_last=True)
    return problem, clients_of(draw)


def tokens():
    def draw(size, generator):
        found = torch.randint(0, 20, (size, 5), generator=generator)
        return found, found.roll(-1, 1)

    inputs = (torch.zeros(2, 5, dtype=torch.long),)
    return fl.Problem(model=lambda: NextWordLstm(20, 6, 8), example_inputs=inputs), clients_of(draw)


class Unused(TinyNet):
    """Has a layer that the loss does not depend on: nothing, not even a weight decay, may move it."""

    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(3, 3)


def unused():
    problem, clients = points()
    return replace(problem, model=Unused), clients


def config(**training):
    base = tiny_config()
    return replace(base, training=replace(base.training, **training))


def both(method, problem, clients, options, **cohort):
    return run(method, problem, clients, options), run(method, problem, clients, options, engine=fl.Cohort(**cohort))


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize(
    ("method", "case", "options"),
    [
        *((registry[name](), points, {}) for name in TOGETHER),
        *((registry[name](), images, ALL_OPTIONS) for name in ("fedprox", "heterofl")),
        (registry["heterofl"](), tokens, {}),
        (registry["fedavg"](), unused, ALL_OPTIONS),
        (make_method("heterofl local.scaler=false local.clip=none"), points, {}),
    ],
    ids=lambda value: getattr(value, "name", None) or getattr(value, "__name__", None),
)
def test_a_whole_run_in_float64_equals_one_by_one(method, case, options, shared):
    theirs, ours = both(method, *case(), config(**options))
    for name, tensor in theirs.state.items():
        torch.testing.assert_close(ours.state[name], tensor, rtol=1e-9, atol=1e-9)
    for one, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert one.cohort == other.cohort
        assert one.ratios == other.ratios
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
        assert one.accuracy == pytest.approx(other.accuracy, rel=1e-9)
        assert one.cost.flops == other.cost.flops
    assert [client.personal["accuracy"] for client in ours.final.per_client] == [
        client.personal["accuracy"] for client in theirs.final.per_client
    ]
    assert max(shared) > 1


def dropout_net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


class Restless(nn.Module):
    """Looks at its values, which no mapped call can."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = torch.relu(self.first(inputs))
        return self.last(hidden if float(hidden.mean().detach()) > 100 else 2 * hidden)


def proud(outputs, targets):
    return F.cross_entropy(outputs, targets) * (1.0 if int(targets.max()) < 2 else 2.0)


def picky(outputs, targets):
    hits = int((outputs.argmax(-1) == targets).sum())
    return torch.tensor(float(hits)), torch.tensor(float(len(targets)))


@dataclass(frozen=True)
class Louder(Sgd):
    """Changes how it trains."""

    def train(self, ctx, start, mask, ratio):
        return replace(super().train(ctx, start, mask, ratio), metrics={"loud": 1.0})


@dataclass(frozen=True)
class Sparse(fl.MaskPolicy):
    """A mask of single weights."""

    def choose(self, ctx, ratio, state):
        return WeightMask({"first.weight": torch.ones(8, 6, dtype=torch.bool)})


MASKED_LOSS = "local.masked_loss=true aggregate=TouchedRowsMean aggregate.weighting=uniform"
FEDAVG = fl.Method(name="m", source="")
REFUSED = "torch cannot run the model for several clients at once"


@pytest.mark.parametrize(
    ("method", "changes", "training", "reason"),
    [
        (registry["fedlps"](), {}, {}, "its local policy, LearnableSgd, trains in a way of its own"),
        (replace(FEDAVG, local=Louder()), {}, {}, "its local policy, Louder, trains in a way of its own"),
        (make_method("fedprox local.stragglers=0.5"), {}, {}, "its stragglers take fewer steps"),
        (make_method(f"heterofl {MASKED_LOSS}"), {}, {}, "each of its clients has a loss of its own"),
        (FEDAVG, {}, {"optimizer": "adam"}, "optimizer is 'adam'"),
        (FEDAVG, {"model": dropout_net}, {}, REFUSED),
        (FEDAVG, {"model": Restless}, {}, REFUSED),
        (FEDAVG, {"loss": proud}, {}, REFUSED),
        (FEDAVG, {"metrics": {"accuracy": picky}}, {}, REFUSED),
        (replace(FEDAVG, mask=Sparse(), aggregate=Mean(over="all")), {}, {}, None),
    ],
)
@pytest.mark.same_bits
def test_what_cannot_share_steps_trains_as_the_embedded_engine_does_and_one_warning_says_why(
    method, changes, training, reason, caplog
):
    problem, clients = points()
    problem = replace(problem, **changes)
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        theirs, ours = both(method, problem, clients, config(**training))
    assert ours.final.state_sha256 == theirs.final.state_sha256
    assert ours.final.per_client == theirs.final.per_client
    found = [record.getMessage() for record in caplog.records if record.name == cohort.__name__]
    assert len(found) == (reason is not None)
    assert all(text.startswith(f"method '{method.name}' trains one client at a time: {reason}") for text in found)


@pytest.mark.same_bits
def test_a_failing_client_costs_itself_alone(shared, caplog):
    problem, clients = points()
    broken = clients[2].data.train
    inputs = broken.inputs[0].clone()
    inputs[0] = float("nan")
    clients[2] = replace(clients[2], data=replace(clients[2].data, train=fl.TensorData((inputs,), broken.targets)))
    everyone = replace(tiny_config(rounds=2), cohort=8)
    theirs, ours = both(FEDAVG, problem, clients, everyone)
    assert [one.dropped for one in ours.rounds] == [one.dropped for one in theirs.rounds]
    assert "inputs of client 2 hold NaN" in str(ours.rounds[0].dropped)
    assert ours.final.state_sha256 == theirs.final.state_sha256
    assert "one client at a time" not in caplog.text
    assert not shared


@pytest.mark.same_bits
def test_a_stopped_run_resumes_to_the_same_bits(tmp_path):
    with pytest.raises(fl.errors.RunInterrupted):
        tiny_run("heterofl", engine=fl.Cohort(), out=tmp_path, callbacks=(StopAfter(2),))
    resumed = tiny_run("heterofl", engine=fl.Cohort(), out=tmp_path, resume=True)
    assert resumed.final.state_sha256 == tiny_run("heterofl", engine=fl.Cohort()).final.state_sha256
