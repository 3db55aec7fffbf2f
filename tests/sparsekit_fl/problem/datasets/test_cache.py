import os
from pathlib import Path

import pytest
import torch

from sparsekit_fl.problem.datasets.files import cache_directory, cached_tensors


def test_files_are_decoded_once_and_again_where_they_or_the_cache_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSEKIT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "train.parquet"
    file.write_bytes(b"one")
    calls = []

    def read() -> dict[str, torch.Tensor]:
        def decode() -> dict[str, torch.Tensor]:
            calls.append(None)
            return {"images": torch.arange(6, dtype=torch.uint8).reshape(2, 3), "labels": torch.tensor([4, 5])}

        return cached_tensors("own", [file], decode)

    first, second = read(), read()
    assert len(calls) == 1
    assert second["images"].tolist() == first["images"].tolist() == [[0, 1, 2], [3, 4, 5]]
    second["images"][0] = 9
    assert read()["images"].tolist() == first["images"].tolist(), "whoever writes to a tensor changes no file"
    maps = Path("/proc/self/maps")
    assert not maps.exists() or "own-" in maps.read_text(), "processes share the pages"

    file.write_bytes(b"another")
    read()
    stamp = file.stat().st_mtime_ns + 1_000_000_000
    os.utime(file, ns=(stamp, stamp))
    read()
    assert len(calls) == 3

    for entry in cache_directory().iterdir():
        entry.write_bytes(b"rubbish")
    assert read()["images"].shape == (2, 3)
    assert len(calls) == 4

    monkeypatch.setenv("SPARSEKIT_CACHE", str(file))
    assert read()["images"].tolist() == [[0, 1, 2], [3, 4, 5]], "no folder to write to costs time, never the run"
    assert len(calls) == 5
