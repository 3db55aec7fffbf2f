"""What the command line says when something is not as it should be: advice in place of raw errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sparsekit.cli.main import execute


@pytest.mark.parametrize(
    ("typed", "advice"),
    [
        ("fedavg", "fedavg is a method; type: sparsekit run fedavg"),
        ("fedlsp", "did you mean: sparsekit fedlps"),
        ("fedporx", "did you mean: sparsekit run fedprox"),
        ("unist", "did you mean 'units'?"),
    ],
)
def test_an_unknown_command_is_answered_with_the_right_one(typed: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute([typed]) == 2
    assert advice in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_tune_keeps_its_answer_where_no_picture_can_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = ["tune", "echo score {x}", "--space", "x=0:1", "--metric", r"score (\S+)", "--trials", "2", "--out"]
    assert execute([*line, str(tmp_path / "a"), "--json", "--quiet"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["best"] is not None
    assert "sparsekit-torch[report]" in captured.err
    assert execute([*line, str(tmp_path / "b"), "--quiet"]) == 0
    captured = capsys.readouterr()
    assert "best: echo score" in captured.out
    assert "picture" not in captured.out


def test_units_shows_whole_names_and_what_a_group_ties_at_80_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "tied_" + "".join(filter(str.isalnum, tmp_path.name))
    (tmp_path / f"{name}.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Inner(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.projection_of_the_first_block = nn.Linear(4, 8)\n        self.other = nn.Linear(4, 8)\n"
        "        self.out = nn.Linear(8, 2)\n"
        "    def forward(self, x):\n"
        "        return self.out((self.projection_of_the_first_block(x) + self.other(x)).relu())\n\n\n"
        "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.a_module_with_a_long_name = Inner()\n"
        "    def forward(self, x):\n        return self.a_module_with_a_long_name(x)\n\n\n"
        "def make():\n    return Net(), (torch.zeros(2, 4),)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    assert execute(["units", f"{name}:make"]) == 0
    out = capsys.readouterr().out
    assert "a_module_with_a_long_name.projection_of_the_first_block" in out
    assert execute(["units", f"{name}:make", "--json"]) == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert group["ties"] == [f"a_module_with_a_long_name.{part}" for part in ("projection_of_the_first_block", "other", "out")]
