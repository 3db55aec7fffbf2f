"""MethodContract: the built-in methods pass it, and twelve wrong ones, as a beginner writes them, each fail a test of it."""

from dataclasses import dataclass, replace

import pytest
import torch

import sparsekit_fl as fl
from sparsekit.criteria import Ordered, Random
from sparsekit_fl.methods import registry
from sparsekit_fl.testing import MethodContract

pytestmark = pytest.mark.slow  # each case is some runs

TESTS = [name for name in vars(MethodContract) if name.startswith("test_")]


@dataclass(frozen=True, kw_only=True)
class Sum(fl.Method):
    """Adds the changes up and does not divide."""

    def aggregate(self, server, updates):
        state = server.state
        return {name: (state[name] + sum(one.delta[name] for one in updates)).to(state[name].dtype) for name in state}


@dataclass(frozen=True, kw_only=True)
class InPlace(fl.Method):
    """Writes into the state of the server."""

    def aggregate(self, server, updates):
        state = fl.mean(server, updates)
        for tensor in server.state.values():
            tensor.zero_()
        return state


@dataclass(frozen=True, kw_only=True)
class WritesTask(fl.Method):
    """Writes into the state that a client receives."""

    def train(self, client, task):
        for tensor in task.state.values():
            tensor.mul_(1)
        return fl.sgd(client, task)


@dataclass(frozen=True, kw_only=True)
class ReadsTest(fl.Method):
    """Trains on test data."""

    def train(self, client, task):
        data = client.client.data
        inputs, targets = data.test.batch()
        own = fl.ClientData(fl.TensorData(inputs, targets), None, data.test)
        return fl.sgd(replace(client, client=fl.Client(id=client.client.id, data=own), _read={}), task)


@dataclass(frozen=True, kw_only=True)
class OtherUnits(fl.Method):
    """Trains other units than it assigned."""

    def assign(self, server, client_id):
        return fl.Task(mask=fl.units(server, Ordered(), 0.5), ratio=0.5)

    def train(self, client, task):
        return fl.sgd(client, replace(task, mask=fl.units(client, Random(), 0.5, task.state)))

    def aggregate(self, server, updates):
        return fl.mean(server, updates, over="holders")


@dataclass(frozen=True, kw_only=True)
class AsksAll(fl.Method):
    """Touches the memories of all clients in each round."""

    def sample(self, server):
        for id in server.roster:
            server.client[id]["round"] = server.round
        return super().sample(server)


@dataclass(frozen=True, kw_only=True)
class OneNet(fl.Method):
    """Names an entry of one network."""

    def aggregate(self, server, updates):
        state = fl.mean(server, updates)
        assert state["norm.running_mean"] is not None
        return state


@dataclass(frozen=True, kw_only=True)
class UnsaidMetric(fl.Method):
    """Reads a metric that its task does not ask for."""

    def aggregate(self, server, updates):
        server.memory["loss"] = sum(one.metrics["loss"] for one in updates)
        return fl.mean(server, updates)


@dataclass(frozen=True, kw_only=True)
class EverybodyAnswers(fl.Method):
    """Takes for granted that the whole cohort answers."""

    def aggregate(self, server, updates):
        weights = [1.0 for _, _ in zip(server.tasks, updates, strict=True)]
        return fl.mean(server, updates, weights=weights)


@dataclass(frozen=True, kw_only=True)
class GlobalRandom(fl.Method):
    """Draws from the generator of torch, which no seed of the run sets."""

    def aggregate(self, server, updates):
        noise = torch.rand(()) * 1e-3
        return {name: one + noise if one.is_floating_point() else one for name, one in fl.mean(server, updates).items()}


@dataclass(frozen=True, kw_only=True)
class OnItself(fl.Method):
    """Keeps state on the class, where it survives the run."""

    counts = [0]

    def aggregate(self, server, updates):
        self.counts[0] += 1
        return {name: (one * (1 + 1e-3 * self.counts[0])).to(one.dtype) for name, one in fl.mean(server, updates).items()}


@dataclass(frozen=True, kw_only=True)
class KeepsObject(fl.Method):
    """Keeps an object in the memory that no file can hold."""

    def aggregate(self, server, updates):
        server.memory["seen"] = {one.client_id for one in updates}
        return fl.mean(server, updates)


WRONG = (Sum, InPlace, WritesTask, ReadsTest, OtherUnits, AsksAll)
WRONG += (OneNet, UnsaidMetric, EverybodyAnswers, GlobalRandom, OnItself, KeepsObject)


def first_failure(make, folder):
    for name in TESTS:
        given = {"tmp_path": folder} if "bit" in name else {}
        try:
            getattr(MethodContract(), name)(make, **given)
        except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001 - whatever a wrong method leads to
            return f"{name}: {type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("wrong", WRONG, ids=lambda one: one.__name__)
def test_contract_finds_a_wrong_method(wrong, tmp_path):
    assert first_failure(wrong, tmp_path)


@pytest.mark.parametrize("name", ["cs", "fedavg", "fedlps", "fedmp", "heterofl", "hermes", "oort", "refl", "depthfl"])
def test_right_methods_pass(name, tmp_path):
    assert first_failure(registry[name], tmp_path) == ""
