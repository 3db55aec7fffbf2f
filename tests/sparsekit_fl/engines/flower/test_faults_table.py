"""The page of faults is what the tests say."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr", reason="flwr is not installed; pip install 'sparsekit-torch[flower]'")

import fault_table


def test_every_test_that_the_page_names_exists() -> None:
    for row in fault_table.ELSEWHERE:
        path, _, name = row.test.partition("::")
        assert f"def {name}(" in (fault_table.HERE.parents[1] / path).read_text(encoding="utf-8")


def test_the_page_of_faults_lists_what_the_tests_show() -> None:
    written = fault_table.PAGE.read_text(encoding="utf-8")
    assert written == fault_table.page(), "python tests/sparsekit_fl/engines/flower/fault_table.py writes it anew"
