from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from sparsekit.errors import DataError, InvalidValueError, UnknownNameError
from sparsekit_fl.datasets import datasets
from sparsekit_fl.datasets.base import DataSource
from sparsekit_fl.models import models
from sparsekit_fl.paper.presets import PRESETS, build_problem, preset_for
from sparsekit_fl.partition import partitions
from sparsekit_fl.problem.clients import Client, ClientData
from sparsekit_fl.problem.data import TensorData
from sparsekit_fl.problem.problem import Problem


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("own_things")
    monkeypatch.setitem(sys.modules, "own_things", module)
    return module


def test_every_preset_names_things_that_exist() -> None:
    for name, preset in PRESETS.items():
        assert name == preset.name
        assert preset.dataset in datasets
        assert preset.model in models
        assert preset.partition in partitions
        assert preset.cohort <= preset.clients
        assert preset.source


def test_rows_of_table_one_have_its_settings() -> None:
    rows = {name: PRESETS[name] for name in ("mnist", "cifar10", "cifar100", "tiny-imagenet", "reddit")}
    assert {name: row.clients for name, row in rows.items()} == {
        "mnist": 100, "cifar10": 50, "cifar100": 50, "tiny-imagenet": 50, "reddit": 100,
    }  # fmt: skip
    assert {(row.cohort, row.rounds, row.capability) for row in rows.values()} == {(10, 100, "dynamic")}
    assert {name: row.training.batch_size for name, row in rows.items()} == {
        "mnist": 32, "cifar10": 20, "cifar100": 20, "tiny-imagenet": 20, "reddit": 5,
    }  # fmt: skip
    text = rows["reddit"].training
    assert (text.local_epochs, text.lr, text.momentum, text.clip) == (1, 8.0, 0.5, 1.0)


def test_without_options_the_digits_are_dealt_to_a_small_cnn() -> None:
    problem, clients = build_problem(preset_for())
    assert [client.id for client in clients] == list(range(20))
    assert {len(client.data.train) for client in clients} == {44}
    assert {len(client.data.val) for client in clients} == {6}
    assert problem.example_inputs[0].shape == (1, 1, 28, 28)
    outputs = problem.model()(*problem.materialise(clients[0].data.train).inputs)
    assert outputs.shape == (44, 10)
    assert {client.capability.ratio for client in clients} == {1.0}


def test_the_digits_fit_vgg() -> None:
    problem, clients = build_problem(preset_for(), model="vgg11")
    assert problem.materialise(clients[0].data.val).inputs[0].shape == (6, 3, 32, 32)


def test_the_seed_alone_decides_who_gets_what() -> None:
    def rows(seed: int) -> list[list[int]]:
        return [client.data.train.index.tolist() for client in build_problem(preset_for(), seed=seed)[1]]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


def test_more_clients_get_smaller_shards() -> None:
    _, clients = build_problem(preset_for(), clients=50)
    assert len(clients) == 50
    assert len(clients[0].data.train) + len(clients[0].data.val) == 28


def test_another_partition_starts_from_its_own_defaults() -> None:
    _, clients = build_problem(preset_for(), partition="dirichlet", clients=5, options={"alpha": 10.0})
    assert sum(len(client.data.train) + len(client.data.val) for client in clients) == 1437


def test_a_thousand_clients_cost_their_indices() -> None:
    source = DataSource(
        name="big", kind="image", classes=10, mean=(0.5,), std=(0.5,),
        train=TensorData((torch.zeros(20_000, 1, 8, 8, dtype=torch.uint8),), torch.arange(20_000) % 10),
        test=TensorData((torch.zeros(500, 1, 8, 8, dtype=torch.uint8),), torch.arange(500) % 10),
    )  # fmt: skip
    module = ModuleType("big_things")
    module.load = lambda: source  # type: ignore[attr-defined]
    sys.modules["big_things"] = module
    try:
        _, clients = build_problem(preset_for(dataset="big_things:load"), clients=1000, model="cnn")
    finally:
        del sys.modules["big_things"]
    assert {client.data.train.inputs[0].data_ptr() for client in clients} == {source.train.inputs[0].data_ptr()}
    assert max(client.data.train.index.untyped_storage().nbytes() for client in clients) < 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"preset": "mnst"}, "did you mean 'mnist'"), ({"dataset": "digit"}, "did you mean 'digits'")],
)
def test_unknown_names_list_the_nearest(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        preset_for(**arguments)


def test_a_data_set_brings_its_own_preset_and_a_preset_takes_another_data_set() -> None:
    assert preset_for(dataset="cifar10").model == "vgg11"
    assert preset_for(preset="mnist", dataset="digits").training.batch_size == 32
    assert preset_for(dataset="mine:load").partition is None


def test_an_option_that_the_partition_does_not_have_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="no option 'alfa'; did you mean 'alpha'"):
        build_problem(preset_for(), partition="dirichlet", options={"alfa": 1})


def test_a_model_for_other_data_is_refused() -> None:
    with pytest.raises(DataError, match="'lstm' takes token ids, the data are images"):
        build_problem(preset_for(), model="lstm")


def test_a_model_factory_with_too_few_classes_is_refused(own: ModuleType) -> None:
    own.build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 1))  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="but the model has 1 outputs"):
        build_problem(preset_for(), model="own_things:build")
    own.build = lambda classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes))  # type: ignore[attr-defined]
    problem, _ = build_problem(preset_for(), model="own_things:build")
    assert problem.example_inputs[0].shape == (1, 1, 8, 8)


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


@pytest.mark.parametrize("wrong", [lambda: 3, lambda: (1, 2), 5])
def test_a_data_factory_that_gives_something_else_is_refused(own: ModuleType, wrong: Any) -> None:
    own.load = wrong  # type: ignore[attr-defined]
    with pytest.raises(InvalidValueError, match=r"must (return|be a function)"):
        build_problem(preset_for(dataset="own_things:load"))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "val", "test"),
    [
        ("mnist", 180, 20, 200),
        ("cifar10", 180, 20, 200),
        ("cifar100", 720, 80, 800),
        ("tiny-imagenet", 720, 80, None),  # 800 on the complete data; a reduced copy has fewer to test with
    ],
)
def test_presets_give_the_client_sizes_of_table_one(data_dir: Path, name: str, train: int, val: int, test: int | None) -> None:
    problem, clients = build_problem(preset_for(preset=name), data_dir=data_dir)
    again = build_problem(preset_for(preset=name), data_dir=data_dir)[1]
    assert {(len(client.data.train), len(client.data.val)) for client in clients} == {(train, val)}
    options = PRESETS[name].options
    classes = [len(client.data.train.labels().unique()) for client in clients]
    # Two shards of a client may be of one class, as in the data behind Table I: for about one client in ten of two shards.
    assert max(classes) == options["classes_per_client"]
    assert sum(classes) >= 0.85 * options["classes_per_client"] * len(clients)
    if test is not None:
        assert [len(client.data.test) for client in clients] == [owned * options["images_per_class"] for owned in classes]
        assert max(len(client.data.test) for client in clients) == test
    assert all(torch.equal(a.data.train.index, b.data.train.index) for a, b in zip(clients, again, strict=True))
    assert problem.materialise(clients[0].data.val).inputs[0].isfinite().all()
