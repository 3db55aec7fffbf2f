import io
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import sparsekit_fl as fl
from sparsekit.errors import DataError
from sparsekit_fl.testing import DatasetContract


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEKIT_CACHE", str(tmp_path / "cache"))


def encoded(mode: str, side: int, value: int) -> dict[str, object]:
    buffer = io.BytesIO()
    Image.new(mode, (side, side), (value,) * 3 if mode == "RGB" else value).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def write(path: Path, images: list, labels: list[int], *, image: str = "image", label: str = "label") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({image: images, label: labels}), path)


def write_mnist(root: Path, folder: str = "mnist") -> None:
    write(root / folder / "train.parquet", [encoded("L", 28, v) for v in (10, 20, 30)], [1, 0, 9])
    write(root / folder / "test.parquet", [encoded("L", 28, 40)], [3])


class TestMnistContract(DatasetContract):
    @pytest.fixture(autouse=True)
    def _files(self, tmp_path: Path) -> None:
        self.root = tmp_path
        write_mnist(tmp_path)

    def make_source(self) -> fl.DataSource:
        return fl.datasets["mnist"](str(self.root))

    def test_pictures_and_labels_come_in_the_order_of_the_file(self) -> None:
        source = self.make_source()
        assert source.train.inputs[0].shape == (3, 1, 28, 28)
        assert source.train.inputs[0][:, 0, 0, 0].tolist() == [10, 20, 30]
        assert source.train.labels().tolist() == [1, 0, 9]
        assert source.test is not None
        assert source.test.labels().tolist() == [3]


@pytest.mark.parametrize("folder", ["tiny-imagenet", "tiny_imagenet"])
def test_tiny_imagenet_turns_grey_into_colour_and_takes_both_spellings(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "train.parquet", [encoded("L", 64, 7), encoded("RGB", 64, 8)], [0, 199])
    write(tmp_path / folder / "valid.parquet", [encoded("RGB", 64, 9)], [5])
    source: fl.DataSource = fl.datasets["tiny-imagenet"](tmp_path)
    assert source.shape == (3, 64, 64)
    assert source.train.inputs[0][:, :, 0, 0].tolist() == [[7, 7, 7], [8, 8, 8]]
    assert source.test is not None
    assert len(source.test) == 1


def test_cifar100_uses_its_fine_labels_and_files_in_several_parts(tmp_path: Path) -> None:
    for part, label in enumerate((55, 66)):
        path = tmp_path / "cifar100" / f"train-0000{part}-of-00002.parquet"
        write(path, [encoded("RGB", 32, part)], [label], image="img", label="fine_label")
    write(tmp_path / "cifar100" / "test.parquet", [encoded("RGB", 32, 1)], [99], image="img", label="fine_label")
    source: fl.DataSource = fl.datasets["cifar100"](tmp_path)
    assert source.train.labels().tolist() == [55, 66]
    assert source.train.inputs[0][:, 0, 0, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("images", "columns", "message"),
    [
        ([{"bytes": b"no picture", "path": None}], {}, "row 0 of .* is not a picture"),
        ([encoded("L", 27, 1)], {}, "27x27 pixels, expected 28x28"),
        ([encoded("I;16", 28, 9000)], {}, "row 0 of .* it has more than 8 bits a channel"),
        ([encoded("L", 28, 1)], {"image": "photo"}, r"columns \['photo', 'label'\]"),
        ([3], {}, "no encoded picture"),
    ],
)
def test_damaged_files_are_refused_with_the_place(tmp_path: Path, images: list, columns: dict, message: str) -> None:
    write_mnist(tmp_path)
    write(tmp_path / "mnist" / "train.parquet", images, [1], **columns)
    with pytest.raises(DataError, match=message):
        fl.datasets["mnist"](tmp_path)


def test_without_a_directory_the_copy_of_the_hub_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "copy")
    asked = []

    def download(repo: str, *, repo_type: str, allow_patterns: list[str]) -> str:
        asked.append((repo, repo_type, allow_patterns))
        return str(tmp_path / "copy")

    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    source: fl.DataSource = fl.datasets["mnist"](None)
    assert source.train.labels().tolist() == [1, 0, 9]
    wanted = ["train*.parquet", "*/train*.parquet", "test*.parquet", "*/test*.parquet"]
    assert asked == [("ylecun/mnist", "dataset", wanted)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [("mnist", 60_000, 10_000, 10), ("cifar10", 50_000, 10_000, 10), ("cifar100", 50_000, 10_000, 100)],
)
def test_the_real_files_are_complete(
    data_dir: Path, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch, name: str, train: int, test: int, classes: int
) -> None:
    monkeypatch.setenv("SPARSEKIT_CACHE", str(pytestconfig.cache.mkdir("sparsekit")))
    source: fl.DataSource = fl.datasets[name](data_dir)
    assert source.test is not None
    assert (len(source.train), len(source.test)) == (train, test)
    assert np.bincount(source.test.labels(), minlength=classes).min() >= 80
    pixels = source.train.inputs[0][::12].double() / 255
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.tensor(source.mean, dtype=torch.float64), atol=0.01)
    assert torch.allclose(pixels.std((0, 2, 3)), torch.tensor(source.std, dtype=torch.float64), atol=0.01)
