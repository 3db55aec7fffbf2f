"""build_problem: data, partition and model by name, from the registries or from a factory."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn

from sparsekit.errors import InvalidValueError
from sparsekit_fl.paper.build import build_problem
from sparsekit_fl.paper.presets import preset_for
from sparsekit_fl.problem.clients import Client, ClientData
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.datasets import datasets
from sparsekit_fl.problem.datasets.base import DataSource
from sparsekit_fl.problem.problem import Problem


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_things")
    monkeypatch.setitem(sys.modules, "own_things", module)
    return module


def test_without_options_the_digits_are_dealt_to_a_small_cnn() -> None:
    problem, clients = build_problem(preset_for())
    assert [client.id for client in clients] == list(range(20))
    assert {len(client.data.train) for client in clients} == {44}
    assert {len(client.data.val) for client in clients} == {6}
    assert problem.example_inputs[0].shape == (1, 1, 28, 28)
    outputs = problem.model()(*problem.materialise(clients[0].data.train).inputs)
    assert outputs.shape == (44, 10)
    assert {client.capability.ratio for client in clients} == {1.0}


def test_a_partition_of_ones_own_is_called_with_its_options_and_must_give_each_client_data(own: ModuleType) -> None:
    def by_turns(source: DataSource, *, clients: int, rng: np.random.Generator, most: int = 20) -> list[ClientData]:
        first = int(rng.integers(3))
        return [
            ClientData(
                train=source.train.take(list(range(first + k, 1437, clients))[:most]),
                val=source.train.take([k]),
                test=source.test.take([k, k + clients]),
            )
            for k in range(clients)
        ]

    own.by_turns, own.nothing = by_turns, lambda source, *, clients, rng: []  # type: ignore[attr-defined]
    name = own.__name__
    _, clients = build_problem(preset_for(), partition=f"{name}:by_turns", clients=6, options={"most": 7}, seed=4)
    _, again = build_problem(preset_for(), partition=f"{name}:by_turns", clients=6, options={"most": 7}, seed=4)
    assert [len(client.data.train) for client in clients] == [7] * 6
    assert [c.data.train.index.tolist() for c in clients] == [c.data.train.index.tolist() for c in again]
    assert len(build_problem(preset_for(), partition=f"{name}:by_turns")[1][0].data.train) == 20
    with pytest.raises(InvalidValueError, match="no option 'mots'; did you mean 'most'"):
        build_problem(preset_for(), partition=f"{name}:by_turns", options={"mots": 7})
    with pytest.raises(InvalidValueError, match=r"must return a list of 6 ClientData, one for each client, got \[\]"):
        build_problem(preset_for(), partition=f"{name}:nothing", clients=6)


def test_a_data_factory_may_bring_problem_and_clients(own: ModuleType) -> None:
    split = TensorData((torch.zeros(2, 3),), torch.tensor([0, 1]))
    problem = Problem(model=lambda: nn.Linear(3, 2), example_inputs=(torch.zeros(1, 3),))

    def load(root: Path | None, seed: int) -> tuple[Problem, list[Client]]:
        assert (root, seed) == (Path("there"), 4)
        return problem, [Client(id=0, data=ClientData(split, split, split))]

    own.load = load  # type: ignore[attr-defined]
    preset = preset_for(dataset="own_things:load")
    assert build_problem(preset, data_dir="there", seed=4)[0] is problem
    with pytest.raises(InvalidValueError, match="model, clients cannot be changed"):
        build_problem(preset, data_dir="there", seed=4, model="cnn", clients=3)


def test_a_source_with_owners_is_dealt_by_owner(own: ModuleType) -> None:
    source = datasets["digits"](None)
    own.load = lambda: DataSource(  # type: ignore[attr-defined]
        name="owned", kind="image", train=source.train, test=None, classes=10, mean=source.mean, std=source.std,
        owners=torch.arange(1437) % 30, owner_names=tuple(map(str, range(30))),
    )  # fmt: skip
    _, clients = build_problem(preset_for(dataset="own_things:load"), model="cnn")
    assert [len(client.data.train) + len(client.data.val) + len(client.data.test) for client in clients] == [48] * 20


def test_speakers_become_clients_of_the_lstm(data_dir: Path) -> None:
    problem, clients = build_problem(preset_for(dataset="shakespeare"), data_dir=data_dir, clients=20)
    data = problem.materialise(clients[0].data.train)
    assert data.inputs[0].shape[1:] == data.targets.shape[1:] == (9,)
    assert data.inputs[0].dtype == torch.int64
    assert sum(parameter.numel() for parameter in problem.model().parameters()) == 2_845_392
