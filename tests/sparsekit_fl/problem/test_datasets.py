"""Data sets: digits, files of parquet and of text (an example), the cache of decoded images, and inputs of a model."""

import io
import json
import os
import pickle
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
from sparsekit.registry import load_object
from sparsekit_fl.problem.datasets import ImageTransform
from sparsekit_fl.problem.images import cached_tensors, digits_loaders
from sparsekit_fl.problem.metrics import IGNORED

TEXTS = Path(__file__).parents[3] / "examples" / "text_data.py"
read_leaf, reddit, shakespeare, speeches, token_source = (
    load_object(f"{TEXTS}:{name}") for name in ("read_leaf", "reddit", "shakespeare", "speeches", "token_source")
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEKIT_CACHE", str(tmp_path / "cache"))


def check_dataset(make):
    """Examples are always the same, raw and labelled, and owners name every one of them."""
    source, again = make(), make()
    for pool, same in ((source.train, again.train), (source.test, again.test)):
        if pool is None:
            continue
        raw, labels = pool.inputs[0], pool.labels()
        assert torch.equal(raw, same.inputs[0])
        assert torch.equal(pool.targets, same.targets)
        assert raw.shape[1:] == source.shape
        assert raw.dtype == torch.uint8 if source.kind == "image" else not raw.is_floating_point()
        assert labels.dtype == torch.int64
        counted = labels[labels != IGNORED]
        for numbers in (counted, raw) if source.kind == "tokens" else (counted,):
            assert 0 <= int(numbers.min()) <= int(numbers.max()) < source.classes
    view = source.train.take([1, 0])
    assert torch.equal(pickle.loads(pickle.dumps(view)).batch()[0][0], view.batch()[0][0])
    if source.owners is not None:
        assert source.owners.shape == (len(source.train),)
        assert set(source.owners.tolist()) == set(range(int(source.owners.max()) + 1))
    return source


def encoded(mode, side, value):
    buffer = io.BytesIO()
    Image.new(mode, (side, side), (value,) * 3 if mode == "RGB" else value).save(buffer, "PNG")
    return {"bytes": buffer.getvalue(), "path": None}


def write(path, images, labels, *, image="image", label="label"):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({image: images, label: labels}), path)


def write_mnist(root):
    write(root / "mnist" / "train.parquet", [encoded("L", 28, v) for v in (10, 20, 30)], [1, 0, 9])
    write(root / "mnist" / "test.parquet", [encoded("L", 28, 40)], [3])


def assert_normalized(source):
    pixels = source.train.inputs[0][:: max(1, len(source.train) // 5000)].double() / 255
    assert pixels.mean((0, 2, 3)).tolist() == pytest.approx(source.mean, abs=0.01)
    assert pixels.std((0, 2, 3)).tolist() == pytest.approx(source.std, abs=0.01)


def test_cifar100_uses_its_fine_labels_and_files_in_several_parts(tmp_path):
    for part, label in enumerate((55, 66)):
        path = tmp_path / "cifar100" / f"train-0000{part}-of-00002.parquet"
        write(path, [encoded("RGB", 32, part)], [label], image="img", label="fine_label")
    write(tmp_path / "cifar100" / "test.parquet", [encoded("RGB", 32, 1)], [99], image="img", label="fine_label")
    source = fl.datasets["cifar100"](tmp_path)
    assert source.train.labels().tolist() == [55, 66]
    assert source.train.inputs[0][:, 0, 0, 0].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("images", "columns", "message"),
    [
        ([{"bytes": b"no picture", "path": None}], {}, "row 0 of .* is not an encoded picture"),
        ([encoded("L", 27, 1)], {}, "27x27 pixels, expected 28x28"),
        ([encoded("I;16", 28, 9000)], {}, "row 0 of .* it has more than 8 bits a channel"),
        ([encoded("L", 28, 1)], {"image": "photo"}, r"columns \['photo', 'label'\]"),
    ],
)
def test_damaged_files_are_refused_with_the_place(tmp_path, images, columns, message):
    write_mnist(tmp_path)
    write(tmp_path / "mnist" / "train.parquet", images, [1], **columns)
    with pytest.raises(DataError, match=message):
        fl.datasets["mnist"](tmp_path)


def test_without_a_directory_the_copy_of_the_hub_is_fetched_and_read_in_the_order_of_the_file(tmp_path, monkeypatch):
    write_mnist(tmp_path / "copy")
    asked = []

    def download(repo, *, repo_type, allow_patterns):
        asked.append((repo, repo_type, allow_patterns))
        return str(tmp_path / "copy")

    hub = ModuleType("huggingface_hub")
    hub.snapshot_download = download
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    source = check_dataset(lambda: fl.datasets["mnist"](None))
    assert source.train.inputs[0].shape == (3, 1, 28, 28)
    assert source.train.inputs[0][:, 0, 0, 0].tolist() == [10, 20, 30]
    assert source.train.labels().tolist() == [1, 0, 9]
    assert source.test.labels().tolist() == [3]
    wanted = ["train*.parquet", "*/train*.parquet", "test*.parquet", "*/test*.parquet"]
    assert asked == [("ylecun/mnist", "dataset", wanted)] * 2


def test_digits_are_complete_and_normalized():
    source = check_dataset(lambda: fl.datasets["digits"](None))
    assert (len(source.train), len(source.test)) == (1437, 360)
    assert source.test.labels().unique().tolist() == list(range(10))
    assert_normalized(source)


def test_of_batches_a_tenth_is_for_validation_and_the_same_seed_gives_the_same():
    train, validation = digits_loaders(batch_size=50)
    images, labels = next(iter(train))
    assert (images.shape, images.dtype, labels.dtype) == ((50, 1, 8, 8), torch.float32, torch.int64)
    assert [sum(len(y) for _, y in batches) for batches in (train, validation)] == [1294, 143]
    again, other = digits_loaders(batch_size=50), digits_loaders(batch_size=50, seed=1)
    assert torch.equal(next(iter(again[0]))[0], images)
    assert not torch.equal(next(iter(other[0]))[0], images)


def test_files_are_decoded_once_and_again_where_they_or_the_cache_changed(tmp_path, monkeypatch):
    file, calls = tmp_path / "train.parquet", []
    file.write_bytes(b"one")

    def decode():
        calls.append(None)
        return {"images": torch.arange(6, dtype=torch.uint8).reshape(2, 3), "labels": torch.tensor([4, 5])}

    def read(decoded):
        images = cached_tensors("own", [file], decode)["images"]
        assert images.tolist() == [[0, 1, 2], [3, 4, 5]]
        assert len(calls) == decoded
        return images

    read(1)[0] = 9
    read(1)[0] = 9  # whoever writes to a tensor changes no file
    file.write_bytes(b"another")
    read(2)
    stamp = file.stat().st_mtime_ns + 1_000_000_000
    os.utime(file, ns=(stamp, stamp))
    read(3)
    for entry in (tmp_path / "cache").iterdir():
        entry.write_bytes(b"rubbish")
    read(4)
    monkeypatch.setenv("SPARSEKIT_CACHE", str(file))
    read(5)  # no folder to write to costs time, never the run


def images(channels, side):
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (2, channels, side, side), generator=generator, dtype=torch.uint8)


def test_a_nearly_fitting_grey_image_is_padded_with_black_and_repeated():
    raw = images(1, 28)
    out = ImageTransform(3, (32, 32), (0.25,), (0.5,))(raw)
    assert out.shape == (2, 3, 32, 32)
    assert torch.equal(out[:, 0], out[:, 2])
    assert torch.allclose(out[:, :1, 2:30, 2:30], (raw / 255 - 0.25) / 0.5)
    assert torch.equal(out[:, 0, :2], torch.full((2, 2, 32), -0.5))


def test_no_pixel_is_skipped_where_one_side_alone_shrinks():
    stripes = torch.tensor([255, 0], dtype=torch.uint8).repeat(32).expand(1, 1, 16, 64)
    out = ImageTransform(1, (16, 16), (0.0,), (1.0,))(stripes)
    assert out.sub(0.5).abs().max() < 0.1


@pytest.mark.parametrize(
    ("dtype", "label", "message"),
    [
        (torch.int16, 0, r"must be uint8 \(rows, C, H, W\), got torch.int16"),
        (torch.uint8, 2, "label 2"),
        (torch.uint8, -1, "label -1"),
    ],
)
def test_pictures_of_a_source_are_bytes_with_a_class_each(dtype, label, message):
    pool = fl.TensorData((torch.zeros(2, 1, 4, 4, dtype=dtype),), torch.tensor([1, label]))
    with pytest.raises(DataError, match=message):
        fl.DataSource(name="own", kind="image", train=pool, test=pool, classes=2, mean=(0.5,), std=(0.5,))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [("mnist", 60_000, 10_000, 10), ("cifar10", 50_000, 10_000, 10), ("cifar100", 50_000, 10_000, 100)],
)
def test_the_real_files_are_complete(data_dir, pytestconfig, monkeypatch, name, train, test, classes):
    monkeypatch.setenv("SPARSEKIT_CACHE", str(pytestconfig.cache.mkdir("sparsekit")))
    source = fl.datasets[name](data_dir)
    assert (len(source.train), len(source.test)) == (train, test)
    assert np.bincount(source.test.labels(), minlength=classes).min() >= 80
    assert_normalized(source)


PLAY = "ANNA:\nTo be, or not to be.\n\nBERT:\nI'll go!\n\nANNA:\nGo then.\nAnd go well.\n"


def test_texts_are_cut_into_chunks_with_shifted_targets_and_ids_by_frequency_then_by_letter():
    users = {"u": [list("bacb"), ["e"]], "v": [["x"]], "w": [["b", "zz"]]}
    source = token_source("own", users, vocabulary=20, chunk=3)
    a, b, c, zz = 3, 2, 4, 7  # after padding, 0, and unknown, 1
    assert source.train.inputs[0].tolist() == [[b, a], [b, zz]]
    assert source.train.targets.tolist() == [[a, c], [zz, IGNORED]]
    assert source.owners is not None
    assert source.owners.tolist() == [0, 1]
    assert token_source("own", users, vocabulary=3, chunk=3).train.inputs[0].tolist() == [[2, 1], [2, 1]]


def test_speakers_keep_the_order_of_their_speeches():
    assert speeches(PLAY) == {
        "ANNA": [["to", "be", ",", "or", "not", "to", "be", "."], ["go", "then", ".", "and", "go", "well", "."]],
        "BERT": [["i'll", "go", "!"]],
    }


def test_the_file_of_shakespeare_is_read(tmp_path):
    (tmp_path / "tinyshakespeare").mkdir()
    (tmp_path / "tinyshakespeare" / "input.txt").write_text(PLAY)
    check_dataset(lambda: shakespeare(str(tmp_path)))


def leaf(users):
    return json.dumps({"users": list(users), "num_samples": [len(u["x"]) for u in users.values()], "user_data": users})


USERS = {
    "ann": {
        "x": [[["<BOS>", "hello", "there"], ["you", "<EOS>", "<PAD>"]], [["bye", "now", "<PAD>"]]],
        "y": [{"target_tokens": [["hello", "there", "you"], ["<EOS>", "<PAD>", "<PAD>"]]}, {"target_tokens": [["now"]]}],
    },
    "bob": {"x": [[["good", "morning", "all"]], [["see", "you"]]]},
}


def test_the_chunks_of_every_user_of_reddit_are_read(tmp_path):
    part = tmp_path / "reddit" / "train" / "part.json"
    part.parent.mkdir(parents=True)
    part.write_text(leaf(USERS))
    check_dataset(lambda: reddit(tmp_path))
    assert read_leaf([part]) == {
        "ann": [["<BOS>", "hello", "there"], ["you", "<EOS>"], ["bye", "now"]],
        "bob": [["good", "morning", "all"], ["see", "you"]],
    }


def test_a_folder_without_files_and_a_source_without_examples_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"reddit has no \*.json; LEAF's files of Reddit belong there"):
        reddit(tmp_path)
    none, some = (fl.TensorData((torch.zeros(rows, 3),), torch.zeros(rows, dtype=torch.int64)) for rows in (0, 2))
    for train, test, name in ((none, some, "train"), (some, none, "test")):
        with pytest.raises(DataError, match=f"{name} of 'mine' has no examples; give at least one"):
            fl.DataSource(name="mine", train=train, test=test)


@pytest.mark.parametrize(
    "text", ["{", '{"users": ["a"]}', *(leaf({"a": {"x": [sample]}}) for sample in ("a b", ["a", "b"], [1, 2], [[1, 2]]))]
)
def test_other_layouts_are_refused(tmp_path, text):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match="LEAF's layout"):
        read_leaf([path])
