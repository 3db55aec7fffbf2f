"""What widths should be a multiple of: read from the times of convolutions, kept on disk, and 1 where nothing runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sparsekit.measure import widths
from sparsekit.measure.widths import best_multiple

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SPARSEKIT_CACHE", str(tmp_path / "cache"))
    best_multiple.cache_clear()
    yield
    best_multiple.cache_clear()


def _times(block: int, own: float = 0.0) -> Any:
    """Kernels that compute whole blocks of channels, beside a part that does not depend on them."""
    return lambda all_widths, *_: {width: own + -(-width // block) * block / 64 for width in all_widths}


@pytest.mark.parametrize("block", [1, 4, 8, 16, 32])
@pytest.mark.parametrize("own", [0.0, 0.5])
def test_the_answer_is_the_block_that_kernels_compute(monkeypatch: pytest.MonkeyPatch, block: int, own: float) -> None:
    monkeypatch.setattr(widths, "_measure", _times(block, own))
    assert best_multiple(CPU, torch.float32) == block


def test_what_was_measured_stays_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(widths, "_measure", _times(16))
    assert best_multiple(CPU, torch.float32) == 16
    best_multiple.cache_clear()
    monkeypatch.setattr(widths, "_measure", _times(8))
    assert best_multiple(CPU, torch.float32) == 16
    assert best_multiple(CPU, torch.float64) == 8, "another type is another kernel"


def test_a_measurement_answers_and_leaves_threads_and_random_numbers_alone() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert best_multiple(CPU, torch.float32) in (1, 4, 8, 16, 32)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


def test_a_type_that_convolutions_do_not_know_has_no_multiple() -> None:
    assert best_multiple(CPU, torch.float8_e4m3fn) == 1
