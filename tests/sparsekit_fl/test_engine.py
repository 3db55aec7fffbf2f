"""Processes: several workers give the results of one; workers that cannot start; threads, denormals and devices."""

import sys
from dataclasses import replace

import pytest
import torch
from engine_contract import EngineContract
from personal import tiny_run, watched

import sparsekit_fl as fl
from sparsekit.errors import InvalidValueError
from sparsekit.graph import UnitMask
from sparsekit_fl import engines
from sparsekit_fl.engines import Processes, device_of, devices, exact_arithmetic, one_thread
from sparsekit_fl.testing import TinyNet, tiny_config


class TestThreeWorkers(EngineContract):
    @pytest.fixture
    def engine(self):
        return Processes(3)


class Looks(fl.Method):
    """The server chooses half of the units; a client reports which of the others it was sent."""

    def assign(self, server, client_id):
        return fl.Task(mask=UnitMask({"first": torch.arange(8) < 4}))

    def train(self, client, task):
        dropped = sum(float(task.state[name][4:].abs().sum()) for name in ("first.weight", "first.bias", "norm.weight"))
        return replace(super().train(client, task), metrics={"dropped": dropped})


@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_servers_mask_drops_arrives_as_zero_also_where_nothing_travels(workers):
    _, updates = watched(Looks(), rounds=1, engine=Processes(workers))
    assert [update.metrics["dropped"] for update in updates] == [0.0] * 4


@pytest.mark.parametrize("device", ["cuda:7", "gpu"])
def test_a_device_that_is_not_there_is_refused_before_anything_starts(device):
    with pytest.raises(InvalidValueError, match=f"device '{device}' cannot be used: .*leave it out to run on the CPU"):
        tiny_run(device=device, engine=Processes(2))


@pytest.mark.slow
@pytest.mark.same_bits
def test_a_spawned_worker_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(engines, "start_method", lambda device: "spawn")
    spawned = tiny_run(rounds=2, engine=Processes(2))
    assert spawned.final.state_sha256 == tiny_run(rounds=2).final.state_sha256


def test_what_cannot_be_sent_to_a_worker_is_refused_with_the_way_out(monkeypatch):
    monkeypatch.setattr(engines, "start_method", lambda device: "spawn")
    problem = fl.Problem(model=lambda: TinyNet(), example_inputs=(torch.zeros(2, 6),))
    with pytest.raises(InvalidValueError, match=r"cannot be sent to a worker process: .*lambda.*workers=1"):
        tiny_run(problem=problem, engine=Processes(2))


TINY = 1e-39  # below the normal numbers of float32


def step_of_denormals():
    """A step of SGD on weights that have nearly decayed: what comes out, and whether the gradient held numbers that small."""
    layer = torch.nn.Linear(4, 4, bias=False)
    torch.nn.init.constant_(layer.weight, TINY)
    (layer(torch.ones(2, 4)).sum() * TINY).backward()
    return float(layer.weight.grad.max()), float((layer.weight.detach() * 1.0).max())


def test_a_step_while_training_takes_denormal_numbers_for_zero_and_one_before_and_after_does_not():
    assert all(value > 0 for value in step_of_denormals())
    with one_thread():
        assert step_of_denormals() == (0.0, 0.0)
    assert all(value > 0 for value in step_of_denormals())


def test_workers_take_the_devices_in_turn():
    assert devices("cuda:0, cuda:1") == ["cuda:0", "cuda:1"]
    assert [device_of("cuda:0,cuda:1", worker) for worker in range(4)] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]
    assert device_of("cpu", 3) == "cpu"


@pytest.mark.same_bits
def test_exact_arithmetic_is_on_in_the_block_only_and_in_the_result(monkeypatch):
    # Either would take seconds, since torch imports its compiler then.
    monkeypatch.delattr(torch, "use_deterministic_algorithms")
    monkeypatch.setitem(sys.modules, "torch._inductor.config", None)
    assert not torch.are_deterministic_algorithms_enabled()
    with exact_arithmetic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.backends.cudnn.allow_tf32
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.allow_tf32
    config = replace(tiny_config(rounds=2), deterministic=True)
    result = tiny_run(fl.methods.fedlps(), config=config)
    assert result.environment["deterministic"]
    assert not torch.are_deterministic_algorithms_enabled()
    plain = tiny_run(fl.methods.fedlps(), config=replace(config, deterministic=False))
    assert all(torch.equal(plain.state[name], tensor) for name, tensor in result.state.items())
    assert not plain.environment["deterministic"]
