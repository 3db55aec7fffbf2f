"""The page ZOO.md says what the zoo is today."""

from __future__ import annotations

import importlib.util

import pytest
import zoo_table

HINT = "python tests/zoo_table.py makes the page again"


def written() -> list[str]:
    return zoo_table.PAGE.read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_the_page_of_the_zoo_is_up_to_date() -> None:
    lines = set(written())
    assert [name for name, row in zoo_table.all_rows().items() if row not in lines] == [], HINT


def test_the_page_lists_no_architecture_that_is_gone() -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("some architectures of the zoo need transformers")
    listed = [line.split(" | ")[0].removeprefix("| ") for line in written() if line.startswith("| ")]
    names = [name for name in listed if name != "architecture"]
    assert sorted(names) == sorted([*zoo_table.zoo.ZOO, *zoo_table.zoo_norms.KEPT]), HINT


def test_the_zoo_has_at_least_sixty_architectures() -> None:
    assert len(zoo_table.zoo.ZOO) >= 60
