"""The run folder: which saved options are those of the run that goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsekit_fl.errors import ResumeError
from sparsekit_fl.server.checkpoint import RunFolder


def test_an_option_that_was_saved_by_its_former_name_is_the_same_option(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.start({"config": {"rounds": 2, "cohort": 3}}, {})
        folder._refuse_changes({"round": 1, "run": {"config": {"rounds": 2, "clients_per_round": 3}}})
        with pytest.raises(ResumeError, match=r"config\.cohort: was 4, now 3"):
            folder._refuse_changes({"round": 1, "run": {"config": {"rounds": 2, "clients_per_round": 4}}})
