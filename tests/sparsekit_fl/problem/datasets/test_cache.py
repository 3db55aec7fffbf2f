from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from sparsekit_fl.problem.datasets.files import cache_directory, cached_arrays


class Decoder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, np.ndarray]:
        self.calls += 1
        return {"images": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": np.asarray([4, 5])}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPARSEKIT_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "train.parquet"
    path.write_bytes(b"one")
    return path


def test_the_same_files_are_decoded_once(file: Path) -> None:
    decode = Decoder()
    first = cached_arrays("own", [file], decode)
    second = cached_arrays("own", [file], decode)
    assert decode.calls == 1
    assert second["images"].tolist() == first["images"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert isinstance(second["labels"], np.memmap)


def test_a_changed_file_is_decoded_again(file: Path) -> None:
    decode = Decoder()
    cached_arrays("own", [file], decode)
    file.write_bytes(b"another")
    cached_arrays("own", [file], decode)
    stamp = file.stat().st_mtime_ns + 1_000_000_000
    os.utime(file, ns=(stamp, stamp))
    cached_arrays("own", [file], decode)
    assert decode.calls == 3


def test_a_damaged_entry_is_decoded_again(file: Path) -> None:
    decode = Decoder()
    cached_arrays("own", [file], decode)
    for part in cache_directory().rglob("images.npy"):
        part.write_bytes(b"rubbish")
    assert cached_arrays("own", [file], decode)["images"].shape == (2, 3)
    assert decode.calls == 2
