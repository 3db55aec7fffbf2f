"""`sparsekit compare`: trials, reuse, and the numbers in table and files."""

import json
import re
import signal
import statistics

import pytest
from commands import ended

from sparsekit.cli.main import execute

pytestmark = pytest.mark.slow

TINY = ["--rounds", "2", "--clients", "4", "--cohort", "2", "--epochs", "1", "--workers", "1"]


def _numbers(out):
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.rglob("result.json")}


def test_methods_times_seeds_with_mean_and_deviation(tmp_path, capsys):
    command = ["compare", "fedavg", "local", "--seeds", "2", "--seed", "5", *TINY, "--out", str(tmp_path)]
    assert execute(command) == 0
    out = capsys.readouterr().out
    assert re.search(r"fedavg +│? *2 ", out), "n of each row"
    assert "±" in out
    before = _numbers(tmp_path)
    assert "<table" in (tmp_path / "report.html").read_text()
    assert execute([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert _numbers(tmp_path) == before, "finished trials are not run again"
    assert report["methods"] == ["fedavg", "local"]
    assert sorted(_numbers(tmp_path)) == [f"{m}-seed{s}/result.json" for m in ("fedavg", "local") for s in (5, 6)]
    trials = [json.loads((tmp_path / f"fedavg-seed{seed}/result.json").read_text()) for seed in (5, 6)]
    found = [trial["final"]["personal"]["accuracy"] for trial in trials]
    summary = report["summary"]["fedavg"]["final.personal.accuracy"]
    assert summary["mean"] == pytest.approx(statistics.fmean(found))
    assert summary["std"] == pytest.approx(statistics.stdev(found))
    trials = [(one["method"], one["seed"]) for one in report["trials"]]
    assert trials == [("fedavg", 5), ("local", 5), ("fedavg", 6), ("local", 6)]

    assert execute([*command[:4], *command[4:], "--lr", "0.01"]) == 2
    assert "config.training.lr: was 0.1, now 0.01" in capsys.readouterr().err


METHODS = """
import os
from dataclasses import dataclass
from sparsekit_fl import Method

@dataclass(frozen=True, kw_only=True)
class Broken(Method):
    note = "It breaks."
    broken: bool = True

    def train(self, client, task):
        if os.path.exists("mended"):
            return super().train(client, task)
        raise RuntimeError("no such luck")

broken = Broken
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    name = f"methods_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(METHODS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_failed_trial_loses_no_other_and_is_tried_again(mine, tmp_path, capsys):
    command = ["compare", f"{mine}:broken", "fedavg", "--seeds", "1", *TINY, "--out", str(tmp_path / "out")]
    assert execute(command) == 2
    captured = capsys.readouterr()
    assert "failed: broken, seed 0: round 1" in captured.out
    assert "RuntimeError: no such luck" in captured.out
    assert "1/2 broken, seed 0: failed" in captured.err
    assert "2/2 fedavg, seed 0: finished" in captured.err

    # The text of the policy is unchanged, so the trial goes on under the same settings.
    (tmp_path / "mended").touch()
    assert execute(command) == 0
    captured = capsys.readouterr()
    assert "1/2 broken, seed 0: finished" in captured.err
    assert "2/2 fedavg, seed 0: finished" in captured.err
    assert "broken: It breaks." in captured.out


def test_each_level_is_a_comparison_and_the_report_shows_all_of_them(tmp_path, capsys):
    for level in ("low", "high"):
        command = ["compare", "fedavg", "local", "--seeds", "1", *TINY, "--heterogeneity", level, "--out", str(tmp_path)]
        assert execute([*command, "--set", "partition.lack_classes=8", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["trials"]) == 2
        assert (tmp_path / f"fedavg-{level}-seed0/result.json").exists()
    assert execute(["report", str(tmp_path), "--json"]) == 0
    titles = [one["title"].rpartition(", ")[2] for one in json.loads(capsys.readouterr().out)]
    assert titles == ["heterogeneity high", "heterogeneity low"]


def test_ctrl_c_keeps_what_is_done_and_says_how_to_continue(tmp_path):
    command = ["compare", "fedavg", "local", *TINY, "--seeds", "1", "--rounds", "400", "--out", str(tmp_path)]
    code, out, err = ended(command, signal.SIGINT, (tmp_path / "fedavg-seed0/rounds.jsonl").exists)
    assert (code, out) == (130, ""), err
    assert "the same command line continues" in err
    assert "Traceback" not in err
    assert (tmp_path / "fedavg-seed0/rounds.jsonl").read_text().count("\n") >= 1
