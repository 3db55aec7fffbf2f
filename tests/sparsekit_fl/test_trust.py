"""Processes that train clients, and runs that are ended: nothing is confused, overwritten or hidden; bits are the same."""

import multiprocessing
import os
import re
import resource
import signal
import sys
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from engine_contract import EngineContract
from own_models import OwnModels
from personal import tiny_run, watched

import sparsekit_fl as fl
from sparsekit.errors import DataError, InvalidValueError
from sparsekit.graph import UnitMask
from sparsekit_fl import engines
from sparsekit_fl.checkpoint import Memories
from sparsekit_fl.engines import Processes, device_of, devices, exact_arithmetic, one_thread
from sparsekit_fl.testing import StopAfter, TinyNet, tiny_config


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


@dataclass(frozen=True, kw_only=True)
class Forgets(OwnModels):
    """A client drops its personal model in its second participation."""

    def train(self, client, task):
        result, seen = super().train(client, task), client.memory.pop("seen", False)
        client.memory.clear() if seen else client.memory.update(seen=True)
        return result


def test_memory_that_was_emptied_stays_empty(tmp_path):
    result = tiny_run(Forgets(), out=tmp_path)
    asked = Counter(client_id for record in result.rounds for client_id in record.cohort)
    memories = Memories(tmp_path / "clients", durable=False)
    last = {client_id: max(r.round for r in result.rounds if client_id in r.cohort) for client_id in asked}
    assert {client_id: bool(memories.read(client_id, last[client_id])) for client_id in asked} == {
        client_id: count % 2 == 1 for client_id, count in asked.items()
    }
    assert 2 in asked.values()


class Counts(fl.Method):
    """A client counts its participations; what even clients send in round 2 is refused."""

    def train(self, client, task):
        client.memory["seen"] = client.memory.get("seen", 0) + 1
        bad = client.round == 2 and client.client.id % 2 == 0
        return replace(super().train(client, task), metrics={"loss": float("nan")} if bad else {})


def test_the_memory_of_a_client_whose_update_was_refused_does_not_count(tmp_path):
    result = tiny_run(Counts(), out=tmp_path, config=replace(tiny_config(rounds=6), min_replies=1))
    refused = {client_id for client_id, _ in result.rounds[1].dropped}
    assert refused
    counted: dict[int, list[int]] = {}
    for record in result.rounds:
        for client_id in record.ratios:  # of valid updates
            counted.setdefault(client_id, []).append(record.round)
    assert refused & set(counted)
    memories = Memories(tmp_path / "clients", durable=False)
    seen = {id: memories.read(id, rounds[-1])["method"]["seen"] for id, rounds in counted.items()}
    assert seen == {client_id: len(rounds) for client_id, rounds in counted.items()}


@pytest.mark.parametrize("name", ["clients/notes.safetensors", "rounds.jsonl", "data.csv"])
def test_a_fresh_run_deletes_and_replaces_nothing_that_was_there(name, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    if name == "data.csv":
        tiny_run(out=tmp_path)
    else:
        with pytest.raises(fl.errors.ResumeError, match=r"already holds a run; .*choose another"):
            tiny_run(out=tmp_path)
    assert path.read_text() == "mine"


def stop(*_, **__):
    raise KeyboardInterrupt


def full(self, client_id, round, memory, write=Memories.write):
    if round == 2:
        raise OSError(28, "No space left on device")
    write(self, client_id, round, memory)


def dies(self, client, task, train=OwnModels.train):
    if client.round == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return train(self, client, task)


class AfterTwo(fl.Callback):
    def __init__(self, call):
        self.call = call

    def on_round_end(self, run, record):
        if record.round == 2:
            self.call(run.out)


def kill_a_waiting_worker(out):
    worker = next(iter(multiprocessing.active_children()))
    worker.kill()
    worker.join()


def no_room_for_the_checkpoint(out):
    size = (out / "checkpoint.state").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1, resource.RLIM_INFINITY))


FULL = ("No space left", 1, (Memories, "write", full))
ENDS = {
    "Ctrl-C while a round is scored": (1, "stopped by the user", 1, (OwnModels, "deploy", stop)),
    "a full disk": (1, *FULL),
    "a full disk of two workers": (2, *FULL),
    "a full disk of a grid": (0, *FULL),
    "a worker that is killed": (2, r"a worker process died.*client \d+.* in round 3", 2, (OwnModels, "train", dies)),
    "a waiting worker that is killed": (2, "a worker process died .* round 3", 2, kill_a_waiting_worker),
    "no room for the checkpoint": (1, "File too large.*make room", 2, no_room_for_the_checkpoint),
}
"""Name → workers, 0 for a grid; reason; the last saved round; a patch, or what happens after round 2."""


@pytest.fixture(scope="module")
def whole():
    return tiny_run(OwnModels())


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.same_bits
def test_whatever_ends_a_run_the_error_names_the_last_saved_round_and_it_resumes_to_the_same_bits(
    name, whole, tmp_path, monkeypatch
):
    workers, reason, last, cause = ENDS[name]
    if not workers:
        pytest.importorskip("flwr", reason="flwr is not installed; pip install '.[flower]'")
        from local_grid import InProcess
    engine, limits = fl.Processes(workers) if workers else InProcess(), resource.getrlimit(resource.RLIMIT_FSIZE)
    errors = (fl.errors.RunInterrupted, fl.errors.StorageError, fl.errors.WorkerDiedError)
    says = rf"{reason}.*round {last} of 4 was the last to be finished.*--resume"
    with monkeypatch.context() as patch:
        callbacks = [AfterTwo(cause)] if callable(cause) else patch.setattr(*cause) or []
        try:
            with pytest.raises(errors, match=says):
                tiny_run(OwnModels(), out=tmp_path, engine=engine, callbacks=callbacks)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.rglob("*.tmp"))
    # The line of a round is written before its checkpoint.
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) - last in (0, 1)
    assert tiny_run(OwnModels(), out=tmp_path, resume=True).final == whole.final
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 4


def flipped(path):
    """Flip one bit of a file at a time: at its beginning, before its last byte, which ends a line, and between."""
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for place in [0, len(whole) - 2, *rng.integers(0, len(whole), 20)]:
        changed = bytearray(whole)
        changed[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(changed)
        yield place
    path.write_bytes(whole)


@pytest.mark.parametrize("name", ["checkpoint.state", "rounds.jsonl"])
def test_a_flipped_bit_anywhere_in_a_file_of_a_run_is_found_and_said_by_name(name, tmp_path):
    with pytest.raises(fl.errors.RunInterrupted):
        tiny_run(out=tmp_path, callbacks=[StopAfter(2)])
    for _ in flipped(tmp_path / name):
        with pytest.raises(fl.errors.ResumeError, match=re.escape(name)):
            tiny_run(out=tmp_path, resume=True)
    assert len(tiny_run(out=tmp_path, resume=True).rounds) == 4


def test_a_flipped_bit_anywhere_in_the_memory_of_a_client_is_found_and_said_by_name(tmp_path):
    with pytest.raises(fl.errors.RunInterrupted):
        tiny_run(OwnModels(), out=tmp_path, callbacks=[StopAfter(3)])
    memories = sorted((tmp_path / "clients").glob("*.state"))
    for _ in flipped(memories[0]):
        with pytest.raises(DataError, match=r"the memory of client \d of round \d cannot be read from"):
            Memories(tmp_path / "clients", durable=False).read(*map(int, memories[0].stem.split("-")))
    for path in memories:
        path.write_bytes(path.read_bytes()[:-1])
    for workers in (1, 2):  # the same error
        with pytest.raises(DataError, match=r"the memory of client \d of round \d cannot be read from .*checksum"):
            tiny_run(OwnModels(), out=tmp_path, resume=True, engine=fl.Processes(workers))
