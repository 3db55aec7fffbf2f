"""Replay: recorded steps are the plain ones, bit by bit, for whole runs; what cannot be recorded is told and stays plain.

There is no CUDA in these tests but the last: `EmulatedRecorder` does on a CPU what a CUDA graph does.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from emulated_graph import EmulatedRecorder
from second_device import counts
from torch import nn

from sparsekit_fl.engines.cohort import Cohort
from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.lanes import kernels, recorder, step
from sparsekit_fl.lanes.replay import Replay
from sparsekit_fl.methods import registry
from sparsekit_fl.models.lstm import NextWordLstm
from sparsekit_fl.problem.clients import Client, ClientData
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.problem import Problem
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing.tiny import tiny_clients, tiny_config, tiny_problem

pytestmark = pytest.mark.cpu

ALL_OPTIONS = {"momentum": 0.9, "weight_decay": 1e-3, "clip": 0.5}


@pytest.fixture
def recorders(monkeypatch):
    """All recorders that were made, in order; a CPU records meanwhile."""
    made = []
    monkeypatch.setattr(EmulatedRecorder, "made", made, raising=False)
    monkeypatch.setitem(recorder.RECORDERS, "cpu", EmulatedRecorder)
    return made


class SmallNet(nn.Module):
    """Convolutions, batch norm with running statistics, a pool and a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.last = nn.Linear(6 * 4 * 4, 3)

    def forward(self, images):
        return self.last(F.max_pool2d(torch.relu(self.norm(self.conv(images))), 2).flatten(1))


def clients_of(kind, count=6):
    """Clients with 10 to 40 examples: other numbers of batches, and last batches of other sizes."""
    if kind == "points":
        return [
            replace(client, data=ClientData(TensorData(*_rows(client.data.train, 10 + 6 * n)), *_rest(client.data)))
            for n, client in enumerate(tiny_clients(count, examples=64))
        ]
    generator = torch.Generator().manual_seed(5)

    def split(size):
        if kind == "images":
            images = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64).float()
            return TensorData((images,), torch.randint(0, 3, (size,), generator=generator))
        tokens = torch.randint(0, 20, (size, 5), generator=generator)
        return TensorData((tokens,), tokens.roll(-1, 1))

    return [Client(id=n, data=ClientData(split(10 + 6 * n), split(4), split(4))) for n in range(count)]


def _rows(data, size):
    inputs, targets = data.batch(list(range(size)))
    return inputs, targets


def _rest(data):
    return data.val, data.test


def _wide(data):
    return [TensorData(tuple(x.double() for x in split.inputs), split.targets) for split in (data.train, data.val, data.test)]


def problem_of(kind):
    if kind == "points":
        return tiny_problem()
    if kind == "images":
        return Problem(model=SmallNet, example_inputs=(torch.zeros(2, 1, 8, 8),), channels_last=True)
    return Problem(model=lambda: NextWordLstm(20, 6, 8), example_inputs=(torch.zeros(2, 5, dtype=torch.long),))


def config_of(**training):
    base = replace(tiny_config(rounds=3), cohort=6)
    run_options = {name: training.pop(name) for name in ("lr_decay",) if name in training}
    return replace(base, training=replace(base.training, **training), **run_options)


def same(ours, theirs):
    assert ours.final.state_sha256 == theirs.final.state_sha256
    assert ours.final.per_client == theirs.final.per_client
    assert [record.loss for record in ours.rounds] == [record.loss for record in theirs.rounds]


CASES = [
    ("fedavg", "points", {}),
    ("fedavg", "points", ALL_OPTIONS),
    ("fedavg", "points", {"lr_decay": 0.7}),
    ("fedprox", "points", {"lr_decay": 0.7}),
    ("fedprox", "points", ALL_OPTIONS),
    ("heterofl", "points", ALL_OPTIONS),
    ("fedmp", "points", {"momentum": 0.9}),
    ("fedlps-paper", "points", {}),
    ("fedlps-paper", "points", {**ALL_OPTIONS, "lr_decay": 0.7}),
    ("fedlps", "points", {"momentum": 0.9, "lr_decay": 0.7}),
    ("fedavg", "images", {"momentum": 0.9, "lr_decay": 0.7}),
    ("heterofl", "images", {}),
    ("fedlps-paper", "images", {"lr_decay": 0.7}),
    ("fedavg", "tokens", {"momentum": 0.9, "lr_decay": 0.7}),
    ("fedlps-paper", "tokens", {"lr_decay": 0.7}),
]


def mark_slow_but(cases: list, *quick: int) -> list:
    """The cases of which those that are not named by their place belong to the slow part."""
    return [case if place in quick else pytest.param(*case, marks=pytest.mark.slow) for place, case in enumerate(cases)]


@pytest.mark.parametrize(("name", "kind", "options"), mark_slow_but(CASES, 1, 8, 10))
def test_replayed_steps_give_the_bits_of_plain_ones_for_a_whole_run(name, kind, options, recorders, monkeypatch):
    config = config_of(**options)
    replayed = run(registry[name](), problem_of(kind), clients_of(kind), config, engine=Cohort(batched=True))
    assert [found.refused for found in recorders] == [None]
    assert recorders[0].recordings >= 2, "whole steps and masked ones"
    assert recorders[0].replays > 2 * recorders[0].recordings
    plain = run(registry[name](), problem_of(kind), clients_of(kind), config, engine=Cohort(batched=True, graphs=False))
    same(replayed, plain)
    monkeypatch.undo()  # steps of just those clients that have a batch, as a CPU takes them
    same(replayed, run(registry[name](), problem_of(kind), clients_of(kind), config, engine=Cohort(batched=True)))


@pytest.mark.parametrize("kind", ["images", pytest.param("tokens", marks=pytest.mark.slow)])
def test_the_kernels_of_a_gpu_can_be_recorded(kind, recorders, monkeypatch):
    monkeypatch.setattr(kernels, "each_by_itself", lambda x: False)
    problem, config = problem_of(kind), config_of(momentum=0.9)
    replayed = run(registry["fedlps-paper"](), problem, clients_of(kind), config, engine=Cohort(batched=True))
    assert recorders[0].refused is None
    assert recorders[0].replays > 0
    plain = run(registry["fedlps-paper"](), problem, clients_of(kind), config, engine=Cohort(batched=True, graphs=False))
    same(replayed, plain)


@pytest.mark.parametrize(("name", "kind", "options"), mark_slow_but([case for case in CASES if case[1] == "points"], 1, 8))
def test_the_form_of_steps_on_a_gpu_gives_the_numbers_of_the_embedded_engine(name, kind, options, recorders):
    """Lanes side by side, of which some rest, and masks that change without a look at how many."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        clients = [replace(client, data=ClientData(*_wide(client.data))) for client in clients_of(kind)]
        ours = run(registry[name](), problem_of(kind), clients, config_of(**options), engine=Cohort(batched=True))
        theirs = run(registry[name](), problem_of(kind), clients, config_of(**options))
    finally:
        torch.set_default_dtype(before)
    for key, tensor in theirs.state.items():
        torch.testing.assert_close(ours.state[key], tensor, rtol=1e-9, atol=1e-9)
    assert [record.loss for record in ours.rounds] == pytest.approx([record.loss for record in theirs.rounds], rel=1e-9)


def test_a_learning_rate_that_was_baked_in_would_be_noticed(recorders, monkeypatch):
    """The emulator is worth something: a step that takes its learning rate as a number fails the test above."""
    real = step.LaneStep._move

    def baked(self, rows, found, lr):
        real(self, rows, found, torch.full_like(lr, self._stack.lanes[0].training.lr))

    monkeypatch.setattr(step.LaneStep, "_move", baked)
    config = config_of(lr_decay=0.5)
    ours, theirs = (
        run(registry["fedavg"](), tiny_problem(), clients_of("points"), config, engine=Cohort(batched=True, graphs=graphs))
        for graphs in (True, False)
    )
    assert recorders[0].replays > 0
    assert ours.final.state_sha256 != theirs.final.state_sha256


def test_inputs_that_move_would_be_noticed(recorders, monkeypatch):
    real = step.FixedTurn.fill

    def elsewhere(self, lanes, batches):
        self.inputs = tuple(torch.empty_like(buffer) for buffer in self.inputs)
        real(self, lanes, batches)

    monkeypatch.setattr(step.FixedTurn, "fill", elsewhere)
    ours, theirs = (
        run(registry["fedavg"](), tiny_problem(), clients_of("points"), config_of(), engine=Cohort(batched=True, graphs=graphs))
        for graphs in (True, False)
    )
    assert recorders[0].replays > 0
    assert ours.final.state_sha256 != theirs.final.state_sha256


@pytest.mark.parametrize("name", ["fedavg", pytest.param("fedlps-paper", marks=pytest.mark.slow), "heterofl"])
def test_cohorts_that_change_from_round_to_round_are_replayed_too(name, recorders):
    """Other clients, and other numbers of them, in each bucket; more clients than lanes."""
    config = replace(config_of(lr_decay=0.9), rounds=6, cohort=3)
    problem, clients = tiny_problem(), clients_of("points", 8)
    replayed = run(registry[name](), problem, clients, config, engine=Cohort(batched=True, lanes=2))
    assert recorders[0].refused is None
    assert recorders[0].replays > 0
    same(replayed, run(registry[name](), problem, clients, config, engine=Cohort(batched=True, lanes=2, graphs=False)))


def test_few_clients_that_are_left_are_computed_by_themselves(recorders):
    """One client with many batches beside five with few."""
    long = [
        replace(c, data=ClientData(TensorData(*_rows(c.data.train, 60)), *_rest(c.data))) for c in tiny_clients(1, examples=64)
    ]
    short = [
        replace(c, data=ClientData(TensorData(*_rows(c.data.train, 8)), *_rest(c.data)))
        for c in tiny_clients(6, examples=64)[1:]
    ]
    config = config_of(momentum=0.9)
    replayed = run(registry["fedavg"](), tiny_problem(), [*long, *short], config, engine=Cohort(batched=True))
    assert recorders[0].recordings >= 2
    assert recorders[0].refused is None
    plain = Cohort(batched=True, graphs=False)
    same(replayed, run(registry["fedavg"](), tiny_problem(), [*long, *short], config, engine=plain))


def test_graphs_switched_off_record_nothing(recorders):
    run(registry["fedavg"](), tiny_problem(), clients_of("points"), config_of(), engine=Cohort(batched=True, graphs=False))
    assert not recorders


def _looks(outputs, targets):
    """A loss that reads a number, so that it is called once per client, and cannot be recorded."""
    return F.cross_entropy(outputs, targets) * (1.0 if int(targets.max()) < 5 else 2.0)


def test_a_step_that_waits_for_the_device_stays_plain_and_one_warning_says_why(recorders, caplog):
    problem = replace(tiny_problem(), loss=_looks)
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        ours = run(registry["fedavg"](), problem, clients_of("points"), config_of(momentum=0.9), engine=Cohort(batched=True))
    assert [record.message for record in caplog.records] == [
        "steps of several clients are not recorded, and every kernel is started by itself: RuntimeError: called a synchronizing"
        " operation: _local_scalar_dense waits for the device"
    ]
    assert recorders[0].recordings == 0
    engine = Cohort(batched=True, graphs=False)
    same(ours, run(registry["fedavg"](), problem, clients_of("points"), config_of(momentum=0.9), engine=engine))


def _from_the_host(outputs, targets):
    return F.cross_entropy(outputs * torch.tensor([1.0, 1.0, 1.0]), targets)


def test_what_only_a_recording_refuses_stays_plain_with_nothing_lost(recorders, caplog):
    problem = replace(tiny_problem(), loss=_from_the_host)
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        ours = run(registry["fedlps-paper"](), problem, clients_of("points"), config_of(), engine=Cohort(batched=True))
    assert len(caplog.records) == 1
    assert "lift_fresh copies from the host" in caplog.text
    engine = Cohort(batched=True, graphs=False)
    same(ours, run(registry["fedlps-paper"](), problem, clients_of("points"), config_of(), engine=engine))


class Wrong(EmulatedRecorder):
    """A recording that forgets what it ought to do last."""

    def record(self, step):
        run, outputs = super().record(step)

        def less():
            run()
            outputs[0].mul_(1.01)

        return less, outputs


def test_a_recording_that_gives_other_numbers_is_thrown_away(recorders, monkeypatch, caplog):
    monkeypatch.setitem(recorder.RECORDERS, "cpu", Wrong)
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl"):
        ours = run(registry["fedlps-paper"](), tiny_problem(), clients_of("points"), config_of(), engine=Cohort(batched=True))
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "a recorded step gave other numbers than the same step by itself"
    ]
    engine = Cohort(batched=True, graphs=False)
    same(ours, run(registry["fedlps-paper"](), tiny_problem(), clients_of("points"), config_of(), engine=engine))


def test_an_error_of_the_model_is_that_clients_error(recorders):
    problem = replace(tiny_problem(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * float("nan"))
    with pytest.raises(Exception, match="importance became NaN"):
        run(registry["fedlps-paper"](), problem, clients_of("points"), config_of(), engine=Cohort(batched=True))


def test_a_step_of_a_kind_is_recorded_the_third_time(recorders):
    weight, lr, calls = torch.zeros(3), torch.tensor(0.5), []

    def one():
        calls.append(None)
        weight.add_(lr)
        return (weight * 2,)

    machine = EmulatedRecorder(torch.device("cpu"))
    replay = Replay(machine, lambda: [weight])
    outputs = []
    for rate in (1.0, 2.0, 3.0, 4.0, 5.0):
        lr.fill_(rate)
        outputs.append(replay("kind", one)[0])
    assert [float(output[0]) for output in outputs] == [2.0, 6.0, 12.0, 20.0, 30.0]
    assert len(calls) == 4, "two plain steps, one to compare with, one that is recorded"
    assert machine.replays == 3
    replay.forget()
    replay("kind", one)
    assert len(calls) == 5


def test_nothing_is_kept_of_steps_that_come_once(recorders):
    machine = EmulatedRecorder(torch.device("cpu"))
    replay = Replay(machine, list)
    for kind in range(100):
        replay(kind, lambda: (torch.ones(1),))
    assert machine.recordings == 0


def test_a_pool_of_two_workers_replays_in_each(recorders):
    ours, theirs = (
        run(registry["fedavg"](), tiny_problem(), clients_of("points"), config_of(), engine=engine)
        for engine in (Cohort(2, batched=True), Cohort(batched=True, graphs=False))
    )
    assert ours.final.state_sha256 == theirs.final.state_sha256


@dataclass
class _Parallel:
    """Queues that are many, as on a GPU."""

    real: object
    parallel: bool = True

    def take(self):
        return self.real.take()


@pytest.mark.parametrize("name", ["fedavg", pytest.param("fedlps-paper", marks=pytest.mark.slow)])
def test_buckets_that_train_beside_each_other_give_the_same(name, recorders, monkeypatch):
    from sparsekit_fl.client import cohort

    real = cohort.Queues
    config = config_of(lr_decay=0.9)
    one = run(registry[name](), tiny_problem(), clients_of("points"), config, engine=Cohort(batched=True, lanes=2))
    monkeypatch.setattr(cohort, "Queues", lambda device, count: _Parallel(real(device, count)))
    beside = run(registry[name](), tiny_problem(), clients_of("points"), config, engine=Cohort(batched=True, lanes=2))
    same(one, beside)


@pytest.mark.parametrize(("name", "kind"), [("fedavg", "points"), ("fedlps-paper", "points"), ("fedavg", "images")])
def test_a_step_on_another_device_copies_nothing_and_reads_nothing(name, kind, device, monkeypatch):
    """Counted by a device of the tests, in steps of all kinds; `--device elsewhere`."""
    if device != "elsewhere":
        pytest.skip("counted by the device `elsewhere` alone")
    monkeypatch.setitem(recorder.RECORDERS, "elsewhere", lambda _: None)
    real, crossed = step.LaneStep._step, []

    def counted(self, *arguments):
        before = counts()
        found = real(self, *arguments)
        crossed.append(tuple(after - start for after, start in zip(counts(), before, strict=True)))
        return found

    monkeypatch.setattr(step.LaneStep, "_step", counted)
    config = replace(config_of(momentum=0.9), device=device)
    run(registry[name](), problem_of(kind), clients_of(kind), config, engine=Cohort(batched=True))
    assert set(crossed) == {(0, 0)}


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kind", "options"), CASES)
@pytest.mark.parametrize("streams", [1, 4])
def test_on_a_gpu_graphs_and_streams_change_no_result(name, kind, options, streams, caplog):
    config = replace(config_of(**options), device="cuda")
    with caplog.at_level(logging.WARNING, logger="sparsekit_fl.lanes.replay"):
        replayed = run(registry[name](), problem_of(kind), clients_of(kind), config, engine=Cohort(streams=streams))
    assert "not recorded" not in caplog.text
    plain = run(registry[name](), problem_of(kind), clients_of(kind), config, engine=Cohort(graphs=False, streams=1))
    for key, tensor in plain.state.items():
        torch.testing.assert_close(replayed.state[key], tensor, rtol=1e-4, atol=1e-5)
    assert [record.loss for record in replayed.rounds] == pytest.approx([record.loss for record in plain.rounds], rel=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_the_cohort_is_the_embedded_engine_within_rounding():
    config = replace(config_of(), device="cuda")
    ours = run(registry["fedavg"](), problem_of("images"), clients_of("images"), config, engine=Cohort())
    theirs = run(registry["fedavg"](), problem_of("images"), clients_of("images"), config, engine=Embedded())
    for key, tensor in theirs.state.items():
        torch.testing.assert_close(ours.state[key], tensor, rtol=1e-3, atol=1e-4)
