"""`sparsekit list`: every registry, with a line about each name."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sparsekit.cli.main import execute
from sparsekit.deprecations import RemovedIn0_3Warning
from sparsekit_fl import methods
from sparsekit_fl.cli.listing import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_name_has_a_line_about_it(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["list", kind, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) >= 1
    assert all(item["about"] and "not available" not in item["about"] for item in found)
    assert execute(["list", kind]) == 0
    out = capsys.readouterr().out
    assert all(item["name"] in out for item in found)


def test_two_methods_of_one_paper_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["list", "methods", "--json"]) == 0
    about = {item["name"]: item["about"] for item in json.loads(capsys.readouterr().out)}
    assert set(about) == set(methods.registry)
    assert about["fedlps"] != about["fedlps-paper"]


def test_a_broken_plug_in_says_so_and_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(methods.registry._table, "broken", "nowhere_at_all:method")
    assert execute(["list", "methods", "--json"]) == 0
    about = {item["name"]: item["about"] for item in json.loads(capsys.readouterr().out)}
    assert "nowhere_at_all" in about["broken"]
    assert "FedAvg" in about["fedavg"]


def test_an_unknown_kind_gets_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["list", "method"]) == 2
    assert "did you mean 'methods'" in capsys.readouterr().err


def test_criteria_are_listed_by_their_old_name_with_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.warns(RemovedIn0_3Warning, match="sparsekit list='patterns' is deprecated .*; use 'criteria'"):
        assert execute(["list", "patterns", "--json"]) == 0
    names = [item["name"] for item in json.loads(capsys.readouterr().out)]
    assert {"learned", "magnitude", "ordered", "random", "rolling"} <= set(names)
    assert names == sorted(names)


def test_the_note_reaches_the_terminal() -> None:
    done = subprocess.run([sys.executable, "-m", "sparsekit", "list", "patterns"], capture_output=True, text=True, check=True)
    assert "warning: sparsekit list='patterns' is deprecated" in done.stderr
    assert "magnitude" in done.stdout
