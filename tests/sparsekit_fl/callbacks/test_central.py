"""A central test set: scored by the server, with a curve that a resumed run goes on with."""

from __future__ import annotations

import json

import pytest

from sparsekit.cli.main import execute
from sparsekit_fl.callbacks.central import CentralTest
from sparsekit_fl.methods import registry
from sparsekit_fl.server.loop import run
from sparsekit_fl.testing import tiny_clients, tiny_config, tiny_problem


def test_the_curve_has_the_scores_of_the_global_model(tmp_path):
    central = CentralTest(tiny_problem(), tiny_clients()[0].data.test, every=1)
    result = run(registry["fedavg"](), tiny_problem(), tiny_clients(), tiny_config(rounds=3), callbacks=[central], out=tmp_path)
    assert [one["round"] for one in central.curve] == [1, 2, 3]
    (mine,) = [one for one in result.final.per_client if one.client_id == 0]
    assert central.curve[-1]["accuracy"] == mine.shared["accuracy"][0] / mine.shared["accuracy"][1]
    assert json.loads((tmp_path / "central.json").read_text()) == central.curve


@pytest.mark.same_bits
def test_it_changes_nothing_of_the_run():
    central = CentralTest(tiny_problem(), tiny_clients()[0].data.test)
    with_it = run(registry["fedavg"](), tiny_problem(), tiny_clients(), tiny_config(rounds=2), callbacks=[central])
    without = run(registry["fedavg"](), tiny_problem(), tiny_clients(), tiny_config(rounds=2))
    assert with_it.final.state_sha256 == without.final.state_sha256
    assert [one["round"] for one in central.curve] == [2]


def test_the_command_line_scores_all_test_examples_together(tmp_path, capsys):
    tiny = ["--rounds", "1", "--clients", "3", "--cohort", "2", "--epochs", "1", "--workers", "1", "--quiet"]
    assert execute(["run", "fedavg", *tiny, "--set", "central_test=true", "--out", str(tmp_path)]) == 0
    assert "global model on the central test set: " in capsys.readouterr().out
    assert "accuracy" in json.loads((tmp_path / "central.json").read_text())[-1]
