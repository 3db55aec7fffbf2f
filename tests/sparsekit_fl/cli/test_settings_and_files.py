"""`--set`, `--config`, `list method` and `sweep`."""

from __future__ import annotations

import json

import pytest

from sparsekit.cli.main import execute

TINY = ["--rounds", "1", "--clients", "4", "--cohort", "2", "--local-epochs", "1", "--workers", "1", "--quiet"]


def result(arguments, capsys):
    assert execute([*arguments, "--json"]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


def test_an_option_of_the_method_is_set_and_recorded(capsys):
    raw = result(["run", "fedprox", *TINY, "--set", "local.proximal=0.1", "--momentum", "0.9"], capsys)
    assert raw["policies"]["local"] == "ProximalSgd(proximal=0.1, stragglers=0.0)"
    assert raw["config"]["training"]["momentum"] == 0.9


def test_what_a_run_writes_can_be_read_back_and_gives_the_same_bits(tmp_path, capsys):
    first = [
        "run",
        "fedprox",
        *TINY,
        "--set",
        "local.proximal=0.1",
        "--lr",
        "0.05",
        "--seed",
        "3",
        "--out",
        str(tmp_path / "a"),
    ]
    one = result(first, capsys)
    two = result(["run", "--config", str(tmp_path / "a" / "run.toml")], capsys)
    assert one["final"]["state_sha256"] == two["final"]["state_sha256"]
    assert one["config"] == two["config"]


def test_the_command_line_comes_before_the_file(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        'method = "fedprox"\nrounds = 1\nclients = 4\ncohort = 2\nworkers = 1\n'
        "[training]\nlr = 0.5\nlocal-epochs = 1\n[set.local]\nproximal = 0.1\nstragglers = 0.5\n"
    )
    raw = result(["run", "--config", str(file), "--lr", "0.2", "--set", "local.proximal=0.3"], capsys)
    assert raw["config"]["training"]["lr"] == 0.2
    assert raw["policies"]["local"] == "ProximalSgd(proximal=0.3, stragglers=0.5)"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds =", "is not TOML"),
        ("round = 3", "unknown option 'round' in"),
        ('rounds = "three"', "--rounds must be an integer >= 1, got 'three'"),
        ("training = 3", "training in"),
        ("resume = true", "unknown option 'resume'"),
    ],
)
def test_a_wrong_file_is_refused(text, message, tmp_path, capsys):
    (tmp_path / "run.toml").write_text(text)
    assert execute(["run", "fedavg", "--config", str(tmp_path / "run.toml")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_not_there_and_a_missing_method_are_refused(tmp_path, capsys):
    assert execute(["run", "fedavg", "--config", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert execute(["run"]) == 2
    assert "METHOD is missing" in capsys.readouterr().err


def test_a_file_of_another_method_is_refused_where_the_command_is_for_one(tmp_path, capsys):
    (tmp_path / "run.toml").write_text('method = "fedavg"')
    assert execute(["fedlps", "--config", str(tmp_path / "run.toml")]) == 2
    assert "is for method 'fedavg'" in capsys.readouterr().err


def test_list_method_shows_options_defaults_meaning_and_source(capsys):
    assert execute(["list", "method", "fedprox", "--json"]) == 0
    options = {option["path"]: option for option in json.loads(capsys.readouterr().out)["options"]}
    found = options["local.proximal"]
    assert (found["value"], found["allowed"]) == (0.01, "a finite number >= 0")
    assert found["about"].startswith("μ. The paper tunes it per data set")
    assert "Li et al., MLSys 2020" in found["source"]
    assert execute(["list", "method", "fedprox"]) == 0
    assert "local.stragglers" in capsys.readouterr().out


def test_a_comparison_takes_one_method_with_several_settings(capsys):
    options = [*TINY, "--seeds", "1"]
    raw = result(["compare", "fedprox local.proximal=0.1", "fedprox local.proximal=1", *options], capsys)
    assert raw["methods"] == ["fedprox[local.proximal=0.1]", "fedprox[local.proximal=1]"]


class TestSweep:
    @pytest.fixture(autouse=True)
    def _optuna(self):
        pytest.importorskip("optuna", reason="optuna is not installed; pip install 'sparsekit-torch[optuna]'")

    def test_a_sweep_tries_values_goes_on_and_writes_the_best(self, tmp_path, capsys):
        out = tmp_path / "sweep"
        line = ["sweep", "fedprox", *TINY, "--vary", "lr=0.01:1:log", "--vary", "local.proximal=0.1,1", "--out", str(out)]
        first = result([*line, "--trials", "1"], capsys)
        both = result([*line, "--trials", "3", "--jobs", "2"], capsys)
        assert both["trials"][0] == first["trials"][0]
        assert len(both["trials"]) == 3
        best = result(["run", "--config", str(out / "best.toml")], capsys)
        number = both["best"]["trial"]
        kept = json.loads((out / f"trial-{number:04d}" / "result.json").read_text())
        assert best["final"]["state_sha256"] == kept["final"]["state_sha256"]

    def test_a_grid_ends_by_itself(self, capsys):
        line = ["sweep", "fedavg", *TINY, "--vary", "batch_size=10,20", "--sampler", "grid", "--trials", "9"]
        raw = result([*line, "--objective", "validation.loss"], capsys)
        assert sorted(row["values"]["batch_size"] for row in raw["trials"]) == ["10", "20"]
        assert raw["minimize"] is True

    def test_our_bandit_chooses(self, capsys):
        raw = result(["sweep", "fedavg", *TINY, "--vary", "lr=0.01:1:log", "--sampler", "p-ucbv", "--trials", "2"], capsys)
        assert [row["state"] for row in raw["trials"]] == ["complete", "complete"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--vary", "lr=1"], "--vary must be NAME=LOW:HIGH"),
            (["--vary", "lr=1:0.1"], "LOW must be below HIGH"),
            (["--vary", "lr=-1:1"], "--lr must be a finite number >= 0"),
            (["--vary", "lrr=0.1:1"], "did you mean 'lr'"),
            (["--vary", "local.foo=0.1:1"], "no option 'local.foo'"),
            (["--vary", "lr=0.1:1", "--sampler", "grid"], "--sampler grid needs values"),
            (["--vary", "lr=0.1:1", "--sampler", "cma"], "unknown sampler 'cma'"),
            (["--vary", "lr=0.1:1", "--pruner", "x"], "unknown pruner 'x'"),
            (["--vary", "lr=0.1:1", "--objective", "test.accuracy"], "--objective must be validation.METRIC"),
            (["--vary", "lr=0.1:1", "--trials", "0"], "--trials must be an integer >= 1"),
        ],
    )
    def test_what_is_wrong_is_said_before_a_trial_runs(self, arguments, message, capsys):
        assert execute(["sweep", "fedavg", *TINY, *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())


OWN = """
import torch
from torch import nn
import sparsekit_fl as fl

def net():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

def data():
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    split = fl.TensorData((x,), (x[:, 0] > 0).long())
    clients = [fl.Client(id=k, data=fl.ClientData(split, split, split), capability=fl.Capability(ratio=r))
               for k, r in enumerate((1.0, 0.3, 0.7))]
    return fl.Problem(model=net, example_inputs=(torch.zeros(1, 3),)), clients
"""


def test_clients_of_a_factory_keep_their_devices_and_their_model_its_name(tmp_path, monkeypatch, capsys):
    (tmp_path / "ownproblem.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    line = ["run", "heterofl", "--dataset", "ownproblem:data", "--rounds", "1", "--cohort", "3", "--workers", "1"]
    raw = result(line, capsys)
    assert raw["rounds"][0]["ratios"] == {"0": 1.0, "1": 0.3, "2": 0.7}
    assert raw["config"]["experiment"]["model"] == "ownproblem:net"
    drawn = result([*line, "--heterogeneity", "low"], capsys)
    assert set(drawn["rounds"][0]["ratios"].values()) <= {1.0, 0.5}
    kept = result(["run", "heterofl", *TINY, "--heterogeneity", "own"], capsys)
    assert set(kept["rounds"][0]["ratios"].values()) == {1.0}
