"""Numbers as people read them, and results read from files."""

from __future__ import annotations

from pathlib import Path

import pytest
from saved_results import result

from sparsekit.errors import DataError
from sparsekit_fl.report.table import (
    COLUMNS,
    Column,
    bytes_text,
    flops_text,
    read_result,
    result_table,
    seconds_text,
    share_text,
    spread,
    value_of,
)


@pytest.mark.parametrize(
    ("flops", "text"),
    [(0, "0"), (99, "99"), (100, "0.1k"), (5.3e11, "0.53T"), (2.788128e12, "2.79T"), (2.7e16, "27P"), (42e9, "42G")],
)
def test_flops(flops: float, text: str) -> None:
    assert flops_text(flops) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (0.04, "40 ms"),
        (0.0042, "4.2 ms"),
        (119.9, "119.9 s"),
        (125, "2 min 05 s"),
        (3600, "1 h 00 min"),
        (7322, "2 h 02 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text


def test_bytes_and_shares() -> None:
    assert bytes_text(1_234_567_890) == "1,234.6 MB"
    assert (bytes_text(12_345), bytes_text(70), bytes_text(0)) == ("12.3 kB", "70 bytes", "0.0 MB")
    assert share_text(0.98765) == "98.8%"
    assert share_text(None) == "–"
    assert share_text(float("nan")) == "–"


def test_spread_of_none_one_and_two() -> None:
    assert spread([]).mean is None
    assert spread([0.5, None]).mean == 0.5
    assert spread([0.5]).deviation is None
    assert spread([1.0, 3.0]).deviation == pytest.approx(2**0.5)


def test_a_number_that_is_not_there_is_none() -> None:
    assert value_of({"final": {"personal": None}}, COLUMNS[0]) is None
    assert value_of({"final": {"personal": {"accuracy": 0.5}}}, COLUMNS[0]) == 0.5


@pytest.mark.parametrize("text", [None, "", "[]", '{"method": "x"}'])
def test_a_folder_without_a_result_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "result.json").write_text(text)
    with pytest.raises(DataError):
        read_result(tmp_path)


@pytest.mark.parametrize(
    ("unit", "values", "text"),
    [
        ("share", [0.981, 0.991], "98.6 ± 0.7%"),
        ("share", [0.986], "98.6%"),
        ("share", [], "–"),
        ("share", [0.5, None], "50.0% (1 of 2)"),
        ("flops", [0.487e12, 0.493e12], "0.490 ± 0.004T"),
        ("flops", [825.3e12, 830.1e12], "0.828 ± 0.003P"),
        ("flops", [0, 0], "0 ± 0"),
        ("bytes", [1234.5e6, 1234.5e6], "1,234.5 ± 0.0 MB"),
        ("seconds", [0.1, 0.2], "0.15 ± 0.07 s"),
        ("seconds", [0.123], "0.12 s"),
        ("seconds", [50.0, 60.0], "55.0 ± 7.1 s"),
        ("seconds", [3600.0, 3660.0], "1 h 00 min ± 42.4 s"),
        ("seconds", [175.4, 294.6], "3 min 55 s ± 1 min 24 s"),
        ("seconds", [0.004, 0.005], "4.5 ± 0.7 ms"),
        ("bytes", [2000.0, 2100.0], "2.0 ± 0.1 kB"),
    ],
)
def test_mean_and_deviation_share_a_unit(unit: str, values: list[float | None], text: str) -> None:
    assert Column("x", "x", (), unit).spread_text(spread(values)) == text


def test_one_round_is_no_rounds() -> None:
    titles = [str(result_table(result("fedavg", rounds=rounds, accuracies={rounds: 0.5})).title) for rounds in (1, 2)]
    assert "1 round ·" in titles[0]
    assert "2 rounds ·" in titles[1]
