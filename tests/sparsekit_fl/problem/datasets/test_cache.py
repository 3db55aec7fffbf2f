import os
from pathlib import Path

import numpy as np
import pytest

from sparsekit_fl.problem.datasets.files import cache_directory, cached_arrays


def test_files_are_decoded_once_and_again_where_they_or_the_cache_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKIT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "train.parquet"
    file.write_bytes(b"one")
    calls = []

    def read() -> dict[str, np.ndarray]:
        def decode() -> dict[str, np.ndarray]:
            calls.append(None)
            return {"images": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": np.asarray([4, 5])}

        return cached_arrays("own", [file], decode)

    first, second = read(), read()
    assert len(calls) == 1
    assert second["images"].tolist() == first["images"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert isinstance(second["labels"], np.memmap)

    file.write_bytes(b"another")
    read()
    stamp = file.stat().st_mtime_ns + 1_000_000_000
    os.utime(file, ns=(stamp, stamp))
    read()
    assert len(calls) == 3

    for part in cache_directory().rglob("images.npy"):
        part.write_bytes(b"rubbish")
    assert read()["images"].shape == (2, 3)
    assert len(calls) == 4
