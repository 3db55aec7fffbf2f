"""Cohort: the contract, the bits of the embedded engine, and batched kernels within rounding, for each family of methods."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsekit.errors import InvalidValueError
from sparsekit_fl.client import cohort
from sparsekit_fl.engines.cohort import Cohort
from sparsekit_fl.lanes import kernels
from sparsekit_fl.methods import registry
from sparsekit_fl.methods.method import Method
from sparsekit_fl.models.lstm import NextWordLstm
from sparsekit_fl.policies.learnable import LearnableSgd
from sparsekit_fl.policies.local import Sgd
from sparsekit_fl.problem.clients import Client, ClientData
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.engines import EngineContract
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem

TOGETHER = ("fedavg", "fedprox", "fedper", "local", "fedmp", "fedrolex", "heterofl", "efd")
FAMILIES = ("fedavg", "fedprox", "fedmp", "heterofl", "fedlps", "fedlps-paper")
BATCHED = ({"widths": ()}, {"widths": (0.5, 1.0)}, {"widths": (1.0,), "lanes": 2})
ALL_OPTIONS = {"momentum": 0.9, "weight_decay": 1e-3, "clip": 0.5}


class TestOneWorker(EngineContract):
    @pytest.fixture
    def engine(self):
        return Cohort()


class TestTwoWorkers(EngineContract):
    @pytest.fixture
    def engine(self):
        return Cohort(2)


@pytest.fixture
def precise():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def steps(monkeypatch):
    """Number of clients in each call of a trainer."""
    found = []
    real = cohort.LaneTrainer.train

    def train(self, lanes):
        found.append(len(lanes))
        return real(self, lanes)

    monkeypatch.setattr(cohort.LaneTrainer, "train", train)
    return found


def precise_clients(count=8):
    def wide(data):
        return TensorData(tuple(x.double() for x in data.inputs), data.targets)

    return [
        replace(client, data=ClientData(*(wide(split) for split in (client.data.train, client.data.val, client.data.test))))
        for client in tiny_clients(count)
    ]


def config(**training):
    base = tiny_config()
    return replace(base, training=replace(base.training, **training))


def assert_close(ours, theirs, tolerance):
    for name, tensor in theirs.state.items():
        torch.testing.assert_close(ours.state[name], tensor, rtol=tolerance, atol=tolerance)
    for one, other in zip(ours.rounds, theirs.rounds, strict=True):
        assert one.cohort == other.cohort
        assert one.ratios == pytest.approx(other.ratios)
        assert one.loss == pytest.approx(other.loss, rel=tolerance)
        assert one.cost.flops_compact == other.cost.flops_compact
    assert [one.personal["accuracy"] for one in ours.final.per_client] == [
        one.personal["accuracy"] for one in theirs.final.per_client
    ]


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in TOGETHER), ("fedprox", ALL_OPTIONS), ("heterofl", ALL_OPTIONS)]
)
def test_without_batched_kernels_a_run_has_the_bits_of_the_embedded_engine(name, options, steps):
    embedded = run(registry[name](), tiny_problem(), tiny_clients(), config(**options))
    ours = run(registry[name](), tiny_problem(), tiny_clients(), config(**options), engine=Cohort())
    assert ours.final.state_sha256 == embedded.final.state_sha256
    assert ours.final.per_client == embedded.final.per_client
    assert [record.loss for record in ours.rounds] == [record.loss for record in embedded.rounds]
    assert max(steps) > 1


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in FAMILIES), ("fedprox", ALL_OPTIONS), ("heterofl", ALL_OPTIONS), ("fedlps-paper", ALL_OPTIONS)],
)
def test_with_batched_kernels_a_whole_run_in_float64_equals_the_embedded_one(name, options, steps):
    embedded = run(registry[name](), tiny_problem(), precise_clients(), config(**options))
    for choice in BATCHED:
        steps.clear()
        engine = Cohort(batched=True, **choice)
        ours = run(registry[name](), tiny_problem(), precise_clients(), config(**options), engine=engine)
        assert_close(ours, embedded, 1e-9)
        assert len(steps) > 0
    assert max(steps) == 2


@pytest.mark.usefixtures("precise")
def test_options_of_a_policy_hold_for_batched_kernels_too():
    options = {"passes": 1.5, "proximal": 0.5, "proximal_reduction": "sum", "noise": 0.02, "importance_lr": 0.05}
    method = replace(registry["fedlps"](), local=LearnableSgd(**options))
    embedded = run(method, tiny_problem(), precise_clients(), tiny_config())
    ours = run(method, tiny_problem(), precise_clients(), tiny_config(), engine=Cohort(batched=True))
    assert_close(ours, embedded, 1e-9)


@pytest.mark.parametrize("name", ["fedavg", "heterofl", "fedlps"])
def test_batched_kernels_in_float32_score_as_the_embedded_engine_does(name):
    embedded = run(registry[name](), tiny_problem(), tiny_clients(), tiny_config())
    ours = run(registry[name](), tiny_problem(), tiny_clients(), tiny_config(), engine=Cohort(batched=True))
    assert ours.final.personal["accuracy"] == pytest.approx(embedded.final.personal["accuracy"], abs=0.05)


class SmallNet(nn.Module):
    """Convolutions, batch norm, pools, a group norm and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 8, 3, stride=2)
        self.last = nn.Linear(8 * 3 * 3, 3)

    def forward(self, images):
        hidden = F.max_pool2d(torch.relu(self.norm(self.conv(images))), 2)
        return self.last(torch.relu(self.second(hidden)).flatten(1))


def image_clients(dtype=torch.float32, count=4):
    generator = torch.Generator().manual_seed(5)

    def split(size):
        images = torch.randn(size, 1, 16, 16, generator=generator, dtype=torch.float64).to(dtype)
        return TensorData((images,), torch.randint(0, 3, (size,), generator=generator))

    return [Client(id=n, data=ClientData(split(9 + 2 * n), split(4), split(4))) for n in range(count)]


def token_clients(count=4):
    generator = torch.Generator().manual_seed(5)

    def split(size):
        tokens = torch.randint(0, 20, (size, 5), generator=generator)
        return TensorData((tokens,), tokens.roll(-1, 1))

    return [Client(id=n, data=ClientData(split(9 + 2 * n), split(4), split(4))) for n in range(count)]


def images():
    return Problem(model=SmallNet, example_inputs=(torch.zeros(2, 1, 16, 16),), channels_last=True)


def tokens():
    return Problem(model=lambda: NextWordLstm(20, 6, 8), example_inputs=(torch.zeros(2, 5, dtype=torch.long),))


@pytest.mark.usefixtures("precise")
@pytest.mark.parametrize("name", ["fedavg", "heterofl", "fedlps-paper"])
@pytest.mark.parametrize("kind", ["convolutions", "lstm"])
def test_convolutions_and_recurrent_layers_are_batched_too(name, kind, steps, monkeypatch):
    monkeypatch.setattr(kernels, "each_by_itself", lambda x: False)  # as on a GPU
    problem, clients = (images(), image_clients(torch.float64)) if kind == "convolutions" else (tokens(), token_clients())
    embedded = run(registry[name](), problem, clients, tiny_config())
    ours = run(registry[name](), problem, clients, tiny_config(), engine=Cohort(batched=True, widths=(0.5, 1.0)))
    assert_close(ours, embedded, 1e-8)
    assert max(steps) > 1


@pytest.mark.parametrize(
    ("problem", "clients"), [(images, image_clients), (tokens, token_clients)], ids=["convolutions", "lstm"]
)
def test_convolutions_and_recurrent_layers_keep_their_bits_without_batched_kernels(problem, clients):
    embedded = run(registry["fedavg"](), problem(), clients(), tiny_config())
    ours = run(registry["fedavg"](), problem(), clients(), tiny_config(), engine=Cohort())
    assert ours.final.state_sha256 == embedded.final.state_sha256


@pytest.mark.parametrize("kind", ["linear", "conv", "lstm"])
@pytest.mark.parametrize("name", ["fedavg", "heterofl", "fedlps"])
def test_bits_do_not_depend_on_who_shares_a_step(name, kind):
    """Eight lanes, four, or each client by itself: what is added to a batched product does not change the others."""
    engines = (Cohort(batched=True), Cohort(batched=True, lanes=2), Cohort(batched=True, lanes=1), Cohort(2, batched=True))
    makers = {"linear": (tiny_problem, tiny_clients), "conv": (images, image_clients), "lstm": (tokens, token_clients)}
    problem, clients = makers[kind]
    results = [run(registry[name](), problem(), clients(), tiny_config(), engine=engine) for engine in engines]
    assert len({result.final.state_sha256 for result in results}) == 1
    assert len({str([record.loss for record in result.rounds]) for result in results}) == 1


class DropoutNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, inputs):
        return self.layers(inputs)


def test_dropout_draws_for_each_client_what_it_draws_alone(steps):
    problem = Problem(model=DropoutNet, example_inputs=(torch.zeros(2, 6),))
    embedded = run(registry["fedavg"](), problem, tiny_clients(), tiny_config())
    ours = run(registry["fedavg"](), problem, tiny_clients(), tiny_config(), engine=Cohort())
    assert ours.final.state_sha256 == embedded.final.state_sha256
    assert max(steps) == 4


def test_dropout_with_batched_kernels_falls_back_and_says_so(caplog, steps):
    problem = Problem(model=DropoutNet, example_inputs=(torch.zeros(2, 6),))
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        ours = run(registry["fedavg"](), problem, tiny_clients(), tiny_config(), engine=Cohort(batched=True))
    embedded = run(registry["fedavg"](), problem, tiny_clients(), tiny_config())
    assert ours.final.state_sha256 == embedded.final.state_sha256
    assert "one client at a time: Dropout 'layers.2' draws random numbers" in caplog.text
    assert not steps


class Restless(nn.Module):
    """Looks at its values, which no batched kernel can."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, inputs):
        hidden = torch.relu(self.first(inputs))
        return self.last(hidden if float(hidden.mean().detach()) > 100 else 2 * hidden)


def test_a_model_that_cannot_be_batched_falls_back_and_says_so(caplog):
    problem = Problem(model=Restless, example_inputs=(torch.zeros(2, 6),))
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        ours = run(registry["fedavg"](), problem, tiny_clients(), tiny_config(), engine=Cohort(batched=True))
    embedded = run(registry["fedavg"](), problem, tiny_clients(), tiny_config())
    assert ours.final.state_sha256 == embedded.final.state_sha256
    assert len(caplog.records) == 1
    assert "one client at a time from now on: the model cannot run for several clients at once" in caplog.text


@pytest.mark.parametrize("name", ["hermes", "ditto", "fedlps"])
def test_a_method_that_trains_otherwise_falls_back_and_says_so(name, caplog):
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        ours = run(registry[name](), tiny_problem(), tiny_clients(), tiny_config(), engine=Cohort())
    embedded = run(registry[name](), tiny_problem(), tiny_clients(), tiny_config())
    assert f"method {name!r} trains one client at a time" in caplog.text
    assert ours.final.state_sha256 == embedded.final.state_sha256


@pytest.mark.parametrize("options", [{"optimizer": "adam"}, {"amp": "bfloat16"}, {"local_schedule": "cosine"}])
def test_other_steps_than_those_of_sgd_fall_back_and_say_so(options, caplog):
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        ours = run(registry["fedavg"](), tiny_problem(), tiny_clients(), config(**options), engine=Cohort())
    embedded = run(registry["fedavg"](), tiny_problem(), tiny_clients(), config(**options))
    assert f"one client at a time: {next(iter(options))} is" in caplog.text
    assert ours.final.state_sha256 == embedded.final.state_sha256


@dataclass(frozen=True)
class _Louder(Sgd):
    """Changes how it trains and inherits the description of `Sgd`."""

    def train(self, ctx, start, mask, ratio):
        result = super().train(ctx, start, mask, ratio)
        return replace(result, metrics={"loud": 1.0})


@dataclass(frozen=True)
class _Renamed(Sgd):
    """Changes nothing about training."""

    def check(self, problem, graph):
        pass


def test_a_subclass_that_trains_otherwise_is_not_taken_for_its_parent():
    assert Sgd().why_alone(batched=True) is None
    assert _Renamed().why_alone(batched=True) is None
    assert "_Louder" in (_Louder().why_alone(batched=True) or "")


def _proud(outputs, targets):
    return F.cross_entropy(outputs, targets) * (1.0 if int(targets.max()) < 2 else 2.0)


def _picky(outputs, targets):
    hits = int((outputs.argmax(-1) == targets).sum())
    return torch.tensor(float(hits)), torch.tensor(float(len(targets)))


def test_a_loss_and_a_metric_of_ones_own_may_look_at_values():
    problem = replace(tiny_problem(), loss=_proud, metrics={"accuracy": _picky})
    embedded = run(Method(name="m", source=""), problem, tiny_clients(), tiny_config())
    ours = run(Method(name="m", source=""), problem, tiny_clients(), tiny_config(), engine=Cohort(batched=True))
    assert [record.accuracy for record in ours.rounds] == pytest.approx([record.accuracy for record in embedded.rounds])
    assert_close(ours, embedded, 1e-4)


def test_importance_that_diverges_is_that_clients_error():
    method = registry["fedlps-paper"]()
    problem = replace(tiny_problem(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * float("nan"))
    with pytest.raises(Exception, match="importance became NaN"):
        run(method, problem, tiny_clients(), tiny_config(), engine=Cohort(batched=True))


def test_a_stopped_run_resumes_to_the_same_bits(tmp_path):
    from sparsekit_fl.errors import RunInterrupted
    from sparsekit_fl.testing.methods import StopAfter

    common = (registry["fedlps"](), tiny_problem(), tiny_clients(), tiny_config())
    with pytest.raises(RunInterrupted):
        run(*common, engine=Cohort(batched=True), out=tmp_path, observers=(StopAfter(2),))
    resumed = run(*common, engine=Cohort(batched=True), out=tmp_path, resume=True)
    assert resumed.final.state_sha256 == run(*common, engine=Cohort(batched=True)).final.state_sha256


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers must be an integer >= 1, got 0"),
        ({"lanes": 0}, "lanes must be an integer >= 1, got 0"),
        ({"widths": (0.5,)}, "widths must ascend in"),
        ({"widths": (1.0, 0.5)}, "widths must ascend in"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(InvalidValueError, match=words):
        Cohort(**options)
