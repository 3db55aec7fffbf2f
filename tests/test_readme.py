"""The README: its commands exist, its code runs, its links lead somewhere."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from sparsekit.cli.main import execute

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = (ROOT / "docs" / "howto" / "command-line.md").read_text(encoding="utf-8")
INSTALL = (ROOT / "docs" / "howto" / "install.md").read_text(encoding="utf-8")
BASH = re.findall(r"^```bash\n(.*?)^```$", TEXT, re.M | re.S)
PYTHON = re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S)


def test_the_first_two_blocks_set_everything_up_by_themselves() -> None:
    job, tests = (block.strip().splitlines() for block in BASH[:2])
    for lines in (job, tests):
        assert lines[0] == "python3 -m venv .venv"
        assert lines[1] == ". .venv/bin/activate"
        assert lines[2].startswith("pip install -c constraints.txt ")
    assert job[-1] == "sparsekit fedlps"
    assert shlex.split(tests[-1])[0] == "pytest"
    assert not re.search(r"https?://|index-url|find-links", BASH[0] + BASH[1])


def test_the_python_blocks_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(PYTHON) >= 4
    names: dict[str, object] = {"__name__": "readme"}
    for block, code in enumerate(PYTHON):
        module = __import__("types").ModuleType("readme")
        monkeypatch.setitem(__import__("sys").modules, "readme", module)
        exec(compile(code, f"README.md python block {block}", "exec", dont_inherit=True), names)
    assert len(names) > 20


def test_the_table_of_commands_and_their_options_is_that_of_the_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["--help"]) == 0
    names = re.findall(r"^│ (\w[\w-]*)  ", capsys.readouterr().out, re.M)
    assert names
    assert [name for name in names if f"`sparsekit {name}" not in COMMANDS] == []
    for command in set(re.findall(r"^\| `sparsekit ([\w-]+)", COMMANDS, re.M)):
        assert execute([command, "--help"]) == 0
        assert f"sparsekit {command}" in capsys.readouterr().out
    assert execute(["compare", "--help"]) == execute(["fedlps", "--help"]) == 0
    options = set(re.findall(r"`(--[a-z-]+)", COMMANDS)) - {"--help", "--json", "--install-completion", "--show-completion"}
    shown = capsys.readouterr().out
    assert {option for option in options if option not in shown} == set()


def test_every_dependency_has_its_reason_and_is_pinned_for_the_tests() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    for extra, wanted in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        names = {re.split(r"[\s<>=\[!~;]", item)[0] for item in wanted} - {project["name"]}
        assert {name for name in names if name not in INSTALL} == set()
        assert extra == "flower" or names <= pinned, extra


def test_every_link_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []
