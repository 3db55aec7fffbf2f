"""`sparsekit list`: every registry, with a line about each name."""

import json

import pytest

from sparsekit.cli.main import execute
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


def test_a_broken_plug_in_says_so_and_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(methods.registry._table, "broken", "nowhere_at_all:method")
    assert execute(["list", "methods", "--json"]) == 0
    about = {item["name"]: item["about"] for item in json.loads(capsys.readouterr().out)}
    assert "nowhere_at_all" in about["broken"]
    assert "FedAvg" in about["fedavg"]
