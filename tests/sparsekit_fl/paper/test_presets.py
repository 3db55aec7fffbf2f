"""Presets: the rows of the table, and how names and data sets find them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparsekit_fl.paper.build import build_problem
from sparsekit_fl.paper.presets import PRESETS, preset_for


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


def test_a_data_set_brings_its_own_preset_and_a_preset_takes_another_data_set() -> None:
    assert preset_for(dataset="cifar10").model == "vgg11"
    assert preset_for(preset="mnist", dataset="digits").training.batch_size == 32
    assert preset_for(dataset="mine:load").partition is None


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
