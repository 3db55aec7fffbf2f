"""Embedded: the contract for one and for several workers, and what only processes can do."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

import pytest
import torch

from sparsekit_fl.engines.embedded import Embedded
from sparsekit_fl.errors import WorkerDiedError
from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies.local import LocalPolicy, Sgd
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import EngineContract, tiny_clients, tiny_config, tiny_problem


class TestOneWorker(EngineContract):
    @pytest.fixture
    def engine(self):
        return Embedded()


class TestThreeWorkers(EngineContract):
    @pytest.fixture
    def engine(self):
        return Embedded(3)


@dataclass(frozen=True)
class SuicidalSgd(LocalPolicy):
    round: int
    signal: int

    def train(self, ctx, start, mask, ratio):
        if ctx.round == self.round:
            os.kill(os.getpid(), self.signal)
        return Sgd().train(ctx, start, mask, ratio)


def test_a_killed_worker_is_named_and_the_state_is_kept(tmp_path):
    deadly = Method(name="m", source="", local=SuicidalSgd(3, signal.SIGKILL))
    with pytest.raises(
        WorkerDiedError, match=r"signal 9 \(SIGKILL.*client \d+ in round 3.*round 2 of 4 was finished.*--resume"
    ):
        run(deadly, tiny_problem(), tiny_clients(), tiny_config(), engine=Embedded(2), out=tmp_path)
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2


def test_threads_are_put_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        run(Method(name="m", source=""), tiny_problem(), tiny_clients(), tiny_config(rounds=1))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.same_bits
def test_spawned_workers_give_the_same_bits():
    method = Method(name="m", source="")
    spawned = run(method, tiny_problem(), tiny_clients(), tiny_config(), engine=Embedded(2, start_method="spawn"))
    plain = run(method, tiny_problem(), tiny_clients(), tiny_config())
    assert spawned.final.state_sha256 == plain.final.state_sha256
