"""`sparsekit run`, `fedlps` and `compare`: results, files, trials that are used again, errors and exit codes."""

import json
import re
import shlex
import signal
import statistics

import pytest
from commands import ended
from personal import SMALL, command

from sparsekit.cli.main import execute

TINY = ["--rounds", "2", *SMALL[2:]]


def test_a_run_prints_a_table_and_says_how_to_keep_it(capsys):
    assert execute(["run", "fedavg", *TINY]) == 0
    captured = capsys.readouterr()
    assert "fedavg · cnn on digits · 2 rounds · seed 0" in captured.out
    titles = (
        "personal accuracy",
        "validation accuracy",
        "global accuracy",
        "FLOPs",
        "uplink",
        "wall time",
        "--out DIR",
        "Next: sparsekit compare fedavg",
    )
    assert all(title in captured.out for title in titles)
    assert "which no client deploys" not in " ".join(captured.out.split()), "clients of fedavg deploy the model of the server"
    # Stderr is not a terminal here: a line per evaluation, as in a log of nohup.
    lines = captured.err.splitlines()
    says = r"fedavg round {}/2: accuracy \d+\.\d%, validation accuracy \d+\.\d%, \d\.\d{{3}}G FLOPs, "
    assert len(lines) == 2
    assert all(re.match(says.format(round), line) for round, line in enumerate(lines, 1)), lines
    assert max(map(len, captured.out.splitlines())) <= 100
    assert execute(["run", "local", *TINY, "--quiet"]) == 0
    # Each client trains the whole model, so it costs what FedAvg costs.
    told = " ".join(capsys.readouterr().out.split())
    assert "this run used 100%" in told
    assert "whether federating pays: runs/first/report.html" in told
    assert execute(["run", "fedper", *TINY, "--quiet"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "Global accuracy is of the server's model, which no client deploys" in " ".join(captured.out.split())


def test_json_is_the_result_and_nothing_else(capsys):
    settings = ["--set", "lr_decay=0.9", "--set", "upload=bfloat16"]
    settings += ["--set", "eval_clients=2", "--heterogeneity", "median", "--set", "partition.lack_classes=6"]
    given = ["--seed", "3", "--lr", "0.05", "--batch-size", "8", *settings]
    result = command(["run", "fedavg", *TINY, *given], capsys)
    assert result["seed"] == 3
    config, training = result["config"], result["config"]["training"]
    assert (config["rounds"], config["cohort"], config["experiment"]["dataset"]) == (2, 2, "digits")
    chosen = {"lr_decay": 0.9, "upload": "bfloat16", "eval_clients": 2}
    assert {name: config[name] for name in chosen} == chosen
    assert config["capability_levels"] == [1.0, 0.5, 0.25]
    assert config["experiment"]["partition_options"]["lack_classes"] == 6
    assert (training["lr"], training["batch_size"], training["local_epochs"]) == (0.05, 8, 1)
    assert len(result["final"]["per_client"]) == 4
    # What `tune` reads: of the clients' own validation data, never of test data.
    validation = [one["validation"]["accuracy"] for one in result["final"]["per_client"]]
    assert result["final"]["validation"]["accuracy"] == pytest.approx(sum(validation) / 4)


@pytest.mark.same_bits
def test_a_run_resumes_by_its_folder_alone_and_refuses_all_else(tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    run = ["run", "fedprox", *TINY, "--set", "mu=0.5", "--lr", "0.05", "--seed", "3", *out]
    first = command(run, capsys)
    assert first["config"]["capability_levels"] == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"result.json", "rounds.jsonl", "models"}
    assert json.loads((tmp_path / "run/result.json").read_text())["final"] == first["final"]
    again = command(["run", "--resume", *out], capsys)
    assert again["final"] == first["final"]
    assert (again["method"], again["seed"], again["config"]["training"]["lr"]) == ("fedprox mu=0.5", 3, 0.05)
    assert execute(run) == 2
    assert "--resume" in capsys.readouterr().err
    assert execute(["run", "--resume", *out, "--lr", "0.1"]) == 2
    assert "config.training.lr: was 0.05, now 0.1" in capsys.readouterr().err
    (tmp_path / "run/run.toml").unlink()  # which a run from Python does not write
    assert execute(["run", "--resume", *out]) == 2
    assert "started in Python; resume it there" in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Write a module of a text; its name, which no other test has."""

    def write(text):
        name = f"own_{abs(hash(str(tmp_path)))}"
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        return name

    return write


FACTORIES = """
import torch
from torch import nn
from sparsekit_fl import Client, ClientData, Problem, TensorData

def net():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

def data(seed):
    clients = []
    for id in range(4):
        x = torch.randn(30, 5 if id == 2 else 3, generator=torch.Generator().manual_seed(id))
        split = TensorData((x,), (x[:, 0] > 0).long())
        clients.append(Client(id=id, data=ClientData(split, split, split)))
    return Problem(model=net, example_inputs=(torch.zeros(1, 3),)), clients
"""


def test_clients_that_cannot_train_are_named_in_the_summary_and_the_exit_code_is_3(module, capsys):
    arguments = [
        "run",
        "fedavg",
        "--dataset",
        f"{module(FACTORIES)}:data",
        "--rounds",
        "2",
        "--cohort",
        "4",
        "--workers",
        "1",
        "--quiet",
    ]
    assert execute(arguments) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert "1 of 4 clients that were asked could never train" in text
    assert "client 2: client 2 failed in round 2" in text
    assert "client 2 was not scored" in text
    assert execute([*arguments, "--json"]) == 3
    assert list(json.loads(capsys.readouterr().out)["failed_clients"]) == ["2"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("run fedlbs", "did you mean 'fedlps'"),
        ("run os:getcwd", "must be a subclass of sparsekit_fl.Method"),
        ("fedlps --dataset minst", "did you mean 'mnist'"),
        ("fedlps --preset cifar", "unknown preset"),
        ("fedlps --model vgg111", "did you mean 'vgg11'"),
        ("fedlps --engine proceses", "did you mean 'processes'"),
        ("fedlps --model lstm", "takes data of kind 'tokens'"),
        ("run --resume --out nowhere", "no run to resume in nowhere"),
        ("fedlps --rounds 0", "rounds must be greater than or equal to 1, got 0"),
        ("fedlps --cohort 21", "but the number of clients is 20"),
        ("fedlps --device tpu9", "--device 'tpu9' cannot be used"),
        ("fedlps --partition even", "unknown partition"),
        ("fedlps --heterogeneity much", "heterogeneity must be 'low', 'median', 'high' or 'own', got 'much'"),
        ("fedlps --resume", "--resume needs --out"),
        ("fedlps --data-dir /no/such/folder", "is not a folder"),
        ("fedlps --partition dirichlet --set partition.distinct=true", "'dirichlet' has no option 'distinct'"),
        ("fedlps --set partition.classes_per_client=99", "classes_per_client must be in [1, 10], got 99"),
        (
            "fedlps --set partition.images_per_class=1",
            "must be greater than or equal to 2, got '1'; images_per_class: Examples",
        ),
        (
            "fedlps --partition dirichlet --set partition.alpha=0",
            "partition.alpha must be greater than 0, got '0'; alpha: Conc",
        ),
        ("fedlps --set partition.lack_classes=10", "lack_classes must be in [0, 9], got 10"),
        ("fedlps --set training.momentun=1", "did you mean 'training.momentum'"),
        ("run local --set keep=last", "no option 'keep'"),
        ("fedlps --config nosuch.toml", "--config nosuch.toml cannot be read: No such file"),
        ("compare", "METHODS are missing"),
        ("compare fedavg fedavg", "given twice"),
        ("compare fedavg fedavgg", "did you mean 'fedavg'"),
        ("compare fedavg --callback bset", "did you mean 'best'"),
        ("compare fedavg --engine flower", "--engine flower is for `sparsekit run METHOD`"),
        ("fedlps --engine flower --set ray_address=a:1", "ray_address needs --out DIR, a folder that all machines"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence_with_code_2(line, says, capsys):
    assert execute(shlex.split(line)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert says in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err


def test_an_engine_whose_package_is_absent_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr("sparsekit_fl.cli.flower_app.find_spec", lambda name: None)
    assert execute(["run", "fedavg", "--engine", "flower"]) == 2
    assert '".[flower]"' in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.same_bits
def test_ctrl_c_ends_cleanly_and_the_run_resumes_to_the_same_bits(tmp_path, capsys):
    options = ["run", "fedavg", "--rounds", "40", *SMALL[2:], "--workers", "2", "--eval-every", "40"]
    whole = command(options, capsys)
    out = tmp_path / "run"
    there = (out / "rounds.jsonl").exists
    code, stdout, stderr = ended([*options, "--out", str(out)], signal.SIGINT, there, group=True)
    assert (code, stdout) == (130, ""), stderr
    assert "--resume" in stderr
    assert "Traceback" not in stderr
    again = command([*options, "--out", str(out), "--resume"], capsys)
    assert again["final"] == whole["final"]


def _numbers(out):
    return {str(path.relative_to(out)): path.stat().st_mtime_ns for path in out.rglob("result.json")}


@pytest.mark.slow
def test_methods_times_seeds_with_mean_and_deviation(tmp_path, capsys):
    line = ["compare", "fedavg", "local", "--seeds", "2", "--seed", "5", *TINY, "--out", str(tmp_path)]
    assert execute(line) == 0
    out = capsys.readouterr().out
    assert re.search(r"fedavg +│? *2 ", out), "n of each row"
    assert "±" in out
    before = _numbers(tmp_path)
    assert "<table" in (tmp_path / "report.html").read_text()
    assert execute([*line, "--json"]) == 0
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

    assert execute([*line, "--lr", "0.01"]) == 2
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


@pytest.mark.slow
def test_a_failed_trial_loses_no_other_and_is_tried_again(module, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = ["compare", f"{module(METHODS)}:broken", "fedavg", "--seeds", "1", *TINY, "--out", str(tmp_path / "out")]
    assert execute(line) == 2
    captured = capsys.readouterr()
    assert "failed: broken, seed 0: round 1" in captured.out
    assert "RuntimeError: no such luck" in captured.out
    assert "1/2 broken, seed 0: failed" in captured.err
    assert "2/2 fedavg, seed 0: finished" in captured.err

    # The text of the policy is unchanged, so the trial goes on under the same settings.
    (tmp_path / "mended").touch()
    assert execute(line) == 0
    captured = capsys.readouterr()
    assert "1/2 broken, seed 0: finished" in captured.err
    assert "2/2 fedavg, seed 0: finished" in captured.err
    assert "broken: It breaks." in captured.out


@pytest.mark.slow
def test_each_level_is_a_comparison_and_the_report_shows_all_of_them(tmp_path, capsys):
    for level in ("low", "high"):
        line = ["compare", "fedavg", "local", "--seeds", "1", *TINY, "--heterogeneity", level, "--out", str(tmp_path)]
        assert execute([*line, "--set", "partition.lack_classes=8", "--json"]) == 0
        assert len(json.loads(capsys.readouterr().out)["trials"]) == 2
        assert (tmp_path / f"fedavg-{level}-seed0/result.json").exists()
    assert execute(["report", str(tmp_path), "--json"]) == 0
    titles = [one["title"].rpartition(", ")[2] for one in json.loads(capsys.readouterr().out)]
    assert titles == ["heterogeneity high", "heterogeneity low"]


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_done_and_says_how_to_continue(tmp_path):
    line = ["compare", "fedavg", "local", *TINY, "--seeds", "1", "--rounds", "400", "--out", str(tmp_path)]
    rounds = tmp_path / "fedavg-seed0/rounds.jsonl"
    code, out, err = ended(line, signal.SIGINT, lambda: rounds.exists() and "\n" in rounds.read_text())
    assert (code, out) == (130, ""), err
    assert "the same command line continues" in err
    assert "Traceback" not in err
    assert rounds.read_text().count("\n") >= 1
