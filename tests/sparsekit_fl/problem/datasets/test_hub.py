"""Data sets of the library `datasets` from a folder, and partitioners of flwr-datasets."""

import json

import numpy as np
import pytest
from PIL import Image

from sparsekit.cli.main import execute
from sparsekit.errors import DataError, InvalidValueError, UnknownNameError
from sparsekit_fl.problem.data import LazyData
from sparsekit_fl.problem.datasets import hub
from sparsekit_fl.problem.datasets.hub import load_hub
from sparsekit_fl.problem.partition.flower import flower_partition

datasets = pytest.importorskip("datasets", reason="datasets is not installed; pip install 'sparsekit-torch[data]'")


def pictures(count, *, seed=0):
    rng = np.random.default_rng(seed)
    images = []
    for row in range(count):
        pixels = rng.integers(0, 60, (*((8, 8), (12, 9))[row % 2], 3), dtype=np.uint8)
        pixels[..., row % 3] += 150
        images.append(Image.fromarray(pixels))
    label, writer = datasets.ClassLabel(names=["red", "green", "blue"]), datasets.Value("string")
    return datasets.Dataset.from_dict(
        {"image": images, "label": [row % 3 for row in range(count)], "writer": [f"w{row % 4}" for row in range(count)]},
        features=datasets.Features({"image": datasets.Image(), "label": label, "writer": writer}),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "colours"
    datasets.DatasetDict({"train": pictures(120), "test": pictures(30, seed=1)}).save_to_disk(str(path))
    return path


def test_a_folder_is_a_source_of_pictures_of_one_size(folder):
    source = load_hub(f"hf:{folder}", None, 0)
    assert (tuple(source.shape), source.classes) == ((3, 8, 8), 3)
    assert (len(source.train), len(source.test)) == (120, 30)
    assert source.train.labels()[:4].tolist() == [0, 1, 2, 0]
    assert len(source.mean) == 3
    smaller = load_hub(f"hf:{folder.name}?size=6&owner=writer", folder.parent, 0)
    assert tuple(smaller.shape) == (3, 6, 6)
    assert smaller.owner_names == ("w0", "w1", "w2", "w3")


def test_large_data_are_read_when_they_are_needed_with_the_same_numbers(folder, monkeypatch):
    whole = load_hub(f"hf:{folder}", None, 0)
    monkeypatch.setattr(hub, "_EAGER_BYTES", 10)
    lazy = load_hub(f"hf:{folder}", None, 0)
    assert isinstance(lazy.train, LazyData)
    places = [5, 1, 7]
    assert (lazy.train.batch(places)[0][0] == whole.train.batch(places)[0][0]).all()
    assert lazy.mean == whole.mean


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("hf:{folder}?colour=x", UnknownNameError, "has the option 'colour'"),
        ("hf:{folder}?size=big", InvalidValueError, "size in .* must be an integer"),
        ("hf:{folder}?train=learn", DataError, "has no split 'learn'; it has train, test"),
        ("hf:{folder}?image=pixels", DataError, "has no column 'pixels'"),
        ("hf:{folder}?label=writer", DataError, "must be integers >= 0"),
        ("hf:{folder}/none", DataError, "cannot load the data set"),
        ("hf:{folder}?image=writer", DataError, "row 0 of column 'writer' is no picture of 8 bits"),
        ("hf:{folder}?config=plain", DataError, "keeps one configuration; leave config=plain out"),
    ],
)
def test_what_is_wrong_is_said(text, error, message, folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(error, match=message):
        load_hub(text.format(folder=folder), None, 0)


@pytest.mark.parametrize(
    ("name", "options"), [("Iid", {}), ("DirichletPartitioner", {"alpha": 0.5, "min_partition_size": 5}), ("Linear", {})]
)
def test_partitioners_of_flower_deal_every_example_once(name, options, folder):
    pytest.importorskip("flwr_datasets")
    source = load_hub(f"hf:{folder}", None, 0)
    splits, again = (
        flower_partition(f"flwr:{name}")(source, clients=4, rng=np.random.default_rng(1), **options) for _ in range(2)
    )
    rows = sorted(row for split in splits for part in (split.train, split.val) for row in part.index.tolist())
    assert rows == list(range(120))
    assert all(len(split.test) for split in splits)
    assert [split.train.index.tolist() for split in splits] == [split.train.index.tolist() for split in again]


def test_the_command_line_runs_both_with_augmentation(folder, capsys):
    pytest.importorskip("flwr_datasets")
    line = ["run", "fedavg", "--dataset", f"hf:{folder}?size=8", "--partition", "flwr:Dirichlet", "--clients", "3"]
    more = ["--set", "partition.alpha=5.0", "--set", "augment=crop:1,flip", "--rounds", "1", "--cohort", "2", "--json"]
    assert execute([*line, "--set", "partition.alfa=5.0"]) == 2
    assert "partition 'flwr:Dirichlet' has no option 'alfa'; did you mean 'alpha'" in capsys.readouterr().err.replace("\n", " ")
    assert execute([*line, *more]) == 0, capsys.readouterr().err
    raw = json.loads(capsys.readouterr().out)
    assert raw["config"]["experiment"]["augment"] == "crop:1,flip"
    assert raw["config"]["experiment"]["partition_options"] == {"alpha": 5.0}
