"""Errors of commands about bad input and failing code of a user: the cause, its place, and no traceback."""

import functools
import operator
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from sparsekit.cli.main import execute

BOOM = "'nets.py:boom' failed with RuntimeError: no weights here (nets.py, line 37)"
LINES = {
    "": [
        ("fedavg", "fedavg is a method; type: sparsekit run fedavg"),
        ("fedlsp", "did you mean: sparsekit fedlps"),
        ("unist", "No such command 'unist'; did you mean 'units'?"),
        ("tune x{x} --space x=0:1", "Missing option '--metric'"),
        ("tune '' --space x=0:1 --metric (.)", "is empty"),
        (
            "tune '{x} {y}' --space x=0:1 --metric (.)",
            "has {y}, but no --space defines it; add --space y=LOW:HIGH, or write {{y}}",
        ),
        ("tune '{{x}}' --space x=0:1 --metric (.)", "--space x=… is not in the command; write {x}"),
        ("tune '{trial}' --space trial=0:1 --metric (.)", "the number of the trial"),
        ("tune 'false {x}' --space x=0:1 --trials 1 -q --metric (.)", "error: the only trial has failed: exit code 1"),
    ],
    "units": [
        ("vgg111", "did you mean 'vgg11'"),
        ("nowhere_at_all:Net", "cannot import module"),
        ("nets.py", "'nets.py' is a file; name what to take from it, as in nets.py:make"),
        ("nets.py:plain", "no example input is known"),
        ("nets.py:plain --example-shape 1,9", "fails on the example inputs"),
        ("nets.py:plane --example-shape 1,4", "did you mean 'plain'"),
        ("nets.py:no_units", "can be removed exactly"),
        ("nets.py:needs", "cannot be called without arguments"),
        ("nets.py:wrong", "must return a torch.nn.Module"),
        ("nets.py:boom", BOOM),
        ("broken.py:make", "'broken.py' failed with SyntaxError"),
        ("no.py:make", "the file 'no.py' does not exist"),
        ("needs.py:make", "'needs.py' failed with ModuleNotFoundError: No module named 'no_such_package' (needs.py, line 2)"),
        ("nets.py:make --init nowhere.pt", "--init 'nowhere.pt' does not exist"),
        ("nets.py:make --init weights", "such as weights/last.pt"),
        ("nets.py:make --init bad.pt", "bad.pt cannot be read as weights: it is damaged, or no file of weights"),
    ],
    "prune nets.py:make": [
        ("--budget flops=150%", "(0, 100] %"),
        ("--budget flop=50%", "did you mean 'flops'"),
        ("--budget flops=1", "is the minimum"),
        ("--budget flops=0.0001%", "flops ≤ 0.0001% ("),
        ("--budget params=0.0001%,flops=50%", "params ≤ 0.0001% (0) was requested"),
        ("--budget bytes=0.001% --schedule linear=2", "bytes ≤ 0.001% (0 B) was requested"),
        ("--budget latency_ms=0.0001%", "latency_ms ≤ 0.0001% ("),
    ],
    "prune nets.py:make --budget flops=50%": [
        ("--exclude stem", "selects nothing"),
        ("--exclude '(stem'", "'(stem' is neither a name nor a regular expression: missing )"),
        ("--criterion taylor", "needs data; pass --dataset"),
        ("--criterion taylr", "did you mean 'taylor'"),
        ("--epochs 1", "needs data"),
        ("--schedule linear=x", "as in cubic=3"),
        ("--device gpu", "must name a device"),
        ("--onnx", "--onnx needs --out"),
        ("--reconstruct batchnorm", "--reconstruct needs data"),
        ("--dataset nets.py:empty", "empty"),
        ("--dataset nets.py:once", "read again"),
        ("--dataset nets.py:nan --criterion taylor", "NaN"),
        ("--dataset nets.py:soft --criterion magnitude", "the index of a class for each of (3,) outputs, got targets (3, 3)"),
        ("--dataset imagenet", "unknown data set"),
        ("--dataset nets.py:batches --loss crossentropy", "did you mean 'cross_entropy'"),
        # Code of a user that is called later than at loading.
        ("--allocation by_ratio", "unknown allocation 'by_ratio'; known: by_cost"),
        ("--criterion scored", "unknown criterion 'scored'"),
        ("--dataset nets.py:wide", "the model on a batch of float32 (4, 5, 8, 8) failed with RuntimeError"),
        ("--dataset nets.py:bare", "since the batches have no targets failed with TypeError"),
        ("--dataset nets.py:batches --loss relu", "unknown loss 'relu'; known: binary_cross_entropy"),
        (
            "--dataset nets.py:batches --loss nets.py:strict",
            "the loss failed with AssertionError: ten classes (nets.py, line 66)",
        ),
    ],
    "tune 'echo {x}' --space x=0:1 --trials 1 -q --metric 'm (.)'": [
        ("--space y=0:1", "is not in the command"),
        ("--timeout -1", "--timeout must be a number of seconds above 0"),
        ("--sampler pucbv", "did you mean 'p-ucbv'"),
        ("--sampler nets.py:make", "the sampler nets.py:make failed with TypeError"),
        ("--metric m", "--metric must have one group"),
        ("--metric '(m'", "--metric is not a regular expression: missing )"),
    ],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, nets: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shutil.copy(nets, "nets.py")
    Path("broken.py").write_text("def make(:\n")
    Path("needs.py").write_text("\nimport no_such_package\n")
    Path("bad.pt").write_text("no weights")
    Path("weights").mkdir()
    torch.save({}, "weights/last.pt")


@pytest.mark.parametrize(("line", "wanted"), [(f"{head} {line}", told) for head, rows in LINES.items() for line, told in rows])
def test_a_line_says_what_is_wrong(line: str, wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(shlex.split(line)) == 2
    out, told = capsys.readouterr()
    assert not out or "trial" in told
    plain = " ".join(told.replace("│", " ").split()).replace(str(Path.cwd()) + "/", "")
    assert wanted.lower() in plain.lower()
    assert "Traceback" not in told
    assert "weights_only" not in told, "torch advises to run whatever code a file holds"
    if not told.lstrip().startswith("Usage"):
        assert told.startswith("error: ")
        assert told.count("\n") == 1


def test_a_mistake_of_ours_asks_for_a_report_and_shows_the_traceback_on_demand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparsekit.cli.prune.find_loss", functools.partial(operator.getitem, {}))  # no line of this file
    line = shlex.split("prune nets.py:make --budget flops=50%")
    assert execute(line) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: sparsekit failed with KeyError: 'cross_entropy' (")
    assert "please report it" in told
    monkeypatch.setenv("SPARSEKIT_DEBUG", "1")
    with pytest.raises(KeyError):
        execute(line)
